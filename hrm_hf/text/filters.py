"""Filter documents by readability, length and duplication, and count removals by reason.

Near duplicates are found with MinHash and locality-sensitive hashing of the `datasketch` package (extra `dedup`).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..io.files import BadLineError
from ..io.usage import validate_extra


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BATCH_ROWS = 100  # number of texts in memory at the same time
SHINGLE_WORDS = 5
WORD = re.compile(r"\w+")


@dataclass
class TextFilter:
    """Filter that keeps or removes one document at a time and counts its decisions.

    Attributes:
        min_length, max_length: limits in characters; None for no limit.
        long_texts: "drop" documents longer than max_length, or "cut" them to it.
        on_bad_line: "stop" or "skip", for rows that contain an error instead of a text.
        is_duplicate: checks whether a text was seen before, and remembers the text; None keeps duplicates.
        counts: number of documents by outcome: "kept", "bad", "short", "long", "cut", "duplicate".
        bad_lines: the first 20 error messages of skipped rows.
    """

    min_length: int | None = None
    max_length: int | None = None
    long_texts: str = "drop"
    on_bad_line: str = "stop"
    is_duplicate: Callable[[str], bool] | None = None
    counts: Counter = field(default_factory=Counter)
    bad_lines: list[str] = field(default_factory=list)

    def __call__(self, text: str | None, error: str | None) -> bool:
        """Check whether to keep a row. Raise `BadLineError` for an unreadable row if `on_bad_line` is "stop"."""
        reason = self._reason(text, error)
        self.counts[reason or "kept"] += 1
        if reason is None and self._too_long(text):
            self.counts["cut"] += 1
        return reason is None

    def _reason(self, text: str | None, error: str | None) -> str | None:
        if error is not None:
            if self.on_bad_line == "stop":
                raise BadLineError(error)
            if len(self.bad_lines) < 20:
                self.bad_lines.append(error)
            return "bad"
        if self.min_length is not None and len(text) < self.min_length:
            return "short"
        if self.long_texts == "drop" and self._too_long(text):
            return "long"
        if self.is_duplicate is not None and self.is_duplicate(text):
            return "duplicate"
        return None

    def _too_long(self, text: str) -> bool:
        return self.max_length is not None and len(text) > self.max_length

    def apply(self, rows: "Dataset") -> "Dataset":
        """Return the documents from a source that pass the filter, as a column `text`."""
        keep, start = [], 0
        for batch in rows.iter(BATCH_ROWS):
            pairs = enumerate(zip(batch["text"], batch["error"]), start)
            keep += [row for row, (text, error) in pairs if self(text, error)]
            start += len(batch["text"])
        rows = rows.remove_columns("error")
        return self._cut(rows if len(keep) == len(rows) else rows.select(keep))

    def apply_to_stream(self, rows: "IterableDataset") -> "IterableDataset":
        """Filter a stream. The process that reads the documents counts them as it reads."""
        kept = rows.filter(self.__call__, input_columns=["text", "error"])
        return self._cut(kept.remove_columns("error"))

    def _cut(self, rows):
        if self.max_length is None or self.long_texts == "drop":
            return rows
        return rows.map(slice_texts, batched=True, fn_kwargs={"start": 0, "stop": self.max_length})

    def explain(self) -> str:
        """Return the number of documents removed for each reason, as text for an error message."""
        limits = {
            "bad": "unreadable lines",
            "short": f"shorter than min_text_length={self.min_length}",
            "long": f"longer than max_text_length={self.max_length} (--long_texts cut keeps their beginning)",
            "duplicate": "duplicates",
        }
        removed = [f"{self.counts[name]} {text}" for name, text in limits.items() if self.counts[name]]
        return "; ".join(removed) or "none, there were no documents"


def slice_texts(batch: dict[str, list[str]], start: int, stop: int) -> dict[str, list[str]]:
    """Keep only the characters from `start` to `stop` of each text in a batch."""
    return {"text": [text[start:stop] for text in batch["text"]]}


def duplicate_finder(kind: str, threshold: float = 0.8) -> Callable[[str], bool] | None:
    """Return a function that checks whether it has seen a text before, or None for kind "none".

    Kind "near" also finds near duplicates: texts with a Jaccard similarity of at least `threshold` between their sets
    of five-word sequences, estimated by MinHash.

    Raises:
        ImportError: the kind is "near" and the datasketch package is not installed.
    """
    if kind == "near":
        return _near_finder(threshold)
    seen: set[bytes] = set()

    def is_duplicate(text: str) -> bool:
        known = len(seen)
        seen.add(hashlib.blake2b(text.encode(), digest_size=16).digest())
        return len(seen) == known

    return is_duplicate if kind == "exact" else None


def _near_finder(threshold: float) -> Callable[[str], bool]:
    what = "near-duplicate removal requires datasketch"
    validate_extra("dedup", what, "datasketch", instead="pass --deduplicate exact")
    from datasketch import MinHash, MinHashLSH

    index, sketches = MinHashLSH(threshold=threshold, num_perm=128), []

    def is_duplicate(text: str) -> bool:
        sketch = MinHash(num_perm=128)
        sketch.update_batch(shingles(text))
        # The index only proposes candidates, so compare their similarity with the threshold.
        if any(sketch.jaccard(sketches[kept]) >= threshold for kept in index.query(sketch)):
            return True
        sketches.append(sketch)
        index.insert(len(sketches) - 1, sketch)
        return False

    return is_duplicate


def shingles(text: str) -> list[bytes]:
    """Return the distinct five-word sequences of a text, ignoring case and punctuation."""
    words = WORD.findall(text.lower())
    count = max(1, len(words) - SHINGLE_WORDS + 1)
    return list({" ".join(words[start : start + SHINGLE_WORDS]).encode() for start in range(count)})
