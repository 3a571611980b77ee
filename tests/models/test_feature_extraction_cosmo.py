"""Maps are scaled by the statistics of the data set; invalid maps are rejected with their location.

Referees: numpy's arithmetic, astropy as the writer of FITS files, and AutoFeatureExtractor in a new process.
"""

import numpy as np
import pytest
import tiny_cosmo
import torch
from transformers import AutoFeatureExtractor

from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor


SIZE = 8


@pytest.fixture
def maps():
    return np.random.default_rng(0).normal(3, 2, (5, 1, SIZE, SIZE)).astype(np.float32)


@pytest.fixture
def extractor():
    return CosmoMapFeatureExtractor(SIZE, [3.0], [2.0])


@pytest.fixture
def masked():
    return CosmoMapFeatureExtractor(SIZE, [3.0, -1.0], [2.0, 0.5], mask_channel=True)


def test_scaling_uses_the_given_statistics_and_keeps_the_amplitude(extractor, maps):
    found = extractor(maps)["pixel_values"]
    assert found.dtype == torch.float32 and found.shape == (5, 1, SIZE, SIZE)
    np.testing.assert_allclose(found, (maps - 3) / 2, rtol=1e-6, atol=1e-6)
    twice = extractor(3 + 2 * (maps - 3))["pixel_values"]
    torch.testing.assert_close(twice, 2 * found)


def test_asinh_applies_to_the_scaled_map(maps):
    found = CosmoMapFeatureExtractor(SIZE, [3.0], [2.0], stretch="asinh")(maps)["pixel_values"]
    np.testing.assert_allclose(found, np.arcsinh((maps - 3) / 2), rtol=1e-5, atol=1e-6)


def test_one_or_several_maps_are_accepted_in_any_form(extractor, maps, tmp_path):
    expected = extractor(maps)["pixel_values"]
    np.save(tmp_path / "all.npy", maps)
    np.save(tmp_path / "one.npy", maps[0, 0])
    np.savez(tmp_path / "all.npz", map=maps)
    for form in (
        maps.tolist(), list(maps), [one[0] for one in maps], torch.from_numpy(maps), maps[:, 0],
        maps.astype(np.float64), str(tmp_path / "all.npy"), tmp_path / "all.npz",
    ):  # fmt: skip
        assert torch.equal(extractor(form)["pixel_values"], expected)
    for form in (maps[0], maps[0, 0], maps[0, 0].tolist(), tmp_path / "one.npy", [str(tmp_path / "one.npy")]):
        assert torch.equal(extractor(form)["pixel_values"], expected[:1])


