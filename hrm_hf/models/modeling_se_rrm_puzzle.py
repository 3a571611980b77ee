"""SE-RRM: a symbol-equivariant recurrent reasoner (arXiv 2603.02193, code under the MIT license).

The state z [B, V, T, D] has a vector for every symbol v at every position t, including positions after the board.

    x[b, v, s] = sqrt(V) [input = v] e_v + position_s + (puzzle: g + c_v)
    z <- block_n(... block_1(z + x)), H_cycles * L_cycles times, the last L_cycles of them with gradient
    block: attention over positions, attention over symbols, SwiGLU, each followed by a residual sum and a norm
    logits[b, s, v] = w . z[b, v, s]

e_v is the same vector for all symbols except padding and empty, and no weight distinguishes the other symbols, so
permuting the symbols of a board permutes the answer. There is no halting head: the confidence of a row is the minimum
over its cells of the largest softmax probability. In training, rows halt at random, or after halt_max_steps.

With `mixing` other than "attention", cheaper mixers replace both attentions, for CPUs and small devices:

    block: h <- RMS(h + positions(h) + W mean_v(h)); h <- RMS(h + SwiGLU(h))

With pooling="softmax", the means over units and over symbols are weighted, so one decisive cell is not diluted.

With `two_states`, z_H and z_L are updated as in TRM, or as in EqR if its fields are set.

Difference from the original code: the halves of a head that are rotated by row and by column are contiguous, as in
`PuzzleAttention`, so `hrm-hf convert se_rrm` permutes the rows of the original projections.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .act import ActCarry
from .configuration_se_rrm_puzzle import NEVER, SPECIAL_SYMBOLS, SeRrmPuzzleConfig
from .modeling_puzzle import EquilibriumReasoner, PuzzleSolvingHead
from .puzzle_layers import (
    MIXERS,
    CastedLinear,
    PoolingScores,
    PuzzleAttention,
    PuzzleBlock,
    PuzzleInputEmbedding,
    ReasoningLevel,
    linear_class,
    rms_norm,
    scaled_heads,
)
from .settings_puzzle import SolveSettings
from .solving_puzzle import PuzzleSolution, StopCheck


MAX_SCORE = 8.0  # bounds the scores of softmax pooling


class SymbolInputEmbedding(PuzzleInputEmbedding):
    """Embeds the board and the puzzle row as the input x [B, V, T, D] to every pass."""

    def __init__(self, config: SeRrmPuzzleConfig):
        super().__init__(config)
        if config.add_tokens:
            self.extra = nn.Embedding(config.symbol_kinds * config.add_tokens, config.hidden_size)

    def make_tables(self, config: SeRrmPuzzleConfig) -> None:
        self.tokens = nn.Embedding(config.symbol_kinds, config.hidden_size)
        if config.pos_encodings == "learned":
            self.positions = nn.Embedding(config.seq_len, config.hidden_size)

    def coordinates(self) -> list[torch.Tensor]:
        return [F.pad(part, (0, self.config.add_tokens)) for part in super().coordinates()]

    def forward(self, input_ids, puzzle_rows, dtype):
        config = self.config
        self.validate_length(input_ids)
        V, D = config.state_symbols, config.hidden_size
        kind = torch.arange(V, device=input_ids.device)
        if V == 1:
            x = math.sqrt(D) * self.tokens(input_ids).to(dtype).unsqueeze(1)
        elif config.special_symbols:
            if config.equivariant_symbols:
                kind = kind.clamp(max=SPECIAL_SYMBOLS)
            given = F.one_hot(input_ids.long(), V).transpose(1, 2).unsqueeze(-1).to(dtype)  # [B, V, S, 1]
            x = math.sqrt(V) * given * self.tokens(kind).to(dtype).unsqueeze(1)
        else:
            ids = input_ids.unsqueeze(1)
            given = (ids == kind.unsqueeze(1) + SPECIAL_SYMBOLS).long() + (ids >= SPECIAL_SYMBOLS)  # [B, V, S], 0 to 2
            x = math.sqrt(D) * self.tokens(given).to(dtype)
        if config.pos_encodings == "learned":
            x = x + self.positions(torch.arange(config.seq_len, device=input_ids.device)).to(dtype)
        if puzzle_rows is not None:
            rows = puzzle_rows.to(dtype)
            x = x + rows[:, None, None, :D] + rows[:, D:, None, None]
        if config.add_tokens:
            places = torch.arange(config.add_tokens, device=input_ids.device)
            extra = self.extra(kind.unsqueeze(1) * config.add_tokens + places).to(dtype)  # [V, add_tokens, D]
            x = torch.cat((x, extra.expand(x.shape[0], -1, -1, -1)), dim=2)
        return x, self.rotary()


class SymbolBlock(PuzzleBlock):
    """Post-norm block over [B, V, T, D]: attention over positions, attention over symbols, and SwiGLU."""

    def mix_positions(self, config, layer_idx):
        self.self_attn = PuzzleAttention(config, layer_idx)
        self.symbol_attn = PuzzleAttention(config, layer_idx, config.symbol_num_heads, config.symbol_head_dim)

    def forward(self, hidden_states, rotary, num_queries=None):
        V, T = hidden_states.shape[1:3]
        attended = self.self_attn(hidden_states.flatten(0, 1), rotary).unflatten(0, (-1, V))
        hidden_states = rms_norm(hidden_states + attended, self.eps)
        by_position = hidden_states.transpose(1, 2)
        attended = self.symbol_attn(by_position.flatten(0, 1), None).unflatten(0, (-1, T))
        return self.transition(rms_norm(by_position + attended, self.eps).transpose(1, 2))

    def transition(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the block's SwiGLU and the following norm to [B, V, T, D]."""
        flat = hidden_states.flatten(0, 1)  # bitsandbytes' 8-bit matmul supports at most 3 axes
        return rms_norm(hidden_states + self.mlp(flat).unflatten(0, hidden_states.shape[:2]), self.eps)


