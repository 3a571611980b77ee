"""`hrm-hf convert`: checkpoints of the original puzzle and language models to ours, and of HRM and TRM back."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .report import AsJson, FormerOut, output, report, usage_errors


Architecture = Literal["hrm", "trm", "eqr", "se_rrm", "rlm_mhc", "hrm_lm"]  # originals that can be converted
TEXT = {  # language models, and what their conversion is
    "rlm_mhc": "it converts to ours, from one folder of weights",
    "hrm_lm": "it reads HRMText1 weights as a start for training",
}
WITH_WAY_BACK = ("hrm", "trm")


def convert(
    architecture: Annotated[Architecture, typer.Argument(help="Whose checkpoint.")],
    src: Annotated[
        str,
        typer.Argument(
            help="Folder with step_N and all_config.yaml (rlm_mhc: model.safetensors and config.yaml; hrm_lm: "
            "pytorch_model.bin and config.json), or the weights file; or the same on the Hub: OWNER/NAME, "
            "OWNER/NAME/FILE, or its address. With --to-original, ours."
        ),
    ],
    former_out: FormerOut = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write (required).")] = None,
    to_original: Annotated[bool, typer.Option("--to-original", help="Write the original's layout from ours.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The run's configuration where none lies beside the weights; or a preset of ours."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or sha on the Hub. [default: main]")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Cells of a puzzle, where neither weights nor data folder tell.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens, padding and empty included, where nothing tells (se_rrm).")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="N of step_N: to read (largest), or to write with --to-original (0).")
    ] = None,
    as_json: AsJson = False,
):
    """Convert a checkpoint of the original code to ours; HRM and TRM also back (--to-original).

    Examples: hrm-hf convert hrm HRM/checkpoints/Sudoku/run --out hrm-sudoku;
    hrm-hf convert eqr locuslab/EqR-model/sudoku-extreme/eqr.pth --out eqr-sudoku
    """
    out = output(out, former_out)
    options = {"--seq-len": seq_len, "--vocab-size": vocab_size, "--config": config}
    given = [name for name, value in options.items() if value is not None]
    if to_original and given:
        raise typer.BadParameter("our checkpoints know it; leave it out with --to-original", param_hint=given[0])
    if architecture in TEXT and (to_original or given or step is not None):
        raise typer.BadParameter(f"{architecture} takes SRC and --out only; {TEXT[architecture]}")
    if to_original and architecture not in WITH_WAY_BACK:
        raise typer.BadParameter(
            f"there is no way back to {architecture}, only to {' and '.join(WITH_WAY_BACK)}",
            param_hint="--to-original",
        )
    from ..io.model_names import ModelError, find_model, is_below_here
    from ..io.usage import as_usage_errors

    with usage_errors():
        if revision is None and not Path(src).exists() and ("/" not in src or is_below_here(src)):
            raise ModelError(f"{src} does not exist; expected a checkpoint folder, or OWNER/NAME on the Hub")
        from ..hub import hub_address, pull_address

        address = as_usage_errors(hub_address, src, revision)
        if address is not None:
            find_model(address.repo_id)
    if architecture in TEXT or to_original:
        src = Path(src) if address is None else pull_address(address)
    if architecture == "rlm_mhc":
        from ..text.convert_rlm_mhc import convert_rlm_mhc

        result = convert_rlm_mhc(src, out)
    elif architecture == "hrm_lm":
        from ..text.convert_hrm_lm import convert_hrm_text1

        result = convert_hrm_text1(src, out)
    elif to_original:
        from ..puzzles.convert import convert_to_original

        with usage_errors():
            result = convert_to_original(src, out, step=step or 0, architecture=architecture)
    else:
        from ..puzzles.convert import convert_original

        sizes = {"seq_len": seq_len, "vocab_size": vocab_size}
        result = convert_original(src, out, architecture, step=step, config=config, revision=revision, **sizes)
    report(result, as_json)
