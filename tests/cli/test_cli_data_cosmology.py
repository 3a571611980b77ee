"""`hrm-hf data cosmology` as users run it."""

import json

import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cosmology.dataset import build as cosmology_build
from hrm_hf.cosmology.dataset.rows import load_cosmology_info, read_arrays


def call(*args, code=0):
    result = CliRunner().invoke(app, ["data", "cosmology", *map(str, args)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_options_reach_the_maps(tmp_path):
    options = ["--samples", 16, "--size", 16, "--side-deg", 2, "--seed", 3, "--sigma-e", 0.26, "--galaxies", 30]
    options += ["--source-redshifts", "0.5,1.0", "--omega-m", "0.2,0.4", "--shard-size", 8]
    report = json.loads(call(*options, "--maps-per-cosmology", 2, "--out", tmp_path, "--json").stdout)
    info = load_cosmology_info(tmp_path)
    settings = info.settings
    assert (settings.side_deg, settings.sigma_e, settings.galaxies_per_arcmin2) == (2, 0.26, 30)
    assert (settings.source_redshifts, info.prior["omega_m"]) == ((0.5, 1.0), (0.2, 0.4))
    assert (info.seed, info.maps_per_cosmology, info.counts) == (3, 2, {"train": 16, "test": 2})
    assert report["train_rows"] == 16 and report["pixel_std"] == list(info.pixel_std) and len(info.pixel_std) == 2
    assert read_arrays(tmp_path, "train")["map"].shape == (16, 2, 16, 16)


def test_survey_maps_default_to_des_y3(tmp_path):
    command = ["--kind", "des", "--samples", 4, "--size", 16, "--mask-fraction", 0.2]
    call(*command, "--out", tmp_path / "y3")
    settings = load_cosmology_info(tmp_path / "y3").settings
    assert (settings.source_redshifts, settings.galaxies_per_arcmin2) == ((0.34, 0.52, 0.74, 0.94), 5.59)
    assert settings.sigma_e == pytest.approx(0.3677, abs=1e-4)
    assert read_arrays(tmp_path / "y3", "train")["map"].shape == (4, 4, 16, 16)
    call(*command, "--sigma-e", 0, "--source-redshifts", 1.0, "--out", tmp_path / "own")
    settings = load_cosmology_info(tmp_path / "own").settings
    assert (settings.source_redshifts, settings.galaxies_per_arcmin2, settings.sigma_e) == ((1.0,), 5.59, 0)


def test_help_states_des_y3_values_and_their_source():
    from hrm_hf.cosmology.simulation.maps import DES_Y3

    text = " ".join(call("--help").output.replace("│", " ").split())
    for figure in (",".join(map(str, DES_Y3["source_redshifts"])), f"{DES_Y3['sigma_e']:.2f}", "5.59", "2012.08566"):
        assert figure in text


def test_repeated_command_changes_nothing_and_other_options_are_rejected(tmp_path):
    command = ("--samples", 8, "--size", 16, "--out", tmp_path)
    call(*command)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")}
    call(*command)
    assert files == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet")}
    assert "size is 16, requested 32" in refusal("--samples", 8, "--size", 32, "--out", tmp_path)


def refusal(*args) -> str:
    """Return the text of a usage error, without the line breaks of its box."""
    return " ".join(call(*args, code=2).output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "nbody"], "'nbody'"),
        (["--kind", "legacy-des", "--sigma-e", "0.3"], "--sigma-e: sigma_e=0.3"),
        (["--mask-fraction", "0.2"], "--mask-fraction: mask_fraction=0.2"),
        (["--box-mpc", "512"], "--box-mpc: box_mpc=512.0"),
        (["--source-redshifts", "one"], "--source-redshifts: source_redshifts='one'"),
        (["--omega-m", "0.1"], "--omega-m: omega_m='0.1': expected 2"),
        (["--omega-m", "0.01,0.5"], "omega_b=0.046: must be below omega_m=0.01"),
        (["--sigma-e", "-1"], "sigma_e=-1.0"),
        (["--kind", "2lpt", "--box-grid", "63"], "box_grid=63: must be an even"),
        (["--kind", "2lpt", "--side-deg", "8"], "box_mpc to at least 375"),
    ],
)
def test_bad_usage_exits_with_2_and_writes_nothing(tmp_path, options, message):
    assert message in refusal("--samples", 4, "--out", tmp_path / "set", *options)
    assert not (tmp_path / "set").exists()


def test_ctrl_c_explains_how_to_continue(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cosmology_build, "write_shard", interrupted)
    result = call("--samples", 4, "--size", 16, "--out", tmp_path, code=130)
    assert "repeat the command" in result.output
