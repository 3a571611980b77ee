"""Plan of a forward pass: how many segments run, which have gradients, and which tokens may halt.

`plan_segments` makes the plan before the first segment, and `ThinkingTokens` follows it from segment to segment. The
config describes the fully trained model; during training, a trainer passes a `SegmentSchedule` with overrides.

Sources: Geiping et al. 2025, arXiv 2502.05171 (random number of segments); Wang et al. 2025, arXiv 2506.21734 (random
minimum number of segments).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from .act import exploration_min_steps
from .early_exit import EXIT_CRITERIA, DrawnExit, ExitCriterion, SegmentState
from .recurrent_cache import open_cache, validate_slots


# Upper limits of a random number of segments, as multiples of its mean, so that a single draw cannot exhaust memory.
# In a large batch, some token always reaches the limit, so the limit per token is lower.
MOST_SAMPLED, MOST_SAMPLED_PER_TOKEN = 4, 2


@dataclass
class SegmentSchedule:
    """Temporary overrides of the config for training. Inference reads only `gate_only`.

    Attributes:
        bp_steps: number of stack passes per segment with gradients; None for the config's value.
        segments: number of segments for each token; None for the config's value.
        mean_segments: mean number of segments if it is drawn, else the number itself; None for the config's
            halt_max_steps. If the config sets bp_segments, at most this many segments have gradients.
        halting: whether tokens may halt. If they could halt from the first training step, later segments would see
            few tokens before improving on the first segment. The halting values are trained in any case.
        gate_only: use only the loss of the halting gate.
    """

    bp_steps: int | None = None
    segments: int | None = None
    mean_segments: int | None = None
    halting: bool = True
    gate_only: bool = False


@dataclass
class SegmentPlan:
    """Plan of one forward pass: how many segments run, which have gradients, and how tokens halt.

    Attributes:
        segments: maximum number of segments; drawn: whether this number was drawn at random.
        exit_rule: object with `check(SegmentState)`, which returns bool [B, T].
        bp_steps: number of stack passes per segment with gradients.
        without_gradients: number of initial segments without gradients.
        explores: whether tokens draw a random minimum number of segments.
        logits_fn: function from hidden states to next-token logits, for exit criteria that compare distributions.
    """

    config: Any
    segments: int
    exit_rule: Any
    bp_steps: int
    without_gradients: int
    drawn: bool
    explores: bool
    training: bool
    gate_only: bool = False
    logits_fn: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def gradient_passes(self) -> tuple[bool, ...]:
        """Return whether each stack pass of a segment, in order, has gradients. The last `bp_steps` passes do.

        With two stacks, passes of the high-level stack have priority. The result consists of booleans, because
        torch.compile would make a changing integer symbolic, and symbolic integers cannot switch gradients.
        """
        config = self.config
        if not torch.is_grad_enabled():
            return (False,) * config.stack_passes
        if config.flat_loop:
            return tuple(low >= config.L_cycles - self.bp_steps for low in range(config.L_cycles))
        h_passes = min(config.H_cycles, self.bp_steps - 1)
        first_h_pass = config.H_cycles - h_passes
        first_l_pass = config.H_cycles * config.L_cycles - (self.bp_steps - h_passes)
        found = []
        for h in range(config.H_cycles):
            found += [h * config.L_cycles + low >= first_l_pass for low in range(config.L_cycles)]
            found.append(h >= first_h_pass)
        return tuple(found)

    @property
    def learns_from_all_segments(self) -> bool:
        """Whether any loss reads every segment, as deep supervision and the gate's losses do."""
        config = self.config
        gate = config.q_loss_weight > 0 or config.ponder_loss_weight > 0 or self.gate_only
        return config.halt_max_steps > 1 and (config.deep_supervision == "all" or gate)

    def has_gradients(self, segment: int) -> bool:
        """Check whether a segment, counted from 1, has gradients."""
        return torch.is_grad_enabled() and segment > self.without_gradients

    def cache(self, given: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the cache for this forward pass: the given cache, a new cache, or None.

        With a random number of segments, no cache is created, because the forward may run more segments than a cache
        has slots for. Raises ValueError if the given cache has too few slots.
        """
        config = self.config
        given = open_cache(given, config, use_cache and not self.drawn)
        if given is not None and self.segments > config.halt_max_steps and config.kv_layout == "per_segment":
            raise ValueError(
                f"num_segments={self.segments}: the cache only has slots for halt_max_steps={config.halt_max_steps} "
                "segments; use kv_layout='last_segment' or use_cache=False"
            )
        validate_slots(given, config.num_hidden_layers)
        return given


def plan_segments(
    config,
    tokens: torch.Tensor,
    training: bool,
    schedule: SegmentSchedule | None = None,
    num_segments: int | None = None,
    exit_criterion: Any = None,
    exit_threshold: float | None = None,
    logits_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> SegmentPlan:
    """Plan a forward pass over `tokens` [B, T, ...]. Only the shape and device of `tokens` are used.

    Args:
        schedule: temporary overrides in training.
        num_segments: maximum number of segments; by default the config's halt_max_steps, or in training the number
            drawn by its segment_sampling.
        exit_criterion: a name in `EXIT_CRITERIA`, or an object with `check`; None for the config's criterion. Criteria
            that are not learned apply only in inference; training then runs every segment.
        exit_threshold: threshold of the criterion; None for the config's threshold.
        logits_fn: function from hidden states to logits, for criteria that compare distributions.

    Raises:
        ValueError: a value is out of range, the criterion is unknown, or it needs `logits_fn`.
    """
    schedule = schedule or SegmentSchedule()
    bp_steps = config.bp_steps if schedule.bp_steps is None else schedule.bp_steps
    if torch.is_grad_enabled():
        config.check_bp_steps(bp_steps)
    drawn, mean = None, (schedule.mean_segments if training else None) or config.halt_max_steps
    if num_segments is None and training:
        num_segments = schedule.segments
        drawn = drawn_segments(config, tokens, mean) if num_segments is None else None
    if num_segments is None:
        num_segments = mean if drawn is None else int(drawn.max())
    if num_segments < 1:
        raise ValueError(f"num_segments={num_segments}: must be >= 1")
    per_token = drawn is not None and drawn.dim() > 0
    rule = exit_rule(config, exit_criterion, exit_threshold, logits_fn, training, schedule.halting)
    rule = DrawnExit(drawn) if per_token else rule
    return SegmentPlan(
        config,
        num_segments,
        rule,
        bp_steps,
        without_gradients=0 if config.bp_segments is None else num_segments - min(config.bp_segments, mean),
        drawn=drawn is not None,
        explores=training and not per_token and config.halt_max_steps > 1,
        training=training,
        gate_only=schedule.gate_only,
        logits_fn=logits_fn,
    )


def drawn_segments(config, tokens: torch.Tensor, mean: int | None = None) -> torch.Tensor | None:
    """Draw the number of segments, [] or [B, T] depending on `config.segment_sampling`. Return None for "fixed".

    The number is 1 plus a Poisson variable with a log-normal rate. The mean rate is `mean` - 1, with halt_max_steps as
    the default mean. The number is limited to a multiple of halt_max_steps.
    """
    if config.segment_sampling == "fixed":
        return None
    per_token = config.segment_sampling == "per_token"
    like = torch.ones(tokens.shape[:2], device=tokens.device) if per_token else torch.ones(())
    sigma, mean = config.segment_sampling_sigma, mean or config.halt_max_steps
    rate = (mean - 1) * torch.exp(sigma * torch.randn_like(like) - sigma**2 / 2)
    most = MOST_SAMPLED_PER_TOKEN if per_token else MOST_SAMPLED
    return (1 + torch.poisson(rate).long()).clamp(max=most * config.halt_max_steps)


def exit_rule(config, criterion, threshold: float | None, logits_fn, training: bool, halting: bool):
    """Return the object that decides which tokens halt. Arguments are as in `plan_segments`."""
    criterion = config.exit_criterion if criterion is None else criterion
    if not isinstance(criterion, str):
        return criterion
    rule = ExitCriterion(criterion, config.exit_threshold if threshold is None else threshold, config.halt_margin)
    kind = EXIT_CRITERIA[criterion]
    may_halt = not training or (halting and kind.learned and config.segment_sampling == "fixed")
    if not may_halt or (kind.learned and config.halt_max_steps == 1):
        return ExitCriterion("fixed")
    if kind.of_distributions and logits_fn is None:
        raise ValueError(
            f"exit_criterion={criterion!r}: needs next-token distributions; call HrmLmForCausalLM, or pass logits_fn "
            "to HrmLmModel"
        )
    return rule


@dataclass
class ThinkingTokens:
    """Progress of the new tokens [B, T] through the segments of a plan.

    Attributes:
        active: bool [B, T], tokens that have not halted; padding is never active.
        steps: int [B, T], number of segments each token has taken.
        fewest: minimum segments of each token; higher for tokens that explore in training.
        thinking: `active` in the current segment, or None if all tokens are active.
        q_logits, states: [B, T, 2] and [B, T, D] of each segment that ran.
    """

    plan: SegmentPlan
    active: torch.Tensor
    steps: torch.Tensor
    fewest: torch.Tensor | int
    thinking: torch.Tensor | None = None
    q_logits: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def start(cls, plan: SegmentPlan, x: torch.Tensor, attention_mask: torch.Tensor | None) -> "ThinkingTokens":
        """Start with all tokens of x [B, T, D] active, except padding, which a mask [B, past + T] marks with 0."""
        active = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if attention_mask is not None and attention_mask.dim() == 2:
            active = attention_mask[:, -x.shape[1] :].bool()
        config, steps = plan.config, torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        fewest = config.halt_min_steps
        if plan.explores:
            sampled = exploration_min_steps(steps, config.halt_max_steps, config.halt_exploration_prob)
            fewest = sampled.clamp(min=config.halt_min_steps)
        return cls(plan, active, steps, fewest)

    def segments_to_keep(self, cache: Any) -> int:
        """Return the number of segments to keep keys and values for, or 0 if no cache or later segment needs them.

        Storing them is a side effect, which gradient checkpointing inside a compiled layer does not allow. Training
        stores those of the last segment too, so that a compiled layer needs no other graph for this segment.
        """
        segments = max(self.plan.segments, self.plan.config.halt_max_steps) + self.plan.training
        fixed = cache is None and getattr(self.plan.exit_rule, "name", None) == "fixed"
        return 0 if segments == 1 or (fixed and _all(self.active)) else segments

    def begin(self, segment: int) -> torch.Tensor | None:
        """Begin a segment, counted from 1. Return a mask of the segment's active tokens, or None for all."""
        self.thinking = None if segment == 1 or _all(self.active) else self.active
        self.steps = self.steps + self.active
        return self.thinking

    def keep(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return [B, T, ...] with the values of `new` for active tokens and of `old` for the others."""
        if self.thinking is None:
            return new
        return torch.where(self.thinking.view(*self.thinking.shape, *[1] * (new.dim() - 2)), new, old)

    def next_state(self, new: tuple[torch.Tensor, ...], old: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the state for the next segment, detached if `config.detach_between_segments`."""
        kept = tuple(self.keep(*pair) for pair in zip(new, old))
        return tuple(z.detach() for z in kept) if self.plan.config.detach_between_segments else kept

    def halt(self, segment: int, hidden: torch.Tensor, previous: torch.Tensor, q: torch.Tensor | None) -> bool:
        """Halt tokens after the given segment (the first is 1). Return whether it was the last segment.

        hidden, previous: states [B, T, D] after and before this segment. q: [B, T, 2], or None without a gate.
        """
        if q is not None:
            self.q_logits.append(q)
        if segment == self.plan.segments:
            return True
        after = SegmentState(hidden, previous if segment > 1 else None, q, self.plan.logits_fn)
        with torch.no_grad():
            self.active = self.active & ~(self.plan.exit_rule.check(after) & (self.fewest <= segment))
        return not _traced(self.active) and not bool(self.active.any())

    def outputs(self) -> dict[str, torch.Tensor | None]:
        """Return the halting values [B, T, m, 2] of the m segments that ran, and each token's number of segments."""
        q_logits = torch.stack(self.q_logits, dim=2) if self.q_logits else None
        return {"q_logits": q_logits, "halt_steps": self.steps.clamp(min=1)}


def _all(active: torch.Tensor) -> bool:
    """Check whether all tokens are active. While tracing, return False to keep a single graph."""
    return not _traced(active) and bool(active.all())


def _traced(active: torch.Tensor) -> bool:
    """Check whether torch.compile or a CUDA graph is recording. Branches then cannot depend on values."""
    return torch.compiler.is_compiling() or (active.is_cuda and torch.cuda.is_current_stream_capturing())
