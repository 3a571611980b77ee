"""Solve ARC tasks with puzzle models by voting over the training augmentations of a task.

A puzzle model does not see a task's demonstrations in the input: during training it learns them in the task's *row of
the puzzle table*. A task that the model was not trained on has no row. It gets the blank row and a warning, and its
answer is unlikely to be correct.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..io.files import load_json, validate_unchanged
from .arc import TEST_PUZZLES_FILE, augmentations, encode_task, parse_task, task_identifiers
from .arc_grids import (
    COLOR_OFFSET,
    EOS_ID,
    FRAME,
    NUM_COLORS,
    NUM_DIHEDRAL,
    SEQ_LEN,
    VOCAB_SIZE,
    apply_augmentation,
    crop_prediction,
    dihedral,
    encode_grid,
    encode_pair,
    parse_identifier,
    undo_augmentation,
)
from .candidates import Ballot, Candidate, Puzzle, ballots, sigmoid
from .dataset import BLANK_IDENTIFIER, IDENTIFIERS_FILE, IGNORE_LABEL, INFO_FILE, PAD_ID
from .tasks import Grids, PuzzleTask


logger = logging.getLogger(__name__)

PASS_AT = (1, 2, 5, 10, 100, 1000)
ATTEMPTS = 2
# Colors for padding and end of grid, then the palette of the ARC interface.
COLORS = (
    "#ffffff", "#e9edf0", "#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00",
    "#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25",
)  # fmt: skip
# Example of an ARC task: replace color 1 with color 2.
EXAMPLE = {
    "name": "recolor",
    "train": [
        {"input": [[0, 1, 0], [1, 1, 0], [0, 0, 1]], "output": [[0, 2, 0], [2, 2, 0], [0, 0, 2]]},
        {"input": [[1, 0, 0, 0], [0, 1, 1, 0]], "output": [[2, 0, 0, 0], [0, 2, 2, 0]]},
    ],
    "test": [{"input": [[0, 0, 1], [1, 0, 1], [1, 1, 1]]}],
}

GridKey = tuple[tuple[int, ...], bytes]


class RankedAnswer(NamedTuple):
    """Answer (colors, uint8 [rows, columns]) with its number of votes and its mean sigmoid(q_halt)."""

    grid: np.ndarray
    votes: int
    mean_q: float


class ArcVoting:
    """Vote counter for the test split of an ARC data set, with scores as in HRM and TRM.

        votes = ArcVoting(load_test_puzzles("data/arc1"), load_puzzle_info("data/arc1").identifiers)
        votes.update(input_ids, puzzle_identifiers, predictions, q_halt_logits)   # per batch, epoch or checkpoint
        votes.result()["trm/pass@2"]

    Each row predicts an answer to an augmented question. `update` undoes the augmentation and counts equal answers to
    a question as votes; `result` ranks answers by number of votes, then by mean sigmoid(q_halt). "hrm" counts a task
    as solved if all its test inputs are correct; "trm" (and Kaggle) scores a task by its fraction of correct answers.

    Args:
        test_puzzles: `{task name: {"train": ..., "test": [{"input", "output"}, ...]}}`; outputs may be missing.
        identifiers: Names of the puzzle identifiers; position 0 is blank.
    """

    def __init__(self, test_puzzles: dict[str, dict[str, Any]], identifiers: Sequence[str]):
        self.test_puzzles = test_puzzles
        self.identifiers = identifiers
        # votes[task][question][answer] lists sigmoid(q_halt) of each vote
        self.votes: dict[str, dict[GridKey, dict[GridKey, list[float]]]] = {
            name: {_key(pair["input"]): {} for pair in task["test"]} for name, task in test_puzzles.items()
        }

    def update(
        self, input_ids: np.ndarray, puzzle_identifiers: np.ndarray, predictions: np.ndarray, q_halt_logits: np.ndarray
    ) -> int:
        """Add the votes of n rows and return the number of votes (rows with the blank identifier do not vote).

        Args:
            input_ids, predictions: Tokens [n, 900]. puzzle_identifiers, q_halt_logits: Arrays [n].

        Raises:
            ValueError: If an identifier is unknown, q is NaN, or an input is not a test input of its task.
        """
        kept = np.flatnonzero(puzzle_identifiers)
        if np.isnan(q_halt_logits[kept]).any():
            raise ValueError("q_halt_logits contains NaN, so answers cannot be ranked; check if training diverged")
        for i, q in zip(kept, sigmoid(q_halt_logits[kept])):
            identifier, known = int(puzzle_identifiers[i]), len(self.identifiers)
            if not 0 < identifier < known:
                raise ValueError(f"puzzle identifier {identifier}: must be in [0, {known - 1}] for this data set")
            name = self.identifiers[identifier]
            task = parse_identifier(name)[0]
            question = _key(undo_augmentation(crop_prediction(input_ids[i]), name))
            if question not in self.votes.get(task, {}):
                raise ValueError(
                    f"row {i}: its input is not a test input of task {task!r} with identifier {name!r}; use rows of "
                    f"the test split, with the identifiers and {TEST_PUZZLES_FILE} of the same data set"
                )
            answer = _key(undo_augmentation(crop_prediction(predictions[i]), name))
            self.votes[task][question].setdefault(answer, []).append(float(q))
        return len(kept)

    def replace_votes(self, parts: Sequence[dict[str, dict[GridKey, dict[GridKey, list[float]]]]]) -> None:
        """Replace the votes with those in `parts`, the `votes` of several `ArcVoting` objects for the same puzzles."""
        votes = {task: {question: {} for question in questions} for task, questions in self.votes.items()}
        for part in parts:
            for task, questions in part.items():
                for question, answers in questions.items():
                    for answer, confidences in answers.items():
                        votes[task][question].setdefault(answer, []).extend(confidences)
        self.votes = votes

    def candidates(self, task: str, test_index: int) -> list[RankedAnswer]:
        """Rank the answers to one test input by number of votes, then mean sigmoid(q_halt), then shape and colors."""
        tallies = self.votes[task][_key(self.test_puzzles[task]["test"][test_index]["input"])]
        # fsum is independent of the order of the votes, which depends on how they were divided among processes.
        found = [(len(qs), fsum(qs) / len(qs), answer) for answer, qs in tallies.items()]
        ranked = sorted(found, key=lambda one: (-one[0], -one[1], one[2]))
        grids = [np.frombuffer(cells, dtype=np.uint8).reshape(shape) for _, _, (shape, cells) in ranked]
        return [RankedAnswer(grid, count, mean_q) for grid, (count, mean_q, _) in zip(grids, ranked)]

    def result(self, ks: Sequence[int] = PASS_AT) -> dict[str, float]:
        """Return hrm/pass@k and trm/pass@k for tasks with solutions, and the number of tasks and test inputs.

        A test input without votes counts as wrong.

        Raises:
            ValueError: If no task has solutions.
        """
        solved = [name for name, task in self.test_puzzles.items() if all("output" in pair for pair in task["test"])]
        if not solved:
            raise ValueError("no task has solutions to score against; use tasks with test outputs")
        ranks = {name: self._ranks(name) for name in solved}
        scores = {}
        for k in ks:
            right = [task_ranks < k for task_ranks in ranks.values()]
            scores[f"hrm/pass@{k}"] = float(np.mean([hits.all() for hits in right]))
            scores[f"trm/pass@{k}"] = float(np.mean([hits.mean() for hits in right]))
        inputs = [votes for name in solved for votes in self.votes[name].values()]
        return {
            **scores,
            "tasks": len(solved),
            "test_inputs": sum(len(task_ranks) for task_ranks in ranks.values()),
            "test_inputs_without_votes": sum(not votes for votes in inputs),
        }

    def _ranks(self, task: str) -> np.ndarray:
        """Return the rank of the correct answer to each test input (0 is best, infinity if missing)."""
        ranks = []
        for i, pair in enumerate(self.test_puzzles[task]["test"]):
            right = _key(pair["output"])
            places = [n for n, found in enumerate(self.candidates(task, i)) if _key(found.grid) == right]
            ranks.append(places[0] if places else np.inf)
        return np.array(ranks)


def load_test_puzzles(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read `test_puzzles.json` from the folder of an ARC data set."""
    file = Path(path) / TEST_PUZZLES_FILE
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; build the data set with `hrm-hf data arc`, which writes it")
    validate_unchanged(Path(path) / INFO_FILE, [file])
    return load_json(file)


