"""Write Go code from descriptions, with plans, attempts, validator feedback and repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ..hub.kinds import GO_CODER, load_config, load_network
from ..io.evaluation import chosen_device
from .options import WriteGo


if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

    from ..models.processing_hrm_go_coder import Feedback
    from ..models.refinement_hrm_go_coder import RefinementOutput

TRIED_RECORDS, TRIED_AT_ONCE = 64, 8  # number of records that `--repair` tries in total, and per batch
REPAIR_TEMPERATURE = 0.8


def generate_code(
    options: WriteGo, stream: Callable[[str, str], None] | None = None
) -> tuple[list[str], RefinementOutput]:
    """Write code for prompts, or for records in a file, and return the prompts and the results.

    From a file, it uses `limit` evenly spaced records. With `repair`, it tries up to 64 records until the model
    repairs an attempt that the validator rejects, and returns only that record, or none.

    Args:
        stream: called with the prompt and each new piece of its first attempt; only used for a single prompt.

    Raises:
        ModelError: the model is not found, or is not a Go coder.
        ValueError: the file has no records.
    """
    load_config(options.model, GO_CODER, adapters=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow import, so check the model first

    from .validators.go_validators import best_validator

    tasks = tasks_of(options)
    coder = load_network(options.model, AutoModelForCausalLM).to(chosen_device(options.device))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    validator = None if options.validator == "none" else best_validator(options.validator)
    live = None
    if stream is not None and len(tasks) == 1:
        live = _first_text(tokenizer, partial(stream, tasks[0]["prompt"]))
    write = partial(write_tasks, coder, tokenizer, validator, options, streamer=live)
    if not options.repair:
        return [task["prompt"] for task in tasks], write(tasks)
    for start in range(0, len(tasks), TRIED_AT_ONCE):
        some = tasks[start : start + TRIED_AT_ONCE]
        result = write(some)
        for row, attempts in enumerate(result.attempts):
            if _repairs(attempts):
                return [some[row]["prompt"]], _rows(result, slice(row, row + 1))
    return [], _rows(result, slice(0))


def write_tasks(
    coder: PreTrainedModel,
    tokenizer: Any,
    validator: Callable[[list[str]], list[Feedback]] | None,
    options: WriteGo,
    tasks: list[dict[str, Any]],
    streamer: BaseStreamer | None = None,
) -> RefinementOutput:
    """Write code for tasks from `tasks_of`, and return every plan, attempt and verdict."""
    import torch

    temperature = options.temperature
    if temperature is None:
        temperature = REPAIR_TEMPERATURE if options.repair else 0
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if options.max_new_tokens:
        how["max_new_tokens"] = options.max_new_tokens
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return coder.generate_with_refinement(
            [task["prompt"] for task in tasks],
            tokenizer=tokenizer,
            validator=validator,
            max_refinement_iterations=options.max_iterations,
            refinement_threshold=options.threshold,
            code_prefixes=[task["prefix"] for task in tasks],
            contexts=[task["context"] for task in tasks],
            streamer=streamer,
            repetition_guard=options.repetition_guard,
            **how,
        )


def _repairs(attempts: list) -> bool:
    """Check whether the last attempt repairs a failed one without shortening the code."""
    from .evaluation.similarity import is_shortened

    if len(attempts) < 2 or attempts[-2].decision != "CONTINUE":
        return False
    failed, repaired = attempts[-2:]
    return failed.feedback.failed and not repaired.feedback.failed and not is_shortened(repaired.code, failed.code)


def _rows(result: RefinementOutput, rows: slice) -> RefinementOutput:
    return type(result)(**{each.name: getattr(result, each.name)[rows] for each in fields(result)})


def _first_text(tokenizer: Any, show: Callable[[str], None]):
    """Return a streamer that passes the first generated text to `show` piece by piece, and ignores later texts."""
    from transformers import TextStreamer

    class FirstText(TextStreamer):
        ended = False

        def on_finalized_text(self, text: str, stream_end: bool = False):
            if not self.ended:
                show(text)
            self.ended |= stream_end

    return FirstText(tokenizer)


def tasks_of(options: WriteGo) -> list[dict[str, Any]]:
    """Return a dict with the keys "prompt", "prefix" and "context" (path and text) for each prompt or record."""
    if options.records is None:
        prefixes = options.prefix or [""] * len(options.prompts)
        return [{"prompt": p, "prefix": q, "context": ("", "")} for p, q in zip(options.prompts, prefixes)]
    from .data.records import problem_text, read_records, spread

    rows = list(read_records(options.records))
    if not rows:
        raise ValueError(f"records={str(options.records)!r}: the file has no records")
    tasks = []
    for row in spread(rows, TRIED_RECORDS if options.repair else options.limit):
        context = row["context"]["path"], row["context"]["before"]
        tasks.append({"prompt": problem_text(row), "prefix": row["code_prefix"], "context": context})
    return tasks