class SymbolMeanBlock(SymbolBlock):
    """Post-norm block over [B, V, S, D]: a cheap position mixer, the mean over symbols, and SwiGLU."""

    def mix_positions(self, config, layer_idx):
        self.positions = MIXERS[config.mixing](config)
        self.symbols = linear_class(config)(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, rotary, num_queries=None):
        V = hidden_states.shape[1]
        of_symbols = self.symbols(hidden_states.mean(1)).unsqueeze(1)
        of_positions = self.positions(hidden_states.flatten(0, 1)).unflatten(0, (-1, V))
        return self.transition(rms_norm(hidden_states + of_positions + of_symbols, self.eps))


class SymbolPoolingBlock(SymbolMeanBlock):
    """`SymbolMeanBlock` with softmax pooling: weighted means over units and symbols.

    Each head of D / heads channels has its own scores. A weight is the exp of a score in (-8, 8), divided by the sum
    over the unit.
    """

    def mix_positions(self, config, layer_idx):
        super().mix_positions(config, layer_idx)
        self.num_heads = config.num_attention_heads
        self.kinds = len(self.positions.counts) + 1  # number of kinds of units, plus one for symbols
        self.scores = PoolingScores(config.hidden_size, self.kinds * self.num_heads)
        V = config.state_symbols
        self.sharpness = max(1.0, math.log(V) / math.log(config.pooling_size or V)) if V > 1 else 1.0

    def forward(self, hidden_states, rotary, num_queries=None):
        V = hidden_states.shape[1]
        scores = self.scores(hidden_states).unflatten(-1, (self.kinds, self.num_heads))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = (MAX_SCORE * torch.tanh(scores * self.sharpness / MAX_SCORE)).exp()  # [B, V, S, kinds, heads]
        of_units = self.positions(hidden_states.flatten(0, 1), weights[..., :-1, :].flatten(0, 1)).unflatten(
            0, (-1, V)
        )
        share = weights[..., -1, :] / weights[..., -1, :].sum(1, keepdim=True)
        of_symbols = self.symbols(scaled_heads(hidden_states, share).sum(1)).unsqueeze(1)
        return self.transition(rms_norm(hidden_states + of_units + of_symbols, self.eps))


class SeRrmPuzzleModel(EquilibriumReasoner):
    """SE-RRM without a head. Each forward pass runs one ACT step, with gradients only in the last cycle."""

    config: SeRrmPuzzleConfig
    embedding_class = SymbolInputEmbedding

    def __init__(self, config: SeRrmPuzzleConfig):
        super().__init__(config)
        if not config.two_states:
            self.L_init = None
        mean_block = SymbolPoolingBlock if config.pooling == "softmax" else SymbolMeanBlock
        block = SymbolBlock if config.mixing == "attention" else mean_block
        self.L_level = ReasoningLevel(config, config.L_layers, block)
        self.post_init()

    def initial_states(self, x):
        if self.config.two_states:
            return super().initial_states(x)
        return self.H_init.to(x).expand_as(x), x.new_empty((x.shape[0], 0))

    def cycle(self, x, rotary, z_H, z_L, num_queries=None):
        if self.config.two_states:  # num_queries would slice the symbols instead of the positions
            return super().cycle(x, rotary, z_H, z_L)
        for _ in range(self.config.L_cycles):
            z_H = self.L_level(z_H, x, rotary)
        return z_H, z_L


