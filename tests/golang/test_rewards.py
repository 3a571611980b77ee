"""Verifiable rewards: their values and their names."""

import pytest
import tiny_go

from hrm_hf.golang.rewards import RewardArguments, reward_functions
from hrm_hf.text.byte_tokenizer import byte_tokenizer


def test_length_and_regex_rewards_match_their_definitions():
    length, letter = reward_functions(["length:4", "regex:^[ab]+$"], byte_tokenizer())
    assert (length.__name__, letter.__name__) == ("length:4", "regex:^[ab]+$")
    assert length(completion_ids=[[1] * tokens for tokens in (0, 2, 4, 5, 9)]) == [0, 0.5, 1, 0.75, 0]
    written = ["ab", "abc", [{"role": "assistant", "content": "ba"}]]
    assert letter(completions=written, prompts=written, completion_ids=[]) == [1, 0, 1]


def test_code_of_a_go_coder_stream_is_the_text_between_its_tags():
    pytest.importorskip("tree_sitter_go")
    tokenizer = tiny_go.tokenizer()
    (reward,) = reward_functions(["go-syntax"], tokenizer)
    cases = {
        "a</PLAN><CODE>func A() {}</CODE>": 1,
        "a</PLAN><CODE>func A( {}</CODE>": 0,
        "a</PLAN><CODE>func A() {}": 0,  # no end
        "a</PLAN><CODE></CODE>": 0,  # empty code parses, too
        "a</PLAN><CODE>// nothing</CODE>": 0,
        "func A() {}": 0,  # code in the plan
    }
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in cases]
    prompts = ["<PROBLEM>a</PROBLEM><PLAN>"] * len(cases)
    assert reward(prompts=prompts, completions=list(cases), completion_ids=ids) == list(cases.values())
    begun = ["<PROBLEM>a</PROBLEM><PLAN>a</PLAN><CODE>func A("] * 2
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (") {}</CODE>", "{}</CODE>")]
    assert reward(prompts=begun, completions=["", ""], completion_ids=ids) == [1, 0]


def test_code_of_other_models_is_prompt_plus_completion_or_a_chat_answer():
    pytest.importorskip("tree_sitter_go")
    (reward,) = reward_functions(["go-syntax"], byte_tokenizer())
    answer = [{"role": "assistant", "content": "func A() {}"}]
    prompts, written = ["func A(", "func A(", [{"role": "user", "content": "write"}]], [") {}", "{}", answer]
    assert reward(prompts=prompts, completions=written, completion_ids=[[]] * 3) == [1, 0, 1]


def test_code_shorter_than_its_reference_gets_no_reward():
    pytest.importorskip("tree_sitter_go")
    (reward,) = reward_functions(["go-syntax"], byte_tokenizer())
    lines = "".join(f"\ta += {number}\n" for number in range(6))
    whole = f"func A(a int) int {{\n{lines}\treturn a\n}}"
    code = ["func A(a int) int {}", whole, whole.replace("\ta += 3\n", ""), "func A(a int) int {\n\t// a++; a *= 2\n}"]
    batch = {"prompts": [""] * 4, "completions": code, "completion_ids": [[]] * 4}
    assert reward(**batch) == [1, 1, 1, 1]
    assert reward(**batch, reference=[whole] * 4) == [0, 1, 1, 0]  # one statement fewer may be better code


TESTS = """package main

import "testing"

func TestAdd(t *testing.T) {
	if Add(1, 2) != 3 {
		t.Fatal("not 3")
	}
}
"""


@pytest.mark.external
def test_go_tests_reward_requires_confirmation_by_the_harness():
    from hrm_hf.golang import GoNotFoundError, SandboxError

    try:
        (reward,) = reward_functions(["go-tests"], byte_tokenizer())
    except (GoNotFoundError, SandboxError) as error:
        pytest.skip(str(error))
    right = "func Add(a, b int) int { return a + b }"
    wrong = right.replace("+", "-")
    leaves = 'import ("fmt"; "os")\nfunc init() { fmt.Println("PASS\\nok"); os.Exit(0) }\n' + wrong
    written = [right, wrong, leaves, "func Add(", ""]
    batch = {"prompts": [""] * 5, "completions": written, "completion_ids": [[]] * 5}
    assert reward(**batch, tests=[TESTS] * 5) == [1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="reward='go-tests'"):
        reward(**batch)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("go_syntax", "reward='go_syntax'"),
        ("length:none", "reward='length:none'"),
        ("length:0", "reward='length:0'"),
        ("regex:", "reward='regex:'"),
        ("regex:(", r"reward='regex:\('"),
    ],
)
def test_invalid_reward_names_are_rejected(name, message):
    with pytest.raises(ValueError, match=message):
        RewardArguments(name)


def test_a_run_without_reward_is_rejected():
    with pytest.raises(ValueError, match="--reward"):
        reward_functions(RewardArguments().reward, byte_tokenizer())
