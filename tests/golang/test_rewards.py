"""Rewards that a program can check: what they give, and how they are named."""

import pytest
import tiny_go

from hrm_hf.golang.rewards import RewardArguments, reward_functions
from hrm_hf.text.byte_tokenizer import byte_tokenizer


def test_lengths_and_expressions_are_rewarded():
    length, letter = reward_functions(["length:4", "regex:^[ab]+$"], byte_tokenizer())
    assert (length.__name__, letter.__name__) == ("length:4", "regex:^[ab]+$")
    assert length(completion_ids=[[1] * tokens for tokens in (0, 2, 4, 5, 9)]) == [0, 0.5, 1, 0.75, 0]
    said = ["ab", "abc", [{"role": "assistant", "content": "ba"}]]
    assert letter(completions=said, prompts=said, completion_ids=[]) == [1, 0, 1]


def test_code_of_the_go_coders_stream_is_what_stands_between_its_tags():
    pytest.importorskip("tree_sitter_go")
    tokenizer = tiny_go.tokenizer()
    (reward,) = reward_functions(["go-syntax"], tokenizer)
    cases = {
        "a</PLAN><CODE>func A() {}</CODE>": 1,
        "a</PLAN><CODE>func A( {}</CODE>": 0,
        "a</PLAN><CODE>func A() {}": 0,  # no end
        "a</PLAN><CODE></CODE>": 0,  # nothing parses too
        "a</PLAN><CODE>// nothing</CODE>": 0,
        "func A() {}": 0,  # in the plan
    }
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in cases]
    prompts = ["<PROBLEM>a</PROBLEM><PLAN>"] * len(cases)
    assert reward(prompts=prompts, completions=list(cases), completion_ids=ids) == list(cases.values())
    begun = ["<PROBLEM>a</PROBLEM><PLAN>a</PLAN><CODE>func A("] * 2
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (") {}</CODE>", "{}</CODE>")]
    assert reward(prompts=begun, completions=["", ""], completion_ids=ids) == [1, 0]


def test_code_of_other_models_is_the_prompt_and_what_follows_or_an_answer():
    pytest.importorskip("tree_sitter_go")
    (reward,) = reward_functions(["go-syntax"], byte_tokenizer())
    answer = [{"role": "assistant", "content": "func A() {}"}]
    prompts, said = ["func A(", "func A(", [{"role": "user", "content": "write"}]], [") {}", "{}", answer]
    assert reward(prompts=prompts, completions=said, completion_ids=[[]] * 3) == [1, 0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("go_syntax", "reward='go_syntax' is not one of go-syntax, length:TOKENS, regex:PATTERN"),
        ("length:none", "reward='length:none': expected a number of tokens from 1 up"),
        ("length:0", "expected a number of tokens from 1 up"),
        ("regex:", "is not one of"),
        ("regex:(", r"reward='regex:\(' is no regular expression"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        RewardArguments(name)


def test_a_run_without_reward_is_refused():
    with pytest.raises(ValueError, match="no reward: give --reward"):
        reward_functions(RewardArguments().reward, byte_tokenizer())
