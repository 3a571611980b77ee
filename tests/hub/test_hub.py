"""Push and pull in one process against a loopback Hub: uploaded files, rejected files, messages.

Referees: huggingface_hub's client and safetensors' reader. Processes that are killed and processes without the package
are in test_hub_round_trip.py, the command line in test_cli_hub.py.
"""

import json
import os
import re
import shutil
from pathlib import Path

import every
import pytest
import torch
from hub_here import NAME, TOKEN, point_at
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, file_download
from transformers import AutoModelForMaskedLM

from hrm_hf.hub import (
    PULL_RECORD,
    HubError,
    checkpoint_contents,
    pull_checkpoint,
    push_checkpoint,
    push_space,
    verify_checkpoint,
)
from hrm_hf.hub.manifests import find_corruption, read_manifest, run_id_of, write_manifest
from hrm_hf.hub.push import validate_weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint of each architecture, shared: no test changes it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for architecture in every.ARCHITECTURES:
        every.save(architecture, folder / architecture)
    every.save("hrm_puzzle", folder / "sharded", max_shard_size="20KB")
    return folder


def cut(file: Path, by: int) -> None:
    os.truncate(file, file.stat().st_size - by)


# ---- what goes into a checkpoint ----


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_uploaded_files_are_self_contained(architecture, saved):
    contents = checkpoint_contents(saved / architecture, NAME)
    auto_map = json.loads((saved / architecture / "config.json").read_text())["auto_map"]
    assert every.AUTO_CLASSES[architecture] in auto_map and "AutoModel" in auto_map and "AutoConfig" in auto_map
    assert {f"{name.split('.')[0]}.py" for name in auto_map.values()} <= contents.files.keys()
    assert {"config.json", "model.safetensors", "README.md", "LICENSE_CODE"} <= contents.files.keys()
    beside = {
        **{key: {"identifiers.json"} for key in every.PUZZLES},
        **{key: {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} for key in every.CAUSAL_LMS},
        **{key: {"preprocessor_config.json", "feature_extraction_cosmo.py"} for key in every.OF_MAPS},
    }
    assert beside[architecture] <= contents.files.keys()
    assert f'"{NAME}"' in contents.files["README.md"].decode()


def test_pushed_code_is_the_packages_and_the_folder_is_unchanged(puzzle):
    (puzzle / "act.py").write_text("# of long ago\n")
    (puzzle / "puzzle_layers.py").unlink()
    for name in ("mine.py", "lib/more.py"):
        (puzzle / name).parent.mkdir(exist_ok=True)
        (puzzle / name).write_text("x = 1\n")
    contents = checkpoint_contents(puzzle, NAME)
    assert "class ActCarry" in contents.files["act.py"].read_text() and "puzzle_layers.py" in contents.files
    assert (puzzle / "act.py").read_text() == "# of long ago\n" and not (puzzle / "README.md").exists()
    assert [note for note in contents.notes if re.match(r"act\.py: .*hf upload", note)]
    assert {"mine.py", "lib/"} == contents.left_out.keys() and "--include" in contents.left_out["mine.py"]
    assert {"mine.py", "lib/more.py"} <= checkpoint_contents(puzzle, NAME, include=("*.py",)).files.keys()


@pytest.mark.parametrize(
    ("architecture", "file", "field"),
    [("hrm_puzzle", "config.json", "auto_map"), ("hrm_puzzle", "config.json", "custom_pipelines"),
     ("hrm_lm", "config.json", "auto_map"), ("hrm_cosmo", "preprocessor_config.json", "auto_map")],
)  # fmt: skip
@pytest.mark.parametrize(
    "old", [None, {}, {"AutoTokenizer": ["mine.Tokenizer", None]}], ids=["none", "empty", "other"]
)
def test_missing_code_entries_of_an_older_package_are_added(architecture, file, field, old, saved, tmp_path):
    folder = shutil.copytree(saved / architecture, tmp_path / "model")
    assert not [note for note in checkpoint_contents(folder, NAME).notes if note.startswith(file)]
    config = json.loads((folder / file).read_text())
    complete = config.pop(field)
    (folder / file).write_text(json.dumps(config if old is None else config | {field: old}))
    contents = checkpoint_contents(folder, NAME)
    assert json.loads(contents.files[file]) == config | {field: (old or {}) | complete}
    assert [note for note in contents.notes if note.startswith(f"{file}: ") and field in note]


