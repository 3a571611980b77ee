"""The hierarchical recursive Go coder: one token stream, two stacks, and a decision after every attempt.

    states of the planner   = planner(embed(ids))                        causal, over the whole stream
    states of the generator = generator(embed(ids), planner states)      causal, over code; reads the planner
    logits                  = lm_head(generator state in code, planner state elsewhere)

`processing_hrm_go_coder.py` says what is code. Code sees code, and of the planner the states at earlier planner
positions and at its own; nothing sees what comes later, so that labels are ordinary shifted tokens and a cache is
exact. The phases of cached tokens are kept in the cache as one more slot of width 1, so that whatever reorders, crops
or copies a cache treats them alike. Without a cache the generator runs on code positions alone.

Attention, feed-forward, norms and rotary positions are transformers' Llama; names of weights too, so that the planner
stack alone is a Llama. Cross-attention is here because Llama has none.

The loss is computed without its logits (`linear_cross_entropy.py`).

Different from matoval/go_coder_llm_pipeline, whose training guide gave the sizes and losses: there the planner is
bidirectional and both losses compare a token with itself, so that it learns to copy; the generator never sees the
problem, nor the decision the code. Generation is in `generation_hrm_go_coder.py`, repairs are in
`refinement_hrm_go_coder.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_hrm_go_coder import HrmGoCoderConfig
from .generation_hrm_go_coder import GoCoderGenerationMixin
from .linear_cross_entropy import linear_cross_entropy
from .modeling_utils import CheckpointCodeMixin, OwnModelMixin, validate_call
from .processing_hrm_go_coder import (
    CATEGORIES,
    DECISION_TOKENS,
    DECISIONS,
    EDIT_MARKS,
    LINE_BUCKETS,
    NO_FEEDBACK,
    PLANNER_OPENERS,
    TOKEN_IDS,
)
from .recurrent_cache import VisitedLayersMixin, layer_cache_view
from .refinement_hrm_go_coder import GoCoderRefinementMixin
from .single_step_hrm_go_coder import SingleStep


IGNORED = -100


@dataclass
class HrmGoCoderModelOutput(BaseModelOutputWithPast):
    """States of both stacks [B, S, C], which of them a position uses (`phases`, bool [B, S], True for the generator),
    and the decision's logits [B, K, 3] if positions were given.

    The generator's states are those of code positions; elsewhere they mean nothing, and a unified model has none.
    """

    planner_states: torch.FloatTensor | None = None
    generator_states: torch.FloatTensor | None = None
    phases: torch.BoolTensor | None = None
    refinement_logits: torch.FloatTensor | None = None
    cross_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class HrmGoCoderOutput(CausalLMOutputWithPast):
    """The loss, and what a training step needs beside it; `logits` are None in training, where they are never made.

    `plan_loss`, `code_loss` and `refinement_loss` are means over their own tokens in nats, 0 without any; `metrics`
    has those numbers of tokens ("plan_tokens", "code_tokens", "decisions").
    """

    plan_loss: torch.FloatTensor | None = None
    code_loss: torch.FloatTensor | None = None
    refinement_loss: torch.FloatTensor | None = None
    refinement_logits: torch.FloatTensor | None = None
    planner_states: torch.FloatTensor | None = None
    generator_states: torch.FloatTensor | None = None
    cross_attentions: tuple[torch.FloatTensor, ...] | None = None
    metrics: dict[str, torch.Tensor] | None = None


class HrmGoCoderCrossAttention(nn.Module):
    """Attention of code positions to the planner's states. Positions are those of the one stream, for both sides."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False  # which states may be read is in the mask
        inner, inner_kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner_kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner_kv, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def keys_and_values(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, heads, S, head_dim] of planner states [B, S, C]."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_proj(states).view(shape).transpose(1, 2)
        values = self.v_proj(states).view(shape).transpose(1, 2)
        return _rotated(keys, *position_embeddings), values

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys_and_values: tuple[torch.Tensor, torch.Tensor],
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends from hidden_states [B, T, C] to keys and values of S >= T stream positions."""
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        query = _rotated(query, *position_embeddings)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, *keys_and_values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1)), weights


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """States [B, heads, T, head_dim] turned by their positions, as Llama turns queries and keys together."""
    return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


class HrmGoCoderPlannerLayer(GradientCheckpointingLayer):
    """Llama's layer, with dropout on its branches."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class HrmGoCoderGeneratorLayer(GradientCheckpointingLayer):
    """Self-attention over code, attention to the planner, feed-forward."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.cross_attn = HrmGoCoderCrossAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.cross_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,  # of the planner, apart: reentrant checkpointing sees no gradient through a tuple
        values: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        **kwargs,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attended)
        read, _ = self.cross_attn(
            self.cross_attention_layernorm(hidden_states),
            (keys, values),
            position_embeddings,
            cross_attention_mask,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(read)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class HrmGoCoderPlanner(nn.Module):
    """A causal stack over the whole stream: it reads problem, context, attempts and feedback, and writes plans."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HrmGoCoderPlannerLayer(config, index) for index in range(config.planner_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, past_key_values=None, **kwargs) -> torch.Tensor:
        """States [B, T, C] of embeddings [B, T, C]."""
        for cycle in range(self.config.planner_cycles):
            for index, layer in enumerate(self.layers):
                slot = cycle * len(self.layers) + index
                hidden_states = layer(hidden_states, past_key_values=layer_cache_view(past_key_values, slot), **kwargs)
        return self.norm(hidden_states)


