"""`hrm-hf convert`: checkpoints of the original HRM and TRM code, to ours and back."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .data import report


class Architecture(str, Enum):
    """Originals that can be converted."""

    hrm = "hrm"
    trm = "trm"


def convert(
    architecture: Annotated[Architecture, typer.Argument(help="Whose checkpoint: HRM's or TRM's.")],
    src: Annotated[
        Path,
        typer.Argument(help="Folder with step_N and all_config.yaml, or the weights file; with --to-original, ours."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    to_original: Annotated[bool, typer.Option("--to-original", help="Write the original's layout from ours.")] = False,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Cells of a puzzle, where neither weights nor data folder tell.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="N of step_N: to read (largest), or to write with --to-original (0).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Convert a checkpoint of the original HRM or TRM code to ours, or back with --to-original.

    Example: hrm-hf convert hrm HRM/checkpoints/Sudoku/run hrm-sudoku
    """
    if not src.exists():
        raise typer.BadParameter(f"{src} does not exist; expected a checkpoint folder", param_hint="SRC")
    if to_original and seq_len is not None:
        raise typer.BadParameter("our checkpoints know it; leave it out with --to-original", param_hint="--seq-len")
    from ..convert.puzzle import convert_original, convert_to_original

    if to_original:
        result = convert_to_original(src, out, step=step or 0, architecture=architecture.value)
    else:
        result = convert_original(src, out, architecture.value, seq_len=seq_len, step=step)
    report(result, as_json)
