"""`hrm-hf push` and `hrm-hf pull` against a loopback Hub, in one process."""

import json

import pytest
from hub_here import NAME, call
from huggingface_hub.cli.discussions import discussions_cli


def test_dry_run_lists_files_and_uploads_nothing(hub, puzzle):
    (puzzle / "optimizer.pt").write_text("x")
    said = call("push", puzzle, NAME, "--dry-run").stdout
    assert "model.safetensors" in said and "not pushed: optimizer.pt (training state" in said
    assert "note: README.md states no license" in said
    plan = json.loads(call("push", puzzle, NAME, "--dry-run", "--json", "--license", "mit").stdout)
    assert plan["files"]["model.safetensors"] == (puzzle / "model.safetensors").stat().st_size
    assert plan["bytes"] == sum(plan["files"].values()) and not plan["notes"]
    assert not hub.requests


def test_a_private_model_is_pushed_to_a_branch_pulled_and_verified(hub, puzzle, tmp_path):
    options = ("--private", "--license", "apache-2.0", "--message", "first", "--revision", "trial")
    pushed = json.loads(call("push", puzzle, NAME, *options, "--json").stdout)
    repository = hub.storage.find("model", NAME)
    assert repository.private and repository.commit("trial").title == "first"
    assert b"license: apache-2.0" in hub.files(NAME, "trial")["README.md"]
    pull = ("pull", NAME, "--out", tmp_path / "pulled", "--revision", "trial")
    pulled = json.loads(call(*pull, "--json").stdout)
    assert pulled["commit"] == pushed["commit"] and pulled["path"] == str(tmp_path / "pulled")
    said = call(*pull, "--verify").stdout
    assert f"verified: {tmp_path / 'pulled'}" in said and f"commit: {pushed['commit']}" in said


def test_proposed_push_explains_how_to_pull_and_merge_it(hub, puzzle, tmp_path):
    call("push", puzzle, NAME)
    (puzzle / "results.json").write_text("{}")
    said = call("push", puzzle, NAME, "--create-pr").stdout
    assert f"url: {hub.url}/{NAME}/discussions/1\n" in said and "revision: refs/pr/1\n" in said
    assert f"`hrm-hf pull {NAME} --revision refs/pr/1`" in said
    pulled = call("pull", NAME, "--revision", "refs/pr/1", "--out", tmp_path / "pulled").stdout
    assert hub.commits(NAME, revision="refs/pr/1")[0] in pulled and (tmp_path / "pulled" / "results.json").exists()
    assert "results.json" not in hub.files(NAME)
    (puzzle / "results.json").write_text("[]")
    more = json.loads(call("push", puzzle, NAME, "--revision", "refs/pr/1", "--json").stdout)
    assert (more["url"], more["revision"]) == (f"{hub.url}/{NAME}/discussions/1", "refs/pr/1")

    assert f"`hf discussions merge {NAME} 1`" in said
    discussions_cli.main(["merge", NAME, "1", "--yes"], standalone_mode=False)
    assert hub.files(NAME)["results.json"] == b"[]"


def test_space_is_built_from_models_or_pushed_unchanged(hub, puzzle, tmp_path):
    pytest.importorskip("gradio")
    call("push", "--space", puzzle, "org/demo", "--embed", "--title", "Boards")
    files = hub.files("org/demo", repo_type="space")
    assert b"title: Boards" in files["README.md"] and "app.py" in files and "requirements.txt" in files
    assert files["models/puzzle/model.safetensors"] == (puzzle / "model.safetensors").read_bytes()
    folder = tmp_path / "space"
    folder.mkdir()
    for name in ("README.md", "app.py", "requirements.txt"):
        (folder / name).write_bytes(files[name])
    call("push", "--space", folder, "org/second")
    assert hub.files("org/second", repo_type="space")["app.py"] == files["app.py"]
    (folder / "app.py").write_bytes(files["app.py"] + b"\n# proposed\n")
    said = call("push", "--space", folder, "org/second", "--create-pr").stdout
    assert "/spaces/org/second/discussions/1" in said and "hf download --repo-type space org/second" in said
    (folder / "app.py").write_bytes(files["app.py"] + b"\n# proposed again\n")
    call("push", "--space", folder, "org/second", "--revision", "refs/pr/1")
    assert hub.files("org/second", "refs/pr/1", "space")["app.py"].endswith(b"# proposed again\n")
    assert hub.files("org/second", repo_type="space")["app.py"] == files["app.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("push", "a", "b", NAME), "sources=['a', 'b']"),
        (("push", "a", NAME, "--title", "x"), "only valid with --space"),
        (("push", "--space", "a", NAME, "--license", "mit"), "not valid with --space"),
        (("pull", NAME, "--verify"), "out=None"),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_option(arguments, said):
    assert said in " ".join(call(*arguments, status=2).stderr.replace("│", " ").split())


@pytest.mark.parametrize("command", ["push", "pull"])
def test_help_has_an_example(command):
    assert f"hrm-hf {command}" in call(command, "--help").stdout