class HrmGoCoderGenerator(nn.Module):
    """A causal stack over code, which reads the planner's states by cross-attention."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            HrmGoCoderGeneratorLayer(config, index) for index in range(config.generator_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def keys_and_values(
        self, planner_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], past_key_values
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer's cross-attention, past positions included. The same in every cycle."""
        first = self.config.cache_slots["cross"]
        pairs = [layer.cross_attn.keys_and_values(planner_states, position_embeddings) for layer in self.layers]
        if past_key_values is None:
            return pairs
        return [past_key_values.update(*pair, first + index) for index, pair in enumerate(pairs)]

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: list[tuple[torch.Tensor, torch.Tensor]],
        past_key_values=None,
        read: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """States [B, T, C] of embeddings [B, T, C] of code positions, which see what `read` gives of the cached."""
        first = self.config.cache_slots["generator"]
        for cycle in range(self.config.generator_cycles):
            for index, layer in enumerate(self.layers):
                slot = first + cycle * len(self.layers) + index
                cache = layer_cache_view(past_key_values, slot, read)
                hidden_states = layer(hidden_states, *memory[index], past_key_values=cache, **kwargs)
        return self.norm(hidden_states)


class HrmGoCoderFeedbackEncoder(nn.Module):
    """Encodes what a validator said as a vector: its two verdicts, the category of the error and where it is.

    Without a validator the vector is a learned one of its own, not that of a validator without complaints.
    """

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        half = config.hidden_size // 2
        self.flags = nn.Linear(2, half)
        self.category = nn.Embedding(len(CATEGORIES), half)
        self.projection = nn.Linear(2 * half, config.hidden_size)
        self.line = nn.Embedding(LINE_BUCKETS, config.hidden_size)
        self.no_validator = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, feedback_ids: torch.Tensor) -> torch.Tensor:
        """[..., C] of feedback ids [..., 4] (`Feedback.token_ids`): syntax, tests, category, line bucket."""
        syntax, tests, category, line = feedback_ids.unbind(dim=-1)
        # 0 unknown, 1 good, 2 bad become 0, 1, -1.
        flags = torch.stack([syntax, tests], dim=-1)
        flags = torch.where(flags == 2, -1, flags).to(self.no_validator.dtype)
        encoded = self.projection(torch.cat([self.flags(flags), self.category(category)], dim=-1))
        encoded = nn.functional.gelu(encoded) + self.line(line)
        nobody = ((syntax == 0) & (tests == 0)).unsqueeze(-1)
        return torch.where(nobody, self.no_validator.to(encoded.dtype), encoded)


