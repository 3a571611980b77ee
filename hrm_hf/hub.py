"""Model cards with results.

A card is made once from the template of its architecture (`model_cards/<model_type>.md`). After that only two parts of
it are ours: the `model-index` of its metadata, which holds every result, and the table between two markers, which is
drawn from the `model-index`. Anything else that people write into a card stays.
"""

import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any


CARD_FILE = "README.md"
START, END = "<!-- hrm_hf results -->", "<!-- end of hrm_hf results -->"
NO_RESULTS = "None recorded yet: `hrm-hf eval puzzles MODEL DATA --update-card` writes them here."
TASK_TYPE = "puzzle-solving"
HALTING_SETTINGS = ("max_steps", "min_steps", "min_confidence", "halt")
CARD_FIELDS = (
    "task", "grid_shape", "vocab_size", "hidden_size", "num_attention_heads", "H_layers", "L_layers", "H_cycles",
    "L_cycles", "halt_max_steps", "pos_encodings", "mlp_t", "loss_type",
)  # fmt: skip


def record_evaluation(
    folder: str | Path, metrics: dict[str, Any], dataset: str, split: str, parameters: int, **settings: Any
) -> Path:
    """Records what `evaluate_puzzles` returned in a checkpoint's card: qualities as results, halting as settings."""
    settings = {name: metrics[name] for name in HALTING_SETTINGS} | settings
    qualities = {name: value for name, value in metrics.items() if name not in (*settings, "puzzles_per_second")}
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
        parameters: for a new card; counted in the weights file if None.

    Returns:
        The path of the card.

    Raises:
        FileNotFoundError: `folder` has no config.json.
        ValueError: there is no template for the model type.
    """
    from huggingface_hub import EvalResult, ModelCard

    folder = Path(folder)
    path = folder / CARD_FILE
    card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(folder, parameters))
    dataset = Path(dataset).resolve().name if Path(dataset).exists() else dataset
    new = [
        EvalResult(
            task_type=TASK_TYPE,
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
    card.save(path)
    return path


def new_card_text(folder: str | Path, parameters: int | None = None) -> str:
    """The template of the folder's architecture, filled from its config."""
    from transformers import AutoConfig

    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json; expected the folder of a saved model")
    config = AutoConfig.from_pretrained(folder)
    template = files("hrm_hf") / "model_cards" / f"{config.model_type}.md"
    if not template.is_file():
        raise ValueError(f"there is no card template for model type {config.model_type!r} ({template})")
    fields = {name: getattr(config, name) for name in CARD_FIELDS if getattr(config, name, None) is not None}
    rows, ndim = config.num_puzzle_identifiers, config.puzzle_emb_ndim
    table = f"Its puzzle table of {rows:,} x {ndim} values comes on top." if ndim else "It has no puzzle table."
    return Template(template.read_text()).substitute(
        name=folder.resolve().name,
        task=_task_words(config),
        parameters=f"{_count_parameters(folder) if parameters is None else parameters:,}",
        puzzle_table=table,
        halt_max_steps=config.halt_max_steps,
        results=f"{START}\n{NO_RESULTS}\n{END}",
        fields="\n".join(f"| {name} | {value} |" for name, value in fields.items()),
    )


def results_table(results: list) -> str:
    """A Markdown table of `EvalResult`s, in their order."""
    lines = ["| data | split | metric | value | settings |", "|---|---|---|---|---|"]
    for result in results:
        value = f"{result.metric_value:.4g}" if isinstance(result.metric_value, float) else result.metric_value
        settings = ", ".join(f"{name}={setting}" for name, setting in (result.metric_args or {}).items())
        metric = result.metric_name or result.metric_type
        lines.append(f"| {result.dataset_name} | {result.dataset_split or ''} | {metric} | {value} | {settings} |")
    return "\n".join(lines)


def with_results_table(text: str, table: str) -> str:
    """The text of a card with `table` between the markers; a card without markers gets a section at its end."""
    block = f"{START}\n{table}\n{END}"
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: block, text, count=1)
    return f"{text.rstrip()}\n\n## Results\n\n{block}\n"


def _task_words(config) -> str:
    if not config.grid_shape:
        return f"puzzles of {config.seq_len} tokens"
    names = {"sudoku": "Sudoku", "maze": "mazes", "arc": "ARC-AGI tasks", "generic": "puzzles"}
    return f"{names[config.task]} on boards of {config.grid_shape[0]} x {config.grid_shape[1]}"


def _count_parameters(folder: Path) -> int:
    """Values in the weights files, without the buffers that are no parameters (puzzle table, initial states)."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if not name.endswith(("puzzle_emb.weight", "H_init", "L_init")):
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    total += size
    return total
