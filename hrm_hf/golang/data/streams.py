"""Convert records of Go tasks to token streams: rows of ids, labels and decisions.

`GoStreamBuilder` converts a record segment by segment, within budgets (`models/processing_hrm_go_coder.py` defines the
segments). `load_go_streams` converts and counts files of records. `GoCoderCollator` pads rows to batches.

Labels are -100 except for these targets: the plan after <PLAN>, with </PLAN> and the <CODE> after it; the code of the
last attempt after its given prefix, with </CODE>; every decision and the <CODE> or <PLAN> after it; </s>.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...io.files import numbered_lines
from ...models.processing_hrm_go_coder import (
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
    decision_segment,
    fit_task,
    is_go_tokenizer,
    plan_segment,
    problem_segment,
)
from ...text.sources import WRITTEN_AT_ONCE
from .records import read_records, record_features


if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100
MULTIPLE = 8  # batches are padded to a multiple of this length, which suits tensor cores
PLAIN_PREFIX = "plain_"  # prefix of the columns that hold a row's stream without attempts
SCORED = ("code_start", "code_end", "code_bytes")
COUNTED = ("targets", "attempts", "left_out")
BUILDER_VERSION = 4  # part of the cache key; increase it when the code converts records differently
DROPPED = {
    "bad": "unreadable lines",
    "plan": "with a plan that is too long",
    "code": "with code that is too long",
    "stream": "longer than a row",
}


class TooLongError(ValueError):
    """Raised if a record exceeds a budget. `reason` is "plan", "code", "attempt" or "stream"."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class _Tail:
    """The part of a stream after the context: ids, labels, decisions, and the span of the labeled code."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    decisions: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (position, label, feedback ids)
    span: tuple[int, int] = (0, 0)
    code_bytes: int = 0

    def add(self, ids: Sequence[int], ignored: int = 0) -> None:
        """Append ids, and mask the labels of the first `ignored` ids."""
        self.ids += ids
        self.labels += [IGNORED] * min(ignored, len(ids)) + list(ids[ignored:])


@dataclass
class GoStreamBuilder:
    """Builder that converts records to token streams with labels.

    Records that are too long lose content in this order: the middle of the context, the rest of the context, the end
    of the problem, and failed attempts, oldest first. A record is rejected if its plan or solution is too long.

    Attributes:
        tokenizer: tokenizer whose vocabulary starts with `SPECIAL_TOKENS`.
        max_length: maximum tokens per row.
        problem_budget, context_budget, plan_budget: maximum tokens in each of these segments, including tags.
        code_budget: maximum tokens in one attempt, including tags and the given prefix.

    Raises:
        ValueError: the tokenizer has different special tokens.
    """

    tokenizer: Any
    max_length: int = 2048
    problem_budget: int = 256
    context_budget: int = 512
    plan_budget: int = 512
    code_budget: int = 1024

    def __post_init__(self):
        if not is_go_tokenizer(self.tokenizer):
            raise ValueError(
                f"tokenizer={self.tokenizer.name_or_path!r}: its vocabulary does not start with the "
                f"{len(SPECIAL_TOKENS)} special tokens of the Go coder; create one with `hrm-hf data go-tokenizer`"
            )

    def build(self, record: dict[str, Any], refinement: bool = True) -> dict[str, Any]:
        """Convert one record to a row.

        Args:
            record: see `records.py`.
            refinement: False uses the solution only, as if the record had no attempts.

        Returns:
            `input_ids` and `labels` [S]; `decision_positions` (index of each attempt's </CODE>) and `decision_labels`
            [K], `feedback_ids` [K, 4] for K attempts; `code_start`, `code_end`: span of the labeled code, including
            </CODE>; `code_bytes`: UTF-8 bytes of its text; `length`: S.

        Raises:
            TooLongError: the plan, the solution, or both together exceed a budget.
            ValueError: code does not start with the record's code_prefix.
        """
        attempts = record["attempts"] or [] if refinement else []
        while True:
            try:
                return self._row(record, self._tail(record, attempts))
            except TooLongError as error:
                if len(attempts) < 2 or error.reason not in ("attempt", "stream"):
                    raise
                attempts = attempts[1:]

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Return the prompt for a plan: all ids up to and including <PLAN>."""
        limit = 1 + self.problem_budget + self.context_budget
        return [*self._front(record, min(limit, self.max_length)), TOKEN_IDS["<PLAN>"]]

    def planned_ids(self, record: dict[str, Any]) -> list[int]:
        """Return the ids from which code is generated: the prompt and the record's plan, up to </PLAN>."""
        return [*self.prompt_ids(record), *self._plan(record)[1:]]

    def code_prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Return the ids that follow a finished plan: <CODE> and the code prefix."""
        ids, given = code_segment(self.tokenizer, record["code_prefix"] or "", "")
        return ids[:given]

    def settings(self) -> tuple[Any, ...]:
        """Return all settings that affect the rows, for use in their cache key."""
        budgets = (self.problem_budget, self.context_budget, self.plan_budget, self.code_budget)
        return (BUILDER_VERSION, self.tokenizer.backend_tokenizer.to_str(), self.max_length, *budgets)

    def _row(self, record: dict[str, Any], tail: _Tail) -> dict[str, Any]:
        front = self._front(record, self.max_length - len(tail.ids))
        offset = len(front)
        return {
            "input_ids": front + tail.ids,
            "labels": [IGNORED] * offset + tail.labels,
            "decision_positions": [offset + position for position, _, _ in tail.decisions],
            "decision_labels": [label for _, label, _ in tail.decisions],
            "feedback_ids": [ids for _, _, ids in tail.decisions],
            "code_start": offset + tail.span[0],
            "code_end": offset + tail.span[1],
            "code_bytes": tail.code_bytes,
            "length": offset + len(tail.ids),
        }

    def _front(self, record: dict[str, Any], limit: int) -> list[int]:
        """Return the ids of <s>, the problem and the context, truncated to `limit` ids."""
        problem = problem_segment(self.tokenizer, record["problem"]["title"] or "", record["problem"]["body"] or "")
        if len(problem) > limit - 1 < LEAST_TEXT + 2:
            left = f"only {limit} of {self.max_length} tokens for the problem"
            raise TooLongError("stream", f"record {record['id']!r}: plan and code leave {left}; increase max_length")
        given = record["context"] or {}
        context = context_segment(self.tokenizer, given.get("path") or "", given.get("before") or "")
        return fit_task(problem, context, self.problem_budget, self.context_budget, limit)

    def _tail(self, record: dict[str, Any], attempts: Sequence[dict[str, Any]]) -> _Tail:
        """Return the stream after the context: plan, attempts and decisions."""
        plan, tail = self._plan(record), _Tail()
        self._within("plan", plan, self.plan_budget, record)
        tail.add(plan, ignored=1)
        attempts = attempts or [{"code": record["solution"]["code"], "feedback": None, "decision": None}]
        for number, attempt in enumerate(attempts, start=1):
            last = number == len(attempts)
            self._add_code(tail, record, attempt["code"], "code" if last else "attempt")
            if attempt["decision"] is None:
                break
            self._add_decision(tail, attempt)
            if attempt["decision"] == DECISIONS[REFINE] and not last:
                tail.add(plan)
        tail.add([TOKEN_IDS[EOS]])
        return tail

    def _add_code(self, tail: _Tail, record: dict[str, Any], code: str, what: str) -> None:
        """Append an attempt. Its code gets labels only if it is the solution (`what` is "code")."""
        prefix = record["code_prefix"] or ""
        if not code.startswith(prefix):
            raise ValueError(f"record {record['id']!r}: code_prefix={prefix!r}: must be the beginning of the {what}")
        body = code[len(prefix) :]
        ids, given = code_segment(self.tokenizer, prefix, body)
        self._within(what, ids, self.code_budget, record)
        tail.code_bytes = len(body.encode())
        start = len(tail.ids)
        tail.add(ids, given if what == "code" else len(ids))
        tail.labels[start] = ids[0]  # <CODE> always has a label, because the model writes it
        tail.span = start + given, start + len(ids)

    def _add_decision(self, tail: _Tail, attempt: dict[str, Any]) -> None:
        """Append the verdict on the last attempt, and the decision that follows it, to `tail`."""
        decision = DECISIONS.index(attempt["decision"])
        feedback = attempt.get("feedback")
        found = None if feedback is None else Feedback.of_record(feedback)
        feedback_ids = NO_FEEDBACK if found is None else found.token_ids(attempt["code"].count("\n") + 1)
        tail.decisions.append((len(tail.ids) - 1, decision, feedback_ids))
        ids = decision_segment(self.tokenizer, found, decision)
        tail.add(ids, ignored=len(ids) - 1)

    def _plan(self, record: dict[str, Any]) -> list[int]:
        plan = record["plan"]
        steps = [step["text"] for step in plan["steps"]]
        return plan_segment(self.tokenizer, plan["intent"], plan["targets"], steps)

    @staticmethod
    def _within(what: str, ids: list[int], budget: int, record: dict[str, Any]) -> None:
        if len(ids) > budget:
            raise TooLongError(what, f"record {record['id']!r}: {what} has {len(ids)} tokens; the budget is {budget}")


# ---- data sets ----


@dataclass
class GoStreams:
    """Rows built from record files, with the record of each row and counts of what was read and kept.

    Attributes:
        rows: the columns of `GoStreamBuilder.build`; without `code_*` for training, without `plain_*` for evaluation.
        records: the record of each row, in the same order.
        counts: "records" read, "bad" lines skipped, "kept" rows, their "tokens", "targets" (labeled tokens) and
            "attempts", attempts "left_out" because they do not fit, and dropped records by `reason`.
    """

    rows: "Dataset"
    records: "Dataset"
    counts: Counter

    def describe(self) -> str:
        """Return the counts as one line of text."""
        c = self.counts
        dropped = ", ".join(f"{c[name]:,} {text}" for name, text in DROPPED.items() if c[name])
        return (
            f"{c['kept']:,} of {c['records']:,} records, {c['tokens']:,} tokens, {c['targets']:,} of them targets, "
            f"{c['attempts']:,} attempts"
            + (f" without {c['left_out']:,} that do not fit" if c["left_out"] else "")
            + (f"; dropped {dropped}" if dropped else "")
        )


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
    """Convert JSON Lines files of records, plain or gzipped, to rows. `datasets` caches records and rows.

    Args:
        training: build training rows; evaluation rows also have the columns needed for bits per byte.
        plain: add the stream without attempts to training rows, for a refinement warmup.
        on_bad_line: "stop" at an invalid line, or "skip" and count it.
        max_records: maximum number of records to use, from the start.
        num_workers: number of processes that tokenize.
        cache_dir: cache folder for the converted files; defaults to the cache of `datasets`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a line is corrupted (the message names file and line), or no record fits.
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
            f"{', '.join(map(str, paths))}: none of {len(records)} records fit: "
            f"{dict(counts)}; raise the budgets, or use other files"
        )
    rows = rows.select(kept)
    counts.update(tokens=sum(rows["length"]), **{name: sum(rows[name]) for name in COUNTED})
    unused = ["dropped", *COUNTED, *(SCORED if training else ())]
    return GoStreams(rows.remove_columns(unused), records.select(kept), counts)


