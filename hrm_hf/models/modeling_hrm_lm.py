"""`hrm_lm`: the Hierarchical Reasoning Model as a causal language model with per-token halting.

Two stacks of transformer blocks are applied repeatedly. A segment is

    repeat H_cycles times:
        repeat L_cycles times:  z_L = L(z_L + z_H + x)
        z_H = H(z_H + z_L)

where x are the token embeddings; at the start, z_H = x and z_L is a fixed random vector. A flat loop has one stack:

    repeat L_cycles times:  z = L(z + x)

Additional blocks can run before the loop (the prelude, which computes x from the embeddings) and after it (the coda,
which reads the last state). Passes can have their own vectors and gains, and hyper-connections can mix several streams
between passes. After each segment m = 1..M, every token has logits head(z_H) and two values (halt, continue) computed
from its own state. A token that halts keeps its z_H, z_L, keys and values, both in training and in decoding, and later
tokens read them. In training, every segment has a loss (deep supervision), and gradients only flow through the last
stack passes of a segment.

Attention functions, rotary positions and the feed-forward network come from transformers. Unlike in Llama, keys and
values go to the cache slot of the current visit (`recurrent_cache.py`), attention has a sigmoid gate, RMS norms have
no gain, and a stack ends with a norm.

Sources: Wang et al. 2025, "Hierarchical Reasoning Model", arXiv 2506.21734 (recurrence, ACT); Sapient's HRM-Text
(pre-norm stacks with one exit norm, gated attention, truncated gradients); Geiping et al. 2025, arXiv 2502.05171
(prelude, loop and coda, sandwich norms, random number of passes, gradients through the last passes); Xie et al. 2026,
arXiv 2512.24880 (hyper-connections). Unlike in the 50M/100M models of the training guide, attention is causal, halting
works and is decided per token independently of later tokens and other rows, labels are shifted once, all segments
share one tied head, and the halting loss does not backpropagate into the language model.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import can_return_tuple
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hrm_lm import HrmLmConfig
from .early_exit import segment_losses
from .hrm_lm_layers import (
    LEARNED,
    HrmLmAttention,
    HrmLmDecoderLayer,
    HrmLmQHead,
    HrmLmStack,
    LoopInput,
    PassLinear,
    rms_norm,
)
from .hyper_connections import HyperConnection
from .modeling_utils import (
    CheckpointCodeMixin,
    OwnModelMixin,
    PromptsMixin,
    validate_call,
    validate_labels,
)
from .recurrent_cache import OnceCache, RecurrentCache, first_slots
from .retrofit_hrm_lm import RetrofitMixin
from .segment_plan import SegmentPlan, SegmentSchedule, ThinkingTokens, plan_segments
from .visited_attention import VisitedLayersMixin, rotary_tables


Q_INIT_BIAS = -5.0  # initial bias of the halting value, far below the threshold (HRM paper)
# Keyword arguments that HrmLmModel passes on to `plan_segments`, and fields that the two output classes share.
PLAN_ARGUMENTS = ("schedule", "num_segments", "exit_criterion", "exit_threshold", "logits_fn")
COMMON = ("past_key_values", "hidden_states", "attentions", "q_logits", "halt_steps")


@dataclass
class HrmLmModelOutput(BaseModelOutputWithPast):
    """Output of `HrmLmModel`. `last_hidden_state` [B, T, D] is taken at each token's halting segment.

    Attributes:
        q_logits: [B, T, m, 2], halt and continue values after each of the m segments that ran; None if M = 1.
        halt_steps: int [B, T], number of segments of each token.
        segment_hidden_states: m tensors [B, T, D], if requested; the state of a token stays constant once it halts.
    """

    q_logits: torch.Tensor | None = None
    halt_steps: torch.Tensor | None = None
    segment_hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class HrmLmCausalLMOutput(CausalLMOutputWithPast):
    """Output of `HrmLmForCausalLM`.

    Attributes:
        loss: weighted sum of the terms below in training, `lm_loss` in evaluation. All are 0-d and in nats.
        lm_loss: cross entropy at each token's halting segment, without label smoothing.
        deep_supervision_loss, q_halt_loss, q_continue_loss, ponder_loss: see `early_exit`.
        logits: [B, T, V] at each token's halting segment.
        q_logits, halt_steps: as in `HrmLmModelOutput`. segment_logits: [B, m, T, V], if requested.
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


