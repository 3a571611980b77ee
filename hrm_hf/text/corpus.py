"""From the data options of a run to packed training and validation rows: sources, filters, hold-out, mixing, packing.

The order matters and is: read, remove what is unreadable, too short, too long or a duplicate, hold out validation
documents, mix, take the first `max_*_samples`, tokenise, pack. Nothing here splits data among processes: rows that are
not streamed are shared out by accelerate's sampler, streams by its dispatching loader, each exactly once.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..io.files import is_hub_source
from .filters import BATCH_ROWS, TextFilter, duplicate_finder, slice_texts
from .packing import Packing, pack_documents, pack_stream, tokenize_documents
from .sources import open_source


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from .arguments import LmDataArguments


@dataclass
class TextCorpus:
    """Packed rows and what is known about their origin.

    Attributes:
        train: rows of `input_ids` and `labels` (int64 tensors [block_size]), and `position_ids` with a document mask.
        validation: the same, never a stream; None without validation data.
        sizes: by split ("train", "validation"): documents, tokens (EOS included), bytes, bytes_per_token, blocks; of a
            reasoning data set rows, row_length and answers. A stream of training data has none.
        filters: by split, with counts of what was removed and why.
        row_length: tokens of a row, where the data say it and not the options.
    """

    train: "Dataset | IterableDataset"
    validation: "Dataset | None"
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)
    filters: dict[str, TextFilter] = field(default_factory=dict)
    row_length: int | None = None

    @property
    def bad_lines(self) -> int:
        """Unreadable lines that were skipped. Of a stream: until now, in this process, once for each pass."""
        return sum(one.counts["bad"] for one in self.filters.values())

    @property
    def eval_bytes_per_token(self) -> float | None:
        """UTF-8 bytes of the validation text over its tokens, for bits per byte; None where tokens are no text."""
        return self.sizes.get("validation", {}).get("bytes_per_token")

    def report(self) -> dict[str, Any]:
        """Everything countable, for results.json."""
        filtered = {name: {"filtered": one.report(), "bad_lines": one.bad_lines} for name, one in self.filters.items()}
        return {
            name: {**self.sizes.get(name, {}), **filtered.get(name, {})}
            for name in ("train", "validation")
            if name in self.sizes or name in filtered
        }

    def describe(self) -> str:
        """The same for people: a line for each split and each kind of removal."""
        lines = [
            f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {round(value, 3):,}" for key, value in size.items())
            for name, size in self.sizes.items()
        ]
        for name, one in self.filters.items():
            if one.counts.total() > one.counts["kept"] + one.counts["cut"]:
                lines.append(f"{name}: removed {one.explain()}")
            lines += [f"  skipped {message}" for message in one.bad_lines]
        return "\n".join(lines)


def load_text_corpus(options: "LmDataArguments", tokenizer: "PreTrainedTokenizerBase", seed: int = 0) -> TextCorpus:
    """The packed data of a run.

    Args:
        options: see `LmDataArguments`.
        tokenizer: with an EOS token.
        seed: of mixing and of a stream's shuffling.

    Raises:
        FileNotFoundError, BadLineError: see `text_sources.open_source`.
        ValueError: nothing to train on, or everything filtered out; the message says by which filter.
    """
    if not options.train_data:
        raise ValueError(
            "no training text: give --train_data with a file (.jsonl, .txt, .parquet, .gz), a folder, or a data set "
            "of the Hub as OWNER/NAME:CONFIG; several are separated by commas"
        )
    _validate_eos(tokenizer)
    # One memory for both splits, validation first: training text that repeats validation text is removed as well.
    seen = duplicate_finder(options.deduplicate, options.near_duplicate_threshold)
    filters = {name: _filter(options, seen) for name in ("train", "validation")}
    held_out = [_eval_documents(source, options, filters["validation"]) for source in options.eval_data]
    train = [_train_documents(source, options, filters["train"]) for source in options.train_data]
    if not held_out:
        filters.pop("validation")
        if options.validation_split_percentage and not options.streaming:
            train, held_out = zip(*[hold_out(rows, options.validation_split_percentage) for rows in train])
    mixed = _mix(list(train), options, seed)
    if options.streaming and not held_out and options.max_eval_samples:
        held_out = [_materialize(mixed, options.max_eval_samples)]
        mixed = mixed.skip(options.max_eval_samples)
    return _pack(mixed, list(held_out), options, tokenizer, seed, filters)


def load_evaluation_text(
    options: "LmDataArguments", tokenizer: "PreTrainedTokenizerBase", last_percentage: float | None = None
) -> TextCorpus:
    """The packed rows of `options.eval_data` alone, as `validation`; `train` is None.

    Args:
        options, tokenizer: as for `load_text_corpus`.
        last_percentage: only what a run that trains on these sources holds out of each (`hold_out`).

    Raises: as `load_text_corpus`.
    """
    from datasets import concatenate_datasets

    _validate_eos(tokenizer)
    seen = duplicate_finder(options.deduplicate, options.near_duplicate_threshold)
    corpus = TextCorpus(train=None, validation=None, filters={"validation": _filter(options, seen)})
    rows = [_eval_documents(source, options, corpus.filters["validation"]) for source in options.eval_data]
    if last_percentage is not None:
        rows = [hold_out(one, last_percentage)[1] for one in rows]
    rows = _first(concatenate_datasets(rows), options.max_eval_samples)
    corpus.validation = _pack_rows(rows, "validation", corpus, options, tokenizer, _packing(options, tokenizer))
    return corpus


def _validate_eos(tokenizer: "PreTrainedTokenizerBase") -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{tokenizer.name_or_path or 'the tokenizer'} has no EOS token to put between documents")


def _filter(options: "LmDataArguments", seen) -> TextFilter:
    return TextFilter(
        min_length=options.min_text_length,
        max_length=options.max_text_length,
        long_texts=options.long_texts,
        on_bad_line=options.on_bad_line,
        is_duplicate=seen,
    )


def _open(source: str, split: str, options: "LmDataArguments", streaming: bool):
    return open_source(
        source,
        split=split,
        column=options.text_column,
        separator=options.document_separator,
        on_bad_line=options.on_bad_line,
        streaming=streaming,
        cache_dir=options.data_cache_dir,
    )


def _train_documents(source: str, options: "LmDataArguments", text_filter: TextFilter):
    rows = _open(source, options.train_split, options, options.streaming)
    if options.streaming:
        return text_filter.apply_to_stream(rows)
    rows = text_filter.apply(rows)
    _validate_documents(len(rows), source, text_filter)
    return rows


def _eval_documents(source: str, options: "LmDataArguments", text_filter: TextFilter) -> "Dataset":
    """Validation data are never a stream: their size has to be known. Of a stream, the first documents are taken."""
    if options.streaming and options.max_eval_samples and is_hub_source(source):
        stream = text_filter.apply_to_stream(_open(source, options.eval_split, options, streaming=True))
        return _materialize(stream, options.max_eval_samples)
    rows = text_filter.apply(_open(source, options.eval_split, options, streaming=False))
    _validate_documents(len(rows), source, text_filter)
    return rows


def _materialize(stream: "IterableDataset", count: int) -> "Dataset":
    from datasets import Dataset, Features, Value

    texts = [row["text"] for row in stream.take(count)]
    return Dataset.from_dict({"text": texts}, features=Features({"text": Value("large_string")}))


def hold_out(rows: "Dataset", percentage: float) -> tuple["Dataset", "Dataset"]:
    """Splits documents into training and validation: the last ones, with at least `percentage` % of the characters.

    Documents stay whole, except that a single one is cut at a line break.
    """
    import numpy as np

    if len(rows) == 1:
        text = rows[0]["text"]
        cut = text.find("\n", int(len(text) * (1 - percentage / 100))) + 1
        cut = cut if 0 < cut < len(text) else int(len(text) * (1 - percentage / 100))
        parts = ({"start": 0, "stop": cut}, {"start": cut, "stop": len(text)})
        return tuple(rows.map(slice_texts, batched=True, fn_kwargs=part) for part in parts)
    lengths = np.array([len(text) for batch in rows.iter(BATCH_ROWS) for text in batch["text"]])
    from_the_end = np.cumsum(lengths[::-1])
    count = int(np.searchsorted(from_the_end, from_the_end[-1] * percentage / 100)) + 1
    first = max(1, len(rows) - count)  # something has to be left to train on
    return rows.select(range(first)), rows.select(range(first, len(rows)))


def _mix(parts: list, options: "LmDataArguments", seed: int):
    from datasets import concatenate_datasets, interleave_datasets

    if not options.mix_probabilities:
        return parts[0] if len(parts) == 1 else concatenate_datasets(parts)
    return interleave_datasets(
        parts, probabilities=options.mix_probabilities, seed=seed, stopping_strategy=options.mix_stopping
    )


def _pack(mixed, held_out: list, options, tokenizer, seed: int, filters: dict[str, TextFilter]) -> TextCorpus:
    from datasets import concatenate_datasets

    packing = _packing(options, tokenizer)
    corpus = TextCorpus(train=None, validation=None, filters=filters)
    if held_out:
        rows = _first(concatenate_datasets(held_out), options.max_eval_samples)
        corpus.validation = _pack_rows(rows, "validation", corpus, options, tokenizer, packing)
    if options.streaming:
        mixed = _first(mixed, options.max_train_samples)
        _validate_first_document(mixed, filters["train"])
        blocks = pack_stream(tokenize_documents(mixed, tokenizer), packing)
        if options.shuffle_buffer:
            blocks = blocks.shuffle(seed=seed, buffer_size=options.shuffle_buffer)
        corpus.train = blocks.with_format("torch")
    else:
        rows = _first(mixed, options.max_train_samples)
        corpus.train = _pack_rows(rows, "train", corpus, options, tokenizer, packing)
    return corpus


def _packing(options: "LmDataArguments", tokenizer: "PreTrainedTokenizerBase") -> Packing:
    # A tokenizer without padding can be fine-tuned with: what fills the last row has no labels.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Packing(options.block_size, pad, options.chunk_overlap, options.drop_last_block, options.document_mask)


def _first(rows, count: int | None):
    from datasets import IterableDataset

    if count is None:
        return rows
    return rows.take(count) if isinstance(rows, IterableDataset) else rows.select(range(min(count, len(rows))))


def _pack_rows(rows: "Dataset", name: str, corpus: TextCorpus, options, tokenizer, packing: Packing) -> "Dataset":
    what = {"train": "training", "validation": "validation"}[name]
    _validate_documents(len(rows), f"the {what} data", corpus.filters.get(name) or corpus.filters["train"])
    documents = tokenize_documents(rows, tokenizer, options.preprocessing_num_workers)
    blocks = pack_documents(documents, packing, options.data_cache_dir)
    tokens, size = (sum(documents[column]) for column in ("num_tokens", "num_bytes"))
    if not len(blocks):
        raise ValueError(
            f"the {what} documents have {tokens} tokens, less than one block of {packing.block_size}, and "
            "--drop_last_block leaves none: lower --block_size, or keep the last block"
        )
    corpus.sizes[name] = {
        "documents": len(documents), "tokens": tokens, "bytes": size, "bytes_per_token": size / tokens,
        "blocks": len(blocks),
    }  # fmt: skip
    return blocks.with_format("torch")


def _validate_documents(count: int, source: str, text_filter: TextFilter) -> None:
    if not count:
        raise ValueError(f"no documents of {source} are left. Removed so far: {text_filter.explain()}")


def _validate_first_document(stream: "IterableDataset", text_filter: TextFilter) -> None:
    """Reads until the first document that stays, so that an empty stream is an error before training starts."""
    found = next(iter(stream), None)
    _validate_documents(found is not None, "the training data", text_filter)
    text_filter.counts.clear()
    text_filter.bad_lines.clear()
