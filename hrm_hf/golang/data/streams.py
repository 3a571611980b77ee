"""Data sets of token streams: files of records become rows of `GoStreamBuilder`, and all of them are counted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .collator import BUILDER_VERSION, IGNORED, PLAIN, SCORED, GoStreamBuilder, TooLongError


if TYPE_CHECKING:
    from datasets import Dataset

COUNTED = ("length", "targets", "attempts", "left_out")


@dataclass
class GoStreams:
    """Rows of a source and what became of its records.

    Attributes:
        rows: the columns of `GoStreamBuilder.build`; without `code_*` for training, without `plain_*` for evaluation.
        records: the records of the rows, in their order.
        counts: "records" read, "bad" lines skipped, "kept" rows, their "tokens", "targets" (labelled tokens) and
            "attempts", how many attempts were "left_out" because they do not fit; of a builder of edits, how many rows
            repair by edits ("edit_repairs") and by whole code ("whole_repairs"); of what was dropped, the reasons of
            `TooLongError`.
    """

    rows: "Dataset"
    records: "Dataset"
    counts: Counter

    def describe(self) -> str:
        """The counts in a line for people."""
        c = self.counts
        edits = "edit_repairs" in c
        dropped = ", ".join(f"{c[name]:,} {text}" for name, text in DROPPED.items() if c[name])
        return (
            f"{c['kept']:,} of {c['records']:,} records, {c['tokens']:,} tokens, {c['targets']:,} of them targets, "
            f"{c['attempts']:,} attempts"
            + (f" without {c['left_out']:,} that do not fit" if c["left_out"] else "")
            + (f", {c['edit_repairs']:,} repairs by edits, {c['whole_repairs']:,} by whole code" if edits else "")
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
    if builder.repairs == "edits":
        repairs = Counter(rows["repair"])
        counts.update(edit_repairs=repairs["edits"], whole_repairs=repairs["rewrite"])
    unused = ["dropped", "repair", "targets", "attempts", "left_out", *(SCORED if training else ())]
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
        "length": number, "repair": Value("string"), "dropped": Value("string"), "targets": number,
        "attempts": number, "left_out": number,
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
        empty |= {"repair": "", "dropped": error.reason}
        return empty | ({f"{PLAIN}input_ids": [], f"{PLAIN}labels": []} if plain else {})
    targets = sum(label != IGNORED for label in row["labels"])
    attempts = len(row["decision_labels"])
    # A repair by edits has the last failed attempt alone, on purpose.
    left_out = 0 if row["repair"] == "edits" else len(record["attempts"] or []) - attempts
    return row | {"dropped": "", "targets": targets, "attempts": attempts, "left_out": left_out}
