"""Refinement trajectories: records whose attempts fail, are judged by a validator, and end in the solution.

    solution --eight operators--> candidates --validator--> "syntax": does not parse
                                                            "types":  parses, does not type-check
                                                            dropped:  passes; or the same code after all
    solution itself                                         right

What follows an attempt is what `decision_of` says of the verdict that the stream shows and of an oracle behind it:
CONTINUE (fix it) after a verdict with an error, REFINE (plan anew) where the verdict is good and the oracle knows
better, DONE where both are content. With the oracle "types" half of the trajectories of code that type-checks show
verdicts on syntax alone. Candidates that pass are dropped: reordered lines may be right, and nothing here could tell.

The kind is the validator's, never the operator's: deleting a token leaves valid code in about a third of all cases.
A trajectory is one to four attempts, the last of which is the solution, a third of all attempts. After <REFINE> comes
a new plan in the token stream; a record has one plan, so it is the same plan again.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from ...models.processing_hrm_go_coder import CONTINUE, DECISIONS, DONE, REFINE, Feedback
from .mutations import mutants, syntax_shape


Validator = Callable[[Sequence[str]], list[Feedback]]

# Probabilities of no, one, two and three failed attempts before the solution. The mean is two, so that a third of the
# decisions is DONE; and after none, one or two failures the chance that the next attempt is the solution is always
# 0.19, so that the number of an attempt says nothing about it (but after three it is certain).
FAILED_ATTEMPTS = (0.19, 0.154, 0.125, 0.531)
ORACLES = ("none", "types")
SYNTAX_ALONE = 0.5  # share of trajectories that show verdicts on syntax alone, where an oracle knows the types
CHUNK = 64  # records whose candidates go to the validator in one call


@dataclass
class TrajectoryCounts:
    """Counts of what `build_trajectories` read, made and left out, kept while it is iterated.

    Attributes:
        records: read.
        trajectories: made.
        attempts: trajectories by their number of attempts.
        decisions: attempts by "CONTINUE", "REFINE", "DONE".
        kinds: failed attempts that were taken, by "syntax" and "types".
        operators: candidates by (operator, "syntax" | "types" | "passes" | "same code").
        dropped: records and candidates that were left out, by reason.
        without_feedback: trajectories whose feedback was dropped at random.
    """

    records: int = 0
    trajectories: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    without_feedback: int = 0

    def shares(self) -> dict[str, float]:
        """Share of each class among all decisions."""
        total = sum(self.decisions.values())
        return {name: count / total for name, count in sorted(self.decisions.items())}

    def summary(self) -> str:
        """A few lines for the screen."""
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares().items())
        lengths = ", ".join(f"{count} with {length}" for length, count in sorted(self.attempts.items()))
        dropped = "; ".join(f"{reason}: {count}" for reason, count in self.dropped.most_common()) or "nothing"
        return (
            f"{self.trajectories} trajectories of {self.records} records (attempts: {lengths}; "
            f"{self.without_feedback} without feedback)\ndecisions: {shares}\ndropped: {dropped}"
        )


@dataclass
class _Source:
    """A record with the verdict on its solution, and its failed candidates with theirs, by kind."""

    record: dict[str, Any]
    feedback: Feedback
    failed: dict[str, list[tuple[str, Feedback]]]


def decision_of(verdict: Feedback, right: bool | None) -> str | None:
    """The right decision after an attempt, by the verdict that is seen and by an oracle that is not.

    Args:
        verdict: of the validator, as the model reads it.
        right: the oracle's answer (types, tests, or that it is the solution); None where there is no oracle.

    Returns:
        "CONTINUE" after an error that the verdict names, "REFINE" if only the oracle knows of one, "DONE"; None if
        nobody can tell.
    """
    if verdict.failed:
        return DECISIONS[CONTINUE]
    return None if right is None else DECISIONS[DONE if right else REFINE]


def failed_record(
    record: dict[str, Any], code: str, verdict: Feedback, suffix: str = "", plan: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A record with a failed attempt of a model's own and then its solution.

    Args:
        suffix: of its id.
        plan: the one that the attempt was written for, as of `parse_plan`; the record's by default.
    """
    failed = {"code": code, "feedback": asdict(verdict), "decision": DECISIONS[CONTINUE]}
    solved = {"code": record["solution"]["code"], "feedback": None, "decision": DECISIONS[DONE]}
    made = {**record, "id": f"{record['id']}{suffix}", "attempts": [failed, solved]}
    if plan is not None:
        steps = [{"intent": plan["intent"], "target": "", "text": text} for text in plan["steps"]]
        made["plan"] = {"intent": plan["intent"], "targets": plan["targets"], "steps": steps}
    return made


