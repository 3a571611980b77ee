"""Hostile and corrupted checkpoints: a resume names the fault, runs no code of the folder and does not train.

The manifest detects corruption. If an attacker also rewrites the manifest (`write_manifest` here), the reader of each
file must detect that it does not belong to this run. Referees: a file that a pickle would create, and the run's
folder.
"""

import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_lm
import torch
import torch.distributed.checkpoint as shards
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hrm_hf.hub.manifests import (
    MANIFEST,
    CheckpointError,
    find_corruption,
    resolve_checkpoint,
    validate_plain_metadata,
    write_manifest,
)
from hrm_hf.io.state_dicts import read_stored_model
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.trainer import NonFiniteError


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@functools.cache
def boards() -> PuzzleRows:
    rows = PuzzleRows(generated_sudoku(4, num_train=24, num_test=0)[0]["train"])
    rows.puzzle_identifiers = np.arange(24) % tiny.PUZZLES
    return rows


def trainer(folder, **options) -> PuzzleTrainer:
    """Return a trainer of two steps that saves all files a checkpoint may have, with carry and averaged weights."""
    defaults = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2,
        "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1, "ema_rate": 0.9,
        "logging_steps": 1, "warmup_steps": 1,
    }  # fmt: skip
    return PuzzleTrainer(tiny.model("hrm"), PuzzleTrainingArguments(**{**defaults, **options}), train_dataset=boards())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    trainer(folder).train()
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy of a run with two steps and two checkpoints."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def refused(run: Path, error=CheckpointError) -> str:
    """Resume from the newest checkpoint, which must fail; return the message on one line."""
    one = trainer(run, max_steps=3)
    with pytest.raises(error) as raised:
        one.train("last")
    assert not (run / "checkpoint-3").exists() and one.state.global_step in (0, 2)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 1500
    return message


# ---- corruption that the manifest detects ----

CODE = "modeling_hrm_puzzle.py"  # one of the model's code files
FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin",
    "config.json", "act_state_0.pt", "weight_average.safetensors", CODE, MANIFEST,
)  # fmt: skip


def test_bit_flip_cases_cover_every_checkpoint_file(saved):
    names = {file.name for file in (saved / "checkpoint-2").iterdir()}
    assert {name for name in names if not name.endswith(".py")} | {CODE} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_is_detected_and_last_complete_falls_back(run, name):
    file = run / "checkpoint-2" / name
    whole = file.read_bytes()
    for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 2}:  # the last byte of JSON may be a newline
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="checkpoint-2 is corrupted") as e:
            resolve_checkpoint(run, "last")
        assert name in str(e.value)
        assert resolve_checkpoint(run, "last-complete") == str(run / "checkpoint-1")


def listing(**files) -> str:
    return json.dumps(files)


def signed(run="a", **entries) -> str:
    """Return a manifest with a valid checksum, and with these entries or sizes of files."""
    files = {name: {"size": n, "sha256": "0"} if type(n) in (int, str) else n for name, n in entries.items()}
    content = {"version": 2, "run": run, "files": files}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return listing(**content, sha256=checksum)


HOSTILE_MANIFESTS = {
    "an-empty-list": "[]",
    "nothing": "",
    "100000-nested-lists": "[" * 100_000,
    "lists-that-are-read-but-not-written": f'{{"files": {{"a": {{"x": {"[" * 980}{"]" * 980}}}}}}}',
    "no-utf-8": b"\xff\xfe{\x00}\x00",
    "a-pickle": pickle.dumps({"model.safetensors": 1}),
    "a-file-above-the-folder": signed(**{"../model.safetensors": 1}),
    "an-absolute-file": signed(**{"/etc/passwd": 1}),
    "a-file-of-another-system": signed(**{"..\\model.safetensors": 1}),
    "a-negative-size": signed(**{"model.safetensors": -1}),
    "a-size-that-is-a-text": signed(**{"model.safetensors": "1"}),
    **{
        f"an-entry-that-is-{json.dumps(entry)}": signed(**{"model.safetensors": entry})
        for entry in (
            None,
            [1, "0"],
            1.5,
            {},
            {"size": 1},
            {"sha256": "0"},
            {"size": True, "sha256": "0"},
            {"size": 1, "sha256": 0},
            {"size": 1, "sha256": None},
            {"size": [1], "sha256": "0"},
        )
    },
    **{f"a-run-that-is-{run}": signed(run, **{"model.safetensors": 1}) for run in (7, ["a"], {"a": 1}, False)},
    "a-version-to-come": listing(version=3, run="a", files={"model.safetensors": {"size": 1, "sha256": "0"}}),
    "a-checksum-that-is-not-its-own": listing(version=2, run="a", files={}, sha256="0" * 64),
    "files-that-are-a-list": listing(version=2, run="a", files=["model.safetensors"]),
}


