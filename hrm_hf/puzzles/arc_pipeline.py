"""ARC as a puzzle task: one task is several questions, and its views are augmentations that the model was trained on.

A puzzle model reads the demonstrations of a task from its *row of the puzzle table*, learned in training, not from the
input. A task that the model never trained on therefore has no row. It is answered with the blank row, with a warning,
and such answers are not to be expected to be right.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..io.files import load_json
from .arc import augmentations, encode_task, task_identifiers
from .arc_grids import FRAME, SEQ_LEN, VOCAB_SIZE, apply_augmentation, crop_prediction, encode_grid, undo_augmentation
from .arc_tasks import parse_task
from .arc_voting import ATTEMPTS, ArcVoting
from .dataset import BLANK_IDENTIFIER, IDENTIFIERS_FILE, IGNORE_LABEL, PAD_ID
from .tasks import Ballot, Candidate, MazeTask, Puzzle, PuzzleTask, SudokuTask, ballots


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArcView:
    """The augmentation `name` of a task, and its row of the puzzle table."""

    name: str
    identifier: int

    def show(self, tokens: np.ndarray) -> np.ndarray:
        """Frames [..., 900] of the task as this augmentation has them."""
        return self._map(tokens, apply_augmentation)

    def undo(self, tokens: np.ndarray) -> np.ndarray:
        """Frames [..., 900] of this augmentation as the task has them, cropped to the grid they hold."""
        return self._map(tokens, undo_augmentation)

    def _map(self, tokens: np.ndarray, change) -> np.ndarray:
        frames = [encode_grid(change(crop_prediction(row), self.name)) for row in tokens.reshape(-1, SEQ_LEN)]
        return np.array(frames, dtype=np.int64).reshape(tokens.shape)


class ArcTaskSolving(PuzzleTask):
    """ARC tasks: dicts `{"train": [...], "test": [...], "name": ...}`, or paths of their JSON files."""

    name = "arc"
    has_rules = True  # only that the answer is a grid

    def __init__(self, config, identifiers: Sequence[str] | None = None):
        super().__init__(config)
        self.grid_shape = (FRAME, FRAME)
        if config.seq_len != SEQ_LEN or config.vocab_size < VOCAB_SIZE:
            raise ValueError(
                f"the config says task='arc' with seq_len={config.seq_len}, vocab_size={config.vocab_size}; ARC needs "
                f"seq_len={SEQ_LEN}, vocab_size={VOCAB_SIZE}"
            )
        if identifiers is not None and config.puzzle_emb_ndim and len(identifiers) != config.num_puzzle_identifiers:
            raise ValueError(
                f"{IDENTIFIERS_FILE} has {len(identifiers)} names, the model's puzzle table "
                f"{config.num_puzzle_identifiers} rows; take the file of the data set that the model was trained on"
            )
        self.identifiers = identifiers

    def is_single(self, item: Any) -> bool:
        return not isinstance(item, (list, tuple))

    def read(self, item: Any) -> Puzzle:
        name = "task"
        if isinstance(item, (str, Path)):
            name, item = Path(item).stem, load_json(item)
        if not isinstance(item, dict):
            raise ValueError(f'an ARC puzzle is a dict {{"train": [...], "test": [...]}} or a file, not {item!r:.60}')
        name = item.get("name", name)
        task = parse_task(item, name)
        tests = encode_task(task)["test"]
        known = [None if (row == IGNORE_LABEL).all() else row for row in tests["labels"]]
        solutions = [None if row is None else np.where(row == IGNORE_LABEL, PAD_ID, row) for row in known]
        return Puzzle(tests["input_ids"], solutions, name=name, source=task)

    def grid(self, tokens: np.ndarray) -> list[list]:
        return crop_prediction(tokens).tolist()

    def text(self, tokens: np.ndarray) -> str:
        return "\n".join("".join(map(str, row)) for row in self.grid(tokens))

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        return [] if self.grid(answer) else ["the answer is no grid: its top left cell holds no color"]

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[ArcView]:
        known = task_identifiers(puzzle.name, self.identifiers or [])
        if known:
            views = [ArcView(name, identifier) for identifier, name in list(known.items())[:votes]]
            if len(views) < votes:
                logger.warning(
                    "votes=%d, but the model knows %d augmentations of task %s", votes, len(views), puzzle.name
                )
            return views
        if self.config.puzzle_emb_ndim and self.config.num_puzzle_identifiers > 1:
            logger.warning(
                "task %r has no row in this model's puzzle table%s: the blank row is used, and a right answer is not "
                "to be expected. Train on the task's examples first, and give the task its name in %s",
                puzzle.name,
                "" if self.identifiers else f" (there is no {IDENTIFIERS_FILE} beside the checkpoint)",
                IDENTIFIERS_FILE,
            )
        variants = augmentations(puzzle.source, votes - 1, int(rng.integers(2**31)))
        return [ArcView(name, 0) for name, _ in variants]

    def rank(self, puzzle: Puzzle, question: int, candidates: list[Candidate]) -> list[Ballot]:
        """As ARC scores are computed: by the number of votes, then by mean confidence (`ArcVoting`)."""
        grid = crop_prediction(puzzle.questions[question])
        voting = ArcVoting({puzzle.name: {"test": [{"input": grid}]}}, [BLANK_IDENTIFIER, puzzle.name])
        count = len(candidates)
        voting.update(
            np.repeat(puzzle.questions[question][None], count, axis=0),
            np.ones(count, dtype=np.int64),
            np.stack([candidate.tokens for candidate in candidates]),
            np.array([candidate.q_halt for candidate in candidates]),
        )
        groups = ballots(candidates)
        order = [encode_grid(found.grid).astype(np.int64).tobytes() for found in voting.candidates(puzzle.name, 0)]
        return [groups[key] for key in order]

    def result(self, puzzle: Puzzle, candidates: Sequence[list[Candidate]], prefer_valid: bool) -> dict[str, Any]:
        """The answer to the first test input, and those to all of them under "tests"."""
        tests = [self._answer(puzzle, i, found, prefer_valid) for i, found in enumerate(candidates)]
        return {**tests[0], "tests": tests} if len(tests) > 1 else tests[0]

    def _extend(self, result: dict[str, Any], ranked: list[Ballot], solution: np.ndarray | None) -> dict[str, Any]:
        attempts = [ballot.best.tokens for ballot in ranked[:ATTEMPTS]]
        result["attempts"] = [self.grid(tokens) for tokens in attempts]
        if solution is not None:
            result["correct"] = any((tokens == solution).all() for tokens in attempts)
        return result


def puzzle_task(config, identifiers: Sequence[str] | None = None) -> PuzzleTask:
    """The task of a model's config. `identifiers`: names of the rows of its puzzle table, for ARC.

    Raises:
        ValueError: the task is unknown, or the config's sizes are not those of the task.
    """
    if config.task == "arc":
        return ArcTaskSolving(config, identifiers)
    tasks = {task.name: task for task in (PuzzleTask, SudokuTask, MazeTask)}
    if config.task not in tasks:
        raise ValueError(f"the config says task={config.task!r}; expected one of {sorted([*tasks, 'arc'])}")
    return tasks[config.task](config)
