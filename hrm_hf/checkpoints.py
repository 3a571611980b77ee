"""Whole checkpoints: a manifest written last, and the check that everything it lists is still there.

A run killed while it saves leaves a folder without a manifest; a disk that lost bytes leaves a file of another size.
Both are recognised before anything is loaded.
"""

import json
import os
from pathlib import Path


MANIFEST = "manifest.json"
WEIGHT_AVERAGE_FILE = "weight_average.safetensors"
RAW_WEIGHTS_FILE = "raw_weights.safetensors"
NONFINITE_FILE = "nonfinite_steps.json"  # how many steps were skipped, and how many of them in a row


def write_manifest(folder: str | Path) -> None:
    """Lists every file of `folder` with its size; the last thing written to a checkpoint."""
    folder = Path(folder)
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(MANIFEST)
    }
    unfinished = folder / f"{MANIFEST}.tmp"
    unfinished.write_text(json.dumps(sizes, indent=1))
    os.replace(unfinished, folder / MANIFEST)


def damage(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint folder, one line per file; empty if it is whole."""
    folder = Path(folder)
    manifest = folder / MANIFEST
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    if not manifest.exists():
        return [f"{MANIFEST} is missing, so the run was stopped while it saved"]
    try:
        sizes = json.loads(manifest.read_text())
    except ValueError as error:
        return [f"{MANIFEST} is broken ({error})"]
    found = []
    for name, size in sizes.items():
        file = folder / name
        if not file.exists():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size:,} bytes, {size:,} expected")
    return found


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    folders = [f for f in Path(output_dir).glob("checkpoint-*") if f.name.rsplit("-", 1)[1].isdigit()]
    return sorted(folders, key=lambda folder: int(folder.name.rsplit("-", 1)[1]))


def resolve_checkpoint(output_dir: str | Path, wanted: str | bool | None) -> str | None:
    """The checkpoint to resume from.

    Args:
        wanted: None or False for a fresh start; True or "last" for the newest; "last-whole" for the newest that is
            whole, or a fresh start where none is, so that one command line starts a run and continues it; or a folder.

    Raises:
        FileNotFoundError: there is no last.
        ValueError: the checkpoint is damaged. The message says how, and names the newest whole one.
    """
    if wanted is None or wanted is False:
        return None
    wanted = "last" if wanted is True or wanted == "True" else str(wanted)
    available = list_checkpoints(output_dir)
    whole = [folder for folder in available if not damage(folder)]
    if wanted == "last-whole":
        return str(whole[-1]) if whole else None
    if wanted == "last" and not available:
        raise FileNotFoundError(f"no checkpoint to resume from in {output_dir}")
    folder = available[-1] if wanted == "last" else Path(wanted)
    found = damage(folder)
    if found:
        mend = (
            f"resume from the newest whole one, {whole[-1]}, with --resume_from_checkpoint last-whole"
            if whole
            else "no whole checkpoint is left; start the run anew"
        )
        raise ValueError(f"checkpoint {folder} is damaged: {'; '.join(found)}. Nothing was loaded; {mend}.")
    return str(folder)
