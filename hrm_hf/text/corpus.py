"""Build packed training and validation rows from a run's data options.

The steps, in order: read the sources; remove documents that are unreadable, too short, too long or duplicates; hold
out validation documents; mix; take the first `max_*_samples`; tokenize; pack. Accelerate later splits the rows among
processes (its sampler for data sets, its dispatching loader for streams); each row is used exactly once.

Packing appends EOS to each document, concatenates them, and cuts the result into rows of `block_size` tokens. No
token is lost: the last, shorter block is padded (label -100), and a stream is cut as one sequence, not batch by batch.
Labels are the inputs; models shift them. There is no attention mask, because only the end of the last block is
padding, which a causal model cannot see. With an overlap, each block begins with the last tokens of the previous one.
They are context only (label -100), so each token is still predicted exactly once.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.files import is_hub_source
from ..models.processing_hrm_go_coder import is_go_tokenizer
from .filters import BATCH_ROWS, TextFilter, duplicate_finder, slice_texts
from .sources import open_source


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from .arguments import LmDataArguments

IGNORED = -100
STREAM_BATCH = 64  # documents per batch when tokenizing a stream; small, because documents may be long
PACKER_VERSION = 1  # part of the cache key; increase it when the code packs documents differently


@dataclass(frozen=True)
class Packing:
    """Settings for cutting a sequence of tokens into rows.

    Attributes:
        block_size: tokens per row.
        pad_token_id: fills the last row.
        overlap: tokens that a row shares with the previous row.
        drop_last_block: drop the last row if it is not full.
        document_mask: add `position_ids` that restart at each document. If there is no attention mask, transformers'
            models recognize packed documents by these ids and mask attention between documents. The first token of a
            document then has no context and no label.
    """

    block_size: int
    pad_token_id: int
    overlap: int = 0
    drop_last_block: bool = False
    document_mask: bool = False

    @classmethod
    def of(cls, options: "LmDataArguments", tokenizer: "PreTrainedTokenizerBase") -> "Packing":
        """Return the packing of a run. Without a padding token, the last row is padded with EOS (label -100)."""
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return cls(options.row_length, pad, options.chunk_overlap, options.drop_last_block, options.document_mask)

    def features(self):
        """Return the column types of a packed data set."""
        from datasets import Features, List, Value

        names = ["input_ids", "labels"] + ["position_ids"] * self.document_mask
        return Features({name: List(Value("int32"), length=self.block_size) for name in names})


@dataclass
class TextCorpus:
    """Packed rows and statistics about their sources.

    Attributes:
        train: rows of `input_ids` and `labels` (int64 tensors [block_size]), and `position_ids` with a document mask.
        validation: the same, never a stream; None without validation data.
        sizes: for each split that is not a stream: documents, tokens (including EOS), bytes, bytes_per_token, blocks,
            and padding_tokens or dropped_tokens; for reasoning data: rows, tokens_per_row and answers.
        filters: the filter of each split, which counts removed documents by reason.
        row_length: tokens per row, if the data determine it instead of the options.
    """

    train: "Dataset | IterableDataset"
    validation: "Dataset | None"
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)
    filters: dict[str, TextFilter] = field(default_factory=dict)
    row_length: int | None = None

    @property
    def bad_lines(self) -> int:
        """Number of unreadable lines that this process has skipped. Streams count a line again in every epoch."""
        return sum(one.counts["bad"] for one in self.filters.values())

    @property
    def eval_bytes_per_token(self) -> float | None:
        """Average UTF-8 bytes per token of the validation text (for bits per byte), or None if there is no text."""
        return self.sizes.get("validation", {}).get("bytes_per_token")

    def report(self) -> dict[str, Any]:
        """Return the sizes and filter counts of each split, for results.json."""
        filtered = {
            name: {"filtered": dict(one.counts), "bad_lines": one.bad_lines} for name, one in self.filters.items()
        }
        return {
            name: {**self.sizes.get(name, {}), **filtered.get(name, {})}
            for name in ("train", "validation")
            if name in self.sizes or name in filtered
        }

    def describe(self) -> str:
        """Return the report as text: sizes and removed documents of each split, and each skipped line."""
        lines = [
            f"{name}: " + ", ".join(f"{round(value, 3):,} {key.replace('_', ' ')}" for key, value in size.items())
            for name, size in self.sizes.items()
        ]
        for name, one in self.filters.items():
            if one.counts.total() > one.counts["kept"] + one.counts["cut"]:
                lines.append(f"{name}: removed {one.explain()}")
            lines += [f"  skipped {message}" for message in one.bad_lines]
        return "\n".join(lines)


def load_text_corpus(options: "LmDataArguments", tokenizer: "PreTrainedTokenizerBase", seed: int = 0) -> TextCorpus:
    """Load and pack a run's data, using `seed` to mix sources and to shuffle a stream.

    Raises:
        FileNotFoundError, BadLineError: see `open_source`.
        ValueError: the tokenizer has no EOS token, there is no training data, or all documents were filtered out.
    """
    if not options.train_data:
        raise ValueError(
            "train_data=[]: there is nothing to train on; pass --train_data with files (.jsonl, .txt, .parquet, .gz), "
            "folders or Hub data sets OWNER/NAME:CONFIG, separated by commas"
        )
    _validate_eos(tokenizer)
    # Both splits share a duplicate finder. Validation comes first, so training text that repeats it is removed.
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
    """Load and pack only `options.eval_data`, as the validation split.

    With `last_percentage`, keep only the end of each source, the part that a training run on the source holds out.
    """
    from datasets import concatenate_datasets

    _validate_eos(tokenizer)
    seen = duplicate_finder(options.deduplicate, options.near_duplicate_threshold)
    corpus = TextCorpus(train=None, validation=None, filters={"validation": _filter(options, seen)})
    rows = [_eval_documents(source, options, corpus.filters["validation"]) for source in options.eval_data]
    if last_percentage is not None:
        rows = [hold_out(one, last_percentage)[1] for one in rows]
    rows = _first(concatenate_datasets(rows), options.max_eval_samples)
    packing = Packing.of(options, tokenizer)
    corpus.validation = _pack_rows(rows, "validation", corpus, options, tokenizer, packing)
    return corpus


def _validate_eos(tokenizer: "PreTrainedTokenizerBase") -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{tokenizer.name_or_path or 'the tokenizer'} has no EOS token to separate documents")


def _filter(options: "LmDataArguments", seen) -> TextFilter:
    lengths = options.min_text_length, options.max_text_length, options.long_texts
    return TextFilter(*lengths, options.on_bad_line, is_duplicate=seen)


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
    """Load validation documents as a data set of known size, even if training data are streamed."""
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
    """Hold out the last documents, with at least `percentage` % of the characters, for validation.

    Documents are not split, unless there is only one, which is cut at a line break if possible.
    """
    if len(rows) == 1:
        text = rows[0]["text"]
        cut = text.find("\n", int(len(text) * (1 - percentage / 100))) + 1
        cut = cut if 0 < cut < len(text) else int(len(text) * (1 - percentage / 100))
        parts = ({"start": 0, "stop": cut}, {"start": cut, "stop": len(text)})
        return tuple(rows.map(slice_texts, batched=True, fn_kwargs=part) for part in parts)
    lengths = np.array([len(text) for batch in rows.iter(BATCH_ROWS) for text in batch["text"]])
    from_the_end = np.cumsum(lengths[::-1])
    count = int(np.searchsorted(from_the_end, from_the_end[-1] * percentage / 100)) + 1
    first = max(1, len(rows) - count)  # keep at least one document to train on
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

    packing = Packing.of(options, tokenizer)
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
            f"block_size={packing.block_size}: the {what} documents have only {tokens} tokens, and --drop_last_block "
            "drops them; lower --block_size, or remove --drop_last_block"
        )
    capacity = len(blocks) * packing.block_size - (len(blocks) - 1) * packing.overlap
    left = {"padding_tokens": capacity - tokens} if capacity >= tokens else {"dropped_tokens": tokens - capacity}
    corpus.sizes[name] = {
        "documents": len(documents), "tokens": tokens, "bytes": size, "bytes_per_token": size / tokens,
        "blocks": len(blocks), **left,
    }  # fmt: skip
    return blocks.with_format("torch")


def _validate_documents(count: int, source: str, text_filter: TextFilter) -> None:
    if not count:
        raise ValueError(f"no documents of {source} are left; removed: {text_filter.explain()}")


def _validate_first_document(stream: "IterableDataset", text_filter: TextFilter) -> None:
    """Raise ValueError before training starts if no document of a stream passes the filter."""
    found = next(iter(stream), None)
    _validate_documents(found is not None, "the training data", text_filter)
    text_filter.counts.clear()
    text_filter.bad_lines.clear()


# ---- packing ----


def tokenize_documents(
    texts: "Dataset | IterableDataset", tokenizer: "PreTrainedTokenizerBase", num_proc: int | None = None
) -> "Dataset | IterableDataset":
    """Tokenize the column `text` into `input_ids`, `num_tokens` and `num_bytes`.

    `input_ids` are int32 [length], `num_bytes` counts UTF-8 bytes. The tokenizer adds its usual special tokens (such
    as Llama's BOS); EOS is appended if it is not among them.
    """
    from datasets import Features, IterableDataset, List, Value
    from datasets.fingerprint import Hasher

    options: dict[str, Any] = {
        "batched": True,
        "remove_columns": ["text"],
        "features": Features(
            {"input_ids": List(Value("int32")), "num_tokens": Value("int64"), "num_bytes": Value("int64")}
        ),
        "fn_kwargs": {"tokenizer": tokenizer},
    }
    if isinstance(texts, IterableDataset):
        return texts.map(_tokenize, **options, batch_size=STREAM_BATCH)
    options["batch_size"] = options["writer_batch_size"] = BATCH_ROWS
    # The hash of a fast tokenizer changes after its first use, so hash its JSON instead.
    tokenizer_json = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)
    key = Hasher.hash((PACKER_VERSION, texts._fingerprint, tokenizer_json, tokenizer.eos_token_id))
    return texts.map(_tokenize, **options, num_proc=num_proc, new_fingerprint=key, desc="Tokenizing")


def _tokenize(batch: dict[str, list[str]], tokenizer) -> dict[str, list]:
    eos = tokenizer.eos_token_id
    # If a document contains the Go coder's tags, encode them as plain text.
    options = {"split_special_tokens": True} if is_go_tokenizer(tokenizer) else {}
    # verbose=False: no warning about documents longer than the context, which are cut into blocks later
    rows = tokenizer(batch["text"], return_attention_mask=False, verbose=False, **options)["input_ids"]
    rows = [ids if ids and ids[-1] == eos else [*ids, eos] for ids in rows]
    return {
        "input_ids": rows,
        "num_tokens": [len(ids) for ids in rows],
        "num_bytes": [len(text.encode()) for text in batch["text"]],
    }


def pack_documents(documents: "Dataset", packing: Packing, cache_dir: str | None = None) -> "Dataset":
    """Pack a tokenized data set into a memory-mapped file in the `datasets` cache, or reuse the file if it exists."""
    from datasets import Dataset, config
    from datasets.arrow_writer import ArrowWriter
    from datasets.fingerprint import Hasher
    from tqdm.auto import tqdm

    key = Hasher.hash((PACKER_VERSION, documents._fingerprint, packing))
    path = Path(cache_dir or config.HF_DATASETS_CACHE) / "hrm_hf_packed" / f"{key}.arrow"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write under a temporary name first, so a killed run leaves no file that looks complete.
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with ArrowWriter(features=packing.features(), path=str(unfinished)) as writer:
            bar = tqdm(_token_arrays(documents), total=len(documents), desc="Packing documents", disable=None)
            blocks = pack_tokens(bar, packing)
            while chunk := list(itertools.islice(blocks, 1000)):  # chunks are written 50 times as fast as single rows
                writer.write_table(_table(chunk, packing))
            writer.finalize()
        unfinished.rename(path)
    return Dataset.from_file(str(path))


def _table(blocks: list[dict[str, np.ndarray]], packing: Packing):
    import pyarrow as pa

    columns = {name: np.concatenate([block[name] for block in blocks]) for name in packing.features()}
    arrays = [pa.FixedSizeListArray.from_arrays(pa.array(flat), packing.block_size) for flat in columns.values()]
    return pa.Table.from_arrays(arrays, names=list(columns)).cast(packing.features().arrow_schema)


def pack_stream(documents: "IterableDataset", packing: Packing) -> "IterableDataset":
    """Pack a tokenized stream into blocks, as a single shard that accelerate splits among processes."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(
        _generate_blocks, features=packing.features(), gen_kwargs={"documents": documents, "packing": packing}
    )


