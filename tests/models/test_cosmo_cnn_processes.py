"""Batch norms of `cosmo_cnn` in two processes (gloo, CPU).

Referees: torch's batch norm in double precision, and one process with the maps of both.
"""

import json
import os
from pathlib import Path

import pytest
import started
import tiny_cosmo
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from hrm_hf.models.configuration_cosmo_cnn import CosmoCnnConfig
from hrm_hf.models.modeling_cosmo_cnn import CosmoCnnForRegression, ProcessBatchNorm2d


def layer_and_maps(kind, dtype):
    """A layer, and maps of which the second channel has a mean far from 0."""
    torch.manual_seed(0)
    layer, maps = kind(3).to(dtype), torch.randn(10, 3, 8, 8) + torch.tensor([0.0, 50.0, -1.0]).view(-1, 1, 1)
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    nn.init.uniform_(layer.bias)
    return layer, maps.to(dtype)


def train_layer(layer, maps, rows):
    """Two steps on some rows of the maps: outputs, gradients and running statistics."""
    maps = maps[rows].clone().requires_grad_()
    for _ in range(2):
        normed = layer(maps)
    normed.float().pow(3).sum().backward()  # not a function that batch norm leaves as it is
    gradients = {"maps": maps.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return {"normed": normed.detach(), **gradients, **dict(layer.named_buffers())}


def layer_of_two(out: str, dtype: torch.dtype) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = (slice(0, 7), slice(7, 10))[rank]  # processes may have as many maps as they like
    layer, maps = layer_and_maps(ProcessBatchNorm2d, dtype)
    save_file(train_layer(layer, maps, rows), Path(out) / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_two_processes_is_torchs_on_all_maps(tmp_path, dtype):
    result = started.run(layer_of_two, str(tmp_path), dtype, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    layer, maps = layer_and_maps(nn.BatchNorm2d, dtype)
    expected = train_layer(layer.double(), maps.double(), slice(None))
    joined = {name: torch.cat([one[name] for one in found]) for name in ("normed", "maps")}
    joined |= {name: found[0][name] + found[1][name] for name in ("weight", "bias")}  # as DDP adds them
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(found[0][name], found[1][name])
        joined[name] = found[0][name]
    # Of the largest value. A mean of 50 deviations costs the normed values two of seven digits, in torch's own layer
    # too; of bfloat16's two and a half, in which they are stored, the gradient of their cube loses some more.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, value in expected.items():
        largest = max(1.0, value.abs().max().item())
        torch.testing.assert_close(joined[name].to(value), value, rtol=0, atol=tolerance * largest, msg=name)


def train_model(out: str) -> None:
    """Four steps on batches of 8 maps in all; leaves the weights, and what each process saw."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    fields = {"prior_bounds": tiny_cosmo.PRIOR, "pixel_mean": [0.5], "pixel_std": [2.0]}
    model = CosmoCnnForRegression(CosmoCnnConfig.from_preset("test", **fields))
    # Not Adam: it takes a whole step where a gradient is nothing but rounding.
    options = {"optim": "sgd", "learning_rate": 1e-2, "max_steps": 4}
    trainer = tiny_cosmo.trainer(out, model, per_device_train_batch_size=8 // processes, **options)
    trainer.train()
    trainer.save_model()
    seen = {"processes": trainer.accelerator.num_processes, "log": tiny_cosmo.logged(trainer)}
    (Path(out) / f"seen-{trainer.args.process_index}.json").write_text(json.dumps(seen))


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    found = {}
    for processes in (1, 2):
        out = tmp_path / str(processes)
        out.mkdir()
        result = started.run(train_model, str(out), processes=processes)
        assert result.returncode == 0, result.stderr[-3000:]
        seen = [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(processes)]
        assert {one["processes"] for one in seen} == {processes}
        found[processes] = seen[0]["log"], load_file(out / "model.safetensors")
    for mine, expected in zip(found[2][0], found[1][0], strict=True):
        assert mine == pytest.approx(expected, rel=1e-3, abs=1e-4)  # the library rounds what it logs
    weights, expected = found[2][1], found[1][1]
    assert any("running_var" in name for name in expected) and weights.keys() == expected.keys()
    for name, value in expected.items():
        # Sums in another order, over four steps; with statistics of each process even losses are 0.1 apart.
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=name)
