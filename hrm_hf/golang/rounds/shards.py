"""A long job over many items, in shards: what is whole stays, and the next run goes on behind it."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...io.complete_files import write_text
from ...io.usage import UsageError
from ..data.records import read_records, write_records


OPTIONS, REPORT = "options.json", "report.json"
Made = tuple[list[dict[str, Any]], Counter]


def write_shards(
    out: Path,
    options: dict[str, Any],
    items: Sequence[Any],
    make: Callable[[Sequence[Any]], Made],
    *,
    seed: int = 0,
    size: int = 64,
    what: str = "shards",
) -> dict[str, Any]:
    """Makes records of items, `size` of them at a time, each shard with a seed of its own.

    A shard is two files, records and counts; the second is written last and says that the first is whole. So a run
    that was stopped and goes on leaves what an uninterrupted one does.

    Args:
        out: folder of the shards, of their options and of a report.
        options: what the records depend on.
        make: the records of a shard's items, and counts of what was made and left out.

    Returns:
        the counts of all shards, and the folder.

    Raises:
        UsageError: the folder was begun with other options.
    """
    from tqdm.auto import tqdm

    same_options(out, options)
    counts: Counter = Counter()
    for number, start in enumerate(tqdm(range(0, len(items), size), desc=what, disable=None)):
        said = out / f"{number:05}.counts.json"
        if not said.exists():
            torch.manual_seed(seed * 1_000_003 + number)
            records, found = make(items[start : start + size])
            write_records(out / f"{number:05}.jsonl", records)
            write_text(said, json.dumps(found))
        counts.update(json.loads(said.read_text()))
    report = {"out": str(out), **counts}
    write_text(out / REPORT, json.dumps(report, indent=2) + "\n")
    return report


def shard_files(folder: Path) -> list[Path]:
    """The files with the records of a folder of shards, in order; a file stands for itself.

    Raises:
        UsageError: nothing is there, or the job is not done.
    """
    if folder.is_file():
        return [folder]
    if not (folder / REPORT).is_file():
        raise UsageError(
            f"{folder} is no finished folder of shards (no {REPORT}); run the command that writes it again"
        )
    return sorted(folder.glob("[0-9]*.jsonl"))


def read_shards(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder of shards, or of a file."""
    return list(read_records(shard_files(folder)))


def digest(items: Sequence[Any]) -> str:
    """A short word for what items hold."""
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:12]


def same_options(out: Path, options: dict[str, Any]) -> None:
    """Notes the options of a folder's job, or raises UsageError if it was begun with others."""
    file = out / OPTIONS
    if not file.exists():
        write_text(file, json.dumps(options, indent=2) + "\n")
        return
    begun = json.loads(file.read_text())
    if begun != options:
        names = [name for name in {**begun, **options} if begun.get(name) != options.get(name)]
        changed = ", ".join(f"{name}={begun.get(name)!r}, now {options.get(name)!r}" for name in names)
        raise UsageError(f"{out} was begun with other options ({changed}); choose another --out")
