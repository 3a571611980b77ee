"""Documents to blocks: tokenise, close each document with EOS, concatenate, cut into rows of `block_size` tokens.

No token is lost: the last, shorter block is filled up with padding whose labels are -100, and blocks of a stream are
cut from the whole stream, not from each batch of it. Labels are the inputs; models shift them. There is no attention
mask: padding stands only at the end of the last block, where a causal model cannot see it.

With an overlap each block begins with the last tokens of the block before. They are context only (label -100), so each
token is still predicted exactly once, now with some context at the start of a block too.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.processing_hrm_go_coder import is_go_tokenizer
from .filters import BATCH_ROWS


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
STREAM_BATCH = 64  # documents of a stream that are tokenized at once; how long they are is not known before
PACKER_VERSION = 1  # part of the cache key; raise it when the same documents give other blocks


@dataclass(frozen=True)
class Packing:
    """How a stream of tokens is cut.

    Attributes:
        block_size: tokens of a row.
        pad_token_id: fills the last row.
        overlap: tokens that a row shares with the row before.
        drop_last_block: leave out the last row if it is not full.
        document_mask: add `position_ids` that restart at each document. Without an attention mask transformers' models
            take that as packed documents, which do not see each other; the first token of a document then has no
            context and no label.
    """

    block_size: int
    pad_token_id: int
    overlap: int = 0
    drop_last_block: bool = False
    document_mask: bool = False

    def features(self):
        """The columns of a packed data set."""
        from datasets import Features, List, Value

        names = ["input_ids", "labels"] + ["position_ids"] * self.document_mask
        return Features({name: List(Value("int32"), length=self.block_size) for name in names})


def tokenize_documents(
    texts: "Dataset | IterableDataset", tokenizer: "PreTrainedTokenizerBase", num_proc: int | None = None
) -> "Dataset | IterableDataset":
    """Tokens of each document, its EOS included, and its size in UTF-8 bytes.

    The tokenizer adds what it adds by itself (Llama's BOS, for instance); EOS is appended where it does not.

    Args:
        texts: with a column `text`.
        num_proc: processes, for data that are not streamed.

    Returns:
        Columns `input_ids` (int32 [length]), `num_tokens` and `num_bytes`.
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
    # A fast tokenizer hashes differently after its first use; its JSON does not.
    tokenizer_json = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)
    key = Hasher.hash((PACKER_VERSION, texts._fingerprint, tokenizer_json, tokenizer.eos_token_id))
    return texts.map(_tokenize, **options, num_proc=num_proc, new_fingerprint=key, desc="Tokenizing")


def _tokenize(batch: dict[str, list[str]], tokenizer) -> dict[str, list]:
    eos = tokenizer.eos_token_id
    # verbose: a document may be longer than the model's context, it is cut into blocks afterwards
    # A file that mentions a tag of the Go coder's stream must not become a stream.
    options = {"split_special_tokens": True} if is_go_tokenizer(tokenizer) else {}
    rows = tokenizer(batch["text"], return_attention_mask=False, verbose=False, **options)["input_ids"]
    rows = [ids if ids and ids[-1] == eos else [*ids, eos] for ids in rows]
    return {
        "input_ids": rows,
        "num_tokens": [len(ids) for ids in rows],
        "num_bytes": [len(text.encode()) for text in batch["text"]],
    }


def pack_documents(documents: "Dataset", packing: Packing, cache_dir: str | None = None) -> "Dataset":
    """The blocks of a tokenized data set, written once to the cache of `datasets` and mapped from there."""
    from datasets import Dataset, config
    from datasets.arrow_writer import ArrowWriter
    from datasets.fingerprint import Hasher

    key = Hasher.hash((PACKER_VERSION, documents._fingerprint, packing))
    path = Path(cache_dir or config.HF_DATASETS_CACHE) / "hrm_hf_packed" / f"{key}.arrow"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: a run that is killed leaves no file that looks finished.
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with ArrowWriter(features=packing.features(), path=str(unfinished)) as writer:
            blocks = pack_tokens(_progress(_token_arrays(documents), len(documents)), packing)
            while chunk := list(itertools.islice(blocks, 1000)):  # whole tables: 50 times as fast as row by row
                writer.write_table(_table(chunk, packing))
            writer.finalize()
        unfinished.rename(path)
    return Dataset.from_file(str(path))


def _table(blocks: list[dict[str, np.ndarray]], packing: Packing):
    import pyarrow as pa

    columns = {name: np.concatenate([block[name] for block in blocks]) for name in packing.features()}
    arrays = [pa.FixedSizeListArray.from_arrays(pa.array(flat), packing.block_size) for flat in columns.values()]
    return pa.Table.from_arrays(arrays, names=list(columns)).cast(packing.features().arrow_schema)


def _progress(items: Iterable, total: int) -> Iterable:
    from datasets.utils.logging import is_progress_bar_enabled
    from tqdm.auto import tqdm

    return tqdm(items, total=total, desc="Packing documents", disable=not is_progress_bar_enabled())


def pack_stream(documents: "IterableDataset", packing: Packing) -> "IterableDataset":
    """The blocks of a tokenized stream. One shard: accelerate splits it among processes, nothing here does."""
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
    """Blocks of a sequence of documents.

    Args:
        documents: int32 [length] each, EOS included.

    Yields:
        input_ids, labels and, with a document mask, position_ids, each int32 [block_size].
    """
    size = packing.block_size
    tokens, is_first = np.empty(0, np.int32), np.empty(0, bool)
    context = 0  # tokens at the start of the next block that the block before has predicted
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
    starts[length : length + 1] = True  # padding is a document of its own
    labels[starts] = IGNORED
    index = np.arange(size, dtype=np.int32)
    position_ids = index - np.maximum.accumulate(np.where(starts, index, 0))
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids.astype(np.int32)}
