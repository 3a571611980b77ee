"""Mass maps from shear: Wiener filter, smoothed Kaiser-Squires, their metrics, and `hrm-hf eval cosmo-map`.

Referees: the posterior of a Gaussian field as dense matrices, Wiener's formula mode by mode where nothing is hidden,
and hand-made maps with known metrics.
"""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.evaluation import MassMaps, compare_peaks, compare_spectra, evaluate_mass_maps, peak_counts
from hrm_hf.cosmology.reconstruction import WienerFilter, smoothed_kaiser_squires, spectra_of_cosmologies
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_columns
from hrm_hf.models.shear_operator import adjoint_shear, kaiser_squires, shear_from_convergence


SIZE = 8
SKY = {"observable": "shear", "sigma_e": 0.26, "galaxies_per_arcmin2": 100, "size": SIZE, "side_deg": 1.0}


@pytest.fixture(scope="module", params=[(1.0,), (0.5, 1.5)], ids=["one plane", "two planes"])
def problem(request):
    """Settings, spectra, and the shear and masks of two maps."""
    settings = MapSettings(source_redshifts=request.param, mask_fraction=0.3, hole_arcmin=(5, 10), **SKY)
    columns = [generate_columns(settings, omega_m, 0.8, seed) for seed, omega_m in enumerate((0.2, 0.4))]
    shear = torch.from_numpy(np.stack([one["map"] for one in columns])).double()
    mask = torch.from_numpy(np.stack([one["mask"] for one in columns]))[:, None].double()
    spectra = spectra_of_cosmologies(settings, {"omega_m": np.array([0.2, 0.4]), "sigma_8": np.array([0.8, 0.8])})
    return settings, spectra, shear, mask


