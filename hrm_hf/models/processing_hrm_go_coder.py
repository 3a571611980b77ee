"""Token stream of the Go coder: special tokens, segments, and validator feedback.

    <s> <PROBLEM>title, body</PROBLEM> [<CONTEXT><FILE>path</FILE>text before</CONTEXT>]
    <PLAN><INTENT:ADD><TARGET:func>name<STEP>text<STEP>text</PLAN>
    <CODE>func name(...) {...}</CODE>
    [<VALIDATE><SYNTAX_ERR>unexpected token, line 3: message</VALIDATE> <RETRY> <CODE>...</CODE>
     <VALIDATE><SYNTAX_OK><TEST_PASS></VALIDATE> <DONE>] </s>

<RETRY> (class CONTINUE) is followed by new code for the same plan, <REFINE> by a new plan, <DONE> by the end. The last
opener up to and including a token sets its phase: <CODE> opens the generator's phase, every other opener the
planner's. Tokens before the first opener belong to the generator, so plain Go text is code. All
functions in this module encode text with `encode_text`, which never turns user text into special tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any


UNK, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"
INTENTS = ("FIX", "ADD", "REFACTOR", "OPTIMIZE", "UPDATE", "REMOVE", "PRESERVE")
TARGET_KINDS = ("func", "method", "type", "interface", "var")
# Decision classes are indices into this tuple.
DECISIONS = ("CONTINUE", "REFINE", "DONE")
CONTINUE, REFINE, DONE = range(3)
DECISION_TOKENS = ("<RETRY>", "<REFINE>", "<DONE>")
# These tags open the planner's phase; only <CODE> opens the generator's phase.
PLANNER_OPENERS = (
    "<REPO>", "<PR_TITLE>", "<PR_BODY>", "<FILE>", "<COMMENTS>", "<PROBLEM>", "<CONTEXT>", "<STRUCTURE>", "<PLAN>",
    "<VALIDATE>",
)  # fmt: skip
RESERVED = ("<BEFORE>", "<AFTER>")  # unused, but kept to preserve token ids
CLOSERS = ("</PROBLEM>", "</CONTEXT>", "</FILE>", "</PLAN>", "</CODE>", "</VALIDATE>")
MARKS = ("<STEP>", "<SYNTAX_OK>", "<SYNTAX_ERR>", "<TEST_PASS>", "<TEST_FAIL>")
# Our vocabularies start with these tokens, so a token's id is its index in this tuple.
SPECIAL_TOKENS = (
    UNK, BOS, EOS, PAD, *PLANNER_OPENERS[:4], *RESERVED, *PLANNER_OPENERS[4:], "<CODE>", *CLOSERS, *MARKS,
    *DECISION_TOKENS,
    *(f"<INTENT:{intent}>" for intent in INTENTS), *(f"<TARGET:{kind}>" for kind in TARGET_KINDS),
)  # fmt: skip
TOKEN_IDS = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

# Error categories. A category's id is its index: 1 to 6 are syntax errors, 7 and 8 type errors.
CATEGORIES = (
    "none",  # no error
    "unexpected token",
    "missing closing",  # closing brace, bracket or parenthesis, or a premature end of text
    "missing comma or newline",
    "unterminated literal",
    "missing operand or type",
    "misplaced statement",  # statement or declaration in an invalid place
    "undefined name",
    "mismatched types",  # type errors other than undefined names
    "other",  # failed tests, timeouts and all other errors
)
LINE_BUCKETS = 32  # number of line ranges that the feedback encoder distinguishes
LEAST_TEXT = 16  # minimum number of tokens to keep when truncating a problem or context
MAX_MESSAGE = 120  # maximum length of a validator message in the stream, in characters


@dataclass(frozen=True)
class Feedback:
    """Validator feedback on one attempt. None means that a check did not run.

    Attributes:
        syntax_ok: whether the code parses.
        types_ok: whether the code type-checks.
        tests_pass: whether the code's tests pass.
        category: one of CATEGORIES.
        line: line of the first error in the code, from 1.
        message: the first error, on one line.
    """

    syntax_ok: bool | None = None
    types_ok: bool | None = None
    tests_pass: bool | None = None
    category: str = "none"
    line: int | None = None
    message: str = ""

    def __post_init__(self):
        if self.category not in CATEGORIES:
            raise ValueError(f"category={self.category!r}: must be one of {', '.join(CATEGORIES)}")

    @classmethod
    def of_record(cls, values: dict[str, Any]) -> "Feedback":
        """Build the feedback from a record, using defaults for missing or null fields."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names and value is not None})

    @property
    def failed(self) -> bool:
        """Whether the validator found an error."""
        return False in (self.syntax_ok, self.types_ok, self.tests_pass)

    def of_syntax(self) -> "Feedback":
        """Return the feedback that a syntax-only validator would give."""
        return self if self.syntax_ok is False else Feedback(syntax_ok=self.syntax_ok)

    def token_ids(self, lines: int) -> list[int]:
        """Return feedback ids [syntax, tests, category, line bucket] for the feedback encoder.

        syntax and tests are 0 (unknown), 1 (good) or 2 (bad); 0 for both means that there was no validator. A type
        error is encoded as a failed test with its own category. `lines` is the number of lines in the attempt.
        """
        tests = self.tests_pass if self.types_ok is not False else False
        bucket = 0 if self.line is None else min(LINE_BUCKETS - 1, (self.line - 1) * LINE_BUCKETS // max(lines, 1))
        flags = [(None, True, False).index(value) for value in (self.syntax_ok, tests)]
        return [*flags, CATEGORIES.index(self.category), max(bucket, 0)]


NO_FEEDBACK = [0, 0, 0, 0]


def is_go_tokenizer(tokenizer: Any) -> bool:
    """Check whether a tokenizer's vocabulary starts with the Go coder's special tokens."""
    vocabulary = tokenizer.get_vocab()
    return all(vocabulary.get(token) == index for token, index in TOKEN_IDS.items())


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode user text to ids. Tags in the text are encoded as ordinary characters."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)


def problem_segment(tokenizer: Any, title: str, body: str = "") -> list[int]:
    """Encode <PROBLEM>title, an empty line, body</PROBLEM>, omitting empty parts."""
    return _segment(tokenizer, "PROBLEM", "\n\n".join(part for part in (title, body) if part))


def context_segment(tokenizer: Any, path: str, before: str) -> list[int]:
    """Encode <CONTEXT><FILE>path</FILE>text</CONTEXT>. Omit an empty path; return [] if both are empty."""
    if not path and not before:
        return []
    named = _segment(tokenizer, "FILE", path) if path else []
    return [TOKEN_IDS["<CONTEXT>"], *named, *encode_text(tokenizer, before), TOKEN_IDS["</CONTEXT>"]]


def cut_middle(context: list[int], room: int) -> list[int]:
    """Shorten a context segment to `room` ids by cutting its middle. Return [] if too little would be left."""
    if len(context) <= room:
        return context
    file_end = TOKEN_IDS["</FILE>"]
    head = context.index(file_end) + 1 if file_end in context else 1
    kept = room - head - 1
    if kept < LEAST_TEXT:
        return []
    text = context[head:-1]
    return [*context[:head], *text[: kept - kept // 2], *text[len(text) - kept // 2 :], context[-1]]


def fit_task(
    problem: list[int], context: list[int], problem_budget: int, context_budget: int, room: int | None = None
) -> list[int]:
    """Return <s>, problem and context. Truncate each to its budget, and everything to `room` ids."""
    room = 1 + problem_budget + context_budget if room is None else room
    limit = min(problem_budget, room - 1)
    problem = problem if len(problem) <= limit else [*problem[: limit - 1], problem[-1]]
    return [TOKEN_IDS[BOS], *problem, *cut_middle(context, min(context_budget, room - 1 - len(problem)))]


def plan_segment(tokenizer: Any, intent: str, targets: Iterable[str], steps: Iterable[str]) -> list[int]:
    """Encode <PLAN><INTENT:..><TARGET:kind>name ...<STEP>text ...</PLAN> for targets "kind:name".

    Raises:
        ValueError: the intent is not in INTENTS, or a kind is not in TARGET_KINDS.
    """
    if intent not in INTENTS:
        raise ValueError(f"intent={intent!r}: must be one of {', '.join(INTENTS)}")
    ids = [TOKEN_IDS["<PLAN>"], TOKEN_IDS[f"<INTENT:{intent}>"]]
    for target in targets:
        kind, _, name = target.partition(":")
        if kind not in TARGET_KINDS:
            raise ValueError(f"target={kind!r}: must be one of {', '.join(TARGET_KINDS)}")
        ids += [TOKEN_IDS[f"<TARGET:{kind}>"], *encode_text(tokenizer, name)]
    for step in steps:
        ids += [TOKEN_IDS["<STEP>"], *encode_text(tokenizer, step)]
    return [*ids, TOKEN_IDS["</PLAN>"]]


def code_segment(tokenizer: Any, prefix: str, body: str) -> tuple[list[int], int]:
    """Encode <CODE>prefix body</CODE>. Also return how many ids <CODE> and the prefix have together.

    The prefix and the body are encoded separately, like a prompt and its continuation.
    """
    given = [TOKEN_IDS["<CODE>"], *encode_text(tokenizer, prefix)]
    return [*given, *encode_text(tokenizer, body), TOKEN_IDS["</CODE>"]], len(given)


def validation_segment(tokenizer: Any, feedback: Feedback | None) -> list[int]:
    """Encode <VALIDATE>feedback</VALIDATE>. Leave the tags empty if there was no validator."""
    ids = [TOKEN_IDS["<VALIDATE>"]]
    if feedback is not None:
        if feedback.syntax_ok is not None:
            ids.append(TOKEN_IDS["<SYNTAX_OK>" if feedback.syntax_ok else "<SYNTAX_ERR>"])
        if feedback.types_ok is False or feedback.tests_pass is not None:
            passed = feedback.types_ok is not False and feedback.tests_pass
            ids.append(TOKEN_IDS["<TEST_PASS>" if passed else "<TEST_FAIL>"])
        if feedback.failed:
            where = "" if feedback.line is None else f", line {feedback.line}"
            ids += encode_text(tokenizer, f"{feedback.category}{where}: {feedback.message[:MAX_MESSAGE]}")
    return [*ids, TOKEN_IDS["</VALIDATE>"]]


def decision_segment(tokenizer: Any, feedback: Feedback | None, decision: int) -> list[int]:
    """Return an attempt's `validation_segment` and the token of `decision`, an index into DECISIONS."""
    return [*validation_segment(tokenizer, feedback), TOKEN_IDS[DECISION_TOKENS[decision]]]


def parse_plan(tokenizer: Any, ids: Sequence[int]) -> dict[str, Any]:
    """Parse a plan's ids into {"intent": str | None, "targets": [...], "steps": [...]}."""
    plan: dict[str, Any] = {"intent": None, "targets": [], "steps": []}
    parts: list[tuple[str, list[int]]] = []
    for token in ids:
        if token < len(SPECIAL_TOKENS):
            parts.append((SPECIAL_TOKENS[token], []))
        elif parts:
            parts[-1][1].append(token)
    for name, text in parts:
        value = tokenizer.decode(text)
        if name.startswith("<INTENT:") and plan["intent"] is None:
            plan["intent"] = name[8:-1]
        elif name.startswith("<TARGET:"):
            plan["targets"].append(f"{name[8:-1]}:{value}")
        elif name == "<STEP>":
            plan["steps"].append(value)
    return plan


def _segment(tokenizer: Any, name: str, text: str) -> list[int]:
    return [TOKEN_IDS[f"<{name}>"], *encode_text(tokenizer, text), TOKEN_IDS[f"</{name}>"]]
