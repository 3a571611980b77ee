"""Repairs by edits against new attempts when both may write equally many tokens.

The failures are the model's own: it writes plans and codes for held-out problems until enough of them do not pass the
validator. Each failure then gets the same number of new tokens three times: for edits of the failed attempt, for whole
new codes of the same plan, and for half of each. Tries are drawn independently of each other, one after the other,
until one passes or the tokens are spent; a try that the rest of them does not pay for does not count.

After a validator has looked, an answer may still be worse than what it repairs: deleting what is wrong passes too.
Hence the share of answers that are shorter than their attempt by `is_shortened`, valid answers without these, those
that are not shorter than the reference either, and the subtree F1 to the reference before and after. The reference is
the fairer measure of new attempts, which know nothing of the failed one.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.collator import GoStreamBuilder
from ..shortening import is_shortened
from .failures import REASONS, OwnFailure, own_failures, usable_records
from .held_out import Record, Sampling, Try, Validator, edit_tries, which_pass, whole_codes
from .metrics import mean, paired_gain, rate, rate_with_interval
from .similarity import subtree_f1
from .writer import Writer


MAX_TRIES = 32  # of one kind for one failure: an empty list of edits costs one token, and greedy ones are all the same
ROUNDS = 20  # of writing first attempts, at most: a strong model may not fail as often as asked
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the tokens, for the curve
POLICIES = ("edits", "resampling", "half")


@dataclass
class Failure(OwnFailure):
    """A failure and what was tried after it.

    Attributes:
        edits, resampling: tries in the order in which they were drawn, and whether each passes.
    """

    edits: list[tuple[Try, bool]] = field(default_factory=list)
    resampling: list[tuple[Try, bool]] = field(default_factory=list)

    def answer(self, policy: str, budget: float) -> str | None:
        """The first code that passes within a budget of new tokens; None if none does."""
        if policy != "half":
            return _first(getattr(self, policy), budget)[0]
        code, spent = _first(self.edits, budget / 2)
        return code if code is not None else _first(self.resampling, budget - spent)[0]


def evaluate_equal_tokens(
    writer: Writer,
    builder: GoStreamBuilder,
    records: Sequence[Record],
    validator: Validator,
    sampling: Sampling,
    failures: int,
    budget: int = 512,
    path: Path | None = None,
) -> dict[str, Any]:
    """Valid share of edits, new attempts and half of each, at equal numbers of new tokens.

    Args:
        builder: its settings must be those of a model of edits (`repairs="edits"`).
        records: held-out records; each gives one first attempt a round, until there are enough failures.
        failures: how many to look at.
        budget: new tokens for each failure and policy.
        path: file for the failures and their tries, JSON Lines.

    Returns:
        Counts of what was written and left out; and `compare_policies` of the failures.

    Raises:
        ValueError: a builder of rewrites, or a model whose every code passes.
    """
    if builder.repairs != "edits":
        raise ValueError(
            f"repairs={builder.repairs!r}: equal tokens compare edits with new attempts; expected a model that was "
            "trained with --repair_mode edits, or --repair-mode edits"
        )
    torch.manual_seed(sampling.seed)
    found, counts = _collect(writer, builder, records, validator, sampling.temperature, failures)
    if not found:
        raise ValueError(f"no failure among {counts['attempts']} codes of the model: there is nothing to repair")
    for kind in ("edits", "resampling"):
        _draw(kind, writer, builder, found, validator, sampling.temperature, budget)
    if path:
        path.write_text("".join(json.dumps(_row(failure)) + "\n" for failure in found))
    return counts | {"temperature": sampling.temperature} | compare_policies(found, budget, sampling.seed)


def compare_policies(found: Sequence[Failure], budget: int, seed: int) -> dict[str, Any]:
    """The figures of failures and their tries, as just drawn or of `read_failures`.

    Returns:
        Of each policy `valid`, `kept` (valid and not shortened) and `complete` (valid and not shorter than the
        reference by `is_shortened`) with Wilson intervals, `shortened` (share of the valid ones), `subtree_f1` of its
        answers, the attempt where there is none, and the curve over shares of the budget; new tokens a try;
        differences of edits and of half to resampling in `kept` (`_gain`) and in `complete` (`_complete_gain`), with a
        bootstrap over problems, as failures of one problem are alike, and McNemar's exact test; kept shares by the
        category of the error.
    """
    problems = [_problem(failure) for failure in found]
    result: dict[str, Any] = {"failures": len(found), "problems": len(set(problems)), "budget": budget}
    before = [subtree_f1(failure.attempt, _reference(failure)) for failure in found]
    result["attempt_subtree_f1"] = float(np.mean(before))
    result["attempt_complete"] = rate([not is_shortened(failure.attempt, _reference(failure)) for failure in found])
    kept, complete = {}, {}
    for policy in POLICIES:
        kept[policy], complete[policy], result[policy] = _figures(found, policy, budget, before)
    for kind in ("edits", "resampling"):
        result[kind] |= _costs([getattr(failure, kind) for failure in found])
    result["tokens_ratio"] = _ratio(result["edits"]["tokens"], result["resampling"]["tokens"])
    for policy in ("edits", "half"):
        result[f"{policy}_gain"] = paired_gain(problems, kept[policy], kept["resampling"], seed)
        result[f"{policy}_complete_gain"] = paired_gain(problems, complete[policy], complete["resampling"], seed)
    result["by_category"] = _by_category(found, kept)
    return result


def read_failures(path: Path) -> list[Failure]:
    """The failures and tries that `evaluate_equal_tokens` has written to `path`."""
    return [_failure(json.loads(line)) for line in path.read_text().splitlines()]


def _collect(
    writer: Writer,
    builder: GoStreamBuilder,
    records: Sequence[Record],
    validator: Validator,
    temperature: float,
    wanted: int,
) -> tuple[list[Failure], dict[str, int]]:
    """At most `wanted` failures, from as many rounds over the records as it takes, and what became of all codes."""
    usable, found, seen = usable_records(records, validator), [], set()
    counts = Counter({"attempts": 0, "reference rejected": len(records) - len(usable)} | dict.fromkeys(REASONS, 0))
    for _ in range(ROUNDS if usable else 0):
        more, said = own_failures(writer, builder, usable, validator, temperature, seen)
        found += more
        counts.update(said)
        if len(found) >= wanted:
            break
    failures = [Failure(one.record, one.prompt, one.syntax_alone) for one in found[:wanted]]
    return failures, {name.replace(" ", "_"): count for name, count in counts.items()}


def _draw(
    kind: str,
    writer: Writer,
    builder: GoStreamBuilder,
    failures: Sequence[Failure],
    validator: Validator,
    temperature: float,
    budget: int,
) -> None:
    """Adds tries to each failure until one passes or the budget is spent."""
    for _ in range(MAX_TRIES):
        rows = [failure for failure in failures if _is_open(getattr(failure, kind), budget)]
        if not rows:
            return
        prefixes = [failure.record["code_prefix"] or "" for failure in rows]
        if kind == "edits":
            given = [builder.edit_prompt_ids(failure.record) for failure in rows]
            tries = edit_tries(writer, given, [failure.attempt for failure in rows], prefixes, temperature)
        else:
            tries = whole_codes(writer, [failure.prompt for failure in rows], prefixes, temperature)
        passed = which_pass(validator, [one.code for one in tries], [failure.syntax_alone for failure in rows])
        for failure, one, good in zip(rows, tries, passed):
            getattr(failure, kind).append((one, good))


def _is_open(tries: Sequence[tuple[Try, bool]], budget: int) -> bool:
    return not any(good for _, good in tries) and sum(one.tokens for one, _ in tries) < budget


def _first(tries: Sequence[tuple[Try, bool]], budget: float) -> tuple[str | None, float]:
    """The first code that passes within a budget, and the tokens that were spent on the way."""
    spent = 0.0
    for one, good in tries:
        if spent + one.tokens > budget:
            return None, budget  # begun and not finished
        spent += one.tokens
        if good:
            return one.code, spent
    return None, spent


def _figures(
    failures: Sequence[Failure], policy: str, budget: int, before: Sequence[float]
) -> tuple[list[bool], list[bool], dict[str, Any]]:
    answers = [failure.answer(policy, budget) for failure in failures]
    valid = [answer is not None for answer in answers]
    short = [answer is not None and is_shortened(answer, one.attempt) for answer, one in zip(answers, failures)]
    kept = [good and not cut for good, cut in zip(valid, short)]
    complete = [
        answer is not None and not is_shortened(answer, _reference(one)) for answer, one in zip(answers, failures)
    ]
    after = [
        score if answer is None else subtree_f1(answer, _reference(failure))
        for answer, score, failure in zip(answers, before, failures)
    ]
    curve = [rate([failure.answer(policy, share * budget) is not None for failure in failures]) for share in SHARES]
    return (
        kept,
        complete,
        {
            **rate_with_interval("valid", valid),
            **rate_with_interval("kept", kept),
            **rate_with_interval("complete", complete),
            "shortened": rate([cut for cut, good in zip(short, valid) if good]),
            "subtree_f1": float(np.mean(after)),
            "subtree_f1_of_valid": mean([score for score, good in zip(after, valid) if good]),
            "attempt_subtree_f1_of_valid": mean([score for score, good in zip(before, valid) if good]),
            "curve": {"tokens": [share * budget for share in SHARES], "valid": curve},
        },
    )


def _costs(rows: Sequence[Sequence[tuple[Try, bool]]]) -> dict[str, Any]:
    tries = [one for row in rows for one in row]
    outcomes = Counter(one.outcome for one, _ in tries if one.outcome is not None)
    figures: dict[str, Any] = {
        "tries": len(tries),
        "tokens": mean([one.tokens for one, _ in tries]),
        **rate_with_interval("valid_a_try", [good for _, good in tries]),
        **rate_with_interval("valid_first_try", [row[0][1] for row in rows if row]),
    }
    return figures | ({"outcomes": dict(outcomes)} if outcomes else {})


def _by_category(failures: Sequence[Failure], kept: dict[str, list[bool]]) -> dict[str, Any]:
    names = Counter(failure.category for failure in failures)
    rows = {name: [i for i, failure in enumerate(failures) if failure.category == name] for name in names}
    return {
        name: {"failures": count, **{policy: rate([kept[policy][i] for i in rows[name]]) for policy in POLICIES}}
        for name, count in names.most_common()
    }


def _row(failure: Failure) -> dict[str, Any]:
    tries = {
        kind: [asdict(one) | {"valid": good} for one, good in getattr(failure, kind)]
        for kind in ("edits", "resampling")
    }
    return {
        "id": failure.record["id"],
        "plan": failure.record["plan"],
        "attempt": failure.record["attempts"][0],
        "reference": _reference(failure),
        **tries,
    }


def _failure(row: dict[str, Any]) -> Failure:
    """The reverse of `_row`, but for the prompt, which is needed for new tries alone."""
    tries = {
        kind: [(Try(one["code"], one["tokens"], one["outcome"]), one["valid"]) for one in row[kind]]
        for kind in ("edits", "resampling")
    }
    solution = {"code": row["reference"]}
    record = {"id": row["id"], "plan": row["plan"], "attempts": [row["attempt"]], "solution": solution}
    return Failure(record, [], False, **tries)


def _reference(failure: Failure) -> str:
    return failure.record["solution"]["code"]


def _problem(failure: Failure) -> str:
    return failure.record["id"]


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
