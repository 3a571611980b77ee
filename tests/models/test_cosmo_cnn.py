"""The convolutional baseline: symmetry, sizes and errors. Referees: shifted maps, parameter counts."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from hrm_hf.models.configuration_cosmo_cnn import CosmoCnnConfig
from hrm_hf.models.modeling_cosmo_cnn import CosmoCnnForRegression, CosmoCnnModel


BOUNDS = [[0.1, 0.5], [0.6, 1.0]]


def tiny(**fields):
    torch.manual_seed(0)
    return CosmoCnnForRegression(CosmoCnnConfig.from_preset("test", prior_bounds=BOUNDS, **fields))


def maps_and_labels(count=8, channels=1):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor(BOUNDS)[:, 0] + 0.4 * torch.rand(count, 2, generator=generator)
    maps = torch.randn(count, channels, 16, 16, generator=generator)
    return maps * labels[:, 1].view(-1, 1, 1, 1) + 3 * labels[:, 0].view(-1, 1, 1, 1), labels


def test_circular_padding_makes_predictions_shift_invariant():
    maps, _ = maps_and_labels()
    model = tiny(padding_mode="circular").eval()
    shift = 4  # pixels of a cell after two stages, which halve the side
    torch.testing.assert_close(model(maps.roll((shift, 2 * shift), (2, 3))).logits, model(maps).logits)
    edged = tiny(padding_mode="zeros").eval()
    assert not torch.allclose(edged(maps.roll(shift, 2)).logits, edged(maps).logits)


def test_memory_format_does_not_change_the_answer():
    model, (maps, _) = tiny().eval(), maps_and_labels()
    expected = model(maps).logits
    found = model.to(memory_format=torch.channels_last)(maps.to(memory_format=torch.channels_last)).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_preset_for_64_pixels_has_the_size_of_the_recurrent_model():
    model = CosmoCnnForRegression(CosmoCnnConfig.from_preset("cosmo-64"))
    assert 150_000 < model.num_parameters() < 400_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": [1]}, "depths"),
        ({"hidden_sizes": []}, "hidden_sizes"),
        ({"image_size": 2}, "image_size=2"),
        ({"padding_mode": "reflect"}, "padding_mode='reflect'"),
    ],
)
def test_impossible_configs_are_rejected(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        CosmoCnnConfig.from_preset("test", **fields)


def test_wrong_map_shapes_are_rejected_with_both_shapes():
    maps, _ = maps_and_labels(channels=2)
    with pytest.raises(ValueError, match=r"\[8, 2, 16, 16\].*\[batch, 1, 16, 16\]"):
        tiny()(maps)
    with pytest.raises(ValueError, match="pixel_values=None"):
        CosmoCnnModel(CosmoCnnConfig.from_preset("test"))()
