"""Per-token halting in models that think in segments: exit criteria, and losses that train the gate.

Each forward creates a criterion and evaluates it after each segment. The criterion reads only a token's own states, so
the decision does not depend on later tokens or other rows. B rows, T tokens, V vocabulary size.

Losses (`segment_losses`): N labeled tokens, M segments that ran. a[n, m] = 1 if token n was active in segment m =
1..M; h_n is the segment in which it halted. All sums over tokens have the same divisor (the number of labeled tokens
in the optimizer step), so gradient accumulation and data parallelism do not change the losses.

    lm_loss               = mean CE[n, h_n]
    deep_supervision_loss = sum_m w_m mean a[n, m] CE[n, m] / sum_m w_m,   w_m = m or 1 (ds_schedule)
    q_halt_loss           = mean BCE(q_halt[n, m]; R[n, m])
    q_continue_loss       = mean BCE(q_cont[n, m]; max(s(q_halt[n, m+1]), s(q_cont[n, m+1])) - halt_step_cost)
    ponder_loss           = E[m] / M, or KL(p || truncated geometric), or -H(p), with
                            p_m = lambda_m prod_{k<m} (1 - lambda_k), lambda = s(q_halt - q_cont), p_M the rest

R = 1 where halting was correct (q_target): the most likely token is correct ("correct"), or no later segment gained
loss_gain_threshold nats ("loss_gain"; known only if the token continued, and 1 after segment M). s is the sigmoid.
With "loss_gain", the continue value tends to 1 - cost * (M - m), so the gate thresholds the probability that no gain
is left.

Sources: Wang et al. 2025, arXiv 2506.21734 ("q", Q-learning, deep supervision); Zhu et al. 2025, "Scaling Latent
Reasoning via Looped Language Models" (Ouro: the exit rule "cdf", loss gain); Geiping et al. 2025, arXiv 2502.05171
("kl", "latent_diff" and "entropy_diff"); Pappone et al. 2025, arXiv 2509.23314 ("second_diff"); Schuster et al. 2022,
CALM, arXiv 2207.07061 ("confidence"); Banino et al. 2021, PonderNet, arXiv 2107.05407.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .act import IGNORE_INDEX


LOGITS_AT_ONCE = 2**24  # number of logits per chunk; with several chunks, the backward pass recomputes them
GEOMETRIC_PRIOR = 0.5  # prior probability of halting after each segment, for ponder_type="geometric_kl"


@dataclass
class SegmentState:
    """Inputs to an exit criterion after a segment.

    Attributes:
        hidden, previous: states [B, T, D] after this segment and the previous one (None after the first segment).
        q_logits: [B, T, 2], halt and continue values; None for a model without a halting head.
        logits: function from hidden [B, T, D] to next-token logits [B, T, V].
    """

    hidden: torch.Tensor
    previous: torch.Tensor | None
    q_logits: torch.Tensor | None
    logits: Callable[[torch.Tensor], torch.Tensor] | None


class ExitKind(NamedTuple):
    """Default and maximum threshold of an exit criterion, and whether it needs the gate or next-token logits."""

    default_threshold: float | None = None
    highest_threshold: float = torch.inf
    learned: bool = False
    of_distributions: bool = False


EXIT_CRITERIA = {
    "q": ExitKind(learned=True),
    "cdf": ExitKind(0.5, 1.0, learned=True),
    "kl": ExitKind(1e-3, of_distributions=True),
    "latent_diff": ExitKind(0.03),
    "second_diff": ExitKind(0.05),
    "entropy_diff": ExitKind(1e-3, of_distributions=True),
    "confidence": ExitKind(0.9, 1.0, of_distributions=True),
    "fixed": ExitKind(),
}


class ExitCriterion:
    """Exit criterion that compares a value per token [B, T] (see the private methods) with a threshold.

    "cdf" and "confidence" halt at or above the threshold, the other criteria below it. "q" halts where the halt value
    exceeds the continue value by more than `margin`. "fixed" never halts.
    """

    def __init__(self, name: str, threshold: float | None = None, margin: float = 0.0):
        if name not in EXIT_CRITERIA:
            raise ValueError(f"exit_criterion={name!r}: must be one of {tuple(EXIT_CRITERIA)}")
        self.name, self.margin = name, margin
        self.threshold = EXIT_CRITERIA[name].default_threshold if threshold is None else threshold
        self.last: torch.Tensor | None = None  # the criterion's value after the previous segment

    def check(self, state: SegmentState) -> torch.Tensor:
        """Return a bool mask [B, T] of the tokens that halt."""
        if self.name == "q":
            return state.q_logits[..., 0] - state.q_logits[..., 1] > self.margin
        value = None if self.name == "fixed" else getattr(self, f"_{self.name}")(state)
        if value is None:
            return torch.zeros(state.hidden.shape[:-1], dtype=torch.bool, device=state.hidden.device)
        return value >= self.threshold if self.name in ("cdf", "confidence") else value < self.threshold

    def _cdf(self, state: SegmentState) -> torch.Tensor:
        """Return the probability that the gate has halted so far, 1 - prod(1 - lambda)."""
        going_on = torch.sigmoid(state.q_logits[..., 1] - state.q_logits[..., 0])
        self.last = going_on if self.last is None else self.last * going_on
        return 1 - self.last

    def _latent_diff(self, state: SegmentState) -> torch.Tensor:
        """Return the norm of the change in the state, relative to the norm of the state."""
        return relative_change(state.hidden, state.previous)

    def _second_diff(self, state: SegmentState) -> torch.Tensor | None:
        """Return the relative difference between the last two state changes, or None before segment 3."""
        if state.previous is None:
            return None
        change = state.hidden - state.previous
        last, self.last = self.last, change
        return None if last is None else (change - last).norm(dim=-1) / state.hidden.norm(dim=-1)

    def _kl(self, state: SegmentState) -> torch.Tensor | None:
        """Return KL(p_m || p_{m-1}) in nats, where p_m is the next-token distribution after segment m."""
        now = state.logits(state.hidden).float().log_softmax(-1)
        last, self.last = self.last, now
        return None if last is None else (now.exp() * (now - last)).sum(-1)

    def _entropy_diff(self, state: SegmentState) -> torch.Tensor | None:
        """Return the absolute change in entropy of the next-token distribution, in nats."""
        log_p = state.logits(state.hidden).float().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        last, self.last = self.last, entropy
        return None if last is None else (entropy - last).abs()

    def _confidence(self, state: SegmentState) -> torch.Tensor:
        """Return the probability of the most likely next token."""
        return state.logits(state.hidden).float().softmax(-1).amax(-1)


class DrawnExit:
    """Exit rule that halts each token after a random number of segments (segment_sampling="per_token")."""

    def __init__(self, segments: torch.Tensor):
        self.segments, self.done = segments, 0

    def check(self, state: SegmentState) -> torch.Tensor:
        """Return a bool mask [B, T] of the tokens that halt."""
        self.done += 1
        return self.segments <= self.done


def relative_change(hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """Return ||h_m - h_{m-1}|| / ||h_m||, [B, T], or infinity after the first segment."""
    if previous is None:
        return torch.full_like(hidden[..., 0], torch.inf)
    return (hidden - previous).norm(dim=-1) / hidden.norm(dim=-1)


def segment_losses(
    plan,
    head: Callable[[torch.Tensor], torch.Tensor],
    outputs,
    targets: torch.Tensor,
    logits: torch.Tensor | None = None,
    num_items: torch.Tensor | int | None = None,
) -> dict:
    """Return `loss`, its terms, and `metrics` as a dict of `HrmLmCausalLMOutput` fields.

    The loss is the weighted sum of the terms in training, and `lm_loss` in evaluation.

    Args:
        plan: the `SegmentPlan` of the forward. With `gate_only`, only the gate's loss counts, with weight 1.
        head: function from states [N, D] to logits [N, V].
        outputs: an `HrmLmModelOutput`, including the states of all segments if the plan learns from all segments.
        targets: [B, T], shifted.
        logits: [B, T, V], computed from the last states; None to compute them here.
        num_items: divisor of the sums over tokens; None for the number of labeled tokens.
    """
    config = plan.config
    states = outputs.segment_hidden_states or (outputs.last_hidden_state,)
    q_logits = outputs.q_logits if plan.learns_from_all_segments else None
    valid = targets != IGNORE_INDEX
    target, halted_in = targets[valid], outputs.halt_steps[valid]
    count = target.numel()
    if num_items is None:  # without labels, the mean is undefined: use 0 in training and NaN in evaluation
        num_items = max(count, 1) if plan.training else count
    smoothing = config.label_smoothing if plan.training else 0.0
    size = max(1, LOGITS_AT_ONCE // config.vocab_size)

    logits = None if logits is None else logits[valid]
    final_nll, final, final_correct = _token_losses(
        head, outputs.last_hidden_state[valid], target, smoothing, size, logits
    )
    M = len(states)
    nll, correct = [final_nll.detach()] * M, [final_correct] * M
    supervised = [_at(halted_in == m + 1, final).sum() for m in range(M)]
    for m in range(M - 1):  # only tokens that continue after this segment; final states are handled above
        going_on = (halted_in > m + 1).nonzero().squeeze(-1)
        if not len(going_on):
            continue
        part_nll, part, part_correct = _token_losses(
            head, states[m][valid][going_on], target[going_on], smoothing, size
        )
        nll[m] = nll[m].index_copy(0, going_on, part_nll.detach())
        correct[m] = correct[m].index_copy(0, going_on, part_correct)
        supervised[m] = supervised[m] + part.sum()

    terms = {"lm_loss": final_nll.sum() / num_items, "deep_supervision_loss": final.sum() * 0.0}
    if config.deep_supervision == "all" and config.halt_max_steps > 1:
        # Divide by the weights of all segments, even if fewer ran: a token's loss must not depend on other tokens.
        weights = [m + 1.0 if config.ds_schedule == "linear" else 1.0 for m in range(max(M, config.halt_max_steps))]
        terms["deep_supervision_loss"] = sum(w * s for w, s in zip(weights, supervised)) / sum(weights) / num_items
    loss = config.lm_loss_weight * final.sum() / num_items
    loss = loss + config.ds_loss_weight * terms["deep_supervision_loss"]

    nll, correct = torch.stack(nll, dim=1), torch.stack(correct, dim=1)
    metrics = _metrics(config, states, valid, halted_in, nll, correct)
    if config.halt_max_steps > 1 and config.deep_supervision == "last" and q_logits is None:
        del metrics["ce_first"], metrics["convergence_rate"]  # these metrics need the states of all segments
    if q_logits is not None:
        q = q_logits[valid]
        gate, gate_metrics = halting_value_losses(config, q, halted_in, nll, correct)
        # If all tokens halted early, repeat their last values for the segments that did not run.
        repeated = q[:, -1:].expand(-1, max(0, config.halt_max_steps - M), -1)
        gate["ponder_loss"] = ponder_loss(config, torch.cat([q, repeated], dim=1))
        metrics |= gate_metrics
        terms |= {name: value.sum() / num_items for name, value in gate.items()}
        values = (terms["q_halt_loss"] + terms["q_continue_loss"]) / 2
        loss = values if plan.gate_only else loss + config.q_loss_weight * values
        loss = loss + config.ponder_loss_weight * terms["ponder_loss"]
    elif outputs.q_logits is not None:  # DDP expects a gradient for every parameter
        loss = loss + 0 * outputs.q_logits.sum()
    loss = loss if plan.training else terms["lm_loss"].clone()  # clone, because Trainer may scale the loss in place
    return {"loss": loss, **terms, "metrics": {name: value.detach() for name, value in metrics.items()}}


def halting_value_losses(
    config, q: torch.Tensor, halted_in: torch.Tensor, nll: torch.Tensor, correct: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two dicts: the losses [N] of q_halt and q_continue, averaged over segments, and metrics.

    q: [N, M, 2]. halted_in: int [N], 1..M. nll: [N, M]. correct: bool [N, M]. After a token's halting segment, nll and
    correct repeat the values of that segment.
    """
    M = q.shape[1]
    segment = torch.arange(1, M + 1, device=q.device)
    thought, went_on = segment <= halted_in[:, None], segment < halted_in[:, None]
    if config.q_target == "correct":
        right, known = correct, thought
    else:
        later = torch.full_like(nll, torch.inf)
        later[:, :-1] = nll.flip(1).cummin(1).values.flip(1)[:, 1:]
        right, known = nll - later < config.loss_gain_threshold, went_on
    q_halt, q_continue = q[..., 0], q[..., 1]
    halt_loss = F.binary_cross_entropy_with_logits(q_halt, right.to(q.dtype), reduction="none")
    with torch.no_grad():
        value = torch.sigmoid(q)
        best = value.amax(-1)
        if M == config.halt_max_steps:  # a token must halt after the last segment
            best[:, -1] = 1.0 if config.q_target == "loss_gain" else value[:, -1, 0]  # the value of halting
        target = (best[:, 1:] - config.halt_step_cost).clamp(0, 1)
    continue_loss = F.binary_cross_entropy_with_logits(q_continue[:, :-1], target, reduction="none")
    losses = {
        "q_halt_loss": _at(known, halt_loss).sum(1) / config.halt_max_steps,
        "q_continue_loss": _at(went_on[:, :-1], continue_loss).sum(1) / config.halt_max_steps,
    }
    total = known.sum().clamp(min=1)
    metrics = {
        "q_halt_accuracy": (known & ((q_halt > 0) == right)).sum() / total,
        "q_halt_calibration": (_at(known, value[..., 0] - right.float()).sum() / total).abs(),
    }
    return losses, metrics


