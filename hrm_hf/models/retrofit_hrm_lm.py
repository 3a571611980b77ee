"""Convert pretrained decoders to looped `hrm_lm` models, and unroll looped models into decoders.

`from_llama` splits the layers of a Llama, Qwen2, Qwen3 or Mistral into a prelude, a loop and a coda:

    Llama    layers 0 ... a - 1    a ... a + b - 1     a + b ... N - 1    norm
    hrm_lm   prelude               loop, r passes      coda               coda's exit norm

With one pass, the looped model computes what the decoder computes. The only new weights are the halting head and the
parameters of `LoopInput`, which initially leave the first pass unchanged. `to_llama` does the reverse: it repeats the
loop's layers once per pass, so that any server can run the result.

Sources: McLeish et al. 2025, arXiv 2511.07384 (pretrained decoders as looped ones); arXiv 2605.23872 (damped passes).
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from os import PathLike
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from .bounds import whole
from .configuration_hrm_lm import HrmLmConfig
from .hrm_lm_layers import PassLinear
from .modeling_utils import only_errors_logged
from .presets_hrm_lm import LOOP


# Model types and class names of decoders. Importing the classes would slow down startup.
DECODERS = {name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
# Config fields of hrm_lm that every decoder has, too. `attention_bias`, `mlp_bias` and `qk_norm` are converted
# separately, because some decoders lack them.
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
SETTINGS = ("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id", "use_cache")
# Decoder config fields that hrm_lm lacks, each with the only value that from_llama accepts.
UNSUPPORTED = {"sliding_window": None, "attention_chunk_size": None, "is_causal": True}
# Config fields that make one pass of `hrm_lm` equivalent to a decoder. `LOOP` adds the fields of a flat loop.
DECODER = {
    "norm_affine": True, "norm_position": "pre_exit", "exit_norms": "last", "attention_gate": False,
    "embedding_scale": 1.0, "coda_input": "state", "mhc_flows": 1,
}  # fmt: skip
FLAT = ("num_h_layers", "H_cycles", "L_cycles", "initial_state")
# Weights of `hrm_lm` that decoders lack. Their initial values have no effect on the first pass.
NEW_WEIGHTS = re.compile(
    r"model\.(q_head|loop_input)\..+|model\.L_module\.(step_vectors|pass_gains|layers\..+\.lora_[AB])"
)


class RetrofitMixin:
    """Mixin for `HrmLmForCausalLM` with conversions from and to a decoder."""

    @classmethod
    def from_llama(
        cls,
        model_or_name: PreTrainedModel | str,
        *,
        prelude_layers: int | None = None,
        loop_layers: int | None = None,
        coda_layers: int | None = None,
        passes: int = 4,
        input_injection: str = "gated",
        loop_step: str = "damped",
        dtype: torch.dtype | None = None,
        **config: Any,
    ):
        """Build a looped model from a pretrained decoder. With one pass, both have the same logits.

        Weights that keep their dtype share memory with the given model, so train only one of the two.

        Args:
            model_or_name: a Llama, Qwen2, Qwen3 or Mistral without sliding window, or the folder or Hub name of one
                with safetensors weights.
            prelude_layers, loop_layers, coda_layers: layers before, in and after the loop, together all layers of the
                model. By default, 40 % of the layers come before the loop, and one eighth are in it.
            passes: maximum number of passes through the loop; each is a segment.
            input_injection, loop_step: what passes after the first read, and how they update the state.
            dtype: dtype of the weights; None for the model's dtype.
            config: other fields of `HrmLmConfig`, such as `pass_gains` or those of the halting rule.

        Raises:
            ValueError: the model has a feature that `hrm_lm` lacks, its weights do not match its config, the layers
                do not add up, or `config` sets a field that from_llama determines.
        """
        whole(1, name="passes")(passes)
        model = model_or_name
        if isinstance(model, str | PathLike):
            validate_decoder(AutoConfig.from_pretrained(model, trust_remote_code=False))
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto", use_safetensors=True)
        validate_decoder(model.config)
        if (given := type(model).__name__) not in DECODERS.values():
            names = ", ".join(DECODERS.values())
            raise ValueError(f"model_or_name={given}: not supported by from_llama; use {names}")
        layers = split_layers(model.config.num_hidden_layers, prelude_layers, loop_layers, coda_layers)
        loop = {"halt_max_steps": passes, "input_injection": input_injection, "loop_step": loop_step}
        settings = looped_config(model.config, layers, loop, config)
        weights = {looped_name(name, settings): weight for name, weight in model.state_dict().items()}
        return load_weights(cls, settings, weights, model, dtype)

    def to_llama(self, passes: int | None = None) -> PreTrainedModel:
        """Unroll the loop into a Llama, Qwen2 or Qwen3 with the same logits. The config determines which.

        Args:
            passes: number of passes through the loop; by default the passes of `halt_max_steps` segments.

        Raises:
            ValueError: the model has a feature that these decoders lack. The message names the field.
        """
        config = self.config
        if passes is None and config.halt_max_steps > 1 and config.exit_criterion != "fixed":
            raise ValueError(
                f"exit_criterion={config.exit_criterion!r}: lets each token run a different number of passes, which a "
                "decoder cannot do; call to_llama with a number of passes"
            )
        passes = config.halt_max_steps * config.L_cycles if passes is None else passes
        validate_unrolled(config, passes)
        settings = decoder_config(config, passes)
        decoder = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
        with torch.device("meta"):
            shapes = {name: weight.shape for name, weight in decoder(settings).state_dict().items()}
        weights = self.state_dict()
        neutral = {"weight": torch.ones, "bias": torch.zeros}  # no-op gains and biases, if this model has none
        unrolled = {}
        for name, shape in shapes.items():
            known = looped_name(name, config, passes)
            if known in weights:
                unrolled[name] = weights[known].detach().clone()
                if config.pass_lora_rank and known.startswith("model.L_module.") and known.endswith("proj.weight"):
                    unrolled[name] += low_rank_update(name, known, config, weights)
            elif ("norm." in name and not config.norm_affine) or name.endswith("o_proj.bias"):
                fill = neutral[name.rpartition(".")[2]]
                unrolled[name] = fill(shape, dtype=self.dtype, device=self.device)
        used = {looped_name(name, config, passes) for name in unrolled}
        validate_names(shapes.keys() - unrolled.keys(), weights.keys() - used)
        return load_weights(decoder, settings, unrolled, self)


def validate_decoder(config: PreTrainedConfig) -> None:
    """Raise ValueError if a decoder has a feature that `hrm_lm` lacks. The message names the field."""
    if config.model_type not in DECODERS:
        raise ValueError(f"model_type={config.model_type!r}: not supported by from_llama; use {', '.join(DECODERS)}")
    if getattr(config, "is_heterogeneous", False):  # since transformers 5.22
        varying = sorted(config.per_layer_attributes or ())
        raise ValueError(f"per_layer_config={varying}: not supported by hrm_lm; all layers must have the same shape")
    found = {name: getattr(config, name, neutral) for name, neutral in UNSUPPORTED.items()}
    wrong = {name: value for name, value in found.items() if value != UNSUPPORTED[name]}
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        wrong["layer_types"] = config.layer_types
    quantized = getattr(config, "quantization_config", None)
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
    if quantized is not None and method != "gguf":  # GGUF weights are dequantized on loading
        wrong["quantization_config"] = quantized
    if (factor := config.rope_parameters.get("partial_rotary_factor") or 1) != 1:
        wrong["partial_rotary_factor"] = factor
    for name, value in wrong.items():
        raise ValueError(f"{name}={value!r}: not supported by hrm_lm; from_llama needs a model without it")


def split_layers(total: int, prelude: int | None, loop: int | None, coda: int | None) -> tuple[int, int, int]:
    """Return the number of layers before, in and after the loop, with defaults in place of None."""
    if loop is None:
        free = total - (prelude or 0) - (coda or 0)
        loop = free if None not in (prelude, coda) else min(max(2, round(total / 8)), free)
    if prelude is None:
        prelude = min(round(0.4 * total), total - loop) if coda is None else total - loop - coda
    coda = total - prelude - loop if coda is None else coda
    if prelude < 0 or loop < 1 or coda < 0 or prelude + loop + coda != total:
        raise ValueError(
            f"prelude_layers={prelude}, loop_layers={loop}, coda_layers={coda}: must add up to the model's {total} "
            "layers, with at least one layer in the loop"
        )
    return prelude, loop, coda


def looped_config(source: PreTrainedConfig, layers: tuple[int, int, int], loop: dict, given: dict) -> HrmLmConfig:
    """Return a looped model's config with a decoder's shapes. `given` must not set fields fixed by the conversion."""
    fixed = {
        **{name: LOOP[name] for name in FLAT},
        **DECODER,
        **{name: deepcopy(getattr(source, name)) for name in SHARED},
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        "attention_bias": "qkv" if source.model_type == "qwen2" else False,
        "mlp_bias": source.model_type == "llama" and source.mlp_bias,
        "qk_norm": source.model_type == "qwen3",
        **dict(zip(("prelude_layers", "num_l_layers", "coda_layers"), layers)),
        **loop,
    }
    if source.model_type in ("llama", "qwen3"):
        fixed["attention_bias"] = source.attention_bias
    for name in given.keys() & fixed.keys():
        raise ValueError(f"{name}={given[name]!r}: from_llama sets this field to {fixed[name]!r}; remove it")
    return HrmLmConfig(**{**LOOP, **{name: getattr(source, name) for name in SETTINGS}, **fixed, **given})


def looped_name(name: str, config: HrmLmConfig, passes: int = 1) -> str:
    """Map a decoder's weight name to the looped model's name. The decoder repeats the loop's layers for each pass."""
    if name == "model.norm.weight":
        return "model.coda.exit_norm.weight" if config.coda_layers else "model.state_norm.weight"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if not match:
        return name
    index = int(match[1])
    start, end = config.prelude_layers, config.prelude_layers + passes * config.num_l_layers
    stack, index = ("prelude", index) if index < start else ("L_module", index - start)
    if stack == "L_module":
        stack, index = ("coda", index - end + start) if index >= end - start else (stack, index % config.num_l_layers)
    return f"model.{stack}.layers.{index}.{match[2]}"


