"""Base classes for all puzzle models: initialization, reasoner interface, ACT step and losses.

`PuzzleSolvingHead.forward` is ONE ACT step on a carry: it looks up puzzle rows and runs `act_step`, which compiles to
one graph. The loop over steps is in Python: in the trainer, with one optimizer step per ACT step, or in `solve`.

There is no generation, mask or key-value cache, because these models see the complete board at once.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from .act import (
    LOSSES,
    ActCarry,
    continue_target,
    exploration_min_steps,
    halted_metrics,
    halting_loss,
    refill,
    replace_rows,
    row_mean_loss,
    sequence_correctness,
    wants_to_halt,
)
from .configuration_hrm_puzzle import EquilibriumConfig, HrmPuzzleConfig
from .modeling_utils import CheckpointCodeMixin, validate_labels, validate_no_attentions
from .puzzle_layers import (
    CastedLinear,
    PoolingScores,
    PuzzleInputEmbedding,
    QHead,
    ReasoningLevel,
    UnitMeans,
    last_cycle_gradient,
    truncated_normal_,
    truncated_normal_like,
)
from .puzzle_table import PuzzleEmbedding, PuzzleTableMixin
from .solving_puzzle import PuzzleSolverMixin


if TYPE_CHECKING:
    from .pipeline_puzzle import PuzzlePipeline  # noqa: F401 - saved with checkpoints

MAX_BLOCKS_IN_ONE_GRAPH = 32


@dataclass
class PuzzleModelOutput(ModelOutput):
    """Latent states [B, prefix slots + S, D] after one ACT step. `last_hidden_state` is z_H."""

    last_hidden_state: torch.Tensor | None = None
    z_H: torch.Tensor | None = None
    z_L: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class PuzzleSolvingOutput(ModelOutput):
    """Result of one ACT step.

    Attributes:
        loss: lm_loss + 0.5 * (q_halt_loss + q_continue_loss). All losses are sums over rows, divided by B.
        logits: [B, S, V].
        q_halt_logits, q_continue_logits: float32 [B].
        target_q_continue: [B], when training a model with a continue value.
        carry: the new `ActCarry`; pass it to the next call.
        metrics: sums over the rows that halted in this call, and their `count`.
        hidden_states: (z_L, z_H), if requested.
    """

    loss: torch.Tensor | None = None
    lm_loss: torch.Tensor | None = None
    q_halt_loss: torch.Tensor | None = None
    q_continue_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    q_halt_logits: torch.Tensor | None = None
    q_continue_logits: torch.Tensor | None = None
    target_q_continue: torch.Tensor | None = None
    carry: ActCarry | None = None
    metrics: dict[str, torch.Tensor] | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class PuzzlePreTrainedModel(CheckpointCodeMixin, PreTrainedModel):
    """Base class with the initialization and saving shared by all puzzle architectures."""

    config: HrmPuzzleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PuzzleBlock"]
    # transformers 5.23 does not place these vectors when it splits a model across devices; `to` moves them later.
    _no_placement_params = {"model.H_init", "model.L_init", "H_init", "L_init"}
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, QHead):
            init.zeros_(module.weight)  # initial halting is unlikely (sigmoid(-5) < 1 %) and state-independent
            init.constant_(module.bias, -5.0)
        elif isinstance(module, PoolingScores):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            truncated_normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            truncated_normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, PuzzleEmbedding):
            init.zeros_(module.weight)
        elif isinstance(module, PuzzleInputEmbedding):
            if self.config.rotary_parts:
                for buffer, table in zip((module.cos, module.sin), module.rotary_tables()):
                    init.copy_(buffer, table)
        elif isinstance(module, UnitMeans):
            init.copy_(module.members, module.member_table())
        elif isinstance(module, PuzzleReasoner):
            for state in (module.H_init, module.L_init):
                if state is not None:
                    truncated_normal_(state, std=1.0)
        else:
            super()._init_weights(module)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations: `config.forward_dtype`, or if that is None, the dtype of the weights."""
        return getattr(torch, self.config.forward_dtype) if self.config.forward_dtype else self.dtype

    def wants_hidden_states(self, requested: bool | None) -> bool:
        """Return `requested`, or the config's `output_hidden_states` if `requested` is None."""
        return self.config.output_hidden_states if requested is None else requested

    def inductor_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of `torch.compile` with what makes small graphs fast on a CPU.

        There, inductor's random numbers are slow, so graphs draw with torch's own. Calling kernels from C++ instead
        of Python saves a tenth of the time of a step at width 32.
        """
        if self.device.type != "cpu":
            return kwargs
        if self.config.draws_random_numbers:
            torch._inductor.config.fallback_random = True
        if kwargs.get("backend", "inductor") != "inductor" or kwargs.get("mode") or kwargs.get("options"):
            return kwargs
        return {**kwargs, "options": {"cpp_wrapper": True}}


class PuzzleReasoner(PuzzlePreTrainedModel):
    """Base model with the input embedding. Each architecture defines its recursion in `reason`."""

    embedding_class: type[PuzzleInputEmbedding] = PuzzleInputEmbedding

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__(config)
        self.embed = self.embedding_class(config)
        self.puzzle_emb = None
        if config.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(config.num_puzzle_identifiers, config.puzzle_emb_ndim)
        self.H_init = nn.Buffer(torch.empty(config.hidden_size))
        self.L_init = nn.Buffer(torch.empty(config.hidden_size))

    def reason(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        z_H: torch.Tensor,
        z_L: torch.Tensor,
        num_queries: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one ACT step on the latent states. The architecture decides which cycles have gradients.

        x, z_H and z_L are [B, T, D]. With `num_queries`, only the first `num_queries` positions of z_H are computed,
        which saves most of the last block's work.
        """
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed.tokens = value

    def puzzle_rows(self, puzzle_identifiers: torch.Tensor | None, batch_size: int) -> torch.Tensor | None:
        """Return rows [B, puzzle_emb_ndim] of the table. Without identifiers, use the blank puzzle (0)."""
        if self.puzzle_emb is None:
            return None
        if puzzle_identifiers is None:
            puzzle_identifiers = torch.zeros(batch_size, dtype=torch.int32, device=self.device)
        return self.puzzle_emb(puzzle_identifiers)

    def fresh_states(self, x: torch.Tensor, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `initial_states` plus Gaussian noise with standard deviation `noise`.

        The head calls this outside the module's forward, where H_init and L_init may be offloaded. In that case,
        accelerate's hook loads them as for a forward.
        """
        hook = getattr(self, "_hf_hook", None)
        fetched = hook is not None and any(buffer.is_meta for buffer in self.buffers(recurse=False))
        if fetched:
            hook.pre_forward(self)
        z_H, z_L = self.initial_states(x)
        if fetched:
            hook.post_forward(self, None)
        if noise:
            z_H, z_L = (z + noise * torch.randn(z.shape, dtype=z.dtype, device=z.device) for z in (z_H, z_L))
        return z_H, z_L

    def initial_states(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the initial z_H and z_L, with the shape, dtype and device of x [B, T, D]."""
        return self.H_init.to(x).expand_as(x), self.L_init.to(x).expand_as(x)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        z_H: torch.Tensor | None = None,
        z_L: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> PuzzleModelOutput:
        """Run one ACT step on input_ids [B, S], starting from the given latent states or the initial states."""
        validate_no_attentions(self, output_attentions)
        rows = self.puzzle_rows(puzzle_identifiers, input_ids.shape[0])
        x, rotary = self.embed(input_ids, rows, self.compute_dtype)
        if z_H is None or z_L is None:
            z_H, z_L = self.fresh_states(x)
        z_H, z_L = self.reason(x, rotary, z_H, z_L)
        states = (z_L, z_H) if self.wants_hidden_states(output_hidden_states) else None
        return PuzzleModelOutput(last_hidden_state=z_H, z_H=z_H, z_L=z_L, hidden_states=states)


class EquilibriumReasoner(PuzzleReasoner):
    """Reasoner with a single level that updates both states, as in TRM and EqR (arXiv 2605.21488).

    z <- (1 - update_rate) z + update_rate L_level(z, injection) + noise_scale * normal, in training and in evaluation.
    """

    config: EquilibriumConfig

    def __init__(self, config: EquilibriumConfig):
        super().__init__(config)
        if config.random_initial_states:
            self.H_init = self.L_init = None

    def reason(self, x, rotary, z_H, z_L, num_queries=None):
        return last_cycle_gradient(self.cycle, self.config.H_cycles, x, rotary, z_H, z_L, num_queries)

    def cycle(self, x, rotary, z_H, z_L, num_queries=None):
        """Update z_L `L_cycles` times, then z_H once."""
        for _ in range(self.config.L_cycles):
            z_L = self._pass(z_L, z_H + x, rotary)
        return self._pass(z_H, z_L, rotary, num_queries), z_L

    def _pass(self, z, injection, rotary, num_queries=None):
        rate, noise_scale = self.config.update_rate, self.config.noise_scale
        new = self.L_level(z, injection, rotary, num_queries)
        if rate != 1:
            new = (1 - rate) * z[:, :num_queries] + rate * new
        return new + noise_scale * torch.randn_like(new) if noise_scale else new

    def initial_states(self, x):
        if not self.config.random_initial_states:
            return super().initial_states(x)
        z_H, z_L = (truncated_normal_like(x, std) for std in (self.config.H_init_std, self.config.L_init_std))
        return z_H, z_L


class PuzzleSolvingHead(PuzzleTableMixin, PuzzleSolverMixin, PuzzlePreTrainedModel):
    """Puzzle model: a `PuzzleReasoner` with token and halting heads, the ACT step and `solve`."""

    reasoner_class: type[PuzzleReasoner]
    # HRM learns a continue value, bootstrapped from a second forward pass; TRM only uses the sign of q_halt.
    has_continue_value: bool
    learns_to_halt = True  # if False, rows halt at random in training, and q_halt has no loss
    _keep_in_fp32_modules = ["q_head"]  # never quantized, because halting depends on small differences
    _custom_pipelines = {
        "puzzle-solving": {"impl": "pipeline_puzzle.PuzzlePipeline", "pt": ["AutoModelForMaskedLM"], "type": "text"}
    }

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__(config)
        self.model = self.reasoner_class(config)
        self.make_heads(config)
        self.post_init()

    def make_heads(self, config: HrmPuzzleConfig) -> None:
        """Build the heads that `read_out` and `q_values` apply to the states."""
        self.lm_head = CastedLinear(config.hidden_size, config.vocab_size, bias=False)
        self.q_head = QHead(config.hidden_size, 2)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def initial_carry(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> ActCarry:
        """Return a carry of B halted slots, which makes the next call start every row on new data."""
        batch_size = input_ids.shape[0]
        z_H, z_L = (
            torch.zeros(shape, dtype=self.compute_dtype, device=input_ids.device)
            for shape in self.config.state_shapes(batch_size)
        )
        incoming = _incoming(input_ids, puzzle_identifiers, labels, self.config.vocab_size)
        data = {name: torch.zeros_like(value) for name, value in incoming.items()}
        steps = torch.zeros(batch_size, dtype=torch.int32, device=input_ids.device)
        return ActCarry(z_H, z_L, steps, torch.ones_like(steps, dtype=torch.bool), data)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        carry: ActCarry | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> PuzzleSolvingOutput:
        """Run one ACT step.

        Args:
            input_ids: [B, S]. puzzle_identifiers: [B], 0 if absent. labels: [B, S], -100 where ignored.
                Only slots that have halted in `carry` take their new row. The loss uses the data in the new carry.
            carry: the carry that the previous call returned; None to start every row from the beginning.

        Raises:
            ValueError: the batch does not match the config or the carry, or attention weights are requested.
        """
        validate_no_attentions(self, output_attentions)
        incoming = _incoming(input_ids, puzzle_identifiers, labels, self.config.vocab_size)
        carry = self.initial_carry(**incoming) if carry is None else carry
        _validate_carry(carry, incoming)
        ids = torch.where(carry.halted, incoming["puzzle_identifiers"], carry.current_data["puzzle_identifiers"])
        explores = self.training and self.config.halt_max_steps > 1
        min_steps = self.sample_min_steps(carry) if explores else None
        rows = self.model.puzzle_rows(ids, len(ids))
        carry, outputs, states = self._act_step_in_parts(carry, incoming, rows, min_steps)
        wanted = self.wants_hidden_states(output_hidden_states)
        return PuzzleSolvingOutput(**outputs, carry=carry, hidden_states=states if wanted else None)

    def _act_step_in_parts(self, carry, incoming, puzzle_rows, min_steps):
        """Run `act_step` on parts of the batch that fit into a CPU's cache, and join the results."""
        batch_size = len(carry.steps)
        size = batch_size if torch.compiler.is_compiling() else self.rows_per_part(batch_size)
        if size == batch_size:
            return self.act_step(carry, incoming, puzzle_rows, min_steps)
        count = batch_size // size
        names, values = incoming.keys(), zip(*(value.split(size) for value in incoming.values()))
        parts = [
            self.act_step(*part)
            for part in zip(
                carry.split(size),
                [dict(zip(names, each)) for each in values],
                [None] * count if puzzle_rows is None else puzzle_rows.split(size),
                [None] * count if min_steps is None else min_steps.split(size),
            )
        ]
        carries, outputs, states = zip(*parts)
        joined = {}
        for name, first in outputs[0].items():
            each = [output[name] for output in outputs]
            if name == "metrics":
                joined[name] = {metric: sum(metrics[metric] for metrics in each) for metric in first}
            else:
                joined[name] = torch.cat(each) if first.dim() else torch.stack(each).mean()
        return ActCarry.join(carries), joined, tuple(torch.cat(each) for each in zip(*states))

    def rows_per_part(self, batch_size: int) -> int:
        """Return the rows per part of a batch: on a CPU, a divisor of the batch size that fits into the cache."""
        most = self.boards_per_call
        if self.device.type != "cpu" or batch_size <= most:
            return batch_size
        size = next(size for size in range(most, 0, -1) if batch_size % size == 0)
        return size if 2 * size >= most else batch_size  # small parts would cost more than they save

    def act_step(
        self,
        carry: ActCarry,
        incoming: dict[str, torch.Tensor],
        puzzle_rows: torch.Tensor | None,
        min_steps: torch.Tensor | None,
    ) -> tuple[ActCarry, dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Run the tensor part of one ACT step. It has no data-dependent branches and compiles to one graph.

        Args:
            puzzle_rows: [B, puzzle_emb_ndim], table rows of the puzzles after the refill.
            min_steps: int32 [B], minimum ACT steps of each slot; None to run all steps (evaluation).

        Returns:
            The new carry, the fields of `PuzzleSolvingOutput`, and the undetached (z_L, z_H).
        """
        steps, data = refill(carry, incoming)
        steps = steps + 1
        last = steps >= self.config.halt_max_steps
        x, rotary = self.model.embed(data["input_ids"], puzzle_rows, self.compute_dtype)
        fresh_H, fresh_L = self.model.fresh_states(x)
        z_H, z_L = replace_rows(carry.halted, fresh_H, carry.z_H), replace_rows(carry.halted, fresh_L, carry.z_L)
        z_H, z_L = self.model.reason(x, rotary, z_H, z_L)
        logits = self.read_out(z_H)
        q_halt, q_continue = self.q_values(z_H, logits)
        outputs = {"logits": logits, "q_halt_logits": q_halt, "q_continue_logits": q_continue}
        halted = last
        if min_steps is not None:
            halted = steps >= min_steps
            if self.learns_to_halt:
                halted &= last | wants_to_halt(q_halt, q_continue if self.has_continue_value else None)
            if self.has_continue_value:
                with torch.no_grad():
                    next_H, _ = self.model.reason(x, rotary, z_H, z_L, num_queries=1)
                    outputs["target_q_continue"] = continue_target(*self.q_values(next_H), last)
        if "labels" in data:
            outputs |= self._losses_and_metrics(outputs, data["labels"], halted, steps)
        return ActCarry(z_H.detach(), z_L.detach(), steps, halted, data), outputs, (z_L, z_H)

    def sample_min_steps(self, carry: ActCarry) -> torch.Tensor:
        """Draw each slot's minimum number of ACT steps, int32 [B], for exploration in training."""
        return exploration_min_steps(carry.steps, self.config.halt_max_steps, self.config.halt_exploration_prob)

    def read_out(self, z_H: torch.Tensor) -> torch.Tensor:
        """Compute token logits [B, S, V] from a state."""
        return self.lm_head(z_H[:, self.config.prefix_len :])

    def q_values(self, z_H: torch.Tensor, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute q_halt and q_continue, float32 [B], from z_H [B, T, D]. `logits` are z_H's token logits."""
        return self.q_head(z_H[:, 0]).float().unbind(-1)

    def _losses_and_metrics(self, outputs, labels, halted, steps) -> dict[str, Any]:
        batch_size, logits, q_halt = labels.shape[0], outputs["logits"], outputs["q_halt_logits"]
        with torch.no_grad():
            num_correct, num_labels = sequence_correctness(logits, labels)
            metrics = halted_metrics(halted, steps, num_correct, num_labels, q_halt)
        lm_loss = row_mean_loss(LOSSES[self.config.loss_type](logits, labels), num_labels) / batch_size
        losses = {"loss": lm_loss, "lm_loss": lm_loss}
        if self.learns_to_halt:
            losses["q_halt_loss"] = halting_loss(q_halt, num_correct == num_labels) / batch_size
            losses["loss"] = lm_loss + 0.5 * losses["q_halt_loss"]
        if "target_q_continue" in outputs:
            continue_loss = halting_loss(outputs["q_continue_logits"], outputs["target_q_continue"]) / batch_size
            losses |= {"q_continue_loss": continue_loss, "loss": losses["loss"] + 0.5 * continue_loss}
        return {**losses, "metrics": metrics}

    def compile_act_step(self, **kwargs: Any) -> None:
        """Compile the training step, passing keyword arguments to `torch.compile`.

        A small model becomes one graph. A large one is compiled per cycle or per level, because the compile time grows
        with the number of inlined blocks (95 s instead of 28 s for HRM's 48 blocks on two cores). A cycle with
        gradients is one graph, so the gradients of its passes are summed in it. `compile_solve` compiles `solve`.
        """
        kwargs = {"dynamic": False, **self.inductor_options(kwargs)}
        levels = [module for module in self.model.children() if isinstance(module, ReasoningLevel)]
        blocks = (self.config.L_cycles + 1) * max(len(level.layers) for level in levels)  # of one cycle
        if blocks * self.config.H_cycles * (1 + self.has_continue_value) <= MAX_BLOCKS_IN_ONE_GRAPH:
            self.act_step = torch.compile(self.act_step, fullgraph=True, **kwargs)
        elif isinstance(self.model, EquilibriumReasoner) and blocks <= MAX_BLOCKS_IN_ONE_GRAPH:
            self.model.cycle = torch.compile(self.model.cycle, fullgraph=True, **kwargs)
        else:
            for level in levels:
                level.compile(fullgraph=True, **kwargs)

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for the optimizer: the trainable weights, and the sparse puzzle table."""
        groups = [{"name": "dense", "params": [p for p in self.parameters() if p.requires_grad]}]
        if self.model.puzzle_emb is not None:
            groups.append({"name": "puzzle_emb", "params": [self.model.puzzle_emb.weight], "sparse_rows": True})
        return groups


def _incoming(input_ids, puzzle_identifiers, labels, vocab_size: int) -> dict[str, torch.Tensor]:
    if puzzle_identifiers is None:
        puzzle_identifiers = torch.zeros(input_ids.shape[0], dtype=torch.int32, device=input_ids.device)
    validate_labels(labels, input_ids, vocab_size)
    data = {"input_ids": input_ids, "puzzle_identifiers": puzzle_identifiers}
    return data if labels is None else {**data, "labels": labels}


def _validate_carry(carry: ActCarry, incoming: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if the shapes in the batch differ from those in the carry."""
    shapes = [{name: list(value.shape) for name, value in data.items()} for data in (carry.current_data, incoming)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        carried, offered = (each.get(name, "nothing") for each in shapes)
        if carried != offered:
            raise ValueError(
                f"{name}: the carry has shape {carried}, but the batch has {offered}; reuse a carry only for batches "
                "of the same shape, and pass labels either always or never"
            )
