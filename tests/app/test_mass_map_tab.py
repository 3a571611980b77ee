"""The mass map tab without a browser; referees are the pipeline and the generator of the data sets."""

import numpy as np
import pytest
from transformers import pipeline

from hrm_hf.app import build_app, maps_tab
from hrm_hf.app.maps_tab import (
    SIGMA_E,
    error_remark,
    galaxies_of_training,
    infer,
    map_errors,
    maps_image,
    sample_shear,
    segments_image,
)
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_columns
from hrm_hf.models.configuration_hrm_mass_mapping import HrmMassMappingConfig


SKY = {"sigma_e": 0.26, "galaxies": 30.0, "mask_fraction": 0.3}
QUESTION = (0.3, 0.8, 0.26, 30, 0.3, 5)  # slider values: parameters, shape noise, galaxies, masked fraction, seed


@pytest.fixture(scope="module")
def mapper(checkpoints):
    return pipeline("mass-mapping", model=str(checkpoints["hrm_mass_mapping"]))


@pytest.fixture(scope="module")
def page(checkpoints):
    """A page with both mass map models, the recurrent one first."""
    return build_app([str(checkpoints[name]) for name in ("hrm_mass_mapping", "cosmo_unet")])


@pytest.fixture
def drawn_panels(monkeypatch):
    """Title and values of each drawn panel."""
    panels, draw = [], maps_tab.map_panels

    def recorded(drawn, **options):
        panels.extend((title, values) for title, values, _ in drawn)
        return draw(drawn, **options)

    monkeypatch.setattr(maps_tab, "map_panels", recorded)
    return panels


def handlers(page, name):
    """Return the functions of the events with this name, one per tab."""
    found = [function.fn for function in page.fns.values() if getattr(function.fn, "__name__", "") == name]
    return list(dict.fromkeys(found))


def ancestors(block):
    while (block := block.parent) is not None and hasattr(block, "visible"):
        yield block


def test_sampled_shear_equals_that_of_a_data_set(mapper):
    config = mapper.model.config
    item, kappa = sample_shear(config, 0.3, 0.8, 5, **SKY)
    settings = MapSettings(size=16, observable="shear", sigma_e=0.26, galaxies_per_arcmin2=30.0, mask_fraction=0.3)
    expected = generate_columns(settings, 0.3, 0.8, 5)
    np.testing.assert_array_equal(item["map"], expected["map"])
    np.testing.assert_array_equal(item["mask"], expected["mask"])
    np.testing.assert_array_equal(kappa, expected["kappa"])
    assert not item["mask"].all()


def test_default_shear_noise_matches_training():
    settings = MapSettings(size=64, observable="shear", sigma_e=SIGMA_E, galaxies_per_arcmin2=25.0, mask_fraction=0.3)
    rows = [generate_columns(settings, 0.3, 0.8, seed) for seed in range(20)]
    shear = np.concatenate([row["map"][:, row["mask"]] for row in rows], axis=1)
    figures = {"pixel_std": shear.std(1).tolist(), "kappa_std": [np.std([row["kappa"] for row in rows]).item()]}
    assert galaxies_of_training(HrmMassMappingConfig(**figures)) == pytest.approx(25, abs=1)
    assert galaxies_of_training(HrmMassMappingConfig(**figures | {"kappa_std": [1.0]})) == 100  # no noise at all
    assert galaxies_of_training(HrmMassMappingConfig()) == MapSettings().galaxies_per_arcmin2


def test_map_equals_the_pipelines_and_its_error_is_shown(mapper):
    item, kappa = sample_shear(mapper.model.config, 0.3, 0.8, 5, **SKY)
    result = infer(mapper, item, 3, "fixed", return_segments=True)
    expected = mapper(item, max_steps=3)["kappa"]
    np.testing.assert_array_equal(result["kappa"], expected)
    truth = kappa[0] - kappa[0].mean()
    error = np.sqrt(((expected - truth) ** 2).sum() / (truth**2).sum())
    assert map_errors(result["segment_maps"], kappa)[-1] == pytest.approx(error, rel=1e-4)
    assert f"{error:.3f} of the rms of the truth; in masked pixels: " in error_remark(item, result, kappa)


