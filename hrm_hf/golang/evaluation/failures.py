"""Failures of a model's own: what it writes for problems and the validator does not pass."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...models.processing_hrm_go_coder import TOKEN_IDS, parse_plan
from ..data.collator import GoStreamBuilder, TooLongError
from ..data.records import validate_record
from ..data.trajectories import failed_record
from .held_out import Record, Validator
from .writer import Writer


REASONS = ("passed", "repeated", "plan unreadable", "too long")  # why a code that was written is no failure to keep


@dataclass
class OwnFailure:
    """A code of the model's own that does not pass.

    Attributes:
        record: a trajectory: the plan that was written, the failed attempt, and the reference behind it.
        prompt: ids that the plan was written behind, and the plan.
        syntax_alone: the reference does not type-check by itself, so that types say nothing.
    """

    record: Record
    prompt: list[int]
    syntax_alone: bool

    @property
    def attempt(self) -> str:
        return self.record["attempts"][0]["code"]

    @property
    def category(self) -> str:
        return self.record["attempts"][0]["feedback"]["category"]


def usable_records(records: Sequence[Record], validator: Validator) -> list[tuple[Record, bool]]:
    """The records whose reference parses, and of each whether types say nothing, as its reference does not check."""
    verdicts = validator([record["solution"]["code"] for record in records])
    return [(record, verdict.types_ok is False) for record, verdict in zip(records, verdicts) if verdict.syntax_ok]


def own_failures(
    writer: Writer,
    builder: GoStreamBuilder,
    usable: Sequence[tuple[Record, bool]],
    validator: Validator,
    temperature: float,
    seen: set[tuple[str, str]],
) -> tuple[list[OwnFailure], Counter]:
    """One sampled plan and code for each record, and those that do not pass.

    Args:
        usable: as of `usable_records`.
        seen: ids and codes that were kept before, which are not kept again; those of this call are added.

    Returns:
        the failures, and how many codes were written ("attempts") and dropped for each of REASONS.
    """
    prompts = [builder.prompt_ids(record) for record, _ in usable]
    plans, codes = writer.planned_codes(prompts, [record["code_prefix"] or "" for record, _ in usable], temperature)
    verdicts = validator(codes)
    found, counts = [], Counter({"attempts": len(codes)} | dict.fromkeys(REASONS, 0))
    for (record, alone), prompt, ids, code, verdict in zip(usable, prompts, plans, codes, verdicts):
        plan = parse_plan(writer.tokenizer, ids)
        verdict = verdict.of_syntax() if alone else verdict
        failed = failed_record(record, code, verdict, plan=plan)
        if not verdict.failed:
            counts["passed"] += 1
        elif (record["id"], code) in seen:
            counts["repeated"] += 1
        elif not is_record(failed):
            counts["plan unreadable"] += 1
        elif not fits(builder, failed):
            counts["too long"] += 1
        else:
            seen.add((record["id"], code))
            found.append(OwnFailure(failed, [*prompt, *ids, TOKEN_IDS["</PLAN>"]], alone))
    return found, counts


def is_record(record: Record) -> bool:
    """False of a plan without an intent, or with a target that names nothing."""
    try:
        validate_record(record)
    except ValueError:
        return False
    return True


def fits(builder: GoStreamBuilder, record: Record) -> bool:
    """False of a trajectory whose plan, attempt and verdict are longer than a row may be."""
    try:
        builder.edit_prompt_ids(record)
    except TooLongError:
        return False
    return True
