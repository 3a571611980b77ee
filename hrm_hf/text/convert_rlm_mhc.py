"""Checkpoints of petostouf/rlm-mhc that were trained without its mHC layers, converted to `rlm_mhc`.

    convert_rlm_mhc("checkpoints/checkpoint-1000", "rlm-mhc-llama")

Such a checkpoint is a folder with config.yaml (the fields of its ModelConfig) and model.safetensors. Its model is a
Llama with fused projections and interleaved rotary pairs, so the conversion splits, permutes and renames; the result
has `mhc_enabled=False`, and `RlmMhcForCausalLM.from_llama` gives it streams without changing a logit.

Checkpoints with `mhc_enabled: true` are refused. The layers that go by that name there expand, mix by a fixed matrix
and contract inside a block, on a single residual stream: a product of matrices, not the method of arXiv 2512.24880,
and nothing in our model computes the same. Optimizer and scheduler states are left out; the original never reads
them.
"""

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..io.files import load_yaml
from ..models.configuration_rlm_mhc import RlmMhcConfig
from ..models.modeling_rlm_mhc import RlmMhcForCausalLM


CONFIG_FILE, WEIGHTS_FILE = "config.yaml", "model.safetensors"
REQUIRED_FIELDS = ("hidden_dim", "num_layers", "num_heads", "ffn_dim", "vocab_size")
OPTIONAL_FIELDS = ("max_seq_len", "rope_theta", "dropout", "attention_dropout")
LAYER_NAMES = {
    "attention.out_proj": "self_attn.o_proj",
    "ffn.down_proj": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
OUTER_NAMES = {
    "embeddings.embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
}
TIED_NAME = "lm_head.weight"  # the original drops it on saving
REFUSAL = (
    "was trained with the original's mHC layers (mhc_enabled: true). They mix copies inside a block, on a single "
    "residual stream, which no rlm_mhc model can express. Train with mhc_enabled=false there, or start anew here"
)


def convert_rlm_mhc(src: str | Path, out: str | Path) -> dict[str, Any]:
    """Converts the folder `src` of the original code into a folder `out` that `from_pretrained` reads.

    Returns:
        What was converted: source, number of parameters, sizes.

    Raises:
        FileNotFoundError: no config.yaml or model.safetensors.
        ValueError: a checkpoint with mHC layers, an unreadable file, or tensors that do not fit; nothing is written.
    """
    src = Path(src)
    folder = src if src.is_dir() else src.parent
    config = read_config(folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE if src.is_dir() else src
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is missing; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        original = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a safetensors file, or is truncated; fetch it again. ({error})") from error
    with torch.device("meta"):
        model = RlmMhcForCausalLM(config)
    try:
        model.load_state_dict(convert_state_dict(original, config, weights), assign=True)
    except RuntimeError as error:  # it lists every tensor that is missing, unknown or of another shape
        raise ValueError(f"{weights} does not fit its {CONFIG_FILE}: {error}") from error
    model.tie_weights()
    model.save_pretrained(out)
    return {
        "out": str(out),
        "source": str(weights),
        "architecture": config.model_type,
        "parameters": model.num_parameters(),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "mhc_enabled": config.mhc_enabled,
    }


def read_config(file: Path) -> RlmMhcConfig:
    """Our config from the original's config.yaml; fields may stand at the top or in a section `model`."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; the number of heads is in no weight, so it is needed")
    try:
        fields = load_yaml(file)
    except ValueError as error:
        raise ValueError(f"{file} is not YAML of plain values: {error}") from error
    if isinstance(fields, dict) and isinstance(fields.get("model"), dict):
        fields = fields["model"]
    missing = [name for name in REQUIRED_FIELDS if not isinstance(fields, dict) or name not in fields]
    if missing:
        raise ValueError(f"{file} lacks {missing}; expected the config.yaml that the original saved")
    if fields.get("mhc_enabled", True):
        raise ValueError(f"{file}: the checkpoint {REFUSAL}")
    kept = {name: fields[name] for name in (*REQUIRED_FIELDS, *OPTIONAL_FIELDS) if name in fields}
    try:
        return RlmMhcConfig(**kept, mhc_enabled=False)
    except StrictDataclassError as error:
        raise ValueError(f"{file}: {str(error).splitlines()[-1].strip()}") from error


def convert_state_dict(original: dict[str, torch.Tensor], config: RlmMhcConfig, file: Path) -> dict[str, torch.Tensor]:
    """Return tensors by our names from the original's. Raise ValueError, which names `file`, for its mHC layers."""
    if any(".mhc_pre." in name or ".mhc_post." in name for name in original):
        raise ValueError(f"{file} {REFUSAL}")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in original.items():
        if name != TIED_NAME:
            tensors.update(_convert_tensor(name, tensor, config))
    tensors[TIED_NAME] = tensors.get("model.embed_tokens.weight", torch.empty(0))
    return tensors


def _convert_tensor(name: str, tensor: torch.Tensor, config: RlmMhcConfig) -> dict[str, torch.Tensor]:
    if name in OUTER_NAMES:
        return {OUTER_NAMES[name]: tensor}
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None:
        return {name: tensor}  # reported with the others that do not fit
    layer, part = f"model.layers.{match[1]}", match[2]
    if part == "attention.qkv_proj" and tensor.shape[0] == 3 * config.hidden_size:
        query, key, value = (rows.contiguous() for rows in tensor.chunk(3))
        return {
            f"{layer}.self_attn.q_proj.weight": rotary_halves(query, config.num_attention_heads),
            f"{layer}.self_attn.k_proj.weight": rotary_halves(key, config.num_attention_heads),
            f"{layer}.self_attn.v_proj.weight": value,
        }
    if part == "ffn.gate_up_proj":
        gate, up = (rows.contiguous() for rows in tensor.chunk(2))
        return {f"{layer}.mlp.gate_proj.weight": gate, f"{layer}.mlp.up_proj.weight": up}
    return {f"{layer}.{LAYER_NAMES.get(part, part)}.weight": tensor}


def rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection, from interleaved rotary pairs (2i, 2i + 1) to Llama's halves, by head."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
