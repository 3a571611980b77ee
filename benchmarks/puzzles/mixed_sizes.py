"""Train a Sudoku solver further on 9x9 and 12x12 boards together, so that it solves larger boards that it never saw.

    python -m benchmarks.puzzles.mixed_sizes RATED.csv.gz [--model pretrained/sudoku-9x9] [--seconds 900] [--seed 0]
    python -m benchmarks.puzzles.sizes runs/mixed_sizes --sets 16:105 --boards 60 --seed 1 --steps 8 16 32 64 128
    python -m benchmarks.puzzles.mixed_sizes --quick

No weight depends on the size of a board, so one set of weights trains on both sizes. Seven batches in ten have 12x12
boards with 48 to 58 clues, each with one solution (`sizes.BoardMaker`, needs `python-sat`), the others the first 9x9
boards of RATED.csv.gz (columns puzzle and solution). A batch runs 8 to 15 ACT steps, three in ten 16 to 32, each with
its own loss and optimizer step, and stops early when all of its boards are solved. There is no random symmetry: the
model gives symmetric boards symmetric answers. Activations are bfloat16, the layers compiled. The script uses one
thread, and --seconds are its CPU seconds, without those of making the boards. The averaged weights are saved in
--models.
"""

import argparse
import copy
import csv
import gzip
import itertools
import math
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from hrm_hf import AutoModelForPuzzleSolving, SeRrmPuzzleConfig, SeRrmPuzzleForSolving
from hrm_hf.puzzles.sudoku_generation import rng_of
from hrm_hf.puzzles.sudoku_rules import DIGIT_OFFSET, sudoku_shape

from ..report import machine, make_parser, write_report
from .sizes import BoardMaker


CLUES = (48, 58)  # of the 12x12 boards
BATCH, LARGE_SHARE, LONG_SHARE = 12, 0.7, 0.3
WARMUP, FLOOR, AVERAGE_RATE = 50, 0.02, 0.01
MIN_STEPS = 4  # minimum number of steps before a batch of solved boards stops


def main() -> None:
    parser = make_parser(__doc__, quick="a random model, a few small boards, two steps")
    parser.add_argument("rated", nargs="?", type=Path, help="CSV file of 9x9 boards, compressed with gzip")
    parser.add_argument("--model", default="pretrained/sudoku-9x9", help="checkpoint folder to start from")
    parser.add_argument("--boards", type=int, nargs=2, default=(8000, 2000), help="number of 9x9 and of 12x12 boards")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=Path, default=Path("runs/mixed_sizes"), help="folder for the checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if find_spec("pysat") is None and args.quick:
        print("mixed_sizes: skipped; pip install python-sat")
        return
    if args.rated is None and not args.quick:
        parser.error("pass RATED.csv.gz, or --quick")
    if args.quick:
        config = SeRrmPuzzleConfig.from_preset("symbol-pooling", hidden_size=16, intermediate_size=32, task="sudoku")
        model = SeRrmPuzzleForSolving(config)
        boards = {9: made_boards(9, (60, 70), 4), 12: made_boards(12, (90, 110), 4)}
        args.seconds = 1e-3
    else:
        model = AutoModelForPuzzleSolving.from_pretrained(args.model, forward_dtype="bfloat16")
        boards = {9: rated_boards(args.rated, args.boards[0]), 12: made_boards(12, CLUES, args.boards[1])}
    report = train(args, model, boards)
    if not args.quick:
        model.config.forward_dtype = None
        model.config.sure_confidence = None  # calibrated for the weights before this training
        model.save_pretrained(args.models)
    report |= {"arguments": {name: str(value) for name, value in vars(args).items()}, "machine": machine()}
    write_report(args, "mixed_sizes", report)


def rated_boards(path: Path, count: int) -> np.ndarray:
    """Read the first boards of a CSV file, as digits: uint8 [count, 2, 81]."""
    with gzip.open(path, "rt") as file:
        rows = itertools.islice(csv.DictReader(file), count)
        texts = [(row["puzzle"].replace(".", "0"), row["solution"]) for row in rows]
    return np.array([[list(map(int, text)) for text in pair] for pair in texts], dtype=np.uint8)


def made_boards(size: int, clues: tuple[int, int], count: int) -> np.ndarray:
    """Make boards with a random number of clues: uint8 [count, 2, cells]."""
    maker, generators = BoardMaker(size), (rng_of(7, size, number) for number in itertools.count())
    found = (maker.board(int(rng.integers(clues[0], clues[1] + 1)), rng) for rng in generators)
    return np.stack([np.stack(pair) for pair in itertools.islice(filter(None, found), count)])


def of_size(model: SeRrmPuzzleForSolving, size: int) -> SeRrmPuzzleForSolving:
    """Return a model for boards of another size that trains the parameters of `model`."""
    shape = sudoku_shape(size)
    other = model.for_board((size, size), shape.box_shape, shape.vocab_size)
    modules = dict(other.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        setattr(modules[path], leaf, parameter)
    return other


def train(args: argparse.Namespace, model: SeRrmPuzzleForSolving, boards: dict[int, np.ndarray]) -> dict:
    """Train for --seconds, and load the averaged weights into `model`. Return the report."""
    average, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    models = {size: of_size(model, size).train() for size in boards}
    for layer in itertools.chain.from_iterable(each.model.L_level.layers for each in models.values()):
        if not args.quick:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    rng, start = np.random.default_rng(args.seed), time.process_time()
    steps, batches, solved_batches = 0, 0, dict.fromkeys(boards, 0)
    while not batches or time.process_time() - start < args.seconds:
        size = 12 if rng.random() < LARGE_SHARE else 9
        picked = boards[size][rng.integers(len(boards[size]), size=BATCH)]
        inputs, labels = torch.from_numpy(picked.astype(np.int64) + DIGIT_OFFSET).unbind(1)
        carry, batches = None, batches + 1
        limit = int(rng.integers(16, 33) if rng.random() < LONG_SHARE else rng.integers(8, 16))
        for step in range(1, 3 if args.quick else limit + 1):
            output = models[size](inputs, labels=labels, carry=carry)
            carry = output.carry
            loss = F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten())
            progress = min(1.0, (time.process_time() - start) / args.seconds)
            cosine = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
            optimizer.param_groups[0]["lr"] = args.learning_rate * min(1, (steps + 1) / WARMUP) * cosine
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            steps += 1
            for name, value in model.state_dict().items():
                average[name].lerp_(value, max(AVERAGE_RATE, 1 / (steps + 10)))
            solved = bool((output.logits.argmax(-1) == labels).all())
            if step >= MIN_STEPS and solved:
                break
        solved_batches[size] += solved
        if batches % 10 == 0:
            seconds = time.process_time() - start
            print(f"batch {batches}, step {steps}, {seconds:.0f} s, loss {loss.item():.4f}", flush=True)
    model.load_state_dict(average)
    return {"steps": steps, "batches": batches, "solved_batches": solved_batches}


if __name__ == "__main__":
    main()
