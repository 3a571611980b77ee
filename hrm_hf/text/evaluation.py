"""Evaluate any causal language model on text: perplexity and bits per byte.

`corpus.py` packs the text and `CausalLMTrainer.evaluate` computes the metrics, so they match the metrics that the
training script prints. For multiple-choice and generation tasks, use lm-evaluation-harness.
"""

import contextlib
import sys
import tempfile
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
from ..hub.kinds import LANGUAGE_MODEL, load_config, load_network
from ..io.evaluation import chosen_device, write_results
from ..io.usage import UsageError
from ..registry import has_ability
from ..trainer.recipes import library_versions
from .arguments import DEFAULT_BLOCK_SIZE, LmDataArguments, LmTrainingArguments
from .causal_lm import load_tokenizer
from .corpus import TextCorpus, load_evaluation_text
from .options import EvaluateLm
from .trainer import CausalLMTrainer


SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "model_preparation_time")
# Quality metrics for the model card; results.json has all metrics.
CARD_METRICS = ("lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps")


def evaluate_checkpoint(options: EvaluateLm) -> dict[str, Any]:
    """Measure perplexity, bits per byte and the mean number of segments. Return the results and the written files.

    Raises:
        UsageError: the device does not exist, or an option does not fit the model.
        ModelError: the model does not exist, or is not a language model.
        ValueError: a halting option is set for a model without segments, or the tokenizer is too large.
    """
    device = options.device and chosen_device(options.device)
    if device and ":" in device and not device.endswith(":0"):
        raise UsageError(f"device={device}: must have index 0; for another GPU, set CUDA_VISIBLE_DEVICES", "--device")
    thinking = {"num_segments": options.num_segments} if options.num_segments else {}
    thinking |= options.halting
    config = load_config(options.model, LANGUAGE_MODEL)
    tokenizer = load_tokenizer(options.tokenizer, options.model)
    network = _load(options.model, config, tokenizer, thinking)
    positions = model_positions(network, tokenizer)
    length = options.block_size or min(positions, DEFAULT_BLOCK_SIZE)
    if length > positions:
        raise UsageError(f"block_size={length}: {options.model} has {positions} positions; lower it", "--block-size")
    if options.overlap >= length:
        raise UsageError(f"overlap={options.overlap}: must be < {length}, the number of tokens per row", "--overlap")
    text = LmDataArguments(
        eval_data=options.data,
        eval_split=options.split,
        text_column=options.text_column,
        document_separator=options.document_separator,
        on_bad_line=options.on_bad_line,
        block_size=length,
        chunk_overlap=options.overlap,
    )
    corpus = load_evaluation_text(text, tokenizer, options.last_percentage)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is reserved for the results, but libraries may print
        metrics = _measure(network, corpus, options.batch_size, device, options.limit)
    settings = {"block_size": length, "overlap": options.overlap or None, "last_percentage": options.last_percentage}
    names = ("num_segments", "exit_criterion", "exit_threshold")
    settings |= {"limit": options.limit, **{name: thinking.get(name) for name in names}}
    result = {
        "task": "causal-lm",
        "model": options.model,
        "dataset": ", ".join(options.data),
        "split": options.split,
        "settings": settings,
        "metrics": metrics,
        "text": corpus.sizes["validation"],
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    written = write_results(result, options.out) if options.out else {}
    if options.update_card:
        written["card"] = _update_card(options.model, options.data, result)
    return result | written


def _load(name: str, config, tokenizer: PreTrainedTokenizerBase, thinking: dict[str, Any]) -> PreTrainedModel:
    """Load a model and set its halting options. Raise ValueError if the options or tokenizer do not match it."""
    if thinking and not has_ability(config, "recurrent_depth"):
        flags = ", ".join("--" + field.replace("_", "-") for field in thinking)
        raise ValueError(f"{name} is a model of type {config.model_type}, which has no segments; remove {flags}")
    network = load_network(name, AutoModelForCausalLM)
    # Change the config only after loading, because a model built for one segment has no halting gate.
    for field, value in thinking.items():
        setattr(network.config, {"num_segments": "halt_max_steps"}.get(field, field), value)
    embeddings = network.get_input_embeddings().num_embeddings
    if embeddings < len(tokenizer):
        raise ValueError(
            f"{name} has {embeddings} embeddings, but the tokenizer has {len(tokenizer)} tokens; use the tokenizer "
            "that the weights were trained with"
        )
    return network


def model_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the maximum number of tokens that the model accepts in a sequence."""
    return getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length


def _measure(network, corpus: TextCorpus, batch_size: int, device: str | None, limit: int | None) -> dict[str, Any]:
    """Return the metrics, averaged over all predicted tokens, and the speed in tokens per second."""
    rows = corpus.validation
    rows = rows.select(range(min(limit, len(rows)))) if limit else rows
    with tempfile.TemporaryDirectory() as folder:  # the trainer requires a folder but writes nothing to it
        args = LmTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=batch_size,
            use_cpu=device == "cpu",
            report_to=[],
            dataloader_pin_memory=False,
            disable_tqdm=not sys.stderr.isatty(),
        )
        # The trainer rejects quantized weights because they cannot be trained; here they are only evaluated.
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
    metrics = {name: result["metrics"][name] for name in CARD_METRICS if name in result["metrics"]}
    return str(record_evaluation(model, metrics, "+".join(names), result["split"], result["parameters"], **settings))
