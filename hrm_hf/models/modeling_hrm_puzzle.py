"""Hierarchical Reasoning Model for puzzles (ACT-v1): Wang et al. 2025, arXiv 2506.21734.

Two stacks of post-norm blocks update two latent states: the fast z_L at every low-level step, the slow z_H once per
high-level cycle. Only the last update of each is differentiated (the one-step gradient, section 2 of the paper).

Differences from the original code, none of which changes the results:

- Attention uses transformers' attention interface instead of FlashAttention.
- Both forwards of a training step share one input embedding. The second forward, which only computes a Q value, skips
  the token logits and runs the last block for the first position only.
- The softmax loss also works with prefix slots when uncompiled.
"""

from .configuration_hrm_puzzle import HrmPuzzleConfig
from .modeling_puzzle import PuzzleReasoner, PuzzleSolvingHead
from .puzzle_layers import ReasoningLevel, one_step_gradient


class HrmPuzzleModel(PuzzleReasoner):
    """HRM without heads. A forward pass is one ACT step, with H_cycles * (L_cycles + 1) passes through the levels."""

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__(config)
        self.H_level = ReasoningLevel(config, config.H_layers)
        self.L_level = ReasoningLevel(config, config.L_layers)
        self.post_init()

    def reason(self, x, rotary, z_H, z_L, num_queries=None):
        cycles = (self.config.H_cycles, self.config.L_cycles)
        return one_step_gradient(self.H_level, self.L_level, cycles, x, rotary, z_H, z_L, num_queries)


class HrmPuzzleForSolving(PuzzleSolvingHead):
    """HRM with a token head and a halting head. See `PuzzleSolvingHead` for the ACT step and `solve`."""

    reasoner_class = HrmPuzzleModel
    has_continue_value = True


__all__ = ["HrmPuzzleForSolving", "HrmPuzzleModel"]
