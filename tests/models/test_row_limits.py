"""Rows with limits of their own, which leave when they have ended. Referee: each row alone, by transformers."""

import pytest
import tiny_go
import torch
from tiny_go import TOKEN_IDS
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hrm_hf.models import generation_hrm_go_coder
from hrm_hf.models.row_limits import RowLimits, generate_rows, is_interruptible


PAD, END = TOKEN_IDS["<pad>"], TOKEN_IDS["</CODE>"]
STREAMS = [
    f"<s> <PROBLEM> {n} </PROBLEM> <PLAN> 3 </PLAN> <CODE> {m}" for n, m in ((4, 2), (9, 1), (2, 7), (5, 5), (1, 1))
]
LIMITS = [3, 30, 30, 17, 1]
TAGS = [token for token in range(40) if token != END]


class Counted:
    """`generate` of a model, and the rows of each forward."""

    def __init__(self, model):
        self.model, self.rows = model, []
        model.register_forward_pre_hook(
            lambda m, args, kwargs: self.rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )

    def __call__(self, *args, **kwargs):
        more = {"plan_first": False} if hasattr(self.model, "generate_with_refinement") else {}
        settings = {"eos_token_id": END, "pad_token_id": PAD, "suppress_tokens": TAGS, "do_sample": False}
        return self.model.generate(*args, **settings | more | kwargs)


def llama():
    torch.manual_seed(0)
    built = LlamaForCausalLM(LlamaConfig(vocab_size=tiny_go.VOCAB_SIZE, num_hidden_layers=2, **tiny_go.SIZES)).eval()
    for parameter in built.parameters():
        parameter.data.normal_(std=0.2) if parameter.dim() > 1 else None
    return built


def alone(generate, batch, row: int, limit: int) -> list[int]:
    ids = batch["input_ids"][row : row + 1, batch["attention_mask"][row].bool()]
    return generate(ids, max_new_tokens=limit)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.parametrize("model", [lambda: tiny_go.writer(bias={}), llama], ids=["go coder", "llama"])
def test_each_row_is_what_it_is_alone_up_to_its_own_limit(model, interrupts):
    generate, batch = Counted(model()), tiny_go.batch(*STREAMS)
    expected = [alone(generate, batch, row, limit) for row, limit in enumerate(LIMITS)]
    assert len(set(map(len, expected))) > 2
    generate.rows.clear()
    written = generate_rows(generate, *batch.values(), LIMITS, [END], PAD, interrupts=interrupts)
    new = written[:, batch["input_ids"].shape[1] :].tolist()
    assert torch.equal(written[:, : -len(new[0])], batch["input_ids"])
    for row, tokens in zip(new, expected):
        assert row == tokens + [PAD] * (len(row) - len(tokens))
    assert len(new[0]) == max(map(len, expected)) == len(generate.rows)
    spent = sum(generate.rows)
    assert spent < 5 * len(new[0]) if interrupts else spent == 5 * len(new[0])
    assert not interrupts or generate.rows[-1] <= 2  # the others have left


def test_without_a_cache_rows_leave_too():
    generate, batch = Counted(tiny_go.writer(bias={"</CODE>": 3.0})), tiny_go.batch(*STREAMS)
    found = [
        generate_rows(generate, *batch.values(), LIMITS, [END], PAD, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*found)


def test_limits_are_of_rows_and_of_all_their_beams():
    limits = RowLimits([4, 6])
    assert limits(torch.zeros(2, 5), None).tolist() == [True, False]
    assert limits(torch.zeros(6, 5), None).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("settings", "kwargs", "expected"),
    [
        ({"do_sample": True, "temperature": 0.8, "max_new_tokens": 5}, {}, True),
        ({"num_beams": 2}, {}, False),
        ({"min_new_tokens": 5}, {}, False),
        ({"return_dict_in_generate": True}, {}, False),
        ({"use_cache": False}, {}, False),
        ({"cache_implementation": "static"}, {}, False),
        ({"prompt_lookup_num_tokens": 3}, {}, False),
        ({}, {"streamer": None}, True),
        ({}, {"logits_processor": [1]}, False),
    ],
)
def test_what_looks_at_a_whole_run_is_not_interrupted(settings, kwargs, expected):
    assert is_interruptible(GenerationConfig(**settings), kwargs) is expected


def test_generate_lets_rows_leave_and_returns_what_it_returned(monkeypatch):
    texts = ["func Add1(a, b int) int {", "func main() {\n", "// Add2 returns the sum", "func", "return a + b"]
    batch = tiny_go.tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    model = tiny_go.writer(bias={"</PLAN>": 3.0, "</CODE>": 3.0})
    generate = Counted(model)
    found = model.generate(**batch, do_sample=False)
    with_rows = list(generate.rows)
    generate.rows.clear()
    monkeypatch.setattr(generation_hrm_go_coder, "is_interruptible", lambda *_: False)
    assert torch.equal(model.generate(**batch, do_sample=False), found)
    assert len(with_rows) == len(generate.rows) and sum(with_rows) < sum(generate.rows)


def test_a_long_prompt_does_not_shorten_what_others_may_write():
    texts = ["x", "func Add1(a, b int) int { return a + b }"]
    model = tiny_go.writer(bias={}, max_position_embeddings=96, plan_budget=8, code_budget=80)
    tokenizer = tiny_go.tokenizer()
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        options |= {"do_sample": False, "tokenizer": tokenizer, "max_refinement_iterations": 1}
        together = model.generate_with_refinement(texts, **options)
        apart = [model.generate_with_refinement([text], **options) for text in texts]
        assert together.codes == [output.codes[0] for output in apart]
        assert [row[0].new_tokens for row in together.attempts] == [one.attempts[0][0].new_tokens for one in apart]
