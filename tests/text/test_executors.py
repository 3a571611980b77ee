"""REPLs of `MontyExecutor`: code cannot leave the sandbox, and limits stop it."""

import pytest

from hrm_hf.text.rlm.executors import CapReachedError, MontyExecutor


def repl(context="", functions=None, **limits):
    pytest.importorskip("pydantic_monty")
    executor = MontyExecutor(**{"block_seconds": 1, "max_memory": 2**27, **limits})
    return executor.open(context, functions or {}, seed=0)


def run(session, block, seconds=60):
    printed = []
    error = session.run(block, printed.append, seconds)
    return "".join(printed), error


@pytest.mark.parametrize(
    "block",
    [
        "import os\nos.system('touch {marker}')",
        "__import__('os').system('touch {marker}')",
        "eval('__import__(\"os\")').system('touch {marker}')",
        "open('{marker}', 'w').write('x')",
        "print(open('{secret}').read())",
        "import pathlib\nprint(pathlib.Path('{secret}').read_text())",
        "import os\nprint(os.listdir('/'))",
        "import os\nprint(os.environ)",
        "print(().__class__.__base__.__subclasses__())",
        "print((lambda: 0).__globals__)",
        "print(llm_query.__globals__)",
        "import subprocess\nsubprocess.run(['touch', '{marker}'])",
        "import socket",
        "import ctypes",
        "import urllib.request",
        "import importlib",
        "import sys\nprint(sys.modules)",
        "print(__builtins__)",
    ],
)
def test_code_cannot_leave_the_repl(block, tmp_path):
    (tmp_path / "secret").write_text("hidden")
    block = block.format(marker=tmp_path / "marker", secret=tmp_path / "secret")
    session = repl(functions={"llm_query": lambda prompt: prompt})
    printed, error = run(session, block)
    assert error and "hidden" not in printed and not (tmp_path / "marker").exists()
    assert run(session, "1 + 1") == ("2\n", None)


def test_memory_is_limited_and_the_variables_survive():
    session = repl()
    run(session, "x = 5")
    assert "MemoryError" in run(session, "big = []\nwhile True: big.append('x' * 10**6)")[1]
    assert run(session, "x") == ("5\n", None)


def test_a_context_beyond_the_memory_limit_is_an_error_that_names_the_limit():
    with pytest.raises(ValueError, match="max_memory=100000 bytes"):
        repl("x" * 10**6, max_memory=100_000)


def test_loops_of_host_calls_end_with_the_wall_time():
    session = repl(functions={"llm_query": lambda prompt: prompt})
    with pytest.raises(CapReachedError, match="max_wall_seconds"):
        run(session, "while True:\n    try: open('x')\n    except Exception: pass", seconds=0.3)


def test_errors_of_the_host_reach_the_repl_only_if_its_code_caused_them():
    def refuse(prompt):
        raise ValueError("not so") if prompt else KeyError("our own mistake")

    session = repl(functions={"llm_query": refuse})
    printed, error = run(session, "try:\n    llm_query('x')\nexcept ValueError as e:\n    print(e)")
    assert (printed, error) == ("not so\n", None)
    with pytest.raises(KeyError, match="our own mistake"):
        run(session, "llm_query('')")
