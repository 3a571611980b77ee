"""RLM-mHC: a Llama with n residual streams mixed by manifold-constrained hyper-connections (mHC).

    x = expand(embed(ids))                                  [B, S, n, C], once
    for each layer, for each F of (attention, feed-forward):
        x = H_res x + post F(norm(pre x))                   `hyper_connections.py`
    logits = lm_head(norm(reduce(x)))

Only this loop is new; attention, feed-forward, norms, rotary positions, masks and caches are transformers' Llama.
Without mHC (`mhc_enabled=False`), weight names and results are Llama's. mHC adds the weights
`layers.N.{attn_hc,ffn_hc}.{fn,base,scale}`, and depending on the config `hc_head.*` and `stream_scale`.

The training guide of petostouf/rlm-mhc defines the sizes. Difference: there, layers expand and contract streams
within a block, which amounts to a single matrix; here, the streams last from the embedding to the final norm, as in
arXiv 2512.24880. `num_loops` > 1 runs the middle layers several times. This extension is inspired by Hyperloop
Transformers (arXiv 2604.21254), but here every site has mHC, and loops have no additional parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import nn
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_rlm_mhc import RlmMhcConfig
from .hyper_connections import HyperConnection, HyperHead, MhcMetricsMixin, assign_initial_values
from .modeling_utils import CheckpointCodeMixin, OwnModelMixin, PromptsMixin, validate_call, validate_labels
from .recurrent_cache import open_cache, validate_slots
from .visited_attention import VisitedLayersMixin, VisitedLlamaAttention, rotary_tables


STREAM_DECAY = 0.6  # initial `stream_scale` of each stream, relative to the previous stream
COMMON = ("past_key_values", "hidden_states", "attentions", "streams", "mhc_matrices")  # fields of both outputs below


@dataclass
class RlmMhcModelOutput(BaseModelOutputWithPast):
    """Base model output with optional fields for the streams.

    Attributes:
        hidden_states: the input [B, S, C] of each layer in execution order, and the final normalized state.
        streams: with `output_streams=True`, the streams [B, S, n, C] after each layer.
        mhc_matrices: with `output_mhc_matrices=True`, H_res [B, S, n, n] of each site in execution order.
    """

    streams: tuple[torch.Tensor, ...] | None = None
    mhc_matrices: tuple[torch.Tensor, ...] | None = None


@dataclass
class RlmMhcOutput(CausalLMOutputWithPast):
    """Language model output with `streams` and `mhc_matrices` (see `RlmMhcModelOutput`)."""

    streams: tuple[torch.Tensor, ...] | None = None
    mhc_matrices: tuple[torch.Tensor, ...] | None = None


class RlmMhcDecoderLayer(GradientCheckpointingLayer):
    """Llama layer that operates on streams [B, S, n, C] or, without mHC, on states [B, S, C]."""

    def __init__(self, config: RlmMhcConfig, layer_idx: int):
        super().__init__()
        slots = [slot for slot, layer in enumerate(config.layer_order) if layer == layer_idx]
        self.self_attn = VisitedLlamaAttention(config, layer_idx, slots)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn_hc = build_connection(config)
        self.ffn_hc = build_connection(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        def attention(x):
            return self.self_attn(self.input_layernorm(x), **kwargs)[0]

        def feed_forward(x):
            return self.mlp(self.post_attention_layernorm(x))

        hidden_states = self._residual(self.attn_hc, attention, hidden_states)
        return self._residual(self.ffn_hc, feed_forward, hidden_states)

    def _residual(self, connection: "HyperConnection | PlainConnection", branch: Callable, x: torch.Tensor):
        read, post, h_res = connection(x)
        return connection.merge(x, self.dropout(branch(read)), post, h_res)


class PlainConnection(nn.Module):
    """Site without mHC, as in Llama: the output of the branch is added to the state [B, S, C]."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return x, None, None

    def merge(self, x: torch.Tensor, branch: torch.Tensor, post: None, h_res: None) -> torch.Tensor:
        return x + branch


def build_connection(config: RlmMhcConfig) -> HyperConnection | PlainConnection:
    """Build the connection around one branch: a `HyperConnection`, or a plain residual without mHC."""
    if not config.mhc_enabled:
        return PlainConnection()
    own = {"sinkhorn_iters": config.mhc_sinkhorn_iters, "res_mode": config.mhc_res_mode}
    return HyperConnection(config.hidden_size, config.mhc_flows, **own, **shared_options(config))


def shared_options(config: RlmMhcConfig) -> dict[str, float]:
    """Return the arguments that `HyperConnection` and `HyperHead` share."""
    own = {"eps": config.mhc_eps, "norm_eps": config.rms_norm_eps, "alpha_init": config.mhc_alpha_init}
    return own | {"initializer_range": config.initializer_range}


class RlmMhcPreTrainedModel(CheckpointCodeMixin, VisitedLayersMixin, MhcMetricsMixin, PreTrainedModel):
    config: RlmMhcConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RlmMhcDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        # Record each layer's input (first output of `attn_hc`) and the final state (output of `norm`).
        "hidden_states": [
            OutputRecorder(nn.Module, layer_name="attn_hc", capture_initial_hidden_state=False),
            OutputRecorder(LlamaRMSNorm, layer_name="norm", capture_initial_hidden_state=False),
        ],
        "attentions": VisitedLlamaAttention,
        "streams": OutputRecorder(RlmMhcDecoderLayer),
        "mhc_matrices": OutputRecorder(HyperConnection, index=2),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (HyperConnection, HyperHead)):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)
        elif isinstance(module, RlmMhcModel) and module.stream_scale is not None:
            init.copy_(module.stream_scale, STREAM_DECAY ** torch.arange(self.config.mhc_flows))


