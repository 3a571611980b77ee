"""From records of Go tasks to padded batches of the Go coder's token stream.

`GoStreamBuilder` writes one record as ids, labels and decisions, segment by segment, within budgets; `GoCoderCollator`
pads rows to a batch, for the Go coder or for any other causal model. `records.py` reads and checks records,
`streams.py` makes data sets of such rows, `models/processing_hrm_go_coder.py` has the stream.

What is learned (everything else is -100): the plan after <PLAN>, </PLAN> and the <CODE> behind it; the code of the
last attempt behind its given prefix, or the edits that repair it, </CODE>; every decision and the <CODE> or <PLAN>
behind it; </s>.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ...models.edits_hrm_go_coder import REPAIR_MODES, edit_segment, edits_between
from ...models.processing_hrm_go_coder import (
    BOS,
    CONTINUE,
    DECISION_TOKENS,
    DECISIONS,
    EOS,
    LEAST_TEXT,
    NO_FEEDBACK,
    REFINE,
    SPECIAL_TOKENS,
    TOKEN_IDS,
    Feedback,
    code_segment,
    context_segment,
    cut_end,
    cut_middle,
    is_go_tokenizer,
    plan_segment,
    problem_segment,
    validation_segment,
)


IGNORED = -100
PLAIN = "plain_"  # columns of the stream without attempts, beside the whole one
SCORED = ("code_start", "code_end", "code_bytes")
BUILDER_VERSION = 4  # part of the cache key; raise it when the same record gives other rows


class TooLongError(ValueError):
    """A record does not fit its budgets; `reason` is "plan", "code", "attempt", "edits" or "stream"."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class _Stream:
    """Ids and labels as they grow."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], ignored: int | None = None) -> None:
        """Appends ids of which the first `ignored` are no targets; None for all."""
        ignored = len(ids) if ignored is None else ignored
        self.ids += ids
        self.labels += [IGNORED] * ignored + list(ids[ignored:])


class GoStreamBuilder:
    """Writes records as token streams with labels.

    What does not fit is cut in this order: the middle of the context, the whole context, the end of the problem, then
    failed attempts from the first on. Plans and code are never cut: a record whose plan or solution is too long is
    refused.

    With repairs by edits a record whose last failed attempt is to be written again (CONTINUE) becomes plan, that
    attempt, its verdict with the line of the error, <RETRY> and the edits that make the solution of it, and ends
    there. Its other attempts and their decisions are left out. Where the edits are more tokens than the solution, or
    the attempt does not fit, the record is as without edits.

    Args:
        tokenizer: one whose vocabulary starts with `SPECIAL_TOKENS`.
        max_length: most tokens of a row.
        problem_budget, context_budget, plan_budget: most tokens of these segments, tags included.
        code_budget: most tokens of one attempt, tags and given prefix included.
        repairs: "rewrite" or "edits", the `repair_mode` of the model that they are for.

    Raises:
        ValueError: the tokenizer has other special tokens; an unknown kind of repairs.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int = 2048,
        problem_budget: int = 256,
        context_budget: int = 512,
        plan_budget: int = 512,
        code_budget: int = 1024,
        repairs: str = "rewrite",
    ):
        validate_go_tokenizer(tokenizer)
        if repairs not in REPAIR_MODES:
            raise ValueError(f"repairs={repairs!r} is not one of {', '.join(REPAIR_MODES)}")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.problem_budget, self.context_budget = problem_budget, context_budget
        self.plan_budget, self.code_budget = plan_budget, code_budget
        self.repairs = repairs

    def build(self, record: dict[str, Any], refinement: bool = True) -> dict[str, Any]:
        """One record as a row.

        Args:
            record: see `records.py`.
            refinement: False writes the solution alone, without validation, as if the record had no attempts.

        Returns:
            `input_ids` and `labels` [S]; `decision_positions` (index of each attempt's </CODE>) and `decision_labels`
            [K], `feedback_ids` [K, 4], K the number of attempts; `code_start`, `code_end`: where the labelled code
            with its </CODE> is; `code_bytes`: of its text in UTF-8; `length`: S; `repair`: "edits", "rewrite", or ""
            for a row without a failed attempt.

            Bits per byte are of code alone. Edits are none, and the code that they make was mostly there before: in a
            row with edits `code_start` is `code_end` and `code_bytes` is 0, so that nothing of it is scored.

        Raises:
            TooLongError: the plan, the solution, or both together are longer than they may be.
            ValueError: code that does not start with the record's code_prefix.
        """
        attempts = record["attempts"] or [] if refinement else []
        if self.repairs == "edits" and is_written_again(attempts):
            try:
                tail, columns = self._edit_tail(record)
                return self._row(record, tail, columns, "edits")
            except TooLongError as error:
                if error.reason not in ("edits", "attempt", "stream"):
                    raise
        while True:
            try:
                tail, columns = self._tail(record, attempts)
                return self._row(record, tail, columns, "rewrite" if len(attempts) > 1 else "")
            except TooLongError as error:
                if len(attempts) < 2 or error.reason not in ("attempt", "stream"):
                    raise
                attempts = attempts[1:]

    def _row(self, record: dict[str, Any], tail: _Stream, columns: dict[str, Any], repair: str) -> dict[str, Any]:
        """The row of a record; `columns` are of its tail, with positions from its start."""
        stream = _Stream()
        stream.add(self._front(record, self.max_length - len(tail.ids)))
        offset = len(stream.ids)
        start, end = columns.pop("span")
        return {
            "input_ids": stream.ids + tail.ids,
            "labels": stream.labels + tail.labels,
            **columns,
            "decision_positions": [offset + position for position in columns["decision_positions"]],
            "code_start": offset + start,
            "code_end": offset + end,
            "length": offset + len(tail.ids),
            "repair": repair,
        }

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Returns the ids that a model plans from: everything up to and including <PLAN>."""
        room = 1 + self.problem_budget + self.context_budget
        return [*self._front(record, min(room, self.max_length)), TOKEN_IDS["<PLAN>"]]

    def code_prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Returns the ids after a finished plan: <CODE> and the given beginning of the code."""
        ids, given = code_segment(self.tokenizer, record["code_prefix"] or "", "")
        return ids[:given]

    def edit_prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Returns the ids behind which the last failed attempt is edited: everything up to and including <RETRY>.

        As many ids as the attempt has are left free behind them.

        Raises:
            TooLongError: plan, attempt and verdict are longer than they may be.
        """
        stream, _ = self._edit_prompt(record)
        free = len(self._code(record, record["attempts"][-2]["code"], "attempt")[0])
        return [*self._front(record, self.max_length - len(stream.ids) - free), *stream.ids]

    def settings(self) -> tuple[Any, ...]:
        """Everything that rows depend on beside the record: part of the key of cached rows."""
        budgets = (self.problem_budget, self.context_budget, self.plan_budget, self.code_budget)
        return (BUILDER_VERSION, self.tokenizer.backend_tokenizer.to_str(), self.max_length, *budgets, self.repairs)

    # ---- problem and context ----

    def _front(self, record: dict[str, Any], room: int) -> list[int]:
        """<s>, problem and context in at most `room` ids."""
        problem = problem_segment(self.tokenizer, record["problem"]["title"] or "", record["problem"]["body"] or "")
        limit = min(self.problem_budget, room - 1)
        if len(problem) > limit:
            if limit < LEAST_TEXT + 2:
                raise TooLongError(
                    "stream",
                    f"record {record['id']!r}: plan and attempts leave {room} of max_length={self.max_length}",
                )
            problem = cut_end(problem, limit)
        given = record["context"] or {}
        context = context_segment(self.tokenizer, given.get("path") or "", given.get("before") or "")
        return [TOKEN_IDS[BOS], *problem, *cut_middle(context, min(self.context_budget, room - 1 - len(problem)))]

    # ---- plan, attempts, decisions ----

    def _tail(self, record: dict[str, Any], attempts: Sequence[dict[str, Any]]) -> tuple[_Stream, dict[str, Any]]:
        """Everything behind the context, with positions from its own start."""
        plan = self._plan(record)
        stream, columns = _Stream(), _no_decisions()
        stream.add(plan, ignored=1)
        attempts = attempts or [{"code": record["solution"]["code"], "feedback": None, "decision": None}]
        for number, attempt in enumerate(attempts):
            last = number == len(attempts) - 1
            columns |= self._add_code(stream, record, attempt["code"], "code" if last else "attempt")
            if attempt["decision"] is None:
                break
            self._add_decision(stream, columns, attempt)
            if columns["decision_labels"][-1] == REFINE and not last:
                stream.add(plan, ignored=0)
        stream.add([TOKEN_IDS[EOS]], ignored=0)
        return stream, columns

    def _edit_tail(self, record: dict[str, Any]) -> tuple[_Stream, dict[str, Any]]:
        """As `_tail`, of the last failed attempt and the edits that make the solution of it."""
        solution, given, _ = self._code(record, record["solution"]["code"], "code")
        stream, columns = self._edit_prompt(record)
        failed = record["attempts"][-2]["code"]
        edits = edits_between(failed, record["solution"]["code"], record["code_prefix"] or "")
        ids = edit_segment(self.tokenizer, edits)
        if len(ids) - 1 > len(solution) - given:
            raise TooLongError(
                "edits", f"record {record['id']!r}: the solution is shorter than {len(ids)} ids of edits"
            )
        stream.add(ids, ignored=0)
        end = len(stream.ids)
        stream.add([TOKEN_IDS[EOS]], ignored=0)
        return stream, columns | {"span": (end, end), "code_bytes": 0}

    def _edit_prompt(self, record: dict[str, Any]) -> tuple[_Stream, dict[str, Any]]:
        """Plan, last failed attempt, its verdict with the line of the error, and <RETRY>."""
        failed = record["attempts"][-2]
        stream, columns = _Stream(), _no_decisions()
        stream.add(self._plan(record), ignored=1)
        self._add_code(stream, record, failed["code"], "attempt")
        self._add_decision(stream, columns, failed, failed["code"])
        return stream, columns

    def _add_code(self, stream: _Stream, record: dict[str, Any], code: str, what: str) -> dict[str, Any]:
        """Appends an attempt, and returns where its labels are if it is the solution ("code")."""
        ids, given, size = self._code(record, code, what)
        start = len(stream.ids)
        stream.add(ids, given if what == "code" else None)
        stream.labels[start] = ids[0]  # <CODE> is written by the model, behind a plan or a decision
        return {"span": (start + given, start + len(ids)), "code_bytes": size}

    def _add_decision(
        self, stream: _Stream, columns: dict[str, Any], attempt: dict[str, Any], quoted: str | None = None
    ) -> None:
        """Appends the verdict on the attempt that ends the stream, and the decision on it, to stream and columns."""
        decision = DECISIONS.index(attempt["decision"])
        found = None if attempt["feedback"] is None else feedback_of(attempt["feedback"])
        lines = attempt["code"].count("\n") + 1
        columns["decision_positions"].append(len(stream.ids) - 1)
        columns["decision_labels"].append(decision)
        columns["feedback_ids"].append(NO_FEEDBACK if found is None else found.token_ids(lines))
        stream.add(validation_segment(self.tokenizer, found, quoted))
        stream.add([TOKEN_IDS[DECISION_TOKENS[decision]]], ignored=0)

    def _plan(self, record: dict[str, Any]) -> list[int]:
        plan = record["plan"]
        steps = [step["text"] for step in plan["steps"]]
        ids = plan_segment(self.tokenizer, plan["intent"], plan["targets"], steps)
        if len(ids) > self.plan_budget:
            raise TooLongError(
                "plan", f"record {record['id']!r}: plan of {len(ids)} tokens, plan_budget={self.plan_budget}"
            )
        return ids

    def _code(self, record: dict[str, Any], code: str, what: str) -> tuple[list[int], int, int]:
        """Ids of an attempt, how many of them are given, and the bytes of text that are not."""
        prefix = record["code_prefix"] or ""
        if not code.startswith(prefix):
            raise ValueError(
                f"record {record['id']!r}: the {what} does not start with code_prefix={prefix!r}; it must include it"
            )
        body = code[len(prefix) :]
        ids, given = code_segment(self.tokenizer, prefix, body)
        if len(ids) > self.code_budget:
            raise TooLongError(
                what, f"record {record['id']!r}: {what} of {len(ids)} tokens, code_budget={self.code_budget}"
            )
        return ids, given, len(body.encode())


def _no_decisions() -> dict[str, Any]:
    return {"decision_positions": [], "decision_labels": [], "feedback_ids": []}


def is_written_again(attempts: Sequence[dict[str, Any]]) -> bool:
    """Whether code for the same plan follows the last failed attempt."""
    return len(attempts) > 1 and attempts[-2]["decision"] == DECISIONS[CONTINUE]


def feedback_of(values: dict[str, Any]) -> Feedback:
    """The feedback of a record as `Feedback`; what a record leaves out or has as null is unknown."""
    names = {one.name for one in fields(Feedback)}
    return Feedback(**{name: value for name, value in values.items() if name in names and value is not None})


def validate_go_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError unless `is_go_tokenizer`."""
    if not is_go_tokenizer(tokenizer):
        raise ValueError(
            f"the vocabulary of {tokenizer.name_or_path or 'the tokenizer'} does not start with the "
            f"{len(SPECIAL_TOKENS)} special tokens of the Go coder; make one with `hrm-hf data go-tokenizer`"
        )


