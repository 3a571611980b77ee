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
NO_RESULTS = {
    "puzzle-solving": "None recorded yet: `hrm-hf eval puzzles MODEL DATA --update-card` writes them here.",
    "cosmology-regression": "None recorded yet: `hrm-hf eval cosmo MODEL --data DATA --update-card` writes them here.",
    "text-generation": "None recorded yet: `run_clm.py` and `run_go_coder.py` write those of their last evaluation.",
}
HALTING_SETTINGS = ("max_steps", "min_steps", "min_confidence", "halt")
# How fast a run was and where it stood say nothing about the model's quality.
NO_QUALITIES = (
    "puzzles_per_second", "maps_per_second", "tokens_per_second", "samples_per_second", "steps_per_second", "epoch",
    "runtime",
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
    card.save(path)
    return path


def new_card_text(folder: str | Path, parameters: int | None = None) -> str:
    """The template of the folder's architecture, filled from its config."""
    folder = Path(folder)
    config = _config(folder)
    template = files("hrm_hf") / "model_cards" / f"{config.model_type}.md"
    if not template.is_file():
        raise ValueError(f"there is no card template for model type {config.model_type!r} ({template})")
    names = (*CARD_FIELDS, "num_hidden_layers") if config.model_type in NUM_LAYERS_TYPES else CARD_FIELDS
    fields = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    words = {"puzzle-solving": _puzzle_words, "cosmology-regression": _map_words}.get(_task_type(config))
    own = words(config) if words else {}
    return Template(template.read_text()).substitute(
        {name: str(value) for name, value in fields.items()},
        name=folder.resolve().name,
        parameters=f"{_count_parameters(folder) if parameters is None else parameters:,}",
        results=f"{START}\n{NO_RESULTS[_task_type(config)]}\n{END}",
        fields="\n".join(f"| {name} | {value} |" for name, value in fields.items()),
        **own,
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


def _puzzle_words(config) -> dict[str, str]:
    rows, ndim = config.num_puzzle_identifiers, config.puzzle_emb_ndim
    table = f"Its puzzle table of {rows:,} x {ndim} values comes on top." if ndim else "It has no puzzle table."
    return {"task": _task_words(config), "puzzle_table": table}


def _map_words(config) -> dict[str, str]:
    """What a regressor was made for, in words."""
    channels = config.num_map_channels
    maps = f"{config.image_size} x {config.image_size} pixels"
    bounds = config.prior_bounds or []
    ranges = [f"{name} from {low:g} to {high:g}" for name, (low, high) in zip(config.target_names, bounds)]
    return {
        "names": ", ".join(config.reported_names),
        "first": config.target_names[0],
        "maps": maps + (f" in {channels} channels" if channels > 1 else ""),
        "mask": " and a mask of observed pixels" if config.mask_channel else "",
        "prior": " and ".join(ranges) or "no bounds",
    }


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
                if not name.endswith(("puzzle_emb.weight", "H_init", "L_init", "z_L_init")):
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    total += size
    return total