def _key(grid: Any) -> GridKey:
    array = np.asarray(grid, dtype=np.uint8)
    return array.shape, array.tobytes()


@dataclass(frozen=True)
class ArcView:
    """Augmentation `name` of a task, and the index of its row in the puzzle table."""

    name: str
    identifier: int

    def show(self, tokens: np.ndarray) -> np.ndarray:
        """Apply the augmentation to frames [..., 900]."""
        return self._map(tokens, apply_augmentation)

    def undo(self, tokens: np.ndarray) -> np.ndarray:
        """Crop each frame [..., 900] to its grid and undo the augmentation."""
        return self._map(tokens, undo_augmentation)

    def _map(self, tokens: np.ndarray, change) -> np.ndarray:
        frames = [encode_grid(change(crop_prediction(row), self.name)) for row in tokens.reshape(-1, SEQ_LEN)]
        return np.array(frames, dtype=np.int64).reshape(tokens.shape)


class ArcTaskSolving(PuzzleTask):
    """Task "arc": puzzles are dicts `{"train": [...], "test": [...], "name": ...}` or paths to JSON files."""

    name = "arc"
    title, plural = "ARC", "ARC-AGI tasks"
    reports_valid = False  # any grid is valid, so the fraction of valid answers says little
    named_puzzles = True
    original_board = (SEQ_LEN, VOCAB_SIZE, None)
    palette = COLORS
    praise = "a valid grid"
    input_hint = (
        'A task as JSON: {"name": ..., "train": [{"input", "output"}, ...], "test": [{"input"}, ...]}. '
        "Tasks that the model was not trained on have no row in its puzzle table; expect wrong answers."
    )

    def __init__(self, config, identifiers: Sequence[str] | None = None):
        super().__init__(config, identifiers)
        self.grid_shape = (FRAME, FRAME)
        if config.seq_len != SEQ_LEN or config.vocab_size < VOCAB_SIZE:
            raise ValueError(
                f"seq_len={config.seq_len}, vocab_size={config.vocab_size}: task='arc' needs seq_len={SEQ_LEN}, "
                f"vocab_size={VOCAB_SIZE}; correct the config"
            )
        if identifiers is not None and config.puzzle_emb_ndim and len(identifiers) != config.num_puzzle_identifiers:
            raise ValueError(
                f"{IDENTIFIERS_FILE} has {len(identifiers)} names, but the model's puzzle table has "
                f"{config.num_puzzle_identifiers} rows; use the file of the data set that the model was trained on"
            )

    def is_single(self, item: Any) -> bool:
        return not isinstance(item, (list, tuple))

    def read(self, item: Any) -> Puzzle:
        name = "task"
        if isinstance(item, (str, Path)):
            name, item = Path(item).stem, load_json(item)
        if not isinstance(item, dict):
            raise ValueError(f'puzzle={item!r:.60}: must be a dict {{"train": [...], "test": [...]}} or a file')
        name = item.get("name", name)
        task = parse_task(item, name)
        tests = encode_task(task)["test"]
        known = [None if (row == IGNORE_LABEL).all() else row for row in tests["labels"]]
        solutions = [None if row is None else np.where(row == IGNORE_LABEL, PAD_ID, row) for row in known]
        return Puzzle(tests["input_ids"], solutions, name=name, source=task)

    def puzzles_of_json(self, content: Any) -> list[Any]:
        if isinstance(content, dict) and "test" not in content:
            return [{"name": name, **arc_task} for name, arc_task in content.items()]
        return super().puzzles_of_json(content)

    def named_by_file(self, content: Any) -> bool:
        return isinstance(content, dict) and "test" in content

    def read_typed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the task is not valid JSON: {error.msg} at line {error.lineno}") from error
        except RecursionError as error:
            raise ValueError("the task is not an ARC task: its lists are nested too deeply") from error

    def card(self) -> dict[str, str]:
        known = parse_identifier(self.identifiers[1])[0] if len(self.identifiers or ()) > 1 else "task"
        train, test = '[{"input": [[1, 2]], "output": [[2, 1]]}]', '[{"input": [[4, 5]]}]'
        example = f'{{"train": {train}, "test": {test}, "name": {json.dumps(known)}}}'
        ids = "token for token in [6, 7, 1] + [0] * 27 + [1, 1, 1] + [0] * 867"
        return {"example": example, "ids": ids, "meaning": "0 outside, 1 the border of the grid, c + 2 the color c"}

    def example(self, level: int, seed: int) -> str:
        return json.dumps(EXAMPLE)

    def label(self, token: int) -> str:
        return ""

    def window(self, states: np.ndarray) -> tuple[int, int]:
        """Return the rows and columns that at least one state uses. Pictures show only these."""
        used = ((states != PAD_ID) & (states != EOS_ID) & (states < COLOR_OFFSET + NUM_COLORS)).any(axis=0)
        if not used.any():
            return self.grid_shape
        used = used.reshape(self.grid_shape)
        return tuple(int(np.flatnonzero(used.any(axis=axis))[-1]) + 1 for axis in (1, 0))

    def grid(self, tokens: np.ndarray) -> list[list]:
        return crop_prediction(tokens).tolist()

    def text(self, tokens: np.ndarray) -> str:
        return "\n".join("".join(map(str, row)) for row in self.grid(tokens))

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        return [] if self.grid(answer) else ["the answer is not a grid: its top left cell has no color"]

    def voting(self, data: str, names: Sequence[str]) -> ArcVoting | None:
        return ArcVoting(load_test_puzzles(data), names) if Path(data, TEST_PUZZLES_FILE).exists() else None

    def symmetry_keys(self) -> int:
        if self.config.puzzle_emb_ndim:
            raise ValueError(
                "augment=true: a model with a puzzle table needs an identifier for each augmented ARC task; build the "
                "data with hrm-hf data arc --num-aug N and use --augment false, or set puzzle_emb_ndim=0"
            )
        return NUM_COLORS

    def symmetric_copies(self, grids: Grids, keys: np.ndarray) -> Grids:
        colors = np.concatenate([np.zeros((len(keys), 1), dtype=int), keys[:, 1:].argsort(axis=1) + 1], axis=1)
        transforms = (keys[:, 0] % np.uint64(NUM_DIHEDRAL)).astype(int)
        pairs = [_symmetric_pair(*row) for row in zip(*grids, transforms.tolist(), colors)]
        return tuple(np.stack(part).astype(np.int32) for part in zip(*pairs))

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[ArcView]:
        known = task_identifiers(puzzle.name, self.identifiers or [])
        if known:
            views = [ArcView(name, identifier) for identifier, name in list(known.items())[:votes]]
            if len(views) < votes:
                text = "votes=%d, but the puzzle table has only %d augmentations of task %s"
                logger.warning(text, votes, len(views), puzzle.name)
            return views
        if self.config.puzzle_emb_ndim and self.config.num_puzzle_identifiers > 1:
            text = "task %r has no row in the puzzle table (see %s); train on it, or expect a wrong answer"
            logger.warning(text, puzzle.name, IDENTIFIERS_FILE)
        variants = augmentations(puzzle.source, votes - 1, int(rng.integers(2**31)))
        return [ArcView(name, 0) for name, _ in variants]

    def rank(self, puzzle: Puzzle, question: int, candidates: list[Candidate]) -> list[Ballot]:
        """Rank answers as `ArcVoting` does: by number of votes, then by mean confidence."""
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
        """Return the answer to the first test input, and list all answers in "tests" if there are several."""
        tests = [self._answer(puzzle, i, found, prefer_valid) for i, found in enumerate(candidates)]
        return {**tests[0], "tests": tests} if len(tests) > 1 else tests[0]

    def _extend(self, result: dict[str, Any], ranked: list[Ballot], solution: np.ndarray | None) -> dict[str, Any]:
        attempts = [ballot.best.tokens for ballot in ranked[:ATTEMPTS]]
        result["attempts"] = [self.grid(tokens) for tokens in attempts]
        if solution is not None:
            result["correct"] = any((tokens == solution).all() for tokens in attempts)
        return result


def _symmetric_pair(inputs: np.ndarray, labels: np.ndarray, transform: int, colors: np.ndarray) -> Grids:
    """Transform and recolor two grids (tokens [900]), and move them only if they would not fit at their offset."""
    found = [_arc_grid(tokens) for tokens in (inputs, labels)]
    views = [None if grid is None else dihedral(colors[grid], transform) for grid, _ in found]
    sides = np.max([view.shape for view in views if view is not None], axis=0)
    top, left = (min(place, FRAME - side) for place, side in zip(found[0][1], sides.tolist()))
    return encode_pair(views[0], views[1], (top, left))


def _arc_grid(tokens: np.ndarray) -> tuple[np.ndarray | None, tuple[int, int]]:
    """Return the colors (None if there is no grid) and the top left corner of the grid in a frame."""
    frame = tokens.reshape(FRAME, FRAME)
    rows, columns = np.nonzero(frame >= COLOR_OFFSET)
    if not len(rows):
        return None, (0, 0)
    top, left = int(rows.min()), int(columns.min())
    return frame[top : rows.max() + 1, left : columns.max() + 1] - COLOR_OFFSET, (top, left)
