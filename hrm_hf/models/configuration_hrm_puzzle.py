"""Configuration of the puzzle reasoners: what HRM and TRM share, and HRM's presets."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .presets import PresetsMixin


@strict
class HrmPuzzleConfig(PresetsMixin, PreTrainedConfig):
    r"""Configuration of the Hierarchical Reasoning Model, ACT-v1 (Wang et al. 2025, arXiv 2506.21734).

    Args:
        vocab_size (`int`, defaults to 11): token ids, padding (0) included.
        seq_len (`int`, defaults to 81): positions S of a puzzle.
        hidden_size (`int`, defaults to 512): width D of the latent states.
        num_attention_heads (`int`, defaults to 8): heads; D / heads must be even for rotary positions.
        H_layers, L_layers (`int`, defaults to 4): blocks of the high- and of the low-level module.
        H_cycles, L_cycles (`int`, defaults to 2): high-level cycles per ACT step, low-level steps per cycle.
        expansion (`float`, defaults to 4.0): SwiGLU width is round(expansion * D * 2 / 3), up to a multiple of 256.
        puzzle_emb_ndim (`int`, defaults to 512): width of a puzzle's embedding row; 0 for none.
        puzzle_emb_len (`int`, defaults to 0): prefix slots P; 0 means ceil(puzzle_emb_ndim / D).
        num_puzzle_identifiers (`int`, defaults to 1): rows of the puzzle table.
        pos_encodings (`str`, defaults to "rope"): "rope", "learned" or "none".
        rope_parameters (`dict`): as in transformers; defaults to the plain rotary embedding of base 10000.
        rms_norm_eps (`float`, defaults to 1e-5): epsilon of the gain-free RMS norms.
        halt_max_steps (`int`, defaults to 16): most ACT steps per example in training.
        halt_exploration_prob (`float`, defaults to 0.1): share of steps that draw a random minimum of ACT steps.
        loss_type (`str`, defaults to "stablemax"): "stablemax" or "softmax".
        forward_dtype (`str`, *optional*): dtype of activations and of matrix products, weights being cast on use; None
            takes the dtype of the weights. The original trains with "bfloat16".
        task (`str`, defaults to "generic"): "sudoku", "maze", "arc" or "generic"; how answers are decoded and checked.
        grid_shape, box_shape (`list[int]`, *optional*): rows and columns of the board and of a Sudoku box.
    """

    model_type = "hrm_puzzle"
    keys_to_ignore_at_inference = ["carry", "metrics"]
    attribute_map = {"num_heads": "num_attention_heads"}

    vocab_size: int = 11
    seq_len: int = 81
    hidden_size: int = 512
    num_attention_heads: int = 8
    H_layers: int = 4
    L_layers: int = 4
    H_cycles: int = 2
    L_cycles: int = 2
    expansion: float | int = 4.0
    puzzle_emb_ndim: int = 512
    puzzle_emb_len: int = 0
    num_puzzle_identifiers: int = 1
    pos_encodings: str = "rope"
    rope_parameters: dict | None = None
    rms_norm_eps: float = 1e-5
    halt_max_steps: int = 16
    halt_exploration_prob: float | int = 0.1
    loss_type: str = "stablemax"
    forward_dtype: str | None = None
    task: str = "generic"
    grid_shape: list[int] | None = None
    box_shape: list[int] | None = None

    _stacks: ClassVar[tuple[str, ...]] = ("H_layers", "L_layers")  # those that need at least one block

    # Trained hyper-parameters live in training/recipes; a preset is an architecture only.
    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "hrm-27m": {},
        "hrm-27m-sudoku-full": {
            "L_cycles": 8, "halt_max_steps": 8, "pos_encodings": "learned", "loss_type": "softmax",
        },
        "hrm-small": {
            "hidden_size": 32, "puzzle_emb_ndim": 32, "H_layers": 1, "L_layers": 1, "num_attention_heads": 1,
            "expansion": 2,
        },
        "hrm-ultra-small": {
            "hidden_size": 16, "puzzle_emb_ndim": 16, "H_layers": 1, "L_layers": 1, "num_attention_heads": 1,
            "expansion": 2,
        },
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict` validation: relations between fields."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )
        if self.pos_encodings == "rope" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head size; hidden_size / heads = {self.head_dim}")
        self._require("pos_encodings", ("rope", "learned", "none"))
        self._require("loss_type", ("stablemax", "softmax"))
        self._require("forward_dtype", (None, "float32", "bfloat16", "float16"))
        for name in (*self._stacks, "H_cycles", "L_cycles", "halt_max_steps", "seq_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.halt_exploration_prob <= 1:
            raise ValueError(f"halt_exploration_prob={self.halt_exploration_prob} is not a probability")
        if self.puzzle_emb_ndim > self.prefix_len * self.hidden_size:
            raise ValueError(
                f"puzzle_emb_ndim={self.puzzle_emb_ndim} does not fit into {self.prefix_len} slots of "
                f"hidden_size={self.hidden_size}"
            )
        if self.grid_shape is not None and self.grid_shape[0] * self.grid_shape[1] != self.seq_len:
            raise ValueError(f"grid_shape={self.grid_shape} does not have seq_len={self.seq_len} cells")

    def _require(self, name: str, allowed: tuple):
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def prefix_len(self) -> int:
        """Number P of slots in front of the tokens that hold the puzzle embedding."""
        if self.puzzle_emb_ndim == 0:
            return 0
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    @property
    def max_position_embeddings(self) -> int:
        """Latent positions T = P + S."""
        return self.prefix_len + self.seq_len

    @property
    def num_hidden_layers(self) -> int:
        return self.H_layers + self.L_layers


__all__ = ["HrmPuzzleConfig"]
