"""Constrained decoding at the lexical level of Go. Referees: the specification's productions (`go_lexemes.py`), which
read a text as a whole, tree-sitter, and go/parser where Go is installed."""

import random
import re
from pathlib import Path

import pytest
import tiny_go
import torch
from go_lexemes import is_lexical
from go_samples import FINE, corrupted_functions, needs_go
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SuppressTokensLogitsProcessor,
    pipeline,
)

import hrm_hf
from hrm_hf.golang import GoLexicalLogitsProcessor, GoParserValidator, find_go
from hrm_hf.golang.lexer import LexicalState, first_fault
from hrm_hf.golang.validators.syntax import first_fault as first_syntax_fault
from hrm_hf.models.processing_hrm_go_coder import SPECIAL_TOKENS, TOKEN_IDS, encode_text


REAL = [file.read_text() for file in sorted(Path(hrm_hf.__file__).parent.rglob("*.go"))]
OF_THE_SCANNER = re.compile(
    "not terminated|illegal (character|rune|UTF-8|byte)|escape|must separate|no digits|invalid digit|"
    "exponent|radix point"
)
END, END_CODE = TOKEN_IDS["</s>"], TOKEN_IDS["</CODE>"]
SIGNS = {
    "numbers": "0123789xXbBoOeEpPi_.+-fa",
    "literals": "\"'`\\/*\n abxuU0378dD",
    "all": "\"'`\\/*$@?#{}[]() \n\té世٣→\ufeff\0a1._",
}


# The lexer


def test_real_go_is_possible_to_its_end():
    assert len(REAL) == 3 and max(map(len, REAL)) > 10_000
    assert [first_fault(code) for code in [*REAL, *FINE]] == [None] * (len(REAL) + len(FINE))


@pytest.mark.parametrize(
    "code",
    [
        "'\\''", "'é'", "'\\u00e9'", "'\\U0010ffff'", '"\\377\\xff\\""', "`\\q\n`", "世界 := é1٣", "x...",
        "a[1...]", "1..5", "0x1p-2", "0x_1F", "0X.8p1", "0b1_0", "0o17i", "089.5", "089i", "1_000.5e+3i", ".5e1",
        "5i6", "/* * / **/", "a/b//", "...08.5", "~int|~string", "x&^=y<-z",
    ],
)  # fmt: skip
def test_rare_forms_are_go(code):
    assert first_fault(code) is None and is_lexical(code)


@pytest.mark.parametrize(
    ("code", "offset"),
    [
        ("a $", 2), ("a ? b", 2), ("@", 0), ("\\", 0), ("#", 0), ("a\x00", 1), ("// \x00", 3), ("1٣", 2), ("→", 2),
        ("'ab'", 2), ("''", 1), ('"a\n"', 2), ("'\n'", 1), ('"\\q"', 2), ('"\\\'"', 2), ("'\\\"'", 2), ('"\\400"', 2),
        ('"\\ud800"', 4), ('"\\U00110000"', 6), ("0xg", 2), ("1__0", 2), ("1._5", 2), ("0b2", 2), ("0o8", 2),
        ("1e+x", 3), ("1p3", 1), ("(]", 1), (")", 0), ("f(x}", 3),
        # What may not end there.
        ('"a', 2), ("'a", 2), ("`a\n", 3), ("/* a *", 6), ("0x", 2), ("1_", 2), ("08", 2), ("0x1.8", 5), ("{", 1),
    ],
)  # fmt: skip
def test_the_first_byte_that_cannot_be_go_is_named(code, offset):
    assert first_fault(code) == offset and not is_lexical(code)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("signs", SIGNS.values(), ids=SIGNS)
def test_the_lexer_agrees_with_the_specification_on_random_signs(signs, balanced):
    generator = random.Random(0)
    texts = {"".join(generator.choices(signs, k=generator.randrange(1, 9))) for _ in range(4000)}
    right = {text for text in texts if is_lexical(text, balanced)}
    assert 100 < len(right) < len(texts) - 100
    assert {text for text in texts if first_fault(text, balanced) is None} == right