def test_pushed_training_checkpoint_matches_its_manifest(puzzle, tmp_path):
    (puzzle / "act.py").write_text("# of long ago\n")
    (puzzle / "config.json").write_text((puzzle / "config.json").read_text().replace("auto_map", "earlier_map"))
    (puzzle / "optimizer.pt").write_bytes(b"state")
    (puzzle / "notes.txt").write_text("stays behind")
    write_manifest(puzzle, "a" * 32)
    copy = tmp_path / "copy"
    for name, source in checkpoint_contents(puzzle, NAME, with_training_state=True).files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(source if isinstance(source, bytes) else source.read_bytes())
    assert find_corruption(copy) == [] and run_id_of(copy) == "a" * 32
    assert {"act.py", "config.json", "optimizer.pt"} <= read_manifest(copy).files.keys()


@pytest.mark.parametrize(
    ("architecture", "file"), [("hrm_lm", "generation_config.json"), ("hrm_cosmo", "preprocessor_config.json")]
)
def test_missing_configs_are_created_from_config_json(architecture, file, saved, tmp_path):
    folder = shutil.copytree(saved / architecture, tmp_path / "model")
    kept = json.loads((folder / file).read_text())
    (folder / file).unlink()
    contents = checkpoint_contents(folder, NAME)
    assert json.loads(contents.files[file]) == kept
    assert f"{file}: created from config.json" in contents.notes


def test_language_model_without_a_tokenizer_is_rejected(saved, tmp_path):
    folder = shutil.copytree(saved / "hrm_lm", tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match=r"has no tokenizer.*save_pretrained"):
        checkpoint_contents(folder, NAME)


