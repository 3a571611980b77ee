"""Configuration of the symbol-equivariant recurrent reasoner, as differences from HRM's."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import COUNT, PROBABILITY, bounded, whole
from .configuration_hrm_puzzle import EquilibriumConfig


SPECIAL_SYMBOLS = 2  # padding and empty, which are not to be exchanged with others
NEVER = -1e4  # logit of a symbol that no answer holds; finite in float16
SUDOKU_UNITS = {
    "mixing": "units", "grid_shape": [9, 9], "box_shape": [3, 3], "special_symbols": False, "two_states": True,
    "L_cycles": 2, "H_cycles": 2, "add_tokens": 0, "pos_encodings": "none", "loss_type": "softmax",
    "halt_max_steps": 8, "halt_exploration_prob": 0.0,
}  # fmt: skip


@strict
class SeRrmPuzzleConfig(EquilibriumConfig):
    r"""Configuration of SE-RRM, the symbol-equivariant recurrent reasoning model (arXiv 2603.02193).

    The state has an axis of symbols. All symbols but the first two (padding, empty) are treated alike, so that with
    rotary positions and without a puzzle table no weight depends on `vocab_size` and `seq_len`: a model of 9x9 boards
    loads for 4x4 or 16x16 (`from_pretrained(..., vocab_size=18, seq_len=256, grid_shape=[16, 16])`).

    Fields of `HrmPuzzleConfig`, with other defaults, those of `EquilibriumConfig` (with `two_states` only), and:

    Args:
        symbol_num_heads, symbol_head_dim (`int`, defaults to 2 and 64): heads of the attention over symbols.
        add_tokens (`int`, defaults to 4): extra positions behind the board, which do not turn.
        attention_dropout (`float`, defaults to 0.0): of both attentions, in training.
        equivariant_symbols (`bool`, defaults to True): False gives every symbol a vector of its own, and the head all
            symbols; with a `mixing` by means the state then has no axis of symbols (V is 1).
        halt_confidence (`float`, defaults to 0.9): `solve` with halt="q" takes an answer when every cell has a symbol
            of at least this probability; no halting is learned.
        puzzle_emb_ndim (`int`, defaults to 0): 0, or hidden_size + vocab_size: a row of the puzzle table is a vector
            for all symbols and a number for each.

        special_symbols (`bool`, defaults to True): False leaves padding and empty out of the state, for tasks whose
            answers hold neither: V is then vocab_size - 2, and the logits of both are `NEVER`.
        mixing (`str`, defaults to "attention"): what exchanges information. "attention": as published, over positions
            and over symbols. All others mix symbols by a linear map of their mean, and positions thus: "mlp_t" by a
            SwiGLU over the position axis, as TRM, which knows no rule; "units" by means over the rows, columns and
            boxes of the board (`grid_shape`, `box_shape`), a linear map for each; "neighbours" by the cells above,
            below, left and right (`grid_shape`), a linear map for each. These are ours: no published code has them.
        two_states (`bool`, defaults to False): z_H and z_L, updated as in TRM: L_cycles times z_L, then z_H once.
        intermediate_size, position_intermediate_size (`int`, *optional*): widths of the SwiGLUs over channels and over
            positions ("mlp_t"); by default what `expansion` gives.

    There is one network (`L_level`, `L_layers` blocks). With one state, L_cycles * H_cycles passes update it;
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
    two_states: bool = False
    intermediate_size: int | None = bounded(None, COUNT)
    position_intermediate_size: int | None = bounded(None, COUNT)

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "se-rrm-2m": {"attention_dropout": 0.2, "halt_exploration_prob": 0.05},
        "se-rrm-small": {"hidden_size": 64, "num_attention_heads": 2, "symbol_num_heads": 1, "symbol_head_dim": 32},
        "symbol-units-small": {**SUDOKU_UNITS, "hidden_size": 32, "intermediate_size": 64},
        "symbol-units": {**SUDOKU_UNITS, "hidden_size": 64, "intermediate_size": 128},
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
        """No slots: the puzzle's row is added to every position."""
        return 0

    @property
    def max_position_embeddings(self) -> int:
        """Latent positions T = S + add_tokens."""
        return self.seq_len + self.add_tokens

    @property
    def state_symbols(self) -> int:
        """Symbols V of the state."""
        if self.mixing != "attention" and not self.equivariant_symbols:
            return 1
        return self.vocab_size - (0 if self.special_symbols else SPECIAL_SYMBOLS)

    def state_shapes(self, batch_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of z_H and z_L, [B, V, T, D]; z_L is empty where there is one state."""
        shape = (batch_size, self.state_symbols, self.max_position_embeddings, self.hidden_size)
        return shape, shape if self.two_states else (batch_size, 0)

    @property
    def symbol_kinds(self) -> int:
        """Rows of the token table: padding, empty and all others (or empty, other, this is given); or every symbol."""
        return min(SPECIAL_SYMBOLS + 1, self.vocab_size) if self.equivariant_symbols else self.vocab_size

    def validate_puzzle_row(self):
        if self.puzzle_emb_ndim not in (0, self.hidden_size + self.state_symbols):
            width = f"hidden_size + symbols of the state = {self.hidden_size + self.state_symbols}"
            raise ValueError(f"puzzle_emb_ndim={self.puzzle_emb_ndim} is neither 0 nor {width}")

    def validate_mixing(self):
        """Part of `@strict` validation: what each mixer needs."""
        self._validate_choice("mixing", ("attention", "mlp_t", "units", "neighbours"))
        if self.mixing != "attention" and (self.add_tokens or self.rotary_parts):
            given = f"add_tokens={self.add_tokens}, pos_encodings={self.pos_encodings!r}"
            raise ValueError(f"mixing={self.mixing!r}: {given}: must be 0 and 'none' or 'learned'")
        if self.mixing in ("units", "neighbours") and self.grid_shape is None:
            raise ValueError(f"mixing={self.mixing!r} needs grid_shape, the rows and columns of the board")
        if self.mixing == "units" and (
            self.box_shape is None or any(n % box for n, box in zip(self.grid_shape, self.box_shape))
        ):
            raise ValueError(
                f"mixing='units' needs a box_shape that divides grid_shape={self.grid_shape}; it is {self.box_shape}"
            )
        if not self.special_symbols and not (self.equivariant_symbols and self.state_symbols > 0):
            given = f"equivariant_symbols={self.equivariant_symbols}, vocab_size={self.vocab_size}"
            raise ValueError(f"special_symbols=False: {given}: must be True and above {SPECIAL_SYMBOLS}")

    def validate_states(self):
        """Part of `@strict` validation: what one state does not have."""
        plain = {"update_rate": 1, "noise_scale": 0, "random_initial_states": False, "H_init_std": 1, "L_init_std": 1}
        given = [f"{name}={getattr(self, name)}" for name, value in plain.items() if getattr(self, name) != value]
        if given and not self.two_states:
            raise ValueError(f"{', '.join(given)}: fields of EqR are for models of two states; set two_states=True")


__all__ = ["SeRrmPuzzleConfig"]