@pytest.mark.parametrize("content", HOSTILE_MANIFESTS.values(), ids=HOSTILE_MANIFESTS)
def test_hostile_manifest_is_rejected_by_name(run, content):
    file = run / "checkpoint-2" / MANIFEST
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is corrupted: manifest\.json") as error:
        resolve_checkpoint(run, "last")
    assert len(str(error.value)) < 1000
    assert resolve_checkpoint(run, "last-complete") == str(run / "checkpoint-1")


def test_pipes_do_not_block_verification(run):
    folder = run / "checkpoint-2"
    (folder / "optimizer.pt").unlink()
    os.mkfifo(folder / "optimizer.pt")
    assert find_corruption(folder) == ["optimizer.pt is missing"]
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    (found,) = find_corruption(folder)
    assert found.startswith("manifest.json is missing")


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000 + "b", "\ud800"], ids=["long", "deep", "not-unicode"])
def test_manifest_names_that_no_file_can_have_are_missing_files(run, name):
    (run / "checkpoint-2" / MANIFEST).write_text(signed(**{name: 1}))
    assert find_corruption(run / "checkpoint-2") == [f"{name} is missing"]


# ---- a rewritten manifest ----


def other_widths(folder: Path) -> None:
    tiny.model("hrm", hidden_size=64).save_pretrained(folder)


def other_architecture(folder: Path) -> None:
    tiny.model("trm").save_pretrained(folder)


def other_task(folder: Path) -> None:
    tiny_lm.model("llama").save_pretrained(folder)


def changed(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def one_missing(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.pop("lm_head.weight"))


def one_more(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.update(more=torch.zeros(1)))


def turned(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].T.contiguous()}))


def other_average(folder: Path) -> None:
    save_file({"head.weight": torch.zeros(2)}, folder / "weight_average.safetensors")


OTHERS = (other_widths, other_architecture, other_task, one_missing, one_more, turned)


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change.__name__)
def test_weights_of_another_model_are_rejected_despite_a_valid_manifest(run, change):
    change(run / "checkpoint-2")
    write_manifest(run / "checkpoint-2")
    message = refused(run)
    listed = re.search(r"do not fit this HrmPuzzleForSolving: (.*?)(?: and \d+ more)?\. Nothing", message)[1]
    names = re.findall(r"(?:^|, )(?!expected)([\w.]+) (?:has shape )?\[[\d, ]+\]", listed)
    assert names and names == sorted(names)
    if change in (other_widths, turned):
        assert re.search(r"weight has shape \[(\d+), (\d+)\], expected \[(?!\1, \2)\d+, \d+\]", listed)


def header(entries, length=None, data=b"\0" * 64) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape=(4,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


LYING_HEADERS = {
    "nothing": b"",
    "a-length-of-2-to-the-63": header({}, length=2**63),
    "a-length-beyond-the-file": header({}, length=10_000),
    "no-json": header(b"model weights"),
    "100000-nested-lists": header(b"[" * 100_000),
    "a-list": header([]),
    "offsets-beyond-the-file": header({"a": tensor(0, 2**40, (2**38,))}),
    "offsets-that-go-back": header({"a": tensor(64, 0)}),
    "negative-offsets": header({"a": tensor(-16, 0)}),
    "tensors-that-overlap": header({"a": tensor(0, 16), "b": tensor(8, 24)}),
    "a-shape-larger-than-its-bytes": header({"a": tensor(0, 16, (10**9, 10**9))}),
    "a-shape-whose-product-overflows": header({"a": tensor(0, 16, (2**32, 2**32, 4))}),
    "an-unknown-dtype": header({"a": tensor(0, 16, dtype="OBJECT")}),
    "a-pickle": pickle.dumps([1]),
}


@pytest.mark.parametrize("content", LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_malformed_safetensors_header_is_reported(run, content):
    (run / "checkpoint-2" / "model.safetensors").write_bytes(content)
    write_manifest(run / "checkpoint-2")
    assert "checkpoint-2: a file of weights" in refused(run)


def test_shard_index_cannot_leave_the_folder(run, tmp_path):
    folder = run / "checkpoint-2"
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_manifest(folder)
    assert "checkpoint-2" in refused(run)


def raw(file: Path, payload: Payload) -> None:
    file.write_bytes(pickle.dumps(payload))


def archived(file: Path, payload: Payload) -> None:
    torch.save({"state": payload}, file)


PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "act_state_0.pt")


@pytest.mark.parametrize("write", [raw, archived], ids=lambda write: write.__name__)
@pytest.mark.parametrize("name", [*PICKLES, "scaler.pt"])
def test_pickle_with_code_is_rejected_and_not_run(run, tmp_path, name, write):
    write(run / "checkpoint-2" / name, Payload(tmp_path / "ran"))
    write_manifest(run / "checkpoint-2")
    message = refused(run)
    with pytest.raises(ValueError, match=re.escape(name)):  # of a conversion
        read_stored_model(run / "checkpoint-2" / name, re.compile("_orig_mod"))
    assert not (tmp_path / "ran").exists()
    assert "checkpoint-2" in message and "cannot be read" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_weights_in_a_pickle_are_not_resumed_from(run, tmp_path, name):
    (run / "checkpoint-2" / "model.safetensors").unlink()
    raw(run / "checkpoint-2" / name, Payload(tmp_path / "ran"))
    write_manifest(run / "checkpoint-2")
    assert "has no model.safetensors" in refused(run)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["training_args.bin", "pytorch_model.bin", "adapter_model.bin", "notes.pkl"])
