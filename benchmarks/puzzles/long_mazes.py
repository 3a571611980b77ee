"""Train the packaged maze solver: after every step, it has to answer what a search could know by then.

    python -m benchmarks.puzzles.long_mazes --name known_11 --side 11 --seconds 300
    python -m benchmarks.puzzles.long_mazes --name known_15 --start runs/long_mazes/known_11.pt --side 15 --batch 32 \\
        --seconds 400 --learning_rate 1e-3 --min_path_length 30 --long_share 0.1
    python -m benchmarks.puzzles.long_mazes --name shipped --evaluate pretrained/maze-15x15
    python -m benchmarks.puzzles.long_mazes --quick

The network is `SeRrmPuzzleForSolving` with mixing="neighbours", so information moves one cell per block. --targets
chooses what the network has to answer:

    each: the solution, after every step.
    last: the solution, after the last of 1 to 16 steps; only that step has a gradient (arXiv 2603.15641).
    known: after every step, what a breadth-first search that moves one cell per block would know. The search starts at
        the goal; when it arrives at the start, a trace follows the shortest path back. A cell of the path is open
        until the trace arrives. The goal has even odds of being open until then, so the network does not halt early.
        A second head, dropped after training, names the directions in which the goal is one step closer.

Mazes are generated with 5, 10, 20 and 40 % of the spare walls opened, a quarter each. They get a new random symmetry
each time. An interrupted run continues from its state in --models. The averaged weights are saved there as a
checkpoint of the package, and the accuracies on held-out mazes in `long_mazes_NAME.json`.
"""

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hrm_hf import SeRrmPuzzleConfig, SeRrmPuzzleForSolving
from hrm_hf.puzzles import maze
from hrm_hf.puzzles.evaluation import wilson_interval

from ..report import machine, make_parser, write_report


OPENINGS = (0.05, 0.1, 0.2, 0.4)
UNREACHED = 10_000  # distance of cells that cannot be reached
SLACK = 6  # number of blocks by which the network may lag behind the search
LONG_STEPS = 64  # steps of the fraction --long_share of the rows
REPORT_SECONDS = 60
TEST_SEED = 99
# Side, number, maximum number of steps, seed and minimum path length of the mazes for --evaluate.
NEW_MAZES = ((15, 1000, 64, 2027, 1), (30, 200, 64, 2027, 1), (30, 100, 64, 2028, 110))
PATH_LENGTHS = (1, 20, 40, 80, 120, 1000)  # limits of the bands of the report


class Net(nn.Module):
    """The package's model, and the head for directions."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        config = SeRrmPuzzleConfig.from_preset(
            "symbol-maze", hidden_size=args.width, intermediate_size=2 * args.width, L_layers=args.layers, task="maze",
            two_states=args.two_states, halt_max_steps=64, grid_shape=[args.side] * 2, seq_len=args.side**2,
            H_cycles=args.passes[0], L_cycles=args.passes[1],
        )  # fmt: skip
        self.solver = SeRrmPuzzleForSolving(config)
        self.directions = nn.Linear(args.width, 4)
        self.blocks_per_step = args.passes[0] * (args.passes[1] + args.two_states) * args.layers

    def fresh(self, boards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = self.solver.model.embed(boards, None, torch.bfloat16)
        return tuple(state.contiguous() for state in self.solver.model.fresh_states(x))

    def forward(self, boards: torch.Tensor, z_H: torch.Tensor, z_L: torch.Tensor):
        """Run one step. Return both states, the logits [B, S, V] and those of the directions [B, S, 4]."""
        x, _ = self.solver.model.embed(boards, None, z_H.dtype)
        z_H, z_L = self.solver.model.reason(x, None, z_H, z_L)
        return z_H, z_L, self.solver.read_out(z_H).float(), self.directions(z_H[:, 0].float())


def make_mazes(side: int, count: int, seed: int, openings: float, min_path_length: int = 1) -> torch.Tensor:
    """Generate puzzles, solutions, and each cell's distances from the goal and from the start: int16 [N, 4, R, C]."""
    grids = []
    for puzzle, solution in maze.generate(side, side, count, seed, min_path_length=min_path_length, openings=openings):
        ends = [tuple(np.argwhere(puzzle == token)[0]) for token in (maze.GOAL, maze.START)]
        far = [maze.distances(puzzle != maze.WALL, end)[0] for end in ends]
        grids.append(np.stack([puzzle, solution, *(np.where(each < 0, UNREACHED, each) for each in far)]))
    return torch.tensor(np.array(grids), dtype=torch.int16)


