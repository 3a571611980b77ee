"""Reasoning data sets as the training data of a run: rows with labels of their own, which are not packed."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ...io.files import load_split
from ..arguments import AnswerDataArguments, LmDataArguments
from ..corpus import TextCorpus
from .build import INFO_FILE, load_reasoning_info
from .rows import FILLING
from .tasks import ID


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Options of a run on text that these data have too, besides those of answers; the others are about documents.
OPTIONS = ("block_size", "prompt", "prompt_new_tokens", "validation_split_percentage")


def is_reasoning_data(sources: list[str]) -> bool:
    """Whether sources are folders of `hrm-hf data reasoning`. Raises ValueError if some are, and others are text."""
    found = [(Path(source) / INFO_FILE).is_file() for source in sources]
    if any(found) and not all(found):
        text = sources[found.index(False)]
        raise ValueError(f"{text} is no reasoning data set, as the others are; train on text and on those apart")
    return any(found)


def load_reasoning_corpus(options: LmDataArguments, tokenizer: "PreTrainedTokenizerBase") -> TextCorpus:
    """The rows of all sources; validation rows are the split `--eval_split` of `--eval_data`, or of the training data.

    Raises:
        ValueError: an option that these data do not have, a tokenizer of other words, or rows longer than block_size.
    """
    usual = LmDataArguments()
    shared = {option.name for option in fields(AnswerDataArguments)}.union(OPTIONS)
    for name in {option.name for option in fields(options)} - shared:
        if (value := getattr(options, name)) != getattr(usual, name):
            raise ValueError(f"{name}={value!r}: has no effect on a reasoning data set; leave it out")
    for source in options.train_data:
        validate_vocabulary(tokenizer, source)
    corpus = TextCorpus(train=None, validation=None)
    corpus.train = _rows(options.train_data, options.train_split, options.max_train_samples, "train", corpus)
    sizes = {source: load_reasoning_info(source).rows for source in options.train_data}
    held_out = options.eval_data or [source for source in sizes if sizes[source].get(options.eval_split, 1)]
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


def _rows(sources: list[str], split: str, most: int | None, name: str, corpus: TextCorpus) -> "Dataset":
    from datasets import concatenate_datasets

    parts = [load_split(source, split).select_columns(["input_ids", "labels"]) for source in sources]
    length = max(len(part[0]["input_ids"]) for part in parts)

    def fill(row: dict[str, list[int]]) -> dict[str, list[int]]:
        return {name: row[name] + [FILLING[name]] * (length - len(row[name])) for name in row}

    rows = concatenate_datasets([part.map(fill) for part in parts])
    rows = (rows if most is None else rows.select(range(min(most, len(rows))))).with_format("torch")
    answers = int(sum((batch["labels"][:, 1:] >= 0).sum() for batch in rows.iter(1000)))
    corpus.sizes[name] = {"rows": len(rows), "row_length": length, "answers": answers}
    return rows
