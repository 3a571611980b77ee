"""Batch norms of `cosmo_cnn` in two processes (gloo, CPU).

Referees: torch's batch norm in double precision, and a single process with the maps of both.
"""

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


pytestmark = pytest.mark.slow
DTYPES = (torch.float32, torch.bfloat16)


def layer_and_maps(kind, dtype):
    """Return a layer, and maps whose second channel has a mean far from 0."""
    torch.manual_seed(0)
    layer, maps = kind(3).to(dtype), torch.randn(10, 3, 8, 8) + torch.tensor([0.0, 50.0, -1.0]).view(-1, 1, 1)
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    nn.init.uniform_(layer.bias)
    return layer, maps.to(dtype)


def train_layer(layer, maps, rows):
    """Run two steps on some rows of the maps; return outputs, gradients and running statistics."""
    maps = maps[rows].clone().requires_grad_()
    for _ in range(2):
        normed = layer(maps)
    normed.float().pow(3).sum().backward()  # the gradient of a sum or of squares would be 0
    gradients = {"maps": maps.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return {"normed": normed.detach(), **gradients, **dict(layer.named_buffers())}


def train_model(out: str, batch_size: int) -> dict:
    """Train four steps; return the number of processes, the log and the weights."""
    torch.manual_seed(0)
    fields = {"prior_bounds": tiny_cosmo.PRIOR, "pixel_mean": [0.5], "pixel_std": [2.0]}
    model = CosmoCnnForRegression(CosmoCnnConfig.from_preset("test", **fields))
    # SGD, because Adam takes a full step even where the gradient is only a rounding error.
    options = {"optim": "sgd", "learning_rate": 1e-2, "max_steps": 4}
    trainer = tiny_cosmo.trainer(out, model, per_device_train_batch_size=batch_size, **options)
    trainer.train()
    processes = trainer.accelerator.num_processes
    return {"processes": processes, "log": tiny_cosmo.logged(trainer), "weights": model.state_dict()}


def of_two(out: str) -> None:
    """Run one of the two processes: the layer in each dtype, then the model."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = (slice(0, 7), slice(7, 10))[rank]  # the processes may have different numbers of maps
    for dtype in DTYPES:
        layer, maps = layer_and_maps(ProcessBatchNorm2d, dtype)
        save_file(train_layer(layer, maps, rows), Path(out) / f"{dtype}-{rank}.safetensors")
    torch.save(train_model(out, batch_size=4), Path(out) / f"model-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Return the folder that the two processes wrote to."""
    out = tmp_path_factory.mktemp("two")
    result = started.run(of_two, str(out), processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_in_two_processes_matches_torch_on_all_maps(two_processes, dtype):
    found = [load_file(two_processes / f"{dtype}-{rank}.safetensors") for rank in range(2)]
    layer, maps = layer_and_maps(nn.BatchNorm2d, dtype)
    expected = train_layer(layer.double(), maps.double(), slice(None))
    joined = {name: torch.cat([one[name] for one in found]) for name in ("normed", "maps")}
    joined |= {name: found[0][name] + found[1][name] for name in ("weight", "bias")}  # gradients add up, as in DDP
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(found[0][name], found[1][name])
        joined[name] = found[0][name]
    # Relative to the largest value. With a mean of 50 standard deviations, normalized values lose two of seven digits,
    # in torch's own layer too. bfloat16 stores two and a half digits, of which the gradient of the cube loses some.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, value in expected.items():
        largest = max(1.0, value.abs().max().item())
        torch.testing.assert_close(joined[name].to(value), value, rtol=0, atol=tolerance * largest, msg=name)


def test_two_processes_train_as_one_with_twice_the_batch(two_processes, tmp_path):
    alone = train_model(str(tmp_path), batch_size=8)
    for rank in range(2):
        together = torch.load(two_processes / f"model-{rank}.pt")
        assert (together["processes"], alone["processes"]) == (2, 1)
        for mine, expected in zip(together["log"], alone["log"], strict=True):
            assert mine == pytest.approx(expected, rel=1e-3, abs=1e-4)  # the library rounds what it logs
        assert any("running_var" in name for name in alone["weights"])
        for name, value in alone["weights"].items():
            # Sums have another order, over four steps. With statistics per process, even losses would differ by 0.1.
            torch.testing.assert_close(together["weights"][name], value, rtol=0, atol=1e-5, msg=name)
