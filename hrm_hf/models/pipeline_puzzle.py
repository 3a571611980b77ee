"""`pipeline(model="org/hrm-sudoku", trust_remote_code=True)`: solve boards without the package.

    solve = pipeline(model="org/hrm-sudoku", trust_remote_code=True)
    solve("53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79")["text"]

This pipeline parses boards and calls `model.solve`. The package's pipeline of the same name adds everything that needs
the rules or the symmetries of a task: checked answers, votes, search, files, ARC tasks.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from transformers import Pipeline

from .pipeline_batches import OwnBatchesMixin, seeded
from .settings_puzzle import SolveSettings


SETTINGS = [each.name for each in fields(SolveSettings)]
NAMES = ("puzzle", "question", "quizzes")
MAZE = "?# SGo"  # character for each token; "?" is padding, which no puzzle contains
NOISE_STREAM = 1  # same value as in the package, so the same seed gives the same noise


class PuzzlePipeline(OwnBatchesMixin, Pipeline):
    """Pipeline that solves puzzles with the model in its checkpoint.

    A puzzle is a string (Sudoku: `.` or `0` for a blank; maze: `#`, space, `S`, `G`, with or without line breaks), a
    list of rows, a flat list of cells, or a dict `{"puzzle": ..., "puzzle_identifier": row of the puzzle table}`. The
    cells of other tasks are the symbols in `config.symbols`, or token ids if it is None. A list of puzzles gives a
    list of results.

    Parameters of the constructor and of every call:
        max_steps, halt, restarts and the other fields of `SolveSettings`.
        seed (`int`, 0): seed for the noise.
        batch_size (`int`): number of puzzles per batch.

    Returns, per puzzle, a dict: grid (rows of the answer), text (the same as a string), steps (ACT steps), confidence
    (sigmoid of q_halt), sure (see `PuzzleSolution`; None without a calibrated `config.sure_confidence`).
    """

    def __init__(self, model, *args: Any, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        config = model.config
        side = math.isqrt(config.seq_len)
        self.tokens, self.cells = (
            {token: token for token in range(config.vocab_size)},
            None,
        )  # maps from cell to token and from token to cell
        shape = (1, config.seq_len)
        if config.task == "sudoku":
            digits = range(1, side + 1)
            self.tokens = {".": 1, "0": 1, 0: 1} | {cell: d + 1 for d in digits for cell in (d, str(d))}
            self.cells, shape = [0, 0, *digits], (side, side)
        elif config.task == "maze":
            self.tokens |= {cell: token for token, cell in enumerate(MAZE) if token}
            self.cells, shape = MAZE, (side, config.seq_len // side)
        elif config.symbols:
            self.tokens, self.cells = {cell: i for i, cell in enumerate(config.symbols) if i}, config.symbols
        self.separator = "" if self.cells and max(len(str(cell)) for cell in self.cells) == 1 else " "
        self.grid_shape = tuple(config.grid_shape or shape)

    def _sanitize_parameters(self, seed: int | None = None, **given: Any) -> tuple[dict, dict, dict]:
        if unknown := sorted(set(given) - set(SETTINGS)):
            raise ValueError(
                f"{', '.join(unknown)}: unknown argument; without hrm_hf, the pipeline accepts "
                f"{', '.join(SETTINGS)} and seed; for other arguments, install and import hrm_hf"
            )
        return {}, {name: value for name, value in {**given, "seed": seed}.items() if value is not None}, {}

    def __call__(self, inputs: Any, **kwargs: Any) -> dict[str, Any] | list[dict[str, Any]] | Iterator:
        """Solve one puzzle, or the puzzles in a list, generator or `Dataset` (see the class)."""
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.tolist()
        if isinstance(inputs, (list, tuple)):
            longest = max((len(self._flat(part)) for part in inputs if not isinstance(part, dict)), default=0)
            if longest < max(2, self.model.config.seq_len) and not any(isinstance(part, dict) for part in inputs):
                inputs = {"puzzle": inputs}  # the elements are too short to be puzzles, so the list is one puzzle
        return super().__call__(inputs, **kwargs)

    def preprocess(self, input_: Any) -> dict[str, torch.Tensor]:
        """Return `input_ids`, int64 [1, S], and `puzzle_identifiers` [1] for one puzzle."""
        config = self.model.config
        item = dict(input_) if isinstance(input_, dict) else {"puzzle": input_}
        row = int(item.pop("puzzle_identifier", 0))
        if len(item) != 1 or not item.keys() <= set(NAMES) or not 0 <= row < max(1, config.num_puzzle_identifiers):
            raise ValueError(
                f"puzzle_identifier={row}, keys {sorted(item)}: puzzle_identifier must be in [0, "
                f"{max(1, config.num_puzzle_identifiers) - 1}], and exactly one of {list(NAMES)} must hold the board"
            )
        cells = self._flat(*item.values())
        if config.symbols:
            cells = [str(cell) for cell in cells]
        if len(cells) != config.seq_len:
            raise ValueError(f"the puzzle has {len(cells)} cells; expected {config.seq_len}")
        for place, cell in enumerate(cells, start=1):
            if cell not in self.tokens:
                raise ValueError(f"cell {place} is {cell!r}; must be one of {list(self.tokens)[:16]}")
        tokens = [self.tokens[cell] for cell in cells]
        return {"input_ids": torch.tensor([tokens]), "puzzle_identifiers": torch.tensor([row])}

    def _flat(self, item: Any) -> list:
        """Flatten a board, or part of a board, into a list of cells."""
        if isinstance(item, str) and self.separator and self.cells:
            return item.split()  # some symbols have several characters
        if isinstance(item, str):  # in a maze, spaces are open cells
            return list(item.replace("\n", "") if " " in self.tokens else "".join(item.split()))
        if isinstance(item, (list, tuple)):
            return [cell for part in item for cell in self._flat(part)]
        return [item]

    def _run(self, batch: list[dict], forward_params: dict, postprocess_params: dict) -> Iterator[dict[str, Any]]:
        rows = {name: torch.cat([item[name] for item in batch]) for name in batch[0]}
        outputs = self.forward(rows, **forward_params)
        for row in range(len(batch)):
            yield self.postprocess({name: value[row] for name, value in outputs.items()}, **postprocess_params)

    def _forward(self, input_tensors: dict[str, torch.Tensor], seed: int = 0, **settings: Any):
        with seeded(self.device, seed, NOISE_STREAM):
            solution = self.model.solve(**input_tensors, **settings)
        found = {"tokens": solution.predictions, "steps": solution.steps, "q_halt": solution.q_halt.float()}
        return found if solution.sure is None else {**found, "sure": solution.sure}

    def postprocess(self, model_outputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the answer as rows and as a string, plus the number of steps and the confidence."""
        grid = model_outputs["tokens"].reshape(self.grid_shape).tolist()
        if self.cells:  # show tokens without a character as padding
            grid = [[self.cells[token if token < len(self.cells) else 0] for token in row] for row in grid]
        if self.model.config.task == "sudoku":
            text = "".join(str(cell or ".") for row in grid for cell in row)
        else:
            text = "\n".join(self.separator.join(map(str, row)) for row in grid)
        steps, confidence = int(model_outputs["steps"]), model_outputs["q_halt"].sigmoid().item()
        sure = bool(model_outputs["sure"]) if "sure" in model_outputs else None
        return {"grid": grid, "text": text, "steps": steps, "confidence": confidence, "sure": sure}
