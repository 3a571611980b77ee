"""Language models for the benchmarks, matched in parameters or compute, and their cost per token.

All models derive from one `HrmLmConfig` with one segment. They share its width, heads, vocabulary and tied head:

    hrm_lm                   the model itself, M = 1
    hrm_lm_m4                up to four segments, halting by the learned gate
    hrm_lm_loop              equal parameters: one block before the loop, one that runs four times in the loop, and one
                             after it
    looped                   equal parameters: a plain looped transformer with all blocks in the loop
    hrm_text                 transformers' HRM-Text with the same stacks: no re-injection of embeddings, no segments
    llama                    equal parameters: as many blocks as both stacks, the SwiGLU widened by the gate's weights
    llama_x4                 four times the parameters, from four times the blocks
    llama_equal_flops        equal forward FLOPs: as many blocks as a segment has layer visits, so more parameters
    llama_equal_depth        as many blocks as hrm_lm_loop runs in all its passes, with the same width
    rlm_mhc_off, rlm_mhc_on  `rlm_mhc` with the body of `llama`, without and with mHC: the cost of mHC
    rlm_mhc                  mHC with equal parameters: the SwiGLU is narrowed by the weights of mHC
    gpt2                     GPT-2 124M, unchanged

Recurrent models accept overrides of config fields, as in `hrm_lm_loop+coda_layers=0+norm_position=sandwich`; their
SwiGLU is then resized for equal parameters.

All weights are initialized with std 1 / sqrt(width), as in hrm_lm. The transformers default of 0.02 suits widths of
thousands; at width 64, it cost the Llamas one bit per byte in short runs. Training and timing are in `quality.py` and
`speed.py`.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, HrmTextConfig, LlamaConfig, PreTrainedConfig

from hrm_hf import HrmLmConfig
from hrm_hf.models.configuration_rlm_mhc import RlmMhcConfig
from hrm_hf.models.presets_hrm_lm import LOOP

from ..report import RESULTS


BYTES = 264  # vocabulary of the byte tokenizer: ids 0..7 are special, 8 + b is byte b
EOS_ID, FIRST_BYTE = 2, 8
DOCUMENT_END = b"<|endoftext|>\n"

# Fields of HrmLmConfig. "1m" suits two cores; "17m" has the width at which the cost of mHC is measured.
SIZES = {
    "tiny": {"vocab_size": BYTES, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 160,
             "num_h_layers": 1, "num_l_layers": 1, "max_position_embeddings": 512},
    "1m": {"vocab_size": BYTES, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384,
           "num_h_layers": 2, "num_l_layers": 2},
    "10m": HrmLmConfig._presets["hrm-lm-10m-byte"],
    "17m": {"vocab_size": BYTES, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1536},
    "50m": HrmLmConfig._presets["hrm-lm-50m"],
    "100m": HrmLmConfig._presets["hrm-lm-100m"],
}  # fmt: skip
TRAINING = {"depth_warmup": 0.0}  # fraction of the budget during which each token gets one segment
PEERS = (
    "hrm_lm", "hrm_lm_m4", "hrm_lm_loop", "looped", "hrm_text", "llama", "llama_x4", "llama_equal_flops",
    "llama_equal_depth", "rlm_mhc_off", "rlm_mhc_on", "rlm_mhc", "gpt2",
)  # fmt: skip
IMAGES = Path(__file__).parents[2] / "docs" / "images"
BOOKS = Path(__file__).parents[3] / "shared" / "data"


def peer_config(
    peer: str, size: str, block_size: int = 256, mhc_preset: str | None = None, changes: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """Return the config of a model in PEERS at a size in SIZES; each +FIELD=VALUE in `peer` overrides a field.

    FLOPs are matched for rows of `block_size` tokens. `changes` overrides fields of the hrm_lm config that all models
    are matched to. With `mhc_preset`, rlm_mhc_on and rlm_mhc_off use this preset of `RlmMhcConfig` instead.
    """
    fields = {**SIZES[size], "halt_max_steps": 1, **(changes or {})}
    hrm = HrmLmConfig(**fields)
    peer, *given = peer.split("+")
    recurrent = {"hrm_lm": {"halt_max_steps": 1}, "hrm_lm_m4": {"halt_max_steps": 4}, **loop_peers(hrm)}
    if given and peer not in recurrent:
        raise ValueError(f"{peer} does not accept overrides such as {given}; only these do: {', '.join(recurrent)}")
    if peer in recurrent:
        fields = fields | recurrent[peer] | parsed_fields(given)
        fields = {name: value for name, value in fields.items() if name not in ("intermediate_size", *TRAINING)}
        return _fitted(HrmLmConfig, fields, count_parameters, count_parameters(hrm))
    if peer == "gpt2":
        return GPT2Config()
    if mhc_preset is not None and peer in ("rlm_mhc_on", "rlm_mhc_off"):
        return RlmMhcConfig.from_preset(mhc_preset, mhc_enabled=peer == "rlm_mhc_on")
    shared = {
        name: getattr(hrm, name)
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    } | {"tie_word_embeddings": True, "initializer_range": hrm.hidden_size**-0.5}
    if peer == "hrm_text":
        return HrmTextConfig(
            **shared,
            intermediate_size=hrm.intermediate_size,
            num_hidden_layers=hrm.num_h_layers,
            H_cycles=hrm.H_cycles,
            L_cycles=hrm.L_cycles,
            prefix_lm=False,
        )
    if peer == "llama_equal_flops":
        body = shared | {"num_hidden_layers": hrm.segment_visits}
        wanted = flops_per_token(hrm, block_size, backward=False)
        return _fitted(LlamaConfig, body, lambda config: flops_per_token(config, block_size, backward=False), wanted)
    if peer == "llama_equal_depth":
        loop = peer_config("hrm_lm_loop", size, block_size, changes=changes)
        return LlamaConfig(
            **shared, num_hidden_layers=loop.num_hidden_layers, intermediate_size=loop.intermediate_size
        )
    body = shared | {"num_hidden_layers": hrm.num_h_layers + hrm.num_l_layers}
    wanted = count_parameters(hrm)
    if peer == "rlm_mhc":
        return _fitted(RlmMhcConfig, body, count_parameters, wanted)
    if peer == "llama_x4":
        return _fitted(
            LlamaConfig, body | {"num_hidden_layers": 4 * body["num_hidden_layers"]}, count_parameters, 4 * wanted
        )
    llama = _fitted(LlamaConfig, body, count_parameters, wanted)
    if peer == "llama":
        return llama
    if peer in ("rlm_mhc_on", "rlm_mhc_off"):
        body["intermediate_size"] = llama.intermediate_size
        return RlmMhcConfig(**body, mhc_enabled=peer == "rlm_mhc_on")
    raise ValueError(f"peer={peer!r}: must be one of {PEERS}")


def loop_peers(hrm: HrmLmConfig) -> dict[str, dict]:
    """Return the config fields of the flat loops; `looped` has as many blocks as `hrm`, and `hrm_lm_loop` one more."""
    blocks = hrm.num_h_layers + hrm.num_l_layers
    around = max(1, (blocks + 1) // 4)
    middle = max(1, blocks + 1 - 2 * around)
    return {
        "hrm_lm_loop": {**LOOP, "num_l_layers": middle, "prelude_layers": around, "coda_layers": around},
        "looped": {**LOOP, "num_l_layers": blocks},
    }


def training_options(peer: str) -> dict:
    """Return TRAINING with the overrides in a peer's name, as in `hrm_lm_loop+depth_warmup=0.7`."""
    given = parsed_fields(peer.split("+")[1:])
    return {name: given.get(name, default) for name, default in TRAINING.items()}


