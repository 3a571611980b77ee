"""Configuration of the Tiny Recursive Model, as differences from HRM's."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hrm_puzzle import HrmPuzzleConfig


@strict
class TrmPuzzleConfig(HrmPuzzleConfig):
    r"""Configuration of the Tiny Recursive Model (Jolicoeur-Martineau 2025, arXiv 2510.04871).

    Fields of `HrmPuzzleConfig`, with other defaults, and:

    Args:
        mlp_t (`bool`, defaults to False): replace attention by a SwiGLU over the position axis, for puzzles of a fixed
            small size (Sudoku). Use with pos_encodings="none".

    There is one network (`L_level`, `L_layers` blocks) for both updates; `H_layers` is not used.
    """

    model_type = "trm_puzzle"

    H_layers: int = 0
    L_layers: int = 2
    H_cycles: int = 3
    L_cycles: int = 6
    puzzle_emb_len: int = 16
    mlp_t: bool = False

    _stacks: ClassVar[tuple[str, ...]] = ("L_layers",)

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "trm-7m": {},
        "trm-5m-mlp": {"mlp_t": True, "pos_encodings": "none"},
        "trm-7m-arc": {"L_cycles": 4, "seq_len": 900, "vocab_size": 12},
        "trm-7m-maze": {"L_cycles": 4, "seq_len": 900, "vocab_size": 6},
    }


__all__ = ["TrmPuzzleConfig"]
