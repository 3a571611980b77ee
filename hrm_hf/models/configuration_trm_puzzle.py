"""Configuration of the Tiny Recursive Model. It extends HRM's configuration."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import COUNT, bounded, whole
from .configuration_hrm_puzzle import EquilibriumConfig


EQR = {"update_rate": 0.95, "noise_scale": 0.01, "random_initial_states": True}


@strict
class TrmPuzzleConfig(EquilibriumConfig):
    r"""Configuration of the Tiny Recursive Model (Jolicoeur-Martineau 2025, arXiv 2510.04871).

    In addition to the fields of `HrmPuzzleConfig`, with different defaults, and of `EquilibriumConfig`:

    Args:
        mlp_t (`bool`, defaults to False): replace attention with a SwiGLU over the position axis, for small puzzles of
            a fixed size (Sudoku). Use it with pos_encodings="none".

    One network (`L_level` with `L_layers` blocks) does both updates; `H_layers` is not used. EqR is TRM with lambda
    0.95, noise 0.01 and random initial states, with either attention and "rope2d" or `mlp_t`.
    """

    model_type = "trm_puzzle"

    H_layers: int = bounded(0, whole(0, 10_000))
    L_layers: int = bounded(2, COUNT)
    H_cycles: int = bounded(3, COUNT)
    L_cycles: int = bounded(6, COUNT)
    puzzle_emb_len: int = bounded(16, whole(0, 2**20))
    mlp_t: bool = False

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "trm-7m": {},
        "trm-5m-mlp": {"mlp_t": True, "pos_encodings": "none"},
        "trm-7m-arc": {"L_cycles": 4, "seq_len": 900, "vocab_size": 12},
        "trm-7m-maze": {"L_cycles": 4, "seq_len": 900, "vocab_size": 6},
        "eqr-sudoku": {**EQR, "puzzle_emb_ndim": 0, "mlp_t": True, "pos_encodings": "none"},
        "eqr-maze": {
            **EQR, "puzzle_emb_ndim": 0, "hidden_size": 128, "num_attention_heads": 2, "L_layers": 1, "L_cycles": 4,
            "seq_len": 900, "vocab_size": 6, "grid_shape": [30, 30], "pos_encodings": "rope2d",
        },
    }  # fmt: skip


__all__ = ["TrmPuzzleConfig"]
