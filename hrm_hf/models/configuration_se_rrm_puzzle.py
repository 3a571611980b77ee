"""Configuration of the symbol-equivariant recurrent reasoner. It extends HRM's configuration."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import COUNT, PROBABILITY, bounded, whole
from .configuration_hrm_puzzle import EquilibriumConfig


SPECIAL_SYMBOLS = 2  # the symbols for padding and empty cells, which permutations leave in place
NEVER = -1e4  # logit of a symbol that never occurs in answers; finite in float16
SUDOKU_UNITS = {
    "mixing": "units", "grid_shape": [9, 9], "box_shape": [3, 3], "special_symbols": False, "two_states": True,
    "L_cycles": 2, "H_cycles": 2, "add_tokens": 0, "pos_encodings": "none", "loss_type": "softmax",
    "halt_max_steps": 8, "halt_exploration_prob": 0.0,
}  # fmt: skip


@strict
class SeRrmPuzzleConfig(EquilibriumConfig):
    r"""Configuration of SE-RRM, the symbol-equivariant recurrent reasoning model (arXiv 2603.02193).

    The state has a symbol axis. All symbols except the first two (padding, empty) have the same weights. With rotary
    positions and no puzzle table, no weight depends on `vocab_size` or `seq_len`, so a model for 9x9 boards also loads
    for 4x4 or 16x16 (`from_pretrained(..., vocab_size=18, seq_len=256, grid_shape=[16, 16])`).

    It has the fields of `HrmPuzzleConfig` with different defaults, those of `EquilibriumConfig` (only for
    `two_states`), and:

    Args:
        symbol_num_heads, symbol_head_dim (`int`, defaults to 2 and 64): heads of the attention over symbols.
        add_tokens (`int`, defaults to 4): extra positions after the board, without rotary rotation.
        attention_dropout (`float`, defaults to 0.0): dropout of both attentions in training.
        equivariant_symbols (`bool`, defaults to True): False gives every symbol its own vector, and the head reads all
            symbols; with a `mixing` other than "attention" the state then has no symbol axis (V is 1).
        halt_confidence (`float`, defaults to 0.9): `solve` with halt="q" halts when every cell has a symbol with at
            least this probability; halting is not learned.
        puzzle_emb_ndim (`int`, defaults to 0): 0, or hidden_size + V: a row of the puzzle table holds one vector for
            all symbols and one number for each symbol.

        special_symbols (`bool`, defaults to True): False omits padding and empty from the state, for tasks in which
            answers never contain them. V is then vocab_size - 2, and both logits are `NEVER`.
        mixing (`str`, defaults to "attention"): how information is mixed. "attention" attends over positions and over
            symbols, as published. All others mix symbols by a linear map of their mean, and positions as follows.
            "mlp_t": a SwiGLU over the position axis as in TRM, without knowledge of the rules. "units": linear maps
            of the means over the rows, columns and boxes of the board (`grid_shape`, `box_shape`), or over `units`.
            "neighbours": linear maps of the cells above, below, left and right (`grid_shape`). "lines": SwiGLUs over
            all states of a row, and of a column (`grid_shape`). These variants are ours.
        pooling (`str`, defaults to "mean"): with "softmax" (only for "units"), the means over units and symbols are
            weighted by scores of the cells. Each of the `num_attention_heads` parts of a state has its own scores.
        pooling_size (`int`, *optional*): most symbols of a board in training. With more symbols V, the scores of
            softmax pooling are multiplied by log(V) / log(pooling_size), because larger units dilute the weights.
        two_states (`bool`, defaults to False): use z_H and z_L, updated as in TRM: z_L L_cycles times, then z_H once.
        intermediate_size, position_intermediate_size (`int`, *optional*): widths of the SwiGLUs over channels and over
            positions ("mlp_t", "lines"); by default given by `expansion`.

    There is one network (`L_level` with `L_layers` blocks). With one state, L_cycles * H_cycles passes update it;
    `H_layers` is not used.
    """

    model_type = "se_rrm_puzzle"

    hidden_size: int = bounded(256, COUNT)
    num_attention_heads: int = bounded(4, COUNT)
    H_layers: int = bounded(0, whole(0, 10_000))
    L_layers: int = bounded(2, COUNT)
    H_cycles: int = bounded(3, COUNT)
    L_cycles: int = bounded(6, COUNT)
    puzzle_emb_ndim: int = bounded(0, whole(0, 2**27))
    pos_encodings: str = "rope2d"
    grid_shape: list[int] | None = bounded([9, 9], whole(1, 2**30, lists=(2, 2)))
    symbol_num_heads: int = bounded(2, COUNT)
    symbol_head_dim: int = bounded(64, COUNT)
    add_tokens: int = bounded(4, whole(0, 2**20))
    attention_dropout: float | int = bounded(0.0, PROBABILITY)
    halt_confidence: float | int = bounded(0.9, PROBABILITY)
    equivariant_symbols: bool = True
    special_symbols: bool = True
    mixing: str = "attention"
    pooling: str = "mean"
    pooling_size: int | None = bounded(None, whole(2, 2**30))
    two_states: bool = False
    intermediate_size: int | None = bounded(None, COUNT)
    position_intermediate_size: int | None = bounded(None, COUNT)

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "se-rrm-2m": {"attention_dropout": 0.2, "halt_exploration_prob": 0.05},
        "se-rrm-small": {"hidden_size": 64, "num_attention_heads": 2, "symbol_num_heads": 1, "symbol_head_dim": 32},
        "symbol-units-small": {**SUDOKU_UNITS, "hidden_size": 32, "intermediate_size": 64},
        "symbol-units": {**SUDOKU_UNITS, "hidden_size": 64, "intermediate_size": 128},
        "symbol-pooling": {**SUDOKU_UNITS, "pooling": "softmax", "hidden_size": 64, "intermediate_size": 128},
        "symbol-mlp": {
            **SUDOKU_UNITS, "mixing": "mlp_t", "hidden_size": 24, "intermediate_size": 64,
            "position_intermediate_size": 108,
        },
        "symbol-maze": {
            **SUDOKU_UNITS, "mixing": "neighbours", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 6,
            "seq_len": 225, "grid_shape": [15, 15], "box_shape": None, "special_symbols": True,
            "equivariant_symbols": False,
        },
    }  # fmt: skip

    @property
    def prefix_len(self) -> int:
        """Number of prefix slots. It is 0, because the puzzle's table row is added to every position."""
        return 0

    @property
    def max_position_embeddings(self) -> int:
        """Number of latent positions, T = S + add_tokens."""
        return self.seq_len + self.add_tokens

    @property
    def state_symbols(self) -> int:
        """Number V of symbols in the state."""
        if self.mixing != "attention" and not self.equivariant_symbols:
            return 1
        return self.vocab_size - (0 if self.special_symbols else SPECIAL_SYMBOLS)

    @property
    def solves_any_size(self) -> bool:
        fixed = self.mixing in ("mlp_t", "lines") or self.pos_encodings == "learned"
        return self.equivariant_symbols and not (fixed or self.puzzle_emb_ndim or self.units)

    def state_shapes(self, batch_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of z_H and z_L, [B, V, T, D]. In models with one state, z_L is empty."""
        shape = (batch_size, self.state_symbols, self.max_position_embeddings, self.hidden_size)
        return shape, shape if self.two_states else (batch_size, 0)

    @property
    def symbol_kinds(self) -> int:
        """Number of rows in the token table: one per symbol or, with equivariance, one per kind of token.

        The kinds are padding, empty and other symbols. Without special symbols, they describe a cell for a given
        symbol: the cell is empty, holds a different symbol, or holds this one.
        """
        return min(SPECIAL_SYMBOLS + 1, self.vocab_size) if self.equivariant_symbols else self.vocab_size

    def validate_puzzle_row(self):
        if self.puzzle_emb_ndim not in (0, self.hidden_size + self.state_symbols):
            width = f"hidden_size + symbols of the state = {self.hidden_size + self.state_symbols}"
            raise ValueError(f"puzzle_emb_ndim={self.puzzle_emb_ndim}: must be 0 or {width}")

    def validate_mixing(self):
        """Check that the config meets the requirements of its mixer. `@strict` calls this method."""
        self._validate_choice("mixing", ("attention", "mlp_t", "units", "neighbours", "lines"))
        self._validate_choice("pooling", ("mean", "softmax"))
        if self.pooling == "softmax" and self.mixing != "units":
            raise ValueError(f"pooling='softmax', mixing={self.mixing!r}: softmax pooling needs mixing='units'")
        if self.mixing != "attention" and (self.add_tokens or self.rotary_parts):
            given = f"add_tokens={self.add_tokens}, pos_encodings={self.pos_encodings!r}"
            raise ValueError(
                f"mixing={self.mixing!r}, {given}: needs add_tokens=0 and pos_encodings='none' or 'learned'"
            )
        by_units = self.mixing == "units" and self.units is None
        if (by_units or self.mixing in ("neighbours", "lines")) and self.grid_shape is None:
            raise ValueError(f"mixing={self.mixing!r}: set grid_shape to the rows and columns of the board")
        if by_units and (self.box_shape is None or any(n % box for n, box in zip(self.grid_shape, self.box_shape))):
            raise ValueError(
                f"mixing='units', box_shape={self.box_shape}: box_shape must divide grid_shape={self.grid_shape}"
            )
        if not self.special_symbols and not (self.equivariant_symbols and self.state_symbols > 0):
            given = f"equivariant_symbols={self.equivariant_symbols}, vocab_size={self.vocab_size}"
            raise ValueError(
                f"special_symbols=False, {given}: needs equivariant_symbols=True and vocab_size > {SPECIAL_SYMBOLS}"
            )

    def validate_states(self):
        """Reject EqR fields if there is only one state. `@strict` calls this method."""
        plain = {"update_rate": 1, "noise_scale": 0, "random_initial_states": False, "H_init_std": 1, "L_init_std": 1}
        given = [f"{name}={getattr(self, name)}" for name, value in plain.items() if getattr(self, name) != value]
        if given and not self.two_states:
            raise ValueError(f"{', '.join(given)}: EqR fields need two states; set two_states=True")


__all__ = ["SeRrmPuzzleConfig"]
