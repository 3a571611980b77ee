"""`hrm-hf go` and `hrm-hf demo-go` as a user calls them."""

import io
import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import tiny_go
import tiny_lm
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang import GoNotFoundError, find_go
from hrm_hf.golang.options import DemoGo
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM
from hrm_hf.models.processing_hrm_go_coder import Feedback
from hrm_hf.models.refinement_hrm_go_coder import Attempt, RefinementOutput


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coder")
    tiny_go.writer(max_position_embeddings=256).save_pretrained(folder)
    tiny_go.tokenizer().save_pretrained(folder)
    return str(folder)


def invoke(*arguments):
    return CliRunner().invoke(app, ["go", *arguments, "--max-new-tokens", "8", "--validator", "tree-sitter"])


def test_every_attempt_is_shown_with_plan_verdict_and_decision(coder):
    shown = invoke(coder, "Add two numbers.", "--prefix", "func Add(a, b int) int {", "--max-iterations", "2").stdout
    attempts = int(re.search(r"(\d+) attempts?, stopped by", shown)[1])
    first_lines = re.findall(r"^func Add\(a, b int\) int {", shown, re.MULTILINE)
    assert len(first_lines) == shown.count("decision: ") == attempts
    assert shown.count("validator: ") == shown.count("plan ") == attempts and "# Add two numbers." in shown


ADD = ("Add two numbers.", "--prefix", "func Add(a, b int) int {", "--max-iterations", "2", "--threshold", "1")


def test_the_first_attempt_is_streamed_and_not_shown_again(coder):
    first, second = json.loads(invoke(coder, *ADD, "--json").stdout)["attempts"][0]
    shown = invoke(coder, *ADD, "--stream").stdout
    assert shown.startswith(f"\n# Add two numbers.\n{first['code']}")
    about_first, about_second = shown.split("plan 1")[1].split("plan 2")
    assert first["code"] not in about_first and second["code"] in about_second
    assert shown.count("plan ") == shown.count("validator: ") == shown.count("decision: ") == 2
    piped = invoke(coder, *ADD).stdout  # not a terminal: everything is printed at once, for scripts
    assert piped == invoke(coder, *ADD, "--no-stream").stdout and piped.index("plan 1") < piped.index(first["code"])


def test_a_repair_is_shown_with_its_difference_from_the_attempt_before(coder):
    prefix = "func Add(a, b int) int {"
    arguments = ("Add two numbers.", "--prefix", prefix, "--max-iterations", "2", "--threshold", "1")
    codes = [attempt["code"] for attempt in json.loads(invoke(coder, *arguments, "--json").stdout)["attempts"][0]]
    shown = invoke(coder, *arguments).stdout
    assert len(set(codes)) == 2
    assert shown.count("--- attempt 1\n+++ attempt 2\n@@") == 1 and "attempt 3" not in shown
    assert all(f"\n{sign}{code.splitlines()[0]}\n" in shown for sign, code in zip("-+", codes))


def test_json_completions_begin_with_their_prefixes(coder):
    prefixes = ["func A() int {", "func B() {"]
    result = invoke(coder, "One.", "Two.", "--prefix", prefixes[0], "--prefix", prefixes[1], "--json")
    answer = json.loads(result.stdout)
    assert [code.startswith(prefix) for code, prefix in zip(answer["codes"], prefixes)] == [True, True]
    assert [len(one) for one in answer["attempts"]] == answer["iterations"]


def test_out_file_contains_the_printed_json(coder, tmp_path):
    result = invoke(coder, "One.", "--max-iterations", "1", "--json", "--out", str(tmp_path / "code.json"))
    assert json.loads((tmp_path / "code.json").read_text()) == json.loads(result.stdout)


def test_prompts_can_come_from_records(coder, tmp_path):
    records = tiny_go.write(tmp_path / "test.jsonl", tiny_go.records(9))
    shown = invoke(coder, "--records", str(records), "--limit", "2", "--max-iterations", "1")
    assert shown.exit_code == 0 and shown.stdout.count("1 attempt, stopped by") == 2


def test_sampling_depends_on_the_seed_alone(coder):
    sampled = ["Add.", "--temperature", "1.5", "--max-iterations", "1", "--json", "--seed"]
    first, same, other = (invoke(coder, *sampled, seed).stdout for seed in "112")
    assert first == same != other


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ((), "PROMPTS"),
        (("a", "b", "--prefix", "x"), "--prefix"),
        (("a", "--records", __file__), "PROMPTS"),
        (("--records", "missing.jsonl"), "--records"),
        (("a", "--repair"), "--repair"),
        (("a", "--json", "--stream"), "--stream"),
        (("a", "b", "--stream"), "--stream"),
    ],
)
def test_bad_usage_names_the_option(coder, arguments, option):
    result = invoke(coder, *arguments)
    assert result.exit_code == 2 and f"Invalid value for {option}" in result.output


