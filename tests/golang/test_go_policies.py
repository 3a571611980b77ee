"""What decisions are worth, on models whose attempts, repairs and decisions are known."""

import pytest
import tiny_go
from scripted_go import Scripted

from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.evaluation.held_out import Sampling
from hrm_hf.golang.evaluation.policies import evaluate_policies
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.models.edits_hrm_go_coder import Edit
from hrm_hf.models.processing_hrm_go_coder import Feedback


FINE, BROKEN = "\n\treturn a\n}\n", "\n\treturn (\n}\n"
MEND = [Edit("\treturn (", "\treturn b")]


def plan(number):
    return {"intent": "ADD", "targets": [f"func:Add{number}"], "steps": []}


def figures_of(script, validator=None, iterations=3):
    rows = [tiny_go.record(number) for number in range(len(script))]
    model = Scripted(rows, script)
    writer = Writer(model, tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False)
    builder, sampling = tiny_go.builder(repairs="edits"), Sampling(max_iterations=iterations)
    return evaluate_policies(writer, builder, rows, validator or TreeSitterValidator(), sampling)


def test_policies_differ_in_what_they_try_after_a_failure():
    script = [
        {"plan": plan(0), "body": FINE},
        {"plan": plan(1), "body": BROKEN, "repair": MEND},
        {"plan": plan(2), "body": BROKEN, "repair": []},
    ]
    figures = figures_of(script)
    assert figures["records"] == 3
    # Attempts of the three: 1, then 2 or 3, then 3. Writing anew is the same again of this model.
    assert figures["fix"]["valid"] == figures["verdict"]["valid"] == pytest.approx(2 / 3)
    assert figures["fix"]["attempts"] == 2.0 and figures["resample"]["attempts"] == pytest.approx(7 / 3)
    assert figures["resample"]["valid"] == pytest.approx(1 / 3)
    assert figures["fix"]["tokens"] < figures["resample"]["tokens"]
    for name in ("model", "fix", "resample", "verdict"):
        part = figures[name]
        worth = 1000 * part["valid"] / part["tokens"]
        low, high = part["valid_per_1000_tokens_interval"]
        assert part["valid_per_1000_tokens"] == pytest.approx(worth) and low <= worth <= high


def test_a_model_that_says_done_to_an_error_is_not_believed():
    """The head of the script always says DONE: with an error in the verdict that is a repair."""
    figures = figures_of([{"plan": plan(0), "body": BROKEN, "repair": MEND}])
    assert figures["model"]["valid"] == 1.0 and figures["model"]["attempts"] == 2.0


def test_the_verdict_rule_writes_anew_what_does_not_type_check():
    def validator(codes):
        wrong = Feedback(syntax_ok=True, types_ok=False, category="undefined name", line=2, message="undefined: b")
        return [wrong if "return b\n" in code else Feedback(True, True) for code in codes]

    figures = figures_of([{"plan": plan(0), "body": "\n\treturn b\n}\n", "repair": MEND}], validator, iterations=2)
    assert figures["verdict"] == figures["resample"] and figures["verdict"]["tokens"] != figures["fix"]["tokens"]


def test_a_plan_that_cannot_be_read_is_written_anew():
    script = [{"plan": {"intent": "ADD", "targets": ["func:"], "steps": []}, "body": BROKEN, "repair": MEND}]
    figures = figures_of(script, iterations=2)
    assert figures["fix"]["valid"] == 0.0 and figures["fix"] == figures["resample"]
