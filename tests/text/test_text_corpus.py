"""From data options to packed rows: filters, duplicates, hold-out, mixing, streaming. Referee: counting by hand."""

import json
import math
import random
import sys

import pytest
import torch

from hrm_hf.io.files import BadLineError
from hrm_hf.text.arguments import LmDataArguments
from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.text.corpus import load_text_corpus


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture
def corpus(tmp_path):
    """Load text, with one source per list: `corpus([texts], [texts], option=...)`."""

    def load(*sources, eval_texts=None, seed=0, **options):
        paths = []
        for number, texts in enumerate(sources):
            paths.append(write(tmp_path / f"source{number}.jsonl", texts))
        if eval_texts is not None:
            options["eval_data"] = write(tmp_path / "eval.jsonl", eval_texts)
        defaults = {"block_size": 8, "data_cache_dir": str(tmp_path / "cache"), "validation_split_percentage": 0}
        return load_text_corpus(LmDataArguments(train_data=paths, **{**defaults, **options}), TOKENIZER, seed)

    return load


def write(path, texts) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(rows) -> list[str]:
    """Return the documents in packed rows."""
    tokens = [int(token) for row in rows for token in row["labels"] if token != -100]
    return TOKENIZER.decode(tokens).split("<|endoftext|>")[:-1]


WORDS = [f"w{number}" for number in range(300)]


def test_rows_are_tensors_and_sizes_are_counted(corpus):
    found = corpus(["abc", "é"])
    assert found.train[0]["input_ids"].dtype == torch.int64 and found.train[0]["labels"].shape == (8,)
    expected = {"documents": 2, "tokens": 7, "bytes": 5, "bytes_per_token": 5 / 7, "blocks": 1, "padding_tokens": 1}
    assert found.sizes == {"train": expected} and found.validation is None and found.eval_bytes_per_token is None
    assert found.report()["train"]["tokens"] == 7 and "2 documents, 7 tokens" in found.describe()


@pytest.mark.parametrize(("overlap", "drop", "left"), [(0, False, 3), (0, True, -5), (2, False, 1)])
def test_tokens_of_padding_and_dropped_ones_are_counted(corpus, overlap, drop, left):
    sizes = corpus(["abcdefghijkl"], chunk_overlap=overlap, drop_last_block=drop).sizes["train"]
    assert sizes.get("padding_tokens", 0) - sizes.get("dropped_tokens", 0) == left


def test_documents_outside_the_length_limits_are_dropped_and_counted(corpus):
    found = corpus(["a", "bb", "ccc", "dddd"], min_text_length=2, max_text_length=3)
    assert texts_of(found.train) == ["bb", "ccc"]
    assert found.report()["train"]["filtered"] == {"kept": 2, "short": 1, "long": 1}
    assert "removed 1 shorter than min_text_length=2; 1 longer than max_text_length=3" in found.describe()


@pytest.mark.parametrize("streaming", [False, True])
def test_long_documents_are_cut_if_requested(corpus, streaming):
    found = corpus(["éé", "ccc", "dddd"], max_text_length=3, long_texts="cut", streaming=streaming, shuffle_buffer=0)
    assert texts_of(found.train) == ["éé", "ccc", "ddd"]
    assert found.report()["train"]["filtered"] == {"kept": 3, "cut": 1}


@pytest.mark.parametrize("streaming", [False, True])
def test_empty_corpus_error_names_the_filters(corpus, streaming):
    with pytest.raises(ValueError, match=r" 2 shorter.*min_text_length=5") as error:
        corpus(["a", "b", "c" * 20], min_text_length=5, max_text_length=10, streaming=streaming)
    assert "1 longer than max_text_length=10 (--long_texts cut" in str(error.value)


def test_bad_lines_stop_or_are_counted(corpus, tmp_path):
    with pytest.raises(BadLineError, match=r"source0.jsonl, line 2: 'text' is None"):
        corpus(["a", None, "b"])
    found = corpus(["a", None, "b"], on_bad_line="skip")
    assert texts_of(found.train) == ["a", "b"] and found.bad_lines == 1
    assert "line 2: 'text' is None" in found.describe()
    stream = corpus(["a", None, "b"], on_bad_line="skip", streaming=True)
    assert texts_of(stream.train) == ["a", "b"] and stream.bad_lines == 1


def test_sample_limits_keep_the_first_documents(corpus):
    found = corpus(["a", "b", "c"], eval_texts=["d", "e"], max_train_samples=2, max_eval_samples=1)
    assert texts_of(found.train) == ["a", "b"] and texts_of(found.validation) == ["d"]
    stream = corpus(["a", "b", "c"], max_train_samples=2, streaming=True)
    assert texts_of(stream.train) == ["a", "b"]


# ---- duplicates ----


def test_exact_duplicates_are_removed_also_between_sources_and_from_validation(corpus):
    found = corpus(["a", "b", "a"], ["b", "c", "v"], eval_texts=["v"], deduplicate="exact")
    assert texts_of(found.train) == ["a", "b", "c"] and texts_of(found.validation) == ["v"]
    assert found.report()["train"]["filtered"] == {"kept": 3, "duplicate": 3}