def validate_unrolled(config: HrmLmConfig, passes: int) -> None:
    """Raise ValueError if no decoder has the same outputs as the looped model with this many passes."""
    whole(1, name="passes")(passes)
    needed = {"num_h_layers": 0, **DECODER, "step_vectors": False, "pass_gains": False, "quantization_config": None}
    del needed["norm_affine"]  # a model without gains becomes a decoder with gains of 1
    if passes > 1:
        needed |= {"input_injection": "none", "loop_step": "replace"}
    elif config.input_injection == "add":
        needed["initial_state"] = "zero"
    if config.qk_norm:
        needed["mlp_bias"] = False
    for name, value in needed.items():
        if getattr(config, name, None) != value:
            raise ValueError(f"{name}={getattr(config, name)!r}: not supported by Llama; to_llama needs {value!r}")


def decoder_config(config: HrmLmConfig, passes: int) -> PreTrainedConfig:
    """Return the decoder's config: Qwen3 if it has QK norm, Qwen2 if only q, k and v have biases, otherwise Llama."""
    fields = {name: deepcopy(getattr(config, name)) for name in (*SHARED, *SETTINGS, "head_dim")}
    fields["num_hidden_layers"] = config.prelude_layers + passes * config.num_l_layers + config.coda_layers
    if fields["initializer_range"] is None:
        del fields["initializer_range"]  # None means the default of the decoder's config
    if config.qk_norm:
        return Qwen3Config(attention_bias=bool(config.attention_bias), **fields)
    if config.attention_bias == "qkv" and not config.mlp_bias:
        return Qwen2Config(**fields)
    return LlamaConfig(attention_bias=bool(config.attention_bias), mlp_bias=config.mlp_bias, **fields)


