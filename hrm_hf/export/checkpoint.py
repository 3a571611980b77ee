"""Helpers for exporters: load only complete checkpoints, and write output only if it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..hub.kinds import IS_ADAPTER
from ..hub.manifests import MANIFEST, find_corruption
from ..registry import has_ability


def find_file(model: str, name: str) -> str | None:
    """Return the local path of a model's file, or None if it does not exist. Download it from the Hub if needed."""
    return cached_file(
        model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def load_model(model: str, auto_class: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """Load a model in eval mode; `options` are passed to `from_pretrained`.

    Raises:
        ValueError: the checkpoint is corrupted, has missing or unexpected weights, or is an adapter.
    """
    if (Path(model) / MANIFEST).is_file() and (found := find_corruption(model)):
        raise ValueError(f"checkpoint {model} is corrupted: {'; '.join(found)}. Nothing was written")
    if find_file(model, "adapter_config.json") is not None:
        raise ValueError(f"{model} {IS_ADAPTER}")
    try:
        network, info = auto_class.from_pretrained(
            model, use_safetensors=True, output_loading_info=True, **{"dtype": "auto", **options}
        )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"checkpoint {model} is corrupted: {error}. Nothing was written") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(str(name) for name in info[what]):
            raise ValueError(
                f"checkpoint {model} does not match its config.json: {len(names)} {what.replace('_', ' ')} "
                f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}). Nothing was written"
            )
    return network.eval()


def validate_passes(config: PreTrainedConfig, model: str, passes: int | None) -> None:
    """Raise ValueError if a number of passes is given for a model that has a fixed depth."""
    if passes is not None and not has_ability(config, "recurrent_depth"):
        raise ValueError(f"passes={passes}: {model} is a {config.model_type}, which has a fixed depth; omit passes")


@contextmanager
def complete_or_nothing(out: Path, force: bool, example: str = "model.gguf") -> Iterator[Path]:
    """Yield a temporary path next to `out`. Rename the file to `out` on success, and delete it after an error."""
    if out.is_dir():
        raise IsADirectoryError(f"out={out}: is a folder; pass the name of a file, such as {out}/{example}")
    if out.exists() and not force:
        raise FileExistsError(f"out={out}: already exists; choose another name, or pass --force (force=True)")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"unfinished-{out.name}")
    try:
        yield unfinished
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def complete_folder_or_nothing(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. Move its files to `out` on success, and always delete the folder.

    With `force`, files with the same names in `out` are overwritten, and all others are kept.
    """
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out={out}: is a file; pass the name of a folder")
    if not force and out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"out={out}: is not empty; choose another name, or pass --force (force=True)")
    unfinished = out.with_name(f"unfinished-{out.name}")
    if unfinished.exists():  # left behind by a killed export
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        out.mkdir(exist_ok=True)
        for file in unfinished.iterdir():
            os.replace(file, out / file.name)
    finally:
        shutil.rmtree(unfinished)
