"""Convert checkpoints from HRM_Models to `hrm_lm`, and from petostouf/rlm-mhc to `rlm_mhc`.

`convert_hrm_text1` turns an "HRMText1" into starting weights. HRMText1 is a sequence of units, each with one
high-level and one low-level block; our model has one stack of each. Unit i becomes block i of both stacks. Embeddings,
the tied head and the final norm (as the exit norm of the high-level stack) are kept. Per-unit prediction heads,
Q-networks and ponder networks have no counterpart and are dropped. Outputs do NOT match: see `WHY_OUTPUTS_DIFFER`. The
norms are corrected (gain / sqrt(width)), so a block computes what the original block would compute with correct
attention. Train the result; do not evaluate it. Models with learned positions are rejected.

`convert_rlm_mhc` converts a folder with config.yaml (the fields of its ModelConfig) and model.safetensors that was
trained without mHC. This model is a Llama with fused projections and interleaved rotary pairs, so the conversion
splits, permutes and renames weights. The result has `mhc_enabled=False`; `RlmMhcForCausalLM.from_llama` adds streams
without changing a logit. Checkpoints with `mhc_enabled: true` are rejected: their mHC layers multiply copies by a
fixed matrix inside a block, which is not the method of arXiv 2512.24880.

Optimizer states are ignored, and pickled code never runs: `weights_only=True`.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..io.files import load_json, load_yaml
from ..io.state_dicts import read_stored_model
from ..models.bounds import number
from ..models.configuration_hrm_lm import HrmLmConfig
from ..models.configuration_rlm_mhc import RlmMhcConfig
from ..models.modeling_hrm_lm import HrmLmForCausalLM
from ..models.modeling_rlm_mhc import RlmMhcForCausalLM


WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip

# Tensor names in a block: HRMText1's name after `layers.{unit}.{H,L}_module.` -> our name
BLOCK_NAMES = {
    "norm1.weight": "input_layernorm.weight",
    "attn.q_proj.weight": "self_attn.q_proj.weight",
    "attn.k_proj.weight": "self_attn.k_proj.weight",
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.out_proj.weight": "self_attn.o_proj.weight",
    "norm2.weight": "post_attention_layernorm.weight",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w2.weight": "mlp.up_proj.weight",
    "mlp.w3.weight": "mlp.down_proj.weight",
}
DROPPED = re.compile(
    r"layers\.\d+\.([hl]_prediction_head|q_network\.\d|ponder_network\.\d)\.(weight|bias)"
    r"|layers\.\d+\.[HL]_module\.attn\.rotary_emb\.inv_freq"
)
LEARNED_POSITIONS = re.compile(r"pos(ition)?_embeddings?\.weight")
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|model\.|inner\.)*")  # name prefixes from DDP, torch.compile and heads

WHY_OUTPUTS_DIFFER = (
    "these are starting weights for training, not a converted model: outputs cannot match the original's, which "
    "attends to later tokens when a mask is passed, mixes positions when it merges heads, was trained on labels "
    "shifted twice, and normalizes by the L2 norm (corrected here)"
)


def convert_hrm_text1(src: str | Path, out: str | Path) -> dict[str, Any]:
    """Save an `hrm_lm` initialized from an HRMText1 checkpoint. The outputs of the two models differ.

    Args:
        src: folder with `config.json` and `pytorch_model.bin` or `model.safetensors` from the original code, or
            the weights file in such a folder.
        out: output folder; tokenizer files in the source folder are copied.

    Returns:
        A summary of the conversion, including the number of dropped parameters and why the outputs differ.

    Raises:
        FileNotFoundError: the weights or config.json are missing.
        ValueError: a file is unreadable, the model has learned positions, or tensors are missing, unknown or have the
            wrong shape; the message lists every such tensor. Nothing is written then.
    """
    weights_file = _find_weights(Path(src))
    original = _read_config(weights_file.parent / "config.json")
    state = read_stored_model(weights_file, WRAPPERS).state
    config = _hrm_lm_config(original, state, weights_file)
    model = HrmLmForCausalLM(config)
    tensors, taken = _our_tensors(state, config)
    # Tensors that the checkpoint lacks keep their initial values.
    new = {name: tensor for name, tensor in model.state_dict().items() if name not in taken}
    _load_state(model, new | tensors, weights_file, "config.json")
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (weights_file.parent / name).is_file():
            shutil.copyfile(weights_file.parent / name, Path(out) / name)
    dropped = sorted(name for name in state if DROPPED.fullmatch(name))
    return {
        "out": str(out),
        "source": str(weights_file),
        "architecture": config.model_type,
        "parameters": model.num_parameters(),
        "units": config.num_h_layers,
        "dropped_parameters": sum(state[name].numel() for name in dropped if "inv_freq" not in name),
        "note": WHY_OUTPUTS_DIFFER,
    }


def _find_weights(src: Path) -> Path:
    if src.is_file():
        return src
    for name in WEIGHT_FILES:
        if (src / name).is_file():
            return src / name
    found = sorted(path.name for path in src.iterdir()) if src.is_dir() else "nothing, it does not exist"
    raise FileNotFoundError(f"src={src}: must contain one of {WEIGHT_FILES}; found {found}")


def _hrm_lm_config(original: dict[str, Any], state: dict[str, torch.Tensor], file: Path) -> HrmLmConfig:
    """Derive our config from HRMText1's config.json and the shapes of its weights."""
    positions = [name for name in state if LEARNED_POSITIONS.fullmatch(name)]
    if positions or not original.get("use_rotary_embeddings", True):
        raise ValueError(
            f"{file} has learned positions ({', '.join(positions) or 'use_rotary_embeddings is false'}), but hrm_lm "
            "uses rotary positions; this checkpoint cannot be converted"
        )
    if "token_embeddings.weight" not in state:
        raise ValueError(
            f"{file} lacks token_embeddings.weight; expected an HRMText1 checkpoint, found {sorted(state)}"
        )
    units = {int(match[1]) for name in state if (match := re.match(r"layers\.(\d+)\.", name))}
    if units != set(range(len(units))) or not units:
        raise ValueError(f"{file} has layers {sorted(units)}; expected layers.0 to layers.N-1")
    embeddings = state["token_embeddings.weight"].float()
    optional = {name: original[name] for name in ("H_cycles", "L_cycles") if name in original}
    cycles = {"H_cycles": HrmLmConfig.H_cycles, "L_cycles": HrmLmConfig.L_cycles, **optional}
    vocab_size, width = embeddings.shape
    theta = original.get("rotary_embedding_base", 10000.0)
    _validate_theta(theta, f"{file.parent / 'config.json'}: rotary_embedding_base")
    return HrmLmConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=_field(original, "d_ff", file),
        num_h_layers=len(units),
        num_l_layers=len(units),
        num_attention_heads=_field(original, "n_head", file),
        max_position_embeddings=_field(original, "block_size", file),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        hidden_dropout=original.get("dropout", 0.0),
        norm_affine=True,
        attention_gate=False,
        embedding_scale=(1 / embeddings.square().mean().sqrt()).item(),  # gives embeddings unit RMS, as a norm would
        pad_token_id=original.get("pad_token_id"),
        bp_steps=min(HrmLmConfig.bp_steps, cycles["H_cycles"] * (cycles["L_cycles"] + 1)),
        **cycles,
    )


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; the original code saves it in the same folder as the weights")
    config = load_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{file} contains a {type(config).__name__}; expected the fields of HRMText1Config")
    return config


