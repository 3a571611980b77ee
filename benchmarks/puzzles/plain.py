"""The arithmetic of the original HRM and TRM code, written plainly, as the baseline of `speed.py`.

As in the original, the input is embedded again for both forwards of a training step, the second forward has no
shortcut, attention uses torch's fused kernel, and weights are cast to the config's forward_dtype when used. The
original compiles the model with its losses as one graph, which `compiled` does here. Its optimizer is a CUDA kernel;
on a CPU each parameter is updated separately. The weights are copied from a model of the package, so both sides can be
compared. The module covers only what the benchmark needs: rotary positions or `mlp_t`, and the stablemax loss.
"""

import math

import torch
import torch.nn.functional as F


class PlainReasoner:
    """HRM or TRM with a persistent carry, losses and both optimizers."""

    def __init__(self, model, lr=1e-4, weight_decay=1.0, puzzle_lr=1e-4, puzzle_weight_decay=1.0, compiled=False):
        self.device, self.dtype, self.config = model.device, model.compute_dtype, model.config
        self.is_hrm = model.has_continue_value
        self.params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        no_rows = torch.zeros(self.config.num_puzzle_identifiers, 0, device=self.device)
        self.table = no_rows if model.model.puzzle_emb is None else model.model.puzzle_emb.weight.clone()
        self.H_init, self.L_init = (state.clone().to(self.dtype) for state in (model.model.H_init, model.model.L_init))
        frequencies = 10000.0 ** (-torch.arange(0, self.config.head_dim, 2, device=self.device) / self.config.head_dim)
        positions = torch.arange(self.config.max_position_embeddings, device=self.device)
        angles = positions[:, None] * torch.cat((frequencies, frequencies))
        self.cos, self.sin = angles.cos(), angles.sin()
        self.lr, self.weight_decay, self.puzzle_lr, self.puzzle_wd = lr, weight_decay, puzzle_lr, puzzle_weight_decay
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.params.items()}
        self.updates = 0
        self.carry = None
        if compiled:
            self.act = torch.compile(self.act, dynamic=False)
            self.evaluate = torch.compile(self.evaluate, dynamic=False)

    def linear(self, x, name, bias=None):
        return F.linear(x, self.params[name].to(x.dtype), None if bias is None else self.params[bias].to(x.dtype))

    def rms_norm(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)).to(x.dtype)

    def rotate(self, x):
        first, second = x.chunk(2, dim=-1)
        return (x.float() * self.cos + torch.cat((-second, first), dim=-1).float() * self.sin).to(x.dtype)

    def attention(self, x, prefix):
        batch, length, width = x.shape
        heads = self.config.num_attention_heads
        qkv = self.linear(x, prefix + "qkv_proj.weight").view(batch, length, 3 * heads, -1)
        q, k, v = qkv.transpose(1, 2).split(heads, dim=1)
        attended = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        return self.linear(attended.transpose(1, 2).reshape(batch, length, width), prefix + "o_proj.weight")

    def swiglu(self, x, prefix):
        gate, up = self.linear(x, prefix + "gate_up_proj.weight").chunk(2, dim=-1)
        return self.linear(F.silu(gate) * up, prefix + "down_proj.weight")

    def block(self, x, prefix):
        if getattr(self.config, "mlp_t", False):
            x = x.transpose(1, 2)
            x = self.rms_norm(x + self.swiglu(x, prefix + "mlp_t.")).transpose(1, 2)
        else:
            x = self.rms_norm(x + self.attention(x, prefix + "self_attn."))
        return self.rms_norm(x + self.swiglu(x, prefix + "mlp."))

    def level(self, name, z, injection):
        z = z + injection
        layers = self.config.H_layers if name == "H_level" else self.config.L_layers
        for index in range(layers):
            z = self.block(z, f"model.{name}.layers.{index}.")
        return z

    def inner(self, data, rows, z_H, z_L):
        config = self.config
        x = F.embedding(data["input_ids"], self.params["model.embed.tokens.weight"].to(self.dtype))
        rows = F.pad(rows.to(self.dtype), (0, config.prefix_len * config.hidden_size - rows.shape[1]))
        prefix = rows.view(len(rows), config.prefix_len, config.hidden_size)
        x = math.sqrt(config.hidden_size) * torch.cat((prefix, x), dim=1)
        slow = "H_level" if self.is_hrm else "L_level"
        with torch.no_grad():
            for h in range(config.H_cycles):
                for step in range(config.L_cycles):
                    if h == config.H_cycles - 1 and (not self.is_hrm or step == config.L_cycles - 1):
                        break
                    z_L = self.level("L_level", z_L, z_H + x)
                if h < config.H_cycles - 1:
                    z_H = self.level(slow, z_H, z_L)
        for _ in range(1 if self.is_hrm else config.L_cycles):
            z_L = self.level("L_level", z_L, z_H + x)
        z_H = self.level(slow, z_H, z_L)
        logits = self.linear(z_H, "lm_head.weight")[:, config.prefix_len :]
        q = self.linear(z_H[:, 0], "q_head.weight", "q_head.bias").float()
        return z_H, z_L, logits, q[:, 0], q[:, 1]

    def initial_carry(self, batch):
        size = len(batch["input_ids"])
        shape = (size, self.config.max_position_embeddings, self.config.hidden_size)
        data = {name: torch.zeros_like(value) for name, value in batch.items()}
        steps = torch.zeros(size, dtype=torch.int32, device=self.device)
        states = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        return [*states, steps, torch.ones_like(steps, dtype=torch.bool), data]

    def refill(self, carry, batch):
        z_H, z_L, steps, halted, data = carry
        z_H = torch.where(halted[:, None, None], self.H_init, z_H)
        z_L = torch.where(halted[:, None, None], self.L_init, z_L)
        data = {n: torch.where(halted.view(-1, *[1] * (v.dim() - 1)), batch[n], v) for n, v in data.items()}
        return z_H, z_L, torch.where(halted, 0, steps), data

    def evaluate(self, carry, batch):
        """Run one ACT step without gradients; return the new carry and the answers."""
        with torch.no_grad():
            z_H, z_L, steps, data = self.refill(carry, batch)
            rows = self.table[data["puzzle_identifiers"].long()]
            z_H, z_L, logits, _, _ = self.inner(data, rows, z_H, z_L)
            steps = steps + 1
            return [z_H, z_L, steps, steps >= self.config.halt_max_steps, data], logits.argmax(-1)

    def solve(self, batch, max_steps):
        """Return the answers after `max_steps` ACT steps."""
        carry = self.initial_carry(batch)
        for _ in range(max_steps):
            carry, answers = self.evaluate(carry, batch)
        return answers

    def act(self, carry, batch, rows):
        """Run one ACT step on the carry; return the new carry and the loss."""
        config, size = self.config, len(batch["input_ids"])
        z_H, z_L, steps, data = self.refill(carry, batch)
        z_H, z_L, logits, q_halt, q_continue = self.inner(data, rows, z_H, z_L)
        z_H, z_L, steps = z_H.detach(), z_L.detach(), steps + 1
        last = steps >= config.halt_max_steps
        with torch.no_grad():
            wants = q_halt > q_continue if self.is_hrm else q_halt > 0
            explore = torch.rand(size, device=self.device) < config.halt_exploration_prob
            min_steps = explore * torch.randint(2, config.halt_max_steps + 1, (size,), device=self.device)
            halted = (last | wants) & (steps >= min_steps)
            if self.is_hrm:
                _, _, _, next_halt, next_continue = self.inner(data, rows, z_H, z_L)
                target = torch.sigmoid(torch.where(last, next_halt, torch.maximum(next_halt, next_continue)))
        labels = data["labels"].long()
        mask = labels != -100
        count = mask.sum(-1)
        exact = (mask & (logits.argmax(-1) == labels)).sum(-1) == count
        wide = logits.double()
        s = torch.where(wide < 0, 1 / (1 - wide + 1e-30), wide + 1)
        log_p = torch.log(s / s.sum(-1, keepdim=True))
        per_token = -log_p.gather(-1, labels.where(mask, 0)[..., None])[..., 0]
        lm_loss = (torch.where(mask, per_token, 0) / count.clamp_min(1)[:, None]).sum()
        loss = lm_loss + 0.5 * F.binary_cross_entropy_with_logits(q_halt, exact.float(), reduction="sum")
        if self.is_hrm:
            loss = loss + 0.5 * F.binary_cross_entropy_with_logits(q_continue, target, reduction="sum")
        return [z_H, z_L, steps, halted, data], loss / size

    def train_step(self, batch):
        """Run one ACT step on the carry, backpropagate, step both optimizers, and return the loss."""
        if self.carry is None:
            self.carry = self.initial_carry(batch)
        halted, data = self.carry[3:]
        ids = torch.where(halted, batch["puzzle_identifiers"], data["puzzle_identifiers"]).long()
        rows = self.table[ids].requires_grad_()
        self.carry, loss = self.act(self.carry, batch, rows)
        loss.backward()
        self.update(ids, rows.grad)
        return loss.detach()

    @torch.no_grad()
    def update(self, ids, row_grads):
        unique, inverse = torch.unique(ids, return_inverse=True)
        total = row_grads.new_zeros(len(unique), row_grads.shape[1]).index_add_(0, inverse, row_grads)
        self.table[unique] = self.table[unique] * (1 - self.puzzle_lr * self.puzzle_wd) - self.puzzle_lr * total.sign()
        self.updates += 1
        for name, p in self.params.items():
            m, v = self.moments[name]
            p.mul_(1 - self.lr * self.weight_decay)
            m.lerp_(p.grad, 0.1)
            v.lerp_(p.grad * p.grad, 0.05)
            step = self.lr / (1 - 0.9**self.updates)
            p.sub_(step * torch.atan2(m, v.sqrt() / math.sqrt(1 - 0.95**self.updates)))
            p.grad = None
