"""Create model cards, and add results to them.

A card is created once from the template of its architecture (`model_cards/<model_type>.md`, jinja). After that, only
three parts are updated: the `model-index` of its metadata, which holds every result; the table of results between two
markers; and the table about training between two other markers, from `recipe.yaml`, `results.json` and data builders'
files. Everything else can be edited. Results are also written as `.eval_results/*.yaml`, the newer format of the Hub.
"""

import json
import os
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..io.files import HUB_PREFIX, is_hub_source
from ..registry import ARCHITECTURES, architecture_of, load_function
from ..resources import resource
from .licenses import NOT_STATED, UNKNOWN_LICENSE, known_source, license_of


CARD_FILE, RESULTS_FOLDER = "README.md", ".eval_results"
START, END = "<!-- hrm_hf results -->", "<!-- end of hrm_hf results -->"
TRAINING_START, TRAINING_END = "<!-- hrm_hf training -->", "<!-- end of hrm_hf training -->"
LICENSE_NOT_STATED = "not stated; name one here and in the metadata"
SOLVING_SETTINGS = (
    "max_steps", "min_steps", "min_confidence", "halt", "restarts", "noise", "noise_at", "choose", "exit_when_still",
)  # fmt: skip
# Speed and progress metrics, which do not measure model quality.
NOT_RECORDED = (
    "puzzles_per_second", "maps_per_second", "tokens_per_second", "samples_per_second", "steps_per_second", "epoch",
    "runtime", "model_preparation_time",
)  # fmt: skip


def record_evaluation(
    folder: str | Path, metrics: dict[str, Any], dataset: str, split: str, parameters: int | None, **settings: Any
) -> Path:
    """Record an evaluation in a checkpoint's card, creating the card if it is missing, and return the card's path.

    Replaces a result with the same data set, split, settings and metric, and keeps all others.

    Args:
        metrics: name -> value, with or without the `eval_` prefix of `Trainer.evaluate`; only numbers are recorded.
        dataset: path or Hub name of the data; only the last part of a local path is recorded.
        parameters: number of parameters for a new card; counted if None.
        settings: how the metrics were computed; entries of `metrics` named in SOLVING_SETTINGS are added.

    Raises:
        FileNotFoundError: `folder` has no config.json.
        ValueError: there is no template for the model type.
    """
    from huggingface_hub import EvalResult, ModelCard

    metrics = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    settings = {name: metrics[name] for name in SOLVING_SETTINGS if name in metrics} | settings
    folder = Path(folder)
    path, config = folder / CARD_FILE, _config(folder)
    row = architecture_of(config)
    card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(folder, parameters))
    dataset = Path(dataset).resolve().name if Path(dataset).exists() else dataset
    new = [
        EvalResult(
            task_type=row.task_of(config) if row else "text-generation",
            dataset_type=dataset,
            dataset_name=Path(dataset).name,
            dataset_split=split,
            metric_type=name,
            metric_name=name,
            metric_value=round(value, 6) if isinstance(value, float) else value,
            metric_args=settings or None,
        )
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in (*settings, *NOT_RECORDED)
    ]
    old = [result for result in card.data.eval_results or [] if not any(map(result.is_equal_except_value, new))]
    card.data.model_name = card.data.model_name or folder.resolve().name
    results = card.data.eval_results = old + new
    known = dict.fromkeys(filter(None, (known_source(result.dataset_type) for result in results)))
    if not (START in card.text and END in card.text):
        card.text = f"{card.text.rstrip()}\n\n## Results\n\n{START}\n{END}\n"
    table = _render("_results.md", evaluations=_evaluations(results), licenses=list(known))
    card.text = _between(card.text, START, END, table)
    if TRAINING_START in card.text:
        table = _render("_training.md", config=config, **training_context(folder))
        card.text = _between(card.text, TRAINING_START, TRAINING_END, table)
    card.save(path)
    _write_eval_results(folder / RESULTS_FOLDER, results)
    return path


def _evaluations(results: list) -> list[dict[str, Any]]:
    """Group `EvalResult`s by evaluation (data set, split and settings), with metric values as text.

    An interval recorded as NAME_low and NAME_high is appended to the value of its metric.
    """
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        row = {"data": result.dataset_name, "split": result.dataset_split, "settings": result.metric_args or {}}
        row = found.setdefault(f"{result.dataset_type} {row}", row | {"metrics": {}})
        value = result.metric_value
        name = result.metric_name or result.metric_type
        row["metrics"][name] = f"{value:.4g}" if isinstance(value, float) else str(value)
    for values in (row["metrics"] for row in found.values()):
        for name in [name for name in values if f"{name}_low" in values and f"{name}_high" in values]:
            values[name] += f" (95 %: {values.pop(f'{name}_low')} to {values.pop(f'{name}_high')})"
    return list(found.values())


