"""Compare how well language models learn multi-step tasks: accuracy by difficulty and number of passes.

    python -m benchmarks.text.reasoning --size 20 --difficulty 8 --beyond none --answers last --steps 3000 \\
        --seeds 0,1,2
    python -m benchmarks.text.reasoning --models llama,hrm_lm_loop+halt_max_steps=8 --set num_attention_heads=4

The models are those in `models.py`, matched to hrm_lm. For each seed, all models train on the same batches in the same
order, generated during training as by `hrm-hf data reasoning`, and are evaluated on the same rows of the splits `test`
and `beyond`. They train for equal steps, or equal FLOPs (`--train_flops`), with AdamW and a cosine schedule.

`--set` changes config fields of hrm_lm, and all other models are matched to it. To train a variant of a model, append
+FIELD=VALUE to its name, as in `models.py`. The script writes the report after every evaluation. If it is killed and
restarted, it continues with the missing (model, seed) pairs; an unfinished pair starts over.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
from transformers import PreTrainedConfig

from hrm_hf import HrmLmConfig
from hrm_hf.registry import has_ability
from hrm_hf.text.options import BuildReasoning
from hrm_hf.text.reasoning.build import ReasoningInfo, describe_task, draw_rows, draw_split
from hrm_hf.text.reasoning.evaluation import SPLITS, evaluate_rows
from hrm_hf.text.reasoning.tasks import TASKS, WORDS, reasoning_tokenizer
from hrm_hf.trainer.recipes import checked_overrides, library_versions

from ..report import interval, machine, make_parser
from .models import (
    PEERS,
    SIZES,
    build,
    count_parameters,
    flops_per_token,
    image_folder,
    peer_config,
    training_options,
)
from .quality import parameter_groups, schedule, train_step


# Settings that must be the same for all runs in a report.
SHARED = ("size", "difficulty", "beyond", "answers", "steps", "train_flops", "batch_size", "test_rows", "weight_decay",
          "clip", "warmup", "dtype")  # fmt: skip
BATCHES = 2**20  # seed that no data set uses, so training batches differ from evaluation rows


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    names = ("task", "size", "difficulty", "beyond", "answers")
    info = describe_task(BuildReasoning(out=args.out, **{name: getattr(args, name) for name in names}))
    info.rows, info.seed = {"test": args.test_rows}, 0
    rows = {split: some for split in SPLITS if (some := draw_split(info, split)) is not None}
    length = max(some["input_ids"].shape[1] for some in rows.values())
    args.block_size = rows["test"]["input_ids"].shape[1]
    report = open_report(args, info)
    names, seeds = args.models.split(","), [int(seed) for seed in args.seeds.split(",")]
    for seed in seeds:  # finish all models of a seed first, so an interrupted study has complete comparisons
        for name in names:
            config = model_config(name, args, length)
            entry = model_entry(report, name, config, args)
            if entry["runs"].get(str(seed), {}).get("finished"):
                continue
            run = entry["runs"][str(seed)] = {}
            model = train_one(name, config, args, info, rows, seed, run, lambda: write(report, args))
            run["last"] = evaluate_rows(model.eval(), rows, settings(model, args), batch_size=256)
            if args.save_models:
                folder = args.save_models / f"{args.task}_{name}_seed{seed}"
                model.save_pretrained(folder)
                reasoning_tokenizer().save_pretrained(folder)
            run["finished"] = True
            report["summary"] = summary(report)
            write(report, args)
    print_table(report)
    plot(report, info, args)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="a tiny hrm_lm and Llama, a few seconds each")
    parser.add_argument("--task", choices=list(TASKS), default="automaton")
    parser.add_argument("--size", type=int, help="question size; like the next three, passed to the data set builder")
    parser.add_argument("--difficulty")
    parser.add_argument("--beyond")
    parser.add_argument("--answers", choices=["all", "last"])
    parser.add_argument("--preset", choices=list(SIZES), default="tiny")
    parser.add_argument("--models", default="hrm_lm,llama,llama_equal_flops", help=f"any of {', '.join(PEERS)}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="config field of hrm_lm to set; repeatable"
    )
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--train_flops", type=float, help="training FLOPs per run, instead of --steps")
    parser.add_argument("--passes", default="1,2,4", help="numbers of passes to evaluate at the end, comma-separated")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--test_rows", type=int, default=200, help="number of test rows per difficulty")
    parser.add_argument("--evaluations", type=int, default=6, help="number of evaluations per run")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")
    parser.add_argument("--warmup", type=float, default=0.05, help="learning-rate warm-up as a fraction of the run")
    parser.add_argument(
        "--halt_warmup", type=float, default=0.5, help="hrm_lm: fraction of the run before halting starts"
    )
    parser.add_argument(
        "--bp_warmup",
        type=float,
        default=0.0,
        help="hrm_lm: fraction of the run over which bp_steps grows from 2 (flat loop: 1) to the config's value",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16 uses autocast")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save_models", type=type(parser.get_default("out")), help="folder for the trained models")
    parser.add_argument("--name", help="name of the report; lm_reasoning_TASK by default")
    parser.add_argument("--restart", action="store_true", help="discard an existing report")
    args = parser.parse_args()
    if args.quick:
        args.size, args.difficulty, args.answers = args.size or 8, args.difficulty or "1-2", "all"
        if args.models == parser.get_default("models"):
            args.models = "hrm_lm,llama"
        args.steps, args.batch_size, args.test_rows, args.restart = 60, 32, 50, True
    return args


# ---- one run ----


def model_config(name: str, args, length: int) -> PreTrainedConfig:
    """Return a model's config with the vocabulary of the tasks, and enough positions for rows of `length` tokens."""
    changes = {"vocab_size": len(WORDS), "max_position_embeddings": length}
    changes |= checked_overrides(HrmLmConfig, ",".join(args.set)) if args.set else {}
    return peer_config(name, args.preset, args.block_size, changes=changes)


