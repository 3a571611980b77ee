"""Compare hrm_lm, hrm_text, rlm_mhc and Llama at equal training FLOPs, by bits per byte on held-out books.

    python -m benchmarks.text.quality [--preset 1m] [--seeds 0,1,2] [--minutes 10 | --train_flops 3e13] [--tune_lr]
    python -m benchmarks.text.quality --train_bytes 262144 --train_tokens 8e6 --tune_lr     # little text, many epochs
    python -m benchmarks.text.quality --check                      # analytic FLOPs against torch's counter

Every model spends the same training FLOPs on the same bytes in the same order (cheaper models read more of them), with
AdamW and a cosine schedule over its FLOPs. Two Llamas are compared with hrm_lm: `llama` has equal parameters and sees
more tokens; `llama_equal_flops` has equal forward FLOPs per token and four times the blocks. `llama` also serves as
rlm_mhc with mHC off. `flops_per_token` counts the FLOPs; for hrm_lm, it counts the segments that ran. The script
converts `--minutes` to FLOPs once, by timing hrm_lm on this machine.

With `--train_tokens`, every model instead reads the same number of bytes, regardless of cost. With `--train_bytes`,
models train only on the beginning of the training text, and learning rates are tuned on the text that follows.

The script writes the report after every evaluation. If it is killed and restarted, it continues with the missing
(model, seed) pairs; an unfinished pair starts over. Each trained hrm_lm also predicts held-out text byte by byte
through its cache, in every kv_layout.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from hrm_hf.models.segment_plan import SegmentSchedule
from hrm_hf.trainer.recipes import library_versions

from ..report import interval, make_parser
from .models import (
    PEERS,
    SIZES,
    build,
    count_parameters,
    flops_per_token,
    held_out_rows,
    image_folder,
    peer_config,
    text_file,
    training_options,
)


MODELS = "hrm_lm,hrm_lm_m4,hrm_text,llama,llama_equal_flops,rlm_mhc"
LEARNING_RATE = 2e-3
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
LAYOUTS = ("per_segment", "last_segment", "last_visit")
# Settings that must be the same for all runs in a report.
SHARED = (
    "preset", "block_size", "batch_size", "train_file", "valid_file", "eval_bytes", "weight_decay", "clip", "warmup",
    "dtype", "train_tokens", "train_bytes",
)  # fmt: skip


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.check:
        check_flops(args)
        return
    train, valid = (text_file(getattr(args, f"{split}_file"), split, args.quick) for split in ("train", "valid"))
    report = open_report(args)
    tuning = train
    if args.train_bytes is not None:
        train, tuning = train[: args.train_bytes], train[args.train_bytes : args.train_bytes * 21 // 10]
    if "train_flops" not in report and args.train_tokens is None:
        report["train_flops"] = budget(args, train)
    rows = held_out_rows(valid, args.eval_bytes, args.block_size)
    names, seeds = args.models.split(","), [int(seed) for seed in args.seeds.split(",")]
    for name in names:
        config = peer_config(name, args.preset, args.block_size)
        forward = flops_per_token(config, args.block_size, backward=False) / 1e6
        fresh = {"parameters": count_parameters(config), "forward_mflops_per_token": forward, "runs": {}}
        report["models"].setdefault(name, fresh)
        choose_rate(name, args, report, tuning)
    for seed in seeds:  # finish all models of a seed first, so an interrupted study has complete comparisons
        for name in names:
            if report["models"][name]["runs"].get(str(seed), {}).get("finished"):
                continue
            run = report["models"][name]["runs"][str(seed)] = {}
            rate = report["models"][name]["learning_rate"]
            limit = report.get("train_flops", args.train_tokens)
            model = train_one(name, args, train, rows, seed, rate, limit, run, save=lambda: write(report, args))
            if model.config.model_type == "hrm_lm":
                decoded = rows[: 4 if args.quick else 32]
                with autocast(args):
                    run["kv_layouts"] = {"no cache": evaluate(model, decoded, args)}
                    run["kv_layouts"] |= kv_layout_losses(model, decoded)
            if args.save_models:
                model.save_pretrained(args.save_models / f"{name}_seed{seed}")
            run["finished"] = True
            write(report, args)
    write(report, args)
    print_table(report, names)
    plot(report, names, args)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="tiny models, a few seconds each")
    parser.add_argument("--preset", choices=list(SIZES), default="1m")
    parser.add_argument("--models", default=MODELS, help=f"comma-separated: {', '.join(PEERS)}, or NAME+FIELD=VALUE")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--train_flops", type=float, help="training FLOPs per run")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="train for the FLOPs that hrm_lm spends in this many minutes"
    )
    parser.add_argument("--train_tokens", type=float, help="train every model on N bytes (default: with equal FLOPs)")
    parser.add_argument("--train_bytes", type=int, help="use only the first N bytes of the training text")
    parser.add_argument("--train_file")
    parser.add_argument("--valid_file")
    parser.add_argument("--block_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--evaluations", type=int, default=10, help="number of evaluations per run")
    parser.add_argument("--eval_bytes", type=int, default=65536)
    parser.add_argument("--learning_rate", type=float, help=f"learning rate of all models; {LEARNING_RATE} by default")
    parser.add_argument(
        "--tune_lr",
        action="store_true",
        help=f"choose the learning rate from {LEARNING_RATES} by the loss on the end of the training file",
    )
    parser.add_argument(
        "--tuning_share",
        type=float,
        default=0.15,
        help="with --tune_lr: fraction of the budget for each learning rate",
    )
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")
    parser.add_argument("--warmup", type=float, default=0.05, help="learning-rate warm-up as a fraction of the budget")
    parser.add_argument("--halt_warmup", type=float, default=0.5, help="hrm_lm: fraction of training without halting")
    parser.add_argument(
        "--bp_warmup",
        type=float,
        default=0.0,
        help="hrm_lm: fraction of the budget over which bp_steps grows from 2 (flat loop: 1) to the config's value",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16 uses autocast")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save_models", type=Path, help="folder for the trained models")
    parser.add_argument("--name", help="name of the report; lm_quality_PRESET by default")
    parser.add_argument("--restart", action="store_true", help="discard an existing report")
    parser.add_argument("--check", action="store_true", help="compare analytic FLOPs with torch's counter and exit")
    args = parser.parse_args()
    if args.quick:
        args.preset, args.train_flops, args.block_size, args.eval_bytes = "tiny", 3e10, 64, 2048
        args.evaluations, args.restart = 3, True
    return args


def train_one(name, args, train, rows, seed, rate, limit, run, save=lambda: None):
    """Train one model until its budget is spent; at every evaluation, update `run` and call `save`.

    Args:
        limit: training FLOPs, or tokens with --train_tokens.
        train: training ids. rows: held-out ids [N, block_size]. run: dict in the report for this model and seed.
    """
    model = build(peer_config(name, args.preset, args.block_size), seed).to(args.device)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=rate, betas=(0.9, 0.95))
    order = np.random.default_rng(seed)  # a separate generator, so the model's random numbers do not change the data
    torch.manual_seed(seed)
    run |= {"seed": seed, "learning_rate": rate, "curve": []}
    flops, tokens, steps, evaluated, seconds = 0.0, 0, 0, 0, 0.0
    while True:
        share = min(1.0, (flops if args.train_tokens is None else tokens) / limit)
        if share * args.evaluations >= evaluated or share == 1.0:
            evaluated += 1
            point = {"train_flops": flops, "tokens": tokens, "steps": steps, "seconds": seconds}
            point |= evaluate(model, rows, args)
            run["curve"].append(point)
            steps_text = f", {point['avg_segments']:.2f} segments" if "avg_segments" in point else ""
            print(f"{name:18} seed {seed}  {flops:.2e} FLOPs  {tokens:>10,} bytes  ", end="")
            print(f"{point['bits_per_byte']:.4f} bits per byte{steps_text}", flush=True)
            save()
        if share == 1.0:
            return model
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(share, args.warmup)
        flops += train_step(model, optimizer, next_batch(train, order, args), share, args, **training_options(name))
        seconds += time.perf_counter() - start
        tokens, steps = tokens + args.batch_size * args.block_size, steps + 1


def train_step(model, optimizer, ids, share: float, args, depth_warmup: float = 0.0, labels=None) -> float:
    """Train one step and return its FLOPs. Until `share` reaches `depth_warmup`, each token gets one segment.

    `labels` default to the ids.
    """
    config = model.config
    details, inputs = {}, {"input_ids": ids, "labels": ids if labels is None else labels}
    if config.model_type == "hrm_lm":
        growth = 1.0 if args.bp_warmup == 0 else min(1.0, share / args.bp_warmup)
        fewest = 1 if config.flat_loop else 2
        details["bp_steps"] = fewest + round(growth * (config.bp_steps - fewest))
        segments = 1 if share < depth_warmup else None
        inputs["schedule"] = SegmentSchedule(details["bp_steps"], segments, halting=share >= args.halt_warmup)
    with autocast(args):
        output = model(**inputs, use_cache=False)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    if config.model_type == "hrm_lm":
        details["segments"] = 1 if output.q_logits is None else output.q_logits.shape[2]
    return ids.numel() * flops_per_token(config, args.block_size, **details)


def next_batch(train: np.ndarray, order: np.random.Generator, args) -> torch.Tensor:
    """Return token ids, int64 [batch_size, block_size], from random positions in the text."""
    starts = order.integers(0, len(train) - args.block_size, args.batch_size)
    rows = np.stack([train[start : start + args.block_size] for start in starts])
    return torch.from_numpy(rows.astype(np.int64)).to(args.device)


def parameter_groups(model, weight_decay: float) -> list[dict]:
    """Group parameters: matrices get weight decay; gains, biases and the scales of mHC do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def schedule(share: float, warmup: float) -> float:
    """Return the learning-rate factor: linear warm-up, then cosine decay to a tenth."""
    if share < warmup:
        return max(share, 1e-3) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(model, rows: torch.Tensor, args) -> dict[str, float]:
    """Return the bits per byte (except each row's first byte) and, for hrm_lm with M > 1, the mean segment count."""
    model.eval()
    nats, segments, count = 0.0, 0, 0
    for ids in rows.to(args.device).split(16):
        with autocast(args):
            output = model(input_ids=ids, use_cache=False)
        targets = ids[:, 1:]
        nats += torch.nn.functional.cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="sum"
        ).item()
        count += targets.numel()
        if model.config.model_type == "hrm_lm":
            segments += output.halt_steps[:, :-1].sum().item()
    model.train()
    result = {"bits_per_byte": nats / count / math.log(2)}
    if model.config.model_type == "hrm_lm" and model.config.halt_max_steps > 1:
        result["avg_segments"] = segments / count
    return result


