"""Configuration of the hierarchical reasoning language model, and its presets."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .bounds import ANY_NUMBER, LOSS_WEIGHT, PROBABILITY, SPREAD, TOKEN_ID, BoundedFields, bounded, number, whole
from .modeling_utils import PresetsMixin


COUNT, SOME = whole(1), whole(0)
# A flat loop whose every pass can be the last, trained through all of them by the last one's loss. Its gate is trained
# afterwards (`--train_gate_only`). How it was chosen: docs/architectures/hrm_lm.md.
LOOP = {
    "num_h_layers": 0, "H_cycles": 1, "L_cycles": 1, "bp_steps": 1, "halt_max_steps": 4, "initial_state": "zero",
    "detach_between_segments": False, "deep_supervision": "last", "q_loss_weight": 0.0, "ponder_loss_weight": 0.0,
    "exit_criterion": "fixed",
}  # fmt: skip


def sizes(width: int, heads: int, inner: int, layers: tuple[int, ...], positions: int = 1024, **fields) -> dict:
    """Fields of a preset: `layers` are (high, low) of two stacks, or (prelude, loop, coda) of a flat loop."""
    two, flat = ("num_h_layers", "num_l_layers"), ("prelude_layers", "num_l_layers", "coda_layers")
    loop = LOOP if len(layers) == 3 else {}
    blocks = dict(zip(flat if loop else two, layers))
    own = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    return {**loop, **own, **blocks, "max_position_embeddings": positions, **fields}


@strict
class HrmLmConfig(PresetsMixin, BoundedFields, PreTrainedConfig):
    r"""Configuration of `hrm_lm`: a causal language model that thinks in segments, with a halting decision per token.

    Shapes and sizes:
        vocab_size (50304), hidden_size (512), intermediate_size (1792): token ids, width D of the states and of the
            SwiGLU.
        num_h_layers, num_l_layers (3): blocks of the high- and of the low-level stack. Without a high-level stack
            (num_h_layers=0, H_cycles=1) the model is a flat loop over the low-level stack, whose state is read out.
        prelude_layers, coda_layers (0): blocks before and behind the recurrence, run once a token.
        num_attention_heads (8), num_key_value_heads: query and key heads; None for as many key heads.
        head_dim: None for hidden_size / num_attention_heads.
        max_position_embeddings (1024), rope_parameters: longest context in tokens; rotary embedding of base 10000.
    Block:
        rms_norm_eps (1e-6), norm_affine (False): RMS norms, without gains by default.
        norm_position ("pre_exit"): before each branch and once at the exit of a stack; "sandwich" behind each branch,
            too; "post" after each residual sum.
        attention_gate (True), qk_norm (False): sigmoid gate on the attention output; RMS norm of queries and keys.
        hidden_act ("silu"), mlp_bias (False), attention_dropout, hidden_dropout (0.0): as in Llama; the latter on the
            output of each branch.
        initializer_range: std of weights; None for LeCun's 1 / sqrt(fan in).
        embedding_scale: factor on embeddings; None for 1 / their std at the start.
    Recurrence:
        H_cycles (2), L_cycles (3): high-level cycles a segment, low-level passes a cycle.
        bp_steps (5): how many of the H_cycles * (L_cycles + 1) stack passes of a segment carry gradients: the last
            ones of each stack, the high-level stack first, so at least 2; of a flat loop the last of its L_cycles
            passes, at least 1. None for all of them.
        detach_between_segments (True): stop gradients from one segment to the one before.
        bp_segments: without that stop, only the last segments carry gradients; None for all.
        initial_state ("fixed"): the low-level state before the first pass: a random vector that is not trained,
            "learned", "zero", or "random": drawn for every token in training and the fixed vector in inference.
        step_vectors (False): a vector for each pass, added to what the pass reads; zero at the start. A pass beyond
            those of the config takes the last one's.
        pass_gains (False): factors on both branches of each block in each pass; 1 at the start.
        mhc_flows (1): of a flat loop, residual streams that hyper-connections mix between passes.
        segment_sampling ("fixed"): segments in training are halt_max_steps. "lognormal_poisson" draws their number for
            each forward, with that mean; no token halts then, and more segments can help in inference. "per_token"
            draws one for each token, which halts there.
        segment_sampling_sigma (0.5): spread of the logarithm of the Poisson rate.
    Halting:
        halt_max_steps (4), halt_min_steps (1): most and fewest segments of a token. A most of 1 builds no gate.
        halt_exploration_prob (0.1): share of tokens that get a random minimum in training.
        initial_halt_prob (0.05): probability that the gate of a new model halts after a segment.
        halt_margin (0.0): a token halts if q_halt - q_continue is above it.
        exit_criterion ("q"): what halts a token: "q", "cdf" (learned gate); "kl", "latent_diff", "second_diff",
            "entropy_diff", "confidence" (training-free, in inference only); or "fixed" (never). Criteria that compare
            next-token distributions read the state by the head alone, without the coda.
        exit_threshold: of the criteria but "q"; None for the criterion's own default.
        convergence_threshold (0.01): relative change of a state that counts as converged, in metrics only.
        kv_layout ("per_segment"): keys and values of every visit of a layer (exact); "last_segment" those of the last
            segment; "last_visit" one slot a layer. The last two are approximate and do not grow with M.
    Losses:
        lm_loss_weight (1.0), ds_loss_weight (1.0), q_loss_weight (0.1), ponder_loss_weight (3e-3): weights of the
            next-token loss at the halting segment, deep supervision, halting values, and compute.
        deep_supervision ("all"), ds_schedule ("linear"): all segments or the last; weight of segment m.
        q_target ("loss_gain"): to halt is right if no later segment lowers the loss by loss_gain_threshold (0.05)
            nats; "correct": if the most likely token is the right one.
        halt_step_cost (0.1): price of one more segment, in units of the halting values (0 to 1).
        ponder_type ("expected_steps"): see `early_exit`.
        label_smoothing (0.0): in training only, never in a reported `lm_loss`.
    """

    model_type = "hrm_lm"
    keys_to_ignore_at_inference = [
        "past_key_values", "lm_loss", "deep_supervision_loss", "q_halt_loss", "q_continue_loss", "ponder_loss",
        "q_logits", "halt_steps", "segment_logits", "metrics",
    ]  # fmt: skip
    base_model_tp_plan = {
        f"{stack}.layers.*.{linear}": plan
        for stack in ("L_module", "H_module", "prelude", "coda")
        for plan, linears in {
            "colwise": [
                *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate")),
                "mlp.gate_proj",
                "mlp.up_proj",
            ],
            "rowwise": ["self_attn.o_proj", "mlp.down_proj"],
        }.items()
        for linear in linears
    }
    base_model_fsdp_plan = dict.fromkeys(
        ("embed_tokens", "H_module.layers.*", "L_module.layers.*", "prelude.layers.*", "coda.layers.*"),
        "free_full_weight",
    )

    chunk_size_feed_forward: int = bounded(0, SOME)  # of the library; here for its bound
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
    H_cycles: int = bounded(2, COUNT)
    L_cycles: int = bounded(3, COUNT)
    bp_steps: int | None = bounded(5, COUNT)
    detach_between_segments: bool = True
    bp_segments: int | None = bounded(None, COUNT)
    initial_state: Literal["fixed", "learned", "zero", "random"] = "fixed"
    step_vectors: bool = False
    pass_gains: bool = False
    mhc_flows: int = bounded(1, COUNT)
    segment_sampling: Literal["fixed", "lognormal_poisson", "per_token"] = "fixed"
    segment_sampling_sigma: float | int = bounded(0.5, number(0, 3))
    halt_max_steps: int = bounded(4, COUNT)
    halt_min_steps: int = bounded(1, COUNT)
    halt_exploration_prob: float | int = bounded(0.1, PROBABILITY)
    initial_halt_prob: float | int = bounded(0.05, number(1e-6, 1 - 1e-6))
    halt_margin: float | int = bounded(0.0, ANY_NUMBER)
    exit_criterion: Literal["q", "cdf", "kl", "latent_diff", "second_diff", "entropy_diff", "confidence", "fixed"] = (
        "q"
    )
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

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "hrm-lm-10m-byte": sizes(384, 6, 1024, (3, 3), vocab_size=264),
        "hrm-lm-25m": sizes(384, 6, 1024, (2, 2), 512),
        "hrm-lm-50m": {},
        "hrm-lm-100m": sizes(768, 12, 2048, (4, 4)),
        "hrm-lm-350m": sizes(1024, 16, 2816, (11, 11), 2048),
        "hrm-lm-1b": sizes(1536, 12, 4096, (16, 16), 4096),
        "hrm-lm-loop-10m-byte": sizes(384, 6, 1024, (2, 2, 2), vocab_size=264),
        "hrm-lm-loop-25m": sizes(384, 6, 1024, (1, 2, 1), 512),
        "hrm-lm-loop-50m": sizes(512, 8, 1792, (2, 2, 2)),
        "hrm-lm-loop-100m": sizes(768, 12, 2048, (2, 4, 2)),
    }

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
        self.check_bp_steps(self.bp_steps)
        heads, key_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % key_heads:
            raise ValueError(f"num_key_value_heads={key_heads}: must divide num_attention_heads={heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, for rotary positions")
        if self.mhc_flows > 1 and not self.flat_loop:
            raise ValueError(f"mhc_flows={self.mhc_flows}: needs a flat loop; set num_h_layers=0 and H_cycles=1")
        if self.bp_segments is not None and self.detach_between_segments:
            raise ValueError(f"bp_segments={self.bp_segments}: needs detach_between_segments=False")
        if self.halt_min_steps > self.halt_max_steps:
            raise ValueError(f"halt_min_steps={self.halt_min_steps}: above halt_max_steps={self.halt_max_steps}")

    def check_bp_steps(self, bp_steps: int) -> None:
        """Raise ValueError for a number of stack passes with gradients that leaves a stack without any."""
        if self.flat_loop and self.H_cycles != 1:
            raise ValueError(f"H_cycles={self.H_cycles}: must be 1 without a high-level stack; set L_cycles instead")
        if not self.fewest_bp_steps <= bp_steps <= self.stack_passes:
            raise ValueError(
                f"bp_steps={bp_steps}: must be in [{self.fewest_bp_steps}, {self.stack_passes}], up to the stack "
                "passes of a segment; use None for all of them"
            )

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