def damaged(code: str, generator: random.Random) -> str:
    """Code with one to three characters put in, left out or exchanged."""
    characters = list(code)
    for _ in range(generator.randrange(1, 4)):
        at = generator.randrange(len(characters))
        characters[at : at + generator.randrange(2)] = generator.choice(["", *SIGNS["all"], *SIGNS["numbers"]])
    return "".join(characters)


def test_the_lexer_agrees_with_the_specification_on_damaged_code_and_refuses_nothing_that_parses():
    generator = random.Random(0)
    pieces = [piece for code in REAL for piece in code.split("\n\n")]
    texts = [damaged(generator.choice(pieces), generator) for _ in range(600)]
    verdicts = [first_fault(text) is None for text in texts]
    assert verdicts == [is_lexical(text) for text in texts] and 100 < sum(verdicts) < 500
    # tree-sitter takes anything behind a backslash for an escape, and byte order marks for text; all else that it
    # accepts is possible.
    parsed = [text for text in texts if first_syntax_fault(text) is None]
    faults = [(text.encode(), first_fault(text)) for text in parsed if first_fault(text) is not None]
    assert len(parsed) > 100 and len(faults) < 10
    assert all(text[at - 1 : at] == b"\\" or text[at - 2 : at + 1] == "\ufeff".encode() for text, at in faults)


@needs_go
@pytest.mark.external
def test_the_lexer_agrees_with_go_on_its_library_and_on_damaged_functions():
    source = find_go().root / "src"
    for package in ("go/scanner", "strconv", "strings", "net/http", "unicode/utf8", "math", "regexp/syntax"):
        for file in (source / package).glob("*.go"):
            assert first_fault(file.read_bytes()) is None, file
    generator = random.Random(0)
    codes = [damaged(code, generator) for code in corrupted_functions(300)]
    with GoParserValidator() as validator:
        for code, feedback in zip(codes, validator(codes)):
            fault = first_fault(code)
            if feedback.syntax_ok:
                assert fault is None, code
            elif OF_THE_SCANNER.search(feedback.message):  # only the first error of all is known
                assert fault is not None, (code, feedback.message)


def test_given_text_that_cannot_be_go_is_passed_over():
    state = LexicalState().read(b"Don't pay $5 here: ")
    assert state.may_end() and state.step(ord("x")) and not state.fragment
    assert LexicalState().read(b"f(x]").fragment and LexicalState().read(b"x)\n}").step(ord("}"))
    assert LexicalState().read('s := "é'.encode()[:-1]).place not in (0, 1)  # within a character, within a string


# The processor


def possible_after(state: LexicalState, text: bytes | None) -> bool:
    for byte in text or b"":
        state = state and state.step(byte)
    return bool(text) and state is not None


