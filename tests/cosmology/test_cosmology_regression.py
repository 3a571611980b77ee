"""`pipeline("cosmology-regression")`: every input format of maps gives the same posterior as the model itself.

Referees: the model and its own draws, numpy's quantiles.
"""

import json

import numpy as np
import pytest
import tiny_cosmo
import torch
from transformers import pipeline

from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor


NAMES = ["omega_m", "sigma_8", "s_8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A saved model whose outputs differ between maps, with its feature extractor."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_cosmo.model()
    with torch.no_grad():
        model.posterior_head.out.weight.normal_(std=0.3)
    model.save_pretrained(folder)
    CosmoMapFeatureExtractor.from_config(model.config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def infer(checkpoint):
    return pipeline("cosmology-regression", model=str(checkpoint), device="cpu")


@pytest.fixture(scope="module")
def maps():
    return tiny_cosmo.rows(5).maps


def test_estimates_match_the_model_outputs(infer, maps):
    found = infer(maps)
    with torch.no_grad():
        outputs = infer.model(**infer.feature_extractor(maps))
    for row, result in enumerate(found):
        assert list(result) == [*NAMES, "steps"] and result["steps"] == 2
        for column, name in enumerate(NAMES):
            figures = result[name]
            assert figures["mean"] == pytest.approx(outputs.reported_means[row, column].item(), abs=1e-5)
            assert figures["std"] == pytest.approx(outputs.reported_stds[row, column].item(), abs=1e-5)
    assert len({result["omega_m"]["mean"] for result in found}) == 5
    json.dumps(found)


def test_intervals_are_quantiles_of_the_draws(infer, maps):
    result = infer(maps[0], num_samples=4000, return_samples=True, seed=3)
    samples = result["samples"]
    assert samples.shape == (4000, 3)
    for column, name in enumerate(NAMES):
        figures = result[name]
        assert figures["interval_68"] == pytest.approx(np.quantile(samples[:, column], [0.15865, 0.84135]))
        assert figures["interval_95"][0] < figures["interval_68"][0] < figures["interval_68"][1]
        assert samples[:, column].mean() == pytest.approx(figures["mean"], abs=0.1 * figures["std"])
        assert samples[:, column].std() == pytest.approx(figures["std"], rel=0.1)
    np.testing.assert_allclose(samples[:, 2], samples[:, 1] * np.sqrt(samples[:, 0] / 0.3), rtol=1e-5)
    assert infer(maps[0], seed=3) == infer(maps[0], seed=3) != infer(maps[0], seed=4)


def test_every_input_format_gives_the_same_result(infer, maps, tmp_path):
    expected = infer(maps)
    np.save(tmp_path / "all.npy", maps)
    np.save(tmp_path / "one.npy", maps[2, 0])
    np.savez(tmp_path / "all.npz", map=maps)
    forms = [
        list(maps), maps.tolist(), torch.from_numpy(maps), str(tmp_path / "all.npy"), tmp_path / "all.npz",
        [{"map": one} for one in maps], {"map": maps}, (one for one in maps),
    ]  # fmt: skip
    for form in forms:
        assert list(infer(form)) == expected
    for form in (maps[2], maps[2, 0], maps[2].tolist(), str(tmp_path / "one.npy"), {"map": maps[2]}):
        assert infer(form) == expected[2]
    for form in ([maps[2]], maps[2:3], [str(tmp_path / "one.npy")]):
        assert infer(form) == [expected[2]]
    assert infer([]) == []


def test_a_result_does_not_depend_on_the_rest_of_the_batch(infer, maps):
    alone = [infer(one) for one in maps]
    for together in (infer(maps, batch_size=1), infer(maps, batch_size=2), infer(maps, batch_size=5)):
        for mine, expected in zip(together, alone, strict=True):
            assert mine["steps"] == expected["steps"]
            for name in NAMES:
                assert mine[name]["mean"] == pytest.approx(expected[name]["mean"], abs=1e-5)
                assert mine[name]["interval_95"] == pytest.approx(expected[name]["interval_95"], abs=1e-4)


def test_segments_can_be_chosen(infer, maps):
    assert infer(maps[0], max_steps=5)["steps"] == 5
    infer.model.config.halt_threshold = 10.0  # in nats; no segment gains as much
    try:
        assert infer(maps[0], halt="adaptive")["steps"] == 1
    finally:
        infer.model.config.halt_threshold = 0.01


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (np.zeros((3, 7)), {}, r"\[3, 7\]"),
        (np.full((16, 16), np.nan), {}, "256 of 256"),
        ("nowhere.fits", {}, r"nowhere\.fits"),
        ({"maps": 1}, {}, r"\['maps'\].* map\b"),
        ({"map": np.zeros((16, 16)), "mask": np.ones((16, 16))}, {}, "mask.*mask_channel=False"),
        (np.zeros((16, 16)), {"num_samples": 1}, "num_samples=1"),
        (np.zeros((16, 16)), {"halt": "q"}, "halt='q'"),
    ],
)
def test_bad_input_is_rejected_with_the_reason(infer, inputs, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        infer(inputs, **options)
