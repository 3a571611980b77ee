"""Options, path checks and results files shared by all evaluations."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_names import is_no_folder
from .options import Options, option
from .usage import UsageError


RESULTS_FILE = "results.json"


@dataclass(kw_only=True)
class EvaluationOptions(Options):
    """Options shared by all `hrm-hf eval` commands that take a model."""

    model: str = option("Checkpoint folder, or a model on the Hub.", argument=True)
    out: Path | None = option("Folder for results.json and evaluation.png.", None)
    device: str | None = option("Device: cpu, cuda, mps, ... [default: the best available device]", None)
    update_card: bool = option("Add the results to the model card, MODEL/README.md.", False)

    def __post_init__(self) -> None:
        """Raise UsageError if the card or the output folder cannot be written."""
        super().__post_init__()
        validate_evaluation(self.model, self.out, self.update_card)


def validate_evaluation(model: str, out: Path | None, update_card: bool) -> None:
    """Raise UsageError if the card or the output folder cannot be written."""
    if update_card and not (Path(model).is_dir() and os.access(model, os.W_OK)):
        raise UsageError(f"{model} is not a writable local folder, so its card cannot be updated", "--update-card")
    if out is not None:
        validate_output(out)


def validate_output(out: Path) -> None:
    """Raise UsageError if the folder `out` cannot be created or written to. This does not create the folder."""
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise UsageError(f"{nearest} is a file; expected a folder", "--out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{nearest} is not writable; choose another folder", "--out")


def validate_data(data: str, what: str) -> None:
    """Raise UsageError unless `data` is a folder or has the form OWNER/NAME."""
    if is_no_folder(data) or not ("/" in data or Path(data).is_dir()):
        raise UsageError(f"{data} is not a folder; pass a {what} (built by hrm-hf data), or OWNER/NAME on the Hub")


def validate_files(files: list[Path] | None, option: str) -> None:
    """Raise UsageError if one of the files is a folder."""
    for file in files or []:
        if file.is_dir():
            raise UsageError(f"{file} is a folder; pass a JSON Lines file", option)


def chosen_device(name: str | None) -> str:
    """Return the device `name`, or the best available device if None. Raise UsageError if it is not available."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    best = accelerator.type if accelerator else "cpu"
    if name is None:
        return best
    here = list(dict.fromkeys(["cpu", best]))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    count = 1 if best == "cpu" else torch.accelerator.device_count()
    if device is None or device.type not in here or (device.index or 0) >= count:
        raise UsageError(f"device={name}: is not available; use {' or '.join(here)}", "--device")
    return name


def write_results(result: dict[str, Any], out: Path) -> dict[str, str]:
    """Create the folder `out`, write results.json to it, and return {"results": path}."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / RESULTS_FILE
    file.write_text(json.dumps(result, indent=1))
    return {"results": str(file)}
