"""Configuration of RLM-mHC, a Llama with hyper-connected residual streams."""

import math
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.llama.configuration_llama import LlamaConfig

from .bounds import ANY_NUMBER, COUNT, PROBABILITY, SOME, TOKEN_ID, BoundedFields, bounded, number
from .modeling_utils import LlamaModulesMixin, PresetsMixin


@strict
class RlmMhcConfig(PresetsMixin, LlamaModulesMixin, BoundedFields, LlamaConfig):
    r"""Configuration of `rlm_mhc`, a Llama with n residual streams mixed by mHC (Xie et al. 2026).

    Fields not listed here are as in Llama. Names in parentheses are aliases from the RLM-mHC training guide or from
    deepseek_v4; a config that gives a field and its alias different values is rejected.

    Body:
        hidden_size ("hidden_dim"), num_hidden_layers ("num_layers"), num_attention_heads ("num_heads"),
            max_position_embeddings ("max_seq_len"): as in Llama; hidden_size is the width C of a stream.
        intermediate_size ("ffn_dim"): width of the SwiGLU. The default is the guide's, but multiples of 64 run faster
            (see the "-aligned" presets).
        hidden_dropout ("dropout"): dropout on the output of each branch.
    Streams:
        mhc_enabled: False makes the model a plain Llama, with the same weight names.
        mhc_flows ("hc_mult"): number n of streams.
        mhc_sinkhorn_iters ("hc_sinkhorn_iters"), mhc_eps ("hc_eps"): iterations and epsilon of Sinkhorn normalization.
        mhc_alpha_init: how much the maps initially depend on the token.
        mhc_res_mode: how streams are mixed: "sinkhorn", "birkhoff" (exactly doubly stochastic, at most 4 streams),
            "identity" (not at all) or "unconstrained" (plain hyper-connections).
        mhc_reduce: how streams are merged at the end: "mean", "sum", or "head" (learned weights).
        mhc_stream_init: initial streams: copies of the embedding ("copy"), each "scaled" by a learned factor,
            which is initially 0.6^i for stream i.
    Recursion (our extension, not part of the guide's model or of mHC):
        num_loops: passes through the middle layers loop_start <= i < loop_end, each with its own keys and values; by
            default all layers except the first and the last.
        num_physical_layers: layers with weights, set from num_hidden_layers if num_loops > 1; num_hidden_layers then
            becomes the number of cache slots, one per visit to a layer, from which caches read their size.
    """

    model_type = "rlm_mhc"
    attribute_map = {
        "hidden_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "dropout": "hidden_dropout",
        "hc_mult": "mhc_flows",
        "hc_sinkhorn_iters": "mhc_sinkhorn_iters",
        "hc_eps": "mhc_eps",
    }
    base_model_pp_plan = None  # pipeline-parallel plans cannot express the step from embeddings to streams

    # Fields inherited from transformers, redeclared with bounds.
    chunk_size_feed_forward: int = bounded(0, SOME)
    num_key_value_heads: int | None = bounded(None, COUNT)
    head_dim: int | None = bounded(None, COUNT)
    initializer_range: float = bounded(0.02, number(0))
    rms_norm_eps: float = bounded(1e-6, PROBABILITY)
    attention_dropout: int | float | None = bounded(0.0, PROBABILITY)
    rope_parameters: RopeParameters | dict | None = None
    pretraining_tp: int | None = bounded(1, SOME)
    pad_token_id: int | None = bounded(None, TOKEN_ID)
    bos_token_id: int | None = bounded(1, TOKEN_ID)
    eos_token_id: int | list[int] | None = bounded(2, TOKEN_ID)
    vocab_size: int = bounded(32000, COUNT)
    hidden_size: int = bounded(2048, COUNT)
    intermediate_size: int = bounded(5461, COUNT)
    num_hidden_layers: int = bounded(24, COUNT)
    num_attention_heads: int = bounded(16, COUNT)
    max_position_embeddings: int = bounded(8192, COUNT)
    hidden_dropout: float | int = bounded(0.0, PROBABILITY)
    tie_word_embeddings: bool = True
    mhc_enabled: bool = True
    mhc_flows: int = bounded(4, COUNT)
    mhc_sinkhorn_iters: int = bounded(20, COUNT)
    mhc_eps: float | int = bounded(1e-6, PROBABILITY)
    mhc_alpha_init: float | int = bounded(0.01, ANY_NUMBER)
    mhc_res_mode: Literal["sinkhorn", "birkhoff", "identity", "unconstrained"] = "sinkhorn"
    mhc_reduce: Literal["mean", "sum", "head"] = "mean"
    mhc_stream_init: Literal["copy", "scaled"] = "copy"
    num_loops: int = bounded(1, COUNT)
    loop_start: int | None = bounded(None, SOME)
    loop_end: int | None = bounded(None, SOME)
    num_physical_layers: int | None = bounded(None, COUNT)

    # Sizes from the training guide of petostouf/rlm-mhc. Comments give the guide's names, and the number of parameters
    # in millions, counted with mHC and tied embeddings.
    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {  # "125M": 111.3
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048,
        },
        "base": {},  # "1.3B": 1283.0
        "base-aligned": {"intermediate_size": 5504},  # 1289.3
        "large": {  # "7B": 6598.7
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 10922,
        },
        "large-aligned": {  # 6632.5
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        },
    }  # fmt: skip

    def __new__(cls, *args, **kwargs):
        # Checked here, because __post_init__ cannot tell a given value from a default.
        for alias, name in cls.attribute_map.items():
            if alias in kwargs and name in kwargs and kwargs[alias] != kwargs[name]:
                raise ValueError(
                    f"{alias}={kwargs[alias]!r}, {name}={kwargs[name]!r}: two names for the same field; pass only one"
                )
        return super().__new__(cls)

    def __post_init__(self, **kwargs):
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        if self.num_loops > 1:
            self.num_physical_layers = self.num_blocks
            self.loop_start = 1 if self.loop_start is None else self.loop_start
            self.loop_end = self.num_blocks - 1 if self.loop_end is None else self.loop_end
        looped = self.loop_end - self.loop_start if self.num_loops > 1 else 0
        self.num_hidden_layers = self.num_blocks + (self.num_loops - 1) * max(0, looped)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        if self.mhc_enabled and self.mhc_res_mode == "birkhoff" and self.mhc_flows > 4:
            raise ValueError(
                f"mhc_flows={self.mhc_flows}: mhc_res_mode='birkhoff' would need {math.factorial(self.mhc_flows)} "
                "logits per token; use at most 4 streams, or mhc_res_mode='sinkhorn'"
            )
        if self.num_loops > 1 and not 0 <= self.loop_start < self.loop_end <= self.num_blocks:
            raise ValueError(
                f"num_loops={self.num_loops}: needs 0 <= loop_start < loop_end <= num_hidden_layers; got loop_start="
                f"{self.loop_start}, loop_end={self.loop_end}, num_hidden_layers={self.num_blocks}"
            )

    @property
    def num_blocks(self) -> int:
        """Number of distinct layers, each counted once even if it is in the loop."""
        return self.num_physical_layers or self.num_hidden_layers

    @property
    def layer_order(self) -> list[int]:
        """Indices of the layers in execution order. The position in this list is the cache slot."""
        if self.num_loops == 1:
            return list(range(self.num_blocks))
        begin, middle = range(self.loop_start), range(self.loop_start, self.loop_end)
        return [*begin, *list(middle) * self.num_loops, *range(self.loop_end, self.num_blocks)]


__all__ = ["RlmMhcConfig"]