def _read(paths: Sequence[str], on_bad_line: str, cache_dir: str | None) -> tuple["Dataset", int]:
    """Return the records from all files, and the number of skipped lines."""
    from datasets import Dataset, concatenate_datasets
    from datasets.exceptions import DatasetGenerationError
    from datasets.fingerprint import Hasher

    parts, bad = [], 0
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected records from `hrm-hf data go`")
        state = path.stat()
        key = Hasher.hash((BUILDER_VERSION, str(path.resolve()), state.st_size, state.st_mtime_ns, on_bad_line))
        options = {"paths": str(path), "on_bad_line": on_bad_line}
        if next(read_records(**options), None) is None:
            raise ValueError(f"{path} has no records; expected JSON Lines from `hrm-hf data go`")
        how = {"gen_kwargs": options, "cache_dir": cache_dir, "fingerprint": key, "writer_batch_size": WRITTEN_AT_ONCE}
        try:
            part = Dataset.from_generator(read_records, features=record_features(), **how)
        except DatasetGenerationError as error:  # raised by `datasets` for an error in `read_records`
            raise (error.__cause__ or error) from None
        parts.append(part)
        if on_bad_line == "skip":
            bad += sum(1 for _ in numbered_lines(path)) - len(part)
    return (parts[0] if len(parts) == 1 else concatenate_datasets(parts)), bad