class HrmGoCoderRefinementHead(nn.Module):
    """Whether an attempt is to be continued, refined or done, from what is known at its </CODE>."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.hidden = nn.Linear(4 * config.hidden_size, config.hidden_size // 2)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.classes = nn.Linear(config.hidden_size // 2, len(DECISIONS))

    def forward(self, planner, generator, plan, feedback) -> torch.Tensor:
        """Logits [..., 3] of planner and generator states, the mean state of the plan, and feedback, each [..., C]."""
        features = torch.cat([planner, generator, plan, feedback], dim=-1)
        return self.classes(self.dropout(nn.functional.gelu(self.hidden(features))))


class HrmGoCoderPreTrainedModel(CheckpointCodeMixin, VisitedLayersMixin, PreTrainedModel):
    config: HrmGoCoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HrmGoCoderPlannerLayer", "HrmGoCoderGeneratorLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": [HrmGoCoderPlannerLayer, HrmGoCoderGeneratorLayer],
        "attentions": LlamaAttention,
        "cross_attentions": OutputRecorder(HrmGoCoderCrossAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HrmGoCoderFeedbackEncoder):
            init.normal_(module.no_validator, std=self.config.initializer_range)


class HrmGoCoderModel(HrmGoCoderPreTrainedModel):
    def __init__(self, config: HrmGoCoderConfig):
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.planner = HrmGoCoderPlanner(config)
        self.generator, self.feedback_encoder, self.refinement_head = None, None, None
        if not config.unified:
            self.generator = HrmGoCoderGenerator(config)
            self.feedback_encoder = HrmGoCoderFeedbackEncoder(config)
            self.refinement_head = HrmGoCoderRefinementHead(config)
            self._keep_in_fp32_modules = ["refinement_head", "feedback_encoder"]  # nor are they quantized
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

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
        decision_positions: torch.LongTensor | None = None,
        feedback_ids: torch.LongTensor | None = None,
        planner_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HrmGoCoderModelOutput:
        validate_call(self, kwargs)
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        ordinary = position_ids is None  # neither packed rows nor a prepared batch
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if torch.is_tensor(seen):
            seen = seen.clone()  # a static cache counts on in place
        if position_ids is None:
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
        rotary = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        step = SingleStep.of(inputs_embeds, attention_mask, seen, partial(self._as_mask, dtype=inputs_embeds.dtype))
        if step is not None:
            causal_mask = step.planner_mask()
        else:
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                allow_is_causal_skip=self.config.unified or planner_only or past_key_values is None,
            )
        shared = {"position_ids": position_ids, "use_cache": use_cache, **kwargs}
        # Before the planner writes its slots: a mask is sized by what the cache holds so far.
        phases = all_phases = None
        if not planner_only:
            phases, all_phases = self._phases(input_ids, inputs_embeds, past_key_values)
        planner_states = self.planner(
            inputs_embeds,
            past_key_values=past_key_values,
            attention_mask=causal_mask,
            position_embeddings=rotary,
            **shared,
        )
        generator_states, states = None, planner_states
        if self.generator is not None and not planner_only:
            code = None
            if ordinary and past_key_values is None and self._may_compact(attention_mask, kwargs):
                code = _code_positions(phases, attention_mask)
            if code is not None:
                generator_states = self._generate_compacted(
                    inputs_embeds, planner_states, rotary, phases, code, kwargs
                )
            else:
                memory = self.generator.keys_and_values(planner_states, rotary, past_key_values)
                if step is not None:
                    own_mask, cross_mask = step.generator_masks(all_phases)
                    memory = [(step.cross_range(keys), step.cross_range(values)) for keys, values in memory]
                else:
                    if causal_mask is None:
                        causal_mask = create_causal_mask(
                            self.config, inputs_embeds, attention_mask, None, position_ids, allow_is_causal_skip=False
                        )
                    own_mask = _restricted(causal_mask, all_phases, seen)
                    cross_mask = _restricted(causal_mask, ~all_phases, seen)
                generator_states = self.generator(
                    inputs_embeds,
                    memory,
                    past_key_values=past_key_values,
                    read=None if step is None else step.own_range,
                    attention_mask=own_mask,
                    cross_attention_mask=cross_mask,
                    position_embeddings=rotary,
                    **shared,
                )
            states = torch.where(phases.unsqueeze(-1), generator_states, planner_states)
        decision = None
        if self.refinement_head is not None and decision_positions is not None:
            decision = self._decide(planner_states, generator_states, input_ids, decision_positions, feedback_ids)
        return HrmGoCoderModelOutput(
            last_hidden_state=states,
            past_key_values=past_key_values,
            planner_states=planner_states,
            generator_states=generator_states,
            phases=phases,
            refinement_logits=decision,
        )

    # ---- phases ----

    def _phases(self, input_ids, inputs_embeds, cache) -> tuple[torch.Tensor, torch.Tensor]:
        """True for code: of the new positions [B, T], and of all that the cache then has, [B, S]."""
        batch, length = inputs_embeds.shape[:2]
        before = self._phase_before(cache, batch, inputs_embeds.device)
        if self.config.tagged and input_ids is not None:
            if length == 1:
                opens, opens_code = _opens(input_ids)
                phases = opens_code | (before & ~opens)
            else:
                opener, opens_code = _last_openers(input_ids)
                phases = torch.where(opener >= 0, opens_code.gather(1, opener.clamp(min=0)), before)
        else:
            phases = before.expand(batch, length)
        if cache is None or self.config.unified:
            return phases, phases
        kept = phases[:, None, :, None].to(inputs_embeds.dtype)
        kept, _ = cache.update(kept, kept, self.config.cache_slots["phase"])
        return phases, kept[:, 0, :, 0] > 0.5

    def _phase_before(self, cache, batch: int, device) -> torch.Tensor:
        """Phase of the last cached token [B, 1]; what has no opener is code."""
        slot = self.config.cache_slots["phase"]
        code = torch.ones(batch, 1, dtype=torch.bool, device=device)
        if cache is None or self.config.unified or slot >= len(cache.layers) or not cache.layers[slot].is_initialized:
            return code
        seen = cache.get_seq_length(slot)
        if not torch.is_tensor(seen):
            return cache.layers[slot].keys[:, 0, seen - 1 : seen, 0] > 0.5 if seen else code
        last = cache.layers[slot].keys[:, 0, :, 0].index_select(1, (seen - 1).clamp(min=0).view(1))
        return torch.where(seen > 0, last > 0.5, code)

    # ---- the generator on code alone ----

    def _may_compact(self, attention_mask, kwargs) -> bool:
        """Compaction depends on the data, and it reorders what is recorded."""
        recorded = any(
            kwargs.get(name) or getattr(self.config, name, False)
            for name in ("output_hidden_states", "output_attentions")
        )
        plain_mask = attention_mask is None or attention_mask.dim() == 2
        return self.config.tagged and plain_mask and not recorded and not torch.compiler.is_compiling()

    def _generate_compacted(self, inputs_embeds, planner_states, rotary, phases, code, kwargs) -> torch.Tensor:
        """The generator's states [B, T, C], computed at the positions `code` [B, Tc] alone.

        A row with fewer code positions than Tc ends in others, which nothing before them sees.
        """
        embeds = _at(inputs_embeds, code)
        cos, sin = (_at(part.expand(len(code), -1, -1), code) for part in rotary)
        keys = torch.arange(phases.shape[1], device=phases.device)
        own = keys == code.unsqueeze(-1)
        # Padding before the first opener is code, padding after the end is later than any code.
        visible = ((keys < code.unsqueeze(-1)) & ~phases.unsqueeze(1)) | own
        states = self.generator(
            embeds,
            self.generator.keys_and_values(planner_states, rotary, None),
            attention_mask=create_causal_mask(self.config, embeds, None, None),
            cross_attention_mask=self._as_mask(visible.unsqueeze(1), embeds.dtype),
            position_embeddings=(cos, sin),
            **kwargs,
        )
        index = code.unsqueeze(-1).expand_as(states)
        return torch.zeros_like(planner_states, dtype=states.dtype).scatter(1, index, states)

    def _as_mask(self, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.config._attn_implementation == "sdpa":
            return visible
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)

    # ---- the decision ----

    def _decide(self, planner_states, generator_states, input_ids, positions, feedback_ids) -> torch.Tensor:
        """Logits [B, K, 3] at </CODE> positions [B, K]. The whole stream up to them must be in `input_ids`."""
        if feedback_ids is None:
            feedback_ids = torch.tensor(NO_FEEDBACK, device=positions.device).expand(*positions.shape, -1)
        plan = self._plan_means(planner_states, input_ids, positions)
        feedback = self.feedback_encoder(feedback_ids)
        logits = self.refinement_head(_at(planner_states, positions), _at(generator_states, positions), plan, feedback)
        return logits / self.config.decision_temperature

    def _plan_means(self, planner_states, input_ids, positions) -> torch.Tensor:
        """Mean planner state [B, K, C] over the last plan before each position; zeros without one."""
        indices = torch.arange(input_ids.shape[1], device=input_ids.device)
        openers = _last_openers(input_ids)[0]
        plans = torch.where(input_ids == TOKEN_IDS["<PLAN>"], indices, -1).cummax(dim=1).values
        last = plans.gather(1, positions)
        members = (openers.unsqueeze(1) == last.unsqueeze(-1)) & (last >= 0).unsqueeze(-1)
        shares = members.to(planner_states.dtype)
        return shares @ planner_states / shares.sum(dim=-1, keepdim=True).clamp(min=1)


def _last_openers(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [B, T] of the last opener up to each position, -1 for none; and which positions open code [B, T]."""
    opens, opens_code = _opens(input_ids)
    indices = torch.arange(input_ids.shape[1], device=input_ids.device)
    return torch.where(opens, indices, -1).cummax(dim=1).values, opens_code