def test_training_state_is_pushed_only_on_request(puzzle):
    state = ("optimizer.pt", "training_args.bin", "raw_weights.safetensors", "act_state_0.pt", "checkpoint-5/x.json",
             "runs/events.out.tfevents.1", "rng_state_0.pth")  # fmt: skip
    for name in (*state, "recipe.yaml", "results.json", "training.png", "eval_fixed/results.json", "notes.txt"):
        (puzzle / name).parent.mkdir(exist_ok=True)
        (puzzle / name).write_text("task: sudoku" if name == "recipe.yaml" else "{}")
    contents = checkpoint_contents(puzzle, NAME)
    assert {"recipe.yaml", "results.json", "training.png", "eval_fixed/results.json"} <= contents.files.keys()
    assert not {*state, "notes.txt"} & contents.files.keys()
    assert "--with-training-state" in contents.left_out["optimizer.pt"]
    assert "--include" in contents.left_out["notes.txt"] and "checkpoint-5/" in contents.left_out
    everything = checkpoint_contents(puzzle, NAME, with_training_state=True, include=("*.txt",))
    assert {*state, "notes.txt"} <= everything.files.keys()


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("recipe.yaml", "hub_token: hf_" + "a1B2" * 9, "Hugging Face Token"),
        ("results.json", '{"key": "-----BEGIN RSA PRIVATE KEY-----"}', "Private Key"),
        ("trainer_state.json", f'{{"said": "{TOKEN}"}}', "logged in"),
    ],
)
def test_file_with_a_secret_is_rejected(file, text, kind, puzzle, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (puzzle / file).write_text(text)
    with pytest.raises(ValueError, match=rf"{file}: .*{kind}"):
        checkpoint_contents(puzzle, NAME)


def test_user_names_the_license_of_weights_and_code_keeps_ours(puzzle):
    unnamed = checkpoint_contents(puzzle, NAME)
    assert ModelCard(unnamed.files["README.md"].decode()).data.license == "unknown"
    assert any("states no license" in note for note in unnamed.notes)
    named = checkpoint_contents(puzzle, NAME, license="cc-by-4.0")
    text = named.files["README.md"].decode()
    assert ModelCard(text).data.license == "cc-by-4.0" and "The weights: cc-by-4.0" in text
    assert not any("states no license" in note for note in named.notes)
    assert b"applies to the code only" in named.files["LICENSE_CODE"]
    assert (Path(__file__).parents[2] / "LICENSE").read_bytes() in named.files["LICENSE_CODE"]


def test_packaged_license_equals_the_repositorys():
    root = Path(__file__).parents[2]
    assert (root / "hrm_hf" / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()


def test_an_adapter_goes_with_its_own_card(tmp_path):
    from safetensors.torch import save_file

    save_file({"lora_A": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"no README\.md"):
        checkpoint_contents(tmp_path, NAME)
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\n---\nan adapter\n")
    files = checkpoint_contents(tmp_path, NAME).files
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}


# ---- incomplete weights ----


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_truncated_weights_are_rejected(left, puzzle):
    file = puzzle / "model.safetensors"
    os.truncate(file, left if left >= 0 else file.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        validate_weights(puzzle)


def test_missing_and_truncated_shards_are_rejected(saved, tmp_path):
    folder = shutil.copytree(saved / "sharded", tmp_path / "sharded")
    files = validate_weights(folder)
    assert len(files) > 3 and files[0].name == "model.safetensors.index.json"
    cut(files[2], 1)
    with pytest.raises(ValueError, match=files[2].name):
        validate_weights(folder)
    files[2].unlink()
    with pytest.raises(ValueError, match=files[2].name):
        validate_weights(folder)
    shutil.copy(files[1], files[2])
    with pytest.raises(ValueError, match="two saves"):
        validate_weights(folder)
    files[0].unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        validate_weights(folder)


def test_folder_without_a_checkpoint_is_named(tmp_path, puzzle):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        validate_weights(tmp_path / "nowhere")
    (puzzle / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        validate_weights(puzzle)


# ---- push ----


def test_push_is_one_commit_of_a_complete_model(hub, puzzle):
    result = push_checkpoint(puzzle, NAME, message="first")
    assert hub.commits(NAME)[0] == result.commit and len(hub.commits(NAME)) == 2  # follows the initial one
    files = hub.files(NAME)
    assert {*result.files, ".gitattributes"} == files.keys()
    assert files["model.safetensors"] == (puzzle / "model.safetensors").read_bytes()
    assert result.url == f"{hub.url}/{NAME}" and result.bytes == sum(map(len, files.values())) - len(
        files[".gitattributes"]
    )
    assert push_checkpoint(puzzle, NAME).commit == result.commit  # nothing changed, so no new commit


def test_push_deletes_old_weight_files_of_another_layout(hub, saved, puzzle):
    push_checkpoint(saved / "sharded", NAME)
    assert "model.safetensors.index.json" in hub.files(NAME)
    push_checkpoint(puzzle, NAME)
    assert [name for name in hub.files(NAME) if "safetensors" in name] == ["model.safetensors"]
    push_checkpoint(saved / "sharded", NAME)
    assert "model.safetensors" not in hub.files(NAME)


def test_push_creates_a_branch_and_keeps_main(hub, puzzle):
    first = push_checkpoint(puzzle, NAME).commit
    (puzzle / "results.json").write_text("{}")
    second = push_checkpoint(puzzle, NAME, revision="longer-run").commit
    assert hub.commits(NAME)[0] == first
    assert hub.commits(NAME, revision="longer-run")[0] == second
    assert "results.json" in hub.files(NAME, "longer-run") and "results.json" not in hub.files(NAME)


def test_somebody_elses_commit_during_a_push_is_not_overwritten(hub, puzzle, monkeypatch):
    push_checkpoint(puzzle, NAME)
    upload = HfApi.preupload_lfs_files

    def somebody_else_first(self, *args, **kwargs):
        monkeypatch.setattr(HfApi, "preupload_lfs_files", upload)
        file = CommitOperationAdd("other.txt", b"other")
        HfApi().create_commit(NAME, [file], commit_message="other")
        return upload(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", somebody_else_first)
    (puzzle / "results.json").write_text("{}")
    with pytest.raises(HubError, match="changed org/model"):
        push_checkpoint(puzzle, NAME)
    assert "results.json" not in hub.files(NAME)
    push_checkpoint(puzzle, NAME)
    assert {"results.json", "other.txt"} <= hub.files(NAME).keys()


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "needs a token.*`hf auth login`"),
        ("hf_wrong", "rejected the token"),
        ("hf_test_read", "org/model .*role write"),
    ],
)
def test_push_with_a_wrong_token_is_explained(token, said, hub, puzzle, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(puzzle / "no_such_file"))
    with pytest.raises(HubError, match=said):
        push_checkpoint(puzzle, NAME, token=token)
    assert not hub.storage.repositories


@pytest.mark.parametrize("name", ["model", "a/b/c", "org/..", "org/with space", "/etc", "org/" + "n" * 120])
def test_invalid_repository_names_are_rejected(name, hub, puzzle):
    with pytest.raises(ValueError):
        push_checkpoint(puzzle, name)
    assert not hub.requests


def test_offline_mode_is_named(hub, puzzle, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for action in (lambda: push_checkpoint(puzzle, NAME), lambda: pull_checkpoint(NAME)):
        with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
            action()


def test_dropped_connection_during_push_is_retried_then_reported(hub, puzzle, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cut_after("/upload/", 1000, times=1)
    push_checkpoint(puzzle, NAME)  # tried again
    (puzzle / "results.json").write_text("{}")
    with open(puzzle / "model.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    before = hub.files(NAME)
    hub.cut_after("/upload/", 1000, times=1000)
    with pytest.raises(HubError, match="same command"):
        push_checkpoint(puzzle, NAME)
    assert hub.files(NAME) == before
    hub.faults.clear()
    push_checkpoint(puzzle, NAME)
    assert hub.files(NAME)["model.safetensors"][-4:] == b"abcd"


def test_a_space_needs_a_program_and_goes_in_one_commit(hub, tmp_path):
    space = tmp_path / "space"
    (space / "__pycache__").mkdir(parents=True)
    (space / "README.md").write_text("---\ntitle: Demo\nsdk: docker\n---\n")
    with pytest.raises(ValueError, match="sdk is 'docker'"):
        push_space(space, "org/demo")
    (space / "README.md").write_text("---\ntitle: Demo\nsdk: gradio\napp_file: app.py\n---\n")
    with pytest.raises(ValueError, match=r"has no app.py"):
        push_space(space, "org/demo")
    for name in ("app.py", "requirements.txt", ".env", "__pycache__/app.pyc"):
        (space / name).write_text("x")
    result = push_space(space, "org/demo")
    assert hub.files("org/demo", repo_type="space").keys() == {
        "README.md", "app.py", "requirements.txt", ".gitattributes",
    }  # fmt: skip
    assert result.url == f"{hub.url}/spaces/org/demo"
    assert hub.storage.find("space", "org/demo").sdk == "gradio"


# ---- pull ----


def test_pull_takes_one_commit_and_can_be_verified(hub, puzzle, tmp_path):
    pushed = push_checkpoint(puzzle, NAME)
    pulled = pull_checkpoint(NAME, tmp_path / "pulled")
    assert pulled.commit == pushed.commit
    on_hub = hub.files(NAME)
    assert {name: (pulled.path / name).read_bytes() for name in on_hub} == on_hub
    assert verify_checkpoint(pulled.path, NAME).files == len(on_hub)
    assert sorted(path.name for path in tmp_path.iterdir() if "pulled" in path.name) == ["pulled"]
    AutoModelForMaskedLM.from_pretrained(pulled.path)

    (pulled.path / "act.py").write_text("import os\n")
    (pulled.path / "README.md").unlink()
    (pulled.path / "more.py").write_text("")
    said = r"act\.py .*README\.md .*missing; more\.py "
    with pytest.raises(HubError, match=said):
        verify_checkpoint(pulled.path, NAME)


def test_an_older_commit_can_be_pulled_by_its_sha(hub, puzzle, tmp_path):
    first = push_checkpoint(puzzle, NAME).commit
    weights = (puzzle / "model.safetensors").read_bytes()
    every.model("hrm_puzzle", seed=3).save_pretrained(puzzle)
    push_checkpoint(puzzle, NAME)
    assert (pull_checkpoint(NAME).path / "model.safetensors").read_bytes() != weights
    assert (pull_checkpoint(NAME, revision=first).path / "model.safetensors").read_bytes() == weights
    old = pull_checkpoint(NAME, tmp_path / "old", revision=first)
    assert old.commit == first and (old.path / "model.safetensors").read_bytes() == weights


def test_pull_does_not_overwrite_other_files(hub, puzzle, tmp_path):
    push_checkpoint(puzzle, NAME)
    push_checkpoint(puzzle, "org/other")
    before = sorted(puzzle.iterdir())
    with pytest.raises(ValueError, match=r"out=.*other files"):
        pull_checkpoint(NAME, puzzle)
    assert sorted(puzzle.iterdir()) == before
    folder = pull_checkpoint("org/other", tmp_path / "other").path
    with pytest.raises(ValueError, match=r"out=.*org/other"):
        pull_checkpoint(NAME, folder)

    hub.requests.clear()
    assert pull_checkpoint("org/other", folder).commit == hub.commits("org/other")[0]  # only verified
    assert not [path for method, path in hub.requests if "/resolve/" in path]
    (puzzle / "results.json").write_text("{}")
    push_checkpoint(puzzle, "org/other")
    with pytest.raises(ValueError, match=r"out=.*org/other at"):
        pull_checkpoint("org/other", folder)
    assert not (folder / "results.json").exists()


def test_pull_rejects_corrupted_bytes(hub, puzzle, tmp_path):
    push_checkpoint(puzzle, NAME)
    entry = hub.storage.find("model", NAME).commit("main").tree["model.safetensors"]
    stored = hub.storage.object(entry.sha256)
    content = stored.read_bytes()
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for out in (tmp_path / "pulled", None):
        with pytest.raises(HubError, match=r"model.safetensors of org/model .*digest"):
            pull_checkpoint(NAME, out)
    assert not (tmp_path / "pulled").exists()
    stored.write_bytes(content)
    for out in (tmp_path / "pulled", None):
        assert (pull_checkpoint(NAME, out).path / "model.safetensors").read_bytes() == content


def test_an_interrupted_download_continues_with_the_same_command(hub, puzzle, tmp_path, monkeypatch):
    push_checkpoint(puzzle, NAME)
    with HubServer(tmp_path / "hub", token=TOKEN) as second:
        point_at(second, monkeypatch, tmp_path)
        second.cut_after("model.safetensors", (puzzle / "model.safetensors").stat().st_size // 2)
        # huggingface_hub sleeps before it retries; the server is closed during this sleep.
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: second.__exit__())
        with pytest.raises(HubError, match=r"connection"):
            pull_checkpoint(NAME, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    point_at(hub, monkeypatch, tmp_path)
    pull_checkpoint(NAME, tmp_path / "pulled")
    assert (tmp_path / "pulled" / "model.safetensors").read_bytes() == (puzzle / "model.safetensors").read_bytes()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422, 429, 503])
@pytest.mark.parametrize("action", ["push", "pull"])
def test_only_temporary_failures_suggest_a_retry(hub, puzzle, tmp_path, monkeypatch, status, action):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    push_checkpoint(puzzle, NAME)
    (puzzle / "results.json").write_text("{}")
    hub.lie("/api/models/org/model", status=status)
    with pytest.raises(HubError, match=r"Hub|token") as error:
        push_checkpoint(puzzle, NAME) if action == "push" else pull_checkpoint(NAME, tmp_path / "pulled")
    assert ("same command again" in str(error.value)) == (status == 429 or status >= 500)
    assert ("role write" in str(error.value)) == (status == 403 and action == "push")


def test_pull_of_a_missing_model_or_revision_is_explained(hub, puzzle, monkeypatch):
    push_checkpoint(puzzle, NAME, private=True)
    with pytest.raises(HubError, match=r"org/model .*'v9'"):
        pull_checkpoint(NAME, revision="v9")
    with pytest.raises(HubError, match=r"org/nothing .*your token"):
        pull_checkpoint("org/nothing")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(HubError, match=r"org/model .*no token"):
        pull_checkpoint(NAME)
    with pytest.raises(HubError, match="rejected the token"):
        pull_checkpoint(NAME, token="hf_wrong")
    assert pull_checkpoint(NAME, token=hub.read_token).files


def test_a_folder_without_a_record_is_verified_against_a_named_revision(hub, puzzle, tmp_path):
    commit = push_checkpoint(puzzle, NAME).commit
    folder = pull_checkpoint(NAME, tmp_path / "pulled").path
    (folder / PULL_RECORD).write_text("[1]")
    with pytest.raises(ValueError, match="revision=None"):
        verify_checkpoint(folder, NAME)
    assert verify_checkpoint(folder, NAME, revision="main").commit == commit