def _build_rows(records, builder: GoStreamBuilder, plain: bool, num_workers) -> "Dataset":
    from datasets import Features, Sequence, Value
    from datasets.fingerprint import Hasher

    ids, number = Sequence(Value("int32")), Value("int32")
    columns = dict.fromkeys(("input_ids", "labels", "decision_positions", "decision_labels"), ids)
    columns |= {"feedback_ids": Sequence(ids), **dict.fromkeys((*SCORED, "length", *COUNTED), number)}
    columns["dropped"] = Value("string")
    if plain:
        columns |= {f"{PLAIN_PREFIX}input_ids": ids, f"{PLAIN_PREFIX}labels": ids}
    workers = num_workers if num_workers and num_workers > 1 and len(records) > num_workers else None
    return records.map(
        _row,
        fn_kwargs={"builder": builder, "plain": plain, "columns": columns},
        features=Features(columns),
        remove_columns=records.column_names,
        num_proc=workers,
        new_fingerprint=Hasher.hash((records._fingerprint, builder.settings(), plain)),
        desc="tokenizing records",
    )


def _row(record: dict[str, Any], builder: GoStreamBuilder, plain: bool, columns: dict[str, Any]) -> dict[str, Any]:
    try:
        row = builder.build(record)
        if plain:
            alone = builder.build(record, refinement=False) if record["attempts"] else {"input_ids": [], "labels": []}
            row |= {f"{PLAIN_PREFIX}{name}": alone[name] for name in ("input_ids", "labels")}
    except TooLongError as error:
        empty = {"int32": 0, "string": ""}
        row = {name: empty.get(getattr(kind, "dtype", None), []) for name, kind in columns.items()}
        return row | {"dropped": error.reason}
    targets = sum(label != IGNORED for label in row["labels"])
    attempts = len(row["decision_labels"])
    left_out = len(record["attempts"] or []) - attempts
    return row | {"dropped": "", "targets": targets, "attempts": attempts, "left_out": left_out}


