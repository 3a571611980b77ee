"""Adaptive puzzle solving: run ACT steps until boards halt, restart, and choose an answer.

Runs differ by noise on the latent states (PTRM, arXiv 2605.19943, which keeps the highest q) or by random initial
states (EqR, arXiv 2605.21488, which keeps the smallest residual). B is the number of boards, S the number of cells, V
the vocabulary size, and N the number of answers; a board may have several answers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .act import wants_to_halt
from .modeling_utils import uncompiled
from .settings_puzzle import SolveSettings


RESIDUAL_WINDOW = 3  # number of most recent steps over which residuals are averaged
CACHED_BYTES = 4 * 2**20  # maximum bytes of a layer's output per call on a CPU, to keep it in the cache
EFFICIENT_POSITIONS = 1024  # positions per call on a CPU from which matrix products run at full speed
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile
TOKENS_PER_CALL = 65_536  # maximum cells per call on a GPU, to fit large puzzles with restarts into memory

# Function that takes boards and answers (token ids [N, S]) and returns which answers obey the rules, bool [N].
Accepts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Function that takes row indices [N] and current answers [N, S] and returns which rows should stop, bool [N].
StopCheck = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class PuzzleSolution:
    """Answers of `solve`.

    Attributes:
        predictions: token ids [B, S]. steps: ACT steps used [B]. q_halt: logit [B] that the answer is correct.
        logits: [B, S, V] of the answer.
        trajectory, q_trajectory: predictions [steps, B, S] and q_halt [steps, B] after each step, if requested; a
            finished row repeats its answer.
        sure: bool [B], if the config has `sure_confidence`: whether sigmoid(q_halt) is at least that, and if the run
            used all its steps, whether the last one left the answer unchanged. None for quantized weights, because
            the confidence was calibrated without rounding.
        residual: [B], mean of ||z_t - z_{t-1}|| / ||z_t|| over the last 3 steps (z = z_H), if a setting needs it.
        steps_of_all_runs: total ACT steps [B] over all runs, if boards were restarted.
    """

    predictions: torch.Tensor
    steps: torch.Tensor
    q_halt: torch.Tensor
    logits: torch.Tensor
    trajectory: torch.Tensor | None = None
    q_trajectory: torch.Tensor | None = None
    sure: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    steps_of_all_runs: torch.Tensor | None = None

    @classmethod
    def empty(cls, boards: torch.Tensor, x: torch.Tensor, vocab_size: int, residual: bool) -> "PuzzleSolution":
        """Return an empty solution for boards [B, S]. Its logits have the dtype and device of the embedding x."""
        numbers = x.new_zeros(len(boards), dtype=torch.float32)
        logits = x.new_empty((*boards.shape, vocab_size))
        predictions = boards.long().clone()
        return cls(predictions, numbers.int(), numbers, logits, residual=numbers.clone() if residual else None)

    def select(self, rows: torch.Tensor) -> "PuzzleSolution":
        """Return the solution restricted to the rows with indices `rows` [N]."""
        return _each_field(lambda value, axis: value.index_select(axis, rows), self)


class AnswerPool:
    """Answers from several runs on boards [B, S], without answers that can no longer win.

    An answer that the rules accept beats every other answer. Otherwise, `choose` decides:

    - "q": the highest q_halt;
    - "residual": the smallest residual;
    - "vote": the most frequent answer; ties go to the highest q_halt;
    - "rules": the first answer that the rules accept, or the highest q_halt if they accept none.
    """

    def __init__(self, input_ids: torch.Tensor, first: PuzzleSolution, choose: str, accepts: Accepts | None = None):
        self.input_ids, self.choose, self.accepts = input_ids, choose, accepts
        self.boards = self.votes = torch.empty(0, dtype=torch.long, device=input_ids.device)
        self.accepted = self.boards.bool()
        self.found: PuzzleSolution | None = None
        self.steps = torch.zeros(len(input_ids), dtype=first.steps.dtype, device=input_ids.device)
        self.add(torch.arange(len(input_ids), device=input_ids.device), first)

    def add(self, boards: torch.Tensor, found: PuzzleSolution) -> None:
        """Add the answers from another run on the boards with indices `boards` [N]."""
        accepted = torch.zeros_like(boards, dtype=torch.bool)
        if self.accepts is not None:
            accepted = self.accepts(self.input_ids[boards], found.predictions)
        self.steps.index_add_(0, boards, found.steps)
        self.boards, self.accepted = torch.cat((self.boards, boards)), torch.cat((self.accepted, accepted))
        self.votes = torch.cat((self.votes, torch.ones_like(boards)))
        self.found = found if self.found is None else _concatenate(self.found, found)
        self._drop_losers()

    def undecided(self, runs_left: int) -> torch.Tensor:
        """Return the indices of boards with an answer that `runs_left` more runs could still change."""
        all_boards = torch.arange(len(self.input_ids), device=self.boards.device)
        if runs_left == 0:
            return all_boards[:0]
        best = self._best()
        if self.choose == "rules":
            return all_boards[~self.accepted[best]]
        if self.choose == "vote":
            others = self.votes.clone()
            others[best] = 0
            second = torch.zeros_like(all_boards).scatter_reduce(0, self.boards, others, "amax")
            decided = self.votes[best] > second + runs_left
            return all_boards[~decided if self.accepts is None else ~(decided & self.accepted[best])]
        return all_boards

    def solution(self) -> PuzzleSolution:
        """Return the best answer for each board."""
        return replace(self.found.select(self._best()), steps_of_all_runs=self.steps)

    def _drop_losers(self) -> None:
        """Keep each board's best answer or, with "vote", one from each group of equal answers to a board."""
        names = self.boards.unsqueeze(1)
        if self.choose == "vote":
            names = torch.cat((names, self.found.predictions), dim=1)
        groups = torch.unique(names, dim=0, return_inverse=True)[1]
        self.votes = torch.zeros_like(groups).index_add_(0, groups, self.votes)[groups]
        kept = _first_of_each(groups, self._order()).sort().values  # restore the order of the runs
        self.boards, self.accepted, self.votes = self.boards[kept], self.accepted[kept], self.votes[kept]
        self.found = self.found.select(kept)

    def _best(self) -> torch.Tensor:
        """Return the index [B] of each board's best answer."""
        return _first_of_each(self.boards, self._order())

    def _order(self) -> torch.Tensor:
        """Return the indices of all answers, best first. Ties keep the order of the runs."""
        score = -self.found.residual if self.choose == "residual" else self.found.q_halt
        if self.choose == "rules":
            score = score.masked_fill(self.accepted, torch.inf)
        order = torch.argsort(score, descending=True, stable=True)
        for key in (self.votes, self.accepted.int()) if self.choose == "vote" else (self.accepted.int(),):
            order = order[torch.argsort(key[order], descending=True, stable=True)]
        return order


