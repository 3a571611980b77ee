"""Refinement trajectories: records whose attempts fail, are judged by a validator, and end in the solution.

    solution --eight operators--> candidates --validator--> "syntax": does not parse
                                                            "types":  parses, does not type-check
                                                            dropped:  passes; or the same code after all
    solution itself                                         right

The decision on an attempt is CONTINUE (repair it) after a verdict with an error, REFINE (plan again) where the verdict
is good and the oracle knows better, DONE where both are content. With the oracle "types" half of the trajectories of
code that type-checks show verdicts on syntax alone. Candidates that pass are dropped: reordered lines may be right.

A trajectory is one to four attempts, the last of which is the solution, a third of all attempts. A record has one
plan, so the plan behind <REFINE> is the same again.
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
# decisions is DONE; after none, one or two failures the next attempt is the solution with probability 0.19.
FAILED_ATTEMPTS = (0.19, 0.154, 0.125, 0.531)
SYNTAX_ALONE = 0.5  # share of trajectories that show verdicts on syntax alone, where an oracle knows the types
NO_FEEDBACK_SHARE = 0.1  # trajectories without any feedback, for use without a validator
MAX_CHARACTERS = 4000  # of all codes of a trajectory together; failed attempts that would exceed it are left out
CHUNK = 64  # records whose candidates go to the validator in one call


@dataclass
class TrajectoryCounts:
    """Counts of `build_trajectories`, kept while it is iterated.

    Attributes:
        decisions: attempts by "CONTINUE", "REFINE", "DONE".
        kinds: failed attempts that were taken, by "syntax" and "types".
        dropped: records and candidates that were left out, by reason.
    """

    decisions: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def shares(self) -> dict[str, float]:
        """Share of each class among all decisions."""
        return {name: count / self.decisions.total() for name, count in sorted(self.decisions.items())}


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
    oracle: str = "none",
    counts: TrajectoryCounts | None = None,
) -> Iterator[dict[str, Any]]:
    """Make refinement trajectories of plain records.

    The same records in the same order, with the same validator and seed, give the same trajectories.

    Args:
        records: of `records.py`; their attempts, if any, are replaced.
        validator: its verdict on types counts only for records whose solution type-checks: a function taken out of its
            package names what it cannot know.
        seed: of all chance.
        per_record: trajectories per record, with different failed attempts; fewer if a record does not give them.
        oracle: "none", or "types" (needs a validator that looks at them).
        counts: filled while iterating.

    Yields:
        Records with `attempts` [{code, feedback, decision}], and "#1", "#2", ... after their id.
    """
    from tqdm import tqdm

    counts = TrajectoryCounts() if counts is None else counts
    iterator = iter(tqdm(records, desc="trajectories", unit=" records", disable=None))
    while chunk := list(islice(iterator, CHUNK)):
        for source in _judged(chunk, validator, seed, counts):
            generator = random.Random(f"{seed}/draw/{source.record['id']}")
            lengths = []
            for _ in range(per_record):
                count = generator.choices(range(len(FAILED_ATTEMPTS)), FAILED_ATTEMPTS)[0]
                failed = _draw(source, count, generator, counts)
                hidden = bool(source.feedback.types_ok) and oracle == "types" and generator.random() < SYNTAX_ALONE
                if not failed and 0 in lengths:
                    counts.dropped["second clean trajectory of a record"] += 1
                    continue
                lengths.append(len(failed))
                heard = generator.random() >= NO_FEEDBACK_SHARE
                yield _trajectory(source, failed, len(lengths), heard, hidden, counts)


def _judged(
    chunk: list[dict[str, Any]], validator: Validator, seed: int, counts: TrajectoryCounts
) -> Iterator[_Source]:
    """Mutate the solutions of a chunk, have all codes validated in one call, and sort them."""
    solutions = [record["solution"]["code"] for record in chunk]
    sound = []
    for record, code, verdict in zip(chunk, solutions, validator(solutions)):
        if verdict.syntax_ok is None:
            counts.dropped["solution was not checked"] += 1
        elif not verdict.syntax_ok:
            counts.dropped["solution does not parse"] += 1
        elif not code[len(record["code_prefix"]) :].strip():
            counts.dropped["solution is its prefix alone"] += 1
        else:
            sound.append((record, code, verdict))
    candidates = [
        mutants(code, record["code_prefix"], random.Random(f"{seed}/damage/{record['id']}"))
        for record, code, _ in sound
    ]
    judged = iter(validator([mutant for found in candidates for mutant in found]))
    for (record, code, verdict), found in zip(sound, candidates):
        typed = verdict.types_ok is True
        source = _Source(record, verdict if typed else verdict.of_syntax(), {"syntax": [], "types": []})
        shape = syntax_shape(code)
        for mutant in found:
            feedback = next(judged)
            feedback = feedback if typed else feedback.of_syntax()
            if feedback.failed:
                source.failed["syntax" if feedback.syntax_ok is False else "types"].append((mutant, feedback))
            elif feedback.syntax_ok is None:
                counts.dropped["candidate was not checked"] += 1
            else:
                same = syntax_shape(mutant) == shape
                counts.dropped["candidate is the same code" if same else "candidate passes"] += 1
        yield source


def _draw(
    source: _Source, count: int, generator: random.Random, counts: TrajectoryCounts
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
        if characters > MAX_CHARACTERS:
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
    counts.decisions.update(attempt["decision"] for attempt in attempts)
    return {**record, "id": f"{record['id']}#{number}", "attempts": attempts}
