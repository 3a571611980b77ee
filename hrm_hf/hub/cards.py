"""Model cards with results.

A card is made once from the template of its architecture (`model_cards/<model_type>.md`, jinja). After that only three
parts of it are ours: the `model-index` of its metadata, which holds every result; the table between two markers, which
is made from the `model-index`; and between two others, how the model was trained, read from `recipe.yaml`,
`results.json` and the files of the data builders. Nothing is made up: what they do not state is left out, and licenses
are "not stated". Anything else that people write into a card stays. Results are also written as
`.eval_results/*.yaml`, the newer form of the Hub.
"""

import json
import os
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..io.files import HUB_PREFIX, is_hub_source
from ..registry import ARCHITECTURES, architecture_of, load_function
from ..resources import resource
from .licenses import NOT_STATED, UNKNOWN_LICENSE, known_source, license_of


if TYPE_CHECKING:
    import jinja2

CARD_FILE, RESULTS_FOLDER = "README.md", ".eval_results"
START, END = "<!-- hrm_hf results -->", "<!-- end of hrm_hf results -->"
TRAINING_START, TRAINING_END = "<!-- hrm_hf training -->", "<!-- end of hrm_hf training -->"
LICENSE_NOT_STATED = "not stated; name one here and in the metadata"
SOLVING_SETTINGS = (
    "max_steps", "min_steps", "min_confidence", "halt", "restarts", "noise", "noise_at", "choose", "exit_when_still",
)  # fmt: skip
# How fast a run was and where it stood say nothing about the model's quality.
NO_QUALITIES = (
    "puzzles_per_second", "maps_per_second", "tokens_per_second", "samples_per_second", "steps_per_second", "epoch",
    "runtime", "model_preparation_time",
)  # fmt: skip


def record_evaluation(
    folder: str | Path, metrics: dict[str, Any], dataset: str, split: str, parameters: int, **settings: Any
) -> Path:
    """Records what an evaluation returned in a checkpoint's card: qualities as results, how it was solved as settings.

    `metrics` are those of `evaluate_puzzles`, or of `Trainer.evaluate` with or without their `eval_`.
    """
    metrics = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    settings = {name: metrics[name] for name in SOLVING_SETTINGS if name in metrics} | settings
    qualities = {name: value for name, value in metrics.items() if name not in (*settings, *NO_QUALITIES)}
    return update_model_card(folder, qualities, dataset, split, settings, parameters)


def update_model_card(
    folder: str | Path,
    metrics: dict[str, Any],
    dataset: str,
    split: str = "test",
    settings: dict[str, Any] | None = None,
    parameters: int | None = None,
) -> Path:
    """Records results in the card of a checkpoint folder, making the card if there is none.

    Args:
        folder: with config.json.
        metrics: name and value; only numbers are recorded.
        dataset: path or Hub name of the data. Of a local path only the last part is recorded.
        settings: how the numbers were got (max_steps, halt, votes, ...). A result with the same data set, split,
            settings and metric is replaced; all others stay.
        parameters: for a new card; those of the config's model if None.

    Returns:
        The path of the card. The results are in `.eval_results/` too.

    Raises:
        FileNotFoundError: `folder` has no config.json.
        ValueError: there is no template for the model type.
    """
    from huggingface_hub import EvalResult, ModelCard

    folder = Path(folder)
    path = folder / CARD_FILE
    config = _config(folder)
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
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    old = [result for result in card.data.eval_results or [] if not any(map(result.is_equal_except_value, new))]
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.eval_results = old + new
    card.text = with_results_table(card.text, results_table(card.data.eval_results))
    if TRAINING_START in card.text:
        table = _render("_training.md", config=config, **training_context(folder))
        card.text = _between(card.text, TRAINING_START, TRAINING_END, table)
    card.save(path)
    write_eval_results(folder, card.data.eval_results)
    return path


def new_card_text(folder: str | Path, parameters: int | None = None) -> str:
    """The template of the folder's architecture, filled from its config and from what its training left behind.

    Raises: as `update_model_card`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder = Path(folder)
    config = _config(folder)
    template = resource("model_cards") / f"{config.model_type}.md"
    if not template.is_file():
        raise ValueError(f"there is no card template for model type {config.model_type!r} ({template})")
    row, license = architecture_of(config), license_of_checkpoint(folder)
    metadata = ModelCardData(
        license=(license or UNKNOWN_LICENSE).lower(),
        pipeline_tag=row.task_of(config),
        datasets=hub_datasets(folder) or None,
        base_model=base_model(folder),
    )
    card = ModelCard.from_template(
        metadata,
        template_str="{% include card %}",  # the library's own environment finds no layouts and escapes nothing
        card=_environment().get_template(template.name),
        config=config,
        task=row.task_of(config),
        name=folder.resolve().name,
        parameters=f"{_count_parameters(config) if parameters is None else parameters:,}",
        data=data_licenses(folder),
        license=license,
        license_not_stated=LICENSE_NOT_STATED,
        training_markers=(TRAINING_START, TRAINING_END),
        results_markers=(START, END),
        **training_context(folder),
        **(load_function(row.card_context)(config, folder) if row.card_context else {}),
    )
    return str(card)


def card_for_repository(folder: str | Path, repo_id: str) -> str:
    """The folder's card, or a new one, whose examples load `repo_id` where they name the folder."""
    from huggingface_hub import ModelCard

    folder = Path(folder)
    path = folder / CARD_FILE
    card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(folder))
    for name in {folder.resolve().name, card.data.model_name} - {None}:
        card.text = card.text.replace(json.dumps(name), f'"{repo_id}"')
        card.text = card.text.replace(f"hrm-hf solve {shlex.quote(name)} ", f"hrm-hf solve {repo_id} ")
    return str(card)