def training_mazes(args: argparse.Namespace) -> torch.Tensor:
    parts = []
    for number, openings in enumerate(OPENINGS):
        shortest = args.min_path_length if openings <= 0.1 else 1  # paths are short where many walls are open
        parts.append(make_mazes(args.side, args.mazes // len(OPENINGS), args.seed + 10 * number, openings, shortest))
    return torch.cat(parts)


def draw(mazes: torch.Tensor, count: int) -> torch.Tensor:
    """Draw mazes; each eighth of the batch gets a random symmetry."""
    parts = mazes[torch.randint(len(mazes), (count,))].chunk(min(8, count))
    turns = torch.randint(8, (len(parts),)).tolist()
    turned = [part.rot90(turn % 4, (2, 3)) for part, turn in zip(parts, turns)]
    return torch.cat([part.transpose(2, 3) if turn >= 4 else part for part, turn in zip(turned, turns)])


def path_lengths(grids: torch.Tensor) -> torch.Tensor:
    """Return the distance of the start from the goal, int16 [B]."""
    return grids[:, 2].masked_fill(grids[:, 0] != maze.START, 0).amax((1, 2))


def known(grids: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what a search knows about grids [B, 4, R, C] after `blocks` [B] moves.

    Returns:
        The distribution of each cell's token [B, S, V], and whether to score the cell [B, S]; then the same for the
        directions in which the goal is one step closer: [B, S, 4] and [B, S].
    """
    puzzle, solution, from_goal, from_start = grids.unbind(1)
    length, moves = path_lengths(grids).view(-1, 1, 1), blocks.view(-1, 1, 1)
    on_path, goal = solution == maze.PATH, puzzle == maze.GOAL
    traced = torch.where(on_path, length + from_start, torch.where(goal, 2 * length, 0))
    early, late = moves < traced, moves >= traced + SLACK
    targets = F.one_hot(torch.where(on_path & early, maze.OPEN, solution).long(), maze.VOCAB_SIZE).float()
    unsure = targets.new_zeros(maze.VOCAB_SIZE)
    unsure[[maze.GOAL, maze.OPEN]] = 0.5
    targets = torch.where((goal & early).unsqueeze(-1), unsure, targets)
    wide = F.pad(from_goal, (1, 1, 1, 1), value=UNREACHED)
    around = torch.stack((wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:]), dim=-1)
    reached = moves >= from_goal
    closer = (around == (from_goal - 1).unsqueeze(-1)) & reached.unsqueeze(-1)
    scored = (puzzle != maze.WALL) & (~reached | (moves >= from_goal + SLACK))
    return tuple(part.flatten(1, 2) for part in (targets, early | late, closer.float(), scored))


def step_limits(args: argparse.Namespace, grids: torch.Tensor, blocks_per_step: int) -> torch.Tensor:
    """Draw the number of steps of each row, int64 [B]. With --targets known, the search can finish."""
    if args.targets == "known":
        needed = (2 * path_lengths(grids) + SLACK) // blocks_per_step
        short = needed + 1 + torch.randint(0, 5, needed.shape)
    else:
        short = torch.randint(8, 17, (len(grids),))
    return torch.where(torch.rand(len(grids)) < args.long_share, LONG_STEPS, short)


def loss_of(args, grids, blocks, logits, directions) -> torch.Tensor:
    if args.targets != "known":
        return F.cross_entropy(logits.flatten(0, 1), grids[:, 1].flatten().long())
    targets, scored, closer, directed = known(grids, blocks)
    tokens = F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), reduction="none").view(scored.shape)
    arrows = F.binary_cross_entropy_with_logits(directions, closer, reduction="none").mean(-1)
    return (tokens * scored).mean() + args.directions * (arrows * directed).mean()


class Training:
    """The networks, the optimizer, the rows in progress, and the CPU seconds spent."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.mazes = args, training_mazes(args)
        self.net, self.average = Net(args), Net(args)
        if args.start:
            self.net.load_state_dict(torch.load(args.start, weights_only=True)["average"])
        self.average.load_state_dict(self.net.state_dict())
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.number, self.seconds, self.curve = 0, 0.0, []
        self.file = args.models / f"{args.name}.pt"
        if self.file.is_file():
            self.load()
        self.compiled = torch.compile(self.net, dynamic=False)
        self.grids = draw(self.mazes, args.batch)
        self.steps = torch.zeros(args.batch, dtype=torch.long)
        self.limits = step_limits(args, self.grids, self.net.blocks_per_step)
        self.states = self.net.fresh(self.boards)

    @property
    def boards(self) -> torch.Tensor:
        return self.grids[:, 0].flatten(1).long()

    def run(self) -> None:
        """Train until --seconds of CPU time are spent, without compilation and evaluation."""
        reported, losses, clock = self.seconds, [], None
        while self.seconds < self.args.seconds:
            losses.append(self.train_step())
            if clock is not None:
                self.seconds += time.process_time() - clock
            clock = time.process_time()
            if self.seconds - reported > REPORT_SECONDS:
                exact = [evaluate(self.average.solver, side, 96, 32) for side in sorted({self.args.side, 15})]
                loss = torch.stack(losses).mean().item()
                self.curve.append({"step": self.number, "seconds": self.seconds, "loss": loss, "exact": exact})
                print("long_mazes", self.args.name, self.curve[-1], flush=True)
                self.save()
                reported, losses, clock = self.seconds, [], time.process_time()
        self.save()

    def train_step(self) -> torch.Tensor:
        """Run one step with gradient, update the weights, and replace the rows that are done. Return the loss."""
        args, net = self.args, self.net
        rate = 0.02 + 0.49 * (1 + math.cos(math.pi * self.seconds / args.seconds))
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate * rate * min(1, (self.number + 1) / 100)
        if args.targets == "last":
            with torch.no_grad():
                for _ in range(int(torch.randint(0, 16, ()))):
                    self.states = self.compiled(self.boards, *self.states)[:2]
        *states, logits, directions = self.compiled(self.boards, *self.states)
        self.steps += 1
        loss = loss_of(args, self.grids, self.steps * net.blocks_per_step, logits, directions)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        self.optimizer.step()
        keep = min(0.998, 1 - 10 / (self.number + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(net.parameters()), 1 - keep)
        self.number += 1
        self.replace_rows([state.detach() for state in states])
        return loss.detach()

    def replace_rows(self, states: list[torch.Tensor]) -> None:
        done = (self.steps >= self.limits) | (self.args.targets == "last")
        self.grids = torch.where(done[:, None, None, None], draw(self.mazes, len(done)), self.grids)
        self.steps = torch.where(done, 0, self.steps)
        limits = step_limits(self.args, self.grids, self.net.blocks_per_step)
        self.limits = torch.where(done, limits, self.limits)
        self.states = tuple(
            torch.where(done.view(-1, *[1] * (state.dim() - 1)), fresh, state)
            for fresh, state in zip(self.net.fresh(self.boards), states)
        )

    def save(self) -> None:
        state = {"net": self.net.state_dict(), "average": self.average.state_dict(), "curve": self.curve}
        state |= {"optimizer": self.optimizer.state_dict(), "number": self.number, "seconds": self.seconds}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.file)

    def load(self) -> None:
        """Continue from the saved state; the rows start from the beginning."""
        state = torch.load(self.file, weights_only=True)
        for name in ("net", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.number, self.seconds, self.curve = state["number"], state["seconds"], state["curve"]
        torch.manual_seed(self.args.seed + self.number)


def resized(solver: SeRrmPuzzleForSolving, side: int) -> SeRrmPuzzleForSolving:
    """Return the model with the same weights for mazes of `side` rows and columns."""
    fields = solver.config.to_dict() | {"grid_shape": [side, side], "seq_len": side**2}
    model = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_dict(fields))
    model.load_state_dict(solver.state_dict())
    return model.eval()


@torch.no_grad()
def evaluate(
    solver: SeRrmPuzzleForSolving, side: int, count: int, max_steps: int, seed: int = TEST_SEED, min_path: int = 1
) -> dict[str, Any]:
    """Solve held-out mazes with the usual openings. Return the exact answers by steps and by path length."""
    grids = make_mazes(side, count, seed, maze.DEFAULT_OPENINGS, min_path)
    boards, labels = (grids[:, i].flatten(1).long() for i in (0, 1))
    start, model = time.process_time(), resized(solver, side)
    parts = [
        model.solve(part, max_steps=max_steps, return_trajectory=True) for part in boards.split(model.boards_per_call)
    ]
    seconds = time.process_time() - start
    right = [
        torch.cat([part.trajectory[:step][-1] for part in parts]).eq(labels).all(1) for step in range(1, max_steps + 1)
    ]
    steps, sure = torch.cat([part.steps for part in parts]), torch.cat([part.q_halt for part in parts])
    sure = sure.sigmoid() >= solver.config.halt_confidence
    lengths = path_lengths(grids)
    bands = {
        f"{low} to {high - 1}": [int(right[-1][part].sum()), int(part.sum())]
        for low, high in itertools.pairwise(PATH_LENGTHS)
        if (part := (lengths >= low) & (lengths < high)).any()
    }
    exact = {2**power: int(right[2**power - 1].sum()) for power in range(max_steps.bit_length())}
    return {
        "side": side, "mazes": count, "min_path_length": min_path, "seed": seed, "exact": exact,
        "interval": wilson_interval(exact[max_steps], count), "by_path_length": bands, "sure": int(sure.sum()),
        "sure_but_wrong": int((sure & ~right[-1]).sum()), "average_steps": steps.float().mean().item(),
        "cpu_seconds": seconds,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="check that it runs: 5 x 5, narrow, two seconds")
    parser.add_argument("--name", default="known", help="name of the run, its files and its report")
    parser.add_argument("--evaluate", type=Path, metavar="MODEL", help="only evaluate a checkpoint, on new mazes")
    parser.add_argument("--targets", choices=("each", "last", "known"), default="known")
    parser.add_argument("--directions", type=float, default=1.0, help="weight of the loss of the directions")
    parser.add_argument("--seconds", type=float, default=300, help="CPU seconds without compilation and evaluation")
    parser.add_argument("--side", type=int, default=11, help="rows and columns of the training mazes")
    parser.add_argument("--min_path_length", type=int, default=1, help="for mazes with at most 10 %% of walls opened")
    parser.add_argument("--mazes", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--two_states", action="store_true", help="TRM's two states, as in the preset symbol-maze")
    parser.add_argument("--passes", type=int, nargs=2, default=(1, 6), metavar=("H_CYCLES", "L_CYCLES"))
    parser.add_argument("--long_share", type=float, default=0.05, help=f"fraction of rows that run {LONG_STEPS} steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="state of another run to start from (NAME.pt)")
    parser.add_argument(
        "--models", type=Path, default=Path("runs/long_mazes"), help="folder for states and checkpoints"
    )
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.side, args.mazes, args.width, args.batch = 2.0, 5, 40, 16, 8
    return args


def main() -> None:
    args = parse()
    if args.evaluate:
        solver, report = SeRrmPuzzleForSolving.from_pretrained(args.evaluate), {}
    else:
        torch.manual_seed(args.seed)
        training = Training(args)
        training.run()
        solver = training.average.solver
        if not args.two_states:
            solver.config.H_cycles *= 2  # with one state, this only groups twice as many passes into a step
        solver.save_pretrained(args.models / args.name)
        report = {"arguments": {name: str(value) for name, value in vars(args).items()}}
        report |= {"steps": training.number, "curve": training.curve}
    mazes = [(5, 10, 4)] if args.quick else NEW_MAZES
    report |= {"exact": [evaluate(solver, *each) for each in mazes], "parameters": solver.num_parameters()}
    write_report(args, f"long_mazes_{args.name}", report | {"machine": machine()})
    print("long_mazes", args.name, report["exact"], flush=True)


if __name__ == "__main__":
    main()
