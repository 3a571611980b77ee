"""Reasoning data sets as the training data of a run: rows with labels of their own, which are not packed."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ...io.sources import load_split
from ...io.words import counted
from ..arguments import LmDataArguments
from ..corpus import TextCorpus
from .build import INFO_FILE, ReasoningInfo, load_reasoning_info
from .rows import FILLING
from .tasks import ID


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# The options of a run on text that these data have too; the others are about documents.
OPTIONS = (
    "train_data", "eval_data", "train_split", "eval_split", "max_train_samples", "max_eval_samples", "tokenizer_name",
    "block_size", "prompt", "prompt_new_tokens",
)  # fmt: skip


@dataclass
class ReasoningCorpus(TextCorpus):
    """As of text, but for `sizes`: rows, tokens of a row, and the answers that are asked for in them."""

    @property
    def eval_bytes_per_token(self) -> None:
        """None: these tokens stand for no text."""
        return None

    def describe(self) -> str:
        """A line for each split."""
        return "\n".join(
            f"{name}: {counted(size['rows'], 'row')} of {size['row_length']} tokens, "
            f"{counted(size['answers'], 'answer')}"
            for name, size in self.sizes.items()
        )


def is_reasoning_data(sources: list[str]) -> bool:
    """Whether sources are folders of `hrm-hf data reasoning`.

    Raises:
        ValueError: some are, and others are text.
    """
    found = [(Path(source) / INFO_FILE).is_file() for source in sources]
    if any(found) and not all(found):
        text = sources[found.index(False)]
        raise ValueError(f"{text} is no reasoning data set, as the others are; train on text and on those apart")
    return any(found)


def load_reasoning_corpus(options: LmDataArguments, tokenizer: "PreTrainedTokenizerBase") -> ReasoningCorpus:
    """The rows of a run: those of all sources, shuffled by the trainer.

    Validation rows are the split `--eval_split` of `--eval_data`, or of the training data.

    Args:
        options: what is said there of documents has to be left at its default.
        tokenizer: that of the suite.

    Raises:
        ValueError: an option that these data do not have, a tokenizer of other words, or rows longer than block_size.
    """
    for option in fields(options):
        if option.name not in (*OPTIONS, "validation_split_percentage"):
            _validate_default(options, option)
    for source in options.train_data:
        validate_vocabulary(tokenizer, source)
    corpus = ReasoningCorpus(train=None, validation=None)
    corpus.train = _rows(options.train_data, options.train_split, options.max_train_samples, "train", corpus)
    held_out = options.eval_data or [source for source in options.train_data if _has(source, options.eval_split)]
    if held_out and options.validation_split_percentage:
        corpus.validation = _rows(held_out, options.eval_split, options.max_eval_samples, "validation", corpus)
    corpus.row_length = max(size["row_length"] for size in corpus.sizes.values())
    if corpus.row_length > options.block_size:
        raise ValueError(
            f"block_size={options.block_size} is less than the {corpus.row_length} tokens of a row; raise it"
        )
    return corpus


def validate_vocabulary(tokenizer: "PreTrainedTokenizerBase", source: str) -> None:
    """Raises ValueError for a tokenizer that has other words than the suite."""
    if tokenizer.get_vocab() != ID:
        raise ValueError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has other words than {source}; give the tokenizer that lies "
            f"there, with --tokenizer_name {source}"
        )


def _validate_default(options: LmDataArguments, option) -> None:
    value = getattr(options, option.name)
    default = option.default if option.default_factory is MISSING else option.default_factory()
    if value != default:
        raise ValueError(f"{option.name}={value!r} has no effect on a reasoning data set; leave it out")


def _has(source: str, split: str) -> bool:
    """Whether a set was built with rows in the split."""
    info: ReasoningInfo = load_reasoning_info(source)
    return bool(info.rows.get(split, info.rows["test"]))


def _rows(sources: list[str], split: str, most: int | None, name: str, corpus: ReasoningCorpus) -> "Dataset":
    from datasets import concatenate_datasets

    parts = [load_split(source, split).select_columns(["input_ids", "labels"]) for source in sources]
    length = max(len(part[0]["input_ids"]) for part in parts)
    rows = concatenate_datasets([part.map(_fill, fn_kwargs={"length": length}) for part in parts])
    rows = rows if most is None else rows.select(range(min(most, len(rows))))
    rows = rows.with_format("torch")
    answers = int(sum((batch["labels"][:, 1:] >= 0).sum() for batch in rows.iter(1000)))
    corpus.sizes[name] = {"rows": len(rows), "row_length": length, "answers": answers}
    return rows


def _fill(row: dict[str, list[int]], length: int) -> dict[str, list[int]]:
    return {name: row[name] + [FILLING[name]] * (length - len(row[name])) for name in row}
