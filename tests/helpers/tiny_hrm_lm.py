"""Tiny `hrm_lm` models, and a slow reference implementation that needs no mask."""

import torch

from hrm_hf import HrmLmConfig, HrmLmForCausalLM


VOCAB_SIZE = 50


def config(**overrides) -> HrmLmConfig:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_h_layers": 2, "num_l_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "halt_max_steps": 3, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return HrmLmConfig(**{**fields, **overrides})


def model(seed: int = 0, undecided: bool = True, attention: str = "sdpa", **overrides) -> HrmLmForCausalLM:
    """Return a seeded model in eval mode; with `undecided`, tokens halt after 1, 2 or 3 segments."""
    torch.manual_seed(seed)
    settings = config(**overrides)
    settings._attn_implementation = attention
    built = HrmLmForCausalLM(settings).eval()
    if undecided and built.model.q_head is not None:
        with torch.no_grad():
            built.model.q_head.weight.normal_()
            built.model.q_head.bias.copy_(torch.tensor([-1.0, 1.0]))
    return built


def tokens(rows: int = 2, length: int = 10, seed: int = 1) -> torch.Tensor:
    """Return random ordinary tokens [rows, length]."""
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


# A flat loop of two blocks with all optional parts; segments of one pass.
LOOP = {
    "num_h_layers": 0, "num_l_layers": 2, "H_cycles": 1, "L_cycles": 1, "bp_steps": 1, "prelude_layers": 1,
    "coda_layers": 1, "detach_between_segments": False, "deep_supervision": "last",
}  # fmt: skip


@torch.no_grad()
def one_token_at_a_time(model: HrmLmForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Return logits [T, V] and the segments of each token [T] of a sequence, from the definition.

    Each token is processed alone, segment by segment, until its own values say halt. It sees the keys and values that
    earlier tokens left at the same visit of the same segment; halted tokens leave those of their last segment.
    Supports only pre-norms without gains, halting rule "q", one stream and plain rotary embeddings.
    """
    c, weights = model.config, model.state_dict()
    left = {}  # (segment, visit): keys and values of the tokens so far
    logits, steps = [], []
    for position, token in enumerate(ids.tolist()):
        x = weights["model.embed_tokens.weight"][token] * c.embedding_scale
        x = _once(c, weights, "prelude", c.prelude_layers, x, position, left)
        z_H, z_L = x, weights.get("model.z_L_init", torch.zeros_like(x))
        halted, depth = False, 0
        for segment in range(c.halt_max_steps):
            if not halted:
                z_H, z_L, own = _segment(c, weights, z_H, z_L, x, position, segment, left)
                halt, go_on = weights["model.q_head.weight"] @ z_H + weights["model.q_head.bias"]
                halted, depth = halt - go_on > c.halt_margin, depth + 1
            for visit, key_value in enumerate(own):
                left.setdefault((segment, visit), []).append(key_value)
        z_H = _once(c, weights, "coda", c.coda_layers, z_H, position, left)
        logits.append(weights["lm_head.weight"] @ z_H)
        steps.append(depth)
    return torch.stack(logits), steps


def _once(c, weights, name, num_layers, x, position, left):
    """Apply the blocks that a token passes through once."""
    if num_layers == 0:
        return x
    own = []
    x = _stack(c, weights, name, num_layers, x, position, name, left, own)
    for visit, key_value in enumerate(own):
        left.setdefault((name, visit), []).append(key_value)
    return x


def _segment(c, weights, z_H, z_L, x, position, segment, left):
    """Run one segment of one token; return both states, and keys and values in visit order."""
    own, passed = [], segment * c.H_cycles
    for h in range(c.H_cycles):
        for low in range(c.L_cycles):
            read = z_L + x if c.flat_loop else z_L + z_H + x
            number = (passed + h) * c.L_cycles + low
            z_L = _stack(c, weights, "L_module", c.num_l_layers, read, position, segment, left, own, number)
        if c.flat_loop:
            z_H = z_L
        else:
            read = z_H + z_L
            z_H = _stack(c, weights, "H_module", c.num_h_layers, read, position, segment, left, own, passed + h)
    return z_H, z_L, own


def _stack(c, weights, name, num_layers, hidden, position, segment, left, own, number=0):
    step_vectors = weights.get(f"model.{name}.step_vectors")
    pass_gains = weights.get(f"model.{name}.pass_gains")
    if step_vectors is not None:
        hidden = hidden + step_vectors[number]
    for index in range(num_layers):
        prefix = f"model.{name}.layers.{index}."
        w = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        h = _rms_norm(hidden, c)
        query, key = (_rotated((w[f"self_attn.{n}_proj.weight"] @ h).view(-1, c.head_dim), position, c) for n in "qk")
        value = (w["self_attn.v_proj.weight"] @ h).view(-1, c.head_dim)
        seen = [*left.get((segment, len(own)), []), (key, value)]
        own.append((key, value))
        mixed = []
        for head in range(c.num_attention_heads):
            shared = head * c.num_key_value_heads // c.num_attention_heads
            scores = torch.stack([query[head] @ k[shared] for k, _ in seen]) / c.head_dim**0.5
            mixed.append(sum(p * v[shared] for p, (_, v) in zip(scores.softmax(0), seen)))
        gate = torch.sigmoid(w["self_attn.gate_proj.weight"] @ h)
        factors = torch.ones(2) if pass_gains is None else 1 + pass_gains[number, index]
        mixed = w["self_attn.o_proj.weight"] @ (torch.cat(mixed) * gate)
        hidden = hidden + factors[0] * (_rms_norm(mixed, c) if c.norm_position == "sandwich" else mixed)
        h = _rms_norm(hidden, c)
        gated = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ h) * (w["mlp.up_proj.weight"] @ h)
        mixed = w["mlp.down_proj.weight"] @ gated
        hidden = hidden + factors[1] * (_rms_norm(mixed, c) if c.norm_position == "sandwich" else mixed)
    return _rms_norm(hidden, c)


def _rms_norm(x, c):
    return x / (x.square().mean() + c.rms_norm_eps).sqrt()


def _rotated(heads, position, c):
    half = heads.shape[-1] // 2
    angle = position * c.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=heads.dtype) / half)
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)