def test_near_duplicates_are_removed_and_others_kept(corpus):
    pytest.importorskip("datasketch")
    draw = random.Random(0)
    originals = [" ".join(draw.choices(WORDS, k=200)) for _ in range(30)]
    near = [text.replace(" ", ", ", 3).upper() + " and one more" for text in originals]  # similarity about .99
    half = [text[: len(text) // 2] + " ".join(draw.choices(WORDS, k=100)) for text in originals]  # about .33
    found = corpus(originals + near + half, deduplicate="near", block_size=512)
    assert texts_of(found.train) == originals + half


def test_near_duplicates_without_the_library_name_the_install_command(corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[dedup\]"'):
        corpus(["a"], deduplicate="near")


# ---- hold-out ----


def test_the_last_documents_are_held_out_complete(corpus):
    texts = [str(number % 10) * 10 for number in range(40)]
    found = corpus(texts, validation_split_percentage=10)
    assert texts_of(found.train) == texts[:36] and texts_of(found.validation) == texts[36:]
    assert found.eval_bytes_per_token == 10 / 11


def test_each_source_holds_out_its_own_end(corpus):
    found = corpus(["a", "b"], ["c", "d"], validation_split_percentage=10)
    assert texts_of(found.train) == ["a", "c"] and texts_of(found.validation) == ["b", "d"]


def test_a_single_document_is_cut_at_a_line_break(corpus):
    text = "".join(f"line {number:03}\n" for number in range(100))
    found = corpus([text], validation_split_percentage=25)
    (train,), (held_out,) = texts_of(found.train), texts_of(found.validation)
    assert train + held_out == text and held_out.startswith("line ")
    assert math.isclose(len(held_out) / len(text), 0.25, abs_tol=0.02)


# ---- mixing and streams ----


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_are_mixed_by_their_probabilities(corpus, streaming):
    options = {"mix_probabilities": "0.8,0.2", "streaming": streaming, "shuffle_buffer": 0}
    mixed, again, other = (texts_of(corpus(["a"] * 500, ["b"] * 500, seed=s, **options).train) for s in (0, 0, 1))
    assert abs(mixed[:500].count("a") / 500 - 0.8) < 0.054  # three standard deviations
    assert mixed == again and mixed != other


def test_mixing_ends_with_the_first_or_the_last_source(corpus):
    sources = (["a"] * 100, ["b"] * 10)
    first = texts_of(corpus(*sources, mix_probabilities=[0.5, 0.5]).train)
    last = texts_of(corpus(*sources, mix_probabilities=[0.5, 0.5], mix_stopping="all_exhausted").train)
    assert first.count("b") == 10 and first.count("a") < 100
    assert last.count("a") == 100 and last.count("b") > 10


def test_without_probabilities_sources_follow_each_other(corpus):
    assert texts_of(corpus(["a", "b"], ["c"]).train) == ["a", "b", "c"]
    assert texts_of(corpus(["a", "b"], ["c"], streaming=True).train) == ["a", "b", "c"]


def test_a_stream_holds_out_its_first_documents(corpus):
    found = corpus(["a", "b", "c", "d"], streaming=True, max_eval_samples=2, shuffle_buffer=0)
    assert texts_of(found.validation) == ["a", "b"] and texts_of(found.train) == ["c", "d"]


def test_stream_is_shuffled_by_its_buffer_and_reshuffled_in_each_epoch(corpus):
    stream = corpus([f"{number:07}" for number in range(50)], streaming=True, shuffle_buffer=20).train
    first = [tuple(row["input_ids"].tolist()) for row in stream]
    assert first == [tuple(row["input_ids"].tolist()) for row in stream]
    stream.set_epoch(1)
    second = [tuple(row["input_ids"].tolist()) for row in stream]
    assert first != second and sorted(first) == sorted(second)
    assert texts_of(stream) != sorted(texts_of(stream))


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_line": "ignore"}, "on_bad_line='ignore'.*stop, skip"),
        ({"mix_probabilities": "0.5"}, r"mix_probabilities=\[0\.5\].* 2 .*\['a', 'b'\]"),
        ({"mix_probabilities": "0.5,0.6"}, r"mix_probabilities=.* 1\.1"),
        ({"streaming": True}, "validation_split_percentage=5.*--eval_data"),
        ({"streaming": True, "max_eval_samples": 1, "deduplicate": "exact"}, "deduplicate='exact'.*--streaming"),
        ({"chunk_overlap": 8, "block_size": 8}, "chunk_overlap=8.* 7"),
        ({"min_text_length": 9, "max_text_length": 8}, "min_text_length=9.*max_text_length=8"),
        ({"block_size": 0}, "block_size=0"),
        ({"validation_split_percentage": 100}, "validation_split_percentage=100"),
    ],
)
def test_contradictory_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LmDataArguments(train_data="a,b", **options)


def test_missing_text_error_names_the_option():
    with pytest.raises(ValueError, match=r"--train_data.*\.jsonl, \.txt"):
        load_text_corpus(LmDataArguments(), TOKENIZER)
