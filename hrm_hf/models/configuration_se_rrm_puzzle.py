"""Configuration of the symbol-equivariant recurrent reasoner, as differences from HRM's."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import CYCLES, HEADS, LAYERS, PROBABILITY, WIDTH, block_parameters, bounded, whole
from .configuration_hrm_puzzle import HrmPuzzleConfig


SPECIAL_SYMBOLS = 2  # padding and empty, which are not to be exchanged with others


@strict
class SeRrmPuzzleConfig(HrmPuzzleConfig):
    r"""Configuration of SE-RRM, the symbol-equivariant recurrent reasoning model (arXiv 2603.02193).

    The state has an axis of symbols. All symbols but the first two (padding, empty) are treated alike, so that with
    rotary positions and without a puzzle table no weight depends on `vocab_size` and `seq_len`: a model of 9x9 boards
    loads for 4x4 or 16x16 (`from_pretrained(..., vocab_size=18, seq_len=256, grid_shape=[16, 16])`).

    Fields of `HrmPuzzleConfig`, with other defaults, and:

    Args:
        symbol_num_heads, symbol_head_dim (`int`, defaults to 2 and 64): heads of the attention over symbols.
        add_tokens (`int`, defaults to 4): extra positions behind the board, which do not turn.
        attention_dropout (`float`, defaults to 0.0): of both attentions, in training.
        equivariant_symbols (`bool`, defaults to True): False gives every symbol a vector of its own, and the head all
            symbols.
        puzzle_emb_ndim (`int`, defaults to 0): 0, or hidden_size + vocab_size: a row of the puzzle table is a vector
            for all symbols and a number for each.

    There is one network (`L_level`, `L_layers` blocks) and one state, which L_cycles * H_cycles passes update;
    `H_layers` is not used.
    """

    model_type = "se_rrm_puzzle"

    hidden_size: int = bounded(256, WIDTH)
    num_attention_heads: int = bounded(4, HEADS)
    H_layers: int = bounded(0, whole(0, 10_000))
    L_layers: int = bounded(2, LAYERS)
    H_cycles: int = bounded(3, CYCLES)
    L_cycles: int = bounded(6, CYCLES)
    puzzle_emb_ndim: int = bounded(0, whole(0, 2**27))
    pos_encodings: str = "rope2d"
    grid_shape: list[int] | None = bounded([9, 9], whole(1, 2**30, lists=(2, 2)))
    symbol_num_heads: int = bounded(2, HEADS)
    symbol_head_dim: int = bounded(64, WIDTH)
    add_tokens: int = bounded(4, whole(0, 2**20))
    attention_dropout: float | int = bounded(0.0, PROBABILITY)
    equivariant_symbols: bool = True

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "se-rrm-2m": {"attention_dropout": 0.2, "halt_exploration_prob": 0.05},
        "se-rrm-small": {"hidden_size": 64, "num_attention_heads": 2, "symbol_num_heads": 1, "symbol_head_dim": 32},
    }

    @property
    def prefix_len(self) -> int:
        """None: the puzzle's row is added to every position."""
        return 0

    @property
    def max_position_embeddings(self) -> int:
        """Latent positions T = S + add_tokens."""
        return self.seq_len + self.add_tokens

    def state_shapes(self, batch_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of z_H, [B, V, T, D], and of z_L, which is empty: there is one state."""
        return (batch_size, self.vocab_size, self.max_position_embeddings, self.hidden_size), (batch_size, 0)

    @property
    def symbol_kinds(self) -> int:
        """Symbols with a vector of their own: padding, empty and all others, or every symbol."""
        return min(SPECIAL_SYMBOLS + 1, self.vocab_size) if self.equivariant_symbols else self.vocab_size

    def validate_puzzle_row(self):
        if self.puzzle_emb_ndim not in (0, self.hidden_size + self.vocab_size):
            raise ValueError(
                f"puzzle_emb_ndim={self.puzzle_emb_ndim} is neither 0 nor hidden_size + vocab_size = "
                f"{self.hidden_size + self.vocab_size}, a vector for all symbols and a number for each"
            )

    def parameter_estimate(self) -> int:
        inner = -(-round(self.expansion * self.hidden_size * 2 / 3) // 256) * 256
        block = block_parameters(self.hidden_size, inner, *(self.num_attention_heads,) * 2, self.head_dim)
        block += 4 * self.hidden_size * self.symbol_num_heads * self.symbol_head_dim
        positions = self.seq_len if self.pos_encodings == "learned" else 0
        vectors = self.symbol_kinds * (1 + self.add_tokens) + positions
        head = self.hidden_size * (1 if self.equivariant_symbols else self.vocab_size**2)
        table = self.num_puzzle_identifiers * self.puzzle_emb_ndim
        return self.L_layers * block + vectors * self.hidden_size + head + table

    def layer_visits(self) -> int:
        return self.halt_max_steps * self.H_cycles * self.L_cycles * self.L_layers


__all__ = ["SeRrmPuzzleConfig"]
