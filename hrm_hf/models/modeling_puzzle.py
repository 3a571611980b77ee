"""Parts that every puzzle head shares: the ACT step with its losses, adaptive solving, care of the puzzle table.

`PuzzleSolvingHead.forward` is ONE ACT step on a carry. It refills halted slots and looks up puzzle rows, then runs
`act_step` (tensors in, tensors out, no data-dependent branch: it compiles as one graph), and last decides who halts.
The loop over steps is Python: the trainer's, with one optimizer step per ACT step, or that of `solve`.

Left out on purpose: generation, masks and key-value caches; these models see the whole board at once.
"""

import math
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
from .modeling_utils import CheckpointCodeMixin, uncompiled, validate_no_attentions
from .puzzle_layers import (
    CastedLinear,
    PuzzleEmbedding,
    PuzzleInputEmbedding,
    QHead,
    ReasoningLevel,
    last_cycle_gradient,
    truncated_normal_,
    truncated_normal_like,
)
from .puzzle_mixers import UnitMeans
from .puzzle_restarts import (
    RESIDUAL_WINDOW,
    Accepts,
    AnswerPool,
    PuzzleSolution,
    Settles,
    relative_change,
    validate_choice,
)


if TYPE_CHECKING:
    from .pipeline_puzzle import PuzzlePipeline  # noqa: F401 - so that it travels

MAX_BLOCKS_IN_ONE_GRAPH = 32
DEFAULT_NOISE = 0.2  # of restarts; the initial latent states themselves have a std of 1
CACHED_BYTES = 4 * 2**20  # of latent states that are read and written fast on a CPU
TOKENS_PER_CALL = 65_536  # elsewhere, so that restarts of large puzzles fit into memory


@dataclass
class PuzzleModelOutput(ModelOutput):
    """Latent states after one ACT step, [B, prefix slots + S, D]; `last_hidden_state` is z_H."""

    last_hidden_state: torch.Tensor | None = None
    z_H: torch.Tensor | None = None
    z_L: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class PuzzleSolvingOutput(ModelOutput):
    """Result of one ACT step.

    Attributes:
        loss: lm_loss + 0.5 * (q_halt_loss + q_continue_loss); this and its parts are sums over rows divided by B.
        logits: [B, S, V].
        q_halt_logits, q_continue_logits: float32 [B].
        target_q_continue: [B], in training of models with a continue value.
        carry: the new `ActCarry`; hand it to the next call.
        metrics: sums over the rows that halted in this call, with their `count`.
        hidden_states: (z_L, z_H) if asked for.
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
    """Initialization and saving common to the puzzle architectures."""

    config: HrmPuzzleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PuzzleBlock"]
    # transformers 5.23 forgets vectors beside the levels when it divides a model; these follow the states.
    _no_placement_params = {"model.H_init", "model.L_init", "H_init", "L_init"}
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, QHead):
            init.zeros_(module.weight)  # halting starts improbable (sigmoid(-5) < 1 %) and independent of the state
            init.constant_(module.bias, -5.0)
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

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"the weights in {pretrained_model_name_or_path} do not fit the config (the report above lists the "
                "shapes). If it is puzzle_emb.weight: load with the num_puzzle_identifiers that was saved, then call "
                "model.resize_puzzle_embeddings or reset_puzzle_embeddings"
            ) from error

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of activations: `config.forward_dtype`, or that of the weights."""
        return getattr(torch, self.config.forward_dtype) if self.config.forward_dtype else self.dtype

    def wants_hidden_states(self, asked: bool | None) -> bool:
        """Whether a call asks for them, or else the config."""
        return self.config.output_hidden_states if asked is None else asked