def dense(settings, spectra, mask):
    """Filter [pixels, 2 pixels] and posterior covariance [pixels, pixels] of one map."""
    planes, pixels = settings.planes, settings.planes * SIZE**2
    units = torch.eye(pixels, dtype=torch.float64).view(pixels, planes, SIZE, SIZE)
    operator = shear_from_convergence(units, mask).reshape(pixels, -1).mT
    modes = torch.fft.fft2(units)
    half = torch.from_numpy(spectra)
    index = torch.arange(SIZE)
    mirrored = half[:, :, (-index) % SIZE][..., (SIZE - index) % SIZE * (index > SIZE // 2)]
    full = torch.where(index > SIZE // 2, mirrored, half[..., index.clamp_max(SIZE // 2)])
    colored = torch.fft.ifft2(torch.einsum("ijxy,njxy->nixy", (full * (SIZE / settings.side_rad) ** 2) + 0j, modes))
    prior = colored.real.reshape(pixels, pixels)
    gain = (
        prior
        @ operator.mT
        @ torch.linalg.inv(operator @ prior @ operator.mT + settings.pixel_noise**2 * torch.eye(len(operator)))
    )
    return gain, prior - gain @ operator @ prior


def test_the_wiener_filter_is_the_posterior_mean_of_dense_matrices(problem):
    settings, spectra, shear, mask = problem
    found = WienerFilter(settings, spectra)(shear, mask, tolerance=1e-10)
    for row in range(2):
        gain, _ = dense(settings, spectra[row], mask[row])
        # In the dense form, masked pixels are pure noise, independent of the map: no information, as in the filter.
        expected = (gain @ shear[row].flatten()).view_as(found[row])
        # The filter solves its equations to ten digits; the condition number of the matrices is about 100.
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-7 * expected.abs().max().item())


def test_draws_of_the_wiener_error_have_the_posterior_covariance(problem):
    settings, spectra, _, mask = problem
    errors = WienerFilter(settings, spectra).draw_errors(mask, torch.Generator().manual_seed(0), 200)
    for row in range(2):
        _, covariance = dense(settings, spectra[row], mask[row])
        expected = covariance.diagonal().sqrt()
        found = errors[:, row].flatten(1).square().mean(0).sqrt()
        # With 200 draws, a standard deviation has an error of 5 %, and the mean of all has a smaller one.
        assert (found / expected - 1).abs().max() < 5 * 0.05
        assert abs((found / expected).mean() - 1) < 0.03


def test_without_a_mask_every_mode_is_scaled_independently():
    settings = MapSettings(**SKY)
    columns = generate_columns(settings, 0.3, 0.8, 3)
    shear = torch.from_numpy(columns["map"])[None].double()
    spectra = spectra_of_cosmologies(settings, {"omega_m": np.array([0.3]), "sigma_8": np.array([0.8])})
    found = torch.fft.rfft2(WienerFilter(settings, spectra)(shear, None, tolerance=1e-12)[0, 0])
    direct = torch.fft.rfft2(kaiser_squires(shear)[0, 0])
    power = torch.from_numpy(spectra[0, 0, 0]) * (SIZE / settings.side_rad) ** 2
    inner = slice(1, SIZE // 2)  # without Nyquist frequencies, which shear determines less well
    expected = direct * power / (power + settings.pixel_noise**2)
    torch.testing.assert_close(found[inner, inner], expected[inner, inner], rtol=1e-8, atol=1e-10)


def test_the_wiener_filter_rejects_noiseless_shear():
    settings = MapSettings(**SKY | {"sigma_e": 0.0})
    with pytest.raises(ValueError, match="sigma_e=0"):
        WienerFilter(settings, np.ones((1, 1, SIZE, SIZE // 2 + 1)))


def test_a_solver_that_does_not_converge_is_an_error(problem):
    settings, spectra, shear, mask = problem
    with pytest.raises(RuntimeError, match="larger tolerance"):
        WienerFilter(settings, spectra)(shear, mask, tolerance=0.0)


def test_smoothing_multiplies_the_inverse_by_a_gaussian():
    kappa = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kappa = adjoint_shear(shear_from_convergence(kappa))  # the part that shear determines
    shear = shear_from_convergence(kappa)
    torch.testing.assert_close(smoothed_kaiser_squires(shear, None, 0.0), kaiser_squires(shear))
    wave = torch.cos(2 * torch.pi * 3 * torch.arange(16, dtype=torch.float64) / 16).expand(1, 1, 16, 16)
    found = smoothed_kaiser_squires(shear_from_convergence(wave), None, 1.5)
    torch.testing.assert_close(found, wave * np.exp(-0.5 * (1.5 * 2 * np.pi * 3 / 16) ** 2))


def test_metrics_of_hand_made_maps():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((50, 1, 16, 16))
    truth -= truth.mean((2, 3), keepdims=True)
    masks = rng.random((50, 16, 16)) < 0.7
    noise = rng.standard_normal(truth.shape) * 0.5
    noise -= noise.mean((2, 3), keepdims=True)
    # Half of the truth plus noise, and a different mean, which is ignored because shear does not determine it.
    maps = MassMaps(truth, 0.5 * truth + noise + 7.0, masks, std=np.full(truth.shape, 0.5**0.5))
    found = evaluate_mass_maps(maps, side_rad=0.1)
    # With 12,800 pixels, the standard error is 1 %; allow five.
    assert found["error"]["value"] == pytest.approx(0.5**0.5, rel=0.05)
    assert found["error"]["low"] < found["error"]["value"] < found["error"]["high"]
    assert found["error_hidden"]["value"] == pytest.approx(0.5**0.5, rel=0.08)
    spectra = compare_spectra(maps, 0.1)
    # Rings with few modes scatter more; the last ring has thousands.
    assert spectra["transfer"][-1] == pytest.approx(0.5, abs=0.05)
    assert spectra["power"][-1] == pytest.approx(0.5, abs=0.05)
    assert spectra["correlation"][-1] == pytest.approx(0.5**0.5, abs=0.05)
    assert found["uncertainty"]["mean_z2"] == pytest.approx(1, rel=0.05)
    assert found["uncertainty"]["coverage_68"] == pytest.approx(0.683, abs=0.02)
    same = evaluate_mass_maps(MassMaps(truth, truth, masks), 0.1)
    assert same["error"]["value"] == 0 and same["peaks"]["true"] == same["peaks"]["estimated"]
    np.testing.assert_allclose(same["spectra"]["correlation"], 1)


def test_peaks_exceed_their_eight_neighbors_across_periodic_edges():
    maps = np.zeros((1, 1, 6, 6))
    maps[0, 0, 0, 0], maps[0, 0, 5, 5], maps[0, 0, 3, 3] = 3.0, 2.0, 1.5  # (5, 5) is a periodic neighbor of (0, 0)
    np.testing.assert_array_equal(peak_counts(maps, (1.0, 2.0))[0, 0], [2, 1])
    assert compare_peaks(MassMaps(maps, maps))["heights"][0] == 1


# ---- the command ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    sky = {"size": 16, "side_deg": 1.25, "sigma_e": 0.26, "galaxies_per_arcmin2": 30.0}
    for name, settings in (
        ("shear", MapSettings(observable="shear", mask_fraction=0.3, hole_arcmin=(5, 10), **sky)),
        ("convergence", MapSettings(**sky)),
    ):
        build_cosmology_dataset(settings, folder / name, samples=40, test_samples=12)
    return folder


def run(*arguments):
    from hrm_hf.cli import app

    return CliRunner().invoke(app, ["eval", "cosmo-map", *map(str, arguments)])


def test_methods_are_evaluated_from_the_command_line(data, tmp_path):
    errors = {}
    for method, options in {"kaiser-squires": (), "wiener": ("--draws", 8), "wiener-mean": ()}.items():
        out = tmp_path / method
        found = run("--data", data / "shear", "--method", method, "--train", 40, "--out", out, *options, "--json")
        assert found.exit_code == 0, found.output
        result = json.loads((out / "results.json").read_text())
        assert json.loads(found.stdout.splitlines()[-1])["metrics"] == result["metrics"]
        assert result["metrics"]["count"] == 12 and result["maps_per_second"] > 0
        assert (out / "maps.png").stat().st_size > 10_000 and (out / "spectra.png").exists()
        errors[method] = result["metrics"]["error"]["value"]
    assert errors["wiener"] < errors["kaiser-squires"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere", "--method", "wiener"), "nowhere"),
        (("--data", "convergence", "--method", "wiener"), "convergence, not shear"),
        (("--data", "shear", "--method", "kaiser-squires", "--draws", "4"), "--draws: kaiser-squires"),
    ],
)
def test_wrong_options_raise_a_usage_error(data, arguments, message):
    found = run(arguments[0], data / arguments[1], *arguments[2:])
    assert found.exit_code == 2, found.output
    assert message in " ".join(found.output.replace("│", " ").split())
