"""Test sets of Go tasks: reading, sampling, and running tests in the sandbox."""

import json
import os
from pathlib import Path

import pytest
import tiny_go
from scripted_go import Scripted

from hrm_hf.golang import (
    GoNotFoundError,
    GoTypesValidator,
    SandboxError,
    TreeSitterValidator,
    find_go,
    validate_sandbox,
)
from hrm_hf.golang.evaluation import benchmarks as runs
from hrm_hf.golang.evaluation.benchmarks import load_benchmark, truncated
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.golang.options import EvaluateGo
from hrm_hf.models.processing_hrm_go_coder import TOKEN_IDS, parse_plan


# HumanEvalPack Go (octopack); its tests are skipped if the file is missing.
PACK = Path(os.environ.get("HRM_HF_HUMANEVALPACK_GO", "data/humanevalpack_go.jsonl.gz"))

MULTIPL_E = {
    "name": "T_1_double", "task_id": "T_1_double",
    "prompt": 'package double_test\n\nimport (\n    "testing"\n    "fmt"\n)\n\n// Doubles a number. Twice as much.\n'
    "// >>> double(2)\n// 4\nfunc double(n int) int {\n",
    "tests": 'func TestDouble(t *testing.T) {\n\tif fmt.Sprint(double(2)) != "4" {\n\t\tt.Errorf("no")\n\t}\n}\n',
}  # fmt: skip
MXEVAL = {
    "task_id": "M/1", "description": "Doubles a number.",
    "prompt": 'package main\n\nimport (\n\t"encoding/json"\n\t"math"\n)\n// Write Go\nfunc double (n int) int {\n',
    "test": '\n\nfunc main() {\n\tif b, _ := json.Marshal(double(2)); string(b) != "4" {\n\t\tpanic("no")\n\t}\n}\n',
}  # fmt: skip
FIX = {
    "task_id": "Go/1", "docstring": "Doubles a number.", "entry_point": "Double",
    "prompt": 'import (\n    "math"\n)\n\nfunc one() int { return 1 }\n\n// Doubles a number.\n'
    "func Double(n interface{}) int {\n",
    "test": "func TestDouble(t *testing.T) {\n    assert := assert.New(t)\n    assert.Equal(4, Double(2))\n}\n",
    "canonical_solution": "    return int(math.Abs(2)) * n.(int) * one()\n}\n\n\n",
    "buggy_solution": "    return n.(int) + one()\n}\n",
}  # fmt: skip
WRONG_TEST = {**MULTIPL_E, "name": "T_2", "tests": MULTIPL_E["tests"].replace("double(2)", 'double("two")')}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(tmp_path, name, *rows):
    return load_benchmark(name, write(tmp_path / f"{name}.jsonl", *rows))


@pytest.fixture(scope="module")
def tools():
    try:
        find_go()
        validate_sandbox()
    except (GoNotFoundError, SandboxError) as error:
        pytest.skip(str(error))
    with runs.test_tools() as found:
        yield found


def test_a_task_becomes_a_record_in_the_training_format(tmp_path):
    (task,) = load(tmp_path, "humaneval-go", MULTIPL_E)
    assert task.record() == {
        "id": "T_1_double",
        "problem": {"title": "Doubles a number.", "body": "Twice as much.\n>>> double(2)\n4"},
        "context": {"path": "", "before": "package main"},
        "code_prefix": "func double(n int) int {",
    }


def test_helper_functions_of_a_prompt_are_kept_in_context_and_program(tmp_path):
    (task,) = load(tmp_path, "humanevalfix-go", FIX)
    assert task.record()["context"]["before"] == "package main\n\nfunc one() int { return 1 }"
    assert task.prefix == "func Double(n interface{}) int {"
    assert task.program("func Double() {}").code == "func one() int { return 1 }\n\nfunc Double() {}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"name": "a"}\n', "tasks.jsonl, line 1: .*humaneval-go"),
        ("{\n", "tasks.jsonl, line 1"),
        ("[1]\n", "tasks.jsonl, item 1"),
        (json.dumps({**MULTIPL_E, "prompt": "no function"}), "line 1: .*humaneval-go"),
        ("", "no task"),
    ],
)
def test_an_invalid_task_is_reported_with_file_and_line(tmp_path, content, expected):
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=expected):
        load_benchmark("humaneval-go", path)