def canonical_symbols(input_ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Renumber each board's symbols [B, S], except special symbols, in order of first occurrence.

    Symbols that do not occur come last.

    Returns:
        The new id of every symbol, and the symbol of every new id, int64 [B, vocab_size] each.
    """
    symbols = torch.arange(vocab_size, device=input_ids.device)
    here = F.pad(input_ids.unsqueeze(1) == symbols.unsqueeze(1), (0, 1), value=True)  # [B, V, S + 1]
    first = here.to(torch.uint8).argmax(-1)
    first[:, :SPECIAL_SYMBOLS] = -1
    to_old = first.argsort(dim=1, stable=True)
    return to_old.argsort(dim=1), to_old


class SeRrmPuzzleForSolving(PuzzleSolvingHead):
    """SE-RRM with a token head. See `PuzzleSolvingHead` for the ACT step and `solve`."""

    config: SeRrmPuzzleConfig
    reasoner_class = SeRrmPuzzleModel
    has_continue_value = False
    _keep_in_fp32_modules = None  # this model has no q_head
    learns_to_halt = False

    def make_heads(self, config: SeRrmPuzzleConfig) -> None:
        V, D = config.state_symbols, config.hidden_size
        sizes = (D, 1) if config.equivariant_symbols else (V * D, config.vocab_size)
        self.lm_head = CastedLinear(*sizes, bias=False)

    def for_board(
        self, grid_shape: Sequence[int], box_shape: Sequence[int] | None, vocab_size: int
    ) -> "SeRrmPuzzleForSolving":
        """Return a model that shares this model's weights but solves boards of another size.

        Raises:
            ValueError: a weight depends on the size of the board or on the number of symbols.
        """
        if not self.config.solves_any_size:
            raise ValueError(
                f"grid_shape={list(grid_shape)}: this model's weights fit only {self.config.grid_shape}; other "
                "sizes need mixing='attention', 'units' or 'neighbours', equivariant_symbols=True, no puzzle table, "
                "and no learned positions"
            )
        fields = self.config.to_dict() | {"grid_shape": list(grid_shape), "vocab_size": vocab_size}
        fields |= {"sure_confidence": None}  # the threshold was calibrated only for this model's board size
        fields |= {"seq_len": math.prod(grid_shape), "box_shape": None if box_shape is None else list(box_shape)}
        model = type(self)(type(self.config).from_dict(fields)).to(self.device)
        model.load_state_dict(self.state_dict(), assign=True)
        return model.train(self.training)

    def read_out(self, z_H: torch.Tensor) -> torch.Tensor:
        # For tensors that are not contiguous, torch rounds the output of lm_head differently if its weight is frozen.
        z_H = z_H[:, :, : self.config.seq_len].contiguous()
        if self.config.equivariant_symbols:
            logits = self.lm_head(z_H).squeeze(-1).transpose(1, 2)
            specials = self.config.vocab_size - self.config.state_symbols
            return F.pad(logits, (specials, 0), value=NEVER) if specials else logits
        return self.lm_head(z_H.transpose(1, 2).flatten(2))

    def q_values(self, z_H: torch.Tensor, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q_halt (logit of the least confident cell's confidence) and q_continue (0), float32 [B]."""
        with torch.no_grad():
            logits = self.read_out(z_H) if logits is None else logits
            least = logits.float().softmax(-1).amax(-1).amin(-1)
            q_halt = torch.logit(least, eps=torch.finfo(torch.float32).eps)
        return q_halt, torch.zeros_like(q_halt)

    def run(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None,
        settings: SolveSettings,
        until: StopCheck | None = None,
        return_trajectory: bool = False,
    ) -> PuzzleSolution:
        """Renumber each board's symbols by first occurrence, then solve as `PuzzleSolverMixin.run` does.

        Boards that differ only by a permutation of symbols therefore become the same tensor, and their answers and
        logits differ by exactly that permutation. Models with a puzzle table distinguish symbols, so their boards stay
        unchanged.
        """
        if not self.config.equivariant_symbols or self.model.puzzle_emb is not None:
            return super().run(input_ids, puzzle_identifiers, settings, until, return_trajectory)
        to_new, to_old = canonical_symbols(input_ids, self.config.vocab_size)
        stop_check = None if until is None else lambda rows, answers: until(rows, to_old[rows].gather(1, answers))
        boards = to_new.gather(1, input_ids.long())
        solution = super().run(boards, puzzle_identifiers, settings, stop_check, return_trajectory)
        solution.predictions = to_old.gather(1, solution.predictions)
        solution.logits = solution.logits.gather(2, to_new.unsqueeze(1).expand_as(solution.logits))
        if solution.trajectory is not None:
            solution.trajectory = to_old.expand(len(solution.trajectory), -1, -1).gather(2, solution.trajectory)
        return solution

    def sample_min_steps(self, carry: ActCarry) -> torch.Tensor:
        """Draw minimum numbers of steps, int32 [B]: 0 with probability `halt_exploration_prob`, else the maximum."""
        goes_on = torch.rand(carry.steps.shape, device=carry.steps.device) >= self.config.halt_exploration_prob
        return goes_on * torch.full_like(carry.steps, self.config.halt_max_steps)


__all__ = ["SeRrmPuzzleForSolving", "SeRrmPuzzleModel"]
