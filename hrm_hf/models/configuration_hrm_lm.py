"""Configuration of the hierarchical reasoning language model, and its presets."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig

from .bounds import ANY_NUMBER, COUNT, LOSS_WEIGHT, PROBABILITY, SOME, SPREAD, TOKEN_ID, BoundedFields, bounded, number
from .modeling_utils import LlamaModulesMixin, PresetsMixin
from .presets_hrm_lm import PRESETS


EXITS = Literal["q", "cdf", "kl", "latent_diff", "second_diff", "entropy_diff", "confidence", "fixed"]
STACKS = ("L_module", "H_module", "prelude", "coda")
TP_PLAN = {**LlamaConfig.base_model_tp_plan, "layers.*.self_attn.gate_proj": "colwise"}


@strict
class HrmLmConfig(PresetsMixin, LlamaModulesMixin, BoundedFields, PreTrainedConfig):
    r"""Configuration of `hrm_lm`, a causal language model that thinks in segments and halts token by token.

    Shapes and blocks (fields not listed here are as in Llama):
        num_h_layers, num_l_layers: blocks of the high- and the low-level stack; num_h_layers=0 makes a flat loop over
            the low-level stack. prelude_layers, coda_layers: blocks before and after the recurrence.
        norm_position: RMS norms before each branch and at the exit of a stack ("pre_exit"), also after each branch
            ("sandwich"), or only after each residual sum ("post"). norm_affine: whether these norms have gains.
        exit_norms: whether "every" stack ends with a norm, or only the "last" one, as in a Llama (flat loops).
        attention_gate, qk_norm: sigmoid gate on the attention output; RMS norm of queries and keys.
        attention_bias: whether projections have biases: all four (True), all but the output ("qkv"), or none (False).
        initializer_range: std of new weights; None for LeCun's 1 / sqrt(fan in). embedding_scale: None for 1 / std.
    Recurrence:
        H_cycles, L_cycles: high-level cycles per segment, low-level passes per cycle.
        bp_steps: number of last stack passes per segment that have gradients, high-level ones first; None for all.
        detach_between_segments: stop gradients between segments; if False, only the last bp_segments have gradients.
        initial_state: initial low-level state; "fixed" is one untrained random vector, "random" a vector per token.
        input_injection, loop_step: how each pass of a flat loop reads x and updates the state; see `LoopInput`;
            with two stacks and "none", the low-level stack reads z_L + z_H without x.
        coda_input: what the coda reads, the state z or z + x.
        step_vectors, pass_gains: add a vector to the input in each pass; scale the branches in each pass.
        pass_lora_rank: rank of a low-rank update of the loop's projections in each pass after the first; 0 for none.
        mhc_flows: number of residual streams that hyper-connections mix between the passes of a flat loop.
        segment_sampling: number of segments in training: halt_max_steps ("fixed"), or drawn with this mean per forward
            or per token; segment_sampling_sigma is the std of the log rate.
    Halting (see early_exit.py for the losses and their fields):
        halt_max_steps, halt_min_steps: maximum and minimum segments per token; with a maximum of 1, there is no gate.
        halt_exploration_prob: fraction of tokens that draw a random minimum in training.
        initial_halt_prob: probability that the gate of a new model halts after a segment.
        halt_margin (0.0): with exit_criterion="q", a token halts if q_halt - q_continue exceeds this margin.
        exit_criterion, exit_threshold: the rule that halts a token; None for the criterion's default threshold.
        convergence_threshold: relative change below which metrics count a state as converged.
        kv_layout: cache each visit to a layer ("per_segment", exact), only the last segment ("last_segment"), or one
            slot per layer ("last_visit"); the latter two are approximate and do not grow with halt_max_steps.
    """

    model_type = "hrm_lm"
    keys_to_ignore_at_inference = [
        "past_key_values", "lm_loss", "deep_supervision_loss", "q_halt_loss", "q_continue_loss", "ponder_loss",
        "q_logits", "halt_steps", "segment_logits", "metrics",
    ]  # fmt: skip
    base_model_tp_plan = {f"{stack}.{name}": rule for stack in STACKS for name, rule in TP_PLAN.items()}
    base_model_fsdp_plan = dict.fromkeys(["embed_tokens", *(f"{s}.layers.*" for s in STACKS)], "free_full_weight")

    chunk_size_feed_forward: int = bounded(0, SOME)  # inherited from transformers, redeclared with a bound
    vocab_size: int = bounded(50304, COUNT)
    hidden_size: int = bounded(512, COUNT)
    intermediate_size: int = bounded(1792, COUNT)
    num_h_layers: int = bounded(3, SOME)
    num_l_layers: int = bounded(3, COUNT)
    prelude_layers: int = bounded(0, SOME)
    coda_layers: int = bounded(0, SOME)
    num_attention_heads: int = bounded(8, COUNT)
    num_key_value_heads: int | None = bounded(None, COUNT)
    head_dim: int | None = bounded(None, COUNT)
    max_position_embeddings: int = bounded(1024, COUNT)
    rope_parameters: dict | None = None
    rms_norm_eps: float = bounded(1e-6, PROBABILITY)
    norm_affine: bool = False
    norm_position: Literal["pre_exit", "sandwich", "post"] = "pre_exit"
    exit_norms: Literal["every", "last"] = "every"
    attention_gate: bool = True
    attention_bias: bool | Literal["qkv"] = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    mlp_bias: bool = False
    attention_dropout: float | int = bounded(0.0, PROBABILITY)
    hidden_dropout: float | int = bounded(0.0, PROBABILITY)
    initializer_range: float | None = bounded(None, SPREAD)
    embedding_scale: float | None = bounded(None, ANY_NUMBER)
    tie_word_embeddings: bool = True
    pad_token_id: int | None = bounded(None, TOKEN_ID)
    bos_token_id: int | None = bounded(None, TOKEN_ID)
    eos_token_id: int | list[int] | None = bounded(None, TOKEN_ID)
    use_cache: bool = True
    H_cycles: int = bounded(2, COUNT)
    L_cycles: int = bounded(3, COUNT)
    bp_steps: int | None = bounded(5, COUNT)
    detach_between_segments: bool = True
    bp_segments: int | None = bounded(None, COUNT)
    initial_state: Literal["fixed", "learned", "zero", "random"] = "fixed"
    input_injection: Literal["add", "none", "gated", "bridge", "concat"] = "add"
    loop_step: Literal["replace", "damped", "rescaled"] = "replace"
    coda_input: Literal["state", "state+input"] = "state"
    step_vectors: bool = False
    pass_gains: bool = False
    pass_lora_rank: int = bounded(0, SOME)
    mhc_flows: int = bounded(1, COUNT)
    segment_sampling: Literal["fixed", "lognormal_poisson", "per_token"] = "fixed"
    segment_sampling_sigma: float | int = bounded(0.5, number(0, 3))
    halt_max_steps: int = bounded(4, COUNT)
    halt_min_steps: int = bounded(1, COUNT)
    halt_exploration_prob: float | int = bounded(0.1, PROBABILITY)
    initial_halt_prob: float | int = bounded(0.05, number(1e-6, 1 - 1e-6))
    halt_margin: float | int = bounded(0.0, ANY_NUMBER)
    exit_criterion: EXITS = "q"
    exit_threshold: float | int | None = bounded(None, ANY_NUMBER)
    convergence_threshold: float | int = bounded(1e-2, ANY_NUMBER)
    kv_layout: Literal["per_segment", "last_segment", "last_visit"] = "per_segment"
    lm_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)
    ds_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)
    q_loss_weight: float | int = bounded(0.1, LOSS_WEIGHT)
    ponder_loss_weight: float | int = bounded(3e-3, LOSS_WEIGHT)
    deep_supervision: Literal["all", "last"] = "all"
    ds_schedule: Literal["linear", "uniform"] = "linear"
    q_target: Literal["loss_gain", "correct"] = "loss_gain"
    loss_gain_threshold: float | int = bounded(0.05, ANY_NUMBER)
    halt_step_cost: float | int = bounded(0.1, PROBABILITY)
    ponder_type: Literal["expected_steps", "geometric_kl", "neg_entropy"] = "expected_steps"
    label_smoothing: float | int = bounded(0.0, PROBABILITY)

    _presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    def __post_init__(self, **kwargs):
        self.rope_parameters = self.rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.bp_steps = self.bp_steps or self.stack_passes
        if self.embedding_scale is None:
            self.embedding_scale = 1 / (self.initializer_range or self.hidden_size**-0.5)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        if self.flat_loop and self.H_cycles != 1:
            raise ValueError(f"H_cycles={self.H_cycles}: must be 1 with num_h_layers=0; set L_cycles instead")
        self.check_bp_steps(self.bp_steps)
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % key_heads:
            raise ValueError(f"num_key_value_heads={key_heads}: must divide num_attention_heads={heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even for rotary position embeddings")
        if self.mhc_flows > 1 and not self.flat_loop:
            raise ValueError(f"mhc_flows={self.mhc_flows}: needs a flat loop; set num_h_layers=0 and H_cycles=1")
        self.check_loop()
        if self.bp_segments is not None and self.detach_between_segments:
            raise ValueError(f"bp_segments={self.bp_segments}: needs detach_between_segments=False")
        if self.halt_min_steps > self.halt_max_steps:
            raise ValueError(f"halt_min_steps={self.halt_min_steps}: must be <= halt_max_steps={self.halt_max_steps}")

    def check_loop(self) -> None:
        """Raise ValueError if the fields for a loop's input, steps and norms contradict each other."""
        defaults = {"exit_norms": "every", "loop_step": "replace", "input_injection": "add"}
        for name, default in defaults.items():
            if (value := getattr(self, name)) == default:
                continue
            if not self.flat_loop and value != "none":
                raise ValueError(f"{name}={value!r}: needs a flat loop; set num_h_layers=0 and H_cycles=1")
            if self.mhc_flows > 1:
                raise ValueError(f"{name}={value!r}: does not support hyper-connections; set mhc_flows=1")
        if self.flat_loop and self.input_injection != "add" and self.initial_state != "zero":
            raise ValueError(
                f"initial_state={self.initial_state!r}: has no effect with input_injection={self.input_injection!r}; "
                "set initial_state='zero'"
            )
        if self.pass_lora_rank and not (self.flat_loop and self.halt_max_steps * self.L_cycles > 1):
            raise ValueError(f"pass_lora_rank={self.pass_lora_rank}: needs a flat loop with at least two passes")
        if self.exit_norms == "last" and self.norm_position == "post":
            raise ValueError("exit_norms='last': has no effect with norm_position='post'; set exit_norms='every'")
        if self.coda_input != "state" and not self.coda_layers:
            raise ValueError(f"coda_input={self.coda_input!r}: needs coda_layers >= 1")

    def check_bp_steps(self, bp_steps: int) -> None:
        """Raise ValueError if `bp_steps` leaves a stack without gradients or exceeds the number of passes."""
        fewest, most = 1 if self.flat_loop else 2, self.stack_passes
        if not fewest <= bp_steps <= most:
            raise ValueError(f"bp_steps={bp_steps}: must be in [{fewest}, {most}]; use None for all stack passes")

    @property
    def flat_loop(self) -> bool:
        """Whether the model loops over a single stack, without a high-level stack."""
        return self.num_h_layers == 0

    @property
    def stack_passes(self) -> int:
        """Number of stack passes per segment, H_cycles * (L_cycles + 1), or L_cycles in a flat loop."""
        return self.H_cycles * (self.L_cycles + (not self.flat_loop))

    @property
    def segment_visits(self) -> int:
        """Number of layer visits per segment. Each visit has its own keys and values."""
        return self.H_cycles * (self.L_cycles * self.num_l_layers + self.num_h_layers)

    @property
    def num_hidden_layers(self) -> int:
        """Number of key-value cache slots, not of blocks. transformers' caches read it from this attribute."""
        once = self.prelude_layers + self.coda_layers
        if self.kv_layout == "last_visit":
            return once + self.num_h_layers + self.num_l_layers
        return once + self.segment_visits * (self.halt_max_steps if self.kv_layout == "per_segment" else 1)


__all__ = ["HrmLmConfig"]
