"""Presets of `hrm_lm`."""

from typing import Any


# Fields of a flat loop. Train it on the loss after its last pass, and then train the gate (`--train_gate_only`).
LOOP = {
    "num_h_layers": 0, "H_cycles": 1, "L_cycles": 1, "bp_steps": 1, "halt_max_steps": 4, "initial_state": "zero",
    "detach_between_segments": False, "deep_supervision": "last", "q_loss_weight": 0.0, "ponder_loss_weight": 0.0,
    "exit_criterion": "fixed",
}  # fmt: skip

# Additional fields that make a loop equivalent to an architecture of llama.cpp (docs/gguf.md)
NANBEIGE = {"input_injection": "none", "attention_gate": False, "norm_affine": True}
HRM_TEXT = {"coda_input": "state+input"}  # requires prelude_layers=0 and coda_layers=num_l_layers

# Additional fields of a loop for tasks that take many steps, chosen with benchmarks/text/plain_loop.py
TASKS = {"norm_position": "sandwich", "qk_norm": True, "embedding_scale": 1.0, "halt_max_steps": 6}


def sizes(width: int, heads: int, inner: int, layers: tuple[int, ...], **fields) -> dict:
    """Return a preset's fields. The layer counts are (high, low), or (prelude, loop, coda) for a flat loop."""
    flat = len(layers) == 3
    names = ("prelude_layers", "num_l_layers", "coda_layers") if flat else ("num_h_layers", "num_l_layers")
    own = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    return {**(LOOP if flat else {}), **own, **dict(zip(names, layers)), **fields}


PRESETS: dict[str, dict[str, Any]] = {
    "hrm-lm-10m-byte": sizes(384, 6, 1024, (3, 3), vocab_size=264),
    "hrm-lm-25m": sizes(384, 6, 1024, (2, 2), max_position_embeddings=512),
    "hrm-lm-50m": {},
    "hrm-lm-100m": sizes(768, 12, 2048, (4, 4)),
    "hrm-lm-350m": sizes(1024, 16, 2816, (11, 11), max_position_embeddings=2048),
    "hrm-lm-1b": sizes(1536, 12, 4096, (16, 16), max_position_embeddings=4096),
    "hrm-lm-loop-100k-tasks": sizes(56, 4, 112, (1, 1, 1), vocab_size=64, max_position_embeddings=256, **TASKS),
    "hrm-lm-loop-10m-byte": sizes(384, 6, 1024, (2, 2, 2), vocab_size=264),
    "hrm-lm-loop-25m": sizes(384, 6, 1024, (1, 2, 1), max_position_embeddings=512),
    "hrm-lm-loop-50m": sizes(512, 8, 1792, (2, 2, 2)),
    "hrm-lm-loop-100m": sizes(768, 12, 2048, (2, 4, 2)),
    "hrm-lm-loop-25m-served-hrm-text": sizes(384, 6, 1024, (0, 2, 2), max_position_embeddings=512, **HRM_TEXT),
    "hrm-lm-loop-50m-served-hrm-text": sizes(512, 8, 1792, (0, 3, 3), **HRM_TEXT),
    "hrm-lm-loop-25m-served-nanbeige": sizes(384, 6, 1024, (0, 4, 0), max_position_embeddings=512, **NANBEIGE),
    "hrm-lm-loop-50m-served-nanbeige": sizes(512, 8, 1792, (0, 6, 0), **NANBEIGE),
}
