"""`hrm-hf demo`: learn Sudoku from nothing, save, and solve held-out boards in fresh processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    model: Annotated[str, typer.Option(help="Architecture to train: trm or hrm.")] = "trm",
    extra: Annotated[str, typer.Option(help="More flags of run_puzzle.py, e.g. '--max_steps 50'.")] = "",
):
    """Train a small Sudoku solver on the CPU (minutes), then evaluate and use the saved checkpoint.

    Example: hrm-hf demo --model hrm
    """
    training = Path(__file__).parents[2] / "training"
    recipe = training / "recipes" / f"sudoku_demo_{model}.yaml"
    if not training.is_dir():
        raise typer.BadParameter("the demo's script and recipe are in the source checkout: clone it and run make demo")
    if not recipe.exists():
        raise typer.BadParameter(f"--model {model}: choose one of trm, hrm")
    import torch

    from ..trainer import validate_compiler

    flags = extra.split()
    try:
        validate_compiler(torch.device("cpu"))
    except RuntimeError as error:
        typer.echo(f"Training without torch.compile, more slowly: {error}")
        flags += ["--torch_compile", "false"]
    run_command(sys.executable, training / "run_puzzle.py", "--recipe", recipe, *flags)
    import yaml

    fields = yaml.safe_load(recipe.read_text())
    folder, data = fields["output_dir"], fields["data_path"]
    tool = [sys.executable, "-m", "hrm_hf.cli"]
    rows = ["--limit", str(fields["max_eval_rows"]), "--max-steps", str(fields["eval_max_steps"])]
    typer.echo("\nA fresh process loads the checkpoint and repeats the evaluation, all ACT steps for every board:")
    run_command(*tool, "eval", "puzzles", folder, data, *rows, "--halt", "fixed", "--out", f"{folder}/eval_fixed")
    trained, reloaded = _exact_accuracy(folder), _exact_accuracy(f"{folder}/eval_fixed")
    same = trained == reloaded
    typer.echo(f"exact accuracy after reload: {reloaded:.1%}, {'the same' if same else f'but {trained:.1%} before'}")
    typer.echo("\nThe same with adaptive halting:")
    run_command(*tool, "eval", "puzzles", folder, data, *rows, "--min-steps", "6", "--out", f"{folder}/eval_adaptive")
    typer.echo("\nAnother process solves one of them through the pipeline:")
    run_command(*tool, "solve", folder, _held_out_board(data), "--plot", f"{folder}/board.gif")
    if not same:
        raise typer.Exit(1)


def _exact_accuracy(folder: str) -> float:
    return json.loads(Path(folder, "results.json").read_text())["metrics"]["exact_accuracy"]


def _held_out_board(data: str) -> str:
    from ..puzzles.dataset import load_puzzle_dataset
    from ..puzzles.sudoku import decode

    return decode(load_puzzle_dataset(data, "test")[0]["input_ids"])


def run_command(*command) -> None:
    """Runs a command in a process of its own and stops with its exit status if it fails."""
    status = subprocess.run([str(part) for part in command]).returncode
    if status:
        raise typer.Exit(status)
