"""The recurrent model for parameters: sizes, symmetries, segments, halting, saving. Referees: numpy, scipy, reruns."""

import numpy as np
import pytest
import torch

from hrm_hf import HrmCosmoConfig, HrmCosmoForRegression
from hrm_hf.cosmology.simulation.fields import map_power_spectrum
from hrm_hf.models.cosmo_layers import THRESHOLDS, MapStatistics, ring_weights


BOX = [[0.1, 0.5], [0.6, 1.0]]


def model_of(**fields) -> HrmCosmoForRegression:
    torch.manual_seed(0)
    return HrmCosmoForRegression(HrmCosmoConfig.from_preset("test", **{"prior_bounds": BOX, **fields})).eval()


def batch(rows: int = 3, channels: int = 1, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    maps = torch.randn(rows, channels, size, size, generator=generator)
    share = torch.rand(rows, 2, generator=generator)
    return maps, torch.tensor([0.1, 0.6]) + 0.4 * share


@pytest.mark.parametrize(("preset", "parameters"), [("test", 30_927), ("cosmo-64", 444_577), ("cosmo-256", 1_520_849)])
def test_parameters_of_presets(preset, parameters):
    with torch.device("meta"):
        model = HrmCosmoForRegression(HrmCosmoConfig.from_preset(preset))
    assert model.num_parameters() == parameters


def test_outputs_have_the_documented_shapes():
    model, (maps, labels) = model_of(num_components=2), batch()
    output = model(maps, labels=labels, output_hidden_states=True)
    assert output.logits.shape == output.std.shape == (3, 2) and output.s_8.shape == output.s_8_std.shape == (3,)
    assert output.reported_means.shape == output.reported_stds.shape == (3, 3)
    assert output.log_weights.shape == (3, 2) and output.loc.shape == (3, 2, 2)
    assert output.scale_tril.shape == (3, 2, 2, 2)
    assert output.halt_logits.shape == (3, 2) and output.segment_means.shape == (3, 2, 3)
    assert output.steps.tolist() == [2, 2, 2]
    tokens = 1 + 2 + 16  # CLS, summary and map tokens
    assert [state.shape for state in output.hidden_states] == [(3, tokens, 16)] * 2
    assert set(output.metrics) == {"mse_omega_m", "mse_sigma_8", "mse_s_8", "z_squared", "steps"}
    assert model.sample_posterior(output, 7).shape == (3, 7, 3)


def test_the_loss_is_the_mean_of_the_segments_losses_and_the_halting_loss():
    model, (maps, labels) = model_of(mse_loss_weight=0.5), batch()
    output = model(maps, labels=labels)
    parts = [model(maps, labels=labels, max_steps=steps) for steps in (1, 2)]
    expected = sum(part.nll_loss + 0.5 * part.mse_loss for part in parts) / 2 + 0.1 * output.halt_loss
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_every_parameter_gets_a_gradient():
    model, (maps, labels) = model_of(pos_encodings="learned").train(), batch()
    model(maps, labels=labels).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]


def test_only_the_last_updates_of_a_segment_have_a_gradient():
    """The gradient equals that of a segment whose earlier updates are constants."""
    model, (maps, _) = model_of().train(), batch()
    core = model.model
    tokens = core.embed(maps).detach()
    core(tokens=tokens).z_H.sum().backward()
    found = core.L_level.layers[0].mlp.down_proj.weight.grad.clone()
    core.zero_grad()
    with torch.no_grad():
        z_L = core.L_level(torch.zeros_like(tokens), tokens, None)
        z_L = core.L_level(z_L, tokens, None)
        z_H = core.H_level(torch.zeros_like(tokens), z_L, None)
        z_L = core.L_level(z_L, z_H + tokens, None)
    z_L = core.L_level(z_L, z_H + tokens, None)
    core.H_level(z_H, z_L, None).sum().backward()
    assert torch.allclose(found, core.L_level.layers[0].mlp.down_proj.weight.grad, atol=1e-6)


def test_a_periodic_shift_by_a_token_changes_nothing():
    model, (maps, _) = model_of(padding_mode="circular"), batch()
    shifted = model(maps.roll((4, 8), (-2, -1))).logits
    assert torch.allclose(model(maps).logits, shifted, atol=1e-5)


def test_the_amplitude_of_a_map_changes_the_answer():
    model, (maps, _) = model_of(), batch()
    assert (model(maps).logits - model(2 * maps).logits).abs().max() > 1e-3


def statistics_of(**fields) -> MapStatistics:
    statistics = MapStatistics(HrmCosmoConfig.from_preset("test", **fields))
    statistics.reset()
    return statistics


def test_the_power_spectrum_matches_the_data_module():
    statistics, (maps, _) = statistics_of(num_ps_bins=5, use_histogram=False), batch()
    _, power = map_power_spectrum(maps[:, 0].double().numpy(), side_rad=16.0, bins=5)  # pixels of unit side
    assert torch.allclose(statistics.features(maps), torch.from_numpy(power).float().log() / 2, atol=1e-4)


