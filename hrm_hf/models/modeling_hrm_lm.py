"""`hrm_lm`: the Hierarchical Reasoning Model as a causal language model with adaptive computation per token.

Two stacks of transformer blocks are applied over and over. In a segment

    repeat H_cycles times:
        repeat L_cycles times:  z_L = L(z_L + z_H + x)
        z_H = H(z_H + z_L)

with x the token embeddings, z_H = x and z_L a fixed random vector at the start. A flat loop has one stack:

    repeat L_cycles times:  z = L(z + x)

Blocks of their own may come before it (the prelude, which makes x of the embeddings) and behind it (the coda, which
reads the state that is left); passes may have vectors and gains of their own, and the state may be several streams
that hyper-connections mix between passes. After segment m = 1..M every token has
logits head(z_H) and two values (halt, continue) from its own state; a token that halts keeps z_H, z_L and its keys and
values, in training as in decoding, and later tokens read those. Trained by a loss at every segment (deep supervision),
with gradients through the last stack passes of a segment only.

Attention functions, rotary positions and the feed-forward network are transformers'. What differs from Llama: keys and
values go to the slot of this visit (`recurrent_cache.py`), attention has a sigmoid gate, RMS norms have no gain, and a
stack ends in a norm.

Sources: Wang et al. 2025, "Hierarchical Reasoning Model", arXiv 2506.21734 (recurrence, ACT); Sapient's HRM-Text
(pre-norm stacks with one exit norm, gated attention, truncated gradients); Geiping et al. 2025, arXiv 2502.05171
(prelude, loop and coda, sandwich norms, number of passes drawn at random, gradients through the last ones); Xie et al.
2026, arXiv 2512.24880 (hyper-connections). Different from the 50M/100M models whose
guide this architecture serves: attention is causal, halting works, is per token and so independent of later tokens
and of other rows, labels are shifted once, one tied head serves all segments, and the loss of the halting values does
not bend the language model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.processing_utils import Unpack
from transformers.utils import can_return_tuple
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .act import exploration_min_steps
from .configuration_hrm_lm import HrmLmConfig
from .early_exit import DrawnExit, FixedExit, SegmentState, exit_class, segment_losses
from .hyper_connections import HyperConnection
from .modeling_utils import CheckpointCodeMixin, OwnModelMixin, validate_call
from .recurrent_cache import OnceCache, RecurrentCache, VisitedLayersMixin, skip_halted


Q_INIT_BIAS = -5.0  # of the halting value, far from a decision (HRM paper)
# Times the mean number of segments, where their number is drawn: one draw must not fill the memory. Of as many tokens
# as a batch has, one always draws the most.
MOST_SAMPLED, MOST_SAMPLED_PER_TOKEN = 4, 2


@dataclass
class HrmLmModelOutput(BaseModelOutputWithPast):
    """Output of `HrmLmModel`. `last_hidden_state` [B, T, D] is each token's state at its halting segment.

    Attributes:
        q_logits: [B, T, m, 2] halting and continuing values after each segment that ran; None for M = 1.
        halt_steps: int [B, T], segments each token took.
        segment_hidden_states: tuple of [B, T, D] after each segment that ran, frozen once halted; on request.
    """

    q_logits: torch.Tensor | None = None
    halt_steps: torch.Tensor | None = None
    segment_hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class HrmLmCausalLMOutput(CausalLMOutputWithPast):
    """Output of `HrmLmForCausalLM`.

    Attributes:
        loss: weighted sum of the terms below. All are in nats and 0-d.
        lm_loss: cross entropy at each token's halting segment, without label smoothing.
        deep_supervision_loss, q_halt_loss, q_continue_loss, ponder_loss: see `early_exit`.
        logits: [B, T, V] at each token's halting segment.
        q_logits: [B, T, m, 2]; halt_steps: int [B, T]; segment_logits: [B, m, T, V], on request. m segments ran.
        metrics: 0-d tensors: avg_steps, convergence_rate, token_accuracy, perplexity, ...
    """

    lm_loss: torch.Tensor | None = None
    deep_supervision_loss: torch.Tensor | None = None
    q_halt_loss: torch.Tensor | None = None
    q_continue_loss: torch.Tensor | None = None
    ponder_loss: torch.Tensor | None = None
    q_logits: torch.Tensor | None = None
    halt_steps: torch.Tensor | None = None
    segment_logits: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] | None = None


def _rms_norm(config: HrmLmConfig, width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=config.rms_norm_eps, elementwise_affine=config.norm_affine)


class HrmLmAttention(nn.Module):
    """Causal attention with rotary positions, grouped keys, and optionally a sigmoid gate and normalized queries."""

    def __init__(self, config: HrmLmConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False) if config.attention_gate else None
        self.q_norm = _rms_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = _rms_norm(config, self.head_dim) if config.qk_norm else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        key_values: RecurrentCache,
        first_visit: int,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [B, T, D]; `first_visit` is the visit number of the first layer of this stack pass."""
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        query, key = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        key, value = key_values.update(key, value, first_visit + self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        mixed = mixed.reshape(*input_shape, -1)
        if self.gate_proj is not None:
            mixed = mixed * torch.sigmoid(self.gate_proj(hidden_states))
        return self.o_proj(mixed), weights


class HrmLmDecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, normalized before each branch ("pre_exit"), behind it, too ("sandwich"), or after each sum
    ("post")."""

    def __init__(self, config: HrmLmConfig, layer_idx: int):
        super().__init__()
        self.post_norm = config.norm_position == "post"
        self.self_attn = HrmLmAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = _rms_norm(config, config.hidden_size)
        self.post_attention_layernorm = _rms_norm(config, config.hidden_size)
        self.branch_norms = None
        if config.norm_position == "sandwich":
            self.branch_norms = nn.ModuleList(_rms_norm(config, config.hidden_size) for _ in range(2))
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, hidden_states: torch.Tensor, gains: torch.Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]. gains: [2], what is added to the factors 1 of both branches in this pass."""
        if self.post_norm:
            mixed, _ = self.self_attn(hidden_states, **kwargs)
            hidden_states = self.input_layernorm(hidden_states + self._branch(mixed, 0, gains))
            mixed = self.mlp(hidden_states)
            return self.post_attention_layernorm(hidden_states + self._branch(mixed, 1, gains))
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self._branch(mixed, 0, gains)
        mixed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self._branch(mixed, 1, gains)

    def _branch(self, output: torch.Tensor, branch: int, gains: torch.Tensor | None) -> torch.Tensor:
        """A branch's output [B, T, D] as it is added to the residual stream."""
        if self.branch_norms is not None:
            output = self.branch_norms[branch](output)
        if gains is not None:
            output = output * (1 + gains[branch])
        return self.dropout(output)


class HrmLmStack(nn.Module):
    """Blocks that are passed through one after another. The exit norm bounds a state that comes back many times.

    Args:
        num_passes: passes with parameters of their own: vectors that are added to what a pass reads, and gains of its
            branches, as the config says. 0 for a stack that is passed through once.
    """

    def __init__(self, config: HrmLmConfig, num_layers: int, num_passes: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(HrmLmDecoderLayer(config, index) for index in range(num_layers))
        self.exit_norm = nn.Identity() if config.norm_position == "post" else _rms_norm(config, config.hidden_size)
        self.num_passes = num_passes
        self.step_vectors, self.pass_gains = None, None
        if config.step_vectors and num_passes:
            self.step_vectors = nn.Parameter(torch.zeros(num_passes, config.hidden_size))
        if config.pass_gains and num_passes:
            self.pass_gains = nn.Parameter(torch.zeros(num_passes, num_layers, 2))

    def forward(
        self, hidden_states: torch.Tensor, pass_number: int = 0, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D], in a pass counted from 0 over all segments."""
        pass_number = min(pass_number, self.num_passes - 1)  # more passes than in training: as the last one
        if self.step_vectors is not None:
            hidden_states = hidden_states + self.step_vectors[pass_number]
        if self.layers[0].gradient_checkpointing and torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states.requires_grad_()  # a reentrant checkpoint gives no gradients where no input needs one
        gains = [None] * len(self.layers) if self.pass_gains is None else self.pass_gains[pass_number]
        for layer, layer_gains in zip(self.layers, gains):
            hidden_states = layer(hidden_states, layer_gains, **kwargs)
        return self.exit_norm(hidden_states)


class HrmLmQHead(nn.Linear):
    """Halting and continuing value of a token; a class of its own because of where it starts: at zero weights, and at
    biases whose difference says `initial_halt_prob`.

    In float32 at least: the values differ by less than bfloat16 resolves.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, 2]."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class HrmLmPreTrainedModel(CheckpointCodeMixin, VisitedLayersMixin, PreTrainedModel):
    """Initialization and capabilities of `hrm_lm`."""

    config: HrmLmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HrmLmDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "key_values", "logits_fn"]
    # A vector beside the stacks: transformers 5.23 forgets it when it divides a model, and it follows the states.
    _no_placement_params = {"model.z_L_init", "z_L_init"}
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HrmLmDecoderLayer, "attentions": HrmLmAttention}

    def post_init(self) -> None:
        super().post_init()
        config = self.config
        if config.halt_max_steps == 1:
            self._keep_in_fp32_modules = set()  # there is no gate
        # Nor do plans of how to divide a model name stacks that it lacks.
        stacks = {"H_module": not config.flat_loop, "prelude": config.prelude_layers, "coda": config.coda_layers}
        absent = [f"{stack}.layers" for stack, layers in stacks.items() if not layers]
        for name in ("_tp_plan", "_fsdp_plan"):
            plan = getattr(self, name)
            setattr(self, name, {key: rule for key, rule in plan.items() if not any(each in key for each in absent)})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        fixed_std = self.config.initializer_range
        if isinstance(module, HrmLmQHead):
            init.zeros_(module.weight)
            go_on = Q_INIT_BIAS - math.log(self.config.initial_halt_prob / (1 - self.config.initial_halt_prob))
            init.copy_(module.bias, torch.tensor([Q_INIT_BIAS, go_on]))
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5 if fixed_std is None else fixed_std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5 if fixed_std is None else fixed_std)
        elif isinstance(module, HyperConnection):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)
        elif isinstance(module, HrmLmStack):
            for parameter in (module.step_vectors, module.pass_gains):
                if parameter is not None:
                    init.zeros_(parameter)
        else:
            super()._init_weights(module)
        if isinstance(module, HrmLmModel) and module.z_L_init is not None:
            init.normal_(module.z_L_init)


