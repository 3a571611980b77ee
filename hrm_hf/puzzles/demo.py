"""The Sudoku demo: learns from nothing, saves, and solves held-out boards in fresh processes."""

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import yaml

from ..io.usage import run_process
from ..resources import resource
from .options import RunDemo


def run_demo(options: RunDemo, said: TextIO | None = None) -> dict[str, Any]:
    """Trains, evaluates and uses a small Sudoku solver on the CPU, and tells how it goes.

    Args:
        said: where it and the programs that it starts tell it; standard output if None.

    Returns:
        The folder, the exact accuracy on held-out boards, that of the saved model in a fresh process, and whether they
        are the same.

    Raises:
        CalledProcessError: a step failed; it has said why.
    """
    training = resource("training")
    recipe = training / "recipes" / f"sudoku_demo_{options.model}.yaml"
    tell = partial(print, file=said, flush=True)  # in order with what the processes say
    run = partial(run_process, out=said)
    fields = yaml.safe_load(recipe.read_text())
    folder, data = str(options.out or fields["output_dir"]), fields["data_path"]
    tell(
        f"Training as {recipe.name} says; boards are made first, unless {data} has them. In the lines of progress, "
        "'exact' is the share of\ntraining boards that were solved entirely."
    )
    flags = ["--output_dir", folder, *_compiler_flags(tell), *shlex.split(options.extra)]
    run(sys.executable, training / "run_puzzle.py", "--recipe", recipe, *flags)
    tool = [sys.executable, "-m", "hrm_hf.cli"]
    rows = ["--max-steps", str(fields["eval_max_steps"])]
    if "max_eval_samples" in fields:
        rows += ["--limit", str(fields["max_eval_samples"])]
    tell("\nA fresh process loads the checkpoint and repeats the evaluation, all ACT steps for every board:")
    run(*tool, "eval", "puzzles", folder, data, *rows, "--halt", "fixed", "--out", f"{folder}/eval_fixed")
    trained, reloaded = _exact_accuracy(folder), _exact_accuracy(f"{folder}/eval_fixed")
    same = trained == reloaded
    tell(f"exact accuracy after reload: {reloaded:.1%}, {'the same' if same else f'but {trained:.1%} before'}")
    tell("\nThe same with adaptive halting:")
    run(*tool, "eval", "puzzles", folder, data, *rows, "--min-steps", "6", "--out", f"{folder}/eval_adaptive")
    tell("\nAnother process solves one of them through the pipeline:")
    run(*tool, "solve", folder, _held_out_board(data), "--out", f"{folder}/board.gif")
    return {"out": folder, "exact_accuracy": trained, "exact_accuracy_reloaded": reloaded, "same": same}


def _compiler_flags(tell: Callable[[str], None]) -> list[str]:
    """Flags of a machine without a compiler."""
    import torch  # seconds, in which what was told before can be read

    from ..trainer import validate_compiler

    try:
        validate_compiler(torch.device("cpu"))
    except RuntimeError as error:
        tell(f"Training without torch.compile, more slowly: {error}")
        return ["--torch_compile", "false"]
    return []


def _exact_accuracy(folder: str) -> float:
    return json.loads(Path(folder, "results.json").read_text())["metrics"]["exact_accuracy"]


def _held_out_board(data: str) -> str:
    from .dataset import load_puzzle_dataset
    from .sudoku_rules import decode

    return decode(load_puzzle_dataset(data, "test")[0]["input_ids"])
