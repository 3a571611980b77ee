"""Small RLM-mHC models for tests of behavior."""

import torch

from hrm_hf import RlmMhcConfig, RlmMhcForCausalLM


VOCAB_SIZE = 96
LOOPS = {"num_loops": 3, "num_hidden_layers": 4}
# Variants of the model.
VARIANTS = {
    "mhc": {},
    "off": {"mhc_enabled": False},
    "birkhoff": {"mhc_res_mode": "birkhoff"},
    "identity": {"mhc_res_mode": "identity"},
    "head": {"mhc_reduce": "head"},
    "sum": {"mhc_reduce": "sum"},
    "scaled": {"mhc_stream_init": "scaled"},
    "loops": LOOPS,
}


def config(**overrides) -> RlmMhcConfig:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    return RlmMhcConfig(**{**fields, **overrides})


def model(seed: int = 0, awake: bool = True, **overrides) -> RlmMhcForCausalLM:
    """Return a seeded model in eval mode; `awake` uses large weights and maps that depend strongly on the token."""
    torch.manual_seed(seed)
    built = RlmMhcForCausalLM(config(**overrides)).eval()
    if awake:
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if name.endswith((".scale", ".hc_scale")):
                    parameter.fill_(1.0)
                elif name.endswith((".fn", ".hc_fn", "proj.weight", "embed_tokens.weight")):
                    parameter.normal_(std=0.2)
    return built


def ids(rows: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))
