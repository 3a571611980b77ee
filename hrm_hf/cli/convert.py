"""`hrm-hf convert`: checkpoints of the original puzzle and language models to ours, and of HRM and TRM back."""

from pathlib import Path
from typing import Any

from ..puzzles.data_options import TEXT, ConvertCheckpoint
from .options import takes
from .report import report, usage_errors


@takes(ConvertCheckpoint)
def convert(options: ConvertCheckpoint, as_json: bool):
    """Convert a checkpoint of the original code to ours; HRM and TRM also back (--to-original).

    Examples: hrm-hf convert hrm HRM/checkpoints/Sudoku/run --out hrm-sudoku;
    hrm-hf convert eqr locuslab/EqR-model/sudoku-extreme/eqr.pth --out eqr-sudoku
    """
    from ..io.model_names import ModelError, find_model, is_below_here
    from ..io.usage import as_usage_errors

    src = options.src
    with usage_errors():
        if options.revision is None and not Path(src).exists() and ("/" not in src or is_below_here(src)):
            raise ModelError(f"{src} does not exist; expected a checkpoint folder, or OWNER/NAME on the Hub")
        from ..hub import hub_address, pull_address

        address = as_usage_errors(hub_address, src, options.revision)
        if address is not None:
            find_model(address.repo_id)
    if address is not None and (options.architecture in TEXT or options.to_original):
        src = pull_address(address)
    report(_converted(options, src), as_json)


def _converted(options: ConvertCheckpoint, src: str | Path) -> dict[str, Any]:
    if options.architecture == "rlm_mhc":
        from ..text.convert_rlm_mhc import convert_rlm_mhc

        return convert_rlm_mhc(Path(src), options.out)
    if options.architecture == "hrm_lm":
        from ..text.convert_hrm_lm import convert_hrm_text1

        return convert_hrm_text1(Path(src), options.out)
    from ..puzzles.convert import convert_original, convert_to_original

    if options.to_original:
        with usage_errors():
            return convert_to_original(src, options.out, options.step or 0, options.architecture)
    names = ("seq_len", "step", "vocab_size", "config", "revision")
    return convert_original(src, options.out, options.architecture, **{name: getattr(options, name) for name in names})