def _generate_blocks(documents: "IterableDataset", packing: Packing) -> Iterator[dict[str, np.ndarray]]:
    return pack_tokens(_token_arrays(documents), packing)


def _token_arrays(documents: "Dataset | IterableDataset") -> Iterator[np.ndarray]:
    for batch in documents.with_format("numpy").iter(1000):
        for ids in batch["input_ids"]:
            yield ids.astype(np.int32)


def pack_tokens(documents: Iterable[np.ndarray], packing: Packing) -> Iterator[dict[str, np.ndarray]]:
    """Pack documents (int32 [length], EOS included) into blocks with int32 columns [block_size]."""
    size = packing.block_size
    tokens, is_first = np.empty(0, np.int32), np.empty(0, bool)
    context = 0  # number of tokens at the start of the next block that were already labels in the previous one
    for document in documents:
        tokens = np.concatenate([tokens, document])
        is_first = np.concatenate([is_first, np.arange(len(document)) == 0])
        while len(tokens) >= size:
            yield _block(tokens[:size], is_first[:size], context, packing)
            context = packing.overlap
            tokens, is_first = tokens[size - context :], is_first[size - context :]
    if len(tokens) > context and not packing.drop_last_block:
        yield _block(tokens, is_first, context, packing)


def _block(tokens: np.ndarray, is_first: np.ndarray, context: int, packing: Packing) -> dict[str, np.ndarray]:
    length, size = len(tokens), packing.block_size
    input_ids = np.full(size, packing.pad_token_id, np.int32)
    labels = np.full(size, IGNORED, np.int32)
    input_ids[:length] = tokens
    labels[context:length] = tokens[context:]
    if not packing.document_mask:
        return {"input_ids": input_ids, "labels": labels}
    starts = np.zeros(size, bool)
    starts[:length] = is_first
    starts[length : length + 1] = True  # padding counts as a separate document
    labels[starts] = IGNORED
    index = np.arange(size, dtype=np.int32)
    position_ids = index - np.maximum.accumulate(np.where(starts, index, 0))
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids.astype(np.int32)}
