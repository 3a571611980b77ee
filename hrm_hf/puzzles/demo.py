"""The Sudoku demo: learns from nothing, saves, and solves held-out boards in fresh processes."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path

import yaml

from ..io.usage import UsageError, run_process
from ..resources import resource


print = partial(print, flush=True)  # in order with what the processes print


def run_demo(model: str = "units", extra: str = "") -> bool:
    """Trains, evaluates and uses a small Sudoku solver on the CPU, and tells how it goes.

    Args:
        model: one of `demo_models()`.
        extra: more flags of run_puzzle.py.

    Returns:
        Whether the saved model is as accurate as the trained one.

    Raises:
        UsageError: another model.
        CalledProcessError: a step failed; it has said why.
    """
    training = resource("training")
    recipe = training / "recipes" / f"sudoku_demo_{model}.yaml"
    if not recipe.exists():
        raise UsageError(f"--model {model}: choose one of {', '.join(demo_models())}")
    flags = shlex.split(extra)
    fields = yaml.safe_load(recipe.read_text())
    print(
        f"Training as {recipe.name} says; boards are made first, unless {fields['data_path']} has them. In the lines "
        "of progress,\n'exact' is the share of training boards that were solved entirely.\n"
    )
    import torch  # seconds, in which the lines above can be read

    from ..trainer import validate_compiler

    try:
        validate_compiler(torch.device("cpu"))
    except RuntimeError as error:
        print(f"Training without torch.compile, more slowly: {error}")
        flags += ["--torch_compile", "false"]
    run_process(sys.executable, training / "run_puzzle.py", "--recipe", recipe, *flags)
    folder, data = fields["output_dir"], fields["data_path"]
    tool = [sys.executable, "-m", "hrm_hf.cli"]
    rows = ["--max-steps", str(fields["eval_max_steps"])]
    if "max_eval_samples" in fields:
        rows += ["--limit", str(fields["max_eval_samples"])]
    print("\nA fresh process loads the checkpoint and repeats the evaluation, all ACT steps for every board:")
    run_process(*tool, "eval", "puzzles", folder, data, *rows, "--halt", "fixed", "--out", f"{folder}/eval_fixed")
    trained, reloaded = _exact_accuracy(folder), _exact_accuracy(f"{folder}/eval_fixed")
    same = trained == reloaded
    print(f"exact accuracy after reload: {reloaded:.1%}, {'the same' if same else f'but {trained:.1%} before'}")
    print("\nThe same with adaptive halting:")
    run_process(*tool, "eval", "puzzles", folder, data, *rows, "--min-steps", "6", "--out", f"{folder}/eval_adaptive")
    print("\nAnother process solves one of them through the pipeline:")
    run_process(*tool, "solve", folder, _held_out_board(data), "--plot", f"{folder}/board.gif")
    return same


def demo_models() -> list[str]:
    """Names of the models that a recipe for the demo exists for."""
    start = "sudoku_demo_"
    return sorted(file.stem.removeprefix(start) for file in resource("training/recipes").glob(f"{start}*.yaml"))


def _exact_accuracy(folder: str) -> float:
    return json.loads(Path(folder, "results.json").read_text())["metrics"]["exact_accuracy"]


def _held_out_board(data: str) -> str:
    from .dataset import load_puzzle_dataset
    from .sudoku import decode

    return decode(load_puzzle_dataset(data, "test")[0]["input_ids"])
