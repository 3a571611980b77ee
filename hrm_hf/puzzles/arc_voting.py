"""ARC scores by voting over augmentations, as HRM and TRM report them.

    votes = ArcVoting(load_test_puzzles("data/arc1"), load_puzzle_info("data/arc1").identifiers)
    votes.update(input_ids, puzzle_identifiers, predictions, q_halt_logits)   # per batch, epoch or checkpoint
    votes.result()["trm/pass@2"]

Every row of the test split predicts an augmented answer. Undone, equal answers to one question are votes for it; they
are ranked by number of votes, then by mean sigmoid(q_halt). Votes accumulate over all calls of `update`, so several
evaluations or checkpoints vote together; start a new object for a score of one. Arrays are numpy; votes of several
processes are put together by `replace_votes`.

Two scores go by the same name in the literature: "hrm" counts a task if all its test inputs are right, "trm" (and
Kaggle) gives each task the fraction of its test inputs that are right.
"""

import json
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .arc import TEST_PUZZLES_FILE
from .arc_grids import crop_prediction, parse_identifier, undo_augmentation


PASS_AT = (1, 2, 5, 10, 100, 1000)
ATTEMPTS = 2

GridKey = tuple[tuple[int, ...], bytes]


class Candidate(NamedTuple):
    """An answer that got votes: colors uint8 [rows, columns], number of votes, mean sigmoid(q_halt)."""

    grid: np.ndarray
    votes: int
    mean_q: float


class ArcVoting:
    """Collects predictions on the test split of an ARC data set and scores them."""

    def __init__(self, test_puzzles: dict[str, dict[str, Any]], identifiers: Sequence[str]):
        """`test_puzzles`: `{task name: {"train": ..., "test": [{"input", "output"}, ...]}}`; an "output" may be
        missing (Kaggle's hidden test). `identifiers`: names of the puzzle identifiers, position 0 is blank."""
        self.test_puzzles = test_puzzles
        self.identifiers = identifiers
        # votes[task][question][answer] = sigmoid(q_halt) of each vote
        self.votes: dict[str, dict[GridKey, dict[GridKey, list[float]]]] = {
            name: {_key(pair["input"]): {} for pair in task["test"]} for name, task in test_puzzles.items()
        }

    def update(
        self, input_ids: np.ndarray, puzzle_identifiers: np.ndarray, predictions: np.ndarray, q_halt_logits: np.ndarray
    ) -> int:
        """Adds the votes of n rows; rows with the blank identifier (batch padding) have none.

        Args:
            input_ids: tokens [n, 900] of the test split.
            puzzle_identifiers: [n].
            predictions: predicted tokens [n, 900].
            q_halt_logits: [n], before the sigmoid.

        Returns:
            The number of votes added.

        Raises:
            ValueError: an identifier is unknown, q is NaN, or an input is no test input of its task.
        """
        kept = np.flatnonzero(puzzle_identifiers)
        if np.isnan(q_halt_logits[kept]).any():
            raise ValueError("q_halt_logits holds NaN, which cannot rank answers; has the model diverged?")
        confidence = np.exp(-np.logaddexp(0.0, -q_halt_logits[kept].astype(np.float64)))  # sigmoid without overflow
        for i, q in zip(kept, confidence):
            identifier, known = int(puzzle_identifiers[i]), len(self.identifiers)
            if not 0 < identifier < known:
                raise ValueError(f"puzzle identifier {identifier} is unknown; this data set has 1 to {known - 1}")
            name = self.identifiers[identifier]
            task = parse_identifier(name)[0]
            question = _key(undo_augmentation(crop_prediction(input_ids[i]), name))
            if question not in self.votes.get(task, {}):
                raise ValueError(
                    f"row {i}: its input is no test input of task {task!r} under identifier {name!r}; expected rows "
                    f"of the test split, and identifiers and {TEST_PUZZLES_FILE} of the same data set"
                )
            answer = _key(undo_augmentation(crop_prediction(predictions[i]), name))
            self.votes[task][question].setdefault(answer, []).append(float(q))
        return len(kept)

    def replace_votes(self, parts: Sequence[dict[str, dict[GridKey, dict[GridKey, list[float]]]]]) -> None:
        """Takes all votes of `parts`, the `votes` of several objects for the same puzzles, in place of its own."""
        votes = {task: {question: {} for question in questions} for task, questions in self.votes.items()}
        for part in parts:
            for task, questions in part.items():
                for question, answers in questions.items():
                    for answer, confidences in answers.items():
                        votes[task][question].setdefault(answer, []).extend(confidences)
        self.votes = votes

    def candidates(self, task: str, test_index: int) -> list[Candidate]:
        """Answers to one test input, best first: more votes, then higher mean q, then a fixed order of the grids."""
        tallies = self.votes[task][_key(self.test_puzzles[task]["test"][test_index]["input"])]
        # fsum does not depend on the order of votes, and so not on who has counted which.
        found = [(len(qs), fsum(qs) / len(qs), answer) for answer, qs in tallies.items()]
        ranked = sorted(found, key=lambda one: (-one[0], -one[1], one[2]))
        return [Candidate(_grid(answer), count, mean_q) for count, mean_q, answer in ranked]

    def result(self, ks: Sequence[int] = PASS_AT) -> dict[str, float]:
        """`{"hrm/pass@1", "trm/pass@1", ..., "tasks", "test_inputs", "test_inputs_without_votes"}`.

        Scores are fractions of the tasks that have solutions. A test input that got no votes is wrong.

        Raises:
            ValueError: no task has solutions.
        """
        solved = [name for name, task in self.test_puzzles.items() if all("output" in pair for pair in task["test"])]
        if not solved:
            raise ValueError("no task has solutions to score against")
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
        """Place of the right answer among the candidates of each test input (0 is best, infinity if absent)."""
        ranks = []
        for i, pair in enumerate(self.test_puzzles[task]["test"]):
            right = _key(pair["output"])
            places = [n for n, found in enumerate(self.candidates(task, i)) if _key(found.grid) == right]
            ranks.append(places[0] if places else np.inf)
        return np.array(ranks)


def load_test_puzzles(path: str | Path) -> dict[str, dict[str, Any]]:
    """Reads `test_puzzles.json` of an ARC data set folder."""
    file = Path(path) / TEST_PUZZLES_FILE
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; `hrm-hf data arc` writes it beside the data set")
    return json.loads(file.read_text())


def _key(grid: Any) -> GridKey:
    """Returns the key of a grid: its shape and cells."""
    array = np.asarray(grid, dtype=np.uint8)
    return array.shape, array.tobytes()


def _grid(key: GridKey) -> np.ndarray:
    return np.frombuffer(key[1], dtype=np.uint8).reshape(key[0])