def load_weights(
    made: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    source: PreTrainedModel,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Build a model from weights, with the dtype, device, attention, mode and generation config of `source`."""
    if any(weight.is_meta for weight in weights.values()):
        raise ValueError("model: some of its weights are offloaded; load it without offloading")
    with only_errors_logged():  # hides the report on weights that are missing because they are new
        model, info = made.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype or source.dtype,
            device_map=None if source.device.type == "cpu" else source.device,
            attn_implementation=source.config._attn_implementation,
            output_loading_info=True,
        )
    validate_names(info["missing_keys"], info["unexpected_keys"])
    model.generation_config = deepcopy(source.generation_config)
    model.name_or_path = model.config.name_or_path = ""  # adapters record this name; None would become "None"
    return model.train(source.training)


def low_rank_update(name: str, known: str, config: HrmLmConfig, weights: dict) -> torch.Tensor | int:
    """Return a pass's low-rank update of a weight, called `name` in the decoder and `known` in the looped model."""
    number = (int(name.split(".")[2]) - config.prelude_layers) // config.num_l_layers
    if number == 0:
        return 0
    a, b = (weights[known.removesuffix("weight") + matrix] for matrix in ("lora_A", "lora_B"))
    update = min(number, len(a)) - 1
    return PassLinear.SCALE * b[update] @ a[update]


def validate_names(missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise ValueError for missing or unexpected weights, except for weights that only looped models have."""
    missing, unexpected = (sorted(n for n in names if not NEW_WEIGHTS.fullmatch(n)) for names in (missing, unexpected))
    if missing or unexpected:
        raise ValueError(f"model: its weights do not match its config; missing {missing}, unexpected {unexpected}")
