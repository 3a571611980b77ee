"""What every `hrm-hf eval` looks at before it works for minutes: paths of model and data, the device, the output.

What a model or a data set holds is checked where it is read.
"""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .solve import check_model, is_no_folder


RESULTS_FILE = "results.json"


class OnBadLine(str, Enum):
    """What a line of JSON Lines does that is none, or no text or record."""

    stop = "stop"
    skip = "skip"


BadLines = Annotated[
    OnBadLine, typer.Option("--on-bad-line", "--on_bad_line", help="skip: leave broken lines of JSON Lines out.")
]


def check_arguments(model: str, out: Path | None, update_card: bool) -> None:
    """Raises BadParameter for a model that is no folder, and for a card or an output that cannot be written."""
    check_model(model)
    if update_card and not Path(model).is_dir():
        raise typer.BadParameter(f"{model} is no local folder; its card cannot be written", param_hint="--update-card")
    if update_card and not os.access(model, os.W_OK):
        raise typer.BadParameter(f"{model} cannot be written, so its card neither", param_hint="--update-card")
    if out is not None:
        check_folder(out)


def check_folder(out: Path) -> None:
    """Raises BadParameter where no folder `out` can be made or written; makes nothing."""
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"{nearest} is a file; expected a folder to write", param_hint="--out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{nearest} cannot be written; choose another folder", param_hint="--out")


def check_data(data: str, what: str) -> None:
    """Raises BadParameter for a path that is no folder."""
    if is_no_folder(data):
        raise typer.BadParameter(f"{data} is no folder; expected a {what} (or OWNER/NAME on the Hub)")


def check_files(files: list[Path] | None, option: str) -> None:
    """Raises BadParameter for a folder where a file is expected."""
    for file in files or []:
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; expected a file of JSON Lines", param_hint=option)


def chosen_device(name: str | None) -> str:
    """The device to work on: `name`, or the best there is.

    Raises:
        BadParameter: this machine, or this build of torch, has no such device.
    """
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
        raise typer.BadParameter(f"{name} is not here; expected {' or '.join(here)}", param_hint="--device")
    return name


def model_config(name: str) -> Any:
    """The config of a whole model; its architecture is for the caller to judge.

    Raises:
        ValueError: no model, or a PEFT adapter, which has no config.
    """
    import hrm_hf  # noqa: F401 - registers the architectures

    from ..export.checkpoint import load_config

    return load_config(name)