def halting_distribution(q: torch.Tensor) -> torch.Tensor:
    """Return the probability [N, M] that the gate, sigmoid(q_halt - q_continue), halts after each segment."""
    gate = torch.sigmoid(q[..., 0] - q[..., 1])
    gate = torch.cat([gate[:, :-1], torch.ones_like(gate[:, :1])], dim=1)
    before = torch.cat([torch.ones_like(gate[:, :1]), (1 - gate[:, :-1]).cumprod(1)], dim=1)
    return gate * before


def ponder_loss(config, q: torch.Tensor) -> torch.Tensor:
    """Return the ponder loss [N], a compute cost for each token, from the halting values q [N, M, 2]."""
    p = halting_distribution(q)
    segment = torch.arange(1, p.shape[1] + 1, device=p.device, dtype=p.dtype)
    if config.ponder_type == "expected_steps":
        return (p * segment).sum(1) / config.halt_max_steps
    log_p = p.clamp(min=1e-12).log()
    if config.ponder_type == "neg_entropy":
        return (p * log_p).sum(1)
    prior = GEOMETRIC_PRIOR * (1 - GEOMETRIC_PRIOR) ** (segment - 1)
    return (p * (log_p - (prior / prior.sum()).log())).sum(1)


def _token_losses(head, hidden, target, smoothing: float, size: int, logits: torch.Tensor | None = None) -> tuple:
    """Return three tensors [n]: NLL, NLL with label smoothing, and whether the argmax is correct.

    hidden is [n, D], target [n]. If `logits` [n, V] is None, the logits are computed for `size` tokens at a time.
    """

    def of_logits(logits, target):
        log_p = logits.float().log_softmax(-1)
        nll = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        loss = nll if smoothing == 0 else (1 - smoothing) * nll - smoothing * log_p.mean(-1)
        return nll, loss, logits.argmax(-1) == target

    if logits is not None or len(target) <= size:
        return of_logits(head(hidden) if logits is None else logits, target)
    parts = [
        checkpoint(lambda h, t: of_logits(head(h), t), h, t, use_reentrant=False)
        for h, t in zip(hidden.split(size), target.split(size))
    ]
    return tuple(torch.cat(part) for part in zip(*parts))


@torch.no_grad()
def _metrics(config, states, valid, halted_in, nll, correct) -> dict[str, torch.Tensor]:
    """Compute 0-d metrics over labeled tokens from `nll` and `correct`, [N, M]. With N = 0, means are 0."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.float().sum() / max(len(values), 1)

    converged = thought = torch.zeros((), device=nll.device)
    for m in range(1, len(states)):
        change = relative_change(states[m][valid], states[m - 1][valid])
        thinking = halted_in > m
        converged = converged + (thinking & (change < config.convergence_threshold)).sum()
        thought = thought + thinking.sum()
    steps = mean(halted_in)
    return {
        "avg_steps": steps,
        **{f"halted_at_{m}": mean(halted_in == m) for m in range(1, config.halt_max_steps + 1)},
        "convergence_rate": converged / thought.clamp(min=1),
        "h_updates": steps * config.H_cycles,
        "l_steps": steps * config.H_cycles * config.L_cycles,
        "layer_visits_per_token": steps * config.segment_visits,
        "ce_first": mean(nll[:, 0]),
        "ce_last": mean(nll[:, -1]),
        "token_accuracy": mean(correct[:, -1]),
        "perplexity": mean(nll[:, -1]).exp(),
    }


def _at(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, 0.0)
