"""`hrm-hf data`: builds puzzle data sets."""

import json

import typer


app = typer.Typer(no_args_is_help=True, help="Build puzzle data sets (folders that datasets.load_dataset reads).")


def report(result: dict, as_json: bool) -> None:
    """Prints a command's result: JSON with --json, else a line per entry."""
    typer.echo(json.dumps(result) if as_json else "\n".join(f"{key}: {value}" for key, value in result.items()))