def _first_of_each(groups: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return each group's first item in `order` [N], sorted by group. `groups` [N] has each item's group."""
    order = order[torch.argsort(groups[order], stable=True)]
    sorted_groups = groups[order]
    first = torch.ones_like(sorted_groups, dtype=torch.bool)
    first[1:] = sorted_groups[1:] != sorted_groups[:-1]
    return order[first]


def _concatenate(*solutions: PuzzleSolution) -> PuzzleSolution:
    """Concatenate solutions. Shorter trajectories repeat their last step."""
    if solutions[0].trajectory is not None:
        length = max(len(found.trajectory) for found in solutions)
        solutions = [_pad_trajectory(found, length) for found in solutions]
    return _each_field(lambda value, axis, *more: torch.cat((value, *more), dim=axis), *solutions)


def _pad_trajectory(found: PuzzleSolution, length: int) -> PuzzleSolution:
    last = torch.arange(length, device=found.steps.device).clamp(max=len(found.trajectory) - 1)
    return replace(found, trajectory=found.trajectory[last], q_trajectory=found.q_trajectory[last])


def _each_field(change: Callable, found: PuzzleSolution, *others: PuzzleSolution) -> PuzzleSolution:
    """Return a copy of `found` with `change` applied to each field.

    Its arguments are the field's value, the axis of the rows in it, and the values of the field in `others`.
    """
    changed = {}
    for name in (field.name for field in fields(found)):
        if (value := getattr(found, name)) is not None:
            axis = 1 if name in ("trajectory", "q_trajectory") else 0
            changed[name] = change(value, axis, *(getattr(other, name) for other in others))
    return PuzzleSolution(**changed)


def relative_change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return ||new - old|| / ||new|| for each row of states [N, ...], as float32 [N]."""
    new, old = new.float().flatten(1), old.float().flatten(1)
    return torch.linalg.vector_norm(new - old, dim=1) / torch.linalg.vector_norm(new, dim=1).clamp_min(1e-12)


class PuzzleSolverMixin:
    """Mixin that adds `solve` to puzzle heads. `solve` runs a loop of ACT steps."""

    compiled_solve_step: Callable | None = None

    def compile_solve(self, **kwargs: Any) -> None:
        """Compile the ACT step of `solve`, passing keyword arguments to `torch.compile`.

        This pays for thousands of boards. Two graphs are compiled: one for the first batch size, and at the first
        batch with another size, one for all other sizes; single boards have a graph of their own. So finished rows
        still leave the batch at once. A `mode` with CUDA graphs records one for every batch size.
        """
        step = torch.compile(self.solve_step, fullgraph=True, **self.inductor_options(kwargs))
        if kwargs.get("mode") in CUDA_GRAPH_MODES:  # the next step overwrites the outputs
            self.compiled_solve_step = lambda *inputs: tuple(value.clone() for value in step(*inputs))
        else:
            self.compiled_solve_step = step

    def solve_step(self, x, rotary, z_H: torch.Tensor, z_L: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run an ACT step; return z_H, z_L, logits, answers [N, S], q_halt and q_continue."""
        z_H, z_L = self.model.reason(x, rotary, z_H, z_L)
        logits = self.read_out(z_H)
        return z_H, z_L, logits, logits.argmax(-1), *self.q_values(z_H, logits)

    @property
    def boards_per_call(self) -> int:
        """Recommended number of boards per call to `solve`.

        On a CPU, the widest layer's output for these boards has 4 MiB and stays in the cache, but the boards have at
        least 1,024 positions; on other devices, they have 65,536 cells.
        """
        if self.device.type != "cpu":
            return max(1, TOKENS_PER_CALL // self.config.seq_len)
        (*axes, _), _ = self.config.state_shapes(1)
        positions, width = math.prod(axes), self.model.L_level.layers[0].mlp.gate_up_proj.out_features
        cached = CACHED_BYTES // (positions * width * self.compute_dtype.itemsize)
        return max(1, cached, EFFICIENT_POSITIONS // positions)

    def solve(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None = None,
        *,
        accepts: Accepts | None = None,
        return_trajectory: bool = False,
        **settings: Any,
    ) -> PuzzleSolution:
        """Run ACT steps until every row has halted. Finished rows are removed from the batch.

        Args:
            input_ids: [B, S]. puzzle_identifiers: [B], 0 if absent.
            accepts: function that returns which answers obey the task's rules; these answers take precedence.
            return_trajectory: whether to return the predictions after every step.
            settings: fields of `SolveSettings`, such as max_steps, min_steps, halt, restarts.

        Raises:
            ValueError: a setting is invalid, or choose="rules" without `accepts`.
        """
        settings = SolveSettings(**settings).resolved(self.config)
        if settings.choose == "rules" and accepts is None:
            raise ValueError('choose="rules": needs the argument `accepts`, a function that checks answers')

        def run(rows: torch.Tensor, noise: float | None) -> PuzzleSolution:
            boards = input_ids[rows]
            puzzles = None if puzzle_identifiers is None else puzzle_identifiers[rows]
            until = (lambda active, answers: accepts(boards[active], answers)) if settings.choose == "rules" else None
            return self.run(boards, puzzles, replace(settings, noise=noise), until, return_trajectory)

        all_boards, runs_left = torch.arange(len(input_ids), device=input_ids.device), settings.restarts - 1
        first = run(all_boards, 0.0 if runs_left else settings.noise)
        if not runs_left:
            return first
        pool = AnswerPool(input_ids, first, settings.choose, accepts)
        most = max(len(input_ids), self.boards_per_call)
        while len(boards := pool.undecided(runs_left)):
            runs = min(runs_left, max(1, most // len(boards)))
            boards, runs_left = boards.repeat(runs), runs_left - runs
            pool.add(boards, run(boards, settings.noise))
        return pool.solution()

    def run(
        self,
        input_ids: torch.Tensor,
        puzzle_identifiers: torch.Tensor | None,
        settings: SolveSettings,
        until: StopCheck | None = None,
        return_trajectory: bool = False,
    ) -> PuzzleSolution:
        """Run boards [N, S] once with resolved settings. `until` can stop rows early.

        On a CPU, a large batch runs in parts that fit into the cache.
        """
        # Layers that training compiled have a fixed batch size, so they run uncompiled here.
        run = self._run if self.compiled_solve_step else uncompiled(self._run)
        size = self.rows_per_part(len(input_ids))
        if size == len(input_ids):
            return run(input_ids, puzzle_identifiers, settings, until, return_trajectory)

        def run_part(rows: torch.Tensor) -> PuzzleSolution:
            puzzles = None if puzzle_identifiers is None else puzzle_identifiers[rows]
            stops = None if until is None else lambda active, answers: until(rows[active], answers)
            return run(input_ids[rows], puzzles, settings, stops, return_trajectory)

        return _concatenate(*map(run_part, torch.arange(len(input_ids)).split(size)))

    @torch.no_grad()
    def _run(self, input_ids, puzzle_identifiers, settings, until, return_trajectory) -> PuzzleSolution:
        puzzle_rows = self.model.puzzle_rows(puzzle_identifiers, len(input_ids))
        x, rotary = self.model.embed(input_ids, puzzle_rows, self.compute_dtype)
        z_H, z_L = (z.contiguous() for z in self.model.fresh_states(x, settings.noise))
        with_residual = settings.choose == "residual" or settings.exit_when_still is not None
        solution = PuzzleSolution.empty(input_ids, x, self.config.vocab_size, with_residual)
        solve_step = self.compiled_solve_step or self.solve_step
        active = torch.arange(len(input_ids), device=x.device)
        moves = torch.empty(len(input_ids), 0, device=x.device)  # state changes over the last steps, [active, steps]
        may_stop = settings.halt == "q" or settings.exit_when_still is not None or until is not None
        answers, after_steps = input_ids, []
        for step in range(1, settings.max_steps + 1):
            if settings.noise and settings.noise_at == "every_step" and step > 1:  # fresh states already have noise
                z_H, z_L = (z + settings.noise * torch.randn_like(z) for z in (z_H, z_L))
            z_H_before, answers_before = z_H, answers
            z_H, z_L, logits, answers, q_halt, q_continue = solve_step(x, rotary, z_H, z_L)
            if with_residual:
                moves = torch.cat((moves, relative_change(z_H, z_H_before).unsqueeze(1)), dim=1)[:, -RESIDUAL_WINDOW:]
            num_done = len(active) if step == settings.max_steps else 0
            if may_stop and settings.min_steps <= step < settings.max_steps:
                done = self._stops(settings, step, q_halt, q_continue, moves)
                if until is not None:
                    done |= until(active, answers)
                num_done = int(done.sum())
            if return_trajectory or num_done:
                solution.logits[active], solution.predictions[active] = logits, answers
                solution.q_halt[active], solution.steps[active] = q_halt, step
                if with_residual:
                    solution.residual[active] = moves.mean(dim=1)
            if return_trajectory:
                after_steps.append((solution.predictions.clone(), solution.q_halt.clone()))
            if num_done == len(active):
                break
            if num_done:
                x, z_H, z_L, answers, active, moves = (value[~done] for value in (x, z_H, z_L, answers, active, moves))
        if return_trajectory:
            solution.trajectory, solution.q_trajectory = map(torch.stack, zip(*after_steps))
        if self.config.sure_confidence is not None and getattr(self.config, "quantization_config", None) is None:
            solution.sure = torch.sigmoid(solution.q_halt) >= self.config.sure_confidence
            if step == settings.max_steps:
                solution.sure[active] &= (answers == answers_before).all(dim=1)
        return solution

    def _stops(self, settings, step: int, q_halt, q_continue, moves) -> torch.Tensor:
        """Return a mask of rows that stop after a step: they prefer to halt, or their states barely change."""
        stops = torch.zeros_like(q_halt, dtype=torch.bool)
        if settings.halt == "q":
            prefers = wants_to_halt(q_halt, q_continue if self.has_continue_value else None)
            stops |= prefers & (torch.sigmoid(q_halt) >= settings.min_confidence)
        if settings.exit_when_still is not None and step >= RESIDUAL_WINDOW:
            stops |= moves.mean(dim=1) <= settings.exit_when_still
        return stops