PREFIX = "func f(v interface{}) int {"
BRACES = "\n\ts := \"}\" + `}` // }\n\tif c == '}' { /* } */ }\n}"


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (" return 1 }\n\nfunc g() { if x {", " return 1 }"),
        (" return g() }\n\nfunc g() int { return 1 }", " return g() }\n\nfunc g() int { return 1 }"),
        (" return 1 }\n\nfunc main() {}\n", " return 1 }\n\n"),
        (" return 1 }\n// and more }} text", " return 1 }\n// and more }} text"),
        (" return 1", " return 1"),
        (f"{BRACES}\nfunc g() {{", BRACES),
    ],
)
def test_code_that_does_not_parse_is_cut_at_the_end_of_the_function(written, kept):
    assert truncated(PREFIX + written, PREFIX) == PREFIX + kept


# ---- scores ----


def samples_of(tasks, **bodies):
    return [
        {"task": task.id, "sample": index, "code": task.prefix + body}
        for task in tasks
        for index, body in enumerate(bodies[task.id.replace("/", "_")])
    ]


@pytest.mark.external
def test_right_solutions_pass_and_wrong_ones_fail_in_every_layout(tools, tmp_path):
    types, runner, _ = tools
    for name, row in {"humaneval-go": MULTIPL_E, "mbxp-go": MXEVAL}.items():
        tasks = load(tmp_path, name, row)
        bodies = [" return 2 * n }", " return n }", " return undefined }", " return ("]
        samples = samples_of(tasks, **{tasks[0].id.replace("/", "_"): bodies})
        metrics = runs.judge_samples(tasks, samples, types, runner)
        assert [sample["status"] for sample in samples] == ["pass", "fail", "build", "syntax"]
        assert metrics["statuses"] == {"pass": 1, "fail": 1, "build": 1, "syntax": 1}
        assert metrics["pass@1"] == 0.25 and metrics["parse_rate"] == 0.75 and metrics["type_check_rate"] == 0.5


@pytest.mark.external
def test_the_canonical_solution_passes_and_the_buggy_one_fails(tools, tmp_path):
    types, runner, _ = tools
    tasks = load(tmp_path, "humanevalfix-go", FIX)
    samples = samples_of(tasks, Go_1=[tasks[0].canonical, tasks[0].buggy])
    runs.judge_samples(tasks, samples, types, runner)
    assert [sample["status"] for sample in samples] == ["pass", "fail"]
    assert "expected" in samples[1]["message"].lower()


@pytest.mark.external
def test_a_task_with_tests_that_do_not_compile_is_counted_separately(tools, tmp_path):
    types, runner, _ = tools
    tasks = load(tmp_path, "humaneval-go", MULTIPL_E, WRONG_TEST)
    unsolvable = runs.unsolvable_tasks(tasks, types)
    assert unsolvable == ["T_2"]
    samples = samples_of(tasks, T_1_double=[" return 2 * n }"], T_2=[" return 2 * n }"])
    for known in (unsolvable, ()):
        metrics = runs.judge_samples(tasks, samples, types, runner, known)
        assert metrics["tasks"] == 1 and metrics["unsolvable"] == 1 and metrics["pass@1"] == 1.0


@pytest.mark.external
@pytest.mark.skipif(not PACK.is_file(), reason=f"HumanEvalPack Go is not at {PACK}; set HRM_HF_HUMANEVALPACK_GO")
def test_canonical_solutions_of_humanevalpack_pass_and_buggy_ones_fail(tools):
    types, runner, _ = tools
    tasks = [
        task for task in load_benchmark("humanevalfix-go", PACK) if task.id in ("Go/0", "Go/32", "Go/72", "Go/140")
    ]
    for solution, rate in (("canonical", 1.0), ("buggy", 0.0)):
        samples = [
            {"task": task.id, "sample": 0, "code": truncated(task.prefix + getattr(task, solution), task.prefix)}
            for task in tasks
        ]
        assert runs.judge_samples(tasks, samples, types, runner)["pass@1"] == rate, samples


