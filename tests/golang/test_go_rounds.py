"""Failures, fixes and rounds of break-it-fix-it, on models whose answers are known and on a tiny one."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import tiny_go
from scripted_go import Scripted
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.data.records import read_records
from hrm_hf.golang.data.trajectories import failed_record
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.golang.rounds import learned
from hrm_hf.golang.rounds import run as rounds_run
from hrm_hf.golang.rounds.failures import broken_solutions, problem_of, sampled_failures, to_be_broken
from hrm_hf.golang.rounds.fixes import changed_share, collected_fixes, fixer_success
from hrm_hf.golang.rounds.scores import compared, described, plot_rounds
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
    dropped = {"reference rejected": 0, "passed": 2, "repeated": 2, "plan unreadable": 0, "too long": 0}
    assert counts == {"records": 3, "attempts": 6, "failures": 2, **dropped}
    assert [problem_of(record["id"]) for record in made] == ["sum.go:0", "sum.go:2"]


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
    dropped = {"reference rejected": 0, "passed": 1, "edits unchanged": 1, "edits not found": 1}
    assert counts == {"records": 4, "attempts": 4, "failures": 1, **dropped}


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
    reasons = {"does not pass": 2, "shortened": 2, "changes too much": 2, "edits unchanged": 2}
    assert counts == {"failures": 5, "fixes": 1, "kept": 1, "tries": 9, "reference rejected": 0, **reasons}
    loose, _ = collected_fixes(writer, builder, rows, TreeSitterValidator(), **HOW, max_change=1.0)
    assert [record["id"] for record in loose] == ["sum.go:0@fix", "sum.go:3@fix"]


def test_a_repair_that_nobody_has_looked_at_is_not_kept():
    class Idle(TreeSitterValidator):
        """Passes over what has a 7 in it, as over code that is too long, or that took too long."""

        def __call__(self, codes):
            return [said if "7" not in code else Feedback() for code, said in zip(codes, super().__call__(codes))]

    script = [{"plan": plan(0), "body": "", "repair": MEND}]
    made, counts = collected_fixes(*opened([failing(0)], script), [failing(0)], Idle(), **HOW)
    assert not made and counts["does not pass"] == 2 and counts["fixes"] == 0


def test_success_is_counted_by_class_of_error_over_all_failures():
    rows = [failing(0), failing(1), failing(2)]
    rows[1]["attempts"][0]["feedback"] |= {"syntax_ok": True, "types_ok": False, "category": "undefined name"}
    rows[2]["attempts"][0]["code"] = rows[2]["code_prefix"] + BROKEN * 200  # too long to be asked about
    script = [{"plan": plan(0), "body": "", "repair": MEND}] * 2
    figures = fixer_success(*opened(rows, script), rows, TreeSitterValidator())
    assert figures["failures"] == 3 and figures["mended"] == pytest.approx(2 / 3)
    assert figures["by_class"]["syntax"]["failures"] == 2 and figures["by_class"]["syntax"]["mended"] == 0.5
    assert figures["by_class"]["undeclared name"]["mended"] == 1.0 and figures["dropped"]["too long"] == 1
    assert [row["mended"] for row in figures["rows"]] == [True, True, False]
    assert figures["outcomes"] == {"mended": 2, "not asked": 1}


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


# ---- what is learned, and scores ----


def pair(number, body=BROKEN):
    record = failing(number, body)
    return {**record, "id": f"{record['id']}@own0@fix"}


def test_new_pairs_are_learned_once_and_beside_so_many_old_records(monkeypatch):
    monkeypatch.setattr(learned, "LEAST_REPLAY", 3)
    old = [tiny_go.record(number, "cd" if number % 2 else "") for number in range(20, 40)]
    fixes, broken = [pair(0), pair(1), pair(0)], [pair(2), pair(3, "\n\treturn [\n}\n")]
    records = learned.fixer_pairs(fixes, broken, old, 2.0, 0)
    assert [record["id"] for record in records[8:]] == [record["id"] for record in [*fixes[:2], *broken]]
    assert len({record["id"] for record in records[:8]}) == 8 and all(record in old for record in records[:8])
    assert (
        records == learned.fixer_pairs(fixes, broken, old, 2.0, 0) != learned.fixer_pairs(fixes, broken, old, 2.0, 1)
    )
    assert len(learned.fixer_pairs(fixes, broken, old, 0.1, 0)) == 3 + 4  # the least
    assert learned.fixer_pairs([], [], old, 2.0, 0) != [] == learned.fixer_pairs([], [], old, 0.0, 0)
    backwards = learned.breaker_pairs(fixes, old, 2.0, 0)
    assert len(backwards) == 4 + 2  # of the old ones those alone that have an attempt to break into
    assert all(record["solution"]["code"].endswith(("return (\n}\n", "return a + \n}\n")) for record in backwards)
    assert all(record["attempts"][0]["decision"] == "CONTINUE" for record in backwards)


def score(number, mended):
    rows = [
        {"id": f"p{index // 2}@own{index % 2}", "class": "syntax", "mended": one} for index, one in enumerate(mended)
    ]
    part = {"failures": len(rows), "mended": sum(mended) / len(rows), "mended_interval": [0.1, 0.9]}
    return {"round": number, **part, "by_class": {"syntax": part}, "rows": rows}


def test_rounds_are_compared_on_the_same_failures_by_problem():
    scores = compared([score(0, [True, False, False, False]), score(1, [True, True, True, True])])
    assert "rows" not in scores[0] and "gain" not in scores[0]
    gain = scores[1]["gain"]
    assert (gain["difference"], gain["only_first"], gain["only_second"]) == (0.75, 3, 0)
    assert gain["mcnemar_p"] == pytest.approx(0.25)  # 2 / 2^3
    assert gain["interval"] == [0.5, 1.0]  # of two problems, with gains of a half and of one
    assert described(scores[0]) == "25.0% [10.0%, 90.0%] of 4 (syntax 25.0% [10.0%, 90.0%] of 4)"
    assert described(scores[1]).endswith("; +75.0% [+50.0%, +100.0%], McNemar p 0.25")


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
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_length: 512\n")
    for option, value, said in (("--steps", 3, "steps=2, now 3"), ("--recipe", recipe, "recipe=None, now ")):
        changed = command("go-rounds", folder / "model", *options, option, value, code=2)
        assert said in " ".join(changed.stderr.split())


def test_what_is_judged_on_may_not_be_learned_from(folder, tmp_path):
    options = ["--records", folder / "plain.jsonl", "--out", tmp_path / "r"]
    refused = command("go-rounds", folder / "model", "--held-out", folder / "trajectories.jsonl", *options, code=2)
    assert "'sum.go:0' has the solution of 'sum.go:0'" in " ".join(refused.stderr.split())
    assert not (tmp_path / "r").exists()


# ---- two rounds of a model whose answers are known ----


class StopError(Exception):
    """The run is killed here."""


@pytest.fixture
def staged(folder, monkeypatch):
    """Rounds in which training copies the model: the first mends one failure, later ones all, breakers break one.

    `staged(out, stop)` runs them and raises StopError at the event of that number, a writing or a training; it returns
    the result and the number of events.
    """
    damage = [Edit("\treturn a + b + 1", "\treturn (")]
    events = Counter()

    def happen():
        events["seen"] += 1
        if events["seen"] == events["stop"]:
            raise StopError

    class Watched(Scripted):
        def generate(self, *args, **kwargs):
            happen()
            return super().generate(*args, **kwargs)

    def open_writer(model, sampling):
        kind = Path(model).name
        rows = [tiny_go.record(number) for number in range(9)]
        script = [
            {"plan": plan(n), "body": BROKEN, "repair": damage if kind == "breaker" else [] if n == 8 else MEND}
            for n in range(9)
        ]
        if kind == "fixer":
            script[8]["repair"] = MEND
        writer = Writer(Watched(rows, script), tiny_go.tokenizer(), batch_size=4, max_length=512, progress=False)
        return writer, tiny_go.builder(repairs="edits")

    def train(python, training, *flags, out):
        happen()
        given = dict(zip(flags[::2], flags[1::2]))
        shutil.copytree(given["--model_name_or_path"], given["--output_dir"], dirs_exist_ok=True)
        rows = len(list(read_records(given["--train_data"])))
        (given["--output_dir"] / "results.json").write_text(json.dumps({"data": {"train": {"records": rows}}}))

    monkeypatch.setattr(rounds_run, "open_writer", open_writer)
    monkeypatch.setattr(rounds_run, "run_process", train)
    sampling = rounds_run.Sampling(validator="tree-sitter", shard_size=4)

    def run(out, stop=0):
        events["seen"], events["stop"] = 0, stop
        fields = {"records": [folder / "plain.jsonl"], "held_out": [folder / "held_out.jsonl"], "fix_samples": 1}
        model = str(folder / "model")
        result = rounds_run.Rounds(
            model, out=out, data=[folder / "trajectories.jsonl"], sampling=sampling, **fields
        ).run()
        return result, events["seen"]

    return run


def written(out):
    """All texts of a run, by their places."""
    files = [file for file in out.rglob("*") if file.suffix in (".json", ".jsonl") and "er/" not in str(file)]
    return {str(file.relative_to(out)): file.read_text().replace(str(out), "OUT") for file in files}


def test_two_rounds_judge_on_the_same_failures_and_learn_from_all_pairs_so_far(staged, tmp_path):
    result, _ = staged(tmp_path / "r")
    mended = [[row["mended"] for row in json.loads(Path(tmp_path / "r" / f"score-{n}.json").read_text())["rows"]]
              for n in range(3)]  # fmt: skip
    assert mended == [[True, True, False], [True] * 3, [True] * 3]
    assert [score["failures"] for score in result["scores"]] == [3, 3, 3]
    assert [score.get("gain", {}).get("only_first") for score in result["scores"]] == [None, 1, 1]
    for name in ("round-1", "round-2"):
        counts = result["counts"][name]
        assert (counts["failures"]["failures"], counts["fixes"]["fixes"], counts["broken"]["failures"]) == (6, 6, 1)
        assert counts["broken"]["edits not found"] == 5 and counts["broken"]["attempts"] == 6
        # The repairs of the second round are those of the first, and six old trajectories are beside them.
        assert counts["breaker"]["records"] == 6 + 6 and counts["fixer"]["records"] == 6 + 6 + 1
    assert result["model"].endswith("round-2/fixer") and (tmp_path / "r" / "rounds.png").stat().st_size > 1000


def test_rounds_that_were_stopped_anywhere_leave_what_uninterrupted_ones_do(staged, tmp_path):
    _, events = staged(tmp_path / "whole")
    expected = written(tmp_path / "whole")
    assert {
        "rounds.json",
        "score-2.json",
        "round-2/fixes/00001.jsonl",
        "round-2/broken/report.json",
    } <= expected.keys()
    for stop in range(1, events + 1, 3):
        out = tmp_path / str(stop)
        with pytest.raises(StopError):
            staged(out, stop)
        assert not (out / "rounds.json").exists()
        _, left = staged(out)
        assert left < events or stop < 4
        assert written(out) == expected
        shutil.rmtree(out)


def test_the_plot_shows_the_classes_that_every_round_has(tmp_path):
    scores = [score(number, [True] * number + [False] * (4 - number)) for number in range(3)]
    scores[1]["by_class"]["types"] = scores[1]["by_class"]["syntax"]  # of one round alone
    assert plot_rounds(scores, tmp_path / "p.png").stat().st_size > 1000
