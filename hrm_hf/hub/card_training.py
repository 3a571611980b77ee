"""What a model card says about training, from the files that a run leaves beside its weights.

`recipe.yaml` and `results.json` say how it was trained, `recipe.yaml` and what the data builders wrote beside the data
say what on, pictures are shown where they lie in the folder, and a LICENSE file there is that of the checkpoint. What
none of them says is not made up: rows are left out, and licences are "not stated".
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from ..io.sources import HUB_PREFIX, is_hub_source
from .card_words import in_code, in_markdown
from .licenses import NOT_STATED, known_source


PLOTS = {
    "training.png": "Loss and figures over the steps of training",
    "evaluation.png": "Evaluation on held-out data",
    "predictions.png": "Inferred against true parameters",
    "calibration.png": "Calibration of the posteriors",
    "corner.png": "A posterior of a test map",
    "steps.png": "Error after each segment",
    "board.gif": "A puzzle of the test set, step by step",
}
GENERATORS = ("sudoku", "maze", "cosmology")  # commands of `hrm-hf data` that need no source
NO_DATA = "Not stated yet: write here what the model was trained on, how much of it, and under which licenses."


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Recipe and results of a checkpoint folder; what is not there, or belongs to another tool, is empty."""
    recipe = _read(folder / "recipe.yaml", yaml.safe_load, yaml.YAMLError)
    return recipe, _read(folder / "results.json", json.loads, ValueError)


def training_table(folder: Path) -> str:
    """How the model was trained, as a Markdown table, and the pictures of it."""
    recipe, results = read_run(folder)
    if not recipe:
        return "\n\n".join(["How it was trained is not stated: the folder has no `recipe.yaml`.", *_pictures(folder)])
    rows = {
        "preset": recipe.get("preset"),
        "weights it started from": _shown(recipe.get("model_name_or_path")),
        "optimizer steps": _number(results.get("steps")),
        "rows of a step, each process": _rows_of_a_step(recipe),
        **_seen(results),
        "trained weights": _trained_weights(recipe),
        "optimizer": _optimizer(recipe),
        "schedule": _schedule(recipe),
        "average of weights": f"EMA {recipe['ema_rate']:g}" if recipe.get("ema_rate") else None,
        "precision": _precision(recipe, folder),
        "seconds of training": _number(results.get("train_seconds")),
        "hardware": results.get("hardware"),
        "seed": recipe.get("seed"),
        "versions": ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items()),
    }
    lines = [f"| {name} | {in_markdown(value)} |" for name, value in rows.items() if value not in (None, "")]
    table = "\n".join(["| what | value |", "|---|---|", *lines])
    return "\n\n".join([table, "`recipe.yaml` holds every option of the run.", *_pictures(folder)])


def data_table(folder: Path) -> str:
    """What the model was trained on and under which licences, as a Markdown table."""
    recipe, _ = read_run(folder)
    rows = [row for source in training_sources(recipe) for row in _licence_rows(source)]
    if not rows:
        return NO_DATA
    lines = [f"| {name} | {licence} |" for name, licence in dict.fromkeys(rows)]
    rest = "Licences as the sources state them; known sets are recognised by their names. Correct what is wrong here."
    return "\n".join(["| data | licence |", "|---|---|", *lines, "", rest])


def training_sources(recipe: dict[str, Any]) -> list[str]:
    """Paths and names of training data; `hrm-hf data ...` stands for what that command generates."""
    if not recipe.get("build_data"):
        listed = recipe.get("train_data") or []
        listed = [listed] if isinstance(listed, str) else listed
        return [*listed, *filter(None, [recipe.get("data_path")])]
    command, *rest = shlex.split(recipe["build_data"])
    sources = [rest[i + 1] for i, word in enumerate(rest[:-1]) if word == "--source"]
    sources += [word.removeprefix("--source=") for word in rest if word.startswith("--source=")]
    if command == "arc":  # its sources come first, without a flag
        options = [i for i, word in enumerate(rest) if word.startswith("-")]
        sources += rest[: min(options, default=len(rest))]
    if sources or command not in GENERATORS:
        return sources or [recipe.get("data_path") or command]
    return [f"hrm-hf data {command}"]


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


def licence_of_checkpoint(folder: Path) -> str | None:
    """SPDX name of the LICENSE file in the folder, None without one or for one that is not recognised."""
    from ..golang.data.sources import UNKNOWN_LICENCE, licence_of

    licence = licence_of(folder, levels=0)
    return None if licence == UNKNOWN_LICENCE else licence


def _read(file: Path, parse, error: type[Exception]) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = parse(file.read_text(encoding="utf-8"))
    except error as problem:
        raise ValueError(f"{file} cannot be read ({problem}); mend or delete it to write a model card") from problem
    return values if isinstance(values, dict) else {}


def _pictures(folder: Path) -> list[str]:
    return [f"![{words}]({name})" for name, words in PLOTS.items() if (folder / name).exists()]