def test_without_a_runner_nothing_is_run(tmp_path):
    tasks = load(tmp_path, "humaneval-go", MULTIPL_E)
    samples = samples_of(tasks, T_1_double=[" return 2 * n }", " return ("])
    metrics = runs.judge_samples(tasks, samples, TreeSitterValidator(), None)
    assert metrics["parse_rate"] == 0.5 and "pass@1" not in metrics and "type_check_rate" not in metrics
    assert all("status" not in sample for sample in samples)


def test_running_tests_without_a_sandbox_is_rejected_with_the_reason(monkeypatch):
    def refuse():
        raise SandboxError("refusing to run code outside of a sandbox: bwrap is not installed")

    monkeypatch.setattr(runs, "GoTestRunner", refuse)
    monkeypatch.setattr(runs, "GoTypesValidator", lambda: TreeSitterValidator())
    with runs.test_tools() as (types, runner, refused):
        assert runner is None and types is not None and "refusing to run code" in refused


# ---- samples ----


def take(tasks, writer, **changes):
    repair = changes.pop("repair", False)
    options = EvaluateGo(**{"model": "m", "records": [Path("r.jsonl")], "samples": 2, **changes})
    return runs.write_samples(writer, tiny_go.builder(), tasks, TreeSitterValidator(), options, repair)


def test_samples_contain_the_generated_code_after_the_prefix(tmp_path):
    tasks = load(tmp_path, "humaneval-go", MULTIPL_E, {**MULTIPL_E, "name": "T_3"}, {**MULTIPL_E, "name": "T_4"})
    model = Scripted(default_body="\n\treturn 2 * n\n}")
    samples = take(tasks, Writer(model, tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False))
    assert [(row["task"], row["sample"]) for row in samples[:3]] == [("T_1_double", 0), ("T_1_double", 1), ("T_3", 0)]
    assert {row["code"] for row in samples} == {"func double(n int) int {\n\treturn 2 * n\n}"}


def test_a_repair_prompt_contains_buggy_code_verdict_and_decision(tmp_path):
    broken = {**FIX, "task_id": "Go/2", "buggy_solution": "    return (\n}\n"}
    tasks = load(tmp_path, "humanevalfix-go", FIX, broken)
    model = Scripted(default_plan="FIX", default_body=" return 0 }")
    writer = Writer(model, tiny_go.tokenizer(), max_length=512, progress=False)
    take(tasks, writer, repair=True, samples=1)
    tokenizer = tiny_go.tokenizer()
    by_decision = {}
    for ids in model.code_prompts:
        texts = tokenizer.decode(ids)
        by_decision["<REFINE>" if TOKEN_IDS["<REFINE>"] in ids else "<RETRY>"] = texts
        assert parse_plan(tokenizer, ids[ids.index(TOKEN_IDS["<PLAN>"]) :])["intent"] == "FIX"
    refined, retried = by_decision["<REFINE>"], by_decision["<RETRY>"]
    assert (
        "n.(int) + one()\n}</CODE><VALIDATE><SYNTAX_OK><TEST_FAIL>other: test failed</VALIDATE><REFINE><PLAN>"
        in refined
    )
    assert "<SYNTAX_ERR>" in retried and retried.count("<PLAN>") == 1
    assert refined.endswith("</PLAN><CODE>func Double(n interface{}) int {")
    assert retried.endswith("<RETRY><CODE>func Double(n interface{}) int {")


@pytest.mark.external
def test_a_stub_that_type_checks_is_not_unsolvable(tools, tmp_path):
    assert isinstance(tools[0], GoTypesValidator)
    assert runs.unsolvable_tasks(load(tmp_path, "mbxp-go", MXEVAL), tools[0]) == []