def train_one(name: str, config: PreTrainedConfig, args, info: ReasoningInfo, rows: dict, seed: int, run: dict, save):
    """Train one model; at every evaluation, update `run` and call `save`."""
    model = build(config, seed).to(args.device)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95))
    task, choice = info.make_task(), np.array(info.difficulties("train"))
    torch.manual_seed(seed)
    run |= {"learning_rate": args.learning_rate, "curve": []}
    steps, flops, seconds = 0, 0.0, 0.0
    while True:
        share = min(1.0, flops / args.train_flops if args.train_flops else steps / args.steps)
        if share * args.evaluations >= len(run["curve"]) or share == 1.0:
            found = evaluate_rows(model.eval(), rows, batch_size=256)
            model.train()
            point = {"steps": steps, "train_flops": flops, "seconds": seconds}
            point |= {name: value for name, value in found.items() if isinstance(value, float)}
            run["curve"].append(point)
            shares = [(point[f"{split}_exact_accuracy"], point[f"{split}_cell_accuracy"]) for split in rows]
            told = "  ".join(f"{split} {exact:.1%} / {cells:.1%}" for split, (exact, cells) in zip(rows, shares))
            print(f"{config.model_type:10} seed {seed}  step {steps:5}  {flops:.1e} FLOPs  {told}", flush=True)
            save()
        if share == 1.0:
            return model
        start = time.perf_counter()
        # A separate generator, so the model's random numbers do not change the data.
        rng = np.random.default_rng([BATCHES, seed, steps])
        batch = draw_rows(task, choice[rng.integers(0, len(choice), args.batch_size)], rng)
        ids, labels = (torch.from_numpy(batch[name]).to(args.device) for name in ("input_ids", "labels"))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * schedule(share, args.warmup)
        flops += train_step(model, optimizer, ids, share, args, labels=labels, **training_options(name))
        steps, seconds = steps + 1, seconds + time.perf_counter() - start


