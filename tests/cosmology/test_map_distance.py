"""Detection of maps unlike the training maps, by the model, the pipeline, evaluation and the app.

Referees: the Mahalanobis distance by numpy; maps of another generator and with other noise.
"""

import logging

import numpy as np
import pytest
import torch

from hrm_hf.app.maps_tab import summary as remarks
from hrm_hf.cosmology.dataset.collator import MapCollator, MapRows
from hrm_hf.cosmology.dataset.rows import MapSet
from hrm_hf.cosmology.evaluation import summary
from hrm_hf.cosmology.evaluation_run import evaluate_checkpoint, map_distances
from hrm_hf.cosmology.options import EvaluateCosmo
from hrm_hf.cosmology.run import fit_map_distance
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_map
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.models.pipeline_cosmo import CosmologyRegressionPipeline
from tests.helpers import tiny_cosmo


def draw(kind, count, first_seed, **settings):
    rng = np.random.default_rng(first_seed)
    parameters = rng.uniform([0.1, 0.6], [0.5, 1.0], (count, 2))
    settings = MapSettings(kind, size=32, **settings)
    return np.stack([generate_map(settings, *pair, first_seed + row)[0] for row, pair in enumerate(parameters)])


@pytest.fixture(scope="module")
def trained():
    """A model whose statistics are fitted to 600 log-normal maps, and its extractor."""
    maps = draw("lognormal", 600, 0)
    figures = {"pixel_mean": [float(maps.mean())], "pixel_std": [float(maps.std())]}
    model = tiny_cosmo.model(image_size=32, num_ps_bins=8, **figures).eval()
    extractor = CosmoMapFeatureExtractor.from_config(model.config)
    model.fit_statistics([extractor(part)["pixel_values"] for part in np.split(maps[:400], 4)])
    rows = MapRows(maps, np.zeros((600, 2), np.float32), rows=np.arange(400, 600))
    limit = fit_map_distance(model, rows, MapCollator(extractor), 64)
    assert limit == model.config.max_map_distance
    return model, extractor


def test_map_distance_is_the_mahalanobis_distance(trained):
    model, extractor = trained
    statistics = model.model.stem.statistics
    train = extractor(draw("lognormal", 400, 0))["pixel_values"]
    other = extractor(draw("gaussian", 5, 10**6))["pixel_values"]
    known, new = (statistics.features(values).double().numpy() for values in (train, other))
    away = new - known.mean(0)
    expected = np.sqrt(np.einsum("bi,ij,bj->b", away, np.linalg.pinv(np.cov(known.T)), away) / known.shape[1])
    # The model has a variance floor, so directions in which the training maps hardly vary weigh less than here.
    np.testing.assert_allclose(model.map_distance(other), expected, rtol=0.2)
    assert 0.8 < model.map_distance(train).square().mean().sqrt() < 1.05


def test_maps_unlike_the_training_maps_are_detected(trained):
    model, extractor = trained
    share = {
        name: map_distances(model, extractor, MapSet(maps, {}))["share_beyond"]
        for name, maps in {
            "same": draw("lognormal", 300, 2 * 10**6),
            "gaussian": draw("gaussian", 60, 3 * 10**6),
            "noisy": draw("lognormal", 60, 4 * 10**6, sigma_e=0.3),
        }.items()
    }
    # The limit is such that 1 of 200 maps exceeds it, so the share among 60 maps has a spread of about 1 %.
    assert share["same"] < 0.03 and share["gaussian"] > 0.5 and share["noisy"] > 0.95


def test_the_pipeline_warns_about_maps_unlike_the_training_maps(trained, caplog):
    model, extractor = trained
    infer = CosmologyRegressionPipeline(model=model, feature_extractor=extractor, device="cpu")
    noisy = draw("lognormal", 3, 5 * 10**6, sigma_e=0.3)
    logging.getLogger("hrm_hf").addHandler(caplog.handler)
    try:
        usual = infer(draw("lognormal", 1, 7)[0])
        assert not caplog.records
        found = infer(noisy, batch_size=3)
    finally:
        logging.getLogger("hrm_hf").removeHandler(caplog.handler)
    assert "3 of 3 maps" in caplog.text
    limit = model.config.max_map_distance
    assert usual["map_distance"] <= limit == usual["max_map_distance"] < min(one["map_distance"] for one in found)
    assert "<strong>" in remarks(model.config, {"map": noisy[0]}, found[0])
    assert "<strong>" not in remarks(model.config, {"map": noisy[0]}, usual)


def test_a_model_without_statistics_has_no_distance():
    model = tiny_cosmo.model(use_power_spectrum=False, use_histogram=False)
    assert model.map_distance(torch.zeros(1, 1, 16, 16)) is None
    collator = MapCollator(CosmoMapFeatureExtractor.from_config(model.config))
    assert fit_map_distance(model, tiny_cosmo.rows(), collator, 8) is None
    assert model.config.max_map_distance is None


def test_evaluation_reports_the_share_of_distant_maps(trained, tmp_path):
    from hrm_hf.cosmology.dataset.build import build_cosmology_dataset

    model, extractor = trained
    model.save_pretrained(tmp_path / "model")
    extractor.save_pretrained(tmp_path / "model")
    build_cosmology_dataset(MapSettings(size=32), tmp_path / "same", 4, 12)
    build_cosmology_dataset(MapSettings(size=32, sigma_e=0.3), tmp_path / "noisy", 4, 12)
    data, shifted = (str(tmp_path / name) for name in ("same", "noisy"))
    options = EvaluateCosmo(model=str(tmp_path / "model"), data=data, shift_data=shifted, num_samples=100)
    result = evaluate_checkpoint(options)
    assert result["metrics"]["map_distance"]["limit"] == pytest.approx(model.config.max_map_distance)
    assert result["metrics"]["map_distance"]["share_beyond"] < 0.2
    assert result["shift"]["metrics"]["map_distance"]["share_beyond"] > 0.9
    assert summary(result["shift"]["metrics"])["not like the training maps"].startswith(("9", "100.0%"))
