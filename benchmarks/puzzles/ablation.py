"""Ablate the training of puzzle models: compare the exact accuracy of each variant after equal CPU time.

    python -m benchmarks.puzzles.ablation [--quick] [--seconds 900] [--seeds 0 1 2] [--rows 0 1 2] [--out DIR]
    python -m benchmarks.puzzles.ablation --task maze [...]

For Sudoku (boards with 30 to 36 clues), every row of the table adds one change to the row above. For 15 x 15 mazes,
there are two rows: TRM with attention, and the package's model that mixes neighboring cells. A short run first
determines how many steps fit into the CPU time, so schedules (cosine, difficulty) end when the time is spent; the cost
of a step includes late starts, but not compilation. The script writes the results file after each run and skips
finished runs, so an interrupted ablation can be continued. Accuracies are measured after `eval_max_steps` ACT steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.puzzles.build import ensure_built
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.trainer.recipes import ModelArguments, build_config, library_versions

from ..report import machine, make_parser, write_report


class Row(NamedTuple):
    """Row of the table: model_type, preset and config fields, plus training arguments that extend `COMMON`."""

    name: str
    model: dict[str, Any]
    training: dict[str, Any] = {}


TRM = {
    "model_type": "trm_puzzle", "hidden_size": 64, "num_attention_heads": 2, "L_layers": 2, "H_cycles": 2,
    "L_cycles": 2, "mlp_t": True, "pos_encodings": "none", "puzzle_emb_ndim": 0, "halt_max_steps": 4,
}  # fmt: skip
SYMBOLS = {"model_type": "se_rrm_puzzle", "preset": "symbol-mlp", "halt_max_steps": 4}
EQR = {"update_rate": 0.95, "noise_scale": 0.01, "random_initial_states": True}
SYMMETRIES = {"augment": True}
COSINE = {**SYMMETRIES, "lr_min_ratio": 0.1}
HARD_FIRST = {**COSINE, "difficulty": "hard_first"}
LATER = {**HARD_FIRST, "late_starts": 0.2, "late_start_max_steps": 16}
SUDOKU = (
    Row("TRM mlp_t", TRM),
    Row("+ symbol axis", SYMBOLS),
    Row("+ symmetries on the fly", SYMBOLS, SYMMETRIES),
    Row("+ cosine", SYMBOLS, COSINE),
    Row("+ hard first", SYMBOLS, HARD_FIRST),
    Row("+ later iterations", SYMBOLS, LATER),
    Row("+ EqR noise and starts", {**SYMBOLS, **EQR}, LATER),
)
MAZE_TRAINING = {**COSINE, "learning_rate": 2e-3, "eval_max_steps": 32}
MAZE = (
    Row("TRM attention", {**TRM, "mlp_t": False, "pos_encodings": "rope2d", "halt_max_steps": 8}, MAZE_TRAINING),
    Row("neighbours", {"model_type": "se_rrm_puzzle", "preset": "symbol-maze", "halt_max_steps": 8}, MAZE_TRAINING),
)
ROWS = {"sudoku": SUDOKU, "maze": MAZE}
COMMON = {
    "per_device_train_batch_size": 32, "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 40,
    "lr_min_ratio": 1.0, "ema_rate": 0.99, "per_device_eval_batch_size": 25, "eval_halt": "fixed",
    "eval_max_steps": 16,
}  # fmt: skip
BOARDS = {"sudoku": "sudoku --size 9 --clues 30-36", "maze": "maze --height 15 --width 15"}
COUNTS = {"sudoku": (20000, 1000), "maze": (10000, 500)}
QUICK_COUNTS = (200, 50)


class Clock(TrainerCallback):
    """Callback that records the process's CPU seconds at the end of each step."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.process_time())


def main() -> None:
    parser = make_parser(__doc__, quick="check that all rows run: 5 seconds, one seed, few boards")
    parser.add_argument("--seconds", type=float, help="CPU seconds of training per run (default 900; 5 with --quick)")
    parser.add_argument("--seeds", type=int, nargs="+", help="random seeds (default 0 1 2; 0 with --quick)")
    parser.add_argument("--task", choices=list(ROWS), default="sudoku")
    parser.add_argument(
        "--rows", type=int, nargs="+", choices=range(len(SUDOKU)), help="table rows to run, by number; all by default"
    )
    parser.add_argument("--compile", action="store_true", help="compile the training step")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.seconds = args.seconds or (5 if args.quick else 900)
    args.seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    table_rows = ROWS[args.task]
    if args.rows and max(args.rows) >= len(table_rows):
        parser.error(f"--rows {max(args.rows)}: must be in [0, {len(table_rows) - 1}] for --task {args.task}")
    rows = [table_rows[number] for number in args.rows or range(len(table_rows))]
    torch.set_num_threads(args.threads)
    ensure_built(*data_of(args))
    for row in rows:
        config_of(row, args)  # reject unknown fields before hours of training
    report: dict[str, Any] = {"runs": earlier_runs(args)}
    for seed in args.seeds:  # finish all rows of a seed first, so an interrupted ablation has every row
        for row in rows:
            if any((run["row"], run["seed"]) == (row.name, seed) for run in report["runs"]):
                continue
            report["runs"].append(measure(row, seed, args))
            report["table"] = table(report["runs"], table_rows)
            write_report(args, report_name(args), {**report, "machine": machine(), "versions": library_versions()})
    for name, figures in table(report["runs"], table_rows).items():
        print(f"{name:25} exact {figures['mean']:6.1%} +- {figures['spread']:.1%} ({figures['seeds']} seeds)")