def settings(model, args) -> list[int | None]:
    """Return the numbers of passes to evaluate: None (the model decides) and, if the number can vary, --passes."""
    numbers = [int(number) for number in args.passes.split(",")] if has_ability(model, "recurrent_depth") else []
    return [None, *numbers]


# ---- the report ----


def open_report(args, info: ReasoningInfo) -> dict:
    """Load the report to continue it, or start one. Raise SystemExit if the existing one has different settings."""
    options = {name: getattr(args, name) for name in SHARED}
    options |= {"size": info.size, "difficulty": list(info.trained), "answers": info.answers}
    options["beyond"] = list(info.beyond) if info.beyond else None
    path = report_path(args)
    if args.restart or not path.is_file():
        about = {"versions": library_versions(), "machine": machine(), "threads": args.threads}
        return {"task": args.task, "settings": options, **about, "models": {}}
    report = json.loads(path.read_text())
    different = {name: (report["settings"].get(name), value) for name, value in options.items()}
    different = {name: values for name, values in different.items() if values[0] != values[1]}
    if different:
        raise SystemExit(f"{path} has different settings (its value, yours): {different}; use --restart or --out")
    return report


def model_entry(report: dict, name: str, config: PreTrainedConfig, args) -> dict:
    """Return a model's entry in the report, adding it if missing. Raise SystemExit if its config differs."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    fields = json.loads(json.dumps(fields))
    fresh = {
        "parameters": count_parameters(config),
        "forward_mflops_per_token": flops_per_token(config, args.block_size, backward=False) / 1e6,
        "config": fields,
        "learning_rate": args.learning_rate,
        "runs": {},
    }
    entry = report["models"].setdefault(name, fresh)
    if (entry["config"], entry["learning_rate"]) != (fields, args.learning_rate):
        raise SystemExit(f"{name!r} has a different config or learning rate in the report; use --restart or --out")
    return entry


def report_path(args):
    return args.out / f"{report_name(args)}.json"


def report_name(args) -> str:
    return f"{args.name or f'lm_reasoning_{args.task}'}{'_quick' if args.quick else ''}"


def write(report: dict, args) -> None:
    """Replace the report atomically."""
    path = report_path(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report) + "\n")  # no indentation, because there are thousands of values
    os.replace(temporary, path)


def finished(entry: dict) -> dict[str, dict]:
    return {seed: run for seed, run in entry["runs"].items() if run.get("finished")}


def summary(report: dict) -> dict:
    """Summarize the finished runs: accuracy by difficulty and passes, and differences from the first model."""
    models = {name: runs for name, entry in report["models"].items() if (runs := finished(entry))}
    first = next(iter(models.values()), {})
    found = {}
    for name, runs in models.items():
        last = [run["last"] for run in runs.values()]
        measures = [measure for measure, value in last[0].items() if isinstance(value, float)]
        found[name] = {measure: interval([one[measure] for one in last]) for measure in measures}
        for table, of in (("by_difficulty", "difficulty"), ("by_step", "steps")):
            found[name][table] = [
                {key: row[key] for key in ("split", of, "passes")}
                | {measure: interval([one[table][place][measure] for one in last]) for measure in row
                   if measure in ("exact_accuracy", "cell_accuracy", "average_steps")}
                for place, row in enumerate(last[0][table])
            ]  # fmt: skip
        shared = [seed for seed in runs if seed in first]
        if runs is not first and shared:
            found[name]["minus_first"] = {
                measure: interval([runs[seed]["last"][measure] - first[seed]["last"][measure] for seed in shared])
                for measure in measures
                if measure.endswith("_accuracy")
            }
    return found


def shown(figure: dict) -> str:
    return f"{figure['mean']:.1%}" + (f" +- {figure['half_width']:.1%}" if "half_width" in figure else "")


def print_table(report: dict) -> None:
    """Print the final accuracy of every model as a Markdown table: mean and interval over seeds."""
    splits = [split for split in SPLITS if any(f"{split}_exact_accuracy" in one for one in report["summary"].values())]
    heads = [f"{split}: {what}" for split in splits for what in ("rows", "cells")]
    print(f"\n| model | parameters | MFLOPs per token | seeds | {' | '.join(heads)} |\n{'|---' * (4 + len(heads))}|")
    for name, found in report["summary"].items():
        entry = report["models"][name]
        figures = [found[f"{split}_{what}_accuracy"] for split in splits for what in ("exact", "cell")]
        print(
            f"| {name} | {entry['parameters']:,} | {entry['forward_mflops_per_token']:.2f} | {figures[0]['seeds']} | "
            f"{' | '.join(map(shown, figures))} |"
        )


def plot(report: dict, info: ReasoningInfo, args) -> None:
    """Plot accuracy during training, by difficulty and by passes: a line per model, with shaded intervals."""
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    from hrm_hf.trainer.plots import MUTED, new_figure, save_figure

    figure, axes = new_figure(1, 3, (14, 4.2))
    training, steps, passes = axes[0]
    spent = "train_flops" if args.train_flops else "steps"
    short = [name.split("+")[0] for name in report["summary"]]
    for model, found in report["summary"].items():
        name = model.split("+")[0]
        name = name if short.count(name) == 1 else model
        runs = [run["curve"] for run in finished(report["models"][model]).values()]
        points = min(map(len, runs))
        cells = [interval([run[point]["test_cell_accuracy"] for run in runs]) for point in range(points)]
        color = _draw(training, [point[spent] for point in runs[0][:points]], cells, name)
        own = [row for row in found["by_step"] if row["passes"] == "own"]
        own = [row for row in own if row["split"] == "test" or row["steps"] > info.trained[1]]
        _draw(steps, [row["steps"] for row in own], [row["cell_accuracy"] for row in own], name, color)
        for split, style in zip(SPLITS, ("-", "--")):
            rows = [row for row in found["by_step"] if row["split"] == split and row["passes"] != "own"]
            last = max((row["steps"] for row in rows), default=None)
            rows = [row for row in rows if row["steps"] == last]
            if rows:
                label = f"{name}, step {last}"
                values = [row["cell_accuracy"] for row in rows]
                _draw(passes, [row["passes"] for row in rows], values, label, color, style)
        if trained := report["models"][model]["config"].get("halt_max_steps"):
            passes.axvline(trained, color=MUTED, linestyle=":")
    training.set(
        xlabel="training FLOPs" if args.train_flops else "steps of training", ylabel="right answers, split test"
    )
    steps.set(xlabel="steps that an answer takes", ylabel="right answers at the end")
    steps.axvspan(0.5, info.trained[1] + 0.5, color=MUTED, alpha=0.2, linewidth=0)
    passes.set(
        xlabel="passes in inference (dotted: in training)", ylabel="right answers of the last step", xscale="log"
    )
    passes.xaxis.set_major_locator(LogLocator(base=2))
    passes.xaxis.set_major_formatter(ScalarFormatter())
    passes.xaxis.set_minor_locator(NullLocator())
    for panel in axes[0]:
        panel.set_ylim(0, 1.02)
        panel.grid(axis="y", color=MUTED, alpha=0.4)
        if panel.lines:
            panel.legend(frameon=False, fontsize=8)
    path = image_folder(args.out) / f"{report_name(args)}.png"
    print(f"plot: {save_figure(figure, path, info.make_task().title)}")


def _draw(axes, places: list, figures: list[dict], label: str, color=None, style: str = "-"):
    means = np.array([one["mean"] for one in figures])
    widths = np.array([one.get("half_width", 0.0) for one in figures])
    (line,) = axes.plot(places, means, style, marker="o", markersize=3, label=label, color=color)
    axes.fill_between(places, means - widths, means + widths, color=line.get_color(), alpha=0.15, linewidth=0)
    return line.get_color()


if __name__ == "__main__":
    main()