class RlmMhcModel(RlmMhcPreTrainedModel):
    def __init__(self, config: RlmMhcConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(RlmMhcDecoderLayer(config, index) for index in range(config.num_blocks))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.hc_head, self.stream_scale = None, None
        if config.mhc_enabled and config.mhc_reduce == "head":
            self.hc_head = HyperHead(config.hidden_size, config.mhc_flows, **shared_options(config))
        if config.mhc_enabled and config.mhc_stream_init == "scaled":
            self.stream_scale = nn.Parameter(torch.empty(config.mhc_flows))
        if config.mhc_enabled:
            self._keep_in_fp32_modules_strict = ["attn_hc", "ffn_hc", *(["hc_head"] if self.hc_head else [])]
        self.gradient_checkpointing = False
        self.post_init()

    def expand(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Expand embeddings [B, S, C] to streams [B, S, n, C]. Without mHC, return the embeddings unchanged."""
        if not self.config.mhc_enabled:
            return embeddings
        if self.stream_scale is not None:
            return embeddings.unsqueeze(-2) * self.stream_scale.to(embeddings.dtype).unsqueeze(-1)
        return embeddings.unsqueeze(-2).expand(-1, -1, self.config.mhc_flows, -1)

    def reduce(self, streams: torch.Tensor) -> torch.Tensor:
        """Merge the streams [B, S, n, C] into one state [B, S, C], before the final norm."""
        if not self.config.mhc_enabled:
            return streams
        if self.hc_head is not None:
            return self.hc_head(streams)
        return streams.mean(dim=-2) if self.config.mhc_reduce == "mean" else streams.sum(dim=-2)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> RlmMhcModelOutput:
        validate_call(self, kwargs, input_ids)
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        past_key_values = open_cache(past_key_values, self.config, use_cache)
        validate_slots(past_key_values, self.config.num_hidden_layers)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)

        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        passes = {
            "attention_mask": mask,
            "position_embeddings": rotary_tables(*self.rotary_emb(inputs_embeds, position_ids=position_ids)),
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            **kwargs,
        }
        streams, order = self.expand(inputs_embeds), self.config.layer_order
        for slot, layer in enumerate(order):
            streams = self.layers[layer](streams, visit=order[:slot].count(layer), **passes)
        return RlmMhcModelOutput(last_hidden_state=self.norm(self.reduce(streams)), past_key_values=past_key_values)


class RlmMhcForCausalLM(PromptsMixin, RlmMhcPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: RlmMhcConfig):
        super().__init__(config)
        self.model = RlmMhcModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> RlmMhcOutput:
        validate_call(self, kwargs)
        validate_labels(labels, input_ids if inputs_embeds is None else inputs_embeds, self.config.vocab_size)
        outputs: RlmMhcModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return RlmMhcOutput(loss=loss, logits=logits, **{name: getattr(outputs, name) for name in COMMON})

    @classmethod
    def from_llama(cls, llama: LlamaForCausalLM, **overrides) -> "RlmMhcForCausalLM":
        """Build a model with a Llama's weights and the same logits, for further training with mHC.

        The maps are initially independent of the token (`scale` = 0): they read with 1/n, write with 1 and mix doubly
        stochastically, so all streams stay equal. `scale` still learns from the first step, because `fn` is
        random. `mhc_eps` is 0, because other values reduce the row sums of H_res below 1.

        Args:
            llama: the Llama model.
            overrides: fields of `RlmMhcConfig`.

        Raises:
            ValueError: `mhc_reduce="sum"` or `mhc_stream_init="scaled"` is given, which change the scale of the
                states, or the weights are not those of a Llama with this config.
        """
        given = {"mhc_eps": 0.0, "mhc_alpha_init": 0.0, **overrides}
        for name, value in (("mhc_reduce", "sum"), ("mhc_stream_init", "scaled")):
            if given.get(name) == value:
                raise ValueError(f"{name}={value!r}: cannot reproduce Llama's logits; do not pass it to from_llama")
        shared = {field.name for field in fields(RlmMhcConfig)} - {"architectures", "transformers_version"}
        kept = {name: value for name, value in llama.config.to_dict().items() if name in shared}
        model = cls(RlmMhcConfig(**{**kept, **given})).to(llama.device, llama.dtype).train(llama.training)
        for module in model.modules():
            if isinstance(module, (HyperConnection, HyperHead)):
                assign_initial_values(module)  # restores the biases that casting to Llama's dtype rounded
        missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
        missing = [name for name in missing if "_hc." not in name and ".hc_head." not in name]
        if missing or unexpected:
            raise ValueError(f"llama: its weights do not match its config; missing {missing}, unexpected {unexpected}")
        return model


class RlmMhcForSequenceClassification(OwnModelMixin, GenericForSequenceClassification, RlmMhcPreTrainedModel):
    """Classifier or reward model with `logits` [B, num_labels] from the last non-padding token."""

    _model_class = RlmMhcModel


class RlmMhcForTokenClassification(OwnModelMixin, GenericForTokenClassification, RlmMhcPreTrainedModel):
    """Token classifier with `logits` [B, T, num_labels] for each token."""

    _model_class = RlmMhcModel


__all__ = [
    "RlmMhcForCausalLM",
    "RlmMhcForSequenceClassification",
    "RlmMhcForTokenClassification",
    "RlmMhcModel",
    "RlmMhcPreTrainedModel",
]