def _write_eval_results(folder: Path, results: list) -> None:
    """Write `EvalResult`s to one DATA.yaml per data set. The Hub shows the files of registered benchmarks."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries: dict[str, list[EvalResultEntry]] = {}
    for result in results:
        notes = {"split": result.dataset_split, **(result.metric_args or {})}
        entry = EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id=result.metric_type,
            value=result.metric_value,
            dataset_revision=result.dataset_revision,
            notes=", ".join(f"{name}={value}" for name, value in notes.items() if value is not None) or None,
        )
        entries.setdefault(result.dataset_type, []).append(entry)
    folder.mkdir(exist_ok=True)
    for name, of_one_set in entries.items():
        text = yaml.safe_dump(eval_result_entries_to_yaml(of_one_set), sort_keys=False)
        (folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '--', name)}.yaml").write_text(text, encoding="utf-8")


def new_card_text(folder: str | Path, parameters: int | None = None) -> str:
    """Render the card template for a folder's architecture from the folder's config and training files.

    Raises the errors of `record_evaluation`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder = Path(folder)
    config = _config(folder)
    template = resource("model_cards") / f"{config.model_type}.md"
    if not template.is_file():
        raise ValueError(f"model_type={config.model_type!r}: has no card template ({template}); write a README.md")
    row, recipe, license = architecture_of(config), read_run(folder)[0], license_of(folder, levels=0)
    base, sources = recipe.get("model_name_or_path"), training_sources(recipe)
    datasets = dict.fromkeys(source.removeprefix(HUB_PREFIX).partition(":")[0] for source in filter(_on_hub, sources))
    metadata = ModelCardData(
        license=license.lower(),
        pipeline_tag=row.task_of(config),
        datasets=list(datasets) or None,
        base_model=base if base and _on_hub(base) else None,
    )
    card = ModelCard.from_template(
        metadata,
        template_str="{% include card %}",  # huggingface_hub's jinja environment cannot find our templates
        card=_environment().get_template(template.name),
        config=config,
        task=row.task_of(config),
        name=folder.resolve().name,
        parameters=f"{_count_parameters(config) if parameters is None else parameters:,}",
        data=list(dict.fromkeys(row for source in sources for row in _licenses_of(source))),
        license=None if license == UNKNOWN_LICENSE else license,
        license_not_stated=LICENSE_NOT_STATED,
        training_markers=(TRAINING_START, TRAINING_END),
        results_markers=(START, END),
        **training_context(folder),
        **(load_function(row.card_context)(config, folder) if row.card_context else {}),
    )
    return str(card)


def card_for_repository(folder: str | Path, repo_id: str) -> str:
    """Return the folder's card (or a new one), with `repo_id` replacing the folder name in the examples."""
    from huggingface_hub import ModelCard

    folder, path = Path(folder), Path(folder, CARD_FILE)
    card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(folder))
    for name in {folder.resolve().name, card.data.model_name} - {None}:
        card.text = card.text.replace(json.dumps(name), f'"{repo_id}"')
        card.text = card.text.replace(f"hrm-hf solve {shlex.quote(name)} ", f"hrm-hf solve {repo_id} ")
    return str(card)


def _between(text: str, start: str, end: str, content: str) -> str:
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", text, count=1)


def _config(folder: Path):
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json; expected the folder of a saved model")
    return AutoConfig.from_pretrained(folder)


def _count_parameters(config) -> int:
    """Count the parameters of the model that a config describes, without buffers (puzzle table, initial states)."""
    import torch

    heads = {head.__name__: head for head in ARCHITECTURES[type(config)].heads.values()}
    with torch.device("meta"):  # meta tensors allocate no memory
        return heads[config.architectures[0]](config).num_parameters()


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values).strip()


@cache
def _environment() -> Any:
    """Return the jinja2 environment of the card templates."""
    import jinja2

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(resource("model_cards")), **options)
    environment.filters |= {"python": json.dumps, "shell": shlex.quote, "thousands": "{:,}".format, "zip": zip}
    return environment