def parsed_fields(given: list[str]) -> dict:
    """Parse `["coda_layers=0", "norm_position=sandwich"]` into config fields, with values as JSON or text."""
    fields = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def _fitted(config_class, fields: dict, measure, wanted: float) -> PreTrainedConfig:
    """Choose the intermediate_size, a multiple of 8, for which `measure` (linear in it) is nearest to `wanted`."""
    at_8, at_16 = (measure(config_class(**fields, intermediate_size=width)) for width in (8, 16))
    steps = (wanted - at_8) / (at_16 - at_8)
    return config_class(**fields, intermediate_size=8 + 8 * max(0, round(steps)))


def build(config: PreTrainedConfig, seed: int = 0, **kwargs):
    """Build a model from a config, in training mode; `kwargs` are passed to `from_config`."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, **kwargs).train()


def count_parameters(config: PreTrainedConfig) -> int:
    """Count a model's parameters without allocating them; tied weights count once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(
    config: PreTrainedConfig,
    block_size: int,
    *,
    segments: int | None = None,
    bp_steps: int | None = None,
    backward: bool = True,
) -> float:
    """Return the FLOPs per token in rows of `block_size` tokens, by default including the backward pass.

    Only matrix products count, with two operations per multiply-add: projections, SwiGLU, head, mHC maps, and
    attention over all block_size x block_size pairs, as in unfused code. Norms, softmax, Sinkhorn and rotary positions
    are not counted. The backward pass costs twice the forward pass where gradients flow, and nothing elsewhere; a
    recurrent pass counts each time it runs. Tests compare the result with torch's FlopCounterMode, which counts up to
    1 % less if a pass with gradients starts from a state without gradients.

    Args:
        segments: number of segments that `hrm_lm` ran; halt_max_steps by default. The head runs after each segment.
        bp_steps: number of stack passes of `hrm_lm` that carry gradients; the value in the config by default.
    """
    head = 2 * config.hidden_size * config.vocab_size
    if config.model_type == "hrm_lm":
        bp_steps = config.bp_steps if bp_steps is None else bp_steps
        segments = config.halt_max_steps if segments is None else segments
        h_passes = 0 if config.flat_loop else min(config.H_cycles, bp_steps - 1)
        with_gradient = h_passes * config.num_h_layers + (bp_steps - h_passes) * config.num_l_layers
        with_gradient *= segments if config.bp_segments is None else min(segments, config.bp_segments)
        block = _block_flops(config, block_size, gated=config.attention_gate)
        learns_from_all = config.deep_supervision == "all" or config.q_loss_weight or config.ponder_loss_weight
        read = (segments if learns_from_all else 1) * (head + config.coda_layers * block)
        q_head = 0 if config.halt_max_steps == 1 else 4 * config.hidden_size * segments
        once = config.prelude_layers * block + read
        streams = 0
        if config.mhc_flows > 1:
            streams = config.L_cycles * segments * _stream_flops(config.mhc_flows, config.hidden_size)
        forward = once + segments * config.segment_visits * block + streams + q_head
        gate = q_head if learns_from_all else 0  # the gate's input is detached, which halves its backward pass
        return forward + backward * (2 * (once + with_gradient * block + streams) + gate)
    if config.model_type == "hrm_text":
        block = _block_flops(config, block_size, gated=True)
        low = [1] * (config.H_cycles - len(config.L_bp_cycles)) + config.L_bp_cycles
        with_gradient = config.num_layers_per_stack * (config.H_cycles + sum(low))
        return config.num_hidden_layers * block + head + backward * 2 * (with_gradient * block + head)
    if config.model_type == "gpt2":
        block = 24 * config.hidden_size**2 + 4 * block_size * config.hidden_size
    else:
        block = _block_flops(config, block_size, gated=False)
        if config.model_type == "rlm_mhc" and config.mhc_enabled:
            block += 2 * _stream_flops(config.mhc_flows, config.hidden_size)
    return (config.num_hidden_layers * block + head) * (3 if backward else 1)