def test_repair_shows_only_records_that_the_model_repairs(coder, tmp_path, monkeypatch):
    plan, broken, fixed = (
        {"intent": "ADD", "targets": [], "steps": []},
        "func A() {\n\treturn (\n}",
        "func A() {\n\treturn\n}",
    )
    failed = Attempt(broken, plan, Feedback(False, line=2, category="other", message="m"), "CONTINUE", 0.1, 9)
    passed = Attempt(fixed, plan, Feedback(True), "DONE", 0.9, 7)
    emptied = replace(passed, code="func A() {\n}")
    asked = []

    def write(self, prompts, **options):
        asked.append((len(prompts), options["temperature"]))
        rows = [[failed, emptied] if "Add8" not in prompt else [failed, passed] for prompt in prompts]
        return RefinementOutput(
            [row[-1].code for row in rows], [[""]] * len(rows), rows, [2] * len(rows), ["done"] * len(rows)
        )

    monkeypatch.setattr(HrmGoCoderForCausalLM, "generate_with_refinement", write)
    file = tiny_go.write(tmp_path / "r.jsonl", [tiny_go.record(number) for number in range(10)])
    command = (coder, "--records", str(file), "--repair")
    shown = invoke(*command).stdout
    assert asked == [(8, 0.8), (2, 0.8)]
    assert shown.count("# Add") == 1 and "# Add8 returns" in shown and "-\treturn (\n+\treturn\n" in shown
    tiny_go.write(file, tiny_go.records(3))
    assert "repaired none" in invoke(*command).stdout
    assert json.loads(invoke(*command, "--json").stdout)["attempts"] == []


def test_other_architectures_are_rejected_by_name(tmp_path):
    tiny_lm.model("llama").save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["go", str(tmp_path), "x"])
    assert result.exit_code == 2 and "is a model of type llama; expected a Go coder" in result.output


@pytest.mark.slow
@pytest.mark.external
def test_the_demo_goes_from_sources_to_repaired_code(tmp_path, capfd, monkeypatch):
    from hrm_hf.golang import demo

    monkeypatch.setattr(demo, "READABLE", math.inf)  # after four steps, no code is readable
    try:
        std = find_go().root / "src"
    except GoNotFoundError:
        pytest.skip("Go is not installed")
    for package in ("bufio", "bytes", "container", "encoding", "errors", "flag", "fmt", "html", "io", "path", "sort"):
        shutil.copytree(std / package, tmp_path / "src" / package)
    out = tmp_path / "demo"
    options = DemoGo(source=str(tmp_path / "src"), minutes=0.1, vocab_size=1024, out=out)
    assert demo.run_demo(replace(options, extra="--max_steps 4 --max_eval_samples 4"))["out"] == str(out)
    said = capfd.readouterr().out
    assert len(re.findall("attempts?, stopped by", said)) == 3
    written = {"results.json", "training.png", "recipe.yaml", "model.safetensors", "tokenizer.json"}
    assert written <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize(("bits", "minutes", "written"), [(2.31, 3, ["--limit 1 "]), (1.7, 20, ["test", "--repair"])])
def test_demo_uses_its_minutes_and_shows_code(tmp_path, monkeypatch, bits, minutes, written):
    """All programs are stubs: a training step takes two seconds, and the run measures `bits` bits per byte."""
    from hrm_hf.golang import demo

    started = []

    def note(*command, out=None):
        started.append(" ".join(map(str, command[1:])))
        if "--output_dir" in started[-1]:
            (tmp_path / "results.json").write_text(json.dumps({"metrics": {"bits_per_byte": bits}}))

    monkeypatch.setattr(demo, "run_process", note)
    monkeypatch.setattr(demo, "seconds_per_step", lambda vocab_size: 2.0)
    monkeypatch.setenv("GO", str(tmp_path))  # no Go command
    with pytest.raises(GoNotFoundError, match="GO="):
        demo.run_demo(DemoGo(source="std", out=tmp_path))
    assert started == []
    result = demo.run_demo(DemoGo(source=str(tmp_path), minutes=minutes, out=tmp_path), said := io.StringIO())
    assert (result["bits_per_byte"], result["readable"]) == (bits, bits < 2)
    assert ("undertrained: 2.31 bits per byte" in said.getvalue()) == (bits > 2)
    assert 0.3 * minutes * 30 <= result["steps"] <= 0.95 * minutes * 30
    assert [" data go" in command for command in started] == [True, True, False] + [False] * len(written)
    assert all(options in command for options, command in zip(written, started[3:], strict=True))
