"""Failures, fixes and rounds of break-it-fix-it, on models whose answers are known and on a tiny one."""

import json
from collections import Counter

import pytest
import tiny_go
from scripted_go import Scripted
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.data.records import read_records
from hrm_hf.golang.data.trajectories import failed_record
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.golang.rounds.failures import broken_solutions, sampled_failures, to_be_broken
from hrm_hf.golang.rounds.fixes import changed_share, collected_fixes, fixer_success
from hrm_hf.golang.rounds.run import plot_rounds
from hrm_hf.golang.rounds.shards import read_shards, shard_files, write_shards
from hrm_hf.golang.validators.categories import error_class
from hrm_hf.io.usage import UsageError
from hrm_hf.models.edits_hrm_go_coder import Edit, apply_edits, edits_between
from hrm_hf.models.processing_hrm_go_coder import Feedback


BROKEN = "\n\treturn (\n}\n"
MEND = [Edit("\treturn (", "\treturn a + b + 7")]
HOW = {"samples": 2, "temperature": 0.8}


def plan(number):
    return {"intent": "ADD", "targets": [f"func:Add{number}"], "steps": []}


def opened(rows, script):
    writer = Writer(Scripted(rows, script), tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False)
    return writer, tiny_go.builder(repairs="edits")


def failing(number, body=BROKEN, message="expected operand"):
    record = tiny_go.record(number)
    verdict = Feedback(syntax_ok=False, category="missing operand or type", line=2, message=message)
    return failed_record(record, record["code_prefix"] + body, verdict)


# ---- failures ----


def test_failures_have_the_plan_that_was_written_and_the_reference_behind_them():
    rows = [tiny_go.record(number) for number in range(3)]
    script = [
        {"plan": plan(8), "body": BROKEN},
        {"plan": plan(1), "body": "\n\treturn a\n}\n"},
        {"plan": plan(9), "body": BROKEN},
    ]
    made, counts = sampled_failures(*opened(rows, script), rows, TreeSitterValidator(), **HOW)
    assert [record["id"] for record in made] == ["sum.go:0@own0", "sum.go:2@own0"]
    assert [record["plan"]["targets"] for record in made] == [["func:Add8"], ["func:Add9"]]
    assert made[0]["solution"] == rows[0]["solution"] and made[0]["attempts"][0]["code"].endswith(BROKEN)
    assert made[0]["attempts"][0]["feedback"]["syntax_ok"] is False
    # A second sample is the same of this model: it passes again, or is there already.
    assert counts == {"records": 3, "attempts": 6, "passed": 2, "repeated": 2, "failures": 2}


def test_a_breakers_codes_are_failures_if_they_do_not_pass():
    rows = [tiny_go.record(number) for number in range(4)]
    damage = [Edit("\treturn a + b + 0", "\treturn (")]
    script = [
        {"plan": plan(0), "body": "", "repair": damage},
        {"plan": plan(1), "body": "", "repair": []},
        {"plan": plan(2), "body": "", "repair": [Edit("\treturn a + b + 2", "\treturn b")]},
        {"plan": plan(3), "body": "", "repair": [Edit("absent", "\treturn b")]},
    ]
    made, counts = broken_solutions(*opened(rows, script), rows, TreeSitterValidator(), samples=1, temperature=0.8)
    assert [record["id"] for record in made] == ["sum.go:0@broken0"]
    assert made[0]["attempts"][0]["code"] == rows[0]["code_prefix"] + BROKEN
    assert made[0]["solution"] == rows[0]["solution"]
    expected = {"records": 4, "attempts": 4, "failures": 1, "passed": 1, "edits unchanged": 1, "edits not found": 1}
    assert counts == expected


def test_what_is_to_be_broken_teaches_the_edits_to_the_bad_code():
    record, builder = tiny_go.record(0), tiny_go.builder(repairs="edits")
    lines = "".join(
        f"\ta += {number}\n" for number in range(20)
    )  # edits that are longer than the code are not learned
    record["solution"]["code"] = record["code_prefix"] + "\n" + lines + "\treturn a\n}\n"
    bad = record["solution"]["code"].replace("\treturn a", "\treturn (")
    row = builder.build(to_be_broken(record, bad))
    assert row["repair"] == "edits"
    edits = edits_between(record["solution"]["code"], bad, record["code_prefix"])
    assert apply_edits(record["solution"]["code"], edits)[0] == bad
    asked = builder.edit_prompt_ids(to_be_broken(record))
    assert row["input_ids"][: len(asked)] == asked  # asked as it was taught


