"""Train the shipped Sudoku solver: softmax pooling on hard boards, for a given time on one GPU.

    hrm-hf data sudoku --clues 22-30 --num-train 200000 --num-test 500 --mix RATED.csv.gz --test-share 0.1 --seed 7 \\
        --out runs/data/sudoku_pooling
    python -m benchmarks.puzzles.hard_sudoku runs/data/sudoku_pooling --seconds 225 --width 64 --seed 1
    python -m benchmarks.puzzles.hard_sudoku --quick

`Net` is `SeRrmPuzzleForSolving` with pooling="softmax", written as plainly as possible for one board size, and the
reference in the tests of that field. Activations are bfloat16 on a GPU. Six rows in ten are rated boards, the others
generated ones; each gets a random symmetry. As in the package's trainer, every step of a board has its own loss and
optimizer step; a board runs 8 to 15 steps, three in ten of them 16 to 48, and a solved board leaves early.

The averaged weights are saved as a checkpoint of the package in --models, and accuracies on held-out boards in
`hard_sudoku_WIDTH.json`. `training/recipes/sudoku_pooling.yaml` trains the same model with the package's trainer.
"""

import argparse
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hrm_hf import SeRrmPuzzleConfig, SeRrmPuzzleForSolving
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info
from hrm_hf.puzzles.sudoku import generated_sudoku

from ..report import machine, make_parser, write_report


HEADS, CYCLES = 4, 2
KINDS = ("row", "column", "box", "symbols")
RATED_SHARE, LATE_SHARE, LEAVE_PROBABILITY = 0.6, 0.3, 0.3
MIN_STEPS = 4  # minimum number of steps before a solved board may be replaced
REPORT_SECONDS = 45


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-5)