class HrmLmModel(HrmLmPreTrainedModel):
    """The recurrence and the halting decisions, without the language-model head."""

    _keep_in_fp32_modules = ["q_head"]  # nor is it quantized

    def __init__(self, config: HrmLmConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        cycles = config.halt_max_steps * config.H_cycles
        self.prelude = HrmLmStack(config, config.prelude_layers) if config.prelude_layers else None
        self.H_module = None if config.flat_loop else HrmLmStack(config, config.num_h_layers, cycles)
        self.L_module = HrmLmStack(config, config.num_l_layers, cycles * config.L_cycles)
        self.coda = HrmLmStack(config, config.coda_layers) if config.coda_layers else None
        self.connection, self.state_norm = None, None
        if config.mhc_flows > 1:
            self.connection = HyperConnection(config.hidden_size, config.mhc_flows, norm_eps=config.rms_norm_eps)
            self.state_norm = _rms_norm(config, config.hidden_size)
        self.q_head = HrmLmQHead(config.hidden_size, 2) if config.halt_max_steps > 1 else None
        start = None if config.initial_state == "zero" else torch.zeros(config.hidden_size)  # sampled by _init_weights
        if config.initial_state == "learned":
            self.z_L_init = nn.Parameter(start)
        else:
            self.register_buffer("z_L_init", start)
        self.bp_steps = config.bp_steps  # may be lower for a while, see set_bp_steps
        self.halts_in_training = True  # may be off for a while, see set_halting
        self.training_segments: int | None = None  # may be few for a while, see set_training_segments
        self.gate_only = False  # see train_gate_only
        self.skips_halted = False  # see set_skipping
        self.compiled_segment: Callable | None = None  # of any such model, see compile_segment
        self.post_init()

    def set_bp_steps(self, bp_steps: int) -> None:
        """How many stack passes of a segment carry gradients from now on; the config keeps the final number."""
        fewest, most = self.config.fewest_bp_steps, self.config.stack_passes
        if not fewest <= bp_steps <= most:
            raise ValueError(f"bp_steps={bp_steps} is outside {fewest}..{most}")
        self.bp_steps = bp_steps

    def set_halting(self, on: bool) -> None:
        """Whether tokens may halt in training; if not, each gets all segments. Inference is not affected.

        Halting from the first step trains later segments on few tokens, before they are any better than the first;
        the halting values are trained either way.
        """
        self.halts_in_training = on

    def set_training_segments(self, segments: int | None) -> None:
        """Segments of each token in training from now on; None for what the config says. Inference is not affected."""
        if segments is not None and segments < 1:
            raise ValueError(f"segments={segments} must be at least 1, or None for those of the config")
        self.training_segments = segments

    def train_gate_only(self) -> None:
        """Freezes everything but the halting gate, which then learns from all segments of a finished model.

        In inference the gate decides from then on (exit_criterion="q", unless the config names a learned one).

        Raises ValueError for a model without a gate (halt_max_steps=1).
        """
        if self.q_head is None:
            raise ValueError("halt_max_steps=1: a model of one segment has no halting gate to train")
        self.requires_grad_(False)
        self.q_head.requires_grad_(True)
        self.gate_only = True
        if not exit_class(self.config.exit_criterion).learned:
            self.config.exit_criterion = "q"
        self.set_halting(False)
        self.set_training_segments(self.config.halt_max_steps)

    def set_skipping(self, on: bool) -> None:
        """Whether inference leaves out positions at which every row has halted, see `recurrent_cache.skip_halted`.

        Equal up to rounding, and faster for long prompts of which few tokens think long; recorded hidden states and
        attentions are then those of the tokens that ran.
        """
        self.skips_halted = on

    def compile_segment(self, **kwargs: Any) -> None:
        """Compiles what training repeats, a segment, once for all of them; `kwargs` are those of `torch.compile`.

        A graph of the whole forward has every segment in it, so that each number of segments that is drawn is compiled
        anew, and each takes several times as long. Inference stays uncompiled.
        """
        self.compiled_segment = torch.compile(HrmLmModel.segment, **kwargs)  # not bound: a copy runs its own weights

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
        num_segments: int | None = None,
        exit_criterion=None,
        exit_threshold: float | None = None,
        logits_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        output_segment_hidden_states: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HrmLmModelOutput:
        """Thinks about T new tokens, given the past ones in `past_key_values`.

        Args:
            input_ids: [B, T], or inputs_embeds: [B, T, D], not yet scaled.
            attention_mask: [B, past + T], 0 for padding; or any mask transformers takes.
            num_segments: most segments of this call; the config's halt_max_steps by default, or in training what
                its segment_sampling draws.
            exit_criterion: a name in `EXIT_CRITERIA`, or an object with `check`; the config's by default.
                Criteria that need no training act in inference only; training then runs every segment.
            exit_threshold: of the criterion.
            logits_fn: hidden states to logits, for the criteria that look at distributions.
        """
        validate_call(self, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        config = self.config
        x = inputs_embeds * config.embedding_scale
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        drawn = None
        if num_segments is None:
            drawn = self._drawn_segments(x) if self.training else None
            num_segments = self._most_segments() if drawn is None else int(drawn.max())
        self._validate_num_segments(num_segments, past_key_values)
        per_token = drawn is not None and drawn.dim() > 0
        exit_rule = DrawnExit(drawn) if per_token else self._exit_rule(exit_criterion, exit_threshold, logits_fn)

        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        passes = {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            ),
            "position_embeddings": self.rotary_emb(x, position_ids),
            "position_ids": position_ids,
            **kwargs,
        }

        if self.prelude is not None:
            x = self.prelude(x, key_values=OnceCache(past_key_values, 0), first_visit=0, **passes)
        state = self.initial_state(x)
        read = self.read(state)
        hidden, key_values, q_logits, states = x, None, [], []
        halt_steps = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        active = _real_tokens(attention_mask, x)
        min_steps = config.halt_min_steps if per_token else self._min_steps(halt_steps)
        segment = self.segment
        if self.training and past_key_values is None and self.compiled_segment is not None:
            segment = partial(self.compiled_segment, self)
        # What is held for later segments is written from within a segment: a checkpoint in it would not be compiled.
        alone = past_key_values is None and isinstance(exit_rule, FixedExit) and _all(active)
        held_for = 0 if alone else max(num_segments, config.halt_max_steps)
        gradients = torch.is_grad_enabled()
        without_gradients = 0 if config.bp_segments is None else num_segments - config.bp_segments
        for m in range(1, num_segments + 1):
            thinking = None if m == 1 or _all(active) else active
            key_values = RecurrentCache(config, past_key_values, thinking, key_values, held_for)
            with torch.set_grad_enabled(gradients and m > without_gradients):
                new = segment(state, x, key_values=key_values, **passes)
            halt_steps = halt_steps + active
            # `hidden` keeps the graph of the segment a token halted in; the states passed on are cut from it.
            new_read, previous = self.read(new), read
            hidden, read = _take(thinking, new_read, hidden), _take(thinking, new_read, read)
            state = tuple(_take(thinking, *pair) for pair in zip(new, state))
            if output_segment_hidden_states:
                states.append(hidden)
            if self.q_head is not None:
                q_logits.append(self.q_head(hidden.detach()))
            if m == num_segments:
                break
            after = SegmentState(read, previous if m > 1 else None, q_logits[-1] if q_logits else None, logits_fn)
            with torch.no_grad():
                active = active & ~(exit_rule.check(after) & (min_steps <= m))
            if not torch.compiler.is_compiling() and not active.any():
                break
            if config.detach_between_segments:
                state, read = tuple(z.detach() for z in state), read.detach()
        key_values.copy_to_later_segments()
        if self.coda is not None:
            coda_values = OnceCache(past_key_values, config.num_hidden_layers - config.coda_layers)
            last = states.pop() if states else hidden
            # The last one comes last: what it leaves in the cache is what later tokens read.
            behind = [self.coda(z, key_values=coda_values, first_visit=0, **passes) for z in (*states, last)]
            hidden, states = behind[-1], behind if output_segment_hidden_states else []
        return HrmLmModelOutput(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            q_logits=torch.stack(q_logits, dim=2) if q_logits else None,
            halt_steps=halt_steps.clamp(min=1),
            segment_hidden_states=tuple(states) or None,
        )

    def initial_state(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The state before the first pass: (z_H, z_L) [B, T, D], or (z,) of a flat loop, also streams [B, T, n, D]."""
        if self.config.initial_state == "random" and self.training:
            start = torch.randn_like(x)
        else:
            start = torch.zeros_like(x) if self.z_L_init is None else self.z_L_init.to(x).expand_as(x)
        if not self.config.flat_loop:
            return x, start
        if self.connection is not None:
            start = start.unsqueeze(-2).expand(-1, -1, self.config.mhc_flows, -1)
        return (start,)

    def read(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[B, T, D], what the head (or the coda) is given of a state."""
        return state[0] if self.connection is None else self.state_norm(state[0].mean(dim=-2))

    @skip_halted
    def segment(
        self, state: tuple[torch.Tensor, ...], x: torch.Tensor, key_values: RecurrentCache, **passes
    ) -> tuple[torch.Tensor, ...]:
        """The state after one more segment: its stack passes, of which the last ones carry gradients."""
        passes = {"key_values": key_values, **passes}
        return self._loop(*state, x, **passes) if self.config.flat_loop else self._cycles(*state, x, **passes)

    def _loop(self, z: torch.Tensor, x: torch.Tensor, **passes) -> tuple[torch.Tensor]:
        """L_cycles passes through the one stack of a flat loop."""
        config, gradients = self.config, torch.is_grad_enabled()
        before = passes["key_values"].segment * config.L_cycles
        for low in range(config.L_cycles):
            first_visit = low * config.num_l_layers
            with torch.set_grad_enabled(gradients and low >= config.L_cycles - self.bp_steps):
                if self.connection is None:
                    z = self.L_module(z + x, before + low, first_visit=first_visit, **passes)
                else:
                    read, post, h_res = self.connection(z)
                    read = self.L_module(self.state_norm(read) + x, before + low, first_visit=first_visit, **passes)
                    z = self.connection.merge(z, read, post, h_res)
        return (z,)

    def _cycles(
        self, z_H: torch.Tensor, z_L: torch.Tensor, x: torch.Tensor, **passes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """H_cycles * (L_cycles + 1) passes through two stacks."""
        config, gradients = self.config, torch.is_grad_enabled()
        before = passes["key_values"].segment * config.H_cycles
        h_passes = min(config.H_cycles, self.bp_steps - 1)  # the high-level stack first, then the low-level one
        first_h_pass = config.H_cycles - h_passes
        first_l_pass = config.H_cycles * config.L_cycles - (self.bp_steps - h_passes)
        visit = 0
        for h in range(config.H_cycles):
            for low in range(config.L_cycles):
                number = (before + h) * config.L_cycles + low
                with torch.set_grad_enabled(gradients and h * config.L_cycles + low >= first_l_pass):
                    z_L = self.L_module(z_L + z_H + x, number, first_visit=visit, **passes)
                visit += config.num_l_layers
            with torch.set_grad_enabled(gradients and h >= first_h_pass):
                z_H = self.H_module(z_H + z_L, before + h, first_visit=visit, **passes)
            visit += config.num_h_layers
        return z_H, z_L

    def _most_segments(self) -> int:
        """Segments of a forward that draws no number of them."""
        few = self.training_segments if self.training else None
        return few or self.config.halt_max_steps

    def _drawn_segments(self, x: torch.Tensor) -> torch.Tensor | None:
        """Segments as the config's `segment_sampling` draws them, [] or [B, T]; None where it does not.

        Poisson of a log-normal rate, whose mean is one less than halt_max_steps; at least one segment runs.
        """
        config = self.config
        if self.training_segments is not None or config.segment_sampling == "fixed":
            return None
        per_token = config.segment_sampling == "per_token"
        like = torch.ones(x.shape[:2], device=x.device) if per_token else torch.ones(())
        sigma, mean = config.segment_sampling_sigma, config.halt_max_steps - 1
        rate = mean * torch.exp(sigma * torch.randn_like(like) - sigma**2 / 2)
        most = MOST_SAMPLED_PER_TOKEN if per_token else MOST_SAMPLED
        return (1 + torch.poisson(rate).long()).clamp(max=most * config.halt_max_steps)

    def _validate_num_segments(self, num_segments: int, cache: Cache | None) -> None:
        maximum = self.config.halt_max_steps
        if num_segments < 1:
            raise ValueError(f"num_segments={num_segments} must be at least 1")
        if num_segments > maximum and cache is not None and self.config.kv_layout == "per_segment":
            raise ValueError(
                f"num_segments={num_segments} is above halt_max_steps={maximum}, for which the cache has slots; use "
                "kv_layout='last_segment', or use_cache=False"
            )

    def _exit_rule(self, criterion, threshold: float | None, logits_fn: Callable | None):
        config = self.config
        criterion = config.exit_criterion if criterion is None else criterion
        if not isinstance(criterion, str):
            return criterion
        kind = exit_class(criterion)
        no_gate = kind.learned and self.q_head is None
        may_halt = self.halts_in_training and kind.learned and config.segment_sampling == "fixed"
        if no_gate or (self.training and not may_halt):
            kind = FixedExit
        if kind.of_distributions and logits_fn is None:
            raise ValueError(
                f"exit_criterion={criterion!r} compares next-token distributions; call HrmLmForCausalLM, or give "
                "HrmLmModel a logits_fn"
            )
        threshold = config.exit_threshold if threshold is None else threshold
        return kind(threshold, config.halt_margin)

    def _min_steps(self, like: torch.Tensor) -> torch.Tensor | int:
        """Fewest segments of each token [B, T]; in training some tokens must explore further."""
        config = self.config
        if not self.training or config.halt_max_steps == 1:
            return config.halt_min_steps
        sampled = exploration_min_steps(like, config.halt_max_steps, config.halt_exploration_prob)
        return sampled.clamp(min=config.halt_min_steps)


class HrmLmForCausalLM(HrmLmPreTrainedModel, GenerationMixin):
    """`hrm_lm` with its language-model head, the losses of training, and generation."""

    _keep_in_fp32_modules = ["model.q_head"]  # names are matched from their beginning
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: HrmLmConfig):
        super().__init__(config)
        self.model = HrmLmModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def set_bp_steps(self, bp_steps: int) -> None:
        """See `HrmLmModel.set_bp_steps`."""
        self.model.set_bp_steps(bp_steps)

    def set_halting(self, on: bool) -> None:
        """See `HrmLmModel.set_halting`."""
        self.model.set_halting(on)

    def set_training_segments(self, segments: int | None) -> None:
        """See `HrmLmModel.set_training_segments`."""
        self.model.set_training_segments(segments)

    def train_gate_only(self) -> None:
        """See `HrmLmModel.train_gate_only`; the head is frozen, too."""
        self.requires_grad_(False)
        self.model.train_gate_only()

    def set_skipping(self, on: bool) -> None:
        """See `HrmLmModel.set_skipping`."""
        self.model.set_skipping(on)

    def compile_segment(self, **kwargs: Any) -> None:
        """See `HrmLmModel.compile_segment`."""
        self.model.compile_segment(**kwargs)

    @property
    def _learns_from_all_segments(self) -> bool:
        """Whether the losses ask what each segment knows: deep supervision does, and the gate's."""
        config = self.config
        gate = config.q_loss_weight > 0 or config.ponder_loss_weight > 0 or self.model.gate_only
        return config.halt_max_steps > 1 and (config.deep_supervision == "all" or gate)

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
        num_segments: int | None = None,
        exit_criterion=None,
        exit_threshold: float | None = None,
        output_segment_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HrmLmCausalLMOutput:
        """Next-token logits at each token's halting segment, and the losses if there are labels.

        Args:
            labels: [B, T] aligned with input_ids (shifted here, once); -100 is ignored.
            num_items_in_batch: what sums over tokens are divided by; the labelled tokens of this call by default.
            kwargs: `shift_labels` [B, T], labels that are shifted already, instead of `labels`.
            Others: see `HrmLmModel.forward`.
        """
        validate_call(self, kwargs)
        shift_labels = kwargs.pop("shift_labels", None)  # no argument of its own: a trainer would ask for it
        with_loss = labels is not None or shift_labels is not None
        if use_cache is None and with_loss:
            use_cache = False  # M times the visits of every layer would be kept for nothing
        outputs: HrmLmModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_segments=num_segments,
            exit_criterion=exit_criterion,
            exit_threshold=exit_threshold,
            logits_fn=lambda h: self.lm_head(h),  # a module among the arguments would be moved by accelerate's hooks
            output_segment_hidden_states=output_segment_logits or (with_loss and self._learns_from_all_segments),
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        states = outputs.segment_hidden_states or (outputs.last_hidden_state,)
        terms = {}
        if with_loss:
            if shift_labels is None:
                shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
            whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
            terms = segment_losses(
                self.config,
                self.lm_head,
                states=states,
                last_hidden=outputs.last_hidden_state,
                last_logits=logits if whole else None,
                q_logits=outputs.q_logits if self._learns_from_all_segments else None,
                halt_steps=outputs.halt_steps,
                targets=shift_labels.to(logits.device),
                num_items=num_items_in_batch,
                training=self.training,
                gate_only=self.model.gate_only,
            )
        return HrmLmCausalLMOutput(
            **terms,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            q_logits=outputs.q_logits,
            halt_steps=outputs.halt_steps,
            segment_logits=torch.stack([self.lm_head(h) for h in states], dim=1) if output_segment_logits else None,
        )


def _take(active: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` where a token is active, bool [B, T], `old` elsewhere; both [B, T, ...]. None: all are."""
    return new if active is None else torch.where(active.view(*active.shape, *[1] * (new.dim() - 2)), new, old)


def _all(active: torch.Tensor) -> bool:
    """Whether every token still thinks; not asked under torch.compile, where the answer would break the graph."""
    return not torch.compiler.is_compiling() and bool(active.all())


def _real_tokens(attention_mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: the new tokens that are no padding, as far as a 2-d mask says."""
    if attention_mask is not None and attention_mask.dim() == 2:
        return attention_mask[:, -x.shape[1] :].bool()
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


class HrmLmForSequenceClassification(OwnModelMixin, GenericForSequenceClassification, HrmLmPreTrainedModel):
    """`logits` [B, num_labels] of the last token that is no padding, where it halts: for classes or rewards."""

    _model_class = HrmLmModel
    _keep_in_fp32_modules = ["model.q_head"]


class HrmLmForTokenClassification(OwnModelMixin, GenericForTokenClassification, HrmLmPreTrainedModel):
    """`logits` [B, T, num_labels] of every token, where it halts."""

    _model_class = HrmLmModel
    _keep_in_fp32_modules = ["model.q_head"]


__all__ = ["HrmLmForCausalLM", "HrmLmForSequenceClassification", "HrmLmForTokenClassification", "HrmLmModel"]
