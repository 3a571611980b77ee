"""Evaluation of a Go coder on models with known plans, code, decisions and probabilities."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny_go
import torch
from scripted_go import Scripted, ids_of_plan
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.evaluation import held_out as go_coder
from hrm_hf.golang.evaluation.held_out import evaluate_decisions, evaluate_loss
from hrm_hf.golang.evaluation.metrics import calibration_error
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.golang.options import EvaluateGo
from hrm_hf.io.files import BadLineError
from hrm_hf.models.processing_hrm_go_coder import TOKEN_IDS, Feedback, code_segment, encode_text


RIGHT, OTHER, BROKEN = "\n\treturn a + b + {}\n}}\n", "\n\treturn a - b\n}\n", "\n\treturn (\n}\n"


def writer_of(model, **changes):
    return Writer(model, tiny_go.tokenizer(), **{"batch_size": 2, "max_length": 512, "progress": False, **changes})


def sampling(**changes):
    return EvaluateGo(model="m", records=[Path("test.jsonl")], **changes)


def plan_of(number, intent="ADD", targets=None):
    return {"intent": intent, "targets": [f"func:Add{number}"] if targets is None else targets, "steps": []}


def plain(count):
    return [tiny_go.record(number) for number in range(count)]


# ---- loss ----


def test_a_uniform_model_has_the_bits_per_byte_of_its_vocabulary():
    records = plain(3)
    metrics = evaluate_loss(writer_of(Scripted()), tiny_go.builder(), records)
    bodies = [record["solution"]["code"].removeprefix(record["code_prefix"]) for record in records]
    tokens = sum(len(code_segment(tiny_go.tokenizer(), "", body)[0]) - 1 for body in bodies)
    bits, size = tokens * math.log2(tiny_go.VOCAB_SIZE), sum(len(body.encode()) for body in bodies)
    assert metrics["code_bytes"] == size and metrics["records"] == 3
    assert metrics["code_bits_per_byte"] == pytest.approx(bits / size)
    assert metrics["code_perplexity"] == pytest.approx(tiny_go.VOCAB_SIZE)


def test_records_that_do_not_fit_are_counted():
    records = plain(2)
    records[1]["solution"]["code"] = records[1]["code_prefix"] + "\n" + "\tx()\n" * 300 + "}"
    metrics = evaluate_loss(writer_of(Scripted()), tiny_go.builder(), records)
    assert metrics["records"] == 1 and metrics["left_out"] == 1


# ---- greedy ----


def test_greedy_metrics_match_scripted_completions():
    records = plain(4)
    script = [
        {"plan": plan_of(0), "body": RIGHT.format(0)},
        {"plan": plan_of(1, "FIX"), "body": "\n    return a+b+1\n}"},  # correct once formatted
        {"plan": plan_of(2, targets=["func:X"]), "body": OTHER},
        {"plan": plan_of(3, targets=[]), "body": BROKEN},
    ]
    model = Scripted(records, script, kind="llama")
    metrics, rows = go_coder.evaluate_greedy(writer_of(model), tiny_go.builder(), records, TreeSitterValidator())
    assert metrics["intent_accuracy"] == 0.75 and metrics["plan_acc"] == 0.25
    assert metrics["target_precision"] == pytest.approx(2 / 3) and metrics["target_recall"] == 0.5
    assert metrics["code_exact"] == 0.5 and metrics["parse_rate"] == 0.75
    assert metrics["type_check_rate"] is None and metrics["type_check_records"] == 0
    assert metrics["reference_parse_rate"] == 1.0
    assert [row["exact"] for row in rows] == [True, True, False, False]
    assert rows[1]["subtree_f1"] == 1.0 and 0 < rows[2]["subtree_f1"] < 1
    assert rows[3]["syntax_ok"] is False and rows[0]["code"] == records[0]["solution"]["code"]


def test_metrics_of_a_real_model_do_not_depend_on_the_batch_size():
    records, model = plain(5), tiny_go.model()
    results = [
        go_coder.evaluate_greedy(
            writer_of(model, batch_size=size, max_code_tokens=12, max_plan_tokens=12),
            tiny_go.builder(), records, TreeSitterValidator(),
        )[1]
        for size in (1, 2, 5)
    ]  # fmt: skip
    assert results[0] == results[1] == results[2]


def test_losses_of_a_real_model_match_its_cross_entropy():
    model, record = tiny_go.model(), tiny_go.record(1)
    row = tiny_go.builder().build(record)
    ids = torch.tensor([row["input_ids"]])
    labels = torch.full_like(ids, -100)
    labels[0, row["code_start"] : row["code_end"]] = ids[0, row["code_start"] : row["code_end"]]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels).code_loss.item()
    metrics = evaluate_loss(writer_of(model), tiny_go.builder(), [record, tiny_go.record(2)])
    alone = writer_of(model).nats([row["input_ids"][: row["code_end"]]], [row["code_start"]])[0]
    assert alone == pytest.approx(loss * (row["code_end"] - row["code_start"]), rel=1e-4)
    assert metrics["code_bits_per_byte"] > 0


# ---- decisions ----


def trajectories():
    """9 decisions: 4 CONTINUE, 2 REFINE, 3 DONE."""
    return [tiny_go.record(0, "cd"), tiny_go.record(1, "rcd"), tiny_go.record(2, "ccrd")]


def test_decisions_are_read_from_tokens_and_head():
    def right(ids, position):
        return 1.0 if ids[position] == TOKEN_IDS["</VALIDATE>"] else 0.0

    model = Scripted(boost=right)
    metrics = evaluate_decisions(writer_of(model), tiny_go.builder(), trajectories())
    assert metrics["trajectories"] == 3 and metrics["tokens"]["decisions"] == 9
    assert metrics["tokens"]["accuracy"] == 1.0 and metrics["tokens"]["majority_accuracy"] == pytest.approx(4 / 9)
    assert metrics["tokens"]["confusion"] == [[4, 0, 0], [0, 2, 0], [0, 0, 3]]
    # The head always predicts DONE. Every CONTINUE failed, so CONTINUE if failed, else DONE, is right 7 times.
    assert metrics["head"]["confusion"] == [[0, 0, 4], [0, 0, 2], [0, 0, 3]]
    assert metrics["head"]["accuracy"] == pytest.approx(3 / 9)
    assert metrics["head"]["rule_accuracy"] == pytest.approx(7 / 9)
    chance = math.e / (math.e + 2)  # probability of the correct token, which is always the likeliest
    assert metrics["tokens"]["calibration_error"] == pytest.approx(1 - chance)
    assert metrics["tokens"]["nll"] == pytest.approx(-math.log(chance))
    assert metrics["tokens"]["macro_f1"] == 1.0


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    sure = np.array([[0.9, 0.1, 0.0]] * 4 + [[0.5, 0.3, 0.2]] * 4)
    labels = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    assert calibration_error(sure, labels) == pytest.approx((4 * 0.4 + 4 * 0.0) / 8)


def test_the_temperature_of_a_config_divides_the_heads_logits():
    ids = torch.tensor([tiny_go.stream("<PLAN> 4 </PLAN> <CODE> 3 </CODE>")])
    where = torch.tensor([[ids.shape[1] - 1]])
    warm, plain = tiny_go.model(awake=True, decision_temperature=2.5), tiny_go.model(awake=True)
    both = [model.model(ids, decision_positions=where).refinement_logits for model in (warm, plain)]
    torch.testing.assert_close(both[0] * 2.5, both[1])


def test_a_baseline_is_evaluated_on_decision_tokens_only():
    metrics = evaluate_decisions(writer_of(Scripted(kind="gpt2")), tiny_go.builder(), trajectories())
    assert "head" not in metrics and metrics["tokens"]["decisions"] == 9


def test_trajectories_that_do_not_fit_are_counted():
    rows = trajectories()
    rows[0]["attempts"][-1]["code"] = rows[0]["code_prefix"] + "\tx()\n" * 500
    metrics = evaluate_decisions(writer_of(Scripted()), tiny_go.builder(), rows)
    assert metrics["trajectories"] == 2 and metrics["left_out"] == 1


# ---- repair ----


def test_repair_is_compared_to_samples_without_the_attempt():
    rows = trajectories()
    script = [
        {"plan": plan_of(0), "body": OTHER, "repair": RIGHT.format(0)},
        {"plan": plan_of(1), "body": BROKEN, "repair": RIGHT.format(1)},
        {"plan": plan_of(2), "body": RIGHT.format(2), "repair": OTHER},
    ]
    model = Scripted(rows, script)
    metrics = go_coder.evaluate_repair(writer_of(model), tiny_go.builder(), rows, TreeSitterValidator())
    assert metrics["cases"] == 3 and metrics["cases_CONTINUE"] == 2 and metrics["cases_REFINE"] == 1
    assert metrics["repair_exact"] == pytest.approx(2 / 3) and metrics["resampling_exact"] == pytest.approx(1 / 3)
    assert metrics["repair_valid"] == 1.0 and metrics["resampling_valid"] == pytest.approx(2 / 3)
    assert metrics["repair_exact_CONTINUE"] == 1.0 and metrics["repair_exact_REFINE"] == 0.0
    assert (metrics["exact_gain"]["only_first"], metrics["exact_gain"]["only_second"]) == (2, 1)
    assert metrics["attempt_ast"] < metrics["repair_ast"]


def test_repair_tokens_count_code_and_new_plan():
    rows = [tiny_go.record(0, "cd"), tiny_go.record(1, "rd")]
    script = [{"plan": plan_of(n), "body": BROKEN, "repair": RIGHT.format(n)} for n in range(2)]
    model = Scripted(rows, script)
    metrics = go_coder.evaluate_repair(writer_of(model), tiny_go.builder(), rows, TreeSitterValidator())
    retried, refined = (len(encode_text(tiny_go.tokenizer(), RIGHT.format(n))) + 1 for n in range(2))
    assert metrics["repair_tokens_CONTINUE"] == retried
    assert metrics["repair_tokens_REFINE"] == refined + len(ids_of_plan(plan_of(1))) - 1
    assert metrics["resampling_tokens"] == len(encode_text(tiny_go.tokenizer(), BROKEN)) + 1
    assert metrics["repair_unchanged"] == 0.0


def test_a_repair_uses_only_attempts_that_fit():
    rows = [tiny_go.record(0, "ccd"), tiny_go.record(1, "cd")]
    for row in rows:
        row["attempts"][0]["code"] = row["code_prefix"] + "\tx()\n" * 500
    model = Scripted()
    metrics = go_coder.evaluate_repair(writer_of(model), tiny_go.builder(), rows, TreeSitterValidator())
    assert metrics["cases"] == 1 and metrics["left_out"] == 1
    repaired = tiny_go.tokenizer().decode(next(ids for ids in model.code_prompts if TOKEN_IDS["</VALIDATE>"] in ids))
    assert repaired.count("<CODE>") == 2 and "x()" not in repaired


def test_a_repair_reads_the_last_failed_attempt_and_replans_only_after_refine():
    rows = [tiny_go.record(0, "rcd"), tiny_go.record(1, "crd")]
    model = Scripted()
    go_coder.evaluate_repair(writer_of(model), tiny_go.builder(), rows, TreeSitterValidator())
    texts = [tiny_go.tokenizer().decode(ids) for ids in model.code_prompts]
    repairs = sorted((text for text in texts if "</VALIDATE>" in text), key=lambda text: "Add1" in text)
    controls = [text for text in texts if "</VALIDATE>" not in text]
    assert len(repairs) == len(controls) == 2
    retried, refined = repairs
    assert retried.endswith("</VALIDATE><RETRY><CODE>func Add0(a, b int) int {") and retried.count("<CODE>") == 3
    assert (
        refined.endswith("</PLAN><CODE>func Add1(a, b int) int {")
        and refined.count("<REFINE><PLAN><INTENT:ADD></PLAN>") == 1
    )
    assert all(text.count("<CODE>") == 1 and "return the sum</PLAN>" in text for text in controls)
    assert all("<DONE>" not in text for text in texts)


# ---- refinement ----


def test_refinement_is_compared_to_equally_many_samples():
    records = plain(4)
    right = [RIGHT.format(number) for number in range(4)]
    script = [
        {"attempts": [BROKEN, right[0]], "samples": [BROKEN, OTHER, BROKEN]},  # repaired; the control only parses
        {"attempts": [OTHER], "samples": [OTHER, right[1], OTHER]},  # stopped early; a control sample is right
        {"attempts": [BROKEN, BROKEN, BROKEN], "samples": [BROKEN, BROKEN, right[2]]},
        {"attempts": [right[3], BROKEN], "samples": [right[3], OTHER, OTHER]},  # the final answer is the valid attempt
    ]
    model = Scripted(records, script)
    metrics = go_coder.evaluate_refinement(
        writer_of(model), records, TreeSitterValidator(), sampling(max_iterations=3)
    )
    valid, exact = metrics["valid"], metrics["exact"]
    assert metrics["records"] == 4 and metrics["reference_rejected"] == 0
    assert exact["refinement"]["success_per_iteration"] == [0.25, 0.5, 0.5]
    assert exact["resampling"] == [0.25, 0.5, 0.75]
    assert valid["refinement"]["success_per_iteration"] == [0.5, 0.75, 0.75]
    assert valid["resampling"] == [0.5, 0.75, 1.0]
    assert valid["refinement"]["average_iterations"] == 2 and exact["refinement"]["premature_stop_rate"] == 0.25
    assert exact["refinement"]["wasted_iteration_rate"] == pytest.approx(1 / 8)
    gain = exact["gain_over_resampling"]
    assert gain["difference"] == -0.25 and (gain["only_first"], gain["only_second"]) == (1, 2)


def test_refinement_skips_records_with_a_rejected_reference():
    records = plain(2)
    records[0]["solution"]["code"] = records[0]["code_prefix"] + BROKEN
    model = Scripted(records, [{}, {"attempts": [OTHER], "samples": [OTHER]}])
    metrics = go_coder.evaluate_refinement(
        writer_of(model), records, TreeSitterValidator(), sampling(max_iterations=1)
    )
    assert metrics["records"] == 1 and metrics["reference_rejected"] == 1


def types(codes):
    """Reject every name except a and b, as a type checker."""
    feedback = []
    for verdict, code in zip(TreeSitterValidator()(codes), codes):
        if verdict.syntax_ok:
            known = "elsewhere" not in code and "- b" not in code
            verdict = Feedback(True, known, None, "none" if known else "undefined name")
        feedback.append(verdict)
    return feedback


def test_type_errors_count_only_if_the_reference_type_checks():
    records = plain(3)
    records[0]["solution"]["code"] = records[0]["code_prefix"] + " return elsewhere }"
    seen = [" return elsewhere + 1 }", OTHER, BROKEN]
    script = [{"plan": plan_of(0), "body": body, "attempts": [body], "samples": [body]} for body in seen]
    model = Scripted(records, script)
    metrics, _ = go_coder.evaluate_greedy(writer_of(model), tiny_go.builder(), records, types)
    assert metrics["type_check_records"] == 2 and metrics["type_check_rate"] == 0.0
    metrics = go_coder.evaluate_refinement(writer_of(model), records, types, sampling(max_iterations=1))
    assert metrics["records"] == 3 and metrics["type_check_records"] == 2
    # The first only has to parse; the second has a type error; the third does not parse.
    assert metrics["valid"]["refinement"]["success"] == pytest.approx(1 / 3)
    assert metrics["valid"]["resampling"] == pytest.approx([1 / 3])


# ---- the command ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("go")
    tiny_go.write(folder / "test.jsonl", plain(4))
    tiny_go.write(folder / "trials.jsonl", [*trajectories(), tiny_go.record(5, "d")])
    tokenizer = copy.deepcopy(tiny_go.tokenizer())
    for name, model in {"coder": tiny_go.model(code_budget=24, plan_budget=24), "llama": llama()}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_go.VOCAB_SIZE, num_hidden_layers=1, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
        pad_token_id=3, **tiny_go.SIZES,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def evaluate(*arguments):
    return CliRunner().invoke(app, ["eval", "go", *map(str, arguments)])


OPTIONS = ("--validator", "tree-sitter", "--max-iterations", "2", "--max-code-tokens", "16", "--device", "cpu")


def test_the_command_evaluates_a_saved_go_coder(folder, tmp_path):
    result = evaluate(
        folder / "coder", "--records", folder / "test.jsonl", "--trajectories", folder / "trials.jsonl",
        "--out", tmp_path, "--limit", "3", "--json", *OPTIONS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout.strip().splitlines()[-1])["metrics"]
    assert set(metrics) == {"loss", "greedy", "decisions", "repair", "refinement"}
    assert metrics["refinement"]["records"] == 3 and metrics["decisions"]["head"]["decisions"] == 9
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["metrics"] == metrics and saved["settings"]["validator"] == "TreeSitterValidator"
    assert len((tmp_path / "greedy.jsonl").read_text().splitlines()) == 3


def test_the_command_evaluates_a_baseline_without_a_loop(folder):
    result = evaluate(folder / "llama", "--records", folder / "test.jsonl", *OPTIONS)
    assert result.exit_code == 0, result.output
    assert "loss.code_bits_per_byte: " in result.stdout and "refinement" not in result.stdout


def test_a_broken_line_stops_the_command_or_is_skipped(folder, tmp_path):
    lines = (folder / "test.jsonl").read_text().splitlines()
    (tmp_path / "broken.jsonl").write_text("\n".join([lines[0], lines[1][:-9], *lines[2:4]]))
    stopped, left_out = (
        evaluate(folder / "llama", "--records", tmp_path / "broken.jsonl", "--on-bad-line", what, "--json", *OPTIONS)
        for what in ("stop", "skip")
    )
    assert isinstance(stopped.exception, BadLineError) and "broken.jsonl, line 2" in str(stopped.exception)
    assert left_out.exit_code == 0 and "skipped: " in left_out.stderr and "line 2" in left_out.stderr
    metrics = json.loads(left_out.stdout.strip().splitlines()[-1])["metrics"]
    assert metrics["loss"]["records"] == 3


def test_evaluation_updates_the_model_card(folder):
    result = evaluate(folder / "coder", "--trajectories", folder / "trials.jsonl", "--update-card", *OPTIONS)
    assert result.exit_code == 0, result.output
    card = (folder / "coder" / "README.md").read_text()
    (row,) = [line for line in card.splitlines() if line.startswith("| trials.jsonl | test | ")]
    assert "decisions_head_macro_f1 " in row and "repair_resampling_exact " in row


def test_the_command_writes_samples_of_a_benchmark(folder, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    prompt = 'package x_test\n\nimport "testing"\n\n// Adds.\nfunc Add(a, b int) int {\n'
    tasks.write_text(json.dumps({"name": "T", "prompt": prompt, "tests": "func TestAdd(t *testing.T) { Add(1, 2) }"}))
    result = evaluate(folder / "coder", "--benchmark", f"humaneval-go={tasks}", "--out", tmp_path / "out", *OPTIONS)
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]["benchmarks"]["humaneval-go"]
    assert metrics["tasks"] == 1 and ("pass@1" in metrics or metrics["tests_refused"])
    (row,) = map(json.loads, (tmp_path / "out" / "humaneval-go.jsonl").read_text().splitlines())
    assert row["task"] == "T" and row["code"].startswith("func Add(a, b int) int {")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--trajectories"),
        (["--benchmark", "humaneval-go=x.jsonl"], "--out"),
        (["--benchmark", "mbpp=x", "--out", "o"], "benchmark='mbpp=x'"),
        (["--validator", "gofmt", "--records", "x"], "gofmt"),
    ],
)
def test_bad_options_are_usage_errors(folder, arguments, expected):
    result = evaluate(folder / "coder", *arguments)
    assert result.exit_code == 2 and expected in result.output


def test_a_tokenizer_without_the_tags_is_rejected(folder, tmp_path):
    from hrm_hf.text.byte_tokenizer import byte_tokenizer

    llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    result = evaluate(tmp_path, "--records", folder / "test.jsonl")
    assert result.exit_code == 1 and "hrm-hf data go-tokenizer" in str(result.exception)