@torch.no_grad()
def kv_layout_losses(model, rows: torch.Tensor, chunk: int = 1, layouts=LAYOUTS) -> dict[str, dict[str, float]]:
    """Return the bits per byte of hrm_lm on `rows` [N, T] for each kv_layout, predicting from the cache.

    Each call reads `chunk` tokens and predicts from the cache, as in generation. The exact layout gives the loss of a
    plain forward; the other layouts give the loss of their approximation. The function works for any checkpoint and
    restores its config.
    """
    was_training, own = model.training, model.config.kv_layout
    model.eval()
    rows = rows.to(model.device)
    losses = {}
    try:
        for layout in layouts:
            model.config.kv_layout = layout
            cache, logits, segments = DynamicCache(config=model.config), [], 0
            for ids in rows.split(chunk, dim=1):
                output = model(input_ids=ids, past_key_values=cache, use_cache=True)
                logits.append(output.logits.float())
                segments += output.halt_steps.sum().item()
            logits = torch.cat(logits, dim=1)[:, :-1].flatten(0, 1)
            nats = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
            losses[layout] = {"bits_per_byte": nats / math.log(2), "avg_segments": segments / rows.numel()}
    finally:
        model.config.kv_layout = own
        model.train(was_training)
    for layout in losses:
        change = losses[layout]["bits_per_byte"] / losses[layouts[0]]["bits_per_byte"] - 1
        losses[layout][f"change_from_{layouts[0]}"] = change
    return losses


