"""Go code from descriptions: plans, attempts, what a validator says of them, and repairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hub.kinds import GO_CODER, load_config
from ..io.evaluation import chosen_device
from ..io.usage import UsageError
from ..io.words import counted


if TYPE_CHECKING:
    from ..models.refinement_hrm_go_coder import RefinementOutput


def generate_code(
    model: str,
    prompts: list[str] | None = None,
    *,
    prefix: list[str] | None = None,
    records: Path | None = None,
    limit: int = 3,
    validator: str = "auto",
    max_iterations: int | None = None,
    threshold: float | None = None,
    repair_mode: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    repetition_guard: bool = True,
    lexical: bool = False,
    seed: int = 0,
    device: str | None = None,
    stream: Callable[[str, str], None] | None = None,
) -> tuple[list[str], RefinementOutput]:
    """Writes code for prompts, or for `limit` records from all over a file.

    Args:
        model: Go coder; a checkpoint folder, or a model on the Hub.
        prefix: how the code begins, one for each prompt.
        validator: as of `best_validator`, or "none".
        max_iterations, threshold, repair_mode, max_new_tokens: as of `generate_with_refinement`; the model's own if
            None.
        temperature: 0 takes the likeliest token.
        repetition_guard: plans and codes may not go round in circles.
        lexical: whole codes are written under `GoLexicalLogitsProcessor`, balanced; edits are not.
        device: as of `chosen_device`.
        stream: called with the prompt and a piece of its first attempt, as it is written; several prompts are written
            together, and not streamed.

    Returns:
        The prompts, and what was written for each.

    Raises:
        UsageError: neither prompts nor records, or prefixes that are not one for each prompt.
        ModelError: a model that is nowhere, or of another kind.
        ValueError: a file without records.
    """
    if bool(prompts) == (records is not None):
        raise UsageError("give prompts, or --records FILE", "PROMPTS")
    if prompts and prefix and len(prefix) != len(prompts):
        raise UsageError(f"{len(prefix)} for {counted(len(prompts), 'prompt')}; one for each", "--prefix")
    load_config(model, GO_CODER, adapters=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed  # seconds, which the checks above spare

    from .lexical import GoLexicalLogitsProcessor
    from .validators.go_validators import best_validator

    tasks = _tasks(prompts, prefix, records, limit)
    device = chosen_device(device)
    coder = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if max_new_tokens:
        sampling["max_new_tokens"] = max_new_tokens
    if lexical:
        sampling["logits_processor"] = [GoLexicalLogitsProcessor(tokenizer, balanced=True)]
    if stream is not None and len(tasks) == 1:
        sampling["streamer"] = _first_text(tokenizer, partial(stream, tasks[0]["prompt"]))
    result = coder.generate_with_refinement(
        [task["prompt"] for task in tasks],
        tokenizer=tokenizer,
        validator=None if validator == "none" else best_validator(validator),
        max_refinement_iterations=max_iterations,
        refinement_threshold=threshold,
        repair_mode=repair_mode,
        code_prefixes=[task["prefix"] for task in tasks],
        contexts=[task["context"] for task in tasks],
        repetition_guard=repetition_guard,
        **sampling,
    )
    return [task["prompt"] for task in tasks], result


def _first_text(tokenizer: Any, show: Callable[[str], None]):
    """A streamer that hands the pieces of the first text to `show`, and nothing of what follows its end."""
    from transformers import TextStreamer

    class FirstText(TextStreamer):
        ended = False

        def on_finalized_text(self, text: str, stream_end: bool = False):
            if not self.ended:
                show(text)
            self.ended |= stream_end

    return FirstText(tokenizer)


def _tasks(prompts, prefixes, records: Path | None, limit: int) -> list[dict[str, Any]]:
    """Prompts with prefix and context, from the command line or from records."""
    if records is None:
        prefixes = prefixes or [""] * len(prompts)
        return [{"prompt": p, "prefix": q, "context": ("", "")} for p, q in zip(prompts, prefixes)]
    from .data.records import read_records, spread

    rows = list(read_records(records))
    if not rows:
        raise ValueError(f"{records} has no records")
    tasks = []
    for row in spread(rows, limit):
        problem, context = row["problem"], row["context"] or {}
        text = "\n\n".join(part for part in (problem["title"], problem["body"]) if part)
        named = context.get("path") or "", context.get("before") or ""
        tasks.append({"prompt": text, "prefix": row["code_prefix"] or "", "context": named})
    return tasks
