"""The monitor of hyper-connection gains and its plot. Referee: the model's own metrics on the same batch."""

import pytest
import tiny_mhc
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hrm_hf.text.run import MhcMonitorCallback


NAMES = ("mhc/amax_pre", "mhc/amax_post", "mhc/amax_composite")


def train(model, tmp_path, monitor=True, batch=None):
    ids = tiny_mhc.ids(rows=8).tolist()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, logging_steps=2, per_device_train_batch_size=2, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
    if monitor:
        trainer.add_callback(MhcMonitorCallback(trainer, batch))
    trainer.train()
    return trainer


def test_gains_are_logged_with_the_loss_of_the_trainer(tmp_path):
    model, held = tiny_mhc.model(mhc_res_mode="unconstrained"), tiny_mhc.ids(rows=3, seed=5)
    trainer = train(model, tmp_path, batch={"input_ids": held})
    history = trainer.state.log_history
    gains = [entry for entry in history if NAMES[0] in entry]
    assert [entry["step"] for entry in gains] == [entry["step"] for entry in history if "loss" in entry] == [2, 4]
    sites = model.get_detailed_mhc_metrics(held)
    own = [max(site["forward"], site["backward"]) for site in sites]
    composite = max(sites[-1]["composite_forward"], sites[-1]["composite_backward"])
    expected = (max(own[::2]), max(own[1::2]), composite)
    assert [gains[-1][name] for name in NAMES] == pytest.approx(expected, rel=1e-5)


def test_the_monitor_reads_training_rows_without_changing_training(tmp_path):
    weights = []
    for monitor in (True, False):
        trainer = train(tiny_mhc.model(), tmp_path, monitor)
        assert any(NAMES[0] in entry for entry in trainer.state.log_history) == monitor
        weights.append(trainer.model.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_nothing_is_logged_without_mhc(tmp_path):
    history = train(tiny_mhc.model(mhc_enabled=False), tmp_path).state.log_history
    assert not any(name.startswith("mhc/") for entry in history for name in entry)
