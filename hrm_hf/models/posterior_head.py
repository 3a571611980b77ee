"""Network head that predicts the posterior of cosmological parameters as a mixture of Gaussians.

With a flat prior on [low, high], a target y is mapped to u = sqrt(2) erfinv(2 (y - low) / (high - low) - 1), which is
standard normal under the prior. An uninformative map therefore has exactly the posterior N(0, 1), and there is no
probability outside the bounds. Without bounds, u = (y - mean) / std.

B is the batch size, T the number of free targets, K the number of Gaussians, and R the number of reported parameters,
including s_8. Sources: Bishop 1994 for mixture density networks; Jeffrey & Wandelt 2020 (arXiv 2011.05991) for
moment regression in cosmology.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_cosmo import CosmoRegressionConfig
from .modeling_utils import Float32Buffers, Float32Linear


NUM_POINTS = 128  # quasi-random points per Gaussian; moments are accurate to about 1 % of a std
EDGE = 1e-6  # minimum distance of labels from the bounds, as a fraction of the range (u is infinite at the bounds)


@dataclass
class CosmoRegressionOutput(ModelOutput):
    """Output of models that infer cosmological parameters.

    Attributes:
        loss: weighted sum of the parts below, over all segments.
        nll_loss: negative log likelihood of the labels in nats (density in physical units), after the last segment.
        mse_loss: squared error of the targets' means, relative to their prior variance, after the last segment.
        halt_loss: squared error of the predicted gains.
        logits, std: posterior means and standard deviations [B, T] in physical units, ordered like the labels.
        s_8, s_8_std: posterior mean and standard deviation of s_8 [B]; None without `config.derived_s8`.
        log_weights: [B, K], for the mixture. loc: [B, K, T] and scale_tril: [B, K, T, T], for its Gaussians, in u.
        halt_logits: predicted gain in nats from the remaining segments, after each segment [B, segments].
        steps: int64 [B], number of segments.
        segment_means: posterior means after each segment [B, segments, R]; halted maps repeat their last means.
        metrics: 0-d means over the maps.
        hidden_states: (z_L, z_H) after the last segment, if requested.
    """

    loss: torch.Tensor | None = None
    nll_loss: torch.Tensor | None = None
    mse_loss: torch.Tensor | None = None
    halt_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    std: torch.Tensor | None = None
    s_8: torch.Tensor | None = None
    s_8_std: torch.Tensor | None = None
    log_weights: torch.Tensor | None = None
    loc: torch.Tensor | None = None
    scale_tril: torch.Tensor | None = None
    halt_logits: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    segment_means: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None

    @property
    def reported_means(self) -> torch.Tensor:
        """Posterior means [B, R] in the order of `config.reported_names`."""
        return _with_column(self.logits, self.s_8)

    @property
    def reported_stds(self) -> torch.Tensor:
        """Posterior standard deviations [B, R] in the order of `config.reported_names`."""
        return _with_column(self.std, self.s_8_std)


def _with_column(columns: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    return columns if last is None else torch.cat((columns, last.unsqueeze(-1)), dim=-1)


@dataclass
class Posterior:
    """Mixture of Gaussians in u, with log_weights [B, K], loc [B, K, T] and scale_tril [B, K, T, T]."""

    log_weights: torch.Tensor
    loc: torch.Tensor
    scale_tril: torch.Tensor


class PosteriorHead(Float32Buffers):
    """Maps features [B, F] to a `Posterior` and computes densities, moments and samples, all in float32."""

    def __init__(self, config: CosmoRegressionConfig, in_features: int):
        super().__init__()
        self.config = config
        targets, components = len(config.target_names), config.num_components
        self.shape = (components, targets)
        self.off_diagonal = targets * (targets - 1) // 2 if config.covariance == "cholesky" else 0
        self.hidden = Float32Linear(in_features, in_features)
        self.out = Float32Linear(in_features, components * (1 + 2 * targets + self.off_diagonal))
        self.points = nn.Buffer(normal_points(NUM_POINTS, targets), persistent=False)

    def reset(self, std: float | None) -> None:
        """Initialize the weights and the quasi-random points."""
        init.normal_(self.hidden.weight, std=std or self.hidden.in_features**-0.5)
        init.zeros_(self.hidden.bias)
        init.normal_(self.out.weight, std=std or 0.1 * self.out.in_features**-0.5)
        bias = torch.zeros(*self.shape[:1], self.out.out_features // self.shape[0])
        if self.shape[0] > 1:  # Gaussians that start identical would stay identical
            bias[:, 1 : 1 + self.shape[1]] = torch.linspace(-0.5, 0.5, self.shape[0]).unsqueeze(-1)
        init.copy_(self.out.bias, bias.flatten())
        init.copy_(self.points, normal_points(NUM_POINTS, self.shape[1]))

    def forward(self, features: torch.Tensor) -> Posterior:
        config, (components, targets) = self.config, self.shape
        with torch.autocast(features.device.type, enabled=False):  # variances need float32 precision
            raw = self.out(F.gelu(self.hidden(features))).unflatten(-1, (components, -1))
        log_weights, loc, log_std, rest = raw.split((1, targets, targets, self.off_diagonal), dim=-1)
        middle, half = (config.max_log_std + config.min_log_std) / 2, (config.max_log_std - config.min_log_std) / 2
        # Use soft limits, because outside the limits a clamp would have no gradient.
        log_std = middle + half * torch.tanh((log_std - middle) / half)
        scale_tril = torch.diag_embed(log_std.exp())
        if self.off_diagonal:
            rows, columns = torch.tril_indices(targets, targets, -1, device=raw.device)
            lower = torch.zeros_like(scale_tril)
            lower[..., rows, columns] = rest * log_std.exp()[..., rows]
            scale_tril = scale_tril + lower
        return Posterior(log_weights.squeeze(-1).log_softmax(-1), loc, config.posterior_scale * scale_tril)

    def nll(self, posterior: Posterior, labels: torch.Tensor) -> torch.Tensor:
        """Return -log p [B] of labels [B, T] in nats. Raise ValueError for labels outside the prior."""
        expected = [posterior.loc.shape[0], self.shape[1]]
        if list(labels.shape) != expected:
            raise ValueError(
                f"labels has shape {list(labels.shape)}: must be {expected}, with columns {self.config.target_names}"
            )
        u, log_slope = self.normalize(labels)
        residual = (u.unsqueeze(1) - posterior.loc).unsqueeze(-1)
        z = torch.linalg.solve_triangular(posterior.scale_tril, residual, upper=False).squeeze(-1)
        log_det = posterior.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_density = -0.5 * z.square().sum(-1) - log_det - 0.5 * u.shape[-1] * math.log(2 * math.pi)
        return -(torch.logsumexp(posterior.log_weights + log_density, dim=-1) + log_slope)

    def normalize(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return u [B, T] for labels y [B, T], and log |du/dy| summed over targets, [B]."""
        labels = labels.float()
        first, second = self._scaling(labels)
        if self.config.prior_bounds is None:
            return (labels - first) / second, -second.log().sum().expand(len(labels))
        share = (labels - first) / (second - first)
        # Check labels only on the CPU: other devices would have to synchronize, and compiled graphs cannot raise.
        checks = labels.device.type == "cpu" and not torch.compiler.is_compiling()
        if checks and not ((share > -EDGE) & (share < 1 + EDGE)).all():
            row, column = ((share <= -EDGE) | (share >= 1 + EDGE) | share.isnan()).nonzero()[0].tolist()
            raise ValueError(
                f"label {self.config.target_names[column]}={labels[row, column]:g} of row {row}: outside "
                f"prior_bounds={self.config.prior_bounds[column]}; widen the bounds, or drop the row"
            )
        u = math.sqrt(2) * torch.erfinv(2 * share.clamp(EDGE, 1 - EDGE) - 1)
        log_slope = 0.5 * u.square() + 0.5 * math.log(2 * math.pi) - (second - first).log()
        return u, log_slope.sum(-1)

    def physical(self, u: torch.Tensor) -> torch.Tensor:
        """Convert u [..., T] to reported parameters [..., R] in physical units."""
        first, second = self._scaling(u)
        if self.config.prior_bounds is None:
            return self.reported(first + second * u)
        return self.reported(first + (second - first) * torch.special.ndtr(u))

    def reported(self, values: torch.Tensor) -> torch.Tensor:
        """Append s_8 to targets [..., T] in physical units if `config.derived_s8`. The result is [..., R]."""
        if not self.config.derived_s8:
            return values
        names = self.config.target_names
        omega_m, sigma_8 = values[..., names.index("omega_m")], values[..., names.index("sigma_8")]
        s_8 = sigma_8 * (omega_m.clamp_min(0) / 0.3).sqrt()
        return torch.cat((values, s_8.unsqueeze(-1)), dim=-1)

    def moments(self, posterior: Posterior) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and standard deviations [B, R] in physical units."""
        with torch.autocast(posterior.loc.device.type, enabled=False):  # bfloat16 has errors up to 0.4 %
            u = posterior.loc.unsqueeze(-2) + self.points @ posterior.scale_tril.mT  # [B, K, points, T]
        values = self.physical(u)
        weights = posterior.log_weights.exp()[..., None, None] / len(self.points)
        mean = (weights * values).sum((1, 2))
        variance = (weights * (values - mean[:, None, None]).square()).sum((1, 2))
        return mean, variance.clamp_min(1e-12).sqrt()

    def squared_error(self, mean: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error [B] over targets, in units of the prior variance or `target_std`^2."""
        first, second = self._scaling(mean)
        spread = second if self.config.prior_bounds is None else (second - first) / math.sqrt(12)
        return ((mean[:, : self.shape[1]] - labels.float()) / spread).square().mean(-1)

    def metrics(self, mean: torch.Tensor, std: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `mse_<name>` for each reported parameter, and `z_squared`, the mean squared z-score."""
        truth = self.reported(labels.float())
        squared = (mean.detach() - truth).square()
        metrics = {f"mse_{name}": squared[:, i].mean() for i, name in enumerate(self.config.reported_names)}
        return metrics | {"z_squared": (squared / std.detach().square()).mean()}

    def sample(self, posterior: Posterior, num_samples: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw posterior samples [B, num_samples, R] in physical units."""
        weights, loc = posterior.log_weights.exp(), posterior.loc
        which = torch.multinomial(weights, num_samples, replacement=True, generator=generator)
        rows = torch.arange(len(loc), device=loc.device).unsqueeze(-1)
        noise = torch.randn(*which.shape, loc.shape[-1], 1, generator=generator, device=loc.device)
        with torch.autocast(loc.device.type, enabled=False):
            u = loc[rows, which] + (posterior.scale_tril[rows, which] @ noise).squeeze(-1)
        return self.physical(u)

    def best_scale(self, posterior: Posterior, labels: torch.Tensor) -> float:
        """Find the factor for all standard deviations that maximizes the likelihood of held-out labels [B, T].

        This is temperature scaling (Guo et al. 2017, arXiv 1706.04599). The factor is relative to the current
        `config.posterior_scale`. Values from 0.37 to 2.7 are tried in steps of 1 %.
        """
        scales = torch.linspace(-1, 1, 201).exp().tolist()
        likely = [
            self.nll(Posterior(posterior.log_weights, posterior.loc, posterior.scale_tril * scale), labels).mean()
            for scale in scales
        ]
        return scales[int(torch.stack(likely).argmin())]

    def _scaling(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bounds of the prior or, if it has none, the mean and std of the targets, [T] each."""
        config, targets = self.config, self.shape[1]
        scaling = zip(config.target_mean or [0.0] * targets, config.target_std or [1.0] * targets, strict=True)
        return like.new_tensor(config.prior_bounds or list(scaling)).unbind(-1)


class PosteriorMixin:
    """Mixin that builds outputs, losses and samples for models with a `posterior_head`."""

    posterior_head: PosteriorHead
    _custom_pipelines = {
        "cosmology-regression": {
            "impl": "pipeline_cosmo.CosmologyRegressionPipeline",
            "pt": ["AutoModelForImageClassification"],
            "type": "image",
        }
    }

    def posterior_output(
        self,
        posteriors: list[Posterior],
        used: torch.Tensor,
        kind: type[CosmoRegressionOutput] = CosmoRegressionOutput,
        **fields: Any,
    ) -> Any:
        """Build the output without losses.

        Args:
            posteriors: the posterior after each segment.
            used: number of segments of each map, [B].
            kind: class of the output.
            fields: further fields of the output.
        """
        moments, last = [self.posterior_head.moments(posterior) for posterior in posteriors], posteriors[-1]
        (mean, std), targets = moments[-1], len(self.config.target_names)
        if self.config.derived_s8:
            fields |= {"s_8": mean[:, targets], "s_8_std": std[:, targets]}
        return kind(
            logits=mean[:, :targets],
            std=std[:, :targets],
            log_weights=last.log_weights,
            loc=last.loc,
            scale_tril=last.scale_tril,
            steps=used,
            segment_means=torch.stack([mean for mean, _ in moments], dim=1),
            **fields,
        )

    def posterior_losses(
        self, output: CosmoRegressionOutput, posteriors: list[Posterior], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add losses and metrics to the output. Return NLL and squared error per segment, [B, segments]."""
        head = self.posterior_head
        nll = torch.stack([head.nll(posterior, labels) for posterior in posteriors], dim=1)
        mse = torch.stack([head.squared_error(mean, labels) for mean in output.segment_means.unbind(1)], dim=1)
        output.nll_loss, output.mse_loss = nll[:, -1].mean(), mse[:, -1].mean()
        output.metrics = head.metrics(output.reported_means, output.reported_stds, labels)
        return nll, mse

    def sample_posterior(
        self, outputs: CosmoRegressionOutput, num_samples: int, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Draw posterior samples [B, num_samples, R] in physical units, in `config.reported_names` order."""
        posterior = Posterior(outputs.log_weights, outputs.loc, outputs.scale_tril)
        return self.posterior_head.sample(posterior, num_samples, generator)


def normal_points(count: int, dim: int) -> torch.Tensor:
    """Return quasi-random normal points [count, dim] with exactly zero mean and identity covariance."""
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(count, dtype=torch.float64)
    points = math.sqrt(2) * torch.erfinv(2 * sobol.clamp(1e-6, 1 - 1e-6) - 1)
    points = points - points.mean(0)
    covariance = points.mT @ points / count
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), points.mT, upper=False).mT.float()