def test_unneeded_pickle_is_not_opened(run, tmp_path, name):
    raw(run / "checkpoint-2" / name, Payload(tmp_path / "ran"))
    write_manifest(run / "checkpoint-2")
    one = trainer(run, max_steps=3)
    one.train("last")
    assert one.state.global_step == 3 and not (tmp_path / "ran").exists()


def test_plain_shard_metadata_is_read_and_code_is_rejected(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        shards.save({"weight": torch.zeros(3), "step": 3}, checkpoint_id=tmp_path / "model_0", no_dist=True)
    validate_plain_metadata(tmp_path)
    for content in (Payload(tmp_path / "ran"), {"a": print}, shards.FileSystemWriter):
        (tmp_path / "model_0" / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=r"\.metadata .*uses"):
            validate_plain_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def of_nothing(file: Path) -> None:
    file.write_bytes(b"")


def of_text(file: Path) -> None:
    file.write_text("optimizer")


def of_an_empty_archive(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("other", "text")


def of_another_kind(file: Path) -> None:
    torch.save([1, 2, 3], file)


BROKEN = (of_nothing, of_text, of_an_empty_archive, of_another_kind)


@pytest.mark.parametrize("write", BROKEN, ids=lambda write: write.__name__)
@pytest.mark.parametrize("name", PICKLES)
def test_invalid_state_file_is_reported(run, name, write):
    write(run / "checkpoint-2" / name)
    write_manifest(run / "checkpoint-2")
    assert "checkpoint-2: " in (message := refused(run)) and "cannot be read" in message


BAD_JSON = {
    "trainer_state.json": [
        "", "[]", "null", "{}x", '{"global_step": -1}', '{"global_step": "2"}', '{"global_step": 2, "log_history": 3}',
        '{"surprise": 1}', "[" * 100_000,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in BAD_JSON.items() for content in contents],
    ids=lambda value: value[:24] or "nothing",
)  # fmt: skip
def test_invalid_trainer_state_is_reported(run, name, content):
    (run / "checkpoint-2" / name).write_text(content)
    write_manifest(run / "checkpoint-2")
    assert "checkpoint-2: " in refused(run)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", ["model.safetensors", "weight_average.safetensors"])
def test_nonfinite_weights_are_rejected(run, name, value):
    file = run / "checkpoint-2" / name
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] = value
    save_file(tensors, file, {"format": "pt"})
    write_manifest(run / "checkpoint-2")
    message = refused(run, NonFiniteError)
    assert "after step 2: " in message and "lm_head.weight" in message


def test_weight_average_of_another_model_is_rejected(run):
    other_average(run / "checkpoint-2")
    write_manifest(run / "checkpoint-2")
    assert "head.weight" in refused(run, ValueError)


# ---- code next to the weights ----


def plant_code(folder: Path, victim: Path, model_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "planted.Config", "AutoModel": "planted.Model", "AutoModelForCausalLM": "planted.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": code}))
    (folder / "planted.py").write_text(
        f"import os\nos.mkdir({str(victim)!r})\nclass Config: pass\nclass Model: pass\n"
    )


def test_resume_does_not_run_code_in_the_checkpoint(run, tmp_path):
    plant_code(run / "checkpoint-2", tmp_path / "ran", "hrm_puzzle")
    write_manifest(run / "checkpoint-2")
    trainer(run, max_steps=3).train("last")
    assert not (tmp_path / "ran").exists() and "planted" not in sys.modules


@pytest.mark.parametrize("model_type", ["llama", "planted"])
def test_initial_weights_run_no_code_from_their_folder(tmp_path, monkeypatch, model_type):
    # transformers asks at a terminal, which a job lacks.
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    tiny_lm.model("llama").save_pretrained(tmp_path / "model")
    plant_code(tmp_path / "model", tmp_path / "ran", model_type)
    if model_type == "llama":
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            AutoConfig.from_pretrained(tmp_path / "model")
    assert not (tmp_path / "ran").exists()


# ---- the folder itself ----


def test_symlinked_lock_does_not_overwrite_its_target(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / ".run.lock").unlink()
    (run / ".run.lock").symlink_to(victim)
    with pytest.raises(OSError, match="cannot be written"):
        trainer(run, max_steps=3).train("last")
    assert victim.read_text() == "precious"


def test_overwriting_does_not_delete_the_target_of_a_symlinked_checkpoint(run, tmp_path):
    (run / "checkpoint-1").rename(tmp_path / "elsewhere")
    (run / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        trainer(run, overwrite_output_dir=True).train()
    assert (tmp_path / "elsewhere" / MANIFEST).exists()
