"""Packing: no token lost or repeated, documents kept apart on demand. Referees: plain concatenation in Python, and
transformers' own models run on each document alone."""

import itertools
import random

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, default_data_collator

from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.text.corpus import Packing, pack_documents, pack_stream, pack_tokens, tokenize_documents


TOKENIZER = byte_tokenizer()
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def make_texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcé \n", k=draw.randrange(0, 15))) for _ in range(count)]


def all_tokens(texts) -> list[int]:
    return [token for text in texts for token in [*[8 + byte for byte in text.encode()], EOS]]


def streamed(texts) -> IterableDataset:
    return Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=3)


def packed(texts, tmp_path, **options) -> list[dict]:
    packing = Packing(**{"block_size": 16, "pad_token_id": PAD, **options})
    documents = tokenize_documents(Dataset.from_dict({"text": texts}), TOKENIZER)
    return list(pack_documents(documents, packing, str(tmp_path)))


@pytest.mark.parametrize("block_size", [1, 7, 16, 1000])
def test_concatenated_blocks_are_the_texts_with_eos(tmp_path, block_size):
    texts = make_texts(1100)  # more than one batch
    blocks = packed(texts, tmp_path, block_size=block_size)
    expected = all_tokens(texts)
    assert all(len(block["input_ids"]) == len(block["labels"]) == block_size for block in blocks)
    assert [t for block in blocks for t in block["labels"] if t != -100] == expected
    flat = [t for block in blocks for t in block["input_ids"]]
    assert flat[: len(expected)] == expected and set(flat[len(expected) :]) <= {PAD}
    assert len(blocks) == -(-len(expected) // block_size)


def test_a_stream_gives_the_same_blocks(tmp_path):
    texts = make_texts(1100)
    stream = pack_stream(tokenize_documents(streamed(texts), TOKENIZER), Packing(16, PAD))
    assert [row["input_ids"] for row in stream] == [row["input_ids"] for row in packed(texts, tmp_path)]


def test_last_short_block_can_be_dropped(tmp_path):
    texts = ["x" * 20]
    assert len(packed(texts, tmp_path)) == 2 and len(packed(texts, tmp_path, drop_last_block=True)) == 1
    assert packed(["x" * 15], tmp_path, drop_last_block=True) == packed(["x" * 15], tmp_path)


@pytest.mark.parametrize("overlap", [1, 5, 15])
def test_with_an_overlap_every_token_is_still_predicted_once(tmp_path, overlap):
    texts = make_texts(40)
    expected = all_tokens(texts)
    blocks = packed(texts, tmp_path, overlap=overlap)
    assert [t for block in blocks for t in block["labels"] if t != -100] == expected
    for before, block in itertools.pairwise(blocks):
        assert block["input_ids"][:overlap] == before["input_ids"][-overlap:]
        assert set(block["labels"][:overlap]) == {-100}


def test_a_text_that_ends_with_eos_does_not_get_a_second_one():
    rows = tokenize_documents(Dataset.from_dict({"text": ["a<|endoftext|>", "é", ""]}), TOKENIZER)
    assert rows["input_ids"][:] == [[105, EOS], [203, 177, EOS], [EOS]]
    assert rows["num_bytes"][:] == [14, 2, 0] and rows["num_tokens"][:] == [2, 3, 1]


def test_packed_blocks_come_from_the_cache_the_second_time(tmp_path):
    packed(make_texts(30), tmp_path)
    (file,) = (tmp_path / "hrm_hf_packed").iterdir()
    written = file.stat().st_mtime_ns
    packed(make_texts(30), tmp_path)
    packed(make_texts(30), tmp_path, block_size=8)
    assert file.stat().st_mtime_ns == written and len(list((tmp_path / "hrm_hf_packed").iterdir())) == 2


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
        GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    ],
    ids=lambda config: config.model_type,
)
def test_document_mask_isolates_each_document(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.config.use_cache = False  # as in training
    documents = [np.array([9 + n, *range(20, 20 + 5 * n), EOS], np.int32) for n in range(1, 4)]
    (block,) = pack_tokens(iter(documents), Packing(48, PAD, document_mask=True))
    batch = default_data_collator([{name: torch.tensor(row).long() for name, row in block.items()}])
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    start = 0
    for document in documents:
        alone = model(input_ids=torch.tensor(document).long()[None]).logits[0]
        torch.testing.assert_close(logits[start : start + len(document)], alone)
        assert batch["labels"][0, start] == -100
        start += len(document)
    unmasked = model(input_ids=batch["input_ids"]).logits[0]
    assert (unmasked - logits)[len(documents[0]) : start].abs().max() > 1e-3


# ---- splitting among processes ----


def shares(rows, batch_size=2, processes=2, **options) -> list[list[list[int]]]:
    """Return the batches of row numbers of each process."""
    found = []
    for rank in range(processes):
        loader = DataLoader(rows, batch_size=batch_size, collate_fn=lambda batch: batch)
        mine = prepare_data_loader(loader, num_processes=processes, process_index=rank, put_on_device=False, **options)
        found.append([[row["input_ids"][0] for row in batch] for batch in mine])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_all_rows_without_repeats_in_as_many_steps(tmp_path, stream, processes):
    tokens = [np.array([number], np.int32) for number in range(12 * processes)]
    rows = [{"input_ids": [int(one[0])]} for one in tokens]
    if stream:
        documents = Dataset.from_dict({"input_ids": [[int(one[0])] for one in tokens]}).to_iterable_dataset()
        rows = pack_stream(documents, Packing(1, PAD))
    # With dispatch_batches=False, every process reads the stream and takes its part. By default, one process reads it
    # for all (tests/text/test_run_clm.py tests this with two processes).
    parts = shares(rows, processes=processes, dispatch_batches=False)
    assert {len(part) for part in parts} == {6}
    assert sorted(row for part in parts for batch in part for row in batch) == list(range(12 * processes))


def test_uneven_last_batch_is_padded_with_rows_from_the_start():
    parts = shares([{"input_ids": [number]} for number in range(13)])
    assert [len(part) for part in parts] == [4, 4]
    rows = [row for part in parts for batch in part for row in batch]
    assert set(rows) == set(range(13)) and len(rows) == 16