def budget(args, train) -> float:
    """Return the training FLOPs per run: --train_flops, or else what hrm_lm spends in --minutes on this machine."""
    if args.train_flops is not None:
        return args.train_flops
    model = build(peer_config("hrm_lm", args.preset, args.block_size)).to(args.device)
    optimizer, order = torch.optim.AdamW(model.parameters(), lr=1e-4), np.random.default_rng(0)
    rates = []
    began = time.perf_counter()
    while len(rates) < 20 and time.perf_counter() - began < min(30.0, 60 * args.minutes):
        start = time.perf_counter()
        flops = train_step(model, optimizer, next_batch(train, order, args), 1.0, args)
        rates.append(flops / (time.perf_counter() - start))
    return statistics.median(rates) * 60 * args.minutes


def choose_rate(name: str, args, report: dict, train) -> None:
    """Set the model's learning rate in the report: the option's value, the best of a short search, or the default."""
    entry = report["models"][name]
    if args.learning_rate is not None or not args.tune_lr:
        entry.setdefault("learning_rate", args.learning_rate or LEARNING_RATE)
        return
    held_out = len(train) // 20
    tuning = held_out_rows(train[-held_out:], args.eval_bytes // 2, args.block_size)
    search = entry.setdefault("rate_search", {})
    for rate in LEARNING_RATES:
        if str(rate) not in search:
            run = {}
            limit = args.tuning_share * report.get("train_flops", args.train_tokens)
            train_one(name, args, train[:-held_out], tuning, 0, rate, limit, run)
            search[str(rate)] = run["curve"][-1]["bits_per_byte"]
            write(report, args)
    entry["learning_rate"] = float(min(search, key=search.get))


def open_report(args) -> dict:
    """Load the report to continue, or start a new one. Raise SystemExit if a report has different settings."""
    settings = {name: getattr(args, name) for name in SHARED}
    path = report_path(args)
    if args.restart or not path.is_file():
        return {"settings": settings, "threads": args.threads, "versions": library_versions(), "models": {}}
    report = json.loads(path.read_text())
    different = {name: (report["settings"].get(name), value) for name, value in settings.items()}
    different = {name: values for name, values in different.items() if values[0] != values[1]}
    if args.train_flops not in (None, report.get("train_flops")):
        different["train_flops"] = (report.get("train_flops"), args.train_flops)
    if different:
        raise SystemExit(f"{path} has different settings (its value, yours): {different}; use --restart or --out")
    return report


def report_path(args) -> Path:
    return args.out / f"{report_name(args)}.json"


def report_name(args) -> str:
    return f"{args.name or f'lm_quality_{args.preset}'}{'_quick' if args.quick else ''}"


def write(report: dict, args) -> None:
    """Update the summary and replace the report atomically."""
    report["summary"] = summary(report)
    path = report_path(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report, indent=1))
    os.replace(temporary, path)