# ---- batches ----


class GoCoderCollator:
    """Collator that pads rows from `GoStreamBuilder` on the right to form a batch of tensors.

    A batch has `input_ids`, `attention_mask`, `labels` [B, S] and, for models that accept them, `decision_positions`,
    `decision_labels` [B, K] and `feedback_ids` [B, K, 4] (padded with position 0 and label -100). If rows also have
    the stream without attempts, "plain" is the batch of these; `at_step` selects a batch. Rows with `code_start` add
    `scored_labels` [B, S], the labels of the code only, and `scored_bytes` [B], for bits per byte.

    Args:
        pad_token_id: id for padding.
        decisions: whether the model accepts decisions; False for ordinary causal models.
        plain_steps: number of initial training steps that use the streams without attempts.
    """

    def __init__(self, pad_token_id: int, decisions: bool = True, plain_steps: int = 0):
        self.pad_token_id, self.decisions, self.plain_steps = pad_token_id, decisions, plain_steps

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self._pad(rows)
        if "code_start" in rows[0]:
            scored = torch.full_like(batch["labels"], IGNORED)
            for index, row in enumerate(rows):
                span = slice(row["code_start"], row["code_end"])
                scored[index, span] = batch["labels"][index, span]
            batch |= {"scored_labels": scored, "scored_bytes": torch.tensor([row["code_bytes"] for row in rows])}
        if f"{PLAIN_PREFIX}input_ids" in rows[0]:
            batch["plain"] = self._pad([_plain(row) for row in rows])
        return batch

    def at_step(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the batch to train on after `step` optimizer steps."""
        plain = batch.pop("plain", None)
        return plain if plain is not None and step < self.plain_steps else batch

    def _pad(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        missing = [-(-max(lengths) // MULTIPLE) * MULTIPLE - length for length in lengths]
        batch = {
            "input_ids": [[*row["input_ids"], *[self.pad_token_id] * more] for row, more in zip(rows, missing)],
            "attention_mask": [[1] * length + [0] * more for length, more in zip(lengths, missing)],
            "labels": [[*row["labels"], *[IGNORED] * more] for row, more in zip(rows, missing)],
        }
        if self.decisions:
            batch |= padded_decisions(rows)
        return {name: torch.tensor(values, dtype=torch.long) for name, values in batch.items()}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    if not row[f"{PLAIN_PREFIX}input_ids"]:  # a row without attempts has only one stream
        return row
    ids, labels = row[f"{PLAIN_PREFIX}input_ids"], row[f"{PLAIN_PREFIX}labels"]
    return {"input_ids": ids, "labels": labels, "decision_positions": [], "decision_labels": [], "feedback_ids": []}


def padded_decisions(rows: Sequence[dict[str, Any]]) -> dict[str, list]:
    """Return each row's decisions, padded to the largest number of decisions in a row (at least 1)."""
    count = max(1, *(len(row["decision_labels"]) for row in rows))
    padding = {"decision_positions": 0, "decision_labels": IGNORED, "feedback_ids": NO_FEEDBACK}
    return {
        name: [[*row[name], *[value] * (count - len(row[name]))] for row in rows] for name, value in padding.items()
    }
