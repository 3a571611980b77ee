"""Decisions of which tests of benchmark tasks are the oracle."""

import json

import numpy as np
import pytest
import tiny_go
from go_samples import needs_sandbox
from scripted_go import Scripted
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.evaluation.benchmarks import GoTask, load_benchmark
from hrm_hf.golang.evaluation.tested_decisions import evaluate_tested_decisions, judged_codes
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.golang.validators.go_tests import GoTestResult
from hrm_hf.models.processing_hrm_go_coder import DECISIONS, TOKEN_IDS, Feedback


def row(number, right="    return 2 * n\n}\n", buggy="    return n + 3\n}\n"):
    """A task of HumanEvalFix: doubling a number."""
    name = f"Double{number}"
    test = f"func Test{name}(t *testing.T) {{\n    assert := assert.New(t)\n    assert.Equal(4, {name}(2))\n}}\n"
    return {
        "task_id": f"Go/{number}", "docstring": "Doubles a number.", "entry_point": name,
        "prompt": f"// Doubles a number.\nfunc {name}(n int) int {{\n", "test": test,
        "canonical_solution": right, "buggy_solution": buggy,
    }  # fmt: skip


def write(path, *rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def load(tmp_path, *rows):
    return load_benchmark("humanevalfix-go", write(tmp_path / "tasks.jsonl", *rows))


class Passes:
    """A runner for which code passes that holds a text, and which remembers what it was asked to run."""

    def __init__(self, right, chunk=3):
        self.right, self.chunk, self.programs = right, chunk, []

    def __call__(self, programs):
        assert len(programs) <= self.chunk
        self.programs += programs
        return [GoTestResult("pass" if self.right in one.code else "fail") for one in programs]


def writer_of(model=None, **options):
    return Writer(model or Scripted(), tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False, **options)


def codes_of(tasks, runner, types=None, **options):
    return judged_codes(writer_of(), tasks, types or TreeSitterValidator(), runner, **options)


def test_the_right_decision_is_of_the_verdict_first_and_then_of_the_tests(tmp_path):
    runner = Passes("2 * n")
    codes, broken = codes_of(load(tmp_path, *map(row, range(6))), runner)
    assert not broken
    for one in codes:
        parses = TreeSitterValidator()([one.code])[0].syntax_ok
        expected = ("DONE" if "2 * n" in one.code else "REFINE") if parses else "CONTINUE"
        assert one.decision == expected, one
        assert (one.status == "") is not parses  # what the verdict rejects is never run
    of_kind = {kind: {one.decision for one in codes if one.kind == kind} for kind in ("right", "buggy")}
    assert of_kind == {"right": {"DONE"}, "buggy": {"REFINE"}}
    assert {one.decision for one in codes} == set(DECISIONS)  # changed solutions give CONTINUE
    assert len(runner.programs) == sum(one.status != "" for one in codes)


def test_a_mutant_that_is_the_solution_or_the_buggy_code_is_not_asked_twice(tmp_path):
    tasks = load(tmp_path, *(row(number, buggy="    return 2 / n\n}\n") for number in range(8)))
    codes, _ = codes_of(tasks, Passes("2 * n"))
    for task in tasks:
        mine = [one.code for one in codes if one.task.id == task.id]
        assert len(set(mine)) == len(mine) == 4


def test_the_same_seed_changes_the_same_places_and_another_one_others(tmp_path):
    tasks = load(tmp_path, *map(row, range(6)))
    first, again, other = (codes_of(tasks, Passes("2 * n"), seed=seed)[0] for seed in (0, 0, 1))
    assert first == again and [one.code for one in first] != [one.code for one in other]


def test_a_task_whose_right_solution_fails_here_judges_nobody(tmp_path):
    tasks = load(tmp_path, row(0), row(1, right="    return n + n\n}\n"), row(2, right="    return (\n}\n"))
    codes, broken = codes_of(tasks, Passes("2 * n"))
    assert broken == ["Go/1", "Go/2"] and {one.task.id for one in codes} == {"Go/0"}


def test_a_task_without_a_buggy_solution_is_named():
    task = GoTask("T/7", "Doubles.", "func Double(n int) int {", "", "func TestDouble(t *testing.T) {}")
    with pytest.raises(ValueError, match=r"task T/7 has no right and buggy solution; .* need humanevalfix-go"):
        codes_of([task], Passes(""))


# ---- what the model is asked ----


class Listening(Scripted):
    """Keeps the streams that it is asked about."""

    def __init__(self, **how):
        super().__init__(**how)
        self.streams, self.feedback = [], []

    def __call__(self, input_ids, attention_mask, use_cache, decision_positions=None, feedback_ids=None):
        for ids, mask in zip(input_ids, attention_mask):
            self.streams.append(ids[mask.bool()].tolist())
        if feedback_ids is not None:
            self.feedback += feedback_ids[:, 0].tolist()
        return super().__call__(input_ids, attention_mask, use_cache, decision_positions, feedback_ids)


def evaluated(tmp_path, model, count=5, tasks=None, **options):
    tasks = tasks or load(tmp_path, *map(row, range(count)))
    return evaluate_tested_decisions(
        writer_of(model), tiny_go.builder(**options), tasks, TreeSitterValidator(), Passes("2 * n")
    )


@pytest.mark.parametrize("repairs", ["rewrite", "edits"])
def test_a_model_reads_its_own_plan_and_the_verdict_and_nothing_of_the_tests(tmp_path, repairs):
    model = Listening(default_plan="OPTIMIZE")
    figures, rows = evaluated(tmp_path, model, repairs=repairs)
    assert len(model.streams) == len(rows) == figures["head"]["decisions"] == sum(figures["codes"].values()) == 20
    assert TOKEN_IDS["<TEST_FAIL>"] not in {token for ids in model.streams for token in ids}
    assert all(TOKEN_IDS["<INTENT:OPTIMIZE>"] in ids for ids in model.streams)
    assert {feedback[1] for feedback in model.feedback} == {0}  # tests: unknown
    assert {feedback[3] for feedback in model.feedback} == {0}  # no line: it would be the program's


def test_the_scores_are_those_of_the_labels_of_the_tests(tmp_path):
    """The head of the stand-in always says DONE; its tokens are always right."""
    figures, rows = evaluated(tmp_path, Scripted(boost=lambda ids, position: 9.0))
    share = np.mean([each["decision"] == "DONE" for each in rows])
    assert figures["head"]["accuracy"] == pytest.approx(share) and figures["tokens"]["accuracy"] == 1.0
    counted = [sum(each["decision"] == name for each in rows) for name in DECISIONS]
    assert np.array(figures["head"]["confusion"]).sum(axis=1).tolist() == counted
    assert figures["tasks"] == 5 and figures["codes"]["buggy.REFINE"] == figures["codes"]["right.DONE"] == 5
    assert set(figures["left_out"].values()) == {0}


def test_the_interval_is_over_tasks_whose_codes_are_alike(tmp_path):
    """One task alone can only be drawn again: its four codes, one of them DONE, are no four observations."""
    figures, _ = evaluated(tmp_path, Scripted(), count=1)
    low, high = figures["head"]["macro_f1_interval"]
    assert 0 < low < 0.5 and low == high == pytest.approx(figures["head"]["macro_f1"])
    broken = [row(number, buggy="    return (\n}\n" if number % 2 else "    return n + 3\n}\n") for number in range(6)]
    figures, _ = evaluated(tmp_path, Scripted(), tasks=load(tmp_path, *broken))
    low, high = figures["tokens"]["macro_f1_interval"]
    assert low < figures["tokens"]["macro_f1"] < high


def test_what_cannot_be_asked_is_counted_by_its_reason(tmp_path):
    figures, rows = evaluated(tmp_path, Scripted(), count=2, code_budget=8)
    assert figures["left_out"]["code too long"] == len(rows) == 8
    assert figures["tasks"] == figures["head"]["decisions"] == 0

    class Planless(Scripted):
        def written(self, ids):
            return [TOKEN_IDS["</PLAN>"]]

    figures, _ = evaluated(tmp_path, Planless(), count=3)
    assert figures["left_out"]["plan unreadable"] == 3 and figures["head"]["decisions"] == 0


def test_a_type_error_is_for_another_try_and_is_not_run(tmp_path):
    def types(codes):
        wrong = Feedback(syntax_ok=True, types_ok=False, category="undefined name", line=1, message="undefined: x")
        return [wrong if "n + 3" in code else Feedback(syntax_ok=True, types_ok=True) for code in codes]

    runner = Passes("2 * n")
    codes, _ = codes_of(load(tmp_path, row(0)), runner, types)
    buggy = next(one for one in codes if one.kind == "buggy")
    assert buggy.decision == "CONTINUE" and not any("n + 3" in one.code for one in runner.programs)


# ---- the command ----


@pytest.mark.external
@needs_sandbox
def test_the_command_runs_the_tests_and_writes_what_it_judged(tmp_path):
    folder, out = tmp_path / "model", tmp_path / "out"
    tiny_go.writer(plan_budget=32, code_budget=64).save_pretrained(folder)
    tiny_go.tokenizer().save_pretrained(folder)
    undefined = row(1, buggy="    return m\n}\n")
    tasks = write(tmp_path / "tasks.jsonl", row(0), undefined, row(2, right="    return n\n}\n"))
    command = ["eval", "go", str(folder), "--benchmark", f"humanevalfix-go={tasks}", "--max-code-tokens", "8"]
    answer = CliRunner().invoke(app, [*command, "--out", str(out), "--json"])
    assert answer.exit_code == 0, answer.output
    figures = json.loads((out / "results.json").read_text())["metrics"]["benchmarks"]["humanevalfix-go"]["decisions"]
    assert figures["left_out"]["right solution fails"] == 1
    rows = list(map(json.loads, (out / "benchmarks" / "humanevalfix-go.decisions.jsonl").read_text().splitlines()))
    found = {(each["task"], each["kind"]): (each["decision"], each["status"]) for each in rows}
    assert found["Go/0", "right"] == found["Go/1", "right"] == ("DONE", "pass")
    assert found["Go/0", "buggy"] == ("REFINE", "fail") and found["Go/1", "buggy"] == ("CONTINUE", "")
    assert {each["task"] for each in rows} == {"Go/0", "Go/1"}
