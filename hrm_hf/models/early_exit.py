"""When may a token stop thinking? Exit criteria of models that work in segments.

A criterion is made anew for each forward and asked after each segment for every token by itself, from that token's
own states only, so that a decision depends neither on later tokens nor on other rows. B rows, T tokens, V vocabulary.

Sources: "q" Wang et al. 2025, arXiv 2506.21734; "cdf" the exit rule of Ouro (Zhu et al. 2025, "Scaling Latent
Reasoning via Looped Language Models"); "kl", "latent_diff" and "entropy_diff", which need no training, Geiping et al.
2025, arXiv 2502.05171.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


# None: the criterion has no threshold. "fixed" never halts.
DEFAULT_THRESHOLDS = {"q": None, "cdf": 0.5, "kl": 1e-3, "latent_diff": 0.03, "entropy_diff": 1e-3, "fixed": None}
LEARNED = ("q", "cdf")


@dataclass
class SegmentState:
    """What a criterion may look at after a segment.

    Attributes:
        hidden, previous: states [B, T, D] after this segment and after the one before (None after the first).
        q_logits: [B, T, 2], halting and continuing value; None for a model without a halting head.
        logits: maps hidden [B, T, D] to next-token logits [B, T, V].
    """

    hidden: torch.Tensor
    previous: torch.Tensor | None
    q_logits: torch.Tensor | None
    logits: Callable[[torch.Tensor], torch.Tensor] | None


class QExit:
    """Halts where the value of halting exceeds that of continuing by more than a margin."""

    def __init__(self, margin: float = 0.0):
        self.margin = margin

    def check(self, state: SegmentState) -> torch.Tensor:
        """bool [B, T]"""
        return state.q_logits[..., 0] - state.q_logits[..., 1] > self.margin


class CdfExit:
    """Halts where the gate's probability of having halted by now, 1 - prod(1 - lambda), reaches the threshold."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.remaining: torch.Tensor | float = 1.0

    def check(self, state: SegmentState) -> torch.Tensor:
        """bool [B, T]"""
        self.remaining = self.remaining * torch.sigmoid(state.q_logits[..., 1] - state.q_logits[..., 0])
        return 1 - self.remaining >= self.threshold


class LatentDiffExit:
    """Halts where the state changed by less than a share of its norm."""

    def __init__(self, threshold: float):
        self.threshold = threshold

    def check(self, state: SegmentState) -> torch.Tensor:
        """bool [B, T]"""
        return relative_change(state.hidden, state.previous) < self.threshold


class KlExit:
    """Halts where KL(p_m || p_{m-1}) of the next-token distributions is below the threshold, in nats."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.last: torch.Tensor | None = None

    def check(self, state: SegmentState) -> torch.Tensor:
        """bool [B, T]"""
        now = state.logits(state.hidden).float().log_softmax(-1)
        last, self.last = self.last, now
        if last is None:
            return _nowhere(state.hidden)
        return (now.exp() * (now - last)).sum(-1) < self.threshold


class EntropyDiffExit:
    """Halts where the entropy of the next-token distribution moved by less than the threshold, in nats."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.last: torch.Tensor | None = None

    def check(self, state: SegmentState) -> torch.Tensor:
        """bool [B, T]"""
        log_p = state.logits(state.hidden).float().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        last, self.last = self.last, entropy
        if last is None:
            return _nowhere(state.hidden)
        return (entropy - last).abs() < self.threshold


class FixedExit:
    """Never halts: every token gets all segments."""

    def check(self, state: SegmentState) -> torch.Tensor:
        """bool [B, T]"""
        return _nowhere(state.hidden)


def make_exit(criterion: str, threshold: float | None = None, margin: float = 0.0):
    """The criterion of a name in DEFAULT_THRESHOLDS. Raises ValueError for an unknown name."""
    if criterion not in DEFAULT_THRESHOLDS:
        raise ValueError(f"exit_criterion={criterion!r} is not one of {tuple(DEFAULT_THRESHOLDS)}")
    if criterion == "q":
        return QExit(margin)
    if criterion == "fixed":
        return FixedExit()
    classes = {"cdf": CdfExit, "kl": KlExit, "latent_diff": LatentDiffExit, "entropy_diff": EntropyDiffExit}
    return classes[criterion](DEFAULT_THRESHOLDS[criterion] if threshold is None else threshold)


def relative_change(hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """||h_m - h_{m-1}|| / ||h_m||, [B, T]; infinite after the first segment."""
    if previous is None:
        return torch.full_like(hidden[..., 0], torch.inf)
    return (hidden - previous).norm(dim=-1) / hidden.norm(dim=-1)


def _nowhere(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
