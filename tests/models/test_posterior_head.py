"""The posterior head: density, moments, samples and limits. Referees: numerical integrals of the density."""

import math

import pytest
import torch

from hrm_hf.models.configuration_cosmo_cnn import CosmoCnnConfig
from hrm_hf.models.posterior_head import NUM_POINTS, Posterior, PosteriorHead, normal_points


BOX = [[0.1, 0.5], [0.6, 1.0]]


def head_of(**fields) -> PosteriorHead:
    torch.manual_seed(0)
    head = PosteriorHead(CosmoCnnConfig(**fields), 8)
    head.reset(0.15)  # wider posteriors would pile up at the edges, where the grid is too coarse
    return head


def grid(points: int = 400) -> tuple[torch.Tensor, float]:
    """Return the midpoints [cells, 2] of a grid of cells over the box, and the area of a cell."""
    axes = [low + (high - low) * (torch.arange(points) + 0.5) / points for low, high in BOX]
    cell = math.prod((high - low) / points for low, high in BOX)
    return torch.cartesian_prod(*axes), cell


@pytest.mark.parametrize("covariance", ["diag", "cholesky"])
@pytest.mark.parametrize("components", [1, 3])
def test_the_density_integrates_to_one_on_the_box_of_the_prior(covariance, components):
    head = head_of(prior_bounds=BOX, covariance=covariance, num_components=components)
    posterior = head(torch.randn(1, 8))
    labels, cell = grid()
    copies = Posterior(*(part.expand(len(labels), *part.shape[1:]) for part in vars(posterior).values()))
    assert (torch.exp(-head.nll(copies, labels)).double().sum() * cell).item() == pytest.approx(1, abs=2e-3)


def test_moments_match_the_density():
    head = head_of(prior_bounds=BOX, num_components=2)
    posterior = head(torch.randn(1, 8))
    labels, cell = grid()
    copies = Posterior(*(part.expand(len(labels), *part.shape[1:]) for part in vars(posterior).values()))
    weights = torch.exp(-head.nll(copies, labels)).double().unsqueeze(-1) * cell
    values = head.reported(labels).double()
    mean = (weights * values).sum(0)
    std = (weights * (values - mean).square()).sum(0).sqrt()
    found_mean, found_std = head.moments(posterior)
    assert (found_mean[0] - mean).abs().div(std).max() < 0.02
    assert (found_std[0] / std - 1).abs().max() < 0.03


def test_samples_have_the_moments_and_stay_in_the_box():
    head = head_of(prior_bounds=BOX, num_components=2)
    posterior = head(torch.randn(3, 8))
    samples = head.sample(posterior, 20000, torch.Generator().manual_seed(0))
    mean, std = head.moments(posterior)
    assert ((samples.mean(1) - mean) / std).abs().max() < 0.04
    assert (samples.std(1) / std - 1).abs().max() < 0.04
    for column, (low, high) in enumerate(BOX):
        assert low <= samples[..., column].min() and samples[..., column].max() <= high


def test_a_standard_normal_is_the_flat_prior():
    head = head_of(prior_bounds=BOX)
    flat = Posterior(torch.zeros(4, 1), torch.zeros(4, 1, 2), torch.eye(2).expand(4, 1, 2, 2))
    labels = torch.tensor([[0.11, 0.61], [0.3, 0.8], [0.2, 0.95], [0.49, 0.99]])
    assert torch.allclose(head.nll(flat, labels), torch.full((4,), math.log(0.4 * 0.4)), atol=1e-4)
    mean, std = head.moments(flat)
    assert mean[0, 0].item() == pytest.approx(0.3, abs=1e-3)
    assert std[0, 0].item() == pytest.approx(0.4 / math.sqrt(12), rel=0.01)


def test_without_bounds_the_density_is_a_plain_gaussian_in_physical_units():
    head = head_of(target_mean=[0.3, 0.8], target_std=[0.1, 0.05])
    posterior = head(torch.randn(5, 8))
    labels = torch.rand(5, 2)
    scale = torch.tensor([0.1, 0.05])
    gaussian = torch.distributions.MultivariateNormal(
        torch.tensor([0.3, 0.8]) + scale * posterior.loc[:, 0],
        scale_tril=scale.unsqueeze(-1) * posterior.scale_tril[:, 0],
    )
    assert torch.allclose(head.nll(posterior, labels), -gaussian.log_prob(labels), atol=1e-4)


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_the_best_scale_undoes_a_wrong_confidence(factor):
    head = head_of(prior_bounds=BOX, num_components=2)
    posterior = head(torch.randn(2000, 8))
    labels = head.sample(posterior, 1, torch.Generator().manual_seed(0))[:, 0, :2]
    wrong = Posterior(posterior.log_weights, posterior.loc, posterior.scale_tril * factor)
    with torch.no_grad():
        assert head.best_scale(wrong, labels) == pytest.approx(1 / factor, rel=0.06)


@pytest.mark.parametrize("label", [[0.05, 0.8], [0.3, 1.2], [float("nan"), 0.8]])
def test_a_label_outside_the_prior_is_rejected_by_name(label):
    head = head_of(prior_bounds=BOX)
    with pytest.raises(ValueError, match=r"(omega_m|sigma_8)=.* row 1\b"):
        head.normalize(torch.tensor([[0.3, 0.8], label]))


def test_a_label_on_the_edge_of_the_prior_has_a_finite_loss_and_gradient():
    head = head_of(prior_bounds=BOX)
    features = torch.randn(2, 8, requires_grad=True)
    head.nll(head(features), torch.tensor([[0.1, 1.0], [0.5, 0.6]])).sum().backward()
    assert features.grad.isfinite().all()


def test_moments_and_samples_keep_their_precision_under_autocast():
    head = head_of(prior_bounds=BOX, num_components=2)
    posterior = head(torch.randn(4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        reduced = *head.moments(posterior), head.sample(posterior, 5, torch.Generator().manual_seed(0))
    full = *head.moments(posterior), head.sample(posterior, 5, torch.Generator().manual_seed(0))
    for found, expected in zip(reduced, full, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5)  # bfloat16 would differ by 4e-3


def test_points_have_the_mean_and_covariance_of_a_standard_normal():
    points = normal_points(NUM_POINTS, 2).double()
    assert points.mean(0).abs().max() < 1e-6
    assert torch.allclose(points.mT @ points / NUM_POINTS, torch.eye(2).double(), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prior_bounds": [[0.1, 0.5]]}, r"prior_bounds.* 1 .* 2\b"),
        ({"prior_bounds": [[0.5, 0.1], [0.6, 1.0]]}, r"prior_bounds.*omega_m.*\[0\.5, 0\.1\]"),
        ({"covariance": "full"}, "covariance"),
        ({"target_names": ["omega_m"]}, "derived_s8"),
        ({"num_channels": 1, "mask_channel": True}, "num_channels=1"),
        ({"pixel_mean": [0.0, 0.0]}, r"pixel_mean.* 2 .* 1\b"),
    ],
)
def test_inconsistent_configs_are_rejected(fields, message):
    with pytest.raises(Exception, match=message):
        CosmoCnnConfig(**fields)
