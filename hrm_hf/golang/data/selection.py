"""Assign records to splits by group, and remove duplicates and overlap with evaluation tasks.

Only the group (package path or repository) determines the split, so a group is in one split and stays there when other
sources are added. Duplicates are removed across splits, in favor of the held-out splits. The evaluation files
themselves are rejected as sources.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...io.files import GZIP_ERRORS, json_object, numbered_lines, open_unpacked
from ...text.filters import duplicate_finder
from .sources import Dropped


SPLITS = ("train", "validation", "test")
# A comment or a token: a complete literal, a word, or a punctuation mark. Comments match the group `comment`.
GO_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|\"(?:\\.|[^\"\\\n])*\"|`[^`]*`|'(?:\\.|[^'\\\n])*'|\w+|[^\w\s]", re.DOTALL
)
NGRAM = 20  # number of consecutive tokens that a record must not share with an evaluation task
# Columns with prompts and solutions in evaluation files. Tests are not compared, because many share boilerplate.
EVALUATION_TEXTS = (
    "prompt", "canonical_solution", "buggy_solution", "declaration", "docstring", "instruction", "description",
)  # fmt: skip
# Name and SHA-256 (of the uncompressed content) of each test set that must not be used for training, because its
# license forbids it or because evaluation would lose its meaning.
EVALUATION_FILES = {
    "humaneval_go_multipl_e": "d9fdeaa0e5acc9bfd572f587cfbab40b0b01c45e63119368d1a21e5ca3ab62e8",
    "mbpp_go_mbxp": "d645d87d757165f92feb2c4d7d01b6353ae2fe7d66f32bc2cc931e93c401d769",
    "humaneval_go_mxeval": "56f132555f28dab5efac0992c31b0030b7b1b6dc9e445d51f722d2e21dcb650f",
    "humanevalpack_go": "49a91a25a30ae128ee07252b2da43b656bfc385f3c56d4f3ed477e99c2807aa4",
}


def split_of(group: str, seed: int = 0, validation_share: float = 0.05, test_share: float = 0.05) -> str:
    """Return the split of a group. The shares are the probabilities of validation and test."""
    digest = hashlib.blake2b(f"{seed}\n{group}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < test_share:
        return "test"
    return "validation" if place < test_share + validation_share else "train"


def code_tokens(code: str) -> list[str]:
    """Return the tokens of Go code without comments, or the words and punctuation of other text."""
    return [match[0] for match in GO_TOKEN.finditer(code) if match["comment"] is None]


def normalized_code(code: str) -> str:
    """Return the tokens of code separated by spaces, without comments or layout."""
    return " ".join(code_tokens(code))


@dataclass
class Selection:
    """Filter that removes duplicates and evaluation overlap from records, and assigns splits.

    Attributes:
        seed, validation_share, test_share: see `split_of`.
        deduplicate: "none", "exact" (equal code after the prefix, ignoring comments and layout), or "near" (also
            near duplicates, found with datasketch).
        near_threshold: minimum Jaccard similarity of near duplicates.
        evaluation_ngrams: hashed token n-grams of evaluation tasks, from `evaluation_ngrams`.
        dropped: counts dropped records.
    """

    seed: int = 0
    validation_share: float = 0.05
    test_share: float = 0.05
    deduplicate: str = "exact"
    near_threshold: float = 0.85
    evaluation_ngrams: set[int] = field(default_factory=set)
    dropped: Dropped = field(default_factory=Dropped)

    def split(self, records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Return the selected records of each split, in input order."""
        splits: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS}
        ids: set[str] = set()
        for record in records:
            if record["id"] in ids:
                self.dropped.add("id seen before", record["id"])
            elif self.evaluation_ngrams and self._resembles_evaluation(record):
                self.dropped.add("overlap with evaluation tasks", record["id"])
            else:
                ids.add(record["id"])
                splits[split_of(record["group"], self.seed, self.validation_share, self.test_share)].append(record)
        kinds = {"none": [], "exact": ["exact"], "near": ["exact", "near"]}[self.deduplicate]
        finders = [(kind, duplicate_finder(kind, self.near_threshold)) for kind in kinds]
        for name in reversed(SPLITS):
            splits[name] = [record for record in splits[name] if not self._is_duplicate(record, finders)]
        return splits

    def _is_duplicate(self, record: dict[str, Any], finders: list) -> bool:
        code = normalized_code(record["solution"]["code"][len(record["code_prefix"]) :])
        for kind, is_duplicate in finders:
            if is_duplicate(code):
                self.dropped.add(f"{kind} duplicate", record["id"])
                return True
        return False

    def _resembles_evaluation(self, record: dict[str, Any]) -> bool:
        texts = (record["problem"]["title"] + "\n" + record["problem"]["body"], record["solution"]["code"])
        return any(not self.evaluation_ngrams.isdisjoint(ngrams(text)) for text in texts)


# ---- evaluation tasks ----


def evaluation_ngrams(paths: Iterable[str | Path]) -> set[int]:
    """Hash the token n-grams in the prompts and solutions of evaluation files (JSON Lines).

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file has no column of evaluation texts, or a corrupted line.
    """
    found: set[int] = set()
    for path in paths:
        texts = 0
        for place, line in numbered_lines(path):
            row = json_object(line, place)
            for name in EVALUATION_TEXTS:
                if isinstance(row.get(name), str):
                    found.update(ngrams(row[name]))
                    texts += 1
        if not texts:
            expected = ", ".join(EVALUATION_TEXTS)
            raise ValueError(f"{path} has no column with prompts or solutions; expected one of {expected}")
    return found


def ngrams(text: str) -> Iterator[int]:
    """Yield a hash of each run of `NGRAM` tokens, first in the code, then in its comments."""
    comments = " ".join(match[0].lstrip("/* ") for match in GO_TOKEN.finditer(text) if match["comment"] is not None)
    for tokens in (code_tokens(text), re.findall(r"\w+|[^\w\s]", comments)):
        lowered = [token.lower() for token in tokens]
        for start in range(len(lowered) - NGRAM + 1):
            digest = hashlib.blake2b(" ".join(lowered[start : start + NGRAM]).encode(), digest_size=8).digest()
            yield int.from_bytes(digest, "big")


def validate_no_evaluation_file(path: str | Path) -> None:
    """Raise ValueError if a file has the name or the content of an evaluation file."""
    path = Path(path)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    if name in EVALUATION_FILES or (path.is_file() and _is_evaluation_content(path)):
        raise ValueError(
            f"{path} is one of the evaluation files ({', '.join(EVALUATION_FILES)}), which must not be used for "
            "training because of their licenses or to keep evaluation meaningful; use other sources"
        )


def _is_evaluation_content(path: Path) -> bool:
    digest = hashlib.sha256()
    try:
        with open_unpacked(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except GZIP_ERRORS:
        return False  # the caller reads the file next, and reports the error
    return digest.hexdigest() in EVALUATION_FILES.values()