# ---- files that a run saved with its weights ----


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe and the results of a checkpoint folder, each {} if its file is missing or not a mapping."""
    return _read(folder / "recipe.yaml", yaml.safe_load), _read(folder / "results.json", json.loads)


def training_context(folder: Path) -> dict[str, Any]:
    """Return the variables for the template `_training.md`. Recipe and results omit empty entries."""
    recipe, results = ({k: v for k, v in run.items() if v not in (None, "")} for run in read_run(folder))
    return {
        "recipe": recipe,
        "results": results,
        "started_from": _without_folders(recipe.get("model_name_or_path")),
        "files": os.listdir(folder),
    }


def training_sources(recipe: dict[str, Any]) -> list[str]:
    """Return the paths and names of the training data, or the `hrm-hf data` command that generates the data."""
    if not recipe.get("build_data"):
        listed = recipe.get("train_data") or []
        listed = [listed] if isinstance(listed, str) else listed
        return [*listed, *filter(None, [recipe.get("data_path")])]
    command, *rest = shlex.split(recipe["build_data"])
    sources = [rest[i + 1] for i, word in enumerate(rest[:-1]) if word == "--source"]
    sources += [word.removeprefix("--source=") for word in rest if word.startswith("--source=")]
    options = [i for i, word in enumerate(rest) if word.startswith("-")]
    sources += rest[: min(options, default=len(rest))]  # positional arguments
    return sources or [f"hrm-hf data {command}"]


def training_data(recipe: dict[str, Any]) -> tuple[list[str], str | None]:
    """Return the names of a run's data (or the command that generates it), and the weights that the run started from.

    Raises:
        ValueError: the recipe was not written by our scripts.
    """
    names = [recipe.get(name) for name in ("build_data", "data_path", "train_data", "model_name_or_path")]
    each = [part for name in names if name is not None for part in (name if isinstance(name, list) else [name])]
    if not all(isinstance(part, str) for part in each):
        raise ValueError("the recipe must name data and model with a string or a list of strings")
    if build := recipe.get("build_data"):
        sources = ["hrm-hf data " + " ".join(_without_folders(word) for word in shlex.split(str(build)))]
    else:
        sources = [_without_folders(str(source)) for source in training_sources(recipe)]
    started_from = recipe.get("model_name_or_path")
    sources = list(dict.fromkeys(sources))  # files in different folders can have the same name
    return sources, _without_folders(str(started_from)) if started_from else None


def _read(file: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    try:
        values = load(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (ValueError, yaml.YAMLError) as problem:
        raise ValueError(f"{file}: cannot be read ({problem}); fix or delete it to write a model card") from problem
    return values if isinstance(values, dict) else {}


def _on_hub(source: str) -> bool:
    """Check whether a source is a Hub name. `runs/model` is a local path if the current folder contains `runs`."""
    if source.startswith("hrm-hf ") or not is_hub_source(source):
        return False
    return source.startswith(HUB_PREFIX) or Path(source).parts[0] not in os.listdir()


def _without_folders(path: str | None) -> str | None:
    """Return a Hub name unchanged, but reduce a local path to its last part, so that cards reveal no folder names."""
    return path if not path or _on_hub(path) else Path(path).name


def _licenses_of(source: str) -> list[tuple[str, str]]:
    if source.startswith("hrm-hf data "):
        return [_generated(source)]
    unknown, path = (_without_folders(source), NOT_STATED), Path(source)
    if known := known_source(source):
        return [known]
    counted = _read(path.parent / "report.json", json.loads).get("licences")  # by `hrm-hf data go`
    if isinstance(counted, dict):
        licenses = ", ".join(f"{name} ({count:,} records of the data set)" for name, count in counted.items())
        return [(path.name, licenses)]
    if "generator_version" in _read(path / "cosmology.json", json.loads):
        return [_generated("hrm-hf data cosmology")]
    info = _read(path / "puzzle.json", json.loads)
    options = info.get("options", {})
    if options.get("source") == "generate":
        return [_generated(f"hrm-hf data {info['task']}")]
    sources = map(str, options.get("sources") or filter(None, [options.get("source")]))
    return [known_source(each) or (_without_folders(each), NOT_STATED) for each in sources] or [unknown]


def _generated(command: str) -> tuple[str, str]:
    return f"generated by `{command}`", "none needed: no third-party data"
