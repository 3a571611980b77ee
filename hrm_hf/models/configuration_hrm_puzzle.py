"""HRM's config, from which all puzzle configs inherit, and a base class with the fields of EqR."""

import re
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .bounds import COUNT, PROBABILITY, SOME, BoundedFields, bounded, number, whole
from .modeling_utils import PresetsMixin


RESERVED_KINDS = ("units", "names", "counts", "members", "training", "forward")  # of `config.units`
SMALL = {"H_layers": 1, "L_layers": 1, "num_attention_heads": 1, "expansion": 2}


@strict
class HrmPuzzleConfig(PresetsMixin, BoundedFields, PreTrainedConfig):
    r"""Configuration of the Hierarchical Reasoning Model, ACT-v1 (Wang et al. 2025, arXiv 2506.21734).

    Args:
        vocab_size (`int`, defaults to 11): number of token ids, including padding (0).
        seq_len (`int`, defaults to 81): positions S of a puzzle.
        hidden_size (`int`, defaults to 512): width D of the latent states.
        num_attention_heads (`int`, defaults to 8): attention heads; D / heads must be even for rotary positions.
        H_layers, L_layers (`int`, defaults to 4): blocks of the high- and of the low-level module.
        H_cycles, L_cycles (`int`, defaults to 2): high-level cycles per ACT step, low-level steps per cycle.
        expansion (`float`, defaults to 4.0): the SwiGLU width is round(expansion * D * 2 / 3), rounded up to a
            multiple of 256.
        puzzle_emb_ndim (`int`, defaults to 512): width of a puzzle's embedding row; 0 for no puzzle table.
        puzzle_emb_len (`int`, defaults to 0): prefix slots P; 0 means ceil(puzzle_emb_ndim / D).
        num_puzzle_identifiers (`int`, defaults to 1): rows of the puzzle table.
        pos_encodings (`str`, defaults to "rope"): "rope", "rope2d", "learned" or "none". "rope2d" rotates the first
            half of a head by the row of a cell and the second by its column (`grid_shape`), but not the prefix slots.
        rope_parameters (`dict`): as in transformers; defaults to the standard rotary embedding with base 10000.
        rms_norm_eps (`float`, defaults to 1e-5): epsilon of the gain-free RMS norms.
        halt_max_steps (`int`, defaults to 16): maximum ACT steps per example in training.
        halt_exploration_prob (`float`, defaults to 0.1): probability that a step draws a random minimum of ACT steps.
        loss_type (`str`, defaults to "stablemax"): "stablemax" or "softmax".
        forward_dtype (`str`, *optional*): dtype of activations and matrix products, to which weights are cast on use;
            None for the dtype of the weights. The original code trains with "bfloat16".
        task (`str`, defaults to "generic"): name of a task; decides how answers are decoded and checked.
        symbols (`list[str]`, *optional*): text of each token, from token 0, padding; None for tasks that know it.
        grid_shape, box_shape (`list[int]`, *optional*): rows and columns of the board and of a Sudoku box.
        units (`dict[str, list[list[int]]]`, *optional*): cells of each unit by kind, for models that mix by units;
            None for kinds "row", "column" and "box". Weights belong to a kind, so models can be trained further with
            more kinds.
        sure_confidence (`float`, *optional*): confidence from which `solve` calls an answer sure, calibrated on
            held-out puzzles (`hrm-hf eval puzzles` computes it); None if it was not calibrated.
    """

    model_type = "hrm_puzzle"
    # Trainer drops these output fields, so its predictions are (logits, q_halt_logits) of one ACT step.
    keys_to_ignore_at_inference = [
        "lm_loss", "q_halt_loss", "q_continue_loss", "q_continue_logits", "target_q_continue", "carry", "metrics",
        "hidden_states",
    ]  # fmt: skip
    attribute_map = {"num_heads": "num_attention_heads"}

    chunk_size_feed_forward: int = bounded(0, SOME)  # inherited from transformers, redeclared with a bound
    vocab_size: int = bounded(11, COUNT)
    seq_len: int = bounded(81, COUNT)
    hidden_size: int = bounded(512, COUNT)
    num_attention_heads: int = bounded(8, COUNT)
    H_layers: int = bounded(4, COUNT)
    L_layers: int = bounded(4, COUNT)
    H_cycles: int = bounded(2, COUNT)
    L_cycles: int = bounded(2, COUNT)
    expansion: float | int = bounded(4.0, number(1e-6, 1e4))
    puzzle_emb_ndim: int = bounded(512, whole(0, 2**27))
    puzzle_emb_len: int = bounded(0, whole(0, 2**20))
    num_puzzle_identifiers: int = bounded(1, whole(0, 2**31))
    pos_encodings: str = "rope"
    rope_parameters: dict | None = None
    rms_norm_eps: float = bounded(1e-5, PROBABILITY)
    halt_max_steps: int = bounded(16, COUNT)
    halt_exploration_prob: float | int = bounded(0.1, PROBABILITY)
    loss_type: str = "stablemax"
    forward_dtype: str | None = None
    task: str = "generic"
    symbols: list[str] | None = None
    grid_shape: list[int] | None = bounded(None, whole(1, 2**30, lists=(2, 2)))
    box_shape: list[int] | None = bounded(None, whole(1, 2**30, lists=(2, 2)))
    units: dict[str, list[list[int]]] | None = None
    sure_confidence: float | int | None = bounded(None, PROBABILITY)

    # Presets define only the architecture; training hyperparameters are in training/recipes.
    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "hrm-27m": {},
        "hrm-27m-sudoku-full": {
            "L_cycles": 8, "halt_max_steps": 8, "pos_encodings": "learned", "loss_type": "softmax",
        },
        "hrm-small": {**SMALL, "hidden_size": 32, "puzzle_emb_ndim": 32},
        "hrm-ultra-small": {**SMALL, "hidden_size": 16, "puzzle_emb_ndim": 16},
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise ValueError(f"hidden_size={width}: must be a multiple of num_attention_heads={heads}")
        self._validate_choice("pos_encodings", ("rope", "rope2d", "learned", "none"))
        if self.rotary_parts and self.head_dim % (2 * self.rotary_parts):
            raise ValueError(
                f"pos_encodings={self.pos_encodings!r}: hidden_size / num_attention_heads = {self.head_dim} must be a "
                f"multiple of {2 * self.rotary_parts}"
            )
        if self.pos_encodings == "rope2d" and self.grid_shape is None:
            raise ValueError("pos_encodings='rope2d': set grid_shape to the rows and columns of the board")
        self._validate_choice("loss_type", ("stablemax", "softmax"))
        self._validate_choice("forward_dtype", (None, "float32", "bfloat16", "float16"))
        for kind, units in (self.units or {}).items():
            if not re.fullmatch("[a-z]+", kind) or kind in RESERVED_KINDS:
                raise ValueError(
                    f"units: kind {kind!r} must consist of the letters a to z, and not be one of {RESERVED_KINDS}"
                )
            for cell in (cell for unit in units for cell in unit if not 0 <= cell < self.seq_len):
                raise ValueError(f"units: {kind!r} has cell {cell}; cells must be in [0, {self.seq_len - 1}]")
        if self.symbols is not None and len(self.symbols) > self.vocab_size:
            raise ValueError(f"symbols={self.symbols}: must be at most vocab_size={self.vocab_size} strings")
        self.validate_puzzle_row()
        if self.grid_shape is not None and self.grid_shape[0] * self.grid_shape[1] != self.seq_len:
            raise ValueError(f"grid_shape={self.grid_shape}: must have seq_len={self.seq_len} cells")

    def validate_puzzle_row(self):
        if self.puzzle_emb_ndim > self.prefix_len * self.hidden_size:
            room = f"{self.prefix_len} prefix slots of hidden_size={self.hidden_size}"
            raise ValueError(f"puzzle_emb_ndim={self.puzzle_emb_ndim}: must be at most the size of {room}")

    def _validate_choice(self, name: str, allowed: tuple):
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_parts(self) -> int:
        """Number of rotary coordinates per head: 1 with "rope", 2 with "rope2d", else 0."""
        return {"rope": 1, "rope2d": 2}.get(self.pos_encodings, 0)

    @property
    def prefix_len(self) -> int:
        """Number P of prefix slots. They hold the puzzle embedding and precede the tokens."""
        return self.puzzle_emb_ndim and (self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size))

    @property
    def max_position_embeddings(self) -> int:
        """Latent positions T = P + S."""
        return self.prefix_len + self.seq_len

    @property
    def halt_confidence(self) -> float:
        """Minimum sigmoid(q_halt) at which a row may halt. Solve settings can raise it but not lower it."""
        return 0.0

    @property
    def draws_random_numbers(self) -> bool:
        """Whether two runs on the same board can give different results."""
        return False

    @property
    def solves_any_size(self) -> bool:
        """Whether no weight depends on the size of the board or on the number of symbols."""
        return False

    def state_shapes(self, batch_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of z_H and z_L for B rows, [B, T, D] each."""
        shape = (batch_size, self.max_position_embeddings, self.hidden_size)
        return shape, shape

    @property
    def num_hidden_layers(self) -> int:
        return self.H_layers + self.L_layers


@strict
class EquilibriumConfig(HrmPuzzleConfig):
    r"""Fields of the Equilibrium Reasoner (EqR, arXiv 2605.21488), for models with a single level.

    With the defaults, results are bitwise identical to those without these fields.

    Args:
        update_rate (`float`, defaults to 1.0): lambda. A pass of the network f updates a state z to
            (1 - lambda) z + lambda f(z).
        noise_scale (`float`, defaults to 0.0): std of the normal noise added to a state after every pass, in training
            and in evaluation.
        random_initial_states (`bool`, defaults to False): draw the initial states of every row from a truncated
            normal, element by element; the model then stores no initial states.
        H_init_std, L_init_std (`float`, defaults to 1.0): std of the random initial states.
    """

    update_rate: float | int = bounded(1.0, number(1e-6, 1.0))
    noise_scale: float | int = bounded(0.0, number(0.0, 1e3))
    random_initial_states: bool = False
    H_init_std: float | int = bounded(1.0, number(1e-6, 1e3))
    L_init_std: float | int = bounded(1.0, number(1e-6, 1e3))

    @property
    def draws_random_numbers(self) -> bool:
        return bool(self.noise_scale) or self.random_initial_states


__all__ = ["EquilibriumConfig", "HrmPuzzleConfig"]
