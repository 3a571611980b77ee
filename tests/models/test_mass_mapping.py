"""Mass-mapping models: the iteration over segments, halting, likelihoods, symmetry, and errors.

Referees: the Wiener filter solved by conjugate gradients, torch.distributions, segments run one by one, numpy's FFT.
"""

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.distributions import Normal

from hrm_hf import CosmoUnetConfig, CosmoUnetForMassMapping, HrmCosmoForMassMapping, HrmMassMappingConfig
from hrm_hf.cosmology.reconstruction import WienerFilter
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.models.mass_map_layers import MapEstimate, MapLikelihood, MultipoleGains, hat_functions
from hrm_hf.models.shear_operator import shear_from_convergence


PRIOR = [[0.1, 0.5], [0.6, 1.0]]
FIELDS = {"prior_bounds": PRIOR, "kappa_std": [0.01], "pixel_std": [0.01, 0.01]}
SIZE = 16


def model(seed: int = 0, **fields) -> HrmCosmoForMassMapping:
    torch.manual_seed(seed)
    return HrmCosmoForMassMapping(HrmMassMappingConfig.from_preset("test", **FIELDS | fields)).eval()


def observation(rows: int = 3, planes: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled shear with its mask [B, 2P + 1, S, S], and its convergence [B, P, S, S]."""
    generator = torch.Generator().manual_seed(seed)
    kappa = 0.01 * torch.randn(rows, planes, SIZE, SIZE, generator=generator)
    mask = (torch.rand(rows, 1, SIZE, SIZE, generator=generator) > 0.3).float()
    return torch.cat((shear_from_convergence(kappa, mask) / 0.01, mask), dim=1), kappa


@pytest.mark.parametrize(
    ("head", "config", "parameters"),
    [(HrmCosmoForMassMapping, HrmMassMappingConfig, 173_514), (CosmoUnetForMassMapping, CosmoUnetConfig, 173_964)],
)
def test_the_two_mass_64_models_have_these_parameter_counts(head, config, parameters):
    built = head(config.from_preset("mass-64", **FIELDS))
    assert built.num_parameters() == parameters


def test_with_the_gains_of_a_spectrum_the_segments_converge_to_the_wiener_filter():
    """As the module's docstring states, kappa + W b + (W - 1) kappa, W = S / (S + N), is iterated."""
    settings = MapSettings(observable="shear", sigma_e=0.26, galaxies_per_arcmin2=30, size=SIZE, side_deg=1.25)
    nodes = 4
    share = torch.tensor([0.9, 0.7, 0.4, 0.1])  # W at the nodes
    wiener = (share @ hat_functions(SIZE, nodes)).double()
    noise = settings.pixel_noise**2 * (settings.side_rad / SIZE) ** 2  # power spectrum of the noise, in steradian
    spectrum = (noise * wiener / (1 - wiener)).numpy().reshape(1, 1, SIZE, SIZE // 2 + 1)
    built = model(num_gain_nodes=nodes)
    gains = built.model.readout.gains
    with torch.no_grad():
        gains.weight.zero_()
        table = gains.bias.view(gains.shape)
        table.zero_()
        table[0, 0], table[0, 1] = share, share - 1
    pixel_values, _ = observation()
    shear, mask = 0.01 * pixel_values[:, :2], pixel_values[:, 2:]
    expected = WienerFilter(settings, spectrum)(shear, mask, tolerance=1e-8)
    found = built(pixel_values, max_steps=150).segment_maps.double()
    scale = expected.std()
    # The tolerance allows for 150 float32 transforms, and for masked pixels, which converge most slowly.
    torch.testing.assert_close(found[:, -1], expected, rtol=0, atol=1e-3 * scale.item())
    assert (found[:, 0] - expected).std() > 0.05 * scale  # a single segment is not enough


def test_a_segment_starts_from_the_residual_of_its_map():
    """If the map explains the data, the residual is 0: b = 0 where d = A kappa."""
    built, (pixel_values, kappa) = model(), observation()
    seen = []
    built.model.cells_in.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    explained = kappa - kappa.mean((2, 3), keepdim=True)
    state = built.model(pixel_values)
    state.kappa = explained / 0.01
    built.model(pixel_values, state=state)
    first, second = (torch.nn.functional.pixel_shuffle(cells, built.config.cell_size)[:, 0] for cells in seen)
    assert first.std() > 0.1
    torch.testing.assert_close(second, torch.zeros_like(second), rtol=0, atol=1e-5)  # rounding of the transforms


def test_the_forward_equals_its_segments_run_one_by_one():
    built, (pixel_values, _) = model(halt_max_steps=3), observation()
    found = built(pixel_values, output_hidden_states=True)
    state, tokens = None, built.model.embed(pixel_values)
    for number in range(3):
        state = built.model(pixel_values, tokens=tokens, state=state)
        torch.testing.assert_close(found.segment_maps[:, number], 0.01 * state.kappa)
    torch.testing.assert_close(found.hidden_states[1], state.z_H)
    torch.testing.assert_close(found.kappa, found.segment_maps[:, -1])


def test_no_gradient_reaches_the_previous_segment():
    built, (pixel_values, _) = model().train(), observation()
    first = built.model(pixel_values)
    first.kappa.retain_grad()
    first.z_H.retain_grad()
    built.model(pixel_values, state=first).kappa.square().sum().backward()
    assert first.kappa.grad is None and first.z_H.grad is None


def test_maps_halt_independently_and_keep_their_answer():
    built, (pixel_values, _) = model(halt_max_steps=4), observation(6)
    with torch.no_grad():
        built.halt_head.weight.normal_(std=1.0)
        gains = built(pixel_values).halt_logits
    built.config.halt_threshold = gains[:, :3].median().item()
    fixed, adaptive = built(pixel_values), built(pixel_values, halt="adaptive")
    assert 1 < len(set(adaptive.steps.tolist()))
    for row, used in enumerate(adaptive.steps.tolist()):
        expected = fixed.segment_maps[row, used - 1]
        # The order of sums can depend on the number of maps in the batch.
        torch.testing.assert_close(adaptive.kappa[row], expected, rtol=1e-4, atol=1e-6)
        goes_on = fixed.halt_logits[row] >= built.config.halt_threshold
        assert used == (4 if goes_on[:3].all() else int((~goes_on).nonzero()[0]) + 1)
    with pytest.raises(ValueError, match='halt="adaptive"'):
        built.train()(pixel_values, halt="adaptive")


def test_a_shifted_sky_gives_a_shifted_map():
    """The shift is a multiple of the patch size, because patches start at a fixed corner."""
    built, (pixel_values, _) = model(), observation()
    moved = pixel_values.roll((4, 8), dims=(2, 3))
    torch.testing.assert_close(built(moved).kappa, built(pixel_values).kappa.roll((4, 8), dims=(2, 3)))


@pytest.mark.parametrize("head", [HrmCosmoForMassMapping, CosmoUnetForMassMapping])
def test_two_planes_are_mapped_and_scored(head):
    fields = {"num_channels": 5, "kappa_std": [0.01, 0.02], "pixel_std": [0.01] * 4}
    built = head(head.config_class.from_preset("test", **FIELDS | fields))
    pixel_values, kappa = observation(planes=2)
    found = built(pixel_values, kappa=kappa, labels=torch.tensor([[0.3, 0.8]]).repeat(3, 1))
    assert found.kappa.shape == found.kappa_std.shape == kappa.shape
    torch.testing.assert_close(found.kappa.mean((2, 3)), torch.zeros(3, 2), rtol=0, atol=1e-7)
    assert (found.kappa_std > 0).all() and found.loss.isfinite()


def test_the_pixel_likelihood_matches_torch():
    likelihood = MapLikelihood(HrmMassMappingConfig.from_preset("test"))
    generator = torch.Generator().manual_seed(0)
    mean, log_std, truth = torch.randn(3, 2, 1, SIZE, SIZE, generator=generator).unbind()
    expected = -Normal(mean, log_std.exp()).log_prob(truth).mean((1, 2, 3))
    torch.testing.assert_close(likelihood.pixels(MapEstimate(mean, log_std, None), truth), expected)


def test_the_mode_likelihood_peaks_at_the_error_power():
    likelihood = MapLikelihood(HrmMassMappingConfig.from_preset("test"))
    truth = torch.randn(4, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    estimate = 0.5 * truth
    power = likelihood.log_power(truth - estimate)
    modes = np.abs(np.fft.fft2((truth - estimate).numpy(), norm="ortho")) ** 2
    inner = [modes[:, 0, y, x] for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0)]
    np.testing.assert_allclose(power[:, 0, 0].exp(), np.mean(inner, axis=0), rtol=1e-5)  # the first of four rings
    best = likelihood.harmonic(MapEstimate(estimate, None, power), truth)
    for other in (power + 0.3, power - 0.3):
        assert (likelihood.harmonic(MapEstimate(estimate, None, other), truth) > best).all()


def test_power_in_rings_is_in_float32_under_autocast():
    likelihood = MapLikelihood(HrmMassMappingConfig.from_preset("test"))
    maps = torch.randn(4, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = likelihood.log_power(maps)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, likelihood.log_power(maps))


def test_gains_by_multipole_filter_modes():
    maps = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    gains = MultipoleGains(SIZE, 5)
    summed = gains(maps, torch.ones(2, 1, 3, 5))
    expected = (maps - maps.mean((2, 3), keepdim=True)).sum(1, keepdim=True)
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-5)
    x = torch.cos(2 * torch.pi * 2 * torch.arange(SIZE) / SIZE).expand(1, 1, SIZE, SIZE)  # multipole 2, between nodes
    table = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 5)
    place = 4 * np.log(2) / np.log(SIZE / np.sqrt(2))
    torch.testing.assert_close(gains(x, table), max(0.0, 1 - place) * x, rtol=1e-4, atol=1e-5)


def test_errors_name_the_argument():
    with pytest.raises(StrictDataclassError, match=r"num_channels=4.*mask_channel=True"):
        HrmMassMappingConfig.from_preset("test", num_channels=4)
    with pytest.raises(StrictDataclassError, match=r"kappa_std.* 2 .* 1\b"):
        HrmMassMappingConfig.from_preset("test", kappa_std=[1.0, 1.0])
    with pytest.raises(StrictDataclassError, match=r"cell_size=3.* 4\b"):
        HrmMassMappingConfig.from_preset("test", cell_size=3)
    with pytest.raises(StrictDataclassError, match="image_size=18"):
        CosmoUnetConfig.from_preset("test", image_size=18, hidden_sizes=[4, 4, 4])
    pixel_values, kappa = observation()
    with pytest.raises(ValueError, match=r"kappa.*\[3, 16, 16\].*\[3, 1, 16, 16\]"):
        model()(pixel_values, kappa=kappa[:, 0])
    with pytest.raises(ValueError, match="max_steps=0"):
        model()(pixel_values, max_steps=0)
