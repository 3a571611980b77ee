"""`training/run_cosmo.py` from a data set to a results folder, its recipes, and every option of the original's script.

Referees: the saved model run by the pipeline and by `predict_maps`, a repeated run, and one process instead of two.
"""

import json
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import started
import tiny_cosmo
import torch
import typer
import yaml
from safetensors.torch import load_file
from transformers import AutoFeatureExtractor, AutoModelForImageClassification, pipeline

from hrm_hf.cli.data import app as data_app
from hrm_hf.cosmology.arguments import CosmoDataArguments, CosmoTrainingArguments
from hrm_hf.cosmology.dataset.collator import MapCollator
from hrm_hf.cosmology.dataset.rows import MapSet, read_arrays
from hrm_hf.cosmology.evaluation_run import predict_maps
from hrm_hf.cosmology.run import fit_posterior_scale, load_maps, load_test_maps
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.trainer.recipes import ModelArguments, build_config, load_recipe, parse_recipe


SCRIPT = str(Path(__file__).parents[2] / "training" / "run_cosmo.py")
RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").glob("cosmo_*.yaml"))
CLASSES = (ModelArguments, CosmoDataArguments, CosmoTrainingArguments)
RECIPE = {
    "model_type": "hrm_cosmo", "preset": "test", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    "logging_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "max_steps": 4, "val_samples": 10,
    "save_strategy": "no", "max_test_samples": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    """A data set of 40 and 8 maps."""
    return tiny_cosmo.build(tmp_path_factory.mktemp("data") / "maps")


@pytest.fixture
def run(tmp_path, maps, monkeypatch):
    """`run("name", option=value, ...)` runs the script in this process and returns its output folder."""

    def start(name, *flags, **options):
        recipe = {**RECIPE, "data_path": maps, "output_dir": str(tmp_path / name), **options}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
        monkeypatch.setattr(sys, "argv", [SCRIPT, "--recipe", str(path), *flags])
        # Not as "__main__", which would block the signals of the tests.
        runpy.run_path(SCRIPT, run_name="run_cosmo")["main"]()
        return tmp_path / name

    return start


def history(out: Path) -> list[dict]:
    return json.loads((out / "trainer_state.json").read_text())["log_history"]


def losses(out: Path) -> list[float]:
    return [entry["loss"] for entry in history(out) if "loss" in entry]


# ---- a run ----


def test_a_run_saves_model_recipe_and_results(run, maps, tmp_path):
    out = run(
        "one", "--num_train_epochs", "2", max_steps=None, max_test_samples=8, eval_strategy="epoch", ema_rate=0.9
    )
    expected = {
        "model.safetensors", "raw_weights.safetensors", "config.json", "preprocessor_config.json", "recipe.yaml",
        "results.json", "corner.png", "predictions.png", "calibration.png", "training.png", "README.md",
        "trainer_state.json",
    }  # fmt: skip
    assert expected <= {path.name for path in out.iterdir()}
    results = json.loads((out / "results.json").read_text())
    assert results["task"] == "cosmology-regression" and results["steps"] == 8  # 30 maps in batches of 8, twice
    assert results["validation"]["maps"] == 10 and results["metrics"]["count"] == 8
    saved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert saved["num_train_epochs"] == 2 and saved["learning_rate"] == 1e-3 and saved["data_path"] == maps
    card = (out / "README.md").read_text()
    assert "s_8_rmse" in card and "omega_m from 0.1 to 0.5 and sigma_8 from 0.6 to 1" in card and "$" not in card

    # Evaluating the saved folder gives the same result.
    model, rows = AutoModelForImageClassification.from_pretrained(out).eval(), MapSet.read(maps, "test")
    predictions = predict_maps(model, AutoFeatureExtractor.from_pretrained(out), rows).predictions
    for column, name in enumerate(model.config.reported_names):
        rmse = np.sqrt(np.mean((predictions.mean - predictions.truth)[:, column] ** 2))
        assert results["metrics"]["parameters"][name]["rmse"] == pytest.approx(rmse, rel=1e-5)
    answers = pipeline("cosmology-regression", model=str(out), device="cpu")(rows.maps)
    assert [answer["s_8"]["mean"] for answer in answers] == pytest.approx(predictions.mean[:, 2], abs=1e-5)


def test_a_saved_recipe_reproduces_its_run(run, tmp_path):
    out = run("first", scale_learning_rate=True, base_batch_size=4)
    again = yaml.safe_load((out / "recipe.yaml").read_text())
    assert again["learning_rate"] == 1e-3  # not the scaled one, which would be scaled again
    second = run("second", **{**again, "output_dir": str(tmp_path / "second")})
    assert losses(second) == losses(out)
    rates = [entry["learning_rate"] for entry in history(out) if "loss" in entry]
    assert max(rates) == pytest.approx(2e-3)


def test_the_cnn_is_trained_by_the_same_script(run):
    out = run("cnn", model_type="cosmo_cnn", max_test_samples=8)
    results = json.loads((out / "results.json").read_text())
    assert len(losses(out)) == 4 and results["metrics"]["count"] == 8
    assert "residual network (`cosmo_cnn`)" in (out / "README.md").read_text()


def test_a_model_trains_on_masked_survey_maps(run, tmp_path):
    data = tiny_cosmo.build(
        tmp_path / "des", 24, 4, kind="des", sigma_e=0.26, source_redshifts=(0.5, 1.0), mask_fraction=0.3
    )
    out = run("des", data_path=data, val_samples=6, fit_posterior_scale=False)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_channels"], config["mask_channel"], config["padding_mode"]) == (3, True, "zeros")
    assert config["posterior_scale"] == 1.0


def test_training_from_saved_weights_keeps_their_pixel_statistics(run, tmp_path):
    first = run("first")
    other = tiny_cosmo.build(tmp_path / "other", 30, 4, side_deg=8.0)
    second = run("second", data_path=other, model_type=None, preset=None, model_name_or_path=str(first), max_steps=1)
    assert (second / "preprocessor_config.json").read_text() == (first / "preprocessor_config.json").read_text()
    larger = tiny_cosmo.build(tmp_path / "larger", 30, 4, source_redshifts=(0.5, 1.0))
    with pytest.raises(ValueError, match=r"num_channels=1\b.*larger .*\b2\b"):
        run("third", data_path=larger, model_type=None, preset=None, model_name_or_path=str(first))


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(run, maps, tmp_path):
    options = {"noise_sigma": 0.01, "dataloader_num_workers": 1, "max_train_samples": 24, "eval_strategy": "steps"}
    options["config_overrides"] = {"statistics_dropout": 0.0}  # its random numbers depend on the batch size
    one = run("one", eval_steps=3, max_steps=6, **options)
    recipe = {**RECIPE, "data_path": maps, "output_dir": str(tmp_path / "two"), "eval_steps": 3, **options}
    # One batch holds all 10 maps of the evaluation, so the second process has only repeated maps.
    batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 10}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**recipe, "max_steps": 6, **batches}))
    result = started.run_script(SCRIPT, ["--recipe", str(tmp_path / "two.yaml")], processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    two = tmp_path / "two"
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)  # transformers rounds logged values
    evaluations = [[entry for entry in history(out) if "eval_maps" in entry] for out in (one, two)]
    for mine, expected in zip(*evaluations, strict=True):
        assert mine["eval_maps"] == expected["eval_maps"] == 10
        for name in ("eval_loss", "eval_nll_loss", "eval_rmse_omega_m", "eval_rmse_s_8"):
            assert mine[name] == pytest.approx(expected[name], rel=1e-4)
    expected, found = (load_file(out / "model.safetensors") for out in (one, two))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