# ---- batches ----


class GoCoderCollator:
    """Pads rows of `GoStreamBuilder` on the right to a batch of tensors.

    A batch has `input_ids`, `attention_mask`, `labels` [B, S] and, for models that take them, `decision_positions`,
    `decision_labels` [B, K] and `feedback_ids` [B, K, 4] (a row with fewer decisions has position 0, label -100). Rows
    with a stream without attempts put a second batch of them under "plain": `at_step` chooses. Rows with
    `code_start` put `scored_labels` [B, S] (the labels of the code alone) and `scored_bytes` [B] beside: bits per byte
    come from them.

    Args:
        pad_token_id: the id that pads.
        decisions: the model takes decisions; False for ordinary causal models.
        plain_steps: steps of a run in which batches are those without attempts.
        pad_to_multiple_of: S is a multiple of it; 8 suits tensor cores.
    """

    def __init__(
        self, pad_token_id: int, decisions: bool = True, plain_steps: int = 0, pad_to_multiple_of: int | None = 8
    ):
        self.pad_token_id = pad_token_id
        self.decisions = decisions
        self.plain_steps = plain_steps
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self._pad(rows)
        if "code_start" in rows[0]:
            batch |= self._scored(rows, batch["labels"])
        if f"{PLAIN}input_ids" in rows[0]:
            batch["plain"] = self._pad([_plain(row) for row in rows])
        return batch

    def at_step(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """The batch that is trained on after `step` optimizer steps: a function of the step alone."""
        plain = batch.pop("plain", None)
        return plain if plain is not None and step < self.plain_steps else batch

    def _pad(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple) * self.multiple
        ids = [[*row["input_ids"], *[self.pad_token_id] * (width - len(row["input_ids"]))] for row in rows]
        labels = [[*row["labels"], *[IGNORED] * (width - len(row["labels"]))] for row in rows]
        mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.decisions:
            batch |= _padded_decisions(rows)
        return {name: torch.tensor(values, dtype=torch.long) for name, values in batch.items()}

    @staticmethod
    def _scored(rows: Sequence[dict[str, Any]], labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scored = torch.full_like(labels, IGNORED)
        for index, row in enumerate(rows):
            span = slice(row["code_start"], row["code_end"])
            scored[index, span] = labels[index, span]
        return {"scored_labels": scored, "scored_bytes": torch.tensor([row["code_bytes"] for row in rows])}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    if not row[f"{PLAIN}input_ids"]:  # the record has no attempts: its stream is plain
        return row
    ids, labels = row[f"{PLAIN}input_ids"], row[f"{PLAIN}labels"]
    return {"input_ids": ids, "labels": labels, "decision_positions": [], "decision_labels": [], "feedback_ids": []}


def _padded_decisions(rows: Sequence[dict[str, Any]]) -> dict[str, list]:
    count = max(1, *(len(row["decision_labels"]) for row in rows))
    padding = {"decision_positions": 0, "decision_labels": IGNORED, "feedback_ids": NO_FEEDBACK}
    return {
        name: [[*row[name], *[value] * (count - len(row[name]))] for row in rows] for name, value in padding.items()
    }
