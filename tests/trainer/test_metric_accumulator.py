"""Skipped steps do not change the sums, and the clock can be paused."""

import pytest
import torch
from accelerate import Accelerator

from hrm_hf.trainer.logging import MetricAccumulator


def terms(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.double) for name, value in values.items()}


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def test_micro_batches_and_steps_add_up_and_reading_resets(accelerator):
    meter = MetricAccumulator()
    for step in ([1.0, 2.0], [4.0]):
        for value in step:
            meter.add(terms(loss=value, tokens=2.0))
        meter.keep()
    assert meter.drain(accelerator, 2)[:2] == ({"loss": 7.0, "tokens": 6.0}, 2)
    assert meter.drain(accelerator, 5)[:2] == ({}, 3)


def test_dropped_step_is_not_counted(accelerator):
    meter = MetricAccumulator()
    meter.add(terms(loss=1.0))
    meter.keep()
    meter.add(terms(loss=float("nan")))
    meter.drop()
    meter.add(terms(loss=2.0))
    meter.keep()
    assert meter.drain(accelerator, 3)[0] == {"loss": 3.0}


def test_names_may_come_in_another_order_or_be_missing(accelerator):
    meter = MetricAccumulator()
    for step in (terms(a=1.0, b=2.0), terms(b=20.0, a=10.0), terms(b=200.0, c=5.0)):
        meter.add(step)
        meter.keep()
    assert meter.drain(accelerator, 3)[0] == {"a": 11.0, "b": 222.0, "c": 5.0}


def test_clock_stops_while_paused(accelerator, monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter([0.0, 1.0, 500.0, 502.0, 502.0]).__next__)
    meter = MetricAccumulator()
    with meter.paused():
        pass
    assert meter.drain(accelerator, 1)[2] == 3.0