def test_fits_files_are_read_with_their_mask(masked, tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    rng = np.random.default_rng(1)
    maps, mask = rng.normal(size=(2, SIZE, SIZE)), rng.random((SIZE, SIZE)) < 0.7
    noise, mapped = fits.ImageHDU(maps + 9, name="NOISE"), fits.ImageHDU(maps, name="KAPPA")
    units = [fits.PrimaryHDU(), noise, mapped, fits.ImageHDU(mask.astype(np.uint8), name="MASK")]
    fits.HDUList(units).writeto(tmp_path / "map.fits")
    found = masked(tmp_path / "map.fits")["pixel_values"]
    assert torch.equal(found, masked(maps, mask)["pixel_values"])
    assert found.shape == (1, 3, SIZE, SIZE) and found[0, 2].sum() == mask.sum()


def test_the_mask_is_the_last_channel_and_hides_unobserved_pixels(masked):
    maps = np.random.default_rng(2).normal(size=(2, 2, SIZE, SIZE))
    mask = np.ones((2, SIZE, SIZE), bool)
    mask[0, :3] = False
    maps[0, :, :3] = np.nan  # unobserved
    found = masked(maps, mask)["pixel_values"]
    assert torch.equal(found[:, 2].bool(), torch.from_numpy(mask))
    assert (found[0, :2, :3] == 0).all()
    np.testing.assert_allclose(found[1, 1], (maps[1, 1] + 1) / 0.5, rtol=1e-5)
    everything = masked(maps[1])["pixel_values"]
    assert torch.equal(everything[0], found[1])


def test_masked_arrays_keep_their_mask_in_every_form(masked, extractor):
    maps = np.random.default_rng(2).normal(size=(2, 2, SIZE, SIZE))
    array = np.ma.masked_array(maps, np.abs(maps) > 1.5)
    expected = masked(maps, ~array.mask.any(1))["pixel_values"]
    for form in (array, list(array), [list(each) for each in array]):
        assert torch.equal(masked(form)["pixel_values"], expected)
    mask = np.ma.masked_array(np.ones((2, SIZE, SIZE)), array.mask.any(1))
    assert torch.equal(masked(maps, mask)["pixel_values"], expected)
    with pytest.raises(ValueError, match=f"{array[0, 0].mask.sum()} pixels are masked"):
        extractor(array[0, 0])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda m: np.where(np.arange(SIZE) == 3, -1.6375e30, m), r"^map 0: 8 of 64 .*UNSEEN.*mask"),
        (lambda m: m[..., :-1], r"\[5, 1, 8, 7\].*\[8, 8\].*\[1, 8, 8\]"),
        (lambda m: m[0, 0, 0], r"shape \[8\]"),
        (lambda m: np.where(np.arange(SIZE) == 3, np.nan, m), r"^map 0: 8 of 64 .*\[0, 0, 3\]"),
        (lambda m: [*m[:2], m[2] * np.inf], "^item 2: 64 of 64 "),
        (lambda m: m.astype(np.float64) * 1e60, "float32"),
        (lambda m: m.astype(complex), "complex128"),
        (lambda m: [[1.0, 2.0], [3.0]], "regular array"),
        (lambda m: "nowhere.npy", r"nowhere\.npy .*exist"),
        (lambda m: "map.png", r"map\.png .*one of \.npy"),
    ],
)
def test_invalid_maps_are_rejected_with_their_position(extractor, maps, broken, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        extractor(broken(maps))


def test_invalid_masks_are_rejected(extractor, masked, maps):
    two = np.zeros((2, SIZE, SIZE))
    with pytest.raises(ValueError, match=r"mask.*empty"):
        masked(two, np.zeros((SIZE, SIZE)))
    with pytest.raises(ValueError, match=r"mask.*\[7, 8\].*\[8, 8\]"):
        masked(two, np.ones((7, SIZE)))
    with pytest.raises(ValueError, match=r"mask.*\[0\.5\]"):
        masked(two, np.full((SIZE, SIZE), 0.5))
    with pytest.raises(ValueError, match=r"mask"):
        extractor(maps, np.ones((SIZE, SIZE)))
    with pytest.raises(ValueError, match=r"^128 of 128 .* observed$"):
        masked(np.full((2, SIZE, SIZE), np.nan), np.ones((SIZE, SIZE)))


@pytest.mark.parametrize("name", ["bad.npy", "bad.npz", "bad.fits"])
def test_corrupted_files_are_rejected_by_name(extractor, tmp_path, name):
    if name.endswith("fits"):
        pytest.importorskip("astropy")
    (tmp_path / name).write_bytes(b"SIMPLE  =  no such thing" * 20)
    with pytest.raises(ValueError, match=name):
        extractor(tmp_path / name)


def test_invalid_scaling_options_are_rejected():
    for options in ({"pixel_std": [0.0]}, {"pixel_std": [1.0, 1.0]}, {"pixel_mean": [np.nan]}, {"stretch": "log"}):
        with pytest.raises(ValueError):
            CosmoMapFeatureExtractor(SIZE, **{"pixel_mean": [0.0], **options})


def test_a_checkpoint_carries_the_extractor_and_its_code(tmp_path):
    """tests/hub/test_hub_round_trip.py loads it in a process without the package."""
    CosmoMapFeatureExtractor.from_config(tiny_cosmo.model().config).save_pretrained(tmp_path)
    loaded = AutoFeatureExtractor.from_pretrained(tmp_path)
    assert type(loaded) is CosmoMapFeatureExtractor and loaded.pixel_mean == [0.5] and loaded.pixel_std == [2.0]
    assert (tmp_path / "feature_extraction_cosmo.py").exists()