class Block(nn.Module):
    """Weighted means of a state [B, V, R, C, D] over rows, columns, boxes and digits, followed by SwiGLU."""

    def __init__(self, width: int):
        super().__init__()
        for kind in KINDS:
            setattr(self, kind, nn.Linear(width, width, bias=False))
        self.scores = nn.Linear(width, len(KINDS) * HEADS)
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        for layer in self.children():
            nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(self.scores.weight)
        nn.init.zeros_(self.scores.bias)

    def forward(self, h):
        B, V, R, C, D = h.shape
        heads = h.unflatten(-1, (HEADS, D // HEADS))
        weights = (8 * torch.tanh(self.scores(h).float() / 8)).exp().to(h.dtype).unflatten(-1, (len(KINDS), HEADS))

        def pool(kind, dims, view=None):
            weight = weights[..., kind, :, None]
            weighted = weight * heads
            if view:
                weighted, weight = (part.reshape(*view, HEADS, part.shape[-1]) for part in (weighted, weight))
            sums = [part.sum(dims, keepdim=True, dtype=torch.float32) for part in (weighted, weight)]
            return (sums[0] / sums[1]).flatten(-2).to(h.dtype)

        side = math.isqrt(R)
        boxes = (B, V, R // side, side, C // side, side)
        mixed = self.row(pool(0, 3)) + self.column(pool(1, 2)) + self.symbols(pool(3, 1))
        mixed = (mixed.view(*boxes, D) + self.box(pool(2, (3, 5), boxes))).view(h.shape)
        h = rms_norm(h + mixed)
        gate, up = self.gate_up(h).chunk(2, -1)
        return rms_norm(h + self.down(F.silu(gate) * up))


class Net(nn.Module):
    """Two states, updated as in TRM by two blocks, and a head that gives every digit of every cell a logit."""

    def __init__(self, width: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(3, width), nn.Linear(width, 1, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        for table in (self.tokens, self.head):
            nn.init.trunc_normal_(table.weight, std=width**-0.5)
        self.H_init, self.L_init = (nn.Buffer(torch.randn(width)) for _ in range(2))

    def embed(self, boards: torch.Tensor) -> torch.Tensor:
        """Embed boards [B, S] of digits (0: blank), once per digit: a cell is blank, is that digit, or is another."""
        size = math.isqrt(boards.shape[1])
        digits = torch.arange(1, size + 1, device=boards.device)
        given = (boards[:, None] == digits[:, None]).long() + (boards[:, None] > 0)
        return math.sqrt(self.tokens.embedding_dim) * self.tokens(given).unflatten(2, (size, size))

    def fresh(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.H_init.expand_as(x), self.L_init.expand_as(x)

    def level(self, z, injection):
        z = z + injection
        for block in self.blocks:
            z = block(z)
        return z

    def cycle(self, x, z_H, z_L):
        for _ in range(CYCLES):
            z_L = self.level(z_L, z_H + x)
        return self.level(z_H, z_L), z_L

    def forward(self, x, z_H, z_L):
        """Run one step, with gradients in the last cycle; return both states and the logits [B, V, S]."""
        with torch.no_grad():
            for _ in range(CYCLES - 1):
                z_H, z_L = self.cycle(x, z_H, z_L)
        z_H, z_L = self.cycle(x, z_H, z_L)
        return z_H, z_L, self.head(z_H).squeeze(-1).flatten(2).float()


def package_model(net: Net, size: int = 9) -> SeRrmPuzzleForSolving:
    """Return the package's model with the weights of `net`."""
    width, box = net.tokens.embedding_dim, math.isqrt(size)
    board = {"grid_shape": [size, size], "box_shape": [box, box], "seq_len": size**2, "vocab_size": size + 2}
    config = SeRrmPuzzleConfig.from_preset(
        "symbol-pooling", hidden_size=width, intermediate_size=2 * width, halt_max_steps=64, task="sudoku", **board
    )
    model = SeRrmPuzzleForSolving(config)
    names = {
        r"^tokens": "model.embed.tokens", r"^([HL]_init)": r"model.\1", r"^head": "lm_head",
        r"^blocks": "model.L_level.layers", r"\.(row|column|box)\.": r".positions.\1.",
        r"\.gate_up": ".mlp.gate_up_proj", r"\.down": ".mlp.down_proj",
    }  # fmt: skip
    state = {}
    for name, value in net.state_dict().items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        state[name] = value
    model.load_state_dict(state)
    return model.eval()


@dataclass
class Boards:
    """Training pairs of a board and its solution, as digits: uint8 [N, 2, S]."""

    rated: torch.Tensor
    generated: torch.Tensor

    def draw(self, count: int) -> torch.Tensor:
        """Draw pairs, apply a random symmetry to each, and return them as int64 [count, 2, S]."""
        device = self.rated.device
        rated = torch.rand(count, device=device) < RATED_SHARE
        picks = [part[torch.randint(len(part), (count,), device=device)] for part in (self.rated, self.generated)]
        return transformed(torch.where(rated[:, None, None], *picks))


def transformed(pairs: torch.Tensor) -> torch.Tensor:
    """For each pair [B, 2, S], permute digits, bands, and lines within bands; transpose half of the pairs."""
    B, _, S = pairs.shape
    size, box, device = math.isqrt(S), math.isqrt(math.isqrt(S)), pairs.device

    def order(shape):
        bands = torch.rand(B, box, device=device).argsort(1)
        lines = (bands[:, :, None] * box + torch.rand(B, box, box, device=device).argsort(2)).flatten(1)
        return lines.view(shape).expand(B, 2, size, size)

    grids = pairs.view(B, 2, size, size).gather(2, order((B, 1, size, 1))).gather(3, order((B, 1, 1, size)))
    flipped = torch.rand(B, 1, 1, 1, device=device) < 0.5
    grids = torch.where(flipped, grids.transpose(2, 3), grids).flatten(1).long()
    digits = F.pad(torch.rand(B, size, device=device).argsort(1) + 1, (1, 0))
    return digits.gather(1, grids).view(B, 2, S)


def step_limits(count: int, device: torch.device) -> torch.Tensor:
    late = torch.rand(count, device=device) < LATE_SHARE
    short, long = (torch.randint(low, high, (count,), device=device) for low, high in ((8, 16), (16, 49)))
    return torch.where(late, long, short)


def main() -> None:
    parser = make_parser(__doc__, quick="check that it runs: boards of 4 x 4, narrow, a few steps on the CPU")
    parser.add_argument("data", nargs="?", help="folder of a puzzle data set, e.g. the output of `hrm-hf data sudoku`")
    parser.add_argument("--split", default="test_mixed", help="held-out split to evaluate")
    parser.add_argument("--seconds", type=float, default=225, help="training time in seconds, excluding compilation")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", type=Path, default=Path("runs/hard_sudoku"), help="folder for the checkpoint")
    args = parser.parse_args()
    if args.data is None and not args.quick:
        parser.error("pass DATA, or --quick")
    if args.quick:
        args.seconds, args.width, args.batch, args.device = 1.0, 16, 8, "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    boards, held_out = read_boards(args)
    net, steps, curve = train(args, boards, held_out)
    model = package_model(net.cpu(), math.isqrt(held_out.shape[2]))
    model.save_pretrained(args.models)
    exact = accuracy(net.to(args.device), held_out, (8, 16, 32, 64, 128), args)
    report = {"arguments": {name: str(value) for name, value in vars(args).items()}, "steps": steps, "curve": curve}
    report |= {"exact": exact, "boards": len(held_out), "parameters": model.num_parameters(), "machine": machine()}
    write_report(args, f"hard_sudoku_{args.width}", report)
    print("hard_sudoku", exact, flush=True)


def read_boards(args: argparse.Namespace) -> tuple[Boards, torch.Tensor]:
    """Return the training boards and the held-out pairs, on the device."""
    if args.quick:
        splits, _ = generated_sudoku(4, num_train=50, num_test=20, seed=0)
        train_rows, test_rows, num_generated = splits["train"], splits["test"], 25
    else:
        train_rows, test_rows = (load_puzzle_dataset(args.data, name) for name in ("train", args.split))
        num_generated = load_puzzle_info(args.data).options["num_train"]  # generated rows come before rated ones
    train_pairs, test_pairs = (
        torch.stack([torch.tensor(rows[name][:]) for name in ("input_ids", "labels")], dim=1).sub(1).to(args.device)
        for rows in (train_rows, test_rows)
    )
    return Boards(train_pairs[num_generated:], train_pairs[:num_generated]), test_pairs


def train(args: argparse.Namespace, boards: Boards, held_out: torch.Tensor) -> tuple[Net, int, list[dict[str, Any]]]:
    """Train for --seconds. Return the averaged weights, the number of steps and the accuracy curve."""
    device, B = torch.device(args.device), args.batch
    net, average = Net(args.width).to(device), Net(args.width).to(device)
    average.load_state_dict(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    if device.type == "cuda":
        for block in net.blocks:
            block.compile(dynamic=False)
    pairs, steps, limits = boards.draw(B), torch.zeros(B, dtype=torch.long, device=device), step_limits(B, device)
    z_H, z_L = (state.detach().contiguous() for state in net.fresh(net.embed(pairs[:, 0])))
    start = reported = time.time()
    number, losses, curve = 0, torch.zeros((), device=device), []
    while (progress := (time.time() - start) / args.seconds) < 1:
        rate = min(1, (number + 1) / 200) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        optimizer.zero_grad()
        with autocast(device):
            z_H, z_L, logits = net(net.embed(pairs[:, 0]), z_H, z_L)
        targets = pairs[:, 1] - 1
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        keep = min(0.999, 1 - 10 / (number + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 1 - keep)
        number, losses, steps = number + 1, losses + loss.detach(), steps + 1
        solved = (logits.argmax(1) == targets).all(1) & (steps >= MIN_STEPS)
        done = (steps >= limits) | (solved & (torch.rand(B, device=device) < LEAVE_PROBABILITY))
        pairs = torch.where(done[:, None, None], boards.draw(B), pairs)
        steps, limits = torch.where(done, 0, steps), torch.where(done, step_limits(B, device), limits)
        z_H, z_L = (
            torch.where(done[:, None, None, None, None], first.to(state.dtype), state.detach())
            for first, state in ((net.H_init, z_H), (net.L_init, z_L))
        )
        if number == 1:
            start = time.time()  # without compiling
        if time.time() - reported > REPORT_SECONDS:
            exact = accuracy(average, held_out[:512], (4, 16), args)
            seconds, reported = round(time.time() - start, 1), time.time()
            curve.append({"step": number, "seconds": seconds, "loss": (losses / number).item(), "exact": exact})
            print("hard_sudoku", curve[-1], flush=True)
    return average, number, curve


@torch.no_grad()
def accuracy(net: Net, pairs: torch.Tensor, marks: tuple[int, ...], args: argparse.Namespace) -> dict[int, float]:
    """Return the fraction of exactly solved pairs [N, 2, S] after each number of steps in `marks`."""
    solved = dict.fromkeys(marks, 0)
    for part in pairs.long().split(args.batch):
        with autocast(pairs.device):
            x = net.embed(part[:, 0])
            z_H, z_L = net.fresh(x)
            for step in range(1, max(marks) + 1):
                z_H, z_L, logits = net(x, z_H, z_L)
                if step in marks:
                    solved[step] += (logits.argmax(1) == part[:, 1] - 1).all(1).sum().item()
    return {step: count / len(pairs) for step, count in solved.items()}


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


if __name__ == "__main__":
    main()