def build_trajectories(
    records: Iterable[dict[str, Any]],
    validator: Validator,
    *,
    seed: int = 0,
    per_record: int = 2,
    failed_attempts: Sequence[float] = FAILED_ATTEMPTS,
    max_characters: int | None = 4000,
    no_feedback_share: float = 0.1,
    rounds: int = 1,
    oracle: str = "none",
    progress: bool = True,
    counts: TrajectoryCounts | None = None,
) -> Iterator[dict[str, Any]]:
    """Makes refinement trajectories of plain records.

    The same records in the same order, with the same validator and seed, give the same trajectories.

    Args:
        records: of `go_records`; their attempts, if any, are replaced.
        validator: `validator(codes) -> list[Feedback]`. Its verdict on types counts only for records whose solution
            type-checks: a function taken out of its package names what it cannot know.
        seed: of all chance.
        per_record: trajectories per record, with different failed attempts; fewer if a record does not give them.
        failed_attempts: probability of 0, 1, 2, ... failed attempts before the solution.
        max_characters: of all codes of a trajectory together; failed attempts that would exceed it are left out.
            None for no limit.
        no_feedback_share: share of trajectories whose feedback is None throughout, for use without a validator.
        rounds: how often each operator mutates each solution.
        oracle: "none", or "types" (needs a validator that looks at them).
        progress: shows a bar on stderr.
        counts: filled while iterating.

    Yields:
        Records with `attempts` [{code, feedback, decision}], and "#1", "#2", ... after their id.

    Raises:
        ValueError: per_record below 1, no_feedback_share outside [0, 1], weights that are no probabilities, or an
            unknown oracle.
    """
    _validate(per_record, failed_attempts, no_feedback_share, oracle)
    counts = TrajectoryCounts() if counts is None else counts
    if progress:
        from tqdm import tqdm

        records = tqdm(records, desc="trajectories", unit=" records")
    iterator = iter(records)
    while chunk := list(islice(iterator, CHUNK)):
        counts.records += len(chunk)
        for source in _judged(chunk, validator, seed, rounds, counts):
            generator = random.Random(f"{seed}/draw/{source.record['id']}")
            lengths = []
            for _ in range(per_record):
                count = generator.choices(range(len(failed_attempts)), failed_attempts)[0]
                failed = _draw(source, count, max_characters, generator, counts)
                hidden = bool(source.feedback.types_ok) and oracle == "types" and generator.random() < SYNTAX_ALONE
                if not failed and 0 in lengths:
                    counts.dropped["second clean trajectory of a record"] += 1
                    continue
                lengths.append(len(failed))
                heard = generator.random() >= no_feedback_share
                yield _trajectory(source, failed, len(lengths), heard, hidden, counts)


def _validate(per_record: int, failed_attempts: Sequence[float], no_feedback_share: float, oracle: str) -> None:
    if oracle not in ORACLES:
        raise ValueError(f"oracle={oracle!r} is not one of {', '.join(ORACLES)}")
    if per_record < 1:
        raise ValueError(f"per_record={per_record}: expected 1 or more")
    if not 0 <= no_feedback_share <= 1:
        raise ValueError(f"no_feedback_share={no_feedback_share}: expected a share from 0 to 1")
    if not failed_attempts or min(failed_attempts) < 0 or abs(sum(failed_attempts) - 1) > 1e-6:
        raise ValueError(f"failed_attempts={tuple(failed_attempts)}: expected probabilities that add up to 1")


