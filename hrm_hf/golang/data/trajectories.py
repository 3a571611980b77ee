"""Build refinement trajectories: failed attempts with a validator's verdicts, then the solution.

    solution --eight mutations--> candidates --validator--> "syntax": does not parse
                                                            "types":  parses, does not type-check
                                                            dropped:  passes, or equals the solution
    solution itself                                         passes

Mutations change tree-sitter's tokens after the given prefix. The decision on an attempt is CONTINUE (repair it) if the
verdict has an error, REFINE (plan again) if the verdict is good but the oracle knows of an error, else DONE. With the
oracle "types", half of the trajectories of code that type-checks show only syntax verdicts. Candidates that pass
are dropped, because code with reordered lines may be correct.

A trajectory has one to four attempts and ends in the solution, so a third of all attempts are solutions. A record has
one plan, so the plan after <REFINE> repeats it.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...models.processing_hrm_go_coder import CONTINUE, DECISIONS, DONE, REFINE, Feedback
from ..validators.syntax import parse, syntax_shape


if TYPE_CHECKING:
    from tree_sitter import Node

Validator = Callable[[Sequence[str]], list[Feedback]]

# Probabilities of zero, one, two and three failed attempts before the solution. The mean is two, so a third of the
# decisions are DONE; after zero, one or two failures, the next attempt is the solution with probability 0.19.
FAILED_ATTEMPTS = (0.19, 0.154, 0.125, 0.531)
SYNTAX_ONLY = 0.5  # with the oracle "types": fraction of trajectories whose verdicts omit type errors
NO_FEEDBACK_SHARE = 0.1  # fraction of trajectories without feedback, so the model can also work without a validator
MAX_CHARACTERS = 4000  # maximum total length of the code in a trajectory; failed attempts that exceed it are dropped
CHUNK = 64  # records per validator call


@dataclass
class TrajectoryCounts:
    """Counts that `build_trajectories` updates during iteration.

    Attributes:
        decisions: attempts by decision: "CONTINUE", "REFINE", "DONE".
        kinds: failed attempts by kind: "syntax", "types".
        dropped: dropped records and candidates by reason.
    """

    decisions: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def shares(self) -> dict[str, float]:
        """Return the fraction of decisions in each class."""
        return {name: count / self.decisions.total() for name, count in sorted(self.decisions.items())}


@dataclass
class _Source:
    """A record, the verdict on its solution, and its failed candidates as {kind: (code, verdict)}."""

    record: dict[str, Any]
    feedback: Feedback
    failed: dict[str, list[tuple[str, Feedback]]]


def failed_record(record: dict[str, Any], code: str, verdict: Feedback, suffix: str = "") -> dict[str, Any]:
    """Return a record with two attempts: the failed code and the solution. Append `suffix` to its id."""
    failed = {"code": code, "feedback": asdict(verdict), "decision": DECISIONS[CONTINUE]}
    solved = {"code": record["solution"]["code"], "feedback": None, "decision": DECISIONS[DONE]}
    return {**record, "id": f"{record['id']}{suffix}", "attempts": [failed, solved]}


def build_trajectories(
    records: Iterable[dict[str, Any]],
    validator: Validator,
    *,
    seed: int = 0,
    per_record: int = 2,
    oracle: str = "none",
    counts: TrajectoryCounts | None = None,
) -> Iterator[dict[str, Any]]:
    """Turn plain records into refinement trajectories, with `attempts` and ids that end in "#1", "#2", ...

    The same records in the same order, with the same validator and seed, give the same trajectories.

    Args:
        records: plain records; existing attempts are replaced.
        validator: its verdict on types counts only if the record's solution type-checks, because a function without
            the rest of its package may use undefined names.
        seed: seed of all random choices.
        per_record: number of trajectories per record, with different failed attempts; fewer if candidates run out.
        oracle: "none", or "types" (needs a validator that checks types).
        counts: updated while iterating.
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
                syntax_only = bool(source.feedback.types_ok) and oracle == "types" and generator.random() < SYNTAX_ONLY
                if not failed and 0 in lengths:
                    counts.dropped["second clean trajectory of a record"] += 1
                    continue
                lengths.append(len(failed))
                with_feedback = generator.random() >= NO_FEEDBACK_SHARE
                yield _trajectory(source, failed, len(lengths), with_feedback, syntax_only, counts)


def _judged(
    chunk: list[dict[str, Any]], validator: Validator, seed: int, counts: TrajectoryCounts
) -> Iterator[_Source]:
    """Mutate the solutions in a chunk, validate all mutants in one call, and group failed ones by kind of error."""
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
    """Draw up to `count` failed candidates that fit MAX_CHARACTERS, preferring kinds drawn less often so far."""
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
    with_feedback: bool,
    syntax_only: bool,
    counts: TrajectoryCounts,
) -> dict[str, Any]:
    """Return a trajectory. With `syntax_only`, verdicts omit type errors, and code with a type error gets REFINE."""
    record, attempts = source.record, []
    for code, verdict in (*failed, (record["solution"]["code"], source.feedback)):
        seen = verdict.of_syntax() if syntax_only else verdict
        decision = DECISIONS[CONTINUE if seen.failed else REFINE if verdict.failed else DONE]
        attempts.append({"code": code, "feedback": asdict(seen) if with_feedback else None, "decision": decision})
    counts.decisions.update(attempt["decision"] for attempt in attempts)
    return {**record, "id": f"{record['id']}#{number}", "attempts": attempts}


# ---- mutations ----

