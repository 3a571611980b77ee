"""Configuration of the hierarchical reasoning language model, and its presets."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .bounds import (
    ANY_NUMBER,
    CHUNK,
    CYCLES,
    EPSILON,
    HEADS,
    LAYERS,
    LOSS_WEIGHT,
    POSITIONS,
    PROBABILITY,
    SOME_LAYERS,
    SPREAD,
    STREAMS,
    TOKEN_ID,
    VOCABULARY,
    WIDTH,
    BoundedFields,
    bounded,
    number,
    whole,
)
from .early_exit import EXIT_CRITERIA
from .modeling_utils import PresetsMixin


# A flat loop whose every pass can be the last, trained through all of them by the last one's loss, without a gate:
# that is taught afterwards (`train_gate_only`). How it was chosen: docs/architectures/hrm_lm.md.
LOOP = {
    "num_h_layers": 0, "H_cycles": 1, "L_cycles": 1, "bp_steps": 1, "halt_max_steps": 4, "initial_state": "zero",
    "detach_between_segments": False, "deep_supervision": "last", "q_loss_weight": 0.0, "ponder_loss_weight": 0.0,
    "exit_criterion": "fixed",
}  # fmt: skip


@strict
class HrmLmConfig(PresetsMixin, BoundedFields, PreTrainedConfig):
    r"""Configuration of `hrm_lm`: a causal language model that thinks in segments, with a halting decision per token.

    Shapes and sizes:
        vocab_size (`int`, defaults to 50304): token ids.
        hidden_size (`int`, defaults to 512): width D of both latent states.
        intermediate_size (`int`, defaults to 1792): width of the SwiGLU.
        num_h_layers, num_l_layers (`int`, defaults to 3): blocks of the high- and of the low-level stack. Without a
            high-level stack (num_h_layers=0, H_cycles=1) the model is a looped transformer: a flat loop over the
            low-level stack, whose state is read out.
        prelude_layers, coda_layers (`int`, defaults to 0): blocks of their own before and behind the recurrence, run
            once a token, with one place each in the cache.
        num_attention_heads (`int`, defaults to 8), num_key_value_heads (`int`, *optional*): query and key heads; None
            for as many key heads as query heads.
        head_dim (`int`, *optional*): None for hidden_size / num_attention_heads.
        max_position_embeddings (`int`, defaults to 1024): longest context in tokens.
        rope_parameters (`dict`, *optional*): as in transformers; the plain rotary embedding of base 10000 by default.
    Block:
        rms_norm_eps (`float`, defaults to 1e-6), norm_affine (`bool`, defaults to `False`): RMS norms, without gains
            by default.
        norm_position (`str`, defaults to "pre_exit"): "pre_exit" normalizes before each branch and once at the exit
            of a stack, "sandwich" behind each branch, too, "post" after each residual sum.
        attention_gate (`bool`, defaults to `True`): sigmoid gate on the attention output.
        qk_norm (`bool`, defaults to `False`): RMS norm of queries and keys.
        hidden_act (`str`, defaults to "silu"), mlp_bias (`bool`, defaults to `False`): as in Llama.
        attention_dropout, hidden_dropout (`float`, defaults to 0.0): of attention weights, of each branch's output.
        initializer_range (`float`, *optional*): std of weights; None for LeCun's 1 / sqrt(fan in).
        embedding_scale (`float`, *optional*): factor on embeddings; None for 1 / their std at the start.
    Recurrence:
        H_cycles (`int`, defaults to 2), L_cycles (`int`, defaults to 3): high-level cycles a segment, low-level
            passes a cycle.
        bp_steps (`int`, *optional*, defaults to 5): how many of the H_cycles * (L_cycles + 1) stack passes of a
            segment carry gradients: the last ones of each stack, the high-level stack first, so at least 2; of a flat
            loop the last of its L_cycles passes, at least 1. None for all of them.
        detach_between_segments (`bool`, defaults to `True`): stop gradients from one segment to the one before.
        bp_segments (`int`, *optional*): without that stop, only the last segments carry gradients; None for all.
        initial_state (`str`, defaults to "fixed"): the state before the first pass (the low-level one of two):
            "fixed" is a random vector that is never trained, "learned" one that is, "zero" none, and "random" is
            drawn for every token in training and the fixed vector in inference.
        step_vectors (`bool`, defaults to `False`): a vector for each pass, added to what the pass reads; zero at the
            start. A pass beyond those of the config takes the last one's.
        pass_gains (`bool`, defaults to `False`): factors on both branches of each block in each pass; 1 at the start.
        mhc_flows (`int`, defaults to 1): of a flat loop, residual streams that hyper-connections mix between passes.
        segment_sampling (`str`, defaults to "fixed"): segments in training: "fixed" is halt_max_steps,
            "lognormal_poisson" draws their number, with halt_max_steps as its mean, for each forward: no token halts
            then, and more segments than in training can help in inference. "per_token" draws one for each token,
            which halts there, so that tokens of different depths side by side, as exits make them, are known.
        segment_sampling_sigma (`float`, defaults to 0.5): spread of the logarithm of the Poisson rate.
    Halting:
        halt_max_steps (`int`, defaults to 4): most segments M a token gets. 1 builds no halting head.
        halt_min_steps (`int`, defaults to 1): fewest segments.
        halt_exploration_prob (`float`, defaults to 0.1): share of tokens that get a random minimum in training.
        initial_halt_prob (`float`, defaults to 0.05): what the gate of a new model says after each segment; low, so
            that it starts at "go on".
        halt_margin (`float`, defaults to 0.0): a token halts if q_halt - q_continue is above it.
        exit_criterion (`str`, defaults to "q"): what halts a token: "q", "cdf" (learned gate), "kl", "latent_diff",
            "second_diff", "entropy_diff", "confidence" (training-free, in inference only), or "fixed" (never). Those
            that look at next-token distributions read the state by the head alone, without the coda.
        exit_threshold (`float`, *optional*): of the criteria but "q"; None for the criterion's own default.
        convergence_threshold (`float`, defaults to 0.01): relative change of a state that counts as converged, in the
            metrics only.
        kv_layout (`str`, defaults to "per_segment"): "per_segment" keeps keys and values of every visit of a layer
            (exact); "last_segment" those of the last segment; "last_visit" one slot a layer. The last two are
            approximate in decoding and do not grow with M.
    Losses:
        lm_loss_weight (1.0), ds_loss_weight (1.0), q_loss_weight (0.1), ponder_loss_weight (3e-3): weights of the
            next-token loss at the halting segment, deep supervision, halting values, and compute.
        deep_supervision (`str`, defaults to "all"): "all" segments or only the "last".
        ds_schedule (`str`, defaults to "linear"): weight of segment m, "linear" in m or "uniform".
        q_target (`str`, defaults to "loss_gain"): "loss_gain": to halt is right if no later segment lowers the loss by
            loss_gain_threshold nats; "correct": if the most likely token is the right one.
        loss_gain_threshold (`float`, defaults to 0.05): nats.
        halt_step_cost (`float`, defaults to 0.1): price of one more segment, in units of the halting values (0 to 1).
        ponder_type (`str`, defaults to "expected_steps"): or "geometric_kl", "neg_entropy".
        label_smoothing (`float`, defaults to 0.0): in training only, never in a reported `lm_loss`.
    """

    model_type = "hrm_lm"
    keys_to_ignore_at_inference = [
        "past_key_values", "lm_loss", "deep_supervision_loss", "q_halt_loss", "q_continue_loss", "ponder_loss",
        "q_logits", "halt_steps", "segment_logits", "metrics",
    ]  # fmt: skip
    base_model_tp_plan = {
        f"{stack}.layers.*.{linear}": plan
        for stack in ("L_module", "H_module", "prelude", "coda")
        for linear, plan in {
            "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
            "self_attn.gate_proj": "colwise", "self_attn.o_proj": "rowwise",
            "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
        }.items()
    }  # fmt: skip

    base_model_fsdp_plan = dict.fromkeys(
        ("embed_tokens", "H_module.layers.*", "L_module.layers.*", "prelude.layers.*", "coda.layers.*"),
        "free_full_weight",
    )

    chunk_size_feed_forward: int = bounded(0, CHUNK)  # of the library; here for its bound
    vocab_size: int = bounded(50304, VOCABULARY)
    hidden_size: int = bounded(512, WIDTH)
    intermediate_size: int = bounded(1792, WIDTH)
    num_h_layers: int = bounded(3, SOME_LAYERS)
    num_l_layers: int = bounded(3, LAYERS)
    prelude_layers: int = bounded(0, SOME_LAYERS)
    coda_layers: int = bounded(0, SOME_LAYERS)
    num_attention_heads: int = bounded(8, HEADS)
    num_key_value_heads: int | None = bounded(None, HEADS)
    head_dim: int | None = bounded(None, WIDTH)
    max_position_embeddings: int = bounded(1024, POSITIONS)
    rope_parameters: dict | None = None
    rms_norm_eps: float = bounded(1e-6, EPSILON)
    norm_affine: bool = False
    norm_position: str = "pre_exit"
    attention_gate: bool = True
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
    H_cycles: int = bounded(2, CYCLES)
    L_cycles: int = bounded(3, CYCLES)
    bp_steps: int | None = bounded(5, whole(1, 10**9))
    detach_between_segments: bool = True
    bp_segments: int | None = bounded(None, CYCLES)
    initial_state: str = "fixed"
    step_vectors: bool = False
    pass_gains: bool = False
    mhc_flows: int = bounded(1, STREAMS)
    segment_sampling: str = "fixed"
    segment_sampling_sigma: float | int = bounded(0.5, number(0, 3))
    halt_max_steps: int = bounded(4, CYCLES)
    halt_min_steps: int = bounded(1, CYCLES)
    halt_exploration_prob: float | int = bounded(0.1, PROBABILITY)
    initial_halt_prob: float | int = bounded(0.05, number(1e-6, 1 - 1e-6))
    halt_margin: float | int = bounded(0.0, ANY_NUMBER)
    exit_criterion: str = "q"
    exit_threshold: float | int | None = bounded(None, ANY_NUMBER)
    convergence_threshold: float | int = bounded(1e-2, ANY_NUMBER)
    kv_layout: str = "per_segment"
    lm_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)
    ds_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)
    q_loss_weight: float | int = bounded(0.1, LOSS_WEIGHT)
    ponder_loss_weight: float | int = bounded(3e-3, LOSS_WEIGHT)
    deep_supervision: str = "all"
    ds_schedule: str = "linear"
    q_target: str = "loss_gain"
    loss_gain_threshold: float | int = bounded(0.05, ANY_NUMBER)
    halt_step_cost: float | int = bounded(0.1, PROBABILITY)
    ponder_type: str = "expected_steps"
    label_smoothing: float | int = bounded(0.0, PROBABILITY)

    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "norm_position": ("pre_exit", "sandwich", "post"),
        "initial_state": ("fixed", "learned", "zero", "random"),
        "segment_sampling": ("fixed", "lognormal_poisson", "per_token"),
        "exit_criterion": tuple(EXIT_CRITERIA),
        "kv_layout": ("per_segment", "last_segment", "last_visit"),
        "deep_supervision": ("all", "last"),
        "ds_schedule": ("linear", "uniform"),
        "q_target": ("loss_gain", "correct"),
        "ponder_type": ("expected_steps", "geometric_kl", "neg_entropy"),
    }

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "hrm-lm-10m-byte": {
            "vocab_size": 264, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024,
        },
        "hrm-lm-25m": {
            "hidden_size": 384, "num_attention_heads": 6, "num_h_layers": 2, "num_l_layers": 2,
            "intermediate_size": 1024, "max_position_embeddings": 512,
        },
        "hrm-lm-50m": {},
        "hrm-lm-100m": {
            "hidden_size": 768, "num_attention_heads": 12, "num_h_layers": 4, "num_l_layers": 4,
            "intermediate_size": 2048,
        },
        "hrm-lm-350m": {
            "hidden_size": 1024, "num_attention_heads": 16, "num_h_layers": 11, "num_l_layers": 11,
            "intermediate_size": 2816, "max_position_embeddings": 2048,
        },
        "hrm-lm-1b": {
            "hidden_size": 1536, "num_attention_heads": 12, "num_h_layers": 16, "num_l_layers": 16,
            "intermediate_size": 4096, "max_position_embeddings": 4096,
        },
        "hrm-lm-loop-10m-byte": {
            **LOOP, "vocab_size": 264, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024,
            "prelude_layers": 2, "num_l_layers": 2, "coda_layers": 2,
        },
        "hrm-lm-loop-25m": {
            **LOOP, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024,
            "prelude_layers": 1, "num_l_layers": 2, "coda_layers": 1, "max_position_embeddings": 512,
        },
        "hrm-lm-loop-50m": {**LOOP, "prelude_layers": 2, "num_l_layers": 2, "coda_layers": 2},
        "hrm-lm-loop-100m": {
            **LOOP, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048,
            "prelude_layers": 2, "num_l_layers": 4, "coda_layers": 2,
        },
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.embedding_scale is None:
            std = self.hidden_size**-0.5 if self.initializer_range is None else self.initializer_range
            self.embedding_scale = 1 / std
        if self.bp_steps is None:
            self.bp_steps = self.stack_passes
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict` validation: relations between fields."""
        for name, allowed in self._choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim; it is {self.head_dim}")
        if self.flat_loop and self.H_cycles != 1:
            raise ValueError(
                f"H_cycles={self.H_cycles} without a high-level stack (num_h_layers=0); set H_cycles=1, and L_cycles "
                "to the passes of a segment"
            )
        self.check_bp_steps(self.bp_steps)
        if self.mhc_flows > 1 and not self.flat_loop:
            raise ValueError(
                f"mhc_flows={self.mhc_flows} needs a flat loop (num_h_layers=0, H_cycles=1): two stacks that read "
                "each other have no streams to mix"
            )
        if self.bp_segments is not None and self.detach_between_segments:
            raise ValueError(
                f"bp_segments={self.bp_segments} says how far gradients flow, and detach_between_segments=True stops "
                "them after every segment; set it to False"
            )
        if self.halt_min_steps > self.halt_max_steps:
            raise ValueError(
                f"halt_min_steps={self.halt_min_steps} is above halt_max_steps={self.halt_max_steps}; no token could "
                "ever halt"
            )

    def check_bp_steps(self, bp_steps: int) -> None:
        """Raise ValueError for a number of stack passes with gradients that leaves a stack without any."""
        if not self.fewest_bp_steps <= bp_steps <= self.stack_passes:
            passes = "L_cycles" if self.flat_loop else "H_cycles * (L_cycles + 1)"
            raise ValueError(
                f"bp_steps={bp_steps}: must be in [{self.fewest_bp_steps}, {self.stack_passes}], up to {passes} stack "
                "passes of a segment; use None for all of them"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks with weights of their own."""
        return self.prelude_layers + self.num_h_layers + self.num_l_layers + self.coda_layers

    @property
    def flat_loop(self) -> bool:
        """Whether one stack is repeated, without a second one above it."""
        return self.num_h_layers == 0

    @property
    def fewest_bp_steps(self) -> int:
        """Stack passes with gradients that leave no stack without any."""
        return 1 if self.flat_loop else 2

    @property
    def stack_passes(self) -> int:
        """Passes through a stack in one segment: H_cycles * (L_cycles + 1), or L_cycles in a flat loop."""
        return self.H_cycles * (self.L_cycles + (not self.flat_loop))

    @property
    def segment_visits(self) -> int:
        """Layer visits of one segment, each with keys and values of its own."""
        return self.H_cycles * (self.L_cycles * self.num_l_layers + self.num_h_layers)

    @property
    def num_hidden_layers(self) -> int:
        """Slots of the key-value cache (the name by which transformers' caches ask), not the number of blocks."""
        once = self.prelude_layers + self.coda_layers
        if self.kv_layout == "last_visit":
            return once + self.num_h_layers + self.num_l_layers
        return once + self.segment_visits * (self.halt_max_steps if self.kv_layout == "per_segment" else 1)


__all__ = ["HrmLmConfig"]