def summary(report: dict) -> dict[str, dict]:
    """Return each model's final bits per byte over seeds, and the paired differences from the first model."""
    last = {
        name: {seed: run["curve"][-1]["bits_per_byte"] for seed, run in entry["runs"].items() if run.get("finished")}
        for name, entry in report["models"].items()
    }
    first, found = next(iter(last.values()), {}), {}
    for name, bits in last.items():
        if not bits:
            continue
        found[name] = {"bits_per_byte": interval(list(bits.values()))}
        pairs = [(bits[seed], first[seed]) for seed in bits if seed in first]
        if pairs and bits is not first:
            found[name]["minus_first"] = interval([own - other for own, other in pairs])
            found[name]["share_of_first"] = interval([own / other - 1 for own, other in pairs])
    return found


def print_table(report: dict, names: list[str]) -> None:
    """Print the final results of every model, averaged over seeds."""
    tokens = report["settings"]["train_tokens"]
    spent = f"{report['train_flops']:.2e} training FLOPs" if tokens is None else f"{tokens:.2e} bytes"
    print(f"\n{spent} each; bits per byte on held-out text, mean and 95 % interval over seeds")
    heads = f"{'bits per byte':>24} {'less the first, paired':>24} {'segments':>8}"
    print(f"{'':18} {'parameters':>11} {'MFLOP/token':>11} {'bytes read':>11} {heads}")
    for name in names:
        entry = report["models"][name]
        runs = [run for run in entry["runs"].values() if run.get("finished")]
        last = [run["curve"][-1] for run in runs]
        found = report["summary"][name]
        shown, less = (
            ""
            if figure is None
            else f"{figure['mean']:.4f}" + (f" +- {figure['half_width']:.4f}" if len(last) > 1 else "")
            for figure in (found["bits_per_byte"], found.get("minus_first"))
        )
        segments = f"{statistics.mean(p['avg_segments'] for p in last):8.2f}" if "avg_segments" in last[0] else ""
        print(
            f"{name:18} {entry['parameters']:11,} {entry['forward_mflops_per_token']:11.2f} {last[0]['tokens']:11,} "
            f"{shown:>24} {less:>24} {segments}"
        )
        for layout, row in runs[0].get("kv_layouts", {}).items():
            change = f" ({row['change_from_per_segment']:+.3%})" if layout in LAYOUTS else ""
            print(f"    decoded, {layout:14} {row['bits_per_byte']:.4f}{change}")


