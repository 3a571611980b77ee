"""Train puzzle models on hard Sudokus on one GPU, and report their held-out accuracy during training.

    python -m benchmarks.puzzles.gpu DATA [--split test_mixed] [--runs trm eqr units wide] [--steps-scale 1.0]
    python -m benchmarks.puzzles.gpu --quick

DATA is a puzzle data set with a rated, held-out split, for example one built by `hrm-hf data sudoku --clues 22-50
--num-train 100000 --mix RATED.csv.gz --test-share 0.1 --seed 7`. Each run is a compiled `training/run_puzzle.py`
process in bfloat16, with a new symmetry for every row and hard rows first. The runs start together and share the GPU;
with --one-by-one, they run one after another. The report contains the accuracies after 16 ACT steps on the first 500
held-out boards, at eight points during each run. The models are saved in --models for `benchmarks/puzzles/solving.py`.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hrm_hf.puzzles.dataset import save_puzzle_dataset
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


SCRIPT = Path(__file__).parents[2] / "training" / "run_puzzle.py"
EVALUATIONS = 8
PUBLISHED = {"learning_rate": 4e-4, "ema_rate": 0.995, "per_device_train_batch_size": 768}
SYMBOLS = {"learning_rate": 2e-3, "ema_rate": 0.999, "per_device_train_batch_size": 512}
# model_type, preset, config fields, training arguments, steps
RUNS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], int]] = {
    "trm": ("trm_puzzle", "trm-5m-mlp", {"puzzle_emb_ndim": 0}, PUBLISHED, 1500),
    "eqr": ("trm_puzzle", "eqr-sudoku", {}, PUBLISHED, 1400),
    "units": ("se_rrm_puzzle", "symbol-units", {}, SYMBOLS, 13000),
    "wide": ("se_rrm_puzzle", "symbol-units", {"hidden_size": 96, "intermediate_size": 192}, SYMBOLS, 9000),
}
COMMON = {
    "augment": True, "difficulty": "hard_first", "difficulty_ramp": 1.0, "weight_decay": 0.1, "warmup_steps": 150,
    "lr_min_ratio": 0.02, "eval_max_steps": 16, "eval_halt": "fixed", "eval_strategy": "steps",
    "save_strategy": "no", "report_to": "none", "logging_steps": 200, "max_eval_samples": 500,
    "per_device_eval_batch_size": 500, "seed": 0,
}  # fmt: skip
TINY = {"hidden_size": 16, "num_attention_heads": 1, "L_cycles": 1, "H_cycles": 1}


def main() -> None:
    parser = make_parser(__doc__, quick="check that all runs work: tiny models on the CPU, 8 steps, boards of 4 x 4")
    parser.add_argument("data", nargs="?", help="folder of a puzzle data set")
    parser.add_argument("--split", default="test_mixed", help="held-out split to evaluate")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor that multiplies the steps of each run")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--models", type=Path, default=Path("runs/puzzle_gpu"), help="folder for the trained models")
    args = parser.parse_args()
    if args.data is None and not args.quick:
        parser.error("pass DATA, or --quick")
    if not args.quick and not torch.cuda.is_available():
        parser.error("no GPU found; --quick runs on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            splits, info = generated_sudoku(4, num_train=50, num_test=20, seed=0)
            save_puzzle_dataset(splits, info, folder)
            args.data, args.split, args.models = folder, "test", Path(folder) / "models"
        start, running, report = time.time(), {}, {}
        for name in args.runs:
            running[name] = subprocess.Popen([sys.executable, str(SCRIPT), "--recipe", str(recipe(name, args))])
            if args.one_by_one or args.quick:
                running[name].wait()
        while running:
            ended = [name for name, process in running.items() if process.poll() is not None]
            for name in ended:
                if code := running.pop(name).returncode:
                    for process in running.values():
                        process.terminate()
                    raise SystemExit(f"run {name} exited with status {code}")
                report[name] = {"seconds": time.time() - start, **outcome(args.models / name)}
                print(name, report[name]["held_out"][-1], flush=True)
            time.sleep(1)
    together = not (args.one_by_one or args.quick)
    report = {"runs": report, "runs_share_the_gpu": together, "data": args.data, "split": args.split}
    report |= {"machine": machine(), "versions": library_versions()}
    write_report(args, "puzzle_gpu", report)


def recipe(name: str, args: Any) -> Path:
    """Write the recipe of a run and return its path."""
    model_type, preset, fields, training, steps = RUNS[name]
    steps = EVALUATIONS if args.quick else max(EVALUATIONS, round(steps * args.steps_scale))
    fields = {"halt_max_steps": 16, "forward_dtype": "bfloat16", **fields}
    options = {**COMMON, **training, "torch_compile": True, "max_steps": steps, "eval_steps": steps // EVALUATIONS}
    if args.quick:
        fields |= {**TINY, "halt_max_steps": 2, "forward_dtype": None, "grid_shape": [4, 4], "box_shape": [2, 2]}
        options |= {"torch_compile": False, "use_cpu": True, "per_device_train_batch_size": 4, "eval_max_steps": 2}
    options |= {"model_type": model_type, "preset": preset, "config_overrides": fields, "data_path": args.data}
    options |= {"eval_split": args.split, "output_dir": str(args.models / name)}
    file = args.models / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(options, indent=1))
    return file


def outcome(folder: Path) -> dict[str, Any]:
    """Return a run's held-out accuracies during training, its final results and its number of parameters."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    held_out = [
        {"step": entry["step"], "exact_accuracy": entry["eval_exact_accuracy"], "boards": entry["eval_count"]}
        for entry in history
        if "eval_exact_accuracy" in entry
    ]
    results = json.loads((folder / "results.json").read_text())
    return {"held_out": held_out, "results": results["metrics"], "parameters": results["parameters"]}


if __name__ == "__main__":
    main()
