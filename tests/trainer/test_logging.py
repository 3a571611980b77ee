"""Trackers get the original names. Referees: TensorBoard's reader, Trackio's database, W&B's offline file."""

import math
import os

import every
import pytest
import started
import tiny_lm
from tqdm.auto import tqdm
from transformers import TrainerState

from hrm_hf.text.run import MhcMonitorCallback
from hrm_hf.trainer.logging import LogLineCallback, original_names


NAMES = {
    "train/loss", "train/lm_loss", "train/lr", "train/learning_rate", "train/tokens_per_second", "mhc/amax_pre",
    "train/samples_per_second", "mhc/amax_post", "mhc/amax_composite", "eval/lm_loss", "eval/perplexity",
}  # fmt: skip


def tracked_run(folder: str) -> None:
    import wandb

    model = every.model("rlm_mhc", vocab_size=tiny_lm.VOCAB_SIZE)
    trainer = tiny_lm.trainer(
        folder, model, report_to=["tensorboard", "trackio", "wandb"], run_name="one", project="puzzles", max_steps=3,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer.add_callback(MhcMonitorCallback(trainer))
    trainer.train()
    wandb.teardown()  # wandb does this at exit, but not in a forked process


def test_values_with_a_group_and_the_learning_rate_are_repeated():
    logs = {"loss": 1.0, "learning_rate": 1e-3, "mhc/amax_pre": 1.5, "eval_loss": 2.0}
    assert original_names(logs) == {"train/lr": 1e-3, "mhc/amax_pre": 1.5}


def test_a_line_of_progress_tells_the_time_that_is_left(capsys):
    line = LogLineCallback({"loss": "loss {:.1f}"})
    with tqdm(total=2):  # an evaluation's progress bar; lines appear above it
        for step in (10, 20):
            line.on_log(None, TrainerState(global_step=step, max_steps=20), None, {"loss": 2, "steps_per_second": 0.5})
    first, last = (said := capsys.readouterr()).out.splitlines()
    assert first.endswith("loss 2.0  ETA 0:00:20") and last.endswith("loss 2.0") and "\r    " in said.err


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Return the folder of a run with three trackers, without network access."""
    for name in ("tensorboard", "trackio", "wandb"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("tracked")
    environment = {
        **os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_PROJECT": "puzzles",
        "HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio"),
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
    }  # fmt: skip
    # Trackers keep state in the process, so all three run in a separate one.
    finished = started.run(tracked_run, str(folder), environment=environment)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_tensorboard_has_the_names_and_the_values(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = (tracked / "tensorboard").rglob("events.*")
    events = EventAccumulator(str(file)).Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    rates, repeated = (events.Scalars(name) for name in ("train/learning_rate", "train/lr"))
    assert [(one.step, one.value) for one in rates] == [(one.step, one.value) for one in repeated]
    assert all(one.value >= 1 - 1e-4 for one in events.Scalars("mhc/amax_composite"))


@pytest.mark.slow
def test_trackio_has_the_names(tracked):
    import sqlite3

    [file] = (tracked / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = " ".join(row[0] if isinstance(row[0], str) else str(row[0]) for row in database.execute(
            "select metrics from metrics"
        ))  # fmt: skip
    assert {name for name in NAMES if f'"{name}"' in rows} == NAMES


@pytest.mark.slow
def test_the_offline_run_of_wandb_has_the_names(tracked):
    [file] = tracked.rglob("run-*.wandb")
    written = file.read_bytes()
    assert {name for name in NAMES if name.encode() in written} == NAMES


def test_every_seed_name_is_logged_by_its_trainer(tmp_path):
    """The names that the original guides tell users to watch, without the prefix that trackers add."""
    trainer = tiny_lm.trainer(tmp_path, tiny_lm.model("hrm_lm"), eval_strategy="steps", eval_steps=6)
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert logged >= {"h_updates", "l_steps", "convergence_rate", "avg_steps", "learning_rate", "eval_perplexity"}
    assert all(math.isfinite(entry["samples_per_second"]) for entry in trainer.state.log_history if "loss" in entry)
    assert not [name for name in logged if "memory" in name]  # there is no GPU
