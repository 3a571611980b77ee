"""A folder belongs to one run: a second run is rejected, concurrent or later, and changes nothing.

Referees: the files of the first run, byte by byte, and the kernel, which holds locks and releases them.
"""

import contextlib
import fcntl
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import started
import tiny_lm
import yaml
from filelock import FileLock, UnixFileLock
from transformers import TrainerCallback

from hrm_hf.hub.manifests import (
    CheckpointError,
    find_corruption,
    list_checkpoints,
    read_manifest,
    resolve_checkpoint,
    run_id_of,
    write_manifest,
)
from hrm_hf.io import files
from hrm_hf.io.files import FolderInUseError
from hrm_hf.text.arguments import LmTrainingArguments
from hrm_hf.trainer.recipes import save_recipe
from hrm_hf.trainer.run import LOCK_FILE, claim_run_folder, locked_folder, plan_start, rotate


SCRIPTS = Path(__file__).parents[2] / "training"


def trainer(folder, steps=4, **options):
    return tiny_lm.trainer(
        folder, tiny_lm.model("llama"), max_steps=steps, **{"save_strategy": "steps", "save_steps": 2, **options}
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def fake(folder: Path, step: int, run_id: str | None = "a" * 32) -> Path:
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(bytes([step]) * 100)
    write_manifest(place, run_id)
    return place


def test_a_run_that_takes_no_step_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"per_device_train_batch_size=99\b.*dataloader_drop_last=True: "):
        trainer(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=99).train()


# ---- a second run, later ----


def test_second_run_is_rejected_and_leaves_the_first_runs_checkpoints_unchanged(tmp_path):
    trainer(tmp_path).train()
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="checkpoint-2, checkpoint-4") as error:
        trainer(tmp_path).train()
    assert "--overwrite_output_dir" in str(error.value) and "--resume_from_checkpoint last" in str(error.value)
    assert contents(tmp_path) == before


