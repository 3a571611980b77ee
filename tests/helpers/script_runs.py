"""Recipes, data sets and weights for tiny runs of the training scripts, and readers of their results."""

import json
import os
from pathlib import Path

import numpy as np
import tiny
import yaml
from datasets import Dataset, DatasetDict

from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.dataset import PuzzleInfo, puzzle_features, save_puzzle_dataset
from hrm_hf.puzzles.sudoku import generated_sudoku


SCRIPTS = Path(__file__).parents[2] / "training"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
RECIPE = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "max_steps": 4,
    "per_device_train_batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 1, "save_strategy": "no",
}  # fmt: skip
# Options of a puzzle run with checkpoints.
PUZZLE_RECIPE = {
    "use_cpu": True, "report_to": "none", "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
    "warmup_steps": 3, "puzzle_emb_lr": 1e-2, "max_steps": 12, "save_strategy": "steps", "save_steps": 5,
}  # fmt: skip


def puzzle_boards(path: Path) -> Path:
    """Write a data set of 4x4 boards with several puzzle identifiers, two boards per puzzle."""
    # Seed 1: tests compare runs after 12 steps, and on some boards rounding grows too fast.
    splits, _ = generated_sudoku(4, num_train=40, num_test=8, seed=1)
    built = DatasetDict()
    for name, split in splits.items():
        rows = PuzzleRows(split)
        puzzle = np.arange(len(rows)) // 2
        columns = {
            "input_ids": rows.input_ids.tolist(), "labels": rows.labels.tolist(),
            "puzzle_identifiers": (1 + puzzle % (tiny.PUZZLES - 1)).tolist(),
            "puzzle_index": puzzle.tolist(), "group_index": puzzle.tolist(),
        }  # fmt: skip
        built[name] = Dataset.from_dict(columns, features=puzzle_features(16))
    info = PuzzleInfo("sudoku", (4, 4), 6, (2, 2), identifiers=["<blank>", *"abcd"])
    return save_puzzle_dataset(built, info, path)


def renamed_boards(path: Path, identifiers: int, seed: int = 0) -> str:
    """Write solved 4x4 boards whose digits must be renamed, differently for each puzzle identifier."""
    splits, _ = generated_sudoku(4, num_train=120, num_test=40, seed=seed)
    rng = np.random.default_rng(seed)
    renamings = [np.concatenate(([0, 1], 2 + rng.permutation(4))) for _ in range(identifiers)]
    built = DatasetDict()
    for name, split in splits.items():
        rows = PuzzleRows(split)
        ids = 1 + np.arange(len(rows)) % (identifiers - 1)
        labels = np.stack([renamings[i][row] for i, row in zip(ids, rows.labels)])
        columns = {
            "input_ids": rows.labels.tolist(), "labels": labels.tolist(), "puzzle_identifiers": ids.tolist(),
            "puzzle_index": np.arange(len(rows)).tolist(), "group_index": np.arange(len(rows)).tolist(),
        }  # fmt: skip
        built[name] = Dataset.from_dict(columns, features=puzzle_features(16))
    names = ["<blank>", *(f"renaming {i}" for i in range(1, identifiers))]
    return str(save_puzzle_dataset(built, PuzzleInfo("sudoku", (4, 4), 6, (2, 2), identifiers=names), path))


def puzzle_weights(folder: Path, exploration: float) -> Path:
    """Save weights whose slots halt at different steps; `exploration` is halt_exploration_prob."""
    tiny.model("trm", halt_exploration_prob=exploration, task="sudoku", box_shape=[2, 2]).save_pretrained(folder)
    return folder


def recipe_arguments(path: Path, **fields) -> list[str]:
    """Write a recipe, and return the script arguments to use it."""
    path.write_text(yaml.safe_dump(fields))
    return ["--recipe", str(path)]


def losses(folder: Path) -> list[float]:
    """Return the losses that a run logged, in order."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def names(folder: Path) -> set[str]:
    """Return the names in a folder."""
    return {file.name for file in folder.iterdir()}
