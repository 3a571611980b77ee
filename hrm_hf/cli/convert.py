"""`hrm-hf convert`: checkpoints of the original HRM and TRM code, to ours and back, and RLM-mHC's."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .report import report


class Architecture(str, Enum):
    """Originals that can be converted."""

    hrm = "hrm"
    trm = "trm"
    rlm_mhc = "rlm_mhc"
    hrm_lm = "hrm_lm"


def convert(
    architecture: Annotated[Architecture, typer.Argument(help="Whose checkpoint.")],
    src: Annotated[
        Path,
        typer.Argument(
            help="Folder with step_N and all_config.yaml (rlm_mhc: model.safetensors and config.yaml; hrm_lm: "
            "pytorch_model.bin and config.json), or the weights file; with --to-original, ours."
        ),
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
    """Convert a checkpoint of the original HRM, TRM or RLM-mHC code to ours; HRM and TRM also back (--to-original).

    Example: hrm-hf convert hrm HRM/checkpoints/Sudoku/run hrm-sudoku
    """
    if not src.exists():
        raise typer.BadParameter(f"{src} does not exist; expected a checkpoint folder", param_hint="SRC")
    if to_original and seq_len is not None:
        raise typer.BadParameter("our checkpoints know it; leave it out with --to-original", param_hint="--seq-len")
    if architecture is Architecture.rlm_mhc:
        if to_original or seq_len is not None or step is not None:
            raise typer.BadParameter("rlm_mhc takes SRC and OUT only; it converts to ours, from one folder of weights")
        from ..text.convert_rlm_mhc import convert_rlm_mhc

        report(convert_rlm_mhc(src, out), as_json)
        return
    if architecture is Architecture.hrm_lm:
        if to_original or seq_len is not None or step is not None:
            raise typer.BadParameter(
                "hrm_lm takes SRC and OUT only; it reads HRMText1 weights as a start for training"
            )
        from ..text.convert_hrm_lm import convert_hrm_text1

        report(convert_hrm_text1(src, out), as_json)
        return
    from ..puzzles.convert import convert_original, convert_to_original

    if to_original:
        result = convert_to_original(src, out, step=step or 0, architecture=architecture.value)
    else:
        result = convert_original(src, out, architecture.value, seq_len=seq_len, step=step)
    report(result, as_json)
