"""From records of Go tasks to padded batches of the Go coder's token stream.

`GoStreamBuilder` writes one record as ids, labels and decisions, segment by segment, within budgets; `GoCoderCollator`
pads rows to a batch, for the Go coder or for any other causal model; `load_go_streams` reads JSON Lines files of
records into a data set of such rows. `records.py` reads and checks records, `models/processing_hrm_go_coder.py` has
the stream.

What is learned (everything else is -100): the plan after <PLAN>, </PLAN> and the <CODE> behind it; the code of the
last attempt behind its given prefix, </CODE>; every decision and the <CODE> or <PLAN> behind it; </s>.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...models.processing_hrm_go_coder import (
    BOS,
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


if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100
PLAIN = "plain_"  # columns of the stream without attempts, beside the whole one
SCORED = ("code_start", "code_end", "code_bytes")
COUNTED = ("length", "targets", "attempts", "left_out")
BUILDER_VERSION = 2  # part of the cache key; raise it when the same record gives other rows


class TooLongError(ValueError):
    """A record does not fit its budgets; `reason` is "plan", "code", "attempt" or "stream"."""

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

    Args:
        tokenizer: one whose vocabulary starts with `SPECIAL_TOKENS`.
        max_length: most tokens of a row.
        problem_budget, context_budget, plan_budget: most tokens of these segments, tags included.
        code_budget: most tokens of one attempt, tags and given prefix included.

    Raises:
        ValueError: the tokenizer has other special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int = 2048,
        problem_budget: int = 256,
        context_budget: int = 512,
        plan_budget: int = 512,
        code_budget: int = 1024,
    ):
        validate_go_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.problem_budget, self.context_budget = problem_budget, context_budget
        self.plan_budget, self.code_budget = plan_budget, code_budget

    def build(self, record: dict[str, Any], refinement: bool = True) -> dict[str, Any]:
        """One record as a row.

        Args:
            record: see `records.py`.
            refinement: False writes the solution alone, without validation, as if the record had no attempts.

        Returns:
            `input_ids` and `labels` [S]; `decision_positions` (index of each attempt's </CODE>) and `decision_labels`
            [K], `feedback_ids` [K, 4], K the number of attempts; `code_start`, `code_end`: where the labelled code
            with its </CODE> is; `code_bytes`: of its text in UTF-8; `length`: S.

        Raises:
            TooLongError: the plan, the solution, or both together are longer than they may be.
            ValueError: code that does not start with the record's code_prefix.
        """
        attempts = record["attempts"] or [] if refinement else []
        while True:
            try:
                tail, decisions = self._tail(record, attempts)
                front = self._front(record, self.max_length - len(tail.ids))
                break
            except TooLongError as error:
                if len(attempts) < 2 or error.reason not in ("attempt", "stream"):
                    raise
                attempts = attempts[1:]
        stream = _Stream()
        stream.add(front)
        offset = len(stream.ids)
        start, end = decisions.pop("span")
        return {
            "input_ids": stream.ids + tail.ids,
            "labels": stream.labels + tail.labels,
            **decisions,
            "decision_positions": [offset + position for position in decisions["decision_positions"]],
            "code_start": offset + start,
            "code_end": offset + end,
            "length": offset + len(tail.ids),
        }

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Returns the ids that a model plans from: everything up to and including <PLAN>."""
        room = 1 + self.problem_budget + self.context_budget
        return [*self._front(record, min(room, self.max_length)), TOKEN_IDS["<PLAN>"]]

    def code_prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Returns the ids after a finished plan: <CODE> and the given beginning of the code."""
        ids, given = code_segment(self.tokenizer, record["code_prefix"] or "", "")
        return ids[:given]

    def settings(self) -> tuple[Any, ...]:
        """Everything that rows depend on beside the record: part of the key of cached rows."""
        budgets = (self.problem_budget, self.context_budget, self.plan_budget, self.code_budget)
        return (BUILDER_VERSION, self.tokenizer.backend_tokenizer.to_str(), self.max_length, *budgets)

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
        stream = _Stream()
        stream.add(plan, ignored=1)
        positions, labels, feedback = [], [], []
        attempts = attempts or [{"code": record["solution"]["code"], "feedback": None, "decision": None}]
        for number, attempt in enumerate(attempts):
            last = number == len(attempts) - 1
            code, given, size = self._code(record, attempt["code"], "code" if last else "attempt")
            start = len(stream.ids)
            stream.add(code, given if last else None)
            stream.labels[start] = TOKEN_IDS["<CODE>"]  # written by the model, behind a plan or a decision
            span = (start + given, start + len(code))
            if attempt["decision"] is None:
                break
            decision = DECISIONS.index(attempt["decision"])
            found = None if attempt["feedback"] is None else feedback_of(attempt["feedback"])
            positions.append(len(stream.ids) - 1)
            labels.append(decision)
            lines = attempt["code"].count("\n") + 1
            feedback.append(NO_FEEDBACK if found is None else found.token_ids(lines))
            stream.add(validation_segment(self.tokenizer, found))
            stream.add([TOKEN_IDS[DECISION_TOKENS[decision]]], ignored=0)
            if decision == REFINE and not last:
                stream.add(plan, ignored=0)
        stream.add([TOKEN_IDS[EOS]], ignored=0)
        columns = {"decision_positions": positions, "decision_labels": labels, "feedback_ids": feedback}
        return stream, {**columns, "span": span, "code_bytes": size}

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


# ---- data sets ----


@dataclass
class GoStreams:
    """Rows of a source and what became of its records.

    Attributes:
        rows: the columns of `GoStreamBuilder.build`; without `code_*` for training, without `plain_*` for evaluation.
        records: the records of the rows, in their order.
        counts: "records" read, "bad" lines skipped, "kept" rows, their "tokens", "targets" (labelled tokens) and
            "attempts", how many attempts were "left_out" of them; of what was dropped, the reasons of `TooLongError`.
    """

    rows: "Dataset"
    records: "Dataset"
    counts: Counter

    def describe(self) -> str:
        """The counts in a line for people."""
        c = self.counts
        dropped = ", ".join(f"{c[name]:,} {text}" for name, text in DROPPED.items() if c[name])
        return (
            f"{c['kept']:,} of {c['records']:,} records, {c['tokens']:,} tokens, {c['targets']:,} of them targets, "
            f"{c['attempts']:,} attempts"
            + (f" without {c['left_out']:,} that do not fit" if c["left_out"] else "")
            + (f"; dropped {dropped}" if dropped else "")
        )


DROPPED = {
    "bad": "unreadable lines",
    "plan": "with too long a plan",
    "code": "with too long a code",
    "stream": "longer than a row in all",
}


def load_go_streams(
    paths: Sequence[str],
    builder: GoStreamBuilder,
    *,
    training: bool,
    plain: bool = False,
    on_bad_line: str = "stop",
    max_records: int | None = None,
    num_workers: int | None = None,
    cache_dir: str | None = None,
) -> GoStreams:
    """Reads files of records and writes them as rows; both are cached by `datasets`.

    Args:
        paths: JSON Lines files, also `.gz`.
        builder: of the rows.
        training: rows to train on; otherwise rows to evaluate, with what bits per byte need.
        plain: training rows also carry the stream without attempts, for a refinement warm-up.
        on_bad_line: "stop" at a line that is no record, or "skip" and count it.
        max_records: take the first ones only.
        num_workers: processes that tokenise.
        cache_dir: of the converted files; that of `datasets` by default.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a broken line with its file and number; no record that fits.
    """
    records, bad = _read(paths, on_bad_line, cache_dir)
    counts = Counter(records=len(records), bad=bad)
    if max_records is not None:
        records = records.select(range(min(max_records, len(records))))
    rows = _build_rows(records, builder, plain, num_workers)
    dropped = rows["dropped"]
    counts.update(reason for reason in dropped if reason)
    kept = [index for index, reason in enumerate(dropped) if not reason]
    counts["kept"] = len(kept)
    if not kept:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no record to {'train on' if training else 'evaluate'} of {len(records)}: "
            f"{dict(counts)}; raise the budgets, or give other files"
        )
    rows = rows.select(kept)
    for name in ("tokens", "targets", "attempts", "left_out"):
        counts[name] = sum(rows[{"tokens": "length"}.get(name, name)])
    unused = ["dropped", "targets", "attempts", "left_out", *(SCORED if training else ())]
    return GoStreams(rows.remove_columns(unused), records.select(kept), counts)


def _read(paths: Sequence[str], on_bad_line: str, cache_dir: str | None) -> tuple["Dataset", int]:
    """The records of all files, and how many lines were skipped."""
    from datasets import Dataset, concatenate_datasets
    from datasets.exceptions import DatasetGenerationError
    from datasets.fingerprint import Hasher

    from ...io.sources import numbered_lines
    from ...text.sources import WRITTEN_AT_ONCE
    from .records import read_records, record_features

    parts, bad = [], 0
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected records, as `hrm-hf data go` writes them")
        state = path.stat()
        key = Hasher.hash((BUILDER_VERSION, str(path.resolve()), state.st_size, state.st_mtime_ns, on_bad_line))
        options = {"paths": str(path), "on_bad_line": on_bad_line}
        try:
            part = Dataset.from_generator(
                read_records,
                features=record_features(),
                gen_kwargs=options,
                cache_dir=cache_dir,
                fingerprint=key,
                writer_batch_size=WRITTEN_AT_ONCE,
            )
        except DatasetGenerationError as error:  # it hides what the reader said
            raise (error.__cause__ or error) from None
        except ValueError as error:  # what the library says of no rows names no file
            if next(read_records(**options), None) is not None:
                raise
            raise ValueError(
                f"{path} holds no record; expected a JSON object a line, as `hrm-hf data go` writes"
            ) from error
        parts.append(part)
        if on_bad_line == "skip":
            bad += sum(1 for _ in numbered_lines(path)) - len(part)
    return (parts[0] if len(parts) == 1 else concatenate_datasets(parts)), bad


def _build_rows(records, builder: GoStreamBuilder, plain: bool, num_workers) -> "Dataset":
    from datasets import Features, Sequence, Value
    from datasets.fingerprint import Hasher

    ids, number = Sequence(Value("int32")), Value("int32")
    columns = {
        "input_ids": ids, "labels": ids, "decision_positions": ids, "decision_labels": ids,
        "feedback_ids": Sequence(ids), "code_start": number, "code_end": number, "code_bytes": number,
        "length": number, "dropped": Value("string"), "targets": number, "attempts": number,
        "left_out": number,
    }  # fmt: skip
    if plain:
        columns |= {f"{PLAIN}input_ids": ids, f"{PLAIN}labels": ids}
    workers = num_workers if num_workers and num_workers > 1 and len(records) > num_workers else None
    return records.map(
        _row,
        fn_kwargs={"builder": builder, "plain": plain},
        features=Features(columns),
        remove_columns=records.column_names,
        num_proc=workers,
        new_fingerprint=Hasher.hash((records._fingerprint, builder.settings(), plain)),
        desc="writing records as tokens",
    )


def _row(record: dict[str, Any], builder: GoStreamBuilder, plain: bool) -> dict[str, Any]:
    try:
        row = builder.build(record)
        if plain:
            alone = builder.build(record, refinement=False) if record["attempts"] else {"input_ids": [], "labels": []}
            row |= {f"{PLAIN}{name}": alone[name] for name in ("input_ids", "labels")}
    except TooLongError as error:
        lists = ("input_ids", "labels", "decision_positions", "decision_labels", "feedback_ids")
        empty = {name: [] for name in lists} | dict.fromkeys((*SCORED, *COUNTED), 0)
        return empty | ({f"{PLAIN}input_ids": [], f"{PLAIN}labels": []} if plain else {}) | {"dropped": error.reason}
    targets = sum(label != IGNORED for label in row["labels"])
    attempts = len(row["decision_labels"])
    left_out = len(record["attempts"] or []) - attempts
    return row | {"dropped": "", "targets": targets, "attempts": attempts, "left_out": left_out}
