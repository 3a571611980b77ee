"""Configuration of the hierarchical recursive Go coder."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.llama.configuration_llama import LlamaConfig

from .bounds import COUNT, LOSS_WEIGHT, PROBABILITY, SOME, TOKEN_ID, BoundedFields, bounded, number, whole
from .modeling_utils import LlamaModulesMixin, PresetsMixin
from .processing_hrm_go_coder import BOS, DECISIONS, EOS, PAD, TOKEN_IDS


@strict
class HrmGoCoderConfig(PresetsMixin, LlamaModulesMixin, BoundedFields, LlamaConfig):
    r"""Configuration of `hrm_go_coder`: a planner, a generator that attends to it, and a refinement head.

    Body:
        vocab_size (`int`, defaults to 50000): size of the embedding table, which is also the output head.
        hidden_size (`int`, defaults to 256), intermediate_size (`int`, defaults to 704), num_attention_heads (`int`,
            defaults to 8), num_key_value_heads, rms_norm_eps, attention_dropout, rope_parameters, initializer_range:
            as in Llama, for both stacks.
        planner_layers (`int`, defaults to 4), generator_layers (`int`, defaults to 8): blocks of each stack.
        planner_cycles (`int`, defaults to 1), generator_cycles (`int`, defaults to 1): how often a stack is applied
            with the same weights (the recursion of HRM and TRM). This adds computation but no parameters.
        hidden_dropout (`float`, defaults to 0.0): dropout on the output of each branch.
        max_position_embeddings (`int`, defaults to 2048): maximum tokens of a stream, including all attempts.
        unified (`bool`, defaults to `False`): planner and generator share one stack of `planner_layers` blocks without
            cross-attention or refinement head. The model then has the shape of a Llama and can be exported to GGUF.
        tagged (`bool`, defaults to `True`): whether the vocabulary starts with `SPECIAL_TOKENS` of
            `processing_hrm_go_coder.py`. With False, all tokens are code, for raw text with any tokenizer.
    Generation:
        problem_budget (`int`, defaults to 256), context_budget (`int`, defaults to 512): maximum tokens of a problem
            and of a context; `generate_with_refinement` truncates them as in training.
        plan_budget (`int`, defaults to 512), code_budget (`int`, defaults to 1024): maximum new tokens of a plan and
            of an attempt.
        max_refinement_iterations (`int`, defaults to 5): maximum number of attempts in `generate_with_refinement`.
        refinement_threshold (`float`, defaults to 0.9): the loop stops when P(DONE) reaches this value.
        repetition_guard (`bool`, defaults to `True`): prevent plans and code from repeating more than real code does.
    Losses:
        plan_loss_weight (`float`, defaults to 0.4), code_loss_weight (`float`, defaults to 0.4),
        refinement_loss_weight (`float`, defaults to 0.2): weights of the three parts of the loss.
        refinement_class_weights (`list[float]`, defaults to `[1, 1, 1]`): weights of CONTINUE, REFINE and DONE.
        decision_temperature (`float`, defaults to 1): divisor of the refinement head's logits, which calibrates its
            probabilities (Guo et al. 2017, section 4.2).
    """

    model_type = "hrm_go_coder"
    keys_to_ignore_at_inference = [
        "past_key_values", "plan_loss", "code_loss", "refinement_loss", "planner_states", "generator_states",
        "metrics",
    ]  # fmt: skip
    base_model_tp_plan = {f"planner.{name}": rule for name, rule in LlamaConfig.base_model_tp_plan.items()}
    base_model_pp_plan = None  # pipeline-parallel plans cannot express that both stacks read the same embeddings

    # Fields inherited from transformers, redeclared with bounds.
    chunk_size_feed_forward: int = bounded(0, SOME)
    num_key_value_heads: int | None = bounded(None, COUNT)
    head_dim: int | None = bounded(None, COUNT)
    initializer_range: float = bounded(0.02, number(0, 1e3))
    rms_norm_eps: float = bounded(1e-6, PROBABILITY)
    attention_dropout: int | float | None = bounded(0.0, PROBABILITY)
    rope_parameters: RopeParameters | dict | None = None
    pretraining_tp: int | None = bounded(1, whole(0, 65_536))
    vocab_size: int = bounded(50000, COUNT)
    hidden_size: int = bounded(256, COUNT)
    intermediate_size: int = bounded(704, COUNT)
    num_hidden_layers: int = bounded(20, whole(0, 30_000))
    num_attention_heads: int = bounded(8, COUNT)
    max_position_embeddings: int = bounded(2048, COUNT)
    bos_token_id: int | None = bounded(TOKEN_IDS[BOS], TOKEN_ID)
    eos_token_id: int | list[int] | None = bounded(TOKEN_IDS[EOS], TOKEN_ID)
    pad_token_id: int | None = bounded(TOKEN_IDS[PAD], TOKEN_ID)
    tie_word_embeddings: bool = True
    planner_layers: int = bounded(4, COUNT)
    generator_layers: int = bounded(8, whole(0, 10_000))
    planner_cycles: int = bounded(1, COUNT)
    generator_cycles: int = bounded(1, COUNT)
    hidden_dropout: float | int = bounded(0.0, PROBABILITY)
    unified: bool = False
    tagged: bool = True
    problem_budget: int = bounded(256, COUNT)
    context_budget: int = bounded(512, COUNT)
    plan_budget: int = bounded(512, COUNT)
    code_budget: int = bounded(1024, COUNT)
    max_refinement_iterations: int = bounded(5, whole(1, 5))
    refinement_threshold: float | int = bounded(0.9, PROBABILITY)
    repetition_guard: bool = True
    plan_loss_weight: float | int = bounded(0.4, LOSS_WEIGHT)
    code_loss_weight: float | int = bounded(0.4, LOSS_WEIGHT)
    refinement_loss_weight: float | int = bounded(0.2, LOSS_WEIGHT)
    refinement_class_weights: list[float] | None = bounded(None, number(0, 1e6, lists=(len(DECISIONS),) * 2))
    decision_temperature: float | int = bounded(1.0, number(1e-3, 1e3))

    # Comments give the number of parameters in millions.
    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "test": {  # 0.31
            "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
            "planner_layers": 2, "generator_layers": 2,
        },
        "nano": {"vocab_size": 16384, "planner_layers": 3, "generator_layers": 3},  # 10.0
        "base": {},  # 24.75
        "wide": {  # 27.9 million parameters, or 29.5 million with 5 generator layers
            "hidden_size": 320, "intermediate_size": 864, "planner_layers": 4, "generator_layers": 4,
        },
        "medium": {  # 53.9
            "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12, "planner_layers": 6,
            "generator_layers": 10,
        },
        "unified": {  # 25.9
            "hidden_size": 320, "intermediate_size": 864, "planner_layers": 8, "generator_layers": 0, "unified": True,
        },
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        # Caches have num_hidden_layers slots. Only a unified model needs slots for every cycle of the planner.
        cycles = self.planner_cycles if self.unified else 1
        layers, given = self.planner_layers * cycles + 2 * self.generator_layers, self.num_hidden_layers
        if given not in (type(self).num_hidden_layers, layers) and "model_type" not in kwargs:
            raise ValueError(f"num_hidden_layers={given}: set planner_layers and generator_layers instead")
        self.num_hidden_layers = layers
        if self.refinement_class_weights is None:
            self.refinement_class_weights = [1.0] * len(DECISIONS)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        if self.unified != (self.generator_layers == 0):
            raise ValueError(
                f"unified={self.unified}, generator_layers={self.generator_layers}: must be 0 in a unified model, and "
                "at least 1 otherwise"
            )
        if self.unified and self.generator_cycles != 1:
            raise ValueError(f"generator_cycles={self.generator_cycles}: must be 1 with unified=True")

    @property
    def cache_slots(self) -> dict[str, int]:
        """Index of the first cache slot of each kind of entry. "end" is the total number of slots."""
        planner, generator = self.planner_layers * self.planner_cycles, self.generator_layers * self.generator_cycles
        if self.unified:
            return {"planner": 0, "generator": planner, "cross": planner, "phase": planner, "end": planner}
        cross = planner + generator
        phase = cross + self.generator_layers
        return {"planner": 0, "generator": planner, "cross": cross, "phase": phase, "end": phase + 1}

    @property
    def per_layer_config(self) -> list["HrmGoCoderConfig"]:
        """One entry per cache slot. transformers' caches read the number of slots from the list's length."""
        return [self] * self.cache_slots["end"]


__all__ = ["HrmGoCoderConfig"]