class HrmLmPreTrainedModel(CheckpointCodeMixin, VisitedLayersMixin, PreTrainedModel):
    """Base class with the initialization and capabilities of `hrm_lm`."""

    config: HrmLmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HrmLmDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "key_values", "plan", "logits_fn"]
    # transformers 5.23 does not place this vector when it splits a model across devices; `to` moves it later.
    _no_placement_params = {"model.z_L_init", "z_L_init"}
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HrmLmDecoderLayer, "attentions": HrmLmAttention}

    def post_init(self) -> None:
        super().post_init()
        config = self.config
        if config.halt_max_steps == 1:
            self._keep_in_fp32_modules = set()  # without a gate, no module needs float32
        # The plans for tensor parallelism and FSDP must not name stacks that this model lacks.
        stacks = {"H_module": not config.flat_loop, "prelude": config.prelude_layers, "coda": config.coda_layers}
        absent = [f"{stack}.layers" for stack, layers in stacks.items() if not layers]
        for name in ("_tp_plan", "_fsdp_plan"):
            plan = getattr(self, name)
            setattr(self, name, {key: rule for key, rule in plan.items() if not any(each in key for each in absent)})

    def serving_problem(
        self,
        engine: str,
        may_skip: bool,
        num_segments: int | None = None,
        exit_criterion: Any = None,
        exit_threshold: float | None = None,
    ) -> str | None:
        """Return the reason why an engine with its own cache cannot match `generate`, or None if it can."""
        config, most = self.config, self.config.halt_max_steps
        segments = most if num_segments is None else num_segments
        visits = config.prelude_layers + config.coda_layers + config.segment_visits * most
        if config.num_hidden_layers < visits:
            return f"kv_layout={config.kv_layout!r}: {engine} cannot overwrite cache slots; use 'per_segment'"
        if not 1 <= segments <= most:
            return f"num_segments={segments}: must be in [1, {most}], because the cache has slots for {most} segments"
        if may_skip or most == 1:
            return None
        if segments < most:
            return f"num_segments={segments}: {engine} must run all {most} segments; remove it"
        exit_criterion = config.exit_criterion if exit_criterion is None else exit_criterion
        if exit_criterion != "fixed":
            return f"exit_criterion={exit_criterion!r}: {engine} must run all segments; set exit_criterion='fixed'"
        return None

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
            if isinstance(module, PassLinear):
                init.uniform_(module.lora_A, -(module.in_features**-0.5), module.in_features**-0.5)
                init.zeros_(module.lora_B)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5 if fixed_std is None else fixed_std)
        elif isinstance(module, HyperConnection):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)
        elif isinstance(module, HrmLmStack):
            for parameter in (module.step_vectors, module.pass_gains):
                if parameter is not None:
                    init.zeros_(parameter)
        elif isinstance(module, LoopInput):
            if module.kind in LEARNED:
                init.copy_(getattr(module, module.kind), module.initial_values(self.config.hidden_size)[module.kind])
            if module.damping is not None:
                init.constant_(module.damping, 0.5)
        else:
            super()._init_weights(module)
        if isinstance(module, HrmLmModel) and module.z_L_init is not None:
            init.normal_(module.z_L_init)