# ---- data ----


def test_training_and_validation_maps_share_no_cosmology(maps):
    found = load_maps(CosmoDataArguments(data_path=maps, max_train_samples=20, val_samples=7))
    ids = read_arrays(maps, "train", ["cosmology_id"])["cosmology_id"]
    assert (len(found.train), len(found.validation)) == (20, 7)
    assert not set(ids[found.train.rows]) & set(ids[found.validation.rows])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_train_samples": 31}, "max_train_samples=31 .*val_samples=10.* 40 "),
        ({"val_samples": 40}, "val_samples=40: "),
        ({"max_test_samples": 9}, "max_test_samples=9.* 8 maps"),
        ({"data_path": None}, "data_path=None"),
        ({"data_path": "nowhere"}, "^nowhere "),
        ({"build_data": "cosmology --kind gaussian --samples 40 --test-samples 8 --size 16"}, "kind is lognormal"),
        ({"build_data": "cosmology --samples 40 --size 16", "max_train_samples": 31}, "samples=40: .*val_samples.*41"),
        ({"model_type": "hrm_lm", "preset": None}, "model_type.*hrm_lm"),
        ({"config_overrides": "hiden_size=8"}, "hiden_size.*'hidden_size'"),
    ],
)
def test_incompatible_data_and_models_are_rejected(run, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("refused", max_steps=1, **options)


def test_noise_is_included_in_the_scaling_and_the_test_maps(run, maps, tmp_path):
    out = run("noisy", noise_sigma=0.05, max_steps=1)
    extractor = AutoFeatureExtractor.from_pretrained(out)
    rows = read_arrays(maps, "train", ["map"])
    assert extractor.pixel_std[0] == pytest.approx(np.hypot(rows["map"].std(), 0.05), rel=1e-3)
    arguments = CosmoDataArguments(data_path=maps, noise_sigma=0.05)
    noisy, plain = load_test_maps(arguments, 42).maps, read_arrays(maps, "test")["map"]
    assert (noisy - plain).std() == pytest.approx(0.05, rel=0.05)
    assert np.array_equal(load_test_maps(arguments, 42).maps, noisy)
    shear = tiny_cosmo.build(tmp_path / "shear", 20, 4, sigma_e=0.26)
    with pytest.raises(ValueError, match=r"noise_sigma=0\.05.*sigma_e=0\.26"):
        run("twice", data_path=shear, noise_sigma=0.05)


def test_the_fitted_posterior_scale_corrects_a_wrong_one():
    model, rows = tiny_cosmo.model(), tiny_cosmo.rows(200)
    collator = MapCollator(CosmoMapFeatureExtractor.from_config(model.config))
    right = fit_posterior_scale(model, rows, collator, 64)
    model.config.posterior_scale = 2 * right
    assert fit_posterior_scale(model, rows, collator, 64) == pytest.approx(right, rel=0.03)


# ---- recipes, and the flags of the original's script ----


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_builds_its_model_and_its_data(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {one.name for part in CLASSES for one in fields(part)}
    flags = ["--recipe", str(path), "--use_cpu", "true", "--bf16", "false"]
    model_args, data_args, args = parse_recipe(CLASSES, flags)
    assert load_recipe(path, known)["output_dir"] == args.output_dir
    size = 256 if model_args.preset == "cosmo-256" else 64
    name, *command = shlex.split(data_args.build_data)
    context = typer.main.get_command(data_app).commands[name].make_context(name, [*command, "--out", str(tmp_path)])
    assert context.params["size"] == size
    assert context.params["samples"] >= (data_args.max_train_samples or 0) + data_args.val_samples
    config = build_config(model_args, image_size=size, num_channels=1)
    assert config.problem_type == "regression"


def test_options_of_the_original_script_take_effect(run):
    # --epochs, --batch-size, --lr, --train-samples, --val-samples, --seed; the test of two processes has --num-workers
    flags = (
        "--num_train_epochs 1 --per_device_train_batch_size 5 --learning_rate 2e-3 --max_train_samples 20 "
        "--val_samples 4 --seed 7 --lr_min_ratio 1"
    )
    out = run("flags", *flags.split(), max_steps=None, eval_strategy="epoch", warmup_steps=0)
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 4 and results["data"]["train_maps"] == 20 and results["validation"]["maps"] == 4
    assert {entry["learning_rate"] for entry in history(out) if "loss" in entry} == {2e-3}
    flags = flags.replace("--seed 7", "--seed 8")
    other = run("other", *flags.split(), max_steps=None, warmup_steps=0)
    assert losses(other) != losses(out)
