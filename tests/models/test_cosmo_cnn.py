"""The convolutional baseline: shapes, losses, symmetry, saving, and that it learns."""

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


def test_outputs_are_those_of_every_cosmology_regressor():
    model = tiny(num_components=2).eval()
    maps, labels = maps_and_labels()
    output = model(maps, labels=labels)
    assert output.reported_means.shape == output.reported_stds.shape == (8, 3)  # omega_m, sigma_8, s_8
    assert output.loc.shape == (8, 2, 2) and output.scale_tril.shape == (8, 2, 2, 2)
    assert output.steps.tolist() == [1] * 8 and torch.equal(output.segment_means[:, 0], output.reported_means)
    samples = model.sample_posterior(output, 1000, torch.Generator().manual_seed(0))
    assert samples.shape == (8, 1000, 3)
    torch.testing.assert_close(samples.mean(1), output.reported_means, atol=0.02, rtol=0)
    low, high = torch.tensor(BOUNDS).T
    assert (samples[..., :2] >= low).all() and (samples[..., :2] <= high).all()


def test_the_loss_is_the_weighted_sum_of_its_parts():
    maps, labels = maps_and_labels()
    output = tiny(nll_loss_weight=0.5, mse_loss_weight=2.0)(maps, labels=labels)
    torch.testing.assert_close(output.loss, 0.5 * output.nll_loss + 2 * output.mse_loss)
    assert {"mse_omega_m", "mse_sigma_8", "mse_s_8"} <= set(output.metrics)


def test_wrapping_around_makes_the_answer_the_same_for_shifted_maps():
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


def test_every_parameter_has_a_gradient():
    model, (maps, labels) = tiny(), maps_and_labels()
    model(maps, labels=labels).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_the_preset_for_64_pixels_has_the_size_of_the_recurrent_model():
    model = CosmoCnnForRegression(CosmoCnnConfig.from_preset("cosmo-64"))
    assert 150_000 < model.num_parameters() < 400_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": [1]}, "depths"),
        ({"hidden_sizes": []}, "hidden_sizes"),
        ({"image_size": 2}, "leaves nothing"),
        ({"padding_mode": "reflect"}, "padding_mode='reflect'"),
    ],
)
def test_impossible_configs_are_refused(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        CosmoCnnConfig.from_preset("test", **fields)


def test_maps_of_another_shape_are_refused_with_both_shapes():
    maps, _ = maps_and_labels(channels=2)
    with pytest.raises(ValueError, match=r"\[8, 2, 16, 16\]; expected \[batch, 1, 16, 16\]"):
        tiny()(maps)
    with pytest.raises(ValueError, match="pixel_values is missing"):
        CosmoCnnModel(CosmoCnnConfig.from_preset("test"))()