# ---- fixes ----


def test_repairs_are_kept_that_pass_change_little_and_drop_nothing():
    long = "\n" + "".join(f"\ta += {number}\n" for number in range(9)) + "\treturn (\n}\n"
    rows = [failing(0), failing(1), failing(2, long), failing(3, long), failing(4)]
    cut = "\n".join(long.strip("\n").split("\n")[:-1])
    other = cut.replace("a += ", "x.y[").replace("\n", "]++\n").replace("\treturn (", "\treturn b")
    script = [
        {"plan": plan(0), "body": "", "repair": MEND},
        {"plan": plan(1), "body": "", "repair": [Edit("\treturn (", "\treturn [")]},
        {"plan": plan(2), "body": "", "repair": [Edit(cut, "\treturn a")]},
        {"plan": plan(3), "body": "", "repair": [Edit(cut, other)]},
        {"plan": plan(4), "body": "", "repair": []},
    ]
    writer, builder = opened(rows, script)
    made, counts = collected_fixes(writer, builder, rows, TreeSitterValidator(), **HOW)
    assert [record["id"] for record in made] == ["sum.go:0@fix"]
    fixed = rows[0]["code_prefix"] + "\n\treturn a + b + 7\n}\n"
    assert made[0]["solution"]["code"] == made[0]["attempts"][1]["code"] == fixed
    assert made[0]["attempts"][1]["decision"] == "DONE" and made[0]["attempts"][0] == rows[0]["attempts"][0]
    reasons = {"kept": 1, "does not pass": 2, "shortened": 2, "changes too much": 2, "edits unchanged": 2}
    assert counts == {"failures": 5, "fixes": 1, "tries": 9, **reasons}
    loose, _ = collected_fixes(writer, builder, rows, TreeSitterValidator(), **HOW, max_change=1.0)
    assert [record["id"] for record in loose] == ["sum.go:0@fix", "sum.go:3@fix"]


def test_success_is_counted_by_class_of_error_over_all_failures():
    rows = [failing(0), failing(1), failing(2)]
    rows[1]["attempts"][0]["feedback"] |= {"syntax_ok": True, "types_ok": False, "category": "undefined name"}
    rows[2]["attempts"][0]["code"] = rows[2]["code_prefix"] + BROKEN * 200  # too long to be asked about
    script = [{"plan": plan(0), "body": "", "repair": MEND}] * 2
    figures = fixer_success(*opened(rows, script), rows, TreeSitterValidator())
    assert figures["failures"] == 3 and figures["mended"] == pytest.approx(2 / 3)
    assert figures["by_class"]["syntax"]["failures"] == 2 and figures["by_class"]["syntax"]["mended"] == 0.5
    assert figures["by_class"]["undeclared name"]["mended"] == 1.0 and figures["dropped"]["too long"] == 1


def test_the_changed_share_is_of_tokens_without_comments():
    assert changed_share("func f() { a() }", "// note\nfunc f() {\n\ta()\n}") == 0
    assert changed_share("func f() { a() }", "func g() { a() }") == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ((False, None, "unexpected token", "expected ';'"), "syntax"),
        ((True, False, "undefined name", "undefined: x"), "undeclared name"),
        ((True, False, "mismatched types", '"fmt" imported and not used'), "unused import"),
        ((True, False, "mismatched types", "x declared but not used"), "unused variable"),
        ((True, False, "mismatched types", "declared and not used: x"), "unused variable"),
        ((True, False, "mismatched types", "not enough return values"), "return count"),
        ((True, False, "mismatched types", "missing return"), "return count"),
        ((True, False, "mismatched types", "cannot use x (variable of type int)"), "types"),
        ((True, None, "other", "a test failed"), "other"),
    ],
)
def test_errors_have_the_class_that_people_know(said, name):
    assert error_class(*said) == name


# ---- shards ----


def test_a_stopped_job_goes_on_and_leaves_what_an_uninterrupted_one_does(tmp_path):
    import torch

    calls = []

    def make(items, stop_at=None):
        calls.append(list(items))
        if stop_at in items:
            raise KeyboardInterrupt
        rows = [tiny_go.record(number) for number in items]
        for row in rows:
            row["problem"]["body"] = str(torch.rand(1).item())
        return rows, Counter(made=len(rows))

    numbers = list(range(7))
    whole = write_shards(tmp_path / "a", {"n": 7}, numbers, make, seed=3, size=3)
    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "b", {"n": 7}, numbers, lambda items: make(items, 4), seed=3, size=3)
    with pytest.raises(UsageError, match="no finished folder"):
        shard_files(tmp_path / "b")
    calls.clear()
    report = write_shards(tmp_path / "b", {"n": 7}, numbers, make, seed=3, size=3)
    assert calls == [[3, 4, 5], [6]] and report["made"] == whole["made"] == 7
    assert read_shards(tmp_path / "a") == read_shards(tmp_path / "b")
    with pytest.raises(UsageError, match="n=7, now 8"):
        write_shards(tmp_path / "b", {"n": 8}, numbers, make)