def _judged(
    chunk: list[dict[str, Any]], validator: Validator, seed: int, rounds: int, counts: TrajectoryCounts
) -> Iterator[_Source]:
    """Mutates the solutions of a chunk, has all codes judged in one call, and sorts them."""
    solutions = [record["solution"]["code"] for record in chunk]
    verdicts = validator(solutions)
    sound = []
    for record, code, verdict in zip(chunk, solutions, verdicts):
        if verdict.syntax_ok is None:
            counts.dropped["solution was not checked"] += 1
        elif not verdict.syntax_ok:
            counts.dropped["solution does not parse"] += 1
        elif not code[len(record["code_prefix"]) :].strip():
            counts.dropped["solution is its prefix alone"] += 1
        else:
            sound.append((record, code, verdict))
    candidates = [
        mutants(code, record["code_prefix"], random.Random(f"{seed}/damage/{record['id']}"), rounds)
        for record, code, _ in sound
    ]
    judged = iter(validator([mutant for pairs in candidates for _, mutant in pairs]))
    for (record, code, verdict), pairs in zip(sound, candidates):
        typed = verdict.types_ok is True
        source = _Source(record, verdict if typed else verdict.of_syntax(), {"syntax": [], "types": []})
        shape = syntax_shape(code)
        for operator, mutant in pairs:
            feedback = next(judged)
            feedback = feedback if typed else feedback.of_syntax()
            _sort(source, operator, mutant, feedback, shape, counts)
        yield source


def _sort(
    source: _Source,
    operator: str,
    mutant: str,
    feedback: Feedback,
    shape: list[tuple[str, int, bytes]],
    counts: TrajectoryCounts,
) -> None:
    if feedback.syntax_ok is None:
        counts.dropped["candidate was not checked"] += 1
        return
    if feedback.failed:
        kind = "syntax" if feedback.syntax_ok is False else "types"
        source.failed[kind].append((mutant, feedback))
    else:
        kind = "same code" if syntax_shape(mutant) == shape else "passes"
        counts.dropped["candidate is the same code" if kind == "same code" else "candidate passes"] += 1
    counts.operators[operator, kind] += 1


def _draw(
    source: _Source, count: int, max_characters: int | None, generator: random.Random, counts: TrajectoryCounts
) -> list[tuple[str, Feedback]]:
    """Takes `count` failed candidates out of the source's, of the rarer kind first, as far as they fit."""
    drawn: list[tuple[str, Feedback]] = []
    characters = len(source.record["solution"]["code"])
    for _ in range(count):
        available = [kind for kind, candidates in source.failed.items() if candidates]
        if not available:
            counts.dropped["failed attempt: no candidate left"] += 1
            break
        kind = min(available, key=lambda kind: (counts.kinds[kind], generator.random()))
        candidate = source.failed[kind].pop()
        characters += len(candidate[0])
        if max_characters is not None and characters > max_characters:
            counts.dropped["failed attempt: trajectory too long"] += 1
            break
        counts.kinds[kind] += 1
        drawn.append(candidate)
    generator.shuffle(drawn)
    return drawn


def _trajectory(
    source: _Source,
    failed: list[tuple[str, Feedback]],
    number: int,
    heard: bool,
    hidden: bool,
    counts: TrajectoryCounts,
) -> dict[str, Any]:
    """`heard`: there are verdicts at all; `hidden`: they are on syntax alone, and the oracle knows the types."""
    record, attempts = source.record, []
    for code, verdict in (*failed, (record["solution"]["code"], source.feedback)):
        seen = verdict.of_syntax() if hidden else verdict
        decision = decision_of(seen, right=not verdict.failed)
        attempts.append({"code": code, "feedback": asdict(seen) if heard else None, "decision": decision})
    counts.without_feedback += not heard
    counts.trajectories += 1
    counts.attempts[len(attempts)] += 1
    counts.decisions.update(attempt["decision"] for attempt in attempts)
    return {**record, "id": f"{record['id']}#{number}", "attempts": attempts}