def write_eval_results(folder: str | Path, results: list) -> list[Path]:
    """Writes `EvalResult`s as `.eval_results/DATA.yaml`, one file for each data set, and returns their paths.

    The Hub shows those of data sets that it knows as benchmarks; the task of an entry is the name of its metric.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries: dict[str, list[EvalResultEntry]] = {}
    for result in results:
        notes = [f"split={result.dataset_split}"] if result.dataset_split else []
        notes += [f"{name}={setting}" for name, setting in (result.metric_args or {}).items()]
        entry = EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id=result.metric_type,
            value=result.metric_value,
            dataset_revision=result.dataset_revision,
            notes=", ".join(notes) or None,
        )
        entries.setdefault(result.dataset_type, []).append(entry)
    written = []
    for name, of_one_set in entries.items():
        path = Path(folder) / RESULTS_FOLDER / f"{re.sub(r'[^A-Za-z0-9._-]+', '--', name)}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(eval_result_entries_to_yaml(of_one_set), sort_keys=False), encoding="utf-8")
        written.append(path)
    return written


def results_table(results: list) -> str:
    """A Markdown table of `EvalResult`s, in their order; licenses of known test sets below it."""
    known = dict.fromkeys(filter(None, (known_source(result.dataset_type) for result in results)))
    return _render("_results.md", results=results, licenses=list(known))


def with_results_table(text: str, table: str) -> str:
    """The text of a card with `table` between the markers; a card without markers gets a section at its end."""
    if START in text and END in text:
        return _between(text, START, END, table)
    return f"{text.rstrip()}\n\n## Results\n\n{START}\n{table}\n{END}\n"


def _between(text: str, start: str, end: str, content: str) -> str:
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", text, count=1)


def _config(folder: Path):
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json; expected the folder of a saved model")
    return AutoConfig.from_pretrained(folder)


def _count_parameters(config) -> int:
    """Of the model that a config describes: without the buffers (puzzle table, initial states) in its weights file."""
    import torch

    heads = {head.__name__: head for head in ARCHITECTURES[type(config)].heads.values()}
    with torch.device("meta"):  # nothing is allocated
        return heads[config.architectures[0]](config).num_parameters()


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values).strip()


@cache
def _environment() -> "jinja2.Environment":
    """Return the templates of cards."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource("model_cards")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "python": json.dumps, "shell": shlex.quote, "thousands": "{:,}".format, "zip": zip,
    }  # fmt: skip
    return environment


# ---- what a run left beside its weights ----


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Recipe and results of a checkpoint folder; what is not there, or belongs to another tool, is empty."""
    return _read(folder / "recipe.yaml", yaml.safe_load), _read(folder / "results.json", json.loads)


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


def _read(file: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as problem:
        raise ValueError(f"{file}: cannot be read ({problem}); fix or delete it to write a model card") from problem
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
    counted = _read(file.parent / "report.json", json.loads).get("licences")
    if not isinstance(counted, dict):
        return []
    return [(file.name, ", ".join(f"{name} ({count:,} records of the set)" for name, count in counted.items()))]


def _sources_of_puzzles(folder: Path) -> list[tuple[str, str]]:
    """Reads the sources that `hrm-hf data sudoku`, `maze` and `arc` noted."""
    info = _read(folder / "puzzle.json", json.loads)
    options = info.get("options", {})
    if options.get("source") == "generate":
        return [_generated(f"hrm-hf data {info['task']}")]
    sources = options.get("sources", [options["source"]] if "source" in options else [])
    return [known_source(str(source)) or (_without_folders(str(source)), NOT_STATED) for source in sources]


def _generated_maps(folder: Path) -> list[tuple[str, str]]:
    """Whether `hrm-hf data cosmology` simulated the maps; of maps that it read, nothing is known."""
    simulated = "generator_version" in _read(folder / "cosmology.json", json.loads)
    return [_generated("hrm-hf data cosmology")] if simulated else []


def _generated(command: str) -> tuple[str, str]:
    return f"generated by `{command}`", "none needed: no one else's data"