def _field(original: dict[str, Any], name: str, file: Path) -> int:
    if type(original.get(name)) is not int:
        raise ValueError(f"{file.parent / 'config.json'}: {name}={original.get(name)!r}: must be an integer")
    return original[name]


def _our_tensors(state: dict[str, torch.Tensor], config: HrmLmConfig) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the float32 tensors under our names, and the set of names that the checkpoint provides."""
    ours_of = {
        "token_embeddings.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.H_module.exit_norm.weight",
        **{
            f"layers.{unit}.{stack}.{theirs}": f"model.{stack}.layers.{unit}.{ours}"
            for unit in range(config.num_h_layers)
            for stack in ("H_module", "L_module")
            for theirs, ours in BLOCK_NAMES.items()
        },
    }
    kept = {name: tensor for name, tensor in state.items() if not DROPPED.fullmatch(name)}
    tensors = {ours_of.get(name, name): tensor.float().contiguous() for name, tensor in kept.items()}
    for name in tensors:
        if "norm" in name:  # x / |x| * w equals our norm, x / rms(x) * (w / sqrt(width))
            tensors[name] = tensors[name] / config.hidden_size**0.5
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    return tensors, {*ours_of.values(), "lm_head.weight"}


def _load_state(model, tensors: dict[str, torch.Tensor], file: Path, config_name: str, **options: Any) -> None:
    try:
        model.load_state_dict(tensors, **options)
    except RuntimeError as error:  # the error lists all tensors that are missing, unexpected or of the wrong shape
        raise ValueError(f"{file} does not fit its {config_name}: {error}") from error


# ---- petostouf/rlm-mhc ----


CONFIG_FILE, WEIGHTS_FILE = "config.yaml", "model.safetensors"
REQUIRED_FIELDS = ("hidden_dim", "num_layers", "num_heads", "ffn_dim", "vocab_size")
OPTIONAL_FIELDS = ("max_seq_len", "rope_theta", "dropout", "attention_dropout")
LAYER_NAMES = {
    "attention.out_proj": "self_attn.o_proj",
    "ffn.down_proj": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
OUTER_NAMES = {"embeddings.embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
TIED_NAME = "lm_head.weight"  # shared with the embeddings; the original code does not save it
REFUSAL = (
    "was trained with the mHC layers of the original code (mhc_enabled: true), which mix copies of a single "
    "stream inside a block. rlm_mhc cannot express this; train the original with mhc_enabled=false, or train rlm_mhc"
)


def convert_rlm_mhc(src: str | Path, out: str | Path) -> dict[str, Any]:
    """Convert `src`, a folder saved by the original code, write it to `out`, and return a summary.

    Raises:
        FileNotFoundError: config.yaml or model.safetensors is missing.
        ValueError: the checkpoint has mHC layers, a file is unreadable, or tensors do not fit.
    """
    src = Path(src)
    folder = src if src.is_dir() else src.parent
    config = _rlm_mhc_config(folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE if src.is_dir() else src
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is missing; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    original = read_stored_model(weights, re.compile("^$")).state
    with torch.device("meta"):
        model = RlmMhcForCausalLM(config)
    _load_state(model, _rlm_mhc_tensors(original, config, weights), weights, CONFIG_FILE, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    return {
        "out": str(out),
        "source": str(weights),
        "architecture": config.model_type,
        "parameters": model.num_parameters(),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_blocks,
        "vocab_size": config.vocab_size,
        "mhc_enabled": config.mhc_enabled,
    }


def _validate_theta(value: Any, name: str) -> None:
    """Raise a ValueError that names the field `name` if a RoPE theta is missing or not positive."""
    if value is None:  # `number` accepts None, the value of unset optional fields
        raise ValueError(f"{name}=None: must be a number")
    number(1e-6, name=name)(value)


def _rlm_mhc_config(file: Path) -> RlmMhcConfig:
    """Derive our config from config.yaml. Its fields are at the top level or in a section `model`."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; the weights alone do not determine the number of heads")
    fields = load_yaml(file)
    if isinstance(fields, dict) and isinstance(fields.get("model"), dict):
        fields = fields["model"]
    missing = [name for name in REQUIRED_FIELDS if not isinstance(fields, dict) or name not in fields]
    if missing:
        raise ValueError(f"{file} lacks {missing}; expected the config.yaml that the original code saved")
    if fields.get("mhc_enabled", True):
        raise ValueError(f"{file}: the checkpoint {REFUSAL}")
    _validate_theta(fields.get("rope_theta", 10000.0), f"{file}: rope_theta")
    kept = {name: fields[name] for name in (*REQUIRED_FIELDS, *OPTIONAL_FIELDS) if name in fields}
    try:
        return RlmMhcConfig(**kept, mhc_enabled=False)
    except StrictDataclassError as error:
        raise ValueError(f"{file}: {str(error).splitlines()[-1].strip()}") from error


def _rlm_mhc_tensors(original: dict[str, torch.Tensor], config: RlmMhcConfig, file: Path) -> dict[str, torch.Tensor]:
    """Return the original tensors under our names. Raise ValueError for mHC layers of the original code."""
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
        return {name: tensor}  # an unknown name: `_load_state` reports it
    layer, part = f"model.layers.{match[1]}", match[2]
    if part == "attention.qkv_proj" and tensor.shape[0] == 3 * config.hidden_size:
        query, key, value = (rows.contiguous() for rows in tensor.chunk(3))
        return {
            f"{layer}.self_attn.q_proj.weight": _rotary_halves(query, config.num_attention_heads),
            f"{layer}.self_attn.k_proj.weight": _rotary_halves(key, config.num_attention_heads),
            f"{layer}.self_attn.v_proj.weight": value,
        }
    if part == "ffn.gate_up_proj":
        gate, up = (rows.contiguous() for rows in tensor.chunk(2))
        return {f"{layer}.mlp.gate_proj.weight": gate, f"{layer}.mlp.up_proj.weight": up}
    return {f"{layer}.{LAYER_NAMES.get(part, part)}.weight": tensor}


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows of a query or key projection from interleaved rotary pairs to the two halves that Llama uses."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
