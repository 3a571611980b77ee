"""Tiny Recursive Model: Jolicoeur-Martineau 2025, arXiv 2510.04871.

One small network f updates both states: first z_L = f(z_L, z_H + x), L_cycles times, then z_H = f(z_H, z_L). The last
of H_cycles such cycles has gradients in all passes. A row halts if q_halt > 0; there is no continue value and no
second forward.

With `update_rate`, `noise_scale` and `random_initial_states` this is the Equilibrium Reasoner (EqR, arXiv 2605.21488).

Difference from the original code: `mlp_t` blocks and attention blocks are two classes instead of one with a switch.
"""

from .configuration_trm_puzzle import TrmPuzzleConfig
from .modeling_puzzle import EquilibriumReasoner, PuzzleSolvingHead
from .puzzle_layers import PuzzleBlock, ReasoningLevel, SwiGLU, rms_norm


class PositionMixingBlock(PuzzleBlock):
    """Post-norm block that mixes positions with a SwiGLU along the position axis, as in MLP-Mixer."""

    def mix_positions(self, config, layer_idx):
        self.mlp_t = SwiGLU(config.max_position_embeddings, config)

    def forward(self, hidden_states, rotary, num_queries=None):
        transposed = hidden_states.transpose(1, 2)
        hidden_states = rms_norm(transposed + self.mlp_t(transposed), self.eps).transpose(1, 2)  # over positions
        hidden_states = hidden_states[:, :num_queries]
        return rms_norm(hidden_states + self.mlp(hidden_states), self.eps)


class TrmPuzzleModel(EquilibriumReasoner):
    """TRM without heads. A forward pass is one ACT step, with H_cycles * (L_cycles + 1) passes through its level."""

    config: TrmPuzzleConfig

    def __init__(self, config: TrmPuzzleConfig):
        super().__init__(config)
        self.L_level = ReasoningLevel(config, config.L_layers, PositionMixingBlock if config.mlp_t else PuzzleBlock)
        self.post_init()


class TrmPuzzleForSolving(PuzzleSolvingHead):
    """TRM with a token head and a halting head. See `PuzzleSolvingHead` for the ACT step and `solve`."""

    config: TrmPuzzleConfig
    reasoner_class = TrmPuzzleModel
    has_continue_value = False


__all__ = ["TrmPuzzleForSolving", "TrmPuzzleModel"]