def plot(report: dict, names: list[str], args) -> None:
    """Plot bits per byte against training FLOPs: each model's mean over seeds, with the range shaded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in names:
        runs = [run["curve"][1:] for run in report["models"][name]["runs"].values() if run.get("finished")]
        points = min(len(run) for run in runs)
        flops = np.mean([[point["train_flops"] for point in run[:points]] for run in runs], axis=0)
        bits = np.array([[point["bits_per_byte"] for point in run[:points]] for run in runs])
        (line,) = axes.plot(flops, bits.mean(axis=0), marker="o", markersize=3, label=name)
        axes.fill_between(flops, bits.min(axis=0), bits.max(axis=0), color=line.get_color(), alpha=0.15)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="bits per byte, held-out text")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path = image_folder(args.out) / f"{report_name(args)}.png"
    figure.savefig(path, dpi=130)
    print(f"plot: {path}")


def check_flops(args) -> None:
    """Print every model's training FLOPs per step with unfused attention, from our formula and as counted by torch."""
    print(f"{'':18} {'analytic':>12} {'counted':>12} {'ratio':>8}")
    for name in args.models.split(","):
        analytic, counted = measured_flops(peer_config(name, args.preset, args.block_size), args.block_size)
        print(f"{name:18} {analytic:12.4e} {counted:12.4e} {analytic / counted:8.4f}")


def measured_flops(config, block_size: int, rows: int = 1, backward: bool = True) -> tuple[float, float]:
    """Return the FLOPs of one step on random rows, from `flops_per_token` and from torch's counter."""
    model = build(config, attn_implementation="eager")
    ids = torch.randint(8, config.vocab_size, (rows, block_size))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if backward:
            loss.backward()
    return ids.numel() * flops_per_token(config, block_size, backward=backward), counter.get_total_flops()


def autocast(args):
    """Return the context manager for a forward pass: bfloat16 autocast, or none for float32."""
    enabled = args.dtype == "bfloat16"
    return torch.autocast(args.device, torch.bfloat16) if enabled else contextlib.nullcontext()


if __name__ == "__main__":
    main()
