"""Recursive LM runs: whatever the model replies, it gets an error message and the run continues.

Each hostile reply is followed by a valid one, whose answer the run must return. Code that tries to escape the executor
is in tests/text/test_executors.py.
"""

import pytest
from scripted_lm import DONE, ask_of, code

from hrm_hf.text.rlm.executors import MontyExecutor
from hrm_hf.text.rlm.prompts import parse_reply


RIGHT = code("FINAL('the ' + 'right answer')")
NEST = "x = []\nfor _ in range(100000): x = [x]"
SHARE = "x = [0] * 10\nfor _ in range(12): x = [x] * 10"  # 10^13 entries of 120 lists

# (description, code of the reply, message to the model)
HOSTILE = [
    ("a value nested 100,000 deep", f"{NEST}\nx", "cannot be converted to text"),
    ("an answer nested 100,000 deep", f"{NEST}\n{DONE.format('x')}", "cannot be converted to text"),
    ("FINAL of a value nested 100,000 deep", f"{NEST}\nFINAL(x)", "cannot be converted to text"),
    ("a value of shared lists that prints as 10^13", f"{SHARE}\nx", "more than 1000000 characters"),
    ("FINAL of shared lists that print as 10^13", f"{SHARE}\nFINAL(x)", "more than 1000000 characters"),
    ("an instance that holds such lists", f"{SHARE}\nclass A: pass\na = A()\na.x = x\na", "more than 1000000 char"),
    ("an integer of 20,000 digits", "10 ** 20000", "Exceeds the limit"),
    ("FINAL of an integer of 20,000 digits", "FINAL(10 ** 20000)", "Exceeds the limit"),
    ("FINAL of a list with such an integer", "FINAL([1, {'a': 10 ** 20000}])", "Exceeds the limit"),
    ("print of an integer of 20,000 digits", "print(10 ** 20000)", "Exceeds the limit"),
    ("FINAL of two million characters", "FINAL('a' * 2_000_000)", "more than 1000000 characters"),
    ("an error of 50 million characters", "raise ValueError('x' * 50_000_000)", "ValueError: xxx"),
    ("20 MB of output", "for _ in range(200): print('a' * 100_000)", "more characters were printed"),
    ("source nested 3,000 deep", "x = " + "[" * 3000 + "]" * 3000, "Error"),
    ("source of 20,000 signs", "x = " + "-" * 20_000 + "1", "Error"),
    ("recursion without end", "def f(): return f()\nf()", "RecursionError"),
    ("FINAL of an exception", "FINAL(ValueError('x'))", "expected text, a number, a list or a dict"),
    ("NUL in the source", "x = '\0' +", "Error"),
    ("an answer that is a number", "answer = 5", "must stay a dict"),
    ("an answer without anything in it", "answer['ready'] = True", "content is empty"),
    ("SystemExit", "raise SystemExit(3)", "SystemExit"),
    ("BaseException", "raise BaseException('over')", "BaseException: over"),
    ("a sub-call with a nested list", f"{NEST}\nllm_query_batched(x)", "expected a string"),
    ("a sub-call with an integer of 20,000 digits", "llm_query(10 ** 20000)", "expected a string"),
    ("a sub-call of 30 million characters", "llm_query('a' * 30_000_000)", "limit: 20000000"),
    ("a child with a context of shared lists", f"{SHARE}\nrlm_query('q', x)", "more than 10000000 values"),
    ("a child with a question of 30 million characters", "rlm_query('a' * 30_000_000, 'c')", "split them"),
    ("a text of 10^10 characters", "x = 'a' * 10 ** 10", "those before this block"),
    ("an integer of 10^9 digits", "x = 10 ** 10 ** 9", "those before this block"),
    ("padding to 10^9 characters", "'{:>1000000000}'.format(1)", "those before this block"),
    ("memory without end", "x = []\nwhile True: x.append('x' * 10 ** 6)", "MemoryError"),
    ("a loop without end", "while True: pass", "TimeoutError"),
    ("a loop without end inside a built-in function", "sum(range(10 ** 13))", "time limit"),
    ("half a surrogate pair in the answer", "answer['content'] = '\\ud800'", "turns left"),
    ("built-in functions that are gone", "str = repr = print = len = list = None", "turns left"),
]
REPLIES = [
    ("5,000 code blocks", "```text\nx\n```\n" * 5000, "no complete code block"),
    ("20,000 fences that nothing closes", "```repl x\n" * 20_000, "no complete code block"),
    ("200,000 parentheses in a block without end", "```repl\nx" + "(" * 200_000, "no complete code block"),
    ("100,000 spaces behind a fence", "```" + " " * 100_000 + "`\n", "no complete code block"),
    ("nothing but thoughts", "<think>" * 10_000, "no complete code block"),
    ("NUL characters", "\0" * 1000, "no complete code block"),
]


def ids(cases):
    return [name.replace(" ", "-") for name, *_ in cases]


def goes_on(reply, told, executor=None, **caps):
    """Run the reply, then a valid one, and return the result."""
    ask, model = ask_of([reply, RIGHT], executor=executor, sub_call=lambda prompt: "?", max_position_embeddings=10**7)
    result = ask("What?", context="letters", max_depth=2, max_turns=5, **caps)
    assert (result.answer, result.finished, result.turns) == ("the right answer", True, 2), result
    assert told in model.calls[-1]["prompts"][0]
    return result


@pytest.mark.parametrize(("name", "block", "told"), HOSTILE, ids=ids(HOSTILE))
def test_run_continues_after_hostile_code_in_the_isolated_executor(name, block, told):
    pytest.importorskip("pydantic_monty")
    seconds = 60 if told == "MemoryError" else 1  # memory runs out first, even on a slow machine
    goes_on(code(block), told, MontyExecutor(block_seconds=seconds, max_memory=2**28))


@pytest.mark.parametrize(("name", "reply", "told"), REPLIES, ids=ids(REPLIES))
def test_run_continues_after_a_hostile_reply(name, reply, told):
    pytest.importorskip("pydantic_monty")
    goes_on(reply, told)


def test_error_is_shown_after_truncated_output():
    ask, model = ask_of([code("print('y' * 100_000)\n1 / 0"), RIGHT])
    assert ask("?", context="", max_output_chars=500).answer == "the right answer"
    assert "ZeroDivisionError" in model.calls[-1]["prompts"][0]


def test_context_key_of_20000_digits_does_not_end_the_run():
    replies = [code("part = rlm_query('q', {10 ** 20000: 1})"), code("FINAL('of the child')"), RIGHT]
    ask, _ = ask_of(replies)
    assert ask("?", context="", max_depth=2).answer == "the right answer"


def test_a_reply_of_a_million_characters_is_read_in_one_pass():
    reply = "```text\n```\n" * 80_000 + code("FINAL(1)")
    assert parse_reply(reply)[0] == "FINAL(1)"
