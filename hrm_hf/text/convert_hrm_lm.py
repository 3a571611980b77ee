"""Checkpoints of the HRM_Models language models ("HRMText1"), read as starting weights of an `hrm_lm`.

    result = convert_hrm_text1("hrm-small-50m/final_model", "hrm-lm-start")

The original is a row of units, each with one high-level and one low-level block; ours has one stack of each. Unit i
becomes block i of both stacks, embeddings and the tied head are taken over, and so is the final norm, as the exit norm
of the high-level stack. What has no counterpart is dropped: per-unit prediction heads, Q-networks, ponder networks.

Outputs do NOT match, and cannot: the original reads later tokens in training, mixes positions where heads are merged,
and was trained on labels shifted twice. Its norms divide by the L2 norm instead of the root mean square, which is
repaired here (gain / sqrt(width)), so that a block computes what the same block with correct attention would. Train
the result; do not evaluate it.

Left out: models with learned positions, optimizer states. Pickled code is never run: `weights_only=True`.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ..io.state_dicts import read_stored_model
from ..models.configuration_hrm_lm import HrmLmConfig
from ..models.modeling_hrm_lm import HrmLmForCausalLM


logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
)  # fmt: skip

# Tensors of a block, ours by the original's name within `layers.{unit}.{H,L}_module.`
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
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|model\.|inner\.)*")  # data parallel training, torch.compile, a head

WHY_OUTPUTS_DIFFER = (
    "these are starting weights for training, not a converted model: outputs cannot match the original's, which "
    "attends to later tokens when a mask is passed, mixes positions when it merges heads, was trained on labels "
    "shifted twice, and normalizes by the L2 norm (repaired here)"
)


def convert_hrm_text1(src: str | Path, out: str | Path) -> dict[str, Any]:
    """Writes an `hrm_lm` whose weights start at those of an HRMText1 checkpoint, and warns that outputs differ.

    Args:
        src: folder with `config.json` and `pytorch_model.bin` or `model.safetensors`, as the original saves it, or
            the weights file in such a folder.
        out: folder to write; tokenizer files beside the weights are copied.

    Returns:
        What was converted and what was dropped.

    Raises:
        FileNotFoundError: no weights, or no config.json.
        ValueError: an unreadable file, learned positions, or tensors that are missing, unknown or misshapen; the
            message lists every tensor concerned. Nothing is written then.
    """
    weights_file = find_weights(Path(src))
    original = _read_config(weights_file.parent / "config.json")
    state = read_stored_model(weights_file, WRAPPERS).state
    config = hrm_lm_config(original, state, weights_file)
    model = HrmLmForCausalLM(config)
    tensors, taken = _our_tensors(state, config)
    new = {name: tensor for name, tensor in model.state_dict().items() if name not in taken}  # head and start
    try:
        model.load_state_dict(new | tensors)
    except RuntimeError as error:  # it lists every tensor that is missing, unknown or of another shape
        raise ValueError(f"{weights_file} does not fit its config.json: {error}") from error
    logger.warning("%s: %s", weights_file, WHY_OUTPUTS_DIFFER)
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


def find_weights(src: Path) -> Path:
    """The weights file: `src` itself, or one of WEIGHT_FILES in the folder `src`."""
    if src.is_file():
        return src
    for name in WEIGHT_FILES:
        if (src / name).is_file():
            return src / name
    held = sorted(path.name for path in src.iterdir()) if src.is_dir() else "nothing, it does not exist"
    raise FileNotFoundError(f"{src} has none of {WEIGHT_FILES}; it holds {held}")


def hrm_lm_config(original: dict[str, Any], state: dict[str, torch.Tensor], file: Path) -> HrmLmConfig:
    """Our config from the original's config.json and the shapes of its weights; `file` is named in errors."""
    positions = [name for name in state if LEARNED_POSITIONS.fullmatch(name)]
    if positions or not original.get("use_rotary_embeddings", True):
        raise ValueError(
            f"{file} has learned positions ({', '.join(positions) or 'use_rotary_embeddings is false'}), hrm_lm has "
            "rotary ones; such a checkpoint cannot be a start for it"
        )
    if "token_embeddings.weight" not in state:
        raise ValueError(f"{file} lacks token_embeddings.weight; expected an HRMText1 checkpoint, found {_few(state)}")
    units = {int(match[1]) for name in state if (match := re.match(r"layers\.(\d+)\.", name))}
    if units != set(range(len(units))) or not units:
        raise ValueError(f"{file} has units {sorted(units)}; expected layers.0 to layers.N-1")
    embeddings = state["token_embeddings.weight"].float()
    optional = {name: original[name] for name in ("H_cycles", "L_cycles") if name in original}
    cycles = {"H_cycles": HrmLmConfig.H_cycles, "L_cycles": HrmLmConfig.L_cycles, **optional}
    vocab_size, width = embeddings.shape
    return HrmLmConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=_field(original, "d_ff", file),
        num_h_layers=len(units),
        num_l_layers=len(units),
        num_attention_heads=_field(original, "n_head", file),
        max_position_embeddings=_field(original, "block_size", file),
        rope_parameters={"rope_type": "default", "rope_theta": float(original.get("rotary_embedding_base", 10000))},
        hidden_dropout=original.get("dropout", 0.0),
        norm_affine=True,
        attention_gate=False,
        embedding_scale=(1 / embeddings.square().mean().sqrt()).item(),  # states enter as large as they leave a norm
        pad_token_id=original.get("pad_token_id"),
        bp_steps=min(HrmLmConfig.bp_steps, cycles["H_cycles"] * (cycles["L_cycles"] + 1)),
        **cycles,
    )


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; the original saves it beside its weights, which do not tell n_head"
        )
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; expected the fields of HRMText1Config")
    return config


def _field(original: dict[str, Any], name: str, file: Path) -> int:
    if type(original.get(name)) is not int:
        raise ValueError(f"{file.parent / 'config.json'}: {name}={original.get(name)!r}; expected a whole number")
    return original[name]


def _our_tensors(state: dict[str, torch.Tensor], config: HrmLmConfig) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the tensors by our names, in float32, and all the names that the original has a tensor for."""
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
        if "norm" in name:  # x / |x| * w = x / rms(x) * (w / sqrt(width))
            tensors[name] = tensors[name] / config.hidden_size**0.5
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    return tensors, {*ours_of.values(), "lm_head.weight"}


def _few(state: dict[str, torch.Tensor], most: int = 6) -> str:
    names = sorted(state)
    return f"{names[:most]} and {len(names) - most} more" if len(names) > most else str(names)
