"""Reads what a run left beside its weights, for its model card.

`recipe.yaml` and `results.json` say how a model was trained, `recipe.yaml` and what the data builders wrote beside the
data say what on, and a LICENSE file is that of the checkpoint. What none of them says is not made up: rows are left
out, and licenses are "not stated". The words are in the templates.
"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..io.bounded_files import load_json, load_yaml
from ..io.sources import HUB_PREFIX, is_hub_source
from .escaping import Verbatim, in_code
from .licenses import NOT_STATED, UNKNOWN_LICENSE, known_source, license_of


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Recipe and results of a checkpoint folder; what is not there, or belongs to another tool, is empty."""
    return _read(folder / "recipe.yaml", load_yaml), _read(folder / "results.json", load_json)


def training_context(folder: Path) -> dict[str, Any]:
    """Values of `_training.md`: recipe and results without what is empty, and which files the folder has."""
    recipe, results = ({k: v for k, v in run.items() if v not in (None, "")} for run in read_run(folder))
    return {
        "recipe": recipe,
        "results": results,
        "started_from": _without_folders(recipe.get("model_name_or_path")),
        "files": os.listdir(folder),
    }


def data_licenses(folder: Path) -> list[tuple[str, str]]:
    """Name and license of everything that the model was trained on."""
    recipe, _ = read_run(folder)
    return list(dict.fromkeys(row for source in training_sources(recipe) for row in _licenses_of(source)))


def training_sources(recipe: dict[str, Any]) -> list[str]:
    """Paths and names of training data; `hrm-hf data ...` stands for what that command generates."""
    if not recipe.get("build_data"):
        listed = recipe.get("train_data") or []
        listed = [listed] if isinstance(listed, str) else listed
        return [*listed, *filter(None, [recipe.get("data_path")])]
    command, *rest = shlex.split(recipe["build_data"])
    sources = [rest[i + 1] for i, word in enumerate(rest[:-1]) if word == "--source"]
    sources += [word.removeprefix("--source=") for word in rest if word.startswith("--source=")]
    options = [i for i, word in enumerate(rest) if word.startswith("-")]
    sources += rest[: min(options, default=len(rest))]  # those that come first, without a flag
    return sources or [f"hrm-hf data {command}"]


def training_data(recipe: dict[str, Any]) -> tuple[list[str], str | None]:
    """Words for the data of a run, commands that generated them or names, and the weights that it started from.

    Raises:
        ValueError: a recipe that none of our scripts wrote.
    """
    names = [recipe.get(name) for name in ("build_data", "data_path", "train_data", "model_name_or_path")]
    if not all(name is None or isinstance(name, str | list) for name in names):
        raise ValueError("the recipe names its data by neither a text nor a list")
    if build := recipe.get("build_data"):
        sources = ["hrm-hf data " + " ".join(_without_folders(word) for word in shlex.split(str(build)))]
    else:
        sources = [_without_folders(str(source)) for source in training_sources(recipe)]
    started_from = recipe.get("model_name_or_path")
    sources = list(dict.fromkeys(sources))  # two files of one name in two folders
    return sources, _without_folders(str(started_from)) if started_from else None


def hub_datasets(folder: Path) -> list[str]:
    """Names of the data sets of the Hub that the model was trained on."""
    recipe, _ = read_run(folder)
    names = [
        source.removeprefix(HUB_PREFIX).partition(":")[0] for source in training_sources(recipe) if _on_hub(source)
    ]
    return list(dict.fromkeys(names))


def base_model(folder: Path) -> str | None:
    """Name on the Hub of the weights that training started from."""
    name = read_run(folder)[0].get("model_name_or_path")
    return name if name and _on_hub(name) else None


def license_of_checkpoint(folder: Path) -> str | None:
    """SPDX name of the LICENSE file in the folder, None without one or for one that is not recognized."""
    license = license_of(folder, levels=0)
    return None if license == UNKNOWN_LICENSE else license


def _read(file: Path, load: Callable[[Path], Any]) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = load(file)
    except ValueError as problem:
        raise ValueError(f"{file} cannot be read ({problem}); mend or delete it to write a model card") from problem
    return values if isinstance(values, dict) else {}


def _on_hub(source: str) -> bool:
    """Whether a name is one of the Hub; `runs/model` beside a folder `runs` is a path, even if it is gone."""
    if source.startswith("hrm-hf ") or not is_hub_source(source):
        return False
    return source.startswith(HUB_PREFIX) or Path(source).parts[0] not in os.listdir()


def _without_folders(path: str | None) -> str | None:
    """A name of the Hub as it is, of a path the last part: where somebody's files lie is nobody's business."""
    return path if not path or _on_hub(path) else Path(path).name


def _licenses_of(source: str) -> list[tuple[str, str]]:
    if source.startswith("hrm-hf data "):
        return [_generated(source)]
    known = known_source(source)
    if known:
        return [known]
    beside = _counted_licenses(Path(source)) or _sources_of_puzzles(Path(source)) or _generated_maps(Path(source))
    return beside or [(_without_folders(source), NOT_STATED)]


def _counted_licenses(file: Path) -> list[tuple[str, str]]:
    """Reads the licenses that `hrm-hf data go` counted in its records."""
    counted = _read(file.parent / "report.json", load_json).get("licences")
    if not isinstance(counted, dict):
        return []
    return [(file.name, ", ".join(f"{name} ({count:,} records of the set)" for name, count in counted.items()))]


def _sources_of_puzzles(folder: Path) -> list[tuple[str, str]]:
    """Reads the sources that `hrm-hf data sudoku`, `maze` and `arc` noted."""
    info = _read(folder / "puzzle.json", load_json)
    options = info.get("options", {})
    if options.get("source") == "generate":
        return [_generated(f"hrm-hf data {info['task']}")]
    sources = options.get("sources", [options["source"]] if "source" in options else [])
    return [known_source(str(source)) or (_without_folders(str(source)), NOT_STATED) for source in sources]


def _generated_maps(folder: Path) -> list[tuple[str, str]]:
    """Whether `hrm-hf data cosmology` simulated the maps; of maps that it read, nothing is known."""
    simulated = "generator_version" in _read(folder / "cosmology.json", load_json)
    return [_generated("hrm-hf data cosmology")] if simulated else []


def _generated(command: str) -> tuple[str, str]:
    return Verbatim(f"generated by `{in_code(command)}`"), "none needed: no one else's data"
