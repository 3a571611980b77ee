"""`hrm-hf eval lm`: perplexity and bits per byte of any causal language model on text, as training measures them.

The text is packed by `text/corpus.py` and measured by `CausalLMTrainer.evaluate`, so that the figures of a model are
those that its training script printed. Multiple-choice and generation tasks are lm-evaluation-harness's business.
"""

import contextlib
import json
import math
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .data import report
from .evaluate_checks import RESULTS_FILE, BadLines, OnBadLine, check_arguments, chosen_device, model_config


MAX_BLOCK_SIZE = 1024  # where the model has room for more, unless told otherwise
SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "model_preparation_time")
# results.json has the others too. A card gets those that say something about quality.
CARD_METRICS = ("lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps")
SCREEN_METRICS = (*CARD_METRICS, "plan_loss", "code_loss", "tokens", "tokens_per_second")


class Exit(str, Enum):
    """When a token stops thinking; the names of `hrm_hf.models.early_exit.DEFAULT_THRESHOLDS`."""

    q = "q"
    cdf = "cdf"
    kl = "kl"
    latent_diff = "latent_diff"
    entropy_diff = "entropy_diff"
    fixed = "fixed"


def lm(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub; ours or transformers' own.")],
    data: Annotated[
        list[str], typer.Option(help="Text: .txt, .jsonl, .parquet, .gz, a folder, or OWNER/NAME; repeat for more.")
    ],
    split: Annotated[str, typer.Option(help="Split of data sets of the Hub, or a name for files.")] = "test",
    last_percentage: Annotated[
        float | None,
        typer.Option(min=0.01, max=99.99, help="Only the end of each source, as run_clm.py holds it out."),
    ] = None,
    text_column: Annotated[
        str, typer.Option("--text-column", "--text_column", help="JSON key or column that holds the text.")
    ] = "text",
    document_separator: Annotated[
        str | None, typer.Option(help="Line that separates the documents of a plain text.")
    ] = None,
    on_bad_line: BadLines = OnBadLine.stop,
    tokenizer: Annotated[str | None, typer.Option(help="Another tokenizer than that beside the weights.")] = None,
    block_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row; the model's positions, at most 1024, by default.")
    ] = None,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens that a row repeats from the last, as context.")] = 0,
    num_segments: Annotated[
        int | None, typer.Option(min=1, help="Most segments of a token (hrm_lm); the config's by default.")
    ] = None,
    exit_criterion: Annotated[
        Exit | None, typer.Option(help="What ends a token's thinking (hrm_lm); the config's by default.")
    ] = None,
    exit_threshold: Annotated[
        float | None, typer.Option(help="Of the criteria cdf, kl, latent_diff and entropy_diff.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first rows; bits per byte then take the whole text's bytes per token."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; the best there is by default.")] = None,
    update_card: Annotated[
        bool, typer.Option("--update-card", help="Write the results into MODEL/README.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Perplexity, bits per byte and average segments of a causal language model on text.

    Example: hrm-hf eval lm runs/hrm_lm --data input.txt --last-percentage 5 --num-segments 1 --out runs/hrm_lm/eval
    """
    check_arguments(model, out, update_card)
    device = device and chosen_device(device)
    if device and ":" in device and not device.endswith(":0"):
        raise typer.BadParameter(f"{device}: choose a GPU with CUDA_VISIBLE_DEVICES", param_hint="--device")
    if exit_threshold is not None and exit_criterion in (None, Exit.q, Exit.fixed):
        raise typer.BadParameter(
            "a threshold is of the criteria cdf, kl, latent_diff and entropy_diff; give --exit-criterion with it",
            param_hint="--exit-threshold",
        )
    if exit_threshold is not None and not 0 < exit_threshold <= (1 if exit_criterion is Exit.cdf else math.inf):
        upper = " and at most 1, a probability" if exit_criterion is Exit.cdf else ""
        raise typer.BadParameter(
            f"{exit_threshold:g}; {exit_criterion.value} wants a number above 0{upper}", param_hint="--exit-threshold"
        )
    from ..text.arguments import LmDataArguments
    from ..text.causal_lm import load_tokenizer
    from ..text.corpus import load_evaluation_text
    from ..trainer.recipes import library_versions

    thinking = {"num_segments": num_segments, "exit_criterion": exit_criterion and exit_criterion.value}
    thinking |= {"exit_threshold": exit_threshold}
    _check_kind(model, thinking)
    words = load_tokenizer(tokenizer, model)
    network = _load(model, len(words), thinking)
    length = _block_size(network, words, block_size, model)
    if overlap >= length:
        raise typer.BadParameter(f"{overlap} of {length} tokens; expected fewer than a row", param_hint="--overlap")
    options = LmDataArguments(
        eval_data=data,
        eval_split=split,
        text_column=text_column,
        document_separator=document_separator,
        on_bad_line=on_bad_line.value,
        block_size=length,
        chunk_overlap=overlap,
    )
    corpus = load_evaluation_text(options, words, last_percentage)
    rows = corpus.validation
    rows = rows.select(range(min(limit, len(rows)))) if limit else rows
    with contextlib.redirect_stdout(sys.stderr):  # where the library and what it imports may speak
        metrics = _measure(network, rows, corpus.eval_bytes_per_token, batch_size, device)
    settings = {"block_size": length, "overlap": overlap or None, "last_percentage": last_percentage}
    settings |= {"limit": limit, **thinking}
    result = {
        "task": "causal-lm",
        "model": model,
        "dataset": ", ".join(data),
        "split": split,
        "settings": settings,
        "metrics": metrics,
        "text": corpus.sizes["validation"],
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    written = _write(result, out) if out else {}
    if update_card:
        written["card"] = _update_card(model, data, result)
    if as_json:
        report({**result, **written}, True)
    else:
        shown = {name: metrics[name] for name in SCREEN_METRICS if name in metrics}
        shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in shown.items()}
        report({**shown, **written}, False)


def _check_kind(name: str, thinking: dict[str, Any]) -> None:
    """Only a causal language model can be measured, and only one with segments can be told how long to think."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = model_config(name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{name} is a model of type {config.model_type}, no causal language model; for ours that are none "
            "there are hrm-hf eval puzzles and hrm-hf eval cosmo"
        )
    flags = ["--" + field.replace("_", "-") for field, value in thinking.items() if value is not None]
    if flags and config.model_type != "hrm_lm":
        raise ValueError(
            f"{name} is a model of type {config.model_type}, which has no segments; leave out {', '.join(flags)}"
        )


def _load(name: str, vocabulary: int, thinking: dict[str, Any]):
    from transformers import AutoModelForCausalLM

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
    from ..golang.evaluation.writer import model_positions

    room = model_positions(network, words)
    if asked and asked > room:
        raise typer.BadParameter(f"{asked} tokens; {name} has {room} positions", param_hint="--block-size")
    return asked or min(room, MAX_BLOCK_SIZE)


def _measure(network, rows, bytes_per_token: float, batch_size: int, device: str | None) -> dict[str, Any]:
    """Means over all predicted tokens, and tokens a second."""
    from transformers import PrinterCallback, default_data_collator

    from ..text.arguments import LmTrainingArguments
    from ..text.trainer import CausalLMTrainer

    with tempfile.TemporaryDirectory() as folder:  # the trainer wants a place to write, and writes nothing here
        args = LmTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=batch_size,
            use_cpu=device == "cpu",
            report_to=[],
            dataloader_pin_memory=False,
            disable_tqdm=not sys.stderr.isatty(),
        )
        # Its constructor refuses quantised weights, because they cannot be trained; nothing is trained here.
        quantised, network.is_quantized = getattr(network, "is_quantized", False), False
        trainer = CausalLMTrainer(
            network, args, bytes_per_token, eval_dataset=rows, data_collator=default_data_collator
        )
        network.is_quantized = quantised
        trainer.remove_callback(PrinterCallback)
        found = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    seconds = found["runtime"]
    metrics = {name: value for name, value in found.items() if name not in SPEED}
    if "avg_steps" in metrics:
        metrics["average_steps"] = metrics.pop("avg_steps")
    return metrics | {"tokens_per_second": metrics["tokens"] / seconds if seconds else None}


def _update_card(model: str, data: list[str], result: dict[str, Any]) -> str:
    from ..hub.cards import record_evaluation

    names = [Path(source).name if Path(source).exists() else source for source in data]
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    figures = {name: result["metrics"][name] for name in CARD_METRICS if name in result["metrics"]}
    return str(record_evaluation(model, figures, "+".join(names), result["split"], result["parameters"], **settings))


def _write(result: dict[str, Any], out: Path) -> dict[str, str]:
    out.mkdir(parents=True, exist_ok=True)
    file = out / RESULTS_FILE
    file.write_text(json.dumps(result, indent=1))
    return {"results": str(file)}
