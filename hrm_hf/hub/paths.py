"""Takes names of folders of this machine out of what a run notes about itself: they are nobody's business.

A path below the working folder becomes relative to it, one below the pushed folder begins with that folder's name, and
of any other only the last part is left.
"""

import json
import os
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml


# Written by a run: any text in them may be a path.
NOTES_OF_RUNS = ("recipe.yaml", "results.json", "trainer_state.json", "eval_*/*.json")
# In these only keys that say so: a token of a vocabulary may begin with a slash.
CONFIGS = (
    "config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
KEY_OF_PATH = re.compile(r"(^|.*_)(path|dir|file|folder|checkpoint)")
ABSOLUTE = re.compile(r"\s*(file://)?(/(?!/)|~[\w.-]*/|[A-Za-z]:[\\/]|\\\\).*\S.*", re.DOTALL)
# Within a longer text: two parts at least, and not what follows the name of a host.
WITHIN = re.compile(r"(?<![\w/.~\\-])(file://)?(/(?!/)|~/|[A-Za-z]:[\\/])[\w.+@%~-]+([\\/][\w.+@%~-]+)+")


def without_local_paths(name: str, source: Path | bytes, folder: Path) -> tuple[Path | bytes, list[str]]:
    """The content of a file for the Hub, and the keys whose paths were shortened; the source itself if there are none.

    Args:
        name: of the file in the repository; only those that runs and models write are looked at.
        source: the file, or its content.
        folder: that is pushed.
    """
    noted = any(fnmatch(name, pattern) for pattern in NOTES_OF_RUNS)
    if not noted and name not in CONFIGS:
        return source, []
    text = source.decode() if isinstance(source, bytes) else source.read_text(encoding="utf-8")
    is_yaml = name.endswith(".yaml")
    try:
        values = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return source, []  # no file of ours; who reads it will say so
    changed: dict[str, None] = {}

    def shorten(text: str, key: str) -> str:
        short = short_path(text, folder) if noted or KEY_OF_PATH.fullmatch(key) else text
        if short != text:
            changed[key] = None
        return short

    values = _mapped(values, shorten)
    if not changed:
        return source, []
    dumped = yaml.safe_dump(values, sort_keys=False) if is_yaml else json.dumps(values, indent=2) + "\n"
    return dumped.encode(), list(changed)


def short_path(text: str, folder: Path) -> str:
    """A text with its absolute paths shortened; it may be one path, several with commas, or a command."""
    if not ABSOLUTE.fullmatch(text) and not WITHIN.search(text):
        return text
    parts = [
        _short(part, folder) if ABSOLUTE.fullmatch(part) else WITHIN.sub(lambda m: _short(m[0], folder), part)
        for part in text.split(",")
    ]
    return ",".join(parts)


def _short(text: str, folder: Path) -> str:
    text = text.strip().removeprefix("file://")
    if re.match(r"[A-Za-z]:|\\\\", text):
        return PureWindowsPath(text).name
    path = Path(os.path.normpath(os.path.expanduser(text)))
    here, pushed = Path.cwd(), Path(os.path.abspath(folder))
    # Below / or /home a relative path would say as much as the absolute one.
    if (len(here.parts) > 2 or here == Path.home()) and path != here and path.is_relative_to(here):
        return path.relative_to(here).as_posix()
    if path.is_relative_to(pushed):
        return (Path(pushed.name) / path.relative_to(pushed)).as_posix()
    return path.name


def _mapped(values: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """`values` with `change(text, key)` for each text, those that are keys included."""
    if isinstance(values, dict):
        return {
            (change(name, key) if isinstance(name, str) else name): _mapped(value, change, str(name))
            for name, value in values.items()
        }
    if isinstance(values, list):
        return [_mapped(value, change, key) for value in values]
    return change(values, key) if isinstance(values, str) else values
