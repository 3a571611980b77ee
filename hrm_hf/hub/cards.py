"""Model cards with results.

A card is made once from the template of its architecture (`model_cards/<model_type>.md`, jinja). After that only three
parts of it are ours: the `model-index` of its metadata, which holds every result; the table between two markers, which
is made from the `model-index`; and between two others, how the model was trained (`card_training.py`). Anything else
that people write into a card stays. Results are also written as `.eval_results/*.yaml`, the Hub's newer form.
"""

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..registry import ARCHITECTURES, architecture_of, load_function
from ..resources import resource
from .card_training import base_model, data_licenses, hub_datasets, license_of_checkpoint, training_context
from .escaping import Verbatim, in_markdown, in_python, in_shell
from .licenses import UNKNOWN_LICENSE, known_source


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
        card.text = card.text.replace(in_python(name), f'"{repo_id}"')
        card.text = card.text.replace(f"hrm-hf solve {in_shell(name)} ", f"hrm-hf solve {repo_id} ")
    return str(card)


def write_eval_results(folder: str | Path, results: list) -> list[Path]:
    """Writes `EvalResult`s as `.eval_results/DATA.yaml`, one file for each data set, and returns their paths.

    The Hub shows those of data sets that it knows as benchmarks; the task of an entry is the name of its metric.
    """
    import yaml
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
    """The templates of cards; every value is escaped as Markdown that is not `Verbatim`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource("model_cards")),
        finalize=lambda value: in_markdown(_defined(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # of HTML alone
    )
    environment.filters |= {
        "python": in_python, "shell": in_shell, "verbatim": Verbatim, "thousands": "{:,}".format, "zip": zip,
    }  # fmt: skip
    return environment


def _defined(value: Any) -> Any:
    """`value`; jinja would write nothing for a name that is none."""
    import jinja2

    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    return value