def llama(vocabulary: int, bias: dict[int, float] | None = None, seed: int = 0) -> LlamaForCausalLM:
    """Random weights; `bias` is added to logits of tokens."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=1024, bos_token_id=1, eos_token_id=END, pad_token_id=3,
        )
    ).eval()  # fmt: skip
    added = torch.zeros(vocabulary)
    for token, value in (bias or {}).items():
        added[token] = value
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + added)
    return model


STATES = [
    "", "x", "f(", "a[{", 's := "', 's := "\\', 's := "\\u', "'", "'a", "`", "/* *", "// a", "a /",
    "0", "0x", "1_", "1.", ".", "世".encode()[:2],
]  # fmt: skip


@pytest.mark.parametrize("balanced", [False, True])
def test_the_mask_is_what_each_token_alone_would_do(balanced):
    processor = GoLexicalLogitsProcessor(tiny_go.tokenizer(), balanced=balanced)
    for given in STATES:
        state = LexicalState().read(given if isinstance(given, bytes) else given.encode())
        allowed = processor.allowed(state).tolist()
        expected = [possible_after(state, text) for text in processor.texts]
        for end in (END, END_CODE):
            expected[end] = state.may_end(balanced)
        assert allowed == expected, given
        assert 0 < sum(allowed) < len(allowed), given


SAMPLES = {"do_sample": True, "top_k": 0, "max_new_tokens": 300, "pad_token_id": 3}


def ended_samples(processors: list) -> list[str]:
    """100 texts that a random model has ended by itself; what ends literals is made likelier, or few would end."""
    tokenizer = tiny_go.tokenizer()
    signs = [
        token
        for token in range(len(SPECIAL_TOKENS), len(tokenizer))
        if set("\"'`*/\n)}]") & {*tokenizer.decode(token)}
    ]
    model = llama(len(tokenizer), {END: 2.0, **dict.fromkeys(signs, 2.5)})
    texts = []
    for seed in range(8):
        torch.manual_seed(seed)
        rows = model.generate(torch.ones(40, 1, dtype=torch.long), logits_processor=processors, **SAMPLES)[
            :, 1:
        ].tolist()
        texts += [tokenizer.decode(row[: row.index(END)]) for row in rows if END in row]
        if len(texts) >= 100:
            return texts[:100]
    raise AssertionError(f"only {len(texts)} texts have ended")


@pytest.mark.parametrize("balanced", [False, True])
def test_a_hundred_of_a_hundred_samples_are_lexically_go(balanced):
    texts = ended_samples([GoLexicalLogitsProcessor(tiny_go.tokenizer(), balanced=balanced)])
    assert all(is_lexical(text, balanced) for text in texts)
    assert sum(map(len, texts)) > 1000 and any("{" in text for text in texts)


def test_without_the_processor_most_samples_are_not():
    tags = [token for token in range(len(SPECIAL_TOKENS)) if token != END]
    no_tags = SuppressTokensLogitsProcessor(tags)
    assert sum(is_lexical(text) for text in ended_samples([no_tags])) < 30


def masks(processor, rows: list[list[int]], width: int = 0) -> torch.Tensor:
    """Which tokens are left of equal scores behind rows, padded on the left."""
    longest = max(width, *map(len, rows))
    ids = torch.tensor([[TOKEN_IDS["<pad>"]] * (longest - len(row)) + row for row in rows])
    return processor(ids, torch.zeros(len(rows), tiny_go.VOCAB_SIZE)) == 0


def ids_of(text: str) -> list[int]:
    return encode_text(tiny_go.tokenizer(), text)


def test_text_ends_only_outside_of_literals_and_comments_and_if_asked_with_closed_brackets():
    never, always = (False, False), (True, True)
    given = {"x := 1": always, "f(": (True, False), 's := "a': never, "'a": never, "/* a": never, "// a": always,
             "`a\n": never, "{}": always}  # fmt: skip
    for column, balanced in enumerate((False, True)):
        processor = GoLexicalLogitsProcessor(tiny_go.tokenizer(), balanced=balanced)
        left = masks(processor, [ids_of(text) for text in given])
        expected = [may[column] for may in given.values()]
        assert left[:, END].tolist() == left[:, END_CODE].tolist() == expected
        assert not left[:, [token for token in range(len(SPECIAL_TOKENS)) if token not in (END, END_CODE)]].any()


def test_text_begins_behind_the_last_tag_and_behind_the_prompt_length():
    processor = GoLexicalLogitsProcessor(tiny_go.tokenizer())
    code, tag, end = ids_of('f("'), TOKEN_IDS["<CODE>"], TOKEN_IDS["</PROBLEM>"]
    left = masks(processor, [code, [*ids_of("say `hi"), end, tag, *code], ids_of("`"), [*ids_of("(`"), end]])
    assert torch.equal(left[0], left[1]) and left[3, END] and not left[2, END]
    skipping = GoLexicalLogitsProcessor(tiny_go.tokenizer(), prompt_length=5)
    rows = [[*ids_of("`abcdef")[:5], *code]]
    assert torch.equal(masks(skipping, rows)[0], left[0]) and not torch.equal(masks(processor, rows)[0], left[0])


def test_closing_what_nothing_opened_is_possible_only_for_a_fragment():
    close = ids_of("}")[0]
    left = masks(
        GoLexicalLogitsProcessor(tiny_go.tokenizer()), [ids_of("x"), ids_of("f(x)\n}\nx"), ids_of("{"), ids_of("{(")]
    )
    assert left[:, close].tolist() == [False, True, True, False]


def test_a_row_in_which_nothing_would_be_left_keeps_its_scores():
    processor = GoLexicalLogitsProcessor(tiny_go.tokenizer())
    dollar, letter = ids_of("$")[0], ids_of("x")[0]
    scores = torch.full((2, tiny_go.VOCAB_SIZE), -torch.inf)
    scores[:, dollar] = 1.0
    scores[1, letter] = 0.0
    found = processor(torch.tensor([ids_of("x"), ids_of("x")]), scores)
    assert torch.equal(found[0], scores[0]) and found[1].isfinite().nonzero().tolist() == [[letter]]


def test_logits_may_have_more_entries_than_there_are_tokens():
    processor = GoLexicalLogitsProcessor(tiny_go.tokenizer())
    found = processor(torch.tensor([ids_of("x")]), torch.zeros(1, tiny_go.VOCAB_SIZE + 7))
    assert found[0, -7:].isneginf().all() and found[0, :-7].isfinite().any()


def test_states_follow_the_ids_of_rows_in_any_order():
    shared, generator = GoLexicalLogitsProcessor(tiny_go.tokenizer()), random.Random(0)
    rows = [[1], [1], [1]]
    for _ in range(60):
        states = shared.states(torch.tensor(rows))
        assert states == GoLexicalLogitsProcessor(tiny_go.tokenizer()).states(torch.tensor(rows))
        parents = [generator.randrange(3) for _ in rows]  # beams change places, and some are dropped
        allowed = [shared.allowed(states[parent]).nonzero()[:, 0].tolist() for parent in parents]
        rows = [[*rows[parent], generator.choice([token for token in some if token != END])]
                for parent, some in zip(parents, allowed)]  # fmt: skip


def test_beams_and_padded_batches_write_what_each_prompt_gets_alone():
    tokenizer = tiny_go.tokenizer()
    model, processor = llama(len(tokenizer)), [GoLexicalLogitsProcessor(tokenizer)]
    prompts = ['func f() string {\n\treturn "', "x"]
    options = {"do_sample": False, "num_beams": 3, "max_new_tokens": 30, "logits_processor": processor}
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
    together = model.generate(**batch, **options)
    for row, prompt in zip(together, prompts):
        alone = model.generate(**tokenizer([prompt], return_tensors="pt", return_token_type_ids=False), **options)
        text = tokenizer.decode(row, skip_special_tokens=True)
        assert text == tokenizer.decode(alone[0], skip_special_tokens=True) and text.startswith(prompt)
        assert possible_after(LexicalState(), text.encode("utf-8", "ignore"))


def test_the_go_coder_and_its_pipeline_write_lexical_code():
    coder, tokenizer = tiny_go.writer(bias={"</PLAN>": 1.5, "</CODE>": 3.0}, code_budget=60), tiny_go.tokenizer()
    write = pipeline("text-generation", model=coder, tokenizer=tokenizer)
    options = {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "num_return_sequences": 12}
    for prompt in ("func f(a int) int {", [{"role": "user", "content": "Don't print `x`."}]):
        shares = []
        for processors in ([GoLexicalLogitsProcessor(tokenizer)], []):
            torch.manual_seed(0)
            texts = [row["generated_text"] for row in write(prompt, logits_processor=processors, **options)]
            texts = [text if isinstance(text, str) else text[-1]["content"] for text in texts]
            shares.append(sum(possible_after(LexicalState(), text.partition("\ufffd")[0].encode()) for text in texts))
        assert shares[0] == 12 > shares[1]


# Other tokenizers


def test_tokens_of_sentencepiece_are_read_as_what_they_decode_to():
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    vocabulary |= {"\u2581": 258, "\u2581$": 259, "\u2581a": 260, '"': 261, "é": 262}
    backend = Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    processor = GoLexicalLogitsProcessor(tokenizer)
    assert processor.texts[:2] == [None, None] and processor.texts[2 + 10] == b"\n"
    assert processor.texts[258:] == [b" ", b" $", b" a", b'"', "é".encode()]
    left = processor(torch.tensor([[260], [261]]), torch.zeros(2, 263)) == 0
    assert (
        left[0, 1]
        and not left[1, 1]
        and left[:, 259].tolist() == [False, True]
        and left[:, 12].tolist() == [True, False]
    )


def test_a_tokenizer_without_bytes_is_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")))
    with pytest.raises(ValueError, match="have no bytes to read; expected a vocabulary with all 256 bytes"):
        GoLexicalLogitsProcessor(tokenizer)