class PuzzleReasoner(PuzzlePreTrainedModel):
    """Base model: input embedding and the recursion of an architecture, given by `reason`."""

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
        """One ACT step of the latent states, all [B, T, D]: the architecture's cycles and gradient routing.

        With `num_queries`, z_H is returned for its first positions only, which spares most of the last block.
        """
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed.tokens = value

    def puzzle_rows(self, puzzle_identifiers: torch.Tensor | None, batch_size: int) -> torch.Tensor | None:
        """Rows [B, puzzle_emb_ndim] of the table; identifier 0 (blank) if none are given."""
        if self.puzzle_emb is None:
            return None
        if puzzle_identifiers is None:
            puzzle_identifiers = torch.zeros(batch_size, dtype=torch.int32, device=self.device)
        return self.puzzle_emb(puzzle_identifiers)

    def fresh_states(self, x: torch.Tensor, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """`initial_states`; `noise` is the std of a normal added to each.

        The head asks for them between two calls of this module, when accelerate may have H_init and L_init elsewhere
        (`offload_buffers`); its hook fetches them as for a call.
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
        """z_H and z_L of fresh rows, like x [B, T, D]."""
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
        """One ACT step from the given latent states, or from the initial ones. input_ids [B, S]."""
        validate_no_attentions(self, output_attentions)
        rows = self.puzzle_rows(puzzle_identifiers, input_ids.shape[0])
        x, rotary = self.embed(input_ids, rows, self.compute_dtype)
        if z_H is None or z_L is None:
            z_H, z_L = self.fresh_states(x)
        z_H, z_L = self.reason(x, rotary, z_H, z_L)
        states = (z_L, z_H) if self.wants_hidden_states(output_hidden_states) else None
        return PuzzleModelOutput(last_hidden_state=z_H, z_H=z_H, z_L=z_L, hidden_states=states)


class EquilibriumReasoner(PuzzleReasoner):
    """A reasoner whose one level, `L_level`, updates both states as in TRM, or as in EqR (arXiv 2605.21488).

    z <- (1 - update_rate) z + update_rate L_level(z, injection) + noise_scale * normal, in training and in evaluation.
    """

    config: EquilibriumConfig

    def __init__(self, config: EquilibriumConfig):
        super().__init__(config)
        if config.random_initial_states:
            self.H_init = self.L_init = None

    def reason(self, x, rotary, z_H, z_L, num_queries=None):
        cycles = (self.config.H_cycles, self.config.L_cycles)
        return last_cycle_gradient(self._pass, cycles, x, rotary, z_H, z_L, num_queries)

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


class PuzzleTableMixin:
    """Counting, resizing, resetting and replacing rows of the puzzle table `self.model.puzzle_emb`.

    The table is a buffer with one row per puzzle identifier, trained sparsely; a model for new puzzles needs new rows.
    """

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False, include_puzzle_table: bool = False
    ) -> int:
        """As in transformers; the puzzle table, a buffer, is counted on request."""
        total = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        if include_puzzle_table and self.model.puzzle_emb is not None:
            total += self.model.puzzle_emb.weight.numel()
        return total

    def resize_puzzle_embeddings(self, num_puzzles: int, new_rows: str = "mean") -> None:
        """Changes the number of puzzle identifiers, keeping the rows that remain.

        Args:
            new_rows: "mean" starts new rows at the mean of the present ones, "zero" at zero.
        """
        table = self._puzzle_table()
        if num_puzzles < 1:
            raise ValueError(f"num_puzzles={num_puzzles}; a puzzle table has at least one row, the blank identifier's")
        kept = table[:num_puzzles]
        fill = self._fill_row(new_rows).expand(max(0, num_puzzles - len(kept)), -1)
        self._replace_table(torch.cat((kept, fill)))

    def reset_puzzle_embeddings(self, rows: str = "mean") -> None:
        """Sets every row to the mean of the table, as TRM does before fine-tuning on new puzzles, or to zero."""
        self._replace_table(self._fill_row(rows).expand_as(self._puzzle_table()).clone())

    def set_puzzle_embeddings(self, table: torch.Tensor) -> None:
        """Replaces the whole table by [num_puzzle_identifiers, puzzle_emb_ndim] values.

        Raises:
            ValueError: the shape differs; resize first if the number of puzzles changes.
        """
        expected = tuple(self._puzzle_table().shape)
        if tuple(table.shape) != expected:
            raise ValueError(
                f"the puzzle table has shape {expected} (num_puzzle_identifiers, puzzle_emb_ndim), the new one "
                f"{tuple(table.shape)}; call resize_puzzle_embeddings({table.shape[0]}) first, or reset it"
            )
        self._replace_table(table)

    def adapt_puzzle_embeddings(self, num_puzzles: int, how: str) -> None:
        """Fits the table to a data set of `num_puzzles` identifiers before fine-tuning.

        Args:
            how: "keep" the table (same identifiers), "reset" it for new puzzles, or "extend" it by rows for more.

        Raises:
            ValueError: "keep" and the number of puzzles differs, or "extend" would shrink the table.
        """
        if self.model.puzzle_emb is None:
            return
        present = self.config.num_puzzle_identifiers
        if how == "reset":
            self.resize_puzzle_embeddings(num_puzzles)
            self.reset_puzzle_embeddings()
        elif how == "extend" and num_puzzles >= present:
            self.resize_puzzle_embeddings(num_puzzles)
        elif how != "keep" or num_puzzles != present:
            raise ValueError(
                f"puzzle_embeddings={how!r}: the model has {present} puzzle identifiers, the data {num_puzzles}. Use "
                '"reset" for new puzzles, "extend" if the data add puzzles to the known ones, "keep" for the same'
            )

    def _puzzle_table(self) -> torch.Tensor:
        if self.model.puzzle_emb is None:
            raise ValueError("this model has no puzzle table: its config says puzzle_emb_ndim=0")
        return self.model.puzzle_emb.weight

    def _fill_row(self, how: str) -> torch.Tensor:
        table = self._puzzle_table()
        if how not in ("mean", "zero"):
            raise ValueError(f'puzzle rows can start at "mean" or "zero", not {how!r}')
        return table.mean(0, keepdim=True) if how == "mean" else torch.zeros_like(table[:1])

    def _replace_table(self, table: torch.Tensor) -> None:
        old = self._puzzle_table()
        self.model.puzzle_emb.weight = nn.Buffer(table.to(device=old.device, dtype=old.dtype, copy=True).contiguous())
        self.config.num_puzzle_identifiers = table.shape[0]


class PuzzleSolvingHead(PuzzleTableMixin, PuzzlePreTrainedModel):
    """Token and halting heads over a `PuzzleReasoner`, with the ACT step and `solve`."""

    reasoner_class: type[PuzzleReasoner]
    # HRM learns a continue value by bootstrapping from a second forward; TRM halts on the sign of q_halt alone.
    has_continue_value: bool
    learns_to_halt = True  # False: rows halt at random in training, and q_halt has no loss
    _keep_in_fp32_modules = ["q_head"]  # nor is it quantized: halting hangs on small differences of its values
    _custom_pipelines = {
        "puzzle-solving": {"impl": "pipeline_puzzle.PuzzlePipeline", "pt": ["AutoModelForMaskedLM"], "type": "text"}
    }

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__(config)
        self.model = self.reasoner_class(config)
        self.make_heads(config)
        self.post_init()

    def make_heads(self, config: HrmPuzzleConfig) -> None:
        """Builds what `read_out` and `q_values` read the states with."""
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
        """A carry of B halted slots, so that the next call starts every row on the data offered to it."""
        batch_size = input_ids.shape[0]
        z_H, z_L = (
            torch.zeros(shape, dtype=self.compute_dtype, device=input_ids.device)
            for shape in self.config.state_shapes(batch_size)
        )
        incoming = _incoming(input_ids, puzzle_identifiers, labels)
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
        """One ACT step.

        Args:
            input_ids: [B, S]. puzzle_identifiers: [B], 0 if absent. labels: [B, S], -100 where ignored.
                Only rows whose slot has halted in `carry` are taken up; the loss is that of the carried data.
            carry: what the previous call returned; None starts every row afresh.

        Raises:
            ValueError: the batch disagrees with the config or with the carry, or attention weights are asked for.
        """
        validate_no_attentions(self, output_attentions)
        incoming = _incoming(input_ids, puzzle_identifiers, labels)
        if carry is None:
            carry = self.initial_carry(input_ids, puzzle_identifiers, labels)
        for name in sorted(carry.current_data.keys() | incoming.keys()):
            carried, offered = carry.current_data.get(name), incoming.get(name)
            if carried is None or offered is None or carried.shape != offered.shape:
                raise ValueError(
                    f"{name}: the carry holds {_shape(carried)}, this batch offers {_shape(offered)}; a carry serves "
                    "batches of the shape it was made for, always with or always without labels"
                )
        ids = torch.where(carry.halted, incoming["puzzle_identifiers"], carry.current_data["puzzle_identifiers"])
        rows = self.model.puzzle_rows(ids, input_ids.shape[0])
        min_steps = None
        if self.training and self.config.halt_max_steps > 1:
            min_steps = self.sample_min_steps(carry)
        new_carry, outputs, states = self.act_step(carry, incoming, rows, min_steps)
        wanted = self.wants_hidden_states(output_hidden_states)
        return PuzzleSolvingOutput(**outputs, carry=new_carry, hidden_states=states if wanted else None)

    def act_step(
        self,
        carry: ActCarry,
        incoming: dict[str, torch.Tensor],
        puzzle_rows: torch.Tensor | None,
        min_steps: torch.Tensor | None,
    ) -> tuple[ActCarry, dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """The tensor part of one ACT step: refill, recursion, heads, continue target, losses, halting.

        Free of sparse gradients, and of random numbers but those of a model whose passes have noise, so that it
        compiles as one graph.

        Args:
            puzzle_rows: [B, puzzle_emb_ndim], rows of the refilled data's puzzles.
            min_steps: int32 [B], fewest ACT steps of each slot; None where halting is not decided (evaluation).

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
        outputs = {
            "logits": logits,
            "q_halt_logits": q_halt,
            "q_continue_logits": q_continue,
        }
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

    @torch.no_grad()
    @uncompiled
    def run_ahead(
        self,
        carry: ActCarry,
        steps_ahead: torch.Tensor,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> ActCarry:
        """Starts fresh rows some ACT steps late: those steps have no gradient, and are not counted.

        Uncompiled, since the number of rows is another each time.

        Args:
            steps_ahead: int [B]; 0 leaves a row to the next call of the model, as it does all rows of busy slots.
            input_ids, puzzle_identifiers, labels: as of the forward.

        Returns:
            The carry in which these rows are under way, at 0 steps.
        """
        wanted = steps_ahead * carry.halted
        rows = wanted.argsort(descending=True)[: int(wanted.count_nonzero())]
        if not len(rows):
            return carry
        incoming = _incoming(input_ids, puzzle_identifiers, labels)
        data = {name: value[rows] for name, value in incoming.items()}
        puzzle_rows = self.model.puzzle_rows(data["puzzle_identifiers"], len(rows))
        x, rotary = self.model.embed(data["input_ids"], puzzle_rows, self.compute_dtype)
        z_H, z_L = (z.clone() for z in self.model.fresh_states(x))
        for step in range(int(wanted[rows[0]])):
            n = int((wanted > step).sum())  # the first n rows go on
            z_H[:n], z_L[:n] = self.model.reason(x[:n], rotary, z_H[:n], z_L[:n])
        return ActCarry(
            carry.z_H.index_copy(0, rows, z_H),
            carry.z_L.index_copy(0, rows, z_L),
            carry.steps.index_fill(0, rows, 0),
            carry.halted.index_fill(0, rows, False),
            {n: old.index_copy(0, rows, data[n].to(old.dtype)) for n, old in carry.current_data.items()},
        )

    def sample_min_steps(self, carry: ActCarry) -> torch.Tensor:
        """Fewest ACT steps of each slot in training, int32 [B]; some slots explore further than they would."""
        return exploration_min_steps(carry.steps, self.config.halt_max_steps, self.config.halt_exploration_prob)

    def read_out(self, z_H: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of a state."""
        return self.lm_head(z_H[:, self.config.prefix_len :])

    def q_values(self, z_H: torch.Tensor, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """q_halt and q_continue, float32 [B], read from the first position of z_H [B, T, D].

        `logits` of that state, if they are at hand, spare a model that judges by them a second `read_out`.
        """
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
            losses["q_continue_loss"] = (
                halting_loss(outputs["q_continue_logits"], outputs["target_q_continue"]) / batch_size
            )
            losses["loss"] = losses["loss"] + 0.5 * losses["q_continue_loss"]
        return {**losses, "metrics": metrics}

    def compile_act_step(self, **kwargs: Any) -> None:
        """Compiles what a training step repeats; keyword arguments are those of `torch.compile`.

        A small model becomes one graph. A large one is compiled per level, because the time to compile grows with the
        number of inlined blocks (95 s against 28 s for HRM's 48 on two cores) and the calls between levels no longer
        matter. `solve` stays uncompiled: its batch shrinks at every step.
        """
        kwargs = {"dynamic": False, **kwargs}
        if self.config.draws_random_numbers and self.device.type == "cpu":
            torch._inductor.config.fallback_random = True  # its own generator is several times slower there
        levels = [module for module in self.model.children() if isinstance(module, ReasoningLevel)]
        passes = self.config.H_cycles * (self.config.L_cycles + 1) * (1 + self.has_continue_value)
        if passes * max(len(level.layers) for level in levels) <= MAX_BLOCKS_IN_ONE_GRAPH:
            self.act_step = torch.compile(self.act_step, fullgraph=True, **kwargs)
            return
        for level in levels:
            level.compile(fullgraph=True, **kwargs)

    @property
    def boards_per_call(self) -> int:
        """Boards that `solve` is best given at a time, so that votes and restarts fit into memory.

        On a CPU as many as have 4 MiB of state, which stays in its cache (25 boards of 9 x 9 for a width of 512, or
        with a symbol axis for one of 48); elsewhere 65,536 cells.
        """
        if self.device.type != "cpu":
            return max(1, TOKENS_PER_CALL // self.config.seq_len)
        z_H, _ = self.config.state_shapes(1)
        return max(1, CACHED_BYTES // (math.prod(z_H) * self.compute_dtype.itemsize))

    def solve(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        max_steps: int | None = None,
        min_steps: int = 1,
        min_confidence: float = 0.0,
        halt: str = "q",
        noise: float | None = None,
        return_trajectory: bool = False,
        *,
        noise_at: str = "start",
        restarts: int = 1,
        choose: str = "q",
        accepts: Accepts | None = None,
        exit_when_still: float | None = None,
    ) -> PuzzleSolution:
        """Runs ACT steps until every row has its answer; a finished row leaves the batch and costs nothing more.

        Args:
            input_ids: [B, S]. puzzle_identifiers: [B], 0 if absent.
            max_steps: most ACT steps; `config.halt_max_steps` by default. More than in training often helps.
            min_steps: fewest ACT steps before a row may stop.
            min_confidence: least sigmoid(q_halt), 0 to 1, at which a row may stop. Preferring to halt means that the
                answer is more likely right than not; a higher bar buys accuracy with steps.
            halt: "q" stops a row when the model prefers halting; "fixed" runs `max_steps` for all rows, as the
                original's evaluation does.
            noise: std of a normal added to the latent states; of several runs the first is undisturbed. By default
                0.2 if there are restarts and the model draws no random numbers of its own, else none.
            return_trajectory: keep the predictions after every step.
            noise_at: "start" adds the noise to the initial states, "every_step" before every ACT step (PTRM).
            restarts: runs of each board. At a time there are as many as boards were given, or `boards_per_call` if
                these are more; boards whose answer no further run can change get no further run.
            choose: which answer stands: "q", "residual", "vote" or "rules", as `AnswerPool` says.
            accepts: tells which answers obey the rules of the task: these then beat all others. With choose="rules"
                a run ends at the first step whose answer they accept, and so do the restarts of its board.
            exit_when_still: a row stops, with halt="fixed" too, when its last three steps moved z_H by less than this
                share of its norm on average (`PuzzleSolution.residual`): 1e-3, for example. With noise at every step
                nothing stands stiller than the noise.

        Raises:
            ValueError: an option that is out of range, or restarts that would all give the same.
        """
        validate_choice(choose, accepts, restarts)
        noise = self._validated_noise(noise, noise_at, restarts)
        options = {
            "max_steps": self.config.halt_max_steps if max_steps is None else max_steps,
            "min_steps": min_steps,
            "min_confidence": min_confidence,
            "halt": halt,
            "return_trajectory": return_trajectory,
            "noise_at": noise_at,
            "exit_when_still": exit_when_still,
            "with_residual": choose == "residual",
        }

        def settles(boards: torch.Tensor) -> Settles | None:
            return (lambda rows, answers: accepts(boards[rows], answers)) if choose == "rules" else None

        quiet = noise if restarts == 1 else 0.0
        first = self.run(input_ids, puzzle_identifiers, noise=quiet, until=settles(input_ids), **options)
        if restarts == 1:
            return first
        pool, runs_left = AnswerPool(input_ids, first, choose, accepts), restarts - 1
        most = max(len(input_ids), self.boards_per_call)
        while len(boards := pool.undecided(runs_left)):
            runs = min(runs_left, max(1, most // len(boards)))
            boards, runs_left = boards.repeat(runs), runs_left - runs
            ids, puzzles = input_ids[boards], None if puzzle_identifiers is None else puzzle_identifiers[boards]
            pool.add(boards, self.run(ids, puzzles, noise=noise, until=settles(ids), **options))
        return pool.solution()

    def _validated_noise(self, noise: float | None, noise_at: str, restarts: int) -> float:
        """The std of the noise, by default what restarts need."""
        if noise_at not in ("start", "every_step"):
            raise ValueError(f'noise_at={noise_at!r}; expected "start" or "every_step"')
        if noise is None:
            noise = DEFAULT_NOISE if restarts > 1 and not self.config.draws_random_numbers else 0.0
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise={noise}; expected a standard deviation, 0 or more")
        if restarts > 1 and not noise and not self.config.draws_random_numbers:
            raise ValueError(f"restarts={restarts} with noise={noise} would all give the same; restarts need noise")
        return noise

    @torch.no_grad()
    @uncompiled
    def run(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        *,
        max_steps: int,
        min_steps: int = 1,
        min_confidence: float = 0.0,
        halt: str = "q",
        noise: float = 0.0,
        noise_at: str = "start",
        exit_when_still: float | None = None,
        with_residual: bool = False,
        until: Settles | None = None,
        return_trajectory: bool = False,
    ) -> PuzzleSolution:
        """One run of `solve`, whose arguments these are.

        Args:
            with_residual: measure how much the last steps moved the state, as an exit by stillness does.
            until: a row stops at the first step whose answer this accepts: index [N] of rows and answers [N, S] to
                bool [N].
        """
        if halt not in ("q", "fixed"):
            raise ValueError(f'halt={halt!r}; expected "q" (stop when the model prefers to) or "fixed"')
        if not 1 <= min_steps <= max_steps:
            raise ValueError(f"need 1 <= min_steps <= max_steps, got min_steps={min_steps}, max_steps={max_steps}")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence={min_confidence} is not between 0 and 1")
        min_confidence = max(min_confidence, self.config.halt_confidence)
        if exit_when_still is not None and not 0 <= exit_when_still < 1:
            raise ValueError(f"exit_when_still={exit_when_still} is no share of the state's norm, 0 to 1")
        x, rotary = self.model.embed(
            input_ids, self.model.puzzle_rows(puzzle_identifiers, input_ids.shape[0]), self.compute_dtype
        )
        z_H, z_L = self.model.fresh_states(x, noise)
        batch_size, seq_len = input_ids.shape
        active = torch.arange(batch_size, device=x.device)
        with_residual = with_residual or exit_when_still is not None
        moves = torch.empty(batch_size, 0, device=x.device)  # of the state in the last steps of active rows
        solution = PuzzleSolution(
            predictions=torch.empty_like(input_ids, dtype=torch.long),
            steps=torch.zeros(batch_size, dtype=torch.int32, device=x.device),
            q_halt=torch.zeros(batch_size, device=x.device),
            logits=x.new_empty(batch_size, seq_len, self.config.vocab_size),
            residual=torch.zeros(batch_size, device=x.device) if with_residual else None,
        )
        trajectory, q_trajectory = [], []
        for step in range(1, max_steps + 1):
            if noise and noise_at == "every_step" and step > 1:  # fresh states have had theirs
                z_H, z_L = (z + noise * torch.randn_like(z) for z in (z_H, z_L))
            before = z_H
            z_H, z_L = self.model.reason(x, rotary, z_H, z_L)
            logits = self.read_out(z_H) if return_trajectory or until is not None else None
            q_halt, q_continue = self.q_values(z_H, logits)
            done = torch.full_like(active, step == max_steps, dtype=torch.bool)
            if with_residual:
                moves = torch.cat((moves, relative_change(z_H, before).unsqueeze(1)), dim=1)[:, -RESIDUAL_WINDOW:]
            if step >= min_steps:
                if halt == "q":
                    prefers = wants_to_halt(q_halt, q_continue if self.has_continue_value else None)
                    done |= prefers & (torch.sigmoid(q_halt) >= min_confidence)
                if exit_when_still is not None and step >= RESIDUAL_WINDOW:
                    done |= moves.mean(dim=1) <= exit_when_still
                if until is not None:
                    done |= until(active, logits.argmax(-1))
            answered = torch.ones_like(done) if return_trajectory else done
            if answered.any():
                rows = active[answered]
                logits = self.read_out(z_H[answered]) if logits is None else logits[answered]
                solution.logits[rows], solution.predictions[rows] = logits, logits.argmax(-1)
                solution.q_halt[rows], solution.steps[rows] = q_halt[answered], step
                if with_residual:
                    solution.residual[rows] = moves[answered].mean(dim=1)
            if return_trajectory:
                trajectory.append(solution.predictions.clone())
                q_trajectory.append(solution.q_halt.clone())
            if done.all():
                break
            if done.any():
                x, z_H, z_L, active, moves = (value[~done] for value in (x, z_H, z_L, active, moves))
        if return_trajectory:
            solution.trajectory, solution.q_trajectory = torch.stack(trajectory), torch.stack(q_trajectory)
        return solution

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of a trainer: all trainable weights, and the sparsely trained puzzle table."""
        groups = [{"name": "dense", "params": [p for p in self.parameters() if p.requires_grad]}]
        if self.model.puzzle_emb is not None:
            groups.append({"name": "puzzle_emb", "params": [self.model.puzzle_emb.weight], "sparse_rows": True})
        return groups


def _incoming(input_ids, puzzle_identifiers, labels) -> dict[str, torch.Tensor]:
    if puzzle_identifiers is None:
        puzzle_identifiers = torch.zeros(input_ids.shape[0], dtype=torch.int32, device=input_ids.device)
    data = {"input_ids": input_ids, "puzzle_identifiers": puzzle_identifiers}
    return data if labels is None else {**data, "labels": labels}


def _shape(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else str(list(tensor.shape))
