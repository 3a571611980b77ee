"""Evaluates any causal language model on text: perplexity and bits per byte, as training measures them.

The text is packed by `corpus.py` and measured by `CausalLMTrainer.evaluate`, so that the figures of a model are those
that its training script printed. Multiple-choice and generation tasks are lm-evaluation-harness's business.
"""

import contextlib
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    default_data_collator,
)

from ..hub.cards import record_evaluation
from ..hub.kinds import LANGUAGE_MODEL, load_config
from ..io.evaluation import chosen_device, validate_evaluation, write_results
from ..io.usage import UsageError, as_usage_errors
from ..models.early_exit import EXIT_CRITERIA, exit_class
from ..registry import has_ability
from ..trainer.recipes import library_versions
from .arguments import LmDataArguments, LmTrainingArguments
from .calibration import calibrate_exit
from .causal_lm import load_tokenizer
from .corpus import TextCorpus, load_evaluation_text
from .trainer import CausalLMTrainer


MAX_BLOCK_SIZE = 1024  # where the model has room for more, unless told otherwise
SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "model_preparation_time")
# results.json has the others too. A card gets those that say something about quality.
CARD_METRICS = ("lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps")


def evaluate_checkpoint(
    model: str,
    data: list[str],
    *,
    split: str = "test",
    last_percentage: float | None = None,
    text_column: str = "text",
    document_separator: str | None = None,
    on_bad_line: str = "stop",
    tokenizer: str | None = None,
    block_size: int | None = None,
    overlap: int = 0,
    num_segments: int | None = None,
    exit_criterion: str | None = None,
    exit_threshold: float | None = None,
    calibrate_on: list[str] | None = None,
    allowed_loss: float = 0.005,
    batch_size: int = 8,
    limit: int | None = None,
    out: Path | None = None,
    device: str | None = None,
    update_card: bool = False,
) -> dict[str, Any]:
    """Evaluates perplexity, bits per byte and average segments on text.

    Args:
        data: sources, as in `sources.py`.
        last_percentage: only the end of each source, as run_clm.py holds it out.
        tokenizer: another one than that beside the weights.
        block_size: tokens of a row; the model's positions, at most 1024, by default.
        overlap: tokens that a row repeats from the last, as context.
        num_segments, exit_criterion, exit_threshold: how long an `hrm_lm` thinks; its config's by default.
        calibrate_on: sources of another text, on which the threshold of exit_criterion is chosen: see `calibrate_exit`
            (also for allowed_loss). The figures are then those of `data`, with `always_lm_loss` beside.
        limit: only the first rows; bits per byte then take the whole text's bytes per token.
        out: folder for results.json.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a path or a device that is none, or options that do not fit together or to the model.
        ModelError: a model that is nowhere, or of another kind.
        ValueError: a model without segments that is to have some, or with fewer embeddings than there are tokens.
    """
    validate_evaluation(model, out, update_card)
    device = device and chosen_device(device)
    if device and ":" in device and not device.endswith(":0"):
        raise UsageError(f"{device}: choose a GPU with CUDA_VISIBLE_DEVICES", "--device")
    validate_exit(exit_criterion, exit_threshold)
    if calibrate_on and (exit_threshold is not None or exit_criterion in (None, "q", "fixed")):
        raise UsageError("give --exit-criterion with a threshold, and no --exit-threshold", "--calibrate-on")
    thinking = {"num_segments": num_segments, "exit_criterion": exit_criterion}
    thinking |= {"exit_threshold": exit_threshold}
    _validate_kind(model, thinking)
    words = load_tokenizer(tokenizer, model)
    network = _load(model, len(words), thinking)
    length = _block_size(network, words, block_size, model)
    if overlap >= length:
        raise UsageError(f"{overlap} of {length} tokens; expected fewer than a row", "--overlap")
    options = LmDataArguments(
        eval_data=data,
        eval_split=split,
        text_column=text_column,
        document_separator=document_separator,
        on_bad_line=on_bad_line,
        block_size=length,
        chunk_overlap=overlap,
    )
    corpus = load_evaluation_text(options, words, last_percentage)
    other = load_evaluation_text(replace(options, eval_data=calibrate_on), words) if calibrate_on else None
    calibration = None
    with contextlib.redirect_stdout(sys.stderr):  # where the library and what it imports may speak
        measure = functools.partial(_measure, network, batch_size=batch_size, device=device, limit=limit)
        if other is not None:
            calibration = _calibrate(network, functools.partial(measure, other), exit_criterion, allowed_loss)
        metrics = measure(corpus)
        if other is not None:
            thinking["exit_threshold"] = calibration["exit_threshold"]
            with exit_of(network, "fixed", None):
                metrics["always_lm_loss"] = measure(corpus)["lm_loss"]
    settings = {"block_size": length, "overlap": overlap or None, "last_percentage": last_percentage}
    settings |= {"limit": limit, **thinking}
    result = {
        "task": "causal-lm",
        "model": model,
        "dataset": ", ".join(data),
        "split": split,
        "settings": settings,
        "metrics": metrics,
        **({"calibration": calibration} if calibration else {}),
        "text": corpus.sizes["validation"],
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    written = write_results(result, out) if out else {}
    if update_card:
        written["card"] = _update_card(model, data, result)
    return result | written


def validate_exit(criterion: str | None, threshold: float | None) -> None:
    """Raises UsageError for an unknown criterion, or a threshold that it does not have."""
    kind = None if criterion is None else as_usage_errors(exit_class, criterion)
    if threshold is None:
        return
    if kind is None or kind.default_threshold is None:
        names = ", ".join(name for name, one in EXIT_CRITERIA.items() if one.default_threshold is not None)
        raise UsageError(f"a threshold is of the criteria {names}; give --exit-criterion with it", "--exit-threshold")
    if not 0 < threshold <= kind.highest_threshold:
        upper = "" if math.isinf(kind.highest_threshold) else f" and at most {kind.highest_threshold:g}, a probability"
        raise UsageError(f"{threshold:g}; {criterion} wants a number above 0{upper}", "--exit-threshold")


def _validate_kind(name: str, thinking: dict[str, Any]) -> None:
    """Only a model with segments can be told how long to think."""
    config = load_config(name, LANGUAGE_MODEL)
    flags = ["--" + field.replace("_", "-") for field, value in thinking.items() if value is not None]
    if flags and not has_ability(config, "recurrent_depth"):
        raise ValueError(
            f"{name} is a model of type {config.model_type}, which has no segments; leave out {', '.join(flags)}"
        )


def _load(name: str, vocabulary: int, thinking: dict[str, Any]):
    network = AutoModelForCausalLM.from_pretrained(name).eval()
    # On the loaded model: with one segment from the start it would have no gate.
    for field, value in thinking.items():
        if value is not None:
            setattr(network.config, {"num_segments": "halt_max_steps"}.get(field, field), value)
    embeddings = network.get_input_embeddings().num_embeddings
    if embeddings < vocabulary:
        raise ValueError(
            f"{name} has {embeddings} embeddings, the tokenizer {vocabulary} tokens; use the tokenizer that the "
            "weights were trained with"
        )
    return network


def _block_size(network, words, asked: int | None, name: str) -> int:
    room = model_positions(network, words)
    if asked and asked > room:
        raise UsageError(f"{asked} tokens; {name} has {room} positions", "--block-size")
    return asked or min(room, MAX_BLOCK_SIZE)


def model_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens of one sequence."""
    return getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length


@contextlib.contextmanager
def exit_of(network: PreTrainedModel, criterion: str, threshold: float | None) -> Iterator[None]:
    """The model halts its tokens in another way for a while."""
    own = network.config.exit_criterion, network.config.exit_threshold
    network.config.exit_criterion, network.config.exit_threshold = criterion, threshold
    try:
        yield
    finally:
        network.config.exit_criterion, network.config.exit_threshold = own


def _calibrate(
    network: PreTrainedModel, measure: Callable[[], dict[str, Any]], criterion: str, allowed_loss: float
) -> dict[str, Any]:
    """See `calibrate_exit`; the model's config has the threshold afterwards."""

    def measure_at(threshold: float | None) -> dict[str, Any]:
        with exit_of(network, "fixed" if threshold is None else criterion, threshold):
            return measure()

    found = calibrate_exit(measure_at, criterion, allowed_loss)
    network.config.exit_threshold = found["exit_threshold"]
    return found


def _measure(network, corpus: TextCorpus, batch_size: int, device: str | None, limit: int | None) -> dict[str, Any]:
    """Means over all predicted tokens, and tokens a second."""
    rows = corpus.validation
    rows = rows.select(range(min(limit, len(rows)))) if limit else rows
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants a place to write, and writes nothing here
        args = LmTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=batch_size,
            use_cpu=device == "cpu",
            report_to=[],
            dataloader_pin_memory=False,
            disable_tqdm=not sys.stderr.isatty(),
        )
        # Its constructor refuses quantized weights, because they cannot be trained; nothing is trained here.
        quantized, network.is_quantized = getattr(network, "is_quantized", False), False
        trainer = CausalLMTrainer(
            network, args, corpus.eval_bytes_per_token, eval_dataset=rows, data_collator=default_data_collator
        )
        network.is_quantized = quantized
        trainer.remove_callback(PrinterCallback)
        found = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    seconds = found["runtime"]
    metrics = {name: value for name, value in found.items() if name not in SPEED}
    if "avg_steps" in metrics:
        metrics["average_steps"] = metrics.pop("avg_steps")
    return metrics | {"tokens_per_second": metrics["tokens"] / seconds if seconds else None}


def _update_card(model: str, data: list[str], result: dict[str, Any]) -> str:
    names = [Path(source).name if Path(source).exists() else source for source in data]
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    figures = {name: result["metrics"][name] for name in CARD_METRICS if name in result["metrics"]}
    return str(record_evaluation(model, figures, "+".join(names), result["split"], result["parameters"], **settings))