def _on_hub(source: str) -> bool:
    """Whether a name is one of the Hub; `runs/model` beside a folder `runs` is a path, even if it is gone."""
    if source.startswith("hrm-hf ") or not is_hub_source(source):
        return False
    return source.startswith(HUB_PREFIX) or Path(source).parts[0] not in os.listdir()


def _shown(path: str | None) -> str | None:
    """A name of the Hub as it is, of a path the last part: where somebody's files lie is nobody's business."""
    return path if not path or _on_hub(path) else Path(path).name


def _licence_rows(source: str) -> list[tuple[str, str]]:
    if source.startswith("hrm-hf data "):
        return [_generated(source)]
    known = known_source(source)
    if known:
        return [known]
    beside = _counted_licences(Path(source)) or _sources_of_puzzles(Path(source)) or _generated_maps(Path(source))
    return beside or [(in_markdown(_shown(source)), NOT_STATED)]


def _counted_licences(file: Path) -> list[tuple[str, str]]:
    """What `hrm-hf data go` counted in the records that it wrote."""
    counted = _read(file.parent / "report.json", json.loads, ValueError).get("licences")
    if not isinstance(counted, dict):
        return []
    listed = (
        f"{in_markdown(name)} ({in_markdown(_number(count))} records of the set)" for name, count in counted.items()
    )
    return [(in_markdown(file.name), ", ".join(listed))]


def _sources_of_puzzles(folder: Path) -> list[tuple[str, str]]:
    """What `hrm-hf data sudoku`, `maze` and `arc` noted as their sources."""
    info = _read(folder / "puzzle.json", json.loads, ValueError)
    options = info.get("options", {})
    if options.get("source") == "generate":
        return [_generated(f"hrm-hf data {info['task']}")]
    sources = options.get("sources", [options["source"]] if "source" in options else [])
    return [known_source(str(source)) or (in_markdown(_shown(str(source))), NOT_STATED) for source in sources]


def _generated_maps(folder: Path) -> list[tuple[str, str]]:
    """Whether `hrm-hf data cosmology` drew the maps; of maps that it read, nothing is known."""
    drawn = "generator_version" in _read(folder / "cosmology.json", json.loads, ValueError)
    return [_generated("hrm-hf data cosmology")] if drawn else []


def _generated(command: str) -> tuple[str, str]:
    return f"generated by `{in_code(command)}`", "none needed: no one else's data"


def _seen(results: dict[str, Any]) -> dict[str, str | None]:
    """How much data passed through the model, as far as the run counted it."""
    epochs, data = results.get("epochs"), results.get("data") or {}
    maps = data.get("train_maps") if epochs else None
    train = data.get("train") if isinstance(data.get("train"), dict) else {}
    targets = train.get("targets") if epochs else None
    return {
        "epochs": f"{epochs:.3g}" if epochs else None,
        "tokens seen, padding included": _number(results.get("tokens")),
        "puzzles seen": _number(results.get("puzzles")),
        "target tokens seen": _number(round(targets * epochs)) if targets else None,
        "maps seen": _number(round(maps * epochs)) if maps else None,
    }


def _rows_of_a_step(recipe: dict[str, Any]) -> str | None:
    rows = recipe.get("per_device_train_batch_size")
    return _number(rows * (recipe.get("gradient_accumulation_steps") or 1)) if rows else None


def _trained_weights(recipe: dict[str, Any]) -> str | None:
    """What was trained, where it was not everything."""
    if rank := recipe.get("lora_rank"):
        base = recipe.get("load_in")
        held = f", of a base held in {base}" if base not in (None, "none") else ""
        return f"adapters of rank {rank} ({'DoRA' if recipe.get('use_dora') else 'LoRA'}){held}"
    return "the puzzle table alone" if recipe.get("freeze_weights") else None


def _precision(recipe: dict[str, Any], folder: Path) -> str:
    """Of the computations: what the run asked for, or what the config of a puzzle model says of its activations."""
    if recipe.get("bf16") or recipe.get("fp16"):
        return "bfloat16" if recipe.get("bf16") else "float16"
    config = _read(folder / "config.json", json.loads, ValueError)
    return config.get("forward_dtype") or "float32"


def _optimizer(recipe: dict[str, Any]) -> str | None:
    name = "AdamATan2" if recipe.get("adam_atan2") else recipe.get("optim")
    if not name:
        return None
    figures = {"learning rate": "learning_rate", "weight decay": "weight_decay", "beta2": "adam_beta2"}
    given = [f"{words} {recipe[key]:g}" for words, key in figures.items() if isinstance(recipe.get(key), (int, float))]
    return ", ".join([name, *given])


def _schedule(recipe: dict[str, Any]) -> str | None:
    kind, warmup = recipe.get("lr_scheduler_type"), recipe.get("warmup_steps")
    return f"{kind}, {warmup:g} steps of warm-up" if kind and warmup else kind


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,}"
