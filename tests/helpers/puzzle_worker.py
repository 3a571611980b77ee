"""Evaluations of tiny puzzle models for tests with several processes, which write results to a folder."""

import json
import os
from pathlib import Path

import numpy as np
import tiny
from accelerate import PartialState

from hrm_hf.cli import app
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.evaluation import evaluate_puzzles
from hrm_hf.puzzles.sudoku import generated_sudoku


# Rows, batch, options: even and uneven shares of batches, a short last batch, fewer batches than processes.
CASES = {
    "even": (12, 3, {"halt": "fixed"}),
    "uneven": (10, 2, {"halt": "q"}),
    "short last batch": (11, 4, {"halt": "q", "min_steps": 2, "max_steps": 20}),
    "one batch": (5, 8, {"halt": "q"}),
    "confident": (12, 5, {"halt": "q", "min_confidence": 0.6}),
    "unlabelled": (12, 4, {"halt": "fixed", "max_steps": 3}),
    "restarts": (10, 3, {"halt": "q", "restarts": 3, "noise": 0.5, "choose": "vote"}),
    "noise of the model": (10, 3, {"halt": "q"}),
    "search": (10, 3, {"halt": "fixed", "max_steps": 2, "search": True}),
}
NOISE = {"noise_scale": 0.5, "random_initial_states": True}


def figures(shared: bool) -> dict:
    """Return the metrics of each case, and the rows that this process solved."""
    splits, _ = generated_sudoku(4, num_train=1, num_test=12)
    rows = PuzzleRows(splits["test"])
    found = {}
    for name, (count, batch_size, options) in CASES.items():
        model = tiny.model("trm", task="sudoku", box_shape=[2, 2], **(NOISE if "noise" in name else {}))
        labels = rows.labels[:count].astype(np.int64)
        if name == "unlabelled":
            labels[4:9] = -100
        solved: list = []

        def on_batch(input_ids, puzzle_identifiers, solution, solved=solved):
            solved += input_ids.tolist()

        result = evaluate_puzzles(
            model, rows.input_ids[:count], labels, np.arange(count) % tiny.PUZZLES, batch_size=batch_size,
            on_batch=on_batch, shared=shared, **options,
        )  # fmt: skip
        assert result.pop("puzzles_per_second") > 0
        found[name] = {"figures": result, "solved": solved}
    return found


def main(folder: str, arguments: list[str]) -> None:
    """Run `hrm-hf ARGUMENTS`, then write the metrics of this process of a group to FOLDER/RANK.json."""
    app(arguments, standalone_mode=False)
    assert not PartialState._shared_state, f"process {os.environ['RANK']} left its group open"
    state = PartialState(cpu=True)
    found = figures(shared=True)
    Path(folder, f"{state.process_index}.json").write_text(json.dumps(found))