def _stream_flops(n: int, width: int) -> float:
    """Return the forward FLOPs per token of a hyper-connection: computing its maps, reading and mixing n streams."""
    return 2 * ((2 * n + n * n) * n * width + n * width + n * n * width)


def _block_flops(config, block_size: int, gated: bool) -> float:
    """Return the forward FLOPs per token of one block: attention and SwiGLU."""
    head_dim = config.hidden_size // config.num_attention_heads if config.head_dim is None else config.head_dim
    width = config.num_attention_heads * head_dim
    key_heads = config.num_attention_heads if config.model_type == "hrm_text" else config.num_key_value_heads
    weights = (2 + gated) * config.hidden_size * width + 2 * config.hidden_size * key_heads * head_dim
    weights += 3 * config.hidden_size * config.intermediate_size
    return 2 * weights + 4 * block_size * width


def image_folder(out: Path) -> Path:
    """Return the folder for plots: docs/images for reports in the default folder, otherwise the report's folder."""
    folder = IMAGES if out == RESULTS else out
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_bytes(path: str | Path) -> np.ndarray:
    """Read a text file (plain or `.gz`) as uint16 byte ids; each line `<|endoftext|>` becomes one EOS."""
    path = Path(path)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return ids_of(text)


def ids_of(text: bytes) -> np.ndarray:
    """See `read_bytes`."""
    parts = [np.frombuffer(part, dtype=np.uint8).astype(np.uint16) + FIRST_BYTE for part in text.split(DOCUMENT_END)]
    eos = np.array([EOS_ID], dtype=np.uint16)
    return np.concatenate([piece for part in parts for piece in (part, eos)][:-1])


def text_file(given: str | None, split: str, quick: bool = False) -> np.ndarray:
    """Return the ids of the given file, or of the books in shared/data, or (quick runs only) of the package's code."""
    path = Path(given) if given else BOOKS / f"classic_books_en.{split}.txt.gz"
    if path.is_file():
        return read_bytes(path)
    if quick and not given:
        sources = sorted((Path(__file__).parents[2] / "hrm_hf").rglob("*.py"))
        sources = sources[-4:] if split == "valid" else sources[:-4]
        return ids_of(b"".join(source.read_bytes() for source in sources))
    raise SystemExit(f"{path} does not exist; pass a text with --{split}_file FILE (plain UTF-8 or gzip)")


def held_out_rows(ids: np.ndarray, total: int, block_size: int) -> torch.Tensor:
    """Return about `total` tokens as int64 [rows, block_size], in rows spread evenly over the text."""
    rows = max(1, min(total, len(ids)) // block_size)
    starts = np.linspace(0, len(ids) - block_size, rows).astype(np.int64)
    return torch.from_numpy(np.stack([ids[start : start + block_size] for start in starts]).astype(np.int64))