# Quoted text counts as one token, although the parser splits it into quotes, content and escapes.
QUOTED = ("interpreted_string_literal", "raw_string_literal", "rune_literal")
IDENTIFIERS = ("identifier", "field_identifier", "type_identifier", "package_identifier")
FLIPPED = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "+": "-", "-": "+", "*": "/", "/": "*",
    "%": "/", "&&": "||", "||": "&&", "&": "|", "|": "&", "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+=",
    "++": "--", "--": "++", "&=": "|=", "|=": "&=",
}  # fmt: skip
# Under other parents, `*` is a pointer and `&` an address, not a binary operator.
BINARY_PARENTS = ("binary_expression", "assignment_statement", "inc_statement", "dec_statement")


class Token(NamedTuple):
    """A Go token: tree-sitter's node type, text, byte range [start, stop), and the type of its parent."""

    kind: str
    text: str
    start: int
    stop: int
    parent: str


class Body(NamedTuple):
    """UTF-8 code with its mutable tokens and lines. A line is (start, stop), including its line break."""

    code: bytes
    tokens: list[Token]
    lines: list[tuple[int, int]]

    def replaced(self, *edits: tuple[int, int, bytes]) -> str:
        """Return the code after non-overlapping edits, each of which replaces bytes [start, stop) with new text."""
        code = self.code
        for start, stop, text in sorted(edits, reverse=True):
            code = code[:start] + text + code[stop:]
        return code.decode()

    def change_one(self, generator: random.Random, places: list, edit: Callable) -> str | None:
        """Apply `edit` at a random element of `places` and return the code, or None if `places` is empty."""
        return self.replaced(edit(generator.choice(places))) if places else None


def go_tokens(code: str) -> list[Token]:
    """Return the tokens of Go code in order, without comments or automatic semicolons."""
    tokens: list[Token] = []
    stack: list[tuple[Node, str]] = [(parse(code).root_node, "")]
    while stack:
        node, parent = stack.pop()
        if node.children and node.type not in QUOTED:
            stack.extend((child, node.type) for child in reversed(node.children))
        elif node.type != "comment" and node.text.strip():
            tokens.append(Token(node.type, node.text.decode(), node.start_byte, node.end_byte, parent))
    return tokens


def mutants(code: str, prefix: str, generator: random.Random) -> list[str]:
    """Mutate valid code once with each operator that finds something to change after the prefix.

    Returns:
        Mutated code samples in random order, without duplicates and without `code` itself.

    Raises:
        ValueError: the code does not begin with the prefix.
    """
    body = body_of(code, prefix)
    made = [operator(body, generator) for operator in OPERATORS.values()]
    found = list(dict.fromkeys(mutant for mutant in made if mutant is not None and mutant != code))
    generator.shuffle(found)
    return found


def body_of(code: str, prefix: str) -> Body:
    """Find the tokens and lines after the prefix. Raises ValueError if the code does not begin with it."""
    if not code.startswith(prefix):
        raise ValueError(f"prefix={prefix[:60]!r}: the code does not begin with this prefix")
    encoded, start = code.encode(), len(prefix.encode())
    tokens = [token for token in go_tokens(code) if token.start >= start]
    lines, position = [], 0
    firsts = {token.start for token in tokens}
    for line in encoded.splitlines(keepends=True):
        stop = position + len(line)
        # Skip blank lines and lines inside a multi-line token, so that line operators do not edit them.
        if position >= start and any(first in firsts for first in range(position, stop)):
            lines.append((position, stop))
        position = stop
    return Body(encoded, tokens, lines)


def _swap_identifiers(body: Body, generator: random.Random) -> str | None:
    identifiers = [token for token in body.tokens if token.kind in IDENTIFIERS]
    if len({token.text for token in identifiers}) < 2:
        return None
    first = generator.choice(identifiers)
    second = generator.choice([token for token in identifiers if token.text != first.text])
    return body.replaced(
        (first.start, first.stop, second.text.encode()), (second.start, second.stop, first.text.encode())
    )


def _swap_lines(body: Body, generator: random.Random) -> str | None:
    """Swap two adjacent lines with the same indentation."""
    texts = {line: body.code[slice(*line)] for line in body.lines}
    indented = {line: len(text) - len(text.lstrip(b" \t")) for line, text in texts.items()}
    neighbors = [(a, b) for a, b in pairwise(body.lines) if a[1] == b[0] and indented[a] == indented[b]]
    if not neighbors:
        return None
    upper, lower = generator.choice(neighbors)
    return body.replaced((*upper, texts[lower]), (*lower, texts[upper]))


OPERATORS: dict[str, Callable[[Body, random.Random], str | None]] = {
    "delete brace": lambda body, rng: body.change_one(
        rng, [token for token in body.tokens if token.text in ("{", "}")], lambda t: (t.start, t.stop, b"")
    ),
    # cut off the rest, as when a model reaches its token budget
    "truncate": lambda body, rng: body.change_one(rng, body.tokens, lambda t: (t.start, len(body.code), b"")),
    "duplicate token": lambda body, rng: body.change_one(
        rng, body.tokens, lambda t: (t.stop, t.stop, b" " + t.text.encode())
    ),
    "delete token": lambda body, rng: body.change_one(rng, body.tokens, lambda t: (t.start, t.stop, b"")),
    "delete line": lambda body, rng: body.change_one(rng, body.lines, lambda line: (*line, b"")),
    "swap identifiers": _swap_identifiers,
    "swap lines": _swap_lines,
    # == becomes !=, + becomes -, && becomes ||
    "flip operator": lambda body, rng: body.change_one(
        rng,
        [token for token in body.tokens if token.text in FLIPPED and token.parent in BINARY_PARENTS],
        lambda t: (t.start, t.stop, FLIPPED[t.text].encode()),
    ),
}