def test_overwrite_deletes_only_the_earlier_checkpoints(tmp_path):
    trainer(tmp_path, steps=8).train()
    (tmp_path / "notes.txt").write_text("mine")
    first = run_id_of(tmp_path / "checkpoint-8")
    trainer(tmp_path, overwrite_output_dir=True).train()
    assert [one.name for one in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert run_id_of(tmp_path / "checkpoint-2") not in (None, first)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwriting_waits_until_the_new_run_has_made_a_step(tmp_path):
    trainer(tmp_path).train()
    before = contents(tmp_path)
    wrong = trainer(tmp_path, overwrite_output_dir=True)
    wrong.model.requires_grad_(False)
    with pytest.raises((ValueError, RuntimeError)):
        wrong.train()
    assert contents(tmp_path) == before


def test_resumed_run_overwrites_none_of_its_own_checkpoints(tmp_path):
    # A requeued job has the options of its first start.
    trainer(tmp_path, overwrite_output_dir=True).train("last-complete")
    resumed = trainer(tmp_path, steps=6, overwrite_output_dir=True)
    resumed.train("last-complete")
    assert [one.name for one in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert len(tiny_lm.logged(resumed)) == 6


def test_the_permission_to_overwrite_is_not_saved_with_the_recipe(tmp_path):
    args = LmTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", overwrite_output_dir=True)
    save_recipe(tmp_path / "recipe.yaml", args)
    assert "overwrite_output_dir" not in yaml.safe_load((tmp_path / "recipe.yaml").read_text())


# ---- run ids ----


def test_a_resumed_run_keeps_its_id_and_a_new_one_has_another(tmp_path):
    for folder in ("one", "other"):
        trainer(tmp_path / folder).train()
    trainer(tmp_path / "one", steps=6).train("last")
    ids = [run_id_of(tmp_path / name) for name in ("one/checkpoint-2", "one/checkpoint-6", "other/checkpoint-2")]
    assert ids[0] == ids[1] != ids[2] and None not in ids


def test_resume_takes_truth_values(tmp_path):
    trainer(tmp_path).train()
    with pytest.raises(FileExistsError, match="--resume_from_checkpoint last"):
        trainer(tmp_path).train("false")
    trainer(tmp_path, steps=6).train(trainer(tmp_path, resume_from_checkpoint="true").args.resume_from_checkpoint)
    assert run_id_of(tmp_path / "checkpoint-6") == run_id_of(tmp_path / "checkpoint-4")


def test_checkpoints_of_two_runs_in_one_folder_are_named(tmp_path):
    fake(tmp_path, 2), fake(tmp_path, 4, "b" * 32)
    for wanted in ("last", "last-complete", str(tmp_path / "checkpoint-4")):
        with pytest.raises(CheckpointError, match=r"bbbbbbbb.* checkpoint-2 .*aaaaaaaa.*--output_dir"):
            plan_start(tmp_path, wanted)


def test_a_manifest_lists_files_of_subfolders_as_sharded_checkpoints_have_them(tmp_path):
    place = tmp_path / "checkpoint-2"
    (place / "global_step2").mkdir(parents=True)
    (place / "global_step2" / "rank_0.pt").write_bytes(b"abc")
    write_manifest(place, "a" * 32)
    assert read_manifest(place).files["global_step2/rank_0.pt"][0] == 3
    (place / "global_step2" / "rank_0.pt").write_bytes(b"abd")
    assert "global_step2/rank_0.pt has changed since it was written" in find_corruption(place)[0]


def test_last_complete_renames_corrupted_checkpoints_before_a_new_run(tmp_path, capsys):
    for step in (2, 4):
        (fake(tmp_path, step) / "model.safetensors").write_bytes(b"y" * 100)
    one = trainer(tmp_path)
    one.train("last-complete")
    assert sorted(folder.name.rpartition("-")[0] for folder in tmp_path.glob("damaged-checkpoint-*")) == [
        "damaged-checkpoint-2", "damaged-checkpoint-4",
    ]  # fmt: skip
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert resolve_checkpoint(tmp_path, "last") == str(tmp_path / "checkpoint-4")
    assert "checkpoint-4 is corrupted (model.safetensors has changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("corrupted", "wanted"), [((4, 6), "last-complete"), ((2, 4, 6), "last-complete"), ((4, 6), "last"), ((4, 6), 6)]
)
def test_each_checkpoint_is_hashed_once_on_the_way_to_a_complete_one(tmp_path, monkeypatch, corrupted, wanted):
    for step in (2, 4, 6):
        file = fake(tmp_path, step) / "model.safetensors"
        file.write_bytes(b"y" * 100 if step in corrupted else file.read_bytes())
    read, checksum = [], files._checksum
    monkeypatch.setattr(files, "_checksum", lambda file: read.append(file) or checksum(file))
    with contextlib.suppress(CheckpointError):
        plan_start(tmp_path, wanted if isinstance(wanted, str) else os.path.relpath(tmp_path / "checkpoint-6"))
    assert sorted(file.parent.name for file in read) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_checkpoint_of_another_name_is_resumed_from(tmp_path):
    # hub_strategy="checkpoint" uses this name.
    trainer(tmp_path).train()
    (tmp_path / "checkpoint-2").rename(tmp_path / "last-checkpoint")
    resumed = trainer(tmp_path)
    resumed.train(str(tmp_path / "last-checkpoint"))
    assert resumed.state.global_step == 4


# ---- rotation ----


@pytest.mark.parametrize("age", [-60, 60])
def test_new_checkpoint_survives_rotation_among_later_ones(tmp_path, age):
    trainer(tmp_path, steps=8).train()
    for folder in list_checkpoints(tmp_path):  # a copy can have such times
        os.utime(folder, (time.time() - age, time.time() - age))
    trainer(tmp_path, steps=6, save_total_limit=1).train(str(tmp_path / "checkpoint-4"))
    assert [one.name for one in list_checkpoints(tmp_path)] == ["checkpoint-6"]


@pytest.mark.parametrize(
    ("limit", "left"), [(None, [2, 4, 6, 8, 10, 12]), (1, [2, 4, 10]), (3, [2, 4, 8, 10]), (9, [2, 4, 6, 8, 10, 12])]
)
@pytest.mark.parametrize("best", ["{}/checkpoint-4", "run/checkpoint-4", "./run/../run/checkpoint-4"])
def test_rotation_keeps_the_best_checkpoint_and_those_of_other_runs(tmp_path, monkeypatch, limit, left, best):
    monkeypatch.chdir(tmp_path)
    for step in (2, 4, 6, 8, 10, 12):
        os.utime(fake(tmp_path / "run", step, "b" if step == 2 else "a"), (10**9 - step, 10**9 - step))
    (tmp_path / "run" / "checkpoint-copy-6").mkdir()
    rotate(Path("run/checkpoint-10"), "a", limit, best.format(tmp_path / "run"))
    assert [int(one.name.rpartition("-")[2]) for one in list_checkpoints("run")] == left
    assert (tmp_path / "run" / "checkpoint-copy-6").exists()


# ---- a second run, at the same time ----


class Waits(TrainerCallback):
    def __init__(self, file):
        self.file = Path(file)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.file.touch()
            time.sleep(120)


def waiting_run(folder: str, file: str) -> None:
    one = trainer(folder)
    one.add_callback(Waits(file))
    one.train("last-complete")


def test_concurrent_run_error_names_host_and_process_and_a_killed_run_unlocks(tmp_path):
    run, file = tmp_path / "run", tmp_path / "trains"
    process = started.process(waiting_run, str(run), str(file))
    process.start()
    while process.is_alive() and not file.exists():
        time.sleep(0.02)
    try:
        with pytest.raises(FolderInUseError, match=f"process {process.pid} on {socket.gethostname()}") as error:
            trainer(run).train("last-complete")
        assert str(run) in str(error.value) and "--output_dir" in str(error.value)
    finally:
        process.kill()
        process.join()
    resumed = trainer(run)
    resumed.train("last-complete")
    assert resumed.state.global_step == 4 and len(tiny_lm.logged(resumed)) == 4


def test_script_locks_its_folder_to_the_end_and_its_trainer_may_use_it(tmp_path):
    args = LmTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    claim_run_folder(args)
    trainer(tmp_path).train()
    # A separate file object, as in another process.
    with open(tmp_path / LOCK_FILE) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(FileExistsError, match="checkpoint-2, checkpoint-4"):
        claim_run_folder(args)
    assert (tmp_path / LOCK_FILE).read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_run_without_file_locks_warns_and_continues(tmp_path, monkeypatch):
    def no_locks(self):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(UnixFileLock, "_acquire", no_locks)
    assert FileLock is UnixFileLock
    with pytest.warns(UserWarning, match=r"locks \(Function not implemented\)"), locked_folder(tmp_path, True):
        pass


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing")  # set by TRL by default
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("run_*.py")), ids=lambda path: path.stem)
def test_every_script_fails_in_one_line_before_it_writes_anything(script, tmp_path, monkeypatch, capsys):
    fake(tmp_path, 2)
    (tmp_path / "recipe.yaml").write_text("of the first run")
    before = contents(tmp_path)
    options = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--report_to", "none"]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(SystemExit, match="1"):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert line.startswith("error: ") and "checkpoint-2)" in line and "--overwrite_output_dir" in line
    after = contents(tmp_path)
    del after[LOCK_FILE]
    assert after == before