def _opens(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids open a phase, and which of them that of code."""
    opens_code = input_ids == TOKEN_IDS["<CODE>"]
    return opens_code | (_within(input_ids, PLANNER_OPENERS) & ~_within(input_ids, EDIT_MARKS)), opens_code


def _within(input_ids: torch.Tensor, tags: tuple[str, ...]) -> torch.Tensor:
    """Which ids lie from the first to the last of `tags`."""
    return (input_ids >= TOKEN_IDS[tags[0]]) & (input_ids <= TOKEN_IDS[tags[-1]])


def _code_positions(phases: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Code positions [B, Tc] of each row in order, as many as the row with most has; None if that is all of them."""
    code = phases if attention_mask is None else phases & attention_mask.bool()
    most = max(1, int(code.sum(dim=1).max()))
    if most == code.shape[1]:
        return None
    return (~code).byte().argsort(dim=1, stable=True)[:, :most]


def _restricted(mask: torch.Tensor, keys: torch.Tensor, seen: int | torch.Tensor) -> torch.Tensor:
    """A causal mask [B, 1, T, S], bool or additive, without the keys [B, S] that are False, but for one's own."""
    indices = torch.arange(keys.shape[1], device=keys.device)
    queries = torch.arange(mask.shape[-2], device=keys.device) + seen
    allowed = keys[:, None, None, :] | (indices == queries.unsqueeze(-1))
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


def _at(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """values [B, T, C] at positions [B, K] -> [B, K, C]."""
    return values.gather(1, positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


class HrmGoCoderForCausalLM(HrmGoCoderPreTrainedModel, GoCoderRefinementMixin, GoCoderGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    accepts_loss_kwargs = False  # its parts have different denominators: one number of items cannot normalize them

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__(config)
        self.model = HrmGoCoderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.refinement_scale = 1.0
        # Not quantized either: what a quantizer leaves out is matched from the beginning of its name.
        self._keep_in_fp32_modules = [f"model.{name}" for name in self.model._keep_in_fp32_modules]
        self.post_init()

    def set_refinement_scale(self, scale: float) -> None:
        """Factor of the refinement loss beside its weight, for a warm-up."""
        self.refinement_scale = scale

    @staticmethod
    def parameter_group(name: str) -> str:
        """ "planner", "generator", "refinement" or "shared": what the parameter of this full name belongs to."""
        for group, parts in {
            "planner": ("planner.",),
            "generator": ("generator.",),
            "refinement": ("refinement_head.", "feedback_encoder."),
        }.items():
            if any(f".{part}" in f".{name}" for part in parts):
                return group
        return "shared"

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
        decision_positions: torch.LongTensor | None = None,
        feedback_ids: torch.LongTensor | None = None,
        planner_only: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HrmGoCoderOutput:
        r"""
        Args:
            labels: [B, S], compared with the logits one position earlier; -100 is not learned. A target counts to the
                refinement loss if it is a decision token, else to the code or plan loss by the stack that predicts it.
            decision_positions: [B, K], where attempts end (</CODE>), for the refinement head; needs `input_ids`.
            feedback_ids: [B, K, 4], see `Feedback.token_ids`; without, nobody validated.
            planner_only: all logits are the planner's, and the generator is not run: for writing plans, with a cache
                that nothing else uses.
            kwargs: `shift_labels` [B, S], labels that are shifted already, instead of `labels`; `decision_labels`
                [B, K], 0 CONTINUE, 1 REFINE, 2 DONE, -100 for none.

        Raises:
            ValueError: in training, decisions without their labels; `planner_only` with labels or decisions.
        """
        # No arguments of their own: a Trainer would ask for them, and give no loss without.
        decision_labels, targets = kwargs.pop("decision_labels", None), kwargs.pop("shift_labels", None)
        validate_call(self, kwargs)
        if self.training and decision_positions is not None and decision_labels is None:
            raise ValueError(
                "decision_positions without decision_labels: the refinement head would learn nothing. A Trainer drops "
                "columns that forward does not name: set remove_unused_columns=False"
            )
        if planner_only and not (targets is labels is decision_positions is None):
            raise ValueError("planner_only=True is for writing plans; labels and decisions need the generator, too")
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        outputs: HrmGoCoderModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            decision_positions=decision_positions,
            feedback_ids=feedback_ids,
            planner_only=planner_only,
            **kwargs,
        )
        states, logits, losses = outputs.last_hidden_state, None, {}
        # A sharded head can be used as a whole module alone, which makes logits.
        head = self.lm_head.weight  # sharded by DeepSpeed it is empty, by FSDP a DTensor
        fused = self.training and targets is not None and type(head) is nn.Parameter and head.numel() > 0
        if not fused:
            logits = self.lm_head(slice_logits_to_keep(states, logits_to_keep))
        if targets is not None:
            losses = self._losses(states, logits, targets, outputs, decision_labels)
        return HrmGoCoderOutput(
            **losses,
            logits=logits,
            refinement_logits=outputs.refinement_logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            planner_states=outputs.planner_states,
            generator_states=outputs.generator_states,
        )

    def _losses(self, states, logits, targets, outputs, decision_labels) -> dict[str, Any]:
        config = self.config
        learned = targets != IGNORED
        targets, code = targets[learned], outputs.phases[learned]
        decides = torch.zeros_like(code)
        if config.tagged:
            decides = _within(targets, DECISION_TOKENS)
        members = torch.stack([~code & ~decides, code & ~decides, decides])
        counts = members.sum(dim=1)
        head_loss, decisions = self._head_loss(outputs.refinement_logits, decision_labels, counts)
        # The decision is learned twice, by the head and as a token: each half, or the one that is there whole.
        halves = ((counts[2] > 0).float() + (decisions > 0).float()).clamp(min=1)
        refinement = config.refinement_loss_weight * self.refinement_scale
        factors = counts.new_tensor([config.plan_loss_weight, config.code_loss_weight, refinement], dtype=torch.float)
        factors[2] /= halves
        weights = (members * (factors / counts.clamp(min=1)).unsqueeze(1)).sum(dim=0)
        if logits is None:
            total, losses = linear_cross_entropy(states[learned], self.lm_head.weight, targets, weights)
        else:
            losses = nn.functional.cross_entropy(logits[learned].float(), targets, reduction="none")
            total = (losses * weights).sum()
        plan_loss, code_loss, token_loss = (members * losses.detach()).sum(dim=1) / counts.clamp(min=1)
        return {
            "loss": total + refinement * head_loss / halves,
            "plan_loss": plan_loss,
            "code_loss": code_loss,
            "refinement_loss": (token_loss + head_loss.detach()) / halves,
            "metrics": {"plan_tokens": counts[0], "code_tokens": counts[1], "decisions": counts[2].maximum(decisions)},
        }

    def _head_loss(self, logits, labels, counts) -> tuple[torch.Tensor, torch.Tensor]:
        """Class-weighted cross-entropy of the refinement head, and over how many decisions it is a mean."""
        head, nothing = self.model.refinement_head, counts.new_zeros(())
        if head is None:
            return nothing.float(), nothing
        if logits is None or labels is None:
            # With a graph to every weight, for processes that wait for each other's gradients.
            unused = [*head.parameters(), *self.model.feedback_encoder.parameters()] if torch.is_grad_enabled() else []
            return sum((p.sum() for p in unused), nothing.float()) * 0.0, nothing
        weight = logits.new_tensor(self.config.refinement_class_weights, dtype=torch.float)
        flat = labels.flatten()
        known = flat != IGNORED
        total = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), flat, weight, ignore_index=IGNORED, reduction="sum"
        )
        return total / weight[flat.clamp(min=0)].mul(known).sum().clamp(min=1e-9), known.sum()


class OneStackMixin(OwnModelMixin):
    """For classifiers: which of two stacks speaks for a token is said by tags, and texts to be labelled have none."""

    _model_class = HrmGoCoderModel

    def __init__(self, config: HrmGoCoderConfig):
        if not config.unified:
            raise ValueError(
                "unified=False: a Go coder of two stacks has no classifier; use a unified one (preset 'unified': "
                "unified=True, generator_layers=0)"
            )
        super().__init__(config)


class HrmGoCoderForSequenceClassification(OneStackMixin, GenericForSequenceClassification, HrmGoCoderPreTrainedModel):
    """`logits` [B, num_labels] of the last token that is no padding: a classifier, or a reward model."""


class HrmGoCoderForTokenClassification(OneStackMixin, GenericForTokenClassification, HrmGoCoderPreTrainedModel):
    """`logits` [B, T, num_labels] of every token."""


__all__ = [
    "HrmGoCoderForCausalLM",
    "HrmGoCoderForSequenceClassification",
    "HrmGoCoderForTokenClassification",
    "HrmGoCoderModel",
    "HrmGoCoderPreTrainedModel",
]
