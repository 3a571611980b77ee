"""`hrm-hf recommend`: the guide's table, measured bytes, and printed command lines that work.

Referees: the rows of the guide's memory table, bytes counted per tensor (benchmarks/puzzles/memory.py), and the
parsers of the recommended scripts.
"""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.launch import recommend as recommendations
from hrm_hf.launch.memory import GIB, usable_memory
from hrm_hf.launch.options import LaunchOptions, RecommendOptions
from hrm_hf.launch.planner import Device, plan_launch
from hrm_hf.launch.recommend import COSMO_RECIPES, GUIDE_ROWS, RESULTS, guide_row
from hrm_hf.puzzles.pretrain_options import parse_command


ROOT = Path(__file__).parents[2]
COUNTED = {
    "hrm-16": "HRM ultra-small (hidden 16)",
    "hrm-32": "HRM small (hidden 32)",
    "hrm-64": "HRM medium (hidden 64, 2+2 layers)",
    "hrm-512": "HRM 27M",
}


def recommend(size: float, task: str = "puzzle"):
    """Return the advice for a memory in bytes."""
    return recommendations.recommend(RecommendOptions(memory=f"{size / 2**20}MB", task=task))


def invoke(*flags: str):
    return CliRunner().invoke(app, ["recommend", *flags])


@pytest.mark.parametrize(
    "size, hidden, batch, layers",
    [("1.5GB", 16, 2, 1), ("2GB", 32, 4, 1), ("4GB", 32, 4, 1), ("5GB", 64, 8, 2), ("10GB", 64, 8, 2)],
)
def test_the_guides_table_is_followed_row_by_row(size, hidden, batch, layers):
    advice = json.loads(invoke("--memory", size, "--json").output)
    options, _ = parse_command(shlex.split(advice["commands"]["guide"])[2:])
    assert (options["arch.hidden_size"], options["global_batch_size"]) == (hidden, batch)
    assert (options["arch.H_layers"], options["arch.L_layers"]) == (layers, layers)


def test_guide_above_ten_gigabytes_uses_the_config_defaults():
    assert guide_row(int(10.5 * GIB)) == "hrm-512" and GUIDE_ROWS["hrm-512"].config == {}
    options, _ = parse_command(shlex.split(recommend(80 * GIB).commands["guide"])[2:])
    assert (options["arch.hidden_size"], options["global_batch_size"]) == (512, 768)


def test_guide_row_that_does_not_fit_is_marked_and_not_offered():
    result = invoke("--memory", "11GB")
    assert "batches above 768 are untested" in result.output
    assert "DOES NOT FIT" in result.output and "\nguide:" not in result.output
    best = recommend(11 * GIB).best
    assert best.name == "hrm-512" and best.largest_batch < 768


@pytest.mark.parametrize("size", [1.3, 2, 4, 8, 16, 40, 80])
@pytest.mark.parametrize("task", ["puzzle", "cosmo"])
def test_recommended_batch_fits_and_twice_that_batch_does_not(size, task):
    advice = recommend(int(size * GIB), task)
    best = advice.best
    assert best.size(best.largest_batch) <= advice.usable == usable_memory(int(size * GIB))
    if best.largest_batch < recommendations.LARGEST_BATCH[task]:
        assert best.size(2 * best.largest_batch) > advice.usable


def test_measured_memory_agrees_with_the_tensor_count():
    """Peak memory adds temporary tensors and the allocator's overhead; it is never much less."""
    counted = json.loads(RESULTS.with_name("puzzle_memory.json").read_text())["float32"]
    for name, row in json.loads(RESULTS.read_text())["puzzle"].items():
        tensors = counted[COUNTED[name]]
        batch, size = max((int(batch), size) for batch, size in row["points"].items())
        expected = sum(tensors[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        expected += batch * tensors["activations_per_sequence_bytes"]
        assert 0.8 < size / expected < 3, (name, size, expected)


def test_linear_fit_passes_through_the_measured_points():
    measured = json.loads(RESULTS.read_text())
    for row in (*measured["puzzle"].values(), *measured["cosmo"].values()):
        batch, size = max((int(batch), size) for batch, size in row["points"].items())
        assert row["fixed_bytes"] + batch * row["bytes_per_example"] == pytest.approx(size, rel=0.1)


def test_more_memory_never_gives_a_smaller_model():
    sizes = [recommend(int(size * GIB)).best for size in (1.3, 1.5, 2, 3, 4, 8, 16, 80)]
    order = list(GUIDE_ROWS)
    places = [(order.index(row.name), row.largest_batch) for row in sizes]
    assert places == sorted(places)


@pytest.mark.parametrize("size", ["lots", "-4GB", "0GB", "4TB", ""])
def test_invalid_size_is_bad_usage(size):
    result = invoke(f"--memory={size}")
    assert result.exit_code == 2 and "24GB" in result.output


def test_too_little_memory_is_an_error_that_names_the_value():
    with pytest.raises(ValueError, match=r"memory='2\.0MB'"):
        recommend(2 * 2**20)


def test_small_device_reserves_memory_for_its_context_and_prints_the_reserve():
    """A GPU of 1 GB cannot reserve a gigabyte, and a model of hidden size 16 needs only megabytes."""
    assert "1.00 GiB: 409.6 MiB for a training step, 614.4 MiB reserved " in invoke("--memory", "1GB").output
    assert recommend(GIB).best.largest_batch
    assert usable_memory(24 * GIB) == int(24 * GIB * 0.9) - GIB  # unchanged for large devices


@pytest.mark.parametrize("size, flags", [(24, []), (8, ["--cpu"])], ids=str)
def test_launcher_plans_match_the_recommendations(size, flags):
    advice = json.loads(invoke("--memory", f"{size}GB", "--task", "lm", "--json", *flags).output)
    words = shlex.split(advice["commands"]["what fits"])
    assert words[1:] == ["training/launch.py", "--model", advice["best"]["name"], *flags]
    device = Device("assumed", size * GIB, (0, 0) if flags else (8, 0))
    for row in [row for row in advice["rows"] if row["largest_batch"]][-3:]:
        plan = plan_launch(LaunchOptions(model=row["name"]), [], [device])
        words = [f"{plan.parameters:,} parameters", f"{plan.sequence_length:,} tokens"]
        words += ["bf16" if plan.bf16 else "float32", *["checkpointing"] * plan.activation_checkpointing]
        assert row["title"] == ", ".join(words)
        used = row["fixed"] + plan.per_device_train_batch_size * row["per_example"]
        assert sum(plan.memory.values()) == pytest.approx(used, rel=1e-3)


def test_every_measured_map_preset_has_a_recipe():
    for preset in json.loads(RESULTS.read_text())["cosmo"]:
        recipe = yaml.safe_load((ROOT / "training" / "recipes" / f"{COSMO_RECIPES[preset]}.yaml").read_text())
        assert recipe["preset"] == preset
    assert "run_cosmo.py" in recommend(8 * GIB, "cosmo").commands["what fits"]