def data_of(args: argparse.Namespace) -> tuple[str, str]:
    """Return the data folder, and the arguments of `hrm-hf data` that build it."""
    train, test = QUICK_COUNTS if args.quick else COUNTS[args.task]
    folder = f"runs/data/{args.task}_ablation{'_quick' if args.quick else ''}"
    return folder, f"{BOARDS[args.task]} --num-train {train} --num-test {test}"


def report_name(args: argparse.Namespace) -> str:
    return "puzzle_ablation" if args.task == "sudoku" else f"puzzle_ablation_{args.task}"


def earlier_runs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Load earlier runs from the results file; exit if they were made with different settings."""
    file = args.out / f"{report_name(args)}{'_quick' if args.quick else ''}.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    if other := [run["row"] for run in runs if run["settings"] != settings_of(run, args)]:
        raise SystemExit(
            f"{file} contains {len(other)} runs with different settings ({other[0]!r}); delete it, or use --out"
        )
    return runs


def settings_of(run: dict[str, Any], args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the current settings of the ablation that an earlier run measured, or None if it has been removed."""
    for row in ROWS[args.task]:
        if row.name == run["row"]:
            options = {"seconds": args.seconds, "compile": args.compile, "threads": args.threads}
            return {**options, "data": data_of(args)[1], "model": row.model, "training": {**COMMON, **row.training}}
    return None


def config_of(row: Row, args: argparse.Namespace):
    fields = dict(row.model)
    model = {name: fields.pop(name, None) for name in ("model_type", "preset")}
    arguments = ModelArguments(**model, config_overrides=json.dumps(fields))
    return build_config(arguments, **load_puzzle_info(data_of(args)[0]).config_fields())


def measure(row: Row, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one model; return its accuracy on held-out boards and its cost."""
    cycle = row.model["halt_max_steps"]
    _, times = train(row, seed, args, 3 * cycle)
    step = (times[-1] - times[cycle - 1]) / (2 * cycle)
    steps = max(cycle, round(args.seconds / step))
    trainer, times = train(row, seed, args, steps)
    trainer.evaluate()
    metrics = trainer.last_evaluation
    run = {
        "row": row.name,
        "seed": seed,
        "exact_accuracy": metrics["exact_accuracy"],
        "cell_accuracy": metrics["cell_accuracy"],
        "exact_accuracy_per_step": metrics["exact_accuracy_per_step"],
        "boards": metrics["count"],
        "parameters": trainer.model.num_parameters(),
        "steps": steps,
        "cpu_seconds": times[-1] - times[0],
    }
    print(f"{row.name:25} seed {seed}: exact {run['exact_accuracy']:6.1%}, {steps} steps, "
          f"{run['cpu_seconds']:.0f} CPU s", flush=True)  # fmt: skip
    return {**run, "settings": settings_of(run, args)}


def train(row: Row, seed: int, args: argparse.Namespace, steps: int) -> tuple[PuzzleTrainer, list[float]]:
    """Train a model; return its trainer, and the CPU time after each step."""
    set_seed(seed)
    torch._dynamo.reset()
    model = AutoModelForPuzzleSolving.from_config(config_of(row, args))
    clock, data = Clock(), data_of(args)[0]
    train_rows, test_rows = (PuzzleRows(load_puzzle_dataset(data, split)) for split in ("train", "test"))
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "max_steps": steps, "seed": seed, "use_cpu": True, "report_to": "none",
            "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "torch_compile": args.compile,
            **COMMON, **row.training,
        }  # fmt: skip
        arguments = PuzzleTrainingArguments(**options)
        trainer = PuzzleTrainer(model, arguments, train_dataset=train_rows, eval_dataset=test_rows)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return trainer, clock.times


def table(runs: list[dict[str, Any]], rows: tuple[Row, ...]) -> dict[str, dict[str, float]]:
    """Return the mean and standard deviation of each row's exact accuracy over seeds, in table order."""
    found = {}
    for row in rows:
        exact = [run["exact_accuracy"] for run in runs if run["row"] == row.name]
        if exact:
            spread = statistics.stdev(exact) if len(exact) > 1 else 0.0
            found[row.name] = {"mean": statistics.mean(exact), "spread": spread, "seeds": len(exact)}
    return found


if __name__ == "__main__":
    main()
