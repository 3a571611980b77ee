"""Model cards with results.

A card is made once from the template of its architecture (`model_cards/<model_type>.md`; `card_words.py` has the words
that depend on the config). After that only three parts of it are ours: the `model-index` of its metadata, which holds
every result; the table between two markers, which is drawn from the `model-index`; and between two others, how the
model was trained (`card_training.py`). Anything else that people write into a card stays. Results are also written as
`.eval_results/*.yaml`, the Hub's newer form.
"""

import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from .card_training import base_model, data_table, hub_datasets, licence_of_checkpoint, training_table
from .card_words import in_markdown, in_python, in_shell, words_of
from .licenses import known_source


CARD_FILE, RESULTS_FOLDER = "README.md", ".eval_results"
START, END = "<!-- hrm_hf results -->", "<!-- end of hrm_hf results -->"
TRAINING_START, TRAINING_END = "<!-- hrm_hf training -->", "<!-- end of hrm_hf training -->"
NO_RESULTS = {
    "puzzle-solving": "None recorded yet: `hrm-hf eval puzzles MODEL DATA --update-card` writes them here.",
    "cosmology-regression": "None recorded yet: `hrm-hf eval cosmo MODEL --data DATA --update-card` writes them here.",
    "hrm_go_coder": "None recorded yet: `hrm-hf eval go MODEL --records FILE --update-card` writes them here.",
    "text-generation": "None recorded yet: `hrm-hf eval lm MODEL --data FILE --update-card` writes them here.",
}
UNKNOWN_LICENCE = "unknown"  # the Hub's word for a licence that nobody stated
LICENCE_NOT_STATED = "not stated; name one here and in the metadata"
HALTING_SETTINGS = ("max_steps", "min_steps", "min_confidence", "halt")
# How fast a run was and where it stood say nothing about the model's quality.
NO_QUALITIES = (
    "puzzles_per_second", "maps_per_second", "tokens_per_second", "samples_per_second", "steps_per_second", "epoch",
    "runtime", "model_preparation_time",
)  # fmt: skip
CARD_FIELDS = (
    "task", "grid_shape", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "H_layers", "L_layers", "num_h_layers", "num_l_layers", "H_cycles", "L_cycles",
    "halt_max_steps", "exit_criterion", "kv_layout", "pos_encodings", "mlp_t", "loss_type", "mhc_enabled", "mhc_flows",
    "mhc_sinkhorn_iters", "mhc_res_mode", "num_loops", "planner_layers", "generator_layers", "planner_cycles",
    "generator_cycles", "unified", "max_position_embeddings", "image_size", "num_channels", "mask_channel",
    "padding_mode", "stem", "stem_channels", "embedding_size", "hidden_sizes", "depths", "use_power_spectrum",
    "num_ps_bins", "use_histogram", "prior_bounds", "covariance", "num_components",
)  # fmt: skip
# Blocks of a plain stack; other architectures count cache slots under this name.
NUM_LAYERS_TYPES = ("rlm_mhc",)


def record_evaluation(
    folder: str | Path, metrics: dict[str, Any], dataset: str, split: str, parameters: int, **settings: Any
) -> Path:
    """Records what an evaluation returned in a checkpoint's card: qualities as results, halting as settings.

    `metrics` are those of `evaluate_puzzles`, or of `Trainer.evaluate` with or without their `eval_`.
    """
    metrics = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    settings = {name: metrics[name] for name in HALTING_SETTINGS if name in metrics} | settings
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
    task_type = _task_type(_config(folder))
    card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(folder, parameters))
    dataset = Path(dataset).resolve().name if Path(dataset).exists() else dataset
    new = [
        EvalResult(
            task_type=task_type,
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
        card.text = _between(card.text, TRAINING_START, TRAINING_END, training_table(folder))
    card.save(path)
    write_eval_results(folder, card.data.eval_results)
    return path


def new_card_text(folder: str | Path, parameters: int | None = None) -> str:
    """The template of the folder's architecture, filled from its config and from what its training left behind.

    Raises: as `update_model_card`.
    """
    from huggingface_hub import ModelCard

    folder = Path(folder)
    config = _config(folder)
    template = files("hrm_hf") / "model_cards" / f"{config.model_type}.md"
    if not template.is_file():
        raise ValueError(f"there is no card template for model type {config.model_type!r} ({template})")
    names = (*CARD_FIELDS, "num_hidden_layers") if config.model_type in NUM_LAYERS_TYPES else CARD_FIELDS
    fields = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    licence = licence_of_checkpoint(folder)
    no_results = NO_RESULTS.get(config.model_type) or NO_RESULTS[_task_type(config)]
    text = Template(template.read_text(encoding="utf-8")).substitute(
        {name: in_markdown(value) for name, value in fields.items()},
        name=in_markdown(folder.resolve().name),
        python_name=in_python(folder.resolve().name)[1:-1],
        shell_name=in_shell(folder.resolve().name),
        parameters=f"{_count_parameters(config) if parameters is None else parameters:,}",
        results=f"{START}\n{no_results}\n{END}",
        training=f"{TRAINING_START}\n{training_table(folder)}\n{TRAINING_END}",
        data=data_table(folder),
        fields="\n".join(f"| {name} | {in_markdown(value)} |" for name, value in fields.items()),
        licence=f"`LICENSE` in this folder: {licence}" if licence else LICENCE_NOT_STATED,
        **words_of(config, folder),
    )
    card = ModelCard(text)
    card.data.license = (licence or UNKNOWN_LICENCE).lower()
    card.data.datasets, card.data.base_model = hub_datasets(folder) or None, base_model(folder)
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
    """A Markdown table of `EvalResult`s, in their order; licences of known test sets below it."""
    lines = ["| data | split | metric | value | settings |", "|---|---|---|---|---|"]
    for result in results:
        value = f"{result.metric_value:.4g}" if isinstance(result.metric_value, float) else result.metric_value
        settings = ", ".join(f"{name}={setting}" for name, setting in (result.metric_args or {}).items())
        metric = result.metric_name or result.metric_type
        cells = (result.dataset_name, result.dataset_split or "", metric, value, settings)
        lines.append(f"| {' | '.join(map(in_markdown, cells))} |")
    known = dict.fromkeys(filter(None, (known_source(result.dataset_type) for result in results)))
    if known:
        lines += ["", f"Licences of these data: {'; '.join(f'{name}, {licence}' for name, licence in known)}."]
    return "\n".join(lines)


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


def _task_type(config) -> str:
    """The Hub's name of what the model does."""
    if config.problem_type == "regression":
        return "cosmology-regression"
    return "puzzle-solving" if config.model_type.endswith("_puzzle") else "text-generation"


def _count_parameters(config) -> int:
    """Of the model that a config describes: without the buffers (puzzle table, initial states) in its weights file."""
    import torch

    from ..registry import ARCHITECTURES

    heads = {head.__name__: head for head in ARCHITECTURES[type(config)].heads.values()}
    with torch.device("meta"):  # nothing is allocated
        return heads[config.architectures[0]](config).num_parameters()
