"""Edits, new attempts and half of each at equal numbers of new tokens, on models whose answers are known."""

import json

import pytest
import tiny_go
from scripted_go import Scripted, ids_of_plan
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.evaluation import equal_tokens
from hrm_hf.golang.evaluation.held_out import Sampling, Try
from hrm_hf.golang.evaluation.metrics import mcnemar_test
from hrm_hf.golang.evaluation.plots import plot_go_evaluation
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.models.edits_hrm_go_coder import Edit


BROKEN, LONG = "\n\treturn (\n}\n", "\n\treturn a + b + {}\n}}\n"
MEND = [Edit("\treturn (", "\treturn a + b + 7")]


def plan(number):
    return {"intent": "ADD", "targets": [f"func:Add{number}"], "steps": []}


def compare(script, failures, budget=512, **how):
    rows = [tiny_go.record(number) for number in range(len(script))]
    writer = Writer(Scripted(rows, script), tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False)
    builder = tiny_go.builder(repairs="edits")
    return equal_tokens.evaluate_equal_tokens(
        writer, builder, rows, TreeSitterValidator(), Sampling(), failures, budget, **how
    )


def test_edits_that_mend_beat_codes_that_break_again(tmp_path):
    script = [
        {"plan": plan(0), "body": BROKEN, "repair": MEND},
        {"plan": plan(1), "body": BROKEN, "repair": []},
        {"plan": plan(2), "body": LONG.format(2)},
    ]
    figures = compare(script, 2, path=tmp_path / "tries.jsonl")
    assert figures["failures"] == 2 and figures["problems"] == 2
    assert (figures["attempts"], figures["passed"]) == (3, 1)
    assert figures["edits"]["kept"] == 0.5 and figures["resampling"]["kept"] == 0 and figures["half"]["kept"] == 0.5
    assert figures["edits_gain"]["difference"] == 0.5 and figures["edits_gain"]["only_first"] == 1
    assert figures["edits_gain"]["mcnemar_p"] == 1.0 and figures["edits"]["shortened"] == 0
    assert figures["edits"]["outcomes"] == {"applied": 1, "unchanged": equal_tokens.MAX_TRIES}
    assert figures["edits"]["subtree_f1_of_valid"] > figures["edits"]["attempt_subtree_f1_of_valid"]
    assert sum(row["failures"] for row in figures["by_category"].values()) == 2
    rows = [json.loads(line) for line in (tmp_path / "tries.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["sum.go:0", "sum.go:1"]
    again = equal_tokens.compare_policies(equal_tokens.read_failures(tmp_path / "tries.jsonl"), 512, Sampling().seed)
    assert again == {name: figures[name] for name in again} and len(again) > 9
    assert plot_go_evaluation({"equal_tokens": figures}, tmp_path / "curve.png").stat().st_size > 1000
    assert rows[0]["attempt"]["code"] == rows[0]["resampling"][0]["code"] and rows[0]["edits"][0]["valid"]


def test_the_plan_of_a_failure_is_the_one_that_was_written():
    seen = []
    script = [{"plan": plan(5), "body": BROKEN, "repair": MEND}]
    rows = [tiny_go.record(0)]
    model = Scripted(rows, script)
    writer = Writer(model, tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False)
    builder = tiny_go.builder(repairs="edits")
    equal_tokens.evaluate_equal_tokens(writer, builder, rows, TreeSitterValidator(), Sampling(), 1)
    for ids in model.code_prompts:
        seen.append(
            ids_of_plan(plan(5)) == ids[(at := len(builder.prompt_ids(rows[0])) - 1) : at + len(ids_of_plan(plan(5)))]
        )
    assert len(seen) >= 3 and all(seen)  # the attempt, its edits and the new codes


def test_a_try_counts_only_if_its_tokens_are_paid():
    record = tiny_go.record(0, "cd")
    tries = [(Try("a", 30), False), (Try("b", 30), True)]
    failure = equal_tokens.Failure(record, [], False, edits=tries, resampling=[(Try("c", 40), True)])
    assert [failure.answer("edits", budget) for budget in (59, 60)] == [None, "b"]
    assert [failure.answer("half", budget) for budget in (60, 79, 80, 120)] == [None, None, "c", "b"]
    assert [failure.answer("resampling", budget) for budget in (39, 40)] == [None, "c"]


def test_an_answer_that_drops_statements_is_valid_and_not_kept():
    many = "\n" + "\ta += 1\n" * 6 + "\treturn (\n}\n"
    mend = [Edit(many.strip("\n").removesuffix("\n}"), "\treturn a")]
    figures = compare([{"plan": plan(0), "body": many, "repair": mend}], 1)
    assert figures["edits"]["valid"] == 1 and figures["edits"]["shortened"] == 1 and figures["edits"]["kept"] == 0
    # The reference has one statement too.
    assert figures["edits"]["complete"] == 1 and figures["edits_complete_gain"]["difference"] == 1
    assert figures["attempt_complete"] == 1


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"), [(0, 0, 1.0), (5, 5, 1.0), (10, 0, 2 / 1024), (1, 0, 1.0)]
)
def test_mcnemar_is_the_exact_binomial_test(only_first, only_second, p):
    assert mcnemar_test(only_first, only_second) == pytest.approx(p)


def test_a_model_of_rewrites_and_one_that_never_fails_are_refused():
    with pytest.raises(ValueError, match="repair_mode edits"):
        writer = Writer(Scripted(), tiny_go.tokenizer(), progress=False)
        equal_tokens.evaluate_equal_tokens(writer, tiny_go.builder(), [], TreeSitterValidator(), Sampling(), 1)
    with pytest.raises(ValueError, match="no failure among 20 codes"):
        compare([{"plan": plan(0), "body": LONG.format(0)}], 1)


def test_failures_without_records_are_refused(tmp_path):
    from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM  # noqa: F401  registers the model

    folder = tmp_path / "model"
    tiny_go.model().save_pretrained(folder)
    tiny_go.tokenizer().save_pretrained(folder)
    file = tiny_go.write(tmp_path / "t.jsonl", [tiny_go.record(0, "cd")])
    answer = CliRunner().invoke(app, ["eval", "go", str(folder), "--trajectories", str(file), "--failures", "3"])
    assert answer.exit_code == 2 and "--records" in answer.output