def test_masked_shear_pixels_are_blank_and_truth_is_optional(mapper, drawn_panels):
    item, kappa = sample_shear(mapper.model.config, 0.3, 0.8, 5, **SKY)
    result = infer(mapper, item, None, "fixed", return_segments=True)
    image = maps_image(item, result, kappa)
    assert [title for title, _ in drawn_panels] == ["Truth", "|shear|", "Mass map", "Uncertainty"]
    shear = dict(drawn_panels)["|shear|"]
    np.testing.assert_array_equal(np.isnan(shear), ~item["mask"])
    seen = item["mask"]
    np.testing.assert_allclose(shear[seen], np.sqrt((item["map"] ** 2).sum(0))[seen], rtol=1e-6)
    assert np.asarray(image.convert("L")).std() > 10
    drawn_panels.clear()
    maps_image(item, result, None)
    assert [title for title, _ in drawn_panels] == ["|shear|", "Mass map", "Uncertainty"]


def test_segments_after_a_halt_are_not_shown(mapper, drawn_panels):
    item, kappa = sample_shear(mapper.model.config, 0.3, 0.8, 5, **SKY)
    result = infer(mapper, item, 5, "fixed", return_segments=True)
    segments_image(result, kappa)
    assert [title.partition(":")[0] for title, _ in drawn_panels] == [f"Segment {number}" for number in range(1, 6)]
    drawn_panels.clear()
    segments_image(result | {"steps": 2}, None)
    assert [title for title, _ in drawn_panels] == ["Segment 1", "Segment 2"]
    np.testing.assert_array_equal(drawn_panels[1][1], result["segment_maps"][1, 0])


def test_both_models_answer_on_the_page(page, mapper):
    recurrent, plain = handlers(page, "drawn")
    maps, segments, corner, words, rows = recurrent(*QUESTION, 4, "adaptive")
    assert all(np.asarray(image.convert("L")).std() > 10 for image in (maps, segments, corner))
    item, _ = sample_shear(mapper.model.config, 0.3, 0.8, 5, **SKY)
    expected = mapper(item, max_steps=4, halt="adaptive", num_samples=4000)
    assert [row[0] for row in rows] == ["omega_m", "sigma_8", "s_8"] and rows[0][5] == "0.300"
    assert rows[0][1] == f"{expected['omega_m']['mean']:.3f}"
    steps = expected["steps"]
    assert f"<p>{steps} {'segment' if steps == 1 else 'segments'} used." in words and "Error of the map: " in words
    assert "1 segment used" in plain(*QUESTION, 1, "fixed")[3]


def test_only_the_recurrent_model_has_segments_to_choose(page):
    shown = {name: [] for name in ("Maximum segments", "Halting", "Map after each segment")}
    for block in page.blocks.values():
        if getattr(block, "label", None) in shown:
            shown[block.label].append(all(each.visible for each in (block, *ancestors(block))))
    assert list(shown.values()) == [[True, False]] * 3


def test_an_uploaded_map_has_a_mask_and_no_truth(page, mapper, tmp_path, drawn_panels):
    item, _ = sample_shear(mapper.model.config, 0.3, 0.8, 5, **SKY)
    np.savez(tmp_path / "sky.npz", **item)
    *_, words, rows = handlers(page, "uploaded")[0](str(tmp_path / "sky.npz"), 2, "fixed")
    assert drawn_panels[0][0] == "|shear|" and np.isnan(drawn_panels[0][1]).any()
    expected = mapper(item, max_steps=2, num_samples=4000)
    assert rows[0][1] == f"{expected['omega_m']['mean']:.3f}" and rows[0][5] == "unknown"
    assert "Error of the map" not in words
