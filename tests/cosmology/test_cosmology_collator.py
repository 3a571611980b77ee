"""Rows, batches and augmentation of maps.

Referees: numpy's rot90, fliplr and roll; the mean and spread of a standard normal; sets of cosmologies.
"""

import numpy as np
import pytest
import torch

from hrm_hf.cosmology.dataset.collator import (
    EVALUATION,
    MapCollator,
    MapRows,
    map_draws,
    map_noise,
    shifted,
    split_rows,
    turned,
)
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor


SIZE = 6


@pytest.fixture
def maps():
    return np.random.default_rng(0).normal(size=(10, 2, SIZE, SIZE)).astype(np.float32)


@pytest.fixture
def masks():
    return np.random.default_rng(1).random((10, SIZE, SIZE)) < 0.8


@pytest.fixture
def labels():
    return np.arange(20, dtype=np.float32).reshape(10, 2)


def collator(mask: bool = False, **options) -> MapCollator:
    return MapCollator(CosmoMapFeatureExtractor(SIZE, [0.5, 1.0], [2.0, 3.0], mask_channel=mask), **options)


def test_the_eight_symmetries_match_numpy(maps):
    one = maps[0, 0]
    expected = {np.rot90(side, turns).tobytes() for side in (one, np.fliplr(one)) for turns in range(4)}
    found = turned(torch.from_numpy(one).expand(8, 1, SIZE, SIZE), torch.arange(8))
    assert {view.numpy().tobytes() for view in found[:, 0]} == expected and len(expected) == 8


def test_shifts_match_numpy(maps):
    found = shifted(torch.from_numpy(maps[:3]), torch.tensor([0, 1, 5]), torch.tensor([2, 0, 13]))
    for row, by in enumerate([(0, 2), (1, 0), (5, 13)]):
        np.testing.assert_array_equal(found[row], np.roll(maps[row], by, axis=(1, 2)))


def test_a_mask_is_moved_with_its_map(maps, labels, masks):
    made = collator(mask=True, shift=True)
    batch = made.at_step(made(MapRows(maps, labels, masks, training=True).__getitems__([3, 7])), 5)
    plain = made.extractor.scale(torch.from_numpy(maps[[3, 7]]), torch.from_numpy(masks[[3, 7]]))
    assert not torch.equal(batch["pixel_values"], plain)
    # The batch has the same pixels in a different order; the mask moves with them.
    for found, expected in zip(batch["pixel_values"], plain):
        order = [pixels[:, pixels[0].argsort(stable=True)] for pixels in (found.flatten(1), expected.flatten(1))]
        assert torch.equal(order[0].sort(1).values, order[1].sort(1).values)
        observed = found[2].bool()
        assert (found[:2, ~observed] == 0).all() and (found[:2, observed] != 0).all()


def test_augmentation_of_a_map_depends_only_on_seed_step_and_index(maps, labels):
    made = collator(shift=True, noise_sigma=0.3, seed=4)
    rows = MapRows(maps, labels, training=True)

    def seen(indices, step, seed=4):
        made.seed = seed
        return made.at_step(made(rows.__getitems__(indices)), step)["pixel_values"]

    alone = seen([6], 11)
    assert torch.equal(seen([1, 6, 2], 11)[1:2], alone)
    assert not torch.equal(seen([6], 12), alone) and not torch.equal(seen([6], 11, seed=5), alone)


def test_random_numbers_are_uniform_and_independent():
    draws = map_draws(torch.arange(8000), seed=1, step=3)
    counts = torch.bincount(draws[:, 0] % 8)
    assert ((counts - 1000).abs() < 150).all()  # 5 standard deviations
    later = map_draws(torch.arange(8000), seed=1, step=4)
    streams = torch.stack([*draws.T, *later.T]).double()
    correlation = torch.corrcoef(streams) - torch.eye(6)
    assert correlation.abs().max() < 0.06
    noise = map_noise(torch.zeros(200, 1, 32, 32), torch.arange(200), seed=0, step=0)
    assert abs(noise.mean()) < 0.012 and abs(noise.std() - 1) < 0.01
    assert torch.corrcoef(noise[:50].flatten(1)).fill_diagonal_(0).abs().max() < 0.16


def test_evaluation_maps_keep_their_position_and_noise(maps, labels):
    made = collator(shift=True, noise_sigma=0.3)
    rows = MapRows(maps, labels)
    batch = made(rows.__getitems__([4, 2]))
    assert set(batch) == {"pixel_values", "labels"} and batch["labels"].tolist() == labels[[4, 2]].tolist()
    assert torch.equal(made(rows.__getitems__([2, 4]))["pixel_values"], batch["pixel_values"].flip(0))
    noise = map_noise(torch.from_numpy(maps[[4, 2]]), torch.tensor([4, 2]), made.seed, EVALUATION)
    expected = made.extractor.scale(torch.from_numpy(maps[[4, 2]]) + 0.3 * noise)
    torch.testing.assert_close(batch["pixel_values"], expected)


# ---- training and validation ----


def test_validation_maps_are_the_last_rows_and_share_no_cosmology():
    ids = np.repeat(np.arange(10), 3)
    train, held_out = split_rows(ids, None, 7)
    assert held_out.tolist() == list(range(23, 30))
    assert train.tolist() == list(range(21))  # drops maps of cosmology 7, which is partly held out
    assert not set(ids[train]) & set(ids[held_out])
    assert split_rows(ids, 5, 7)[0].tolist() == list(range(5))
    assert len(split_rows(ids, None, None)[1]) == 3
    assert len(split_rows(ids, 30, 0)[0]) == 30


@pytest.mark.parametrize(("train", "held_out"), [(22, 7), (100, 10), (1, 29), (None, 30), (None, 100)])
def test_requesting_more_maps_than_available_is_an_error(train, held_out):
    with pytest.raises(ValueError, match=f"val_samples={held_out}"):
        split_rows(np.repeat(np.arange(10), 3), train, held_out)
