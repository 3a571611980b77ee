"""The hierarchical recursive Go coder: one token stream, two stacks, a decision after each attempt.

    states of the planner   = planner(embed(ids))                        causal, over the complete stream
    states of the generator = generator(embed(ids), planner states)      causal, over code; reads the planner
    logits                  = lm_head(generator state in code, planner state elsewhere)

`processing_hrm_go_coder.py` defines which tokens are code. A code position attends to earlier code, to the planner
states at earlier planner positions and to the planner state at its own position. Nothing attends to later positions,
so labels are ordinary shifted tokens and decoding with a cache is exact. The cache has an additional slot of width 1
for the phase of each token, which keeps phases consistent when a cache is reordered, cropped or copied. Without a
cache, the generator only runs on code positions.

Attention, feed-forward, norms, rotary positions and weight names are those of transformers' Llama, so the planner
alone is a Llama.

The training guide of matoval/go_coder_llm_pipeline defines sizes and losses. Differences: there, the planner is
bidirectional and both losses compare a token with itself, so the model learns to copy; the generator never sees the
problem, and the decision never sees the code. The two stacks are in `hrm_go_coder_layers.py`, the refinement head and
the loss in `heads_hrm_go_coder.py`, generation in `generation_hrm_go_coder.py` and `refinement_hrm_go_coder.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_hrm_go_coder import HrmGoCoderConfig
from .generation_hrm_go_coder import GoCoderGenerationMixin
from .heads_hrm_go_coder import (
    IGNORED,
    HrmGoCoderFeedbackEncoder,
    HrmGoCoderRefinementHead,
    at,
    decision_loss,
    last_openers,
    linear_cross_entropy,
    plan_means,
    within,
)
from .hrm_go_coder_layers import (
    HrmGoCoderCrossAttention,
    HrmGoCoderGenerator,
    HrmGoCoderGeneratorLayer,
    HrmGoCoderPlanner,
    HrmGoCoderPlannerLayer,
)
from .modeling_utils import CheckpointCodeMixin, OwnModelMixin, PromptsMixin, validate_call, validate_labels
from .processing_hrm_go_coder import DECISION_TOKENS, NO_FEEDBACK
from .recurrent_cache import open_cache, validate_slots
from .refinement_hrm_go_coder import GoCoderRefinementMixin
from .visited_attention import VisitedLayersMixin, rotary_tables


@dataclass
class HrmGoCoderModelOutput(BaseModelOutputWithPast):
    """Output of `HrmGoCoderModel`.

    planner_states and generator_states are [B, S, C]; the latter are only valid at code positions, and a unified model
    has none. phases, bool [B, S], are True where the generator is used. refinement_logits: [B, K, 3], if requested.
    """

    planner_states: torch.FloatTensor | None = None
    generator_states: torch.FloatTensor | None = None
    phases: torch.BoolTensor | None = None
    refinement_logits: torch.FloatTensor | None = None
    cross_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class HrmGoCoderOutput(CausalLMOutputWithPast):
    """Output of `HrmGoCoderForCausalLM`. In training, `logits` is None if the loss is chunked.

    `loss` is the weighted sum of the three losses in training, and the mean negative log-likelihood of all labeled
    tokens in evaluation. `plan_loss`, `code_loss` and `refinement_loss` are means over their own tokens in nats, or 0
    without tokens; `metrics` contains the token counts ("plan_tokens", "code_tokens", "decisions").
    """

    plan_loss: torch.FloatTensor | None = None
    code_loss: torch.FloatTensor | None = None
    refinement_loss: torch.FloatTensor | None = None
    refinement_logits: torch.FloatTensor | None = None
    planner_states: torch.FloatTensor | None = None
    generator_states: torch.FloatTensor | None = None
    cross_attentions: tuple[torch.FloatTensor, ...] | None = None
    metrics: dict[str, torch.Tensor] | None = None


class HrmGoCoderPreTrainedModel(CheckpointCodeMixin, VisitedLayersMixin, PreTrainedModel):
    config: HrmGoCoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HrmGoCoderPlannerLayer", "HrmGoCoderGeneratorLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": [HrmGoCoderPlannerLayer, HrmGoCoderGeneratorLayer],
        "attentions": OutputRecorder(LlamaAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(HrmGoCoderCrossAttention, index=1),
    }

    def serving_problem(self, engine: str, may_skip: bool) -> str | None:
        """Return the reason why an engine with its own cache cannot match `generate`, or None if it can."""
        if self.config.unified:
            return None
        return f"unified=False: {engine} cannot cache the planner states that the generator reads; use generate"

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
            self._keep_in_fp32_modules = ["refinement_head", "feedback_encoder"]  # also prevents quantization
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
        validate_call(self, kwargs, input_ids)
        inputs_embeds, cache, seen, position_ids = self._start(
            input_ids, inputs_embeds, past_key_values, position_ids, use_cache
        )
        if not planner_only:
            self._validate_cache(cache)
        rotary = rotary_tables(*self.rotary_emb(inputs_embeds, position_ids=position_ids))
        kwargs |= {"past_key_values": cache, "use_cache": use_cache}
        alone = planner_only or self.generator is None
        # Create the mask before the planner writes to the cache, because its size depends on the cache.
        mask = create_causal_mask(
            self.config, inputs_embeds, attention_mask, cache, position_ids, allow_is_causal_skip=alone
        )
        phases, all_phases = (None, None) if planner_only else self._phases(input_ids, inputs_embeds, cache)

        states = planner_states = self.planner(
            inputs_embeds, position_embeddings=rotary, attention_mask=mask, **kwargs
        )
        generator_states = decision = None
        if not alone:
            masks = _restricted(mask, all_phases, seen), _restricted(mask, ~all_phases, seen)
            code = self._code_positions(phases, attention_mask, kwargs)
            generator_states = self._generate(inputs_embeds, planner_states, rotary, masks, code, kwargs)
            states = torch.where(phases.unsqueeze(-1), generator_states, planner_states)
            if decision_positions is not None:
                decision = self._decide(planner_states, generator_states, input_ids, decision_positions, feedback_ids)
        return HrmGoCoderModelOutput(
            states, cache, planner_states=planner_states, generator_states=generator_states, phases=phases,
            refinement_logits=decision,
        )  # fmt: skip

    def _start(self, input_ids, inputs_embeds, cache, position_ids, use_cache):
        """Return embeddings [B, T, C], cache (or None), number of cached tokens, and positions [B or 1, T]."""
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = open_cache(cache, self.config, use_cache)
        seen = 0 if cache is None else cache.get_seq_length()
        seen = seen.clone() if torch.is_tensor(seen) else seen  # a copy, because static caches update it in place
        if position_ids is None:
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
        return inputs_embeds, cache, seen, position_ids

    def _validate_cache(self, cache: Cache | None) -> None:
        """Raise ValueError if a cache lacks slots or its tokens' phases, as a cache from prefix tuning does."""
        slots = self.config.cache_slots
        if self.config.unified or not isinstance(cache, Cache) or not cache.layers:
            validate_slots(cache, slots["end"])
        elif len(cache.layers) < slots["end"] or getattr(cache.layers[slots["phase"]].keys, "shape", [1])[-1] != 1:
            raise ValueError(
                "past_key_values: the cache does not store which tokens are code. Two-stack Go coders need this, "
                "but prefix tuning cannot provide it; use LoRA or prompt tuning"
            )

    # ---- phases ----

    def _phases(self, input_ids, inputs_embeds, cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool masks that mark code at the new positions [B, T] and at all cached positions [B, S]."""
        batch, length = inputs_embeds.shape[:2]
        before = self._phase_before(cache, batch, inputs_embeds.device)
        if self.config.tagged and input_ids is not None:
            opener, opens_code = last_openers(input_ids)
            phases = torch.where(opener >= 0, opens_code.gather(1, opener.clamp(min=0)), before)
        else:
            phases = before.expand(batch, length)
        if cache is None or self.config.unified:
            return phases, phases
        kept = phases[:, None, :, None].to(inputs_embeds.dtype)
        kept, _ = cache.update(kept, kept, self.config.cache_slots["phase"])
        return phases, kept[:, 0, :, 0] > 0.5

    def _phase_before(self, cache, batch: int, device) -> torch.Tensor:
        """Return whether the last cached token is code, [B, 1]. Tokens before the first opening tag are code."""
        slot = self.config.cache_slots["phase"]
        code = torch.ones(batch, 1, dtype=torch.bool, device=device)
        if cache is None or self.config.unified or slot >= len(cache.layers) or not cache.layers[slot].is_initialized:
            return code
        seen = cache.get_seq_length(slot)
        if not torch.is_tensor(seen):
            return cache.layers[slot].keys[:, 0, seen - 1 : seen, 0] > 0.5 if seen else code
        last = cache.layers[slot].keys[:, 0, :, 0].index_select(1, (seen - 1).clamp(min=0).view(1))
        return torch.where(seen > 0, last > 0.5, code)

    # ---- the generator ----

    def _code_positions(self, phases, attention_mask, kwargs) -> torch.Tensor | None:
        """Return the generator's positions [B, Tc]. Tc is the maximum number of code positions per row.

        None means all positions: with a cache, in compiled code, or if states or attentions are recorded.
        """
        names = ("output_hidden_states", "output_attentions")
        recorded = any(kwargs.get(name) or getattr(self.config, name, False) for name in names)
        if kwargs["past_key_values"] is not None or recorded or torch.compiler.is_compiling():
            return None
        real = attention_mask is not None and attention_mask.dim() == 2
        code = phases & attention_mask.bool() if real else phases
        most = max(1, int(code.sum(dim=1).max()))
        return None if most == code.shape[1] else (~code).byte().argsort(dim=1, stable=True)[:, :most]

    def _generate(self, inputs_embeds, planner_states, rotary, masks, code, kwargs) -> torch.Tensor:
        """Return the generator's states [B, T, C], with zeros outside positions `code` [B, Tc] (None: all positions).

        Rows with fewer than Tc code positions are padded with other positions, which no code position attends to.
        """
        memory, (own, cross) = self.generator.keys_and_values(planner_states, rotary, kwargs["past_key_values"]), masks
        if code is None:
            return self.generator(
                inputs_embeds, memory, rotary, attention_mask=own, cross_attention_mask=cross, **kwargs
            )
        rows = torch.arange(len(code), device=code.device).unsqueeze(1)
        own, cross = own[rows, 0, code], cross[rows, 0, code]  # [B, Tc, S]
        own = own.gather(2, code.unsqueeze(1).expand(-1, code.shape[1], -1))
        states = self.generator(
            at(inputs_embeds, code), memory, tuple(part.expand(len(code), -1, -1, -1)[rows, code] for part in rotary),
            attention_mask=own.unsqueeze(1), cross_attention_mask=cross.unsqueeze(1), **kwargs,
        )  # fmt: skip
        return torch.zeros_like(planner_states, dtype=states.dtype).index_put((rows, code), states)

    # ---- the decision ----

    def _decide(self, planner_states, generator_states, input_ids, positions, feedback_ids) -> torch.Tensor:
        """Return decision logits [B, K, 3] at the </CODE> positions [B, K] in the complete stream `input_ids`."""
        if feedback_ids is None:
            feedback_ids = torch.tensor(NO_FEEDBACK, device=positions.device).expand(*positions.shape, -1)
        plan = plan_means(planner_states, input_ids, positions)
        feedback = self.feedback_encoder(feedback_ids)
        logits = self.refinement_head(at(planner_states, positions), at(generator_states, positions), plan, feedback)
        return logits / self.config.decision_temperature


def _restricted(mask: torch.Tensor, keys: torch.Tensor, seen: int | torch.Tensor) -> torch.Tensor:
    """Restrict a causal mask [B, 1, T, S] to the positions in `keys`, bool [B, S], plus each query's own."""
    indices = torch.arange(keys.shape[1], device=keys.device)
    queries = torch.arange(mask.shape[-2], device=keys.device) + seen
    allowed = keys[:, None, None, :] | (indices == queries.unsqueeze(-1))
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


class HrmGoCoderForCausalLM(PromptsMixin, HrmGoCoderPreTrainedModel, GoCoderRefinementMixin, GoCoderGenerationMixin):
    r"""The Go coder with a language modeling head.

    Additional arguments of `forward`:
        labels: [B, S], compared with the logits one position earlier; -100 is ignored. Decision tokens count towards
            the refinement loss, other tokens towards the code or plan loss, depending on the stack that predicts them.
        decision_positions: [B, K], positions of attempts' </CODE>, for the refinement head; needs `input_ids`.
        feedback_ids: [B, K, 4], see `Feedback.token_ids`; None means that there was no validator.
        planner_only: compute all logits with the planner alone, to write plans (with a separate cache).
        shift_labels: [B, S], labels that are already shifted, instead of `labels`.
        decision_labels: [B, K], 0 CONTINUE, 1 REFINE, 2 DONE, -100 none; required in training with decision_positions.
        refinement_scale: factor on the refinement loss in training; a trainer can warm it up.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    accepts_loss_kwargs = False  # Trainer must average over batches, because loss terms have different divisors

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__(config)
        self.model = HrmGoCoderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Modules that quantizers skip. Quantizers compare prefixes of full names, hence "model.".
        self._keep_in_fp32_modules = [f"model.{name}" for name in self.model._keep_in_fp32_modules]
        self.post_init()

    @staticmethod
    def parameter_group(name: str) -> str:
        """Return a parameter's group, given its full name: "planner", "generator", "refinement" or "shared"."""
        groups = {"planner": "planner", "generator": "generator"}
        groups |= {"refinement_head": "refinement", "feedback_encoder": "refinement"}
        return next((groups[part] for part in name.split(".") if part in groups), "shared")

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
        given = labels if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
        validate_labels(given, input_ids if inputs_embeds is None else inputs_embeds, self.config.vocab_size)
        targets, how = self._targets(labels, decision_positions, planner_only, kwargs)
        outputs: HrmGoCoderModelOutput = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache,
            decision_positions=decision_positions, feedback_ids=feedback_ids, planner_only=planner_only, **kwargs,
        )  # fmt: skip
        states, logits, losses = outputs.last_hidden_state, None, {}
        if not (self.training and targets is not None and self._head_is_plain()):
            logits = self.lm_head(slice_logits_to_keep(states, logits_to_keep))
        if targets is not None:
            losses = self._losses(states, logits, targets, outputs, **how)
        passed = ("past_key_values", "hidden_states", "attentions", "cross_attentions", "planner_states",
                  "generator_states", "refinement_logits")  # fmt: skip
        return HrmGoCoderOutput(**losses, logits=logits, **{name: outputs[name] for name in passed if name in outputs})

    def _head_is_plain(self) -> bool:
        """Check whether the loss can read the head's weights directly: not sharded, no adapter and no hook."""
        head = self.lm_head
        plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
        return plain and type(head.weight) is nn.Parameter and head.weight.numel() > 0

    def _targets(self, labels, decision_positions, planner_only, kwargs) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Pop the loss arguments from `kwargs`. Return shifted labels and keyword arguments for `_losses`."""
        # If forward named these arguments, Trainer would compute losses only for batches that contain all of them.
        targets = kwargs.pop("shift_labels", None)
        how = {"labels": kwargs.pop("decision_labels", None), "scale": kwargs.pop("refinement_scale", 1.0)}
        validate_call(self, kwargs)
        if self.training and decision_positions is not None and how["labels"] is None:
            raise ValueError(
                "decision_labels=None: required in training with decision_positions. A Trainer drops columns that are "
                "not named arguments of forward; set remove_unused_columns=False"
            )
        if planner_only and not (targets is labels is decision_positions is None):
            raise ValueError("planner_only=True: labels and decision_positions need the generator; remove them")
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return targets, how

    def _losses(self, states, logits, targets, outputs, labels=None, scale: float = 1.0) -> dict[str, Any]:
        """Compute losses for targets [B, T] and decision labels [B, K]. `scale` multiplies the refinement loss."""
        config = self.config
        learned = targets != IGNORED
        targets, code = targets[learned], outputs.phases[learned]
        decides = torch.zeros_like(code)
        if config.tagged:
            decides = within(targets, DECISION_TOKENS)
        members = torch.stack([~code & ~decides, code & ~decides, decides])
        counts = members.sum(dim=1)
        head_loss, decisions = self._head_loss(outputs.refinement_logits, labels, counts)
        # Decisions train the head and the token logits. If both losses exist, each gets half of the weight.
        halves = ((counts[2] > 0).float() + (decisions > 0).float()).clamp(min=1)
        refinement = config.refinement_loss_weight * scale
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
            "loss": total + refinement * head_loss / halves if self.training else losses.mean(),
            "plan_loss": plan_loss,
            "code_loss": code_loss,
            "refinement_loss": (token_loss + head_loss.detach()) / halves,
            "metrics": {"plan_tokens": counts[0], "code_tokens": counts[1], "decisions": counts[2].maximum(decisions)},
        }

    def _head_loss(self, logits, labels, counts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the refinement head's loss, averaged over decisions, and the number of decisions."""
        if logits is not None and labels is not None:
            return decision_loss(logits, labels, self.config.refinement_class_weights)
        nothing = counts.new_zeros(())
        # Keep every weight in the graph, because distributed processes wait for the gradients of all weights.
        heads = [self.model.refinement_head, self.model.feedback_encoder] if torch.is_grad_enabled() else []
        unused = [p.sum() for head in heads if head is not None for p in head.parameters()]
        return sum(unused, nothing.float()) * 0.0, nothing


class OneStackMixin(OwnModelMixin):
    """Mixin that rejects classifiers with two stacks, because plain text has no tags to select a stack."""

    _model_class = HrmGoCoderModel

    def __init__(self, config: HrmGoCoderConfig):
        if not config.unified:
            raise ValueError(
                "unified=False: classifiers need a Go coder with one stack; use the preset 'unified' (unified=True, "
                "generator_layers=0)"
            )
        super().__init__(config)


class HrmGoCoderForSequenceClassification(OneStackMixin, GenericForSequenceClassification, HrmGoCoderPreTrainedModel):
    """Classifier or reward model with `logits` [B, num_labels] from the last non-padding token."""


class HrmGoCoderForTokenClassification(OneStackMixin, GenericForTokenClassification, HrmGoCoderPreTrainedModel):
    """Token classifier that returns `logits` [B, T, num_labels]."""


__all__ = [
    "HrmGoCoderForCausalLM",
    "HrmGoCoderForSequenceClassification",
    "HrmGoCoderForTokenClassification",
    "HrmGoCoderModel",
    "HrmGoCoderPreTrainedModel",
]
