"""One code token of each row behind a cache: the Go coder's step while it writes code.

Of its past, code attends to code alone, and by cross-attention to the planner alone. Masks over all cached positions
say so too, but what they hide is read from memory all the same, which is most of what a small model's attention costs.
Here one range of columns is read that has what some row may see:

    columns of the cache   padding  <s>  problem, plan   code so far   own
    self-attention                   *             [* ................. S)     * <s>, which no opener precedes, is code
    cross-attention        [0 .................. last *]                *      * the own position

What stands apart is copied beside the range, into a column that no later token reads either: code never attends to
itself at planner positions, nor to the planner at code positions but its own. So the cache stays right for any token.
"""

from collections.abc import Callable

import torch


# Columns times rows that are worth the copies: measured on a CPU, 16 us for keys and values of a layer against 0.09 us
# for a column of 256 numbers.
WORTHWHILE = 256


class SingleStep:
    """Says what the one new token of each row may read.

    On a CPU alone: where a range ends is read from the phases, and any other device would have to be waited for.

    Args:
        seen: tokens in the cache, S - 1.
        real: bool [B, S], False for padding; None without any.
        as_mask: makes an attention mask of bool [B, 1, 1, keys], as the attention function wants it.
    """

    def __init__(self, seen: int, real: torch.Tensor | None, as_mask: Callable[[torch.Tensor], torch.Tensor]):
        self.seen, self.real, self.as_mask = seen, real, as_mask
        self.first = 0  # of the columns that self-attention reads
        self.early: torch.Tensor | None = None  # code before that, one column a row [B]
        self.last = seen - 1  # of the columns that cross-attention reads beside the own one

    @classmethod
    def of(cls, inputs_embeds, attention_mask, seen, as_mask) -> "SingleStep | None":
        """The step of embeddings [B, T, C] behind `seen` tokens.

        None for several tokens, for a cache that does not grow, where gradients are wanted, and for compilers and
        tracers, which must not look at a mask's values.
        """
        if inputs_embeds.shape[1] != 1 or torch.is_tensor(seen) or seen == 0 or inputs_embeds.device.type != "cpu":
            return None
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_grad_enabled():
            return None
        if attention_mask is None:
            return cls(seen, None, as_mask)
        if attention_mask.shape != (inputs_embeds.shape[0], seen + 1):
            return None
        real = attention_mask.bool()
        return cls(seen, None if real.all() else real, as_mask)

    def planner_mask(self) -> torch.Tensor | None:
        """Of the planner's self-attention, which reads everything."""
        return None if self.real is None else self.as_mask(self.real[:, None, None, :])

    def generator_masks(self, phases: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Masks of self- and cross-attention for what `own_range` and `cross_range` give, given phases [B, S]."""
        seen, rows = self.seen, len(phases)
        code, plan = phases.clone(), ~phases
        code[:, seen] = plan[:, seen] = True
        if self.real is not None:
            code &= self.real
            plan &= self.real
        if not phases[:, seen].all():  # the columns beside a range would be read by those that are not in their code
            return self._mask(code), self._mask(plan)
        begins = (plan[:, :seen] * torch.arange(1, seen + 1)).amax(dim=1)  # the code that is being written
        begin, last = int(begins.min()), int(begins.max()) - 1
        if (seen - last - 1) * rows > WORTHWHILE:
            self.last = last
            plan = torch.cat([plan[:, : last + 1], plan[:, seen:]], dim=1)
        early = code[:, :begin]
        if begin * rows > WORTHWHILE and early.sum(dim=1).max() <= 1:
            self.first, self.early = begin - 1, early.byte().argmax(dim=1)
            code = torch.cat([early.any(dim=1, keepdim=True), code[:, begin:]], dim=1)
        return self._mask(code), self._mask(plan)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor | None:
        return None if visible.all() else self.as_mask(visible[:, None, None, :])

    def own_range(self, states: torch.Tensor) -> torch.Tensor:
        """Of the generator's keys or values [B, heads, S, head_dim], those that may be read."""
        if self.early is None:
            return states
        states[:, :, self.first] = states[torch.arange(len(states)), :, self.early]
        return states[:, :, self.first :]

    def cross_range(self, states: torch.Tensor) -> torch.Tensor:
        """Of the planner's keys or values [B, heads, S, head_dim], those that may be read."""
        if self.last + 1 < self.seen:
            states[:, :, self.last + 1] = states[:, :, self.seen]
        return states[:, :, : self.last + 2]