class HrmLmModel(HrmLmPreTrainedModel):
    """Base model with the recurrence and halting decisions, but without the language modeling head.

    Arguments of `forward` for T new tokens that follow the past tokens in `past_key_values`:
        input_ids: [B, T], or inputs_embeds: [B, T, D], not yet scaled.
        attention_mask: [B, past + T], 0 for padding; or any mask that transformers accepts.
        plan: a `SegmentPlan`. By default, `plan_segments` makes one from `num_segments`, `exit_criterion`,
            `exit_threshold`, `logits_fn` and `schedule`.
        output_segment_hidden_states: whether to return the states of every segment.

    Attributes:
        compiled_layer: `torch.compile(run_layer)`, or None. If set, training without a cache runs each layer with it.
            All visits share its graph. Compiling the complete forward would recompile for each number of segments.
    """

    _keep_in_fp32_modules = ["q_head"]  # also prevents quantization
    compiled_layer: Callable | None = None

    def __init__(self, config: HrmLmConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        low, high, coda = first_slots(config)
        inner_norms = config.exit_norms == "every"
        self.prelude, self.H_module, self.coda, self.connection, self.state_norm = None, None, None, None, None
        if config.prelude_layers:
            self.prelude = HrmLmStack(config, config.prelude_layers, [0], exit_norm=inner_norms)
        if not config.flat_loop:
            self.H_module = HrmLmStack(config, config.num_h_layers, high, recurrent=True)
        self.L_module = HrmLmStack(config, config.num_l_layers, low, recurrent=True, exit_norm=inner_norms)
        self.loop_input = LoopInput(config, len(low)) if config.flat_loop else None
        if config.coda_layers:
            self.coda = HrmLmStack(config, config.coda_layers, coda)
        if config.mhc_flows > 1:
            self.connection = HyperConnection(config.hidden_size, config.mhc_flows, norm_eps=config.rms_norm_eps)
        if config.mhc_flows > 1 or not (inner_norms or config.coda_layers):
            self.state_norm = rms_norm(config, config.hidden_size)
        self.q_head = HrmLmQHead(config.hidden_size, 2) if config.halt_max_steps > 1 else None
        start = None if config.initial_state == "zero" else torch.zeros(config.hidden_size)  # filled by _init_weights
        if config.initial_state == "learned":
            self.z_L_init = nn.Parameter(start)
        else:
            self.register_buffer("z_L_init", start)
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
        plan: SegmentPlan | None = None,
        output_segment_hidden_states: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HrmLmModelOutput:
        """Run the prelude, then segments until every token has halted, then the coda."""
        given = {name: kwargs.pop(name) for name in PLAN_ARGUMENTS if name in kwargs}
        validate_call(self, kwargs, input_ids)
        x = self.embed(input_ids, inputs_embeds)
        plan = plan or plan_segments(self.config, x, self.training, **given)
        cache = plan.cache(past_key_values, use_cache)
        passes = self.pass_arguments(x, attention_mask, position_ids, cache, kwargs)
        if self.training and cache is None and self.compiled_layer is not None:
            passes["run"] = self.compiled_layer
        if self.prelude is not None:
            x = self.prelude(x, key_values=OnceCache(cache, 0), **passes)
        state = self.initial_state(x)
        tokens = ThinkingTokens.start(plan, x, attention_mask)
        hidden, key_values = x, None
        # Continuous batching passes its cache as `cache`, not as `past_key_values`.
        segments_to_keep = tokens.segments_to_keep(kwargs.get("cache", cache))
        gradient_passes = plan.gradient_passes
        for m in range(1, plan.segments + 1):
            key_values = RecurrentCache(self.config, cache, tokens.begin(m), key_values, segments_to_keep)
            with _gradients_if(plan.has_gradients(m)):
                new = self.segment(state, x, gradient_passes=gradient_passes, key_values=key_values, **passes)
            # `hidden` keeps the graph of each token's halting segment; the states passed on may be detached.
            previous, hidden = hidden, tokens.keep(self.read(new), hidden)
            state = tokens.next_state(new, state)
            if output_segment_hidden_states:
                tokens.states.append(hidden)
            q = None if self.q_head is None else self.q_head(self.exit_state(hidden).detach())
            if tokens.halt(m, hidden, previous, q):
                break
        key_values.copy_to_later_segments(kwargs)
        states = self.leave(tokens.states or [hidden], x, cache, passes)
        every = tuple(states) if output_segment_hidden_states else None
        return HrmLmModelOutput(
            last_hidden_state=states[-1], past_key_values=cache, segment_hidden_states=every, **tokens.outputs()
        )

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Return scaled embeddings [B, T, D]. Raise ValueError unless exactly one of the arguments is given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        return (self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds) * self.config.embedding_scale

    def pass_arguments(self, x, attention_mask, position_ids, cache: Cache | None, kwargs: dict) -> dict[str, Any]:
        """Return the arguments shared by all stack passes over x [B, T, D]."""
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        embeddings = rotary_tables(*self.rotary_emb(x, position_ids))
        return {"attention_mask": mask, "position_embeddings": embeddings, "position_ids": position_ids, **kwargs}

    def leave(
        self, states: list[torch.Tensor], x: torch.Tensor, cache: Cache | None, passes: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Apply the coda to each segment's states. The coda's keys and values in the cache are the last segment's."""
        if self.coda is None:
            return states
        key_values = OnceCache(cache, self.config.num_hidden_layers - self.config.coda_layers)
        states = [z + x for z in states] if self.config.coda_input == "state+input" else states
        return [self.coda(z, key_values=key_values, **passes) for z in states]

    def initial_state(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the state before the first pass: (z_H, z_L), or (z,) in a flat loop.

        All states are [B, T, D], except that with hyper-connections, z has streams [B, T, n, D].
        """
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
        """Return the input [B, T, D] of the coda or the head: z_H, z, or the normalized mean of the streams."""
        z = state[0] if self.connection is None else state[0].mean(dim=-2)
        return z if self.state_norm is None else self.state_norm(z)

    def exit_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalized state for the halting head and the exit criteria. The coda's layers do not run."""
        inner = self.config.exit_norms == "every" or self.coda is None
        return hidden if inner else self.coda.exit_norm(hidden)

    def segment(
        self, state: tuple[torch.Tensor, ...], x: torch.Tensor, gradient_passes: tuple[bool, ...], **passes
    ) -> tuple[torch.Tensor, ...]:
        """Run one segment and return the new state. Only passes marked in `gradient_passes` have gradients."""
        run = self._loop if self.config.flat_loop else self._cycles
        return run(*state, x, gradient_passes, **passes)

    def _loop(
        self, z: torch.Tensor, x: torch.Tensor, gradient_passes: tuple[bool, ...], **passes
    ) -> tuple[torch.Tensor]:
        """Run L_cycles passes through the single stack of a flat loop."""
        L_cycles, num_l_layers = self.config.L_cycles, self.config.num_l_layers
        before = passes["key_values"].segment * L_cycles
        for low in range(L_cycles):
            first_visit = low * num_l_layers
            with _gradients_if(gradient_passes[low]):
                if self.connection is None:
                    read = self.loop_input(z, x, before + low)
                    new = self.L_module(read, before + low, first_visit=first_visit, **passes)
                    z = self.loop_input.update(z, new, before + low)
                else:
                    read, post, h_res = self.connection(z)
                    read = self.L_module(self.state_norm(read) + x, before + low, first_visit=first_visit, **passes)
                    z = self.connection.merge(z, read, post, h_res)
        return (z,)

    def _cycles(
        self, z_H: torch.Tensor, z_L: torch.Tensor, x: torch.Tensor, gradient_passes: tuple[bool, ...], **passes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run H_cycles * (L_cycles + 1) passes through two stacks."""
        config, has_gradients = self.config, iter(gradient_passes)
        H_cycles, L_cycles, num_l_layers = config.H_cycles, config.L_cycles, config.num_l_layers
        before = passes["key_values"].segment * H_cycles
        visit, injected = 0, x if config.input_injection == "add" else 0
        for h in range(H_cycles):
            for low in range(L_cycles):
                number = (before + h) * L_cycles + low
                with _gradients_if(next(has_gradients)):
                    z_L = self.L_module(z_L + z_H + injected, number, first_visit=visit, **passes)
                visit += num_l_layers
            with _gradients_if(next(has_gradients)):
                z_H = self.H_module(z_H + z_L, before + h, first_visit=visit, **passes)
            visit += config.num_h_layers
        return z_H, z_L


def _gradients_if(wanted: bool):
    """Return a context manager that turns gradients off unless they are wanted. It never turns them on."""
    return nullcontext() if wanted or not torch.is_grad_enabled() else torch.no_grad()


class HrmLmForCausalLM(RetrofitMixin, PromptsMixin, HrmLmPreTrainedModel, GenerationMixin):
    """`hrm_lm` with a language modeling head, training losses and generation. `from_llama` converts a decoder.

    Additional arguments of `forward`:
        labels: [B, T] aligned with input_ids (shifted here, once); -100 is ignored. `shift_labels` [B, T] are labels
            that are already shifted.
        num_segments, exit_criterion, exit_threshold, schedule: see `plan_segments`.
        output_segment_logits: whether to return the logits of every segment.
        num_items_in_batch: divisor of the sums over tokens; by default the number of labeled tokens in this call.
    """

    _keep_in_fp32_modules = ["model.q_head"]  # needs "model.", because transformers matches prefixes of names
    _generation_options = ("num_segments", "exit_criterion", "exit_threshold")
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: HrmLmConfig):
        super().__init__(config)
        self.model = HrmLmModel(config)
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
        num_segments: int | None = None,
        exit_criterion: Any = None,
        exit_threshold: float | None = None,
        schedule: SegmentSchedule | None = None,
        output_segment_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HrmLmCausalLMOutput:
        """Return next-token logits at each token's halting segment, and the losses if labels are given."""
        validate_call(self, kwargs)
        targets, num_items = _shifted(labels, kwargs), kwargs.pop("num_items_in_batch", None)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        validate_labels(targets, tokens, self.config.vocab_size)
        options = {"num_segments": num_segments, "exit_criterion": exit_criterion, "exit_threshold": exit_threshold}
        if "cache" in kwargs:  # continuous batching does not pass these arguments
            options |= self.batch_options
        plan = self.plan(tokens, schedule=schedule, **options)
        every = output_segment_logits or (targets is not None and plan.learns_from_all_segments)
        if targets is not None:
            use_cache = bool(use_cache)  # off by default, because training does not need a cache
        kwargs |= {"use_cache": use_cache, "plan": plan, "output_segment_hidden_states": every}
        outputs: HrmLmModelOutput = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **kwargs
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        terms = {}
        if targets is not None:
            whole = None if torch.is_tensor(logits_to_keep) or logits_to_keep else logits
            terms = segment_losses(plan, self.lm_head, outputs, targets.to(logits.device), whole, num_items)
        if output_segment_logits:
            terms["segment_logits"] = torch.stack([self.lm_head(h) for h in outputs.segment_hidden_states], dim=1)
        return HrmLmCausalLMOutput(**terms, logits=logits, **{name: getattr(outputs, name) for name in COMMON})

    def plan(self, tokens, **options) -> SegmentPlan:
        """Plan a forward pass with `plan_segments`. Exit criteria may use this head's logits."""
        logits_fn = lambda hidden: self.lm_head(self.model.exit_state(hidden))  # noqa: E731 - accelerate's hooks would move a module
        return plan_segments(self.config, tokens, self.training, **options, logits_fn=logits_fn)

    def _prepare_generation_config(self, *args, **kwargs):
        """Prepare the config as transformers does, and add its segment options to the arguments of `forward`."""
        config, arguments = super()._prepare_generation_config(*args, **kwargs)
        return config, {**self.generation_options(config), **arguments}


def _shifted(labels: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return next-token labels [B, T], shifted here or by the caller. Without labels, return None."""
    # If `shift_labels` were a parameter of `forward`, Trainer would require it in every batch.
    shifted = kwargs.pop("shift_labels", None)
    if shifted is None and labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return shifted


class HrmLmForSequenceClassification(OwnModelMixin, GenericForSequenceClassification, HrmLmPreTrainedModel):
    """Classifier or reward model with `logits` [B, num_labels] from the last token's halting segment."""

    _model_class = HrmLmModel
    _keep_in_fp32_modules = ["model.q_head"]


class HrmLmForTokenClassification(OwnModelMixin, GenericForTokenClassification, HrmLmPreTrainedModel):
    """Token classifier. The `logits` [B, T, num_labels] come from the state in which each token halted."""

    _model_class = HrmLmModel
    _keep_in_fp32_modules = ["model.q_head"]


__all__ = ["HrmLmForCausalLM", "HrmLmForSequenceClassification", "HrmLmForTokenClassification", "HrmLmModel"]