def test_white_noise_has_power_one_in_every_ring_also_under_a_mask():
    statistics = statistics_of(num_channels=2, mask_channel=True, use_histogram=False)
    noise = torch.randn(4000, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(noise)
    mask[..., :8, :6] = 0
    log_power = statistics.features(torch.cat((noise * mask, mask), dim=1)) * 2
    assert (log_power.exp().mean(0) - 1).abs().max() < 0.1


def test_opposite_maps_are_fully_anticorrelated():
    statistics, (maps, _) = statistics_of(num_channels=2, use_histogram=False), batch()
    features = statistics.features(torch.cat((maps, -maps), dim=1))
    rings = ring_weights(16, 4).shape[1]
    assert torch.allclose(features[:, -rings:], torch.full((3, rings), -1.0), atol=1e-4)


def test_histograms_and_moments_match_numpy_and_scipy_without_masked_pixels():
    stats = pytest.importorskip("scipy.stats")
    statistics = statistics_of(num_channels=2, mask_channel=True, use_power_spectrum=False)
    maps, _ = batch(2)
    mask = torch.ones_like(maps)
    mask[:, :, :4] = 0
    features = statistics.features(torch.cat((maps.masked_fill(mask == 0, 99.0), mask), dim=1))
    first = features[:, : len(THRESHOLDS) + 3]
    for row, values in zip(first, maps[:, 0, 4:].flatten(1).numpy(), strict=True):
        centred = values - values.mean()
        below = [(centred < threshold).mean() for threshold in THRESHOLDS]
        moments = [np.log(values.std()), np.arcsinh(stats.skew(values)), np.arcsinh(stats.kurtosis(values))]
        assert row.tolist() == pytest.approx([*below, *moments], abs=1e-4)


def test_fitted_statistics_have_mean_0_and_spread_1_over_the_training_set_and_are_saved(tmp_path):
    model = model_of()
    maps = 3 * torch.randn(200, 1, 16, 16) * (0.3 + torch.rand(200, 1, 1, 1))
    model.fit_statistics(maps.split(60))
    model.save_pretrained(tmp_path)
    loaded = HrmCosmoForRegression.from_pretrained(tmp_path)
    features = loaded.model.stem.statistics(maps)
    assert features.mean(0).abs().max() < 0.05
    strong = features[:, -10:]  # the variance floor shrinks the weak components
    assert (torch.cov(strong.mT) - torch.eye(10)).abs().max() < 0.05
    assert features.std(0).max() < 1.05


def test_adaptive_halting_with_an_unreachable_threshold_runs_one_segment():
    model, (maps, labels) = model_of(halt_threshold=1e9), batch()
    output = model(maps, labels=labels, halt="adaptive")
    assert output.steps.tolist() == [1, 1, 1]
    assert torch.allclose(output.logits, model(maps, max_steps=1).logits, atol=1e-6)


def test_adaptive_halting_equals_a_fixed_run_of_as_many_segments():
    model, (maps, _) = model_of(halt_max_steps=4), batch(8)
    torch.nn.init.normal_(model.halt_head.weight)
    with torch.no_grad():
        gains = model(maps).halt_logits
        model.config.halt_threshold = gains[:, :2].median().item()
        output = model(maps, halt="adaptive")
    assert len(set(output.steps.tolist())) > 1
    for row, steps in enumerate(output.steps.tolist()):
        alone = model(maps[row : row + 1], max_steps=steps)
        assert torch.allclose(output.logits[row], alone.logits[0], atol=1e-5)


def test_the_expected_gain_does_not_change_the_other_weights():
    model, (maps, labels) = model_of().train(), batch()
    output = model(maps, labels=labels)
    output.halt_loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "halt_head.weight",
        "halt_head.bias",
    ]


def test_bfloat16_autocast_stays_near_float32():
    model, (maps, labels) = model_of(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        half = model(maps, labels=labels)
    assert half.logits.dtype == torch.float32
    assert (half.logits - model(maps).logits).abs().max() < 0.02


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 18}, "image_size=18.* 4,"),
        ({"hidden_size": 15}, "hidden_size=15.*num_attention_heads="),
        ({"stem": "fourier"}, "stem"),
        ({"H_cycles": 0}, "H_cycles=0"),
    ],
)
def test_inconsistent_configs_are_rejected(fields, message):
    with pytest.raises(Exception, match=message):
        HrmCosmoConfig.from_preset("test", **fields)


@pytest.mark.parametrize("stem", ["patch"])
def test_the_model_memorizes_a_few_maps(stem):
    model, (maps, labels) = model_of(stem=stem, mse_loss_weight=1.0).train(), batch(8)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    first = model(maps, labels=labels).mse_loss.item()
    for _ in range(150):
        optimizer.zero_grad()
        output = model(maps, labels=labels)
        if output.mse_loss.item() < 0.1 * first:
            break
        output.loss.backward()
        optimizer.step()
    assert output.mse_loss.item() < 0.1 * first
