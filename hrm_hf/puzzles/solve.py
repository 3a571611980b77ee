"""Solve puzzles from arguments, files or stdin, and run the Sudoku demo."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from ..hub.kinds import PUZZLE_SOLVER, load_config, load_network
from ..io.evaluation import chosen_device
from ..io.usage import UsageError, run_process
from ..resources import resource
from .options import RunDemo, SolveOptions, SolvePuzzles, values_of


if TYPE_CHECKING:
    from .tasks import PuzzleTask


def solve_puzzles(options: SolvePuzzles) -> tuple[list[dict[str, Any]], PuzzleTask]:
    """Solve puzzles with the pipeline "puzzle-solving", and return the results and the task.

    Raises:
        UsageError: If there are several puzzles to plot.
        ModelError: If the model is missing or does not solve puzzles.
        ValueError: If there is no puzzle, or a puzzle is unreadable; the message gives its number.
    """
    load_config(options.model, PUZZLE_SOLVER, adapters=True)
    from transformers import pipeline  # the import takes seconds, so check the model first

    from ..registry import AutoModelForPuzzleSolving

    device = chosen_device(options.device)
    solver = pipeline("puzzle-solving", model=load_network(options.model, AutoModelForPuzzleSolving), device=device)
    items = _gather(options.puzzles, options.file, solver)
    inputs = [solver.read_puzzle(item, f"puzzle {i}: ") for i, item in enumerate(items)]
    if options.plot and len(inputs) != 1:
        raise UsageError(f"out={options.plot}: can plot only one puzzle, but got {len(inputs)}", "--out")
    given = values_of(options, SolveOptions)
    results = solver(inputs, return_trajectory=options.plot is not None, batch_size=options.batch_size, **given)
    if options.plot:
        from .plots import plot_trajectory

        puzzle, result = inputs[0], results[0]
        plot_trajectory(
            puzzle.questions[0], result["trajectory"], solver.fitted(puzzle.questions.shape[1])[1], options.plot,
            confidences=result["confidences"], solution=puzzle.solutions[0],
        )  # fmt: skip
    return results, solver.puzzle_task


def _gather(puzzles: list[str], file: Path | None, solver) -> list[Any]:
    """Collect the puzzles from the arguments, `file` and stdin."""
    from .pipeline import puzzles_of_text, read_puzzle_file

    inputs: list[Any] = []
    for puzzle in [*puzzles, *([] if file is None else [file])]:
        if puzzle == "-":
            inputs += puzzles_of_text(sys.stdin.buffer.read(), solver.puzzle_task, "stdin")
        else:
            rows = read_puzzle_file(puzzle, solver.puzzle_task)
            inputs += [puzzle] if rows is None else rows
    if not inputs:
        raise ValueError("no puzzle given, or stdin is empty; pass PUZZLE arguments, - for stdin, or --file")
    return inputs


def run_demo(options: RunDemo, stream: TextIO | None = None) -> dict[str, Any]:
    """Train, evaluate and use a small Sudoku solver on the CPU, and return a report.

    Args:
        stream: Stream for the output, including that of child processes; standard output if None.

    Returns:
        The folder, the exact accuracy on held-out boards, the exact accuracy of the reloaded model in a new process,
        and whether both are the same. Raise CalledProcessError if a step fails.
    """
    training = resource("training")
    recipe = training / "recipes" / f"sudoku_demo_{options.model}.yaml"
    tell = partial(print, file=stream, flush=True)  # flush before child processes print
    run = partial(run_process, out=stream)
    fields = yaml.safe_load(recipe.read_text())
    folder, data = str(options.out or fields["output_dir"]), fields["data_path"]
    tell(
        f"Training with {recipe.name}; boards are generated first, unless {data} exists. In the progress lines, "
        "'exact' is the share of\ntraining boards that were solved completely."
    )
    flags = ["--output_dir", folder, *_compiler_flags(tell), *shlex.split(options.extra)]
    run(sys.executable, training / "run_puzzle.py", "--recipe", recipe, *flags)
    tool = [sys.executable, "-m", "hrm_hf.cli"]
    rows = ["--max-steps", str(fields["eval_max_steps"])]
    if "max_eval_samples" in fields:
        rows += ["--limit", str(fields["max_eval_samples"])]
    tell("\nA new process loads the checkpoint and repeats the evaluation, with all ACT steps for every board:")
    run(*tool, "eval", "puzzles", folder, data, *rows, "--halt", "fixed", "--out", f"{folder}/eval_fixed")
    results = [json.loads(Path(each, "results.json").read_text()) for each in (folder, f"{folder}/eval_fixed")]
    trained, reloaded = (result["metrics"]["exact_accuracy"] for result in results)
    same = trained == reloaded
    tell(f"exact accuracy after reload: {reloaded:.1%}, {'as before' if same else f'but {trained:.1%} before'}")
    tell("\nThe same evaluation with adaptive halting:")
    run(*tool, "eval", "puzzles", folder, data, *rows, "--min-steps", "6", "--out", f"{folder}/eval_adaptive")
    tell("\nAnother process solves one of the boards with the pipeline:")
    run(*tool, "solve", folder, _held_out_board(data), "--out", f"{folder}/board.gif")
    return {"out": folder, "exact_accuracy": trained, "exact_accuracy_reloaded": reloaded, "same": same}


def _compiler_flags(tell: Callable[[str], None]) -> list[str]:
    """Return the flags that disable torch.compile on a machine without a compiler."""
    import torch  # takes seconds, so `run_demo` prints its first lines before this import

    from ..trainer import validate_compiler

    try:
        validate_compiler(torch.device("cpu"))
    except RuntimeError as error:
        tell(f"Training without torch.compile, which is slower: {error}")
        return ["--torch_compile", "false"]
    return []


def _held_out_board(data: str) -> str:
    from .dataset import load_puzzle_dataset
    from .sudoku_rules import decode

    return decode(load_puzzle_dataset(data, "test")[0]["input_ids"])