# ---- the commands ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    tiny_go.model(repair_mode="edits").save_pretrained(folder / "model")
    tiny_go.model().save_pretrained(folder / "rewriting")
    for name in ("model", "rewriting"):
        tiny_go.tokenizer().save_pretrained(folder / name)
    tiny_go.write(folder / "plain.jsonl", [tiny_go.record(number) for number in range(6)])
    tiny_go.write(folder / "held_out.jsonl", [tiny_go.record(number) for number in range(6, 9)])
    tiny_go.write(folder / "trajectories.jsonl", [tiny_go.record(number, "cd") for number in range(6)])
    return folder


def command(*args, code=0):
    result = CliRunner().invoke(app, ["data", *map(str, args)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_commands_write_failures_and_fixes(folder, tmp_path):
    sampling = ("--validator", "tree-sitter", "--max-code-tokens", 12, "--shard-size", 2)
    model, records = folder / "model", folder / "plain.jsonl"
    first = command(
        "go-failures", model, "--records", records, "--limit", 4, "--out", tmp_path / "f", *sampling, "--json"
    )
    assert json.loads(first.stdout)["attempts"] == 4
    failures = list(read_records(shard_files(tmp_path / "f")))
    assert len(failures) == json.loads(first.stdout).get("failures", 0)
    rows = tiny_go.write(tmp_path / "failing.jsonl", [failing(number) for number in range(3)])
    fixes = command(
        "go-fixes", model, "--failures", rows, "--out", tmp_path / "x", *sampling, "--samples", 2, "--json"
    )
    assert json.loads(fixes.stdout)["tries"] == 6
    again = command("go-fixes", model, "--failures", rows, "--out", tmp_path / "x", *sampling, code=2)
    assert "samples=2, now 4" in " ".join(again.stderr.split())
    refused = command("go-failures", folder / "rewriting", "--records", records, "--out", tmp_path / "r", code=2)
    assert "--repair_mode edits" in " ".join(refused.stderr.split())


def test_rounds_train_in_between_and_judge_on_the_same_failures(folder, tmp_path):
    out = tmp_path / "rounds"
    options = [
        "--records", folder / "plain.jsonl", "--held-out", folder / "held_out.jsonl", "--out", out, "--rounds", 1,
        "--train-data", folder / "trajectories.jsonl", "--steps", 2, "--breaker-steps", 2,
        "--validator", "tree-sitter", "--max-code-tokens", 12, "--fix-samples", 1,
        "--extra", "--per_device_train_batch_size 2 --logging_steps 1 --max_length 512",
    ]  # fmt: skip
    shown = command("go-rounds", folder / "model", *options).stdout
    result = json.loads((out / "rounds.json").read_text())
    held_out = read_shards(out / "held_out")
    assert [score["round"] for score in result["scores"]] == [0, 1]
    assert all(score["failures"] == len(held_out) > 0 for score in result["scores"])
    trained = json.loads((out / "round-1" / "fixer" / "results.json").read_text())
    assert trained["steps"] == 2 and result["model"] == str(out / "round-1" / "fixer")
    backwards = list(read_records(out / "round-1" / "breaker.jsonl"))
    assert len(backwards) == 6 and all(row["solution"]["code"].endswith("return a + \n}\n") for row in backwards)
    assert (out / "rounds.png").stat().st_size > 1000 and "round 1" in shown
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    command("go-rounds", folder / "model", *options)  # nothing is left to do
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    changed = command("go-rounds", folder / "model", *options, "--steps", 3, code=2)
    assert "steps=2, now 3" in " ".join(changed.stderr.split())


def test_the_plot_shows_the_classes_that_every_round_has(tmp_path):
    part = {"failures": 4, "mended": 0.5}
    scores = [{"round": n, "mended": n / 4, "by_class": {"syntax": part, "types": part}} for n in range(3)]
    assert plot_rounds(scores, tmp_path / "p.png").stat().st_size > 1000
