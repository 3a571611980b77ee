"""Pipeline "puzzle-solving", which solves puzzles and validates answers, with test-time scaling.

    solve = pipeline("puzzle-solving")  # uses the shipped 9x9 Sudoku solver; or model="org/hrm-sudoku"
    solve("53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79")["text"]

Three options spend more compute on a puzzle at inference time:

- `max_steps` allows more ACT steps than in training.
- `votes` solves several symmetric views of the puzzle, maps the answers back, and lets them vote.
- `restarts` repeats the run with noise on the latent states; `choose` selects the best run (of each view).

`search`, for Sudoku, is different: its answer is not the model's own. `until_valid` tries one after the other.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from ..io.files import decode_marked, json_object, load_json, numbered_lines, read_lines
from ..models.pipeline_batches import OwnBatchesMixin, seeded
from ..registry import AutoModelForPuzzleSolving
from .candidates import Candidate, Puzzle
from .dataset import load_identifiers
from .options import SolveOptions, is_file_name, shipped_model
from .readers import csv_dicts
from .task_registry import puzzle_task, task_class
from .tasks import QUESTION_NAMES, PuzzleTask


FILE_KINDS = ".csv or .jsonl with a puzzle column, .json, or text with boards (optionally with .gz)"
NOISE_STREAM = 1  # makes the noise independent of the views, which use the same seed


class PuzzleSolvingPipeline(OwnBatchesMixin, Pipeline):
    """Pipeline that solves puzzles with any model that `AutoModelForPuzzleSolving` can load.

    `model.config` determines the task, board and vocabulary. A puzzle is given as

    - Sudoku: a string of 16, 36, 81, 144, 256 or 625 cells (`.` or `0` for a blank, A for 10), rows of digits, or a
      flat list; if no weight depends on the size (`config.solves_any_size`), of any of these sizes;
    - maze: a string (one or several lines), a list of lines, or tokens;
    - ARC: a dict `{"train": [...], "test": [...], "name": "007bbfb7"}`, or the path of its JSON file;
    - generic: token ids;
    - a dict `{"puzzle": ..., "solution": ...}` of these (or "question" and "answer"); the result then tells whether
      the answer is "correct".

    A list of puzzles gives a list of results. So does the path of a file: .csv or .jsonl with these columns, .json
    with a list, a dict or `{name: ARC task}`, or text with boards (optionally with .gz).

    Args:
        identifiers: Names of the puzzle table's rows, as a list or the path of `identifiers.json`; by default the file
            next to the checkpoint. Only ARC needs them.

    The constructor and every call also accept the fields of `SolveOptions` (max_steps, votes, restarts, ...) and
        return_trajectory (`bool`, False): Adds "trajectory", the tokens [steps, S] after each ACT step of the winning
            candidate, for `hrm_hf.puzzles.plots`, and "confidences" [steps].
        batch_size (`int`): Puzzles per batch; their votes and restarts share the calls of `model.solve`.

    Returns a dict for each puzzle:
        grid: Rows of the answer (digits, 0 for a blank; characters; colors; tokens). text: The same as a string.
        steps: ACT steps of the winning candidate. confidence: Mean sigmoid(q_halt) of the votes for it.
        sure: Whether the model is sure of it: a sure view (see `PuzzleSolution`) and most of the votes, and no rule is
            violated. None if the model has no calibrated `config.sure_confidence`.
        valid: Whether the answer obeys the rules (ARC: is a grid); None for task "generic", which has no rules.
        violations: Violated rules, as a list of sentences: changed clues, repeated digits, a disconnected path.
        votes: {"agree": votes for the answer, "of": all votes, "answers": number of different answers}.
        attempts: For ARC, the two best grids. tests: For ARC tasks with several test inputs, a dict for each input.
        correct: Whether the answer is correct, if a solution was given (ARC: whether one of the attempts is).
        search: With `search`, {"solved", "complete", "nodes", "nodes_without_model"}: the number of boards visited,
            and by the same search with digits in ascending order. Steps, confidence and sure refer to the model's
            answer.
        found_by: With `until_valid`, what found the valid answer: "model", "restarts", "search" or None.
    """

    def __init__(self, model, *args: Any, identifiers: list[str] | str | Path | None = None, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        if isinstance(identifiers, (str, Path)):
            identifiers = load_json(identifiers)
        if identifiers is None and task_class(model.config.task).named_puzzles:
            identifiers = load_identifiers(model.name_or_path)
        self.puzzle_task = puzzle_task(model.config, identifiers)
        self._fitted = {model.config.seq_len: (model, self.puzzle_task)}

    def fitted(self, seq_len: int) -> tuple[Any, PuzzleTask]:
        """Return the model and the task for boards with `seq_len` cells. Models of all sizes share their weights."""
        if seq_len not in self._fitted:
            model = self.model.for_board(**self.puzzle_task.board_fields(seq_len))
            self._fitted[seq_len] = model, puzzle_task(model.config)
        return self._fitted[seq_len]

    def _sanitize_parameters(self, return_trajectory: bool | None = None, **options: Any) -> tuple[dict, dict, dict]:
        options = {name: value for name, value in options.items() if value is not None}
        SolveOptions.of(options, "the pipeline puzzle-solving", "return_trajectory", "batch_size", "identifiers")
        views = {name: options[name] for name in ("votes", "seed") if name in options}
        return views, options if return_trajectory is None else {**options, "return_trajectory": return_trajectory}, {}

    def __call__(self, inputs: Any, **kwargs: Any) -> dict[str, Any] | list[dict[str, Any]] | Iterator:
        """Solve one puzzle, or a list, file, generator or `Dataset` of puzzles. Takes the parameters of the class."""
        if isinstance(inputs, (np.ndarray, torch.Tensor)):
            inputs = inputs.tolist()
        if isinstance(inputs, (str, Path)) and (rows := read_puzzle_file(inputs, self.puzzle_task)) is not None:
            inputs = rows
        if isinstance(inputs, (list, tuple)):
            if self.puzzle_task.is_single(inputs) and len(inputs):
                return super().__call__(self.read_puzzle(inputs), **kwargs)
            if not inputs:
                return []
            inputs = [self.read_puzzle(item, f"puzzle {i}: ") for i, item in enumerate(inputs)]
        return super().__call__(inputs, **kwargs)

    def read_puzzle(self, item: Any, place: str = "") -> Puzzle:
        """Read a puzzle in any form that the class accepts, or return a `Puzzle` as is. Errors name `place`."""
        if isinstance(item, Puzzle):
            return item
        try:
            return self.puzzle_task.read(item.tolist() if isinstance(item, (np.ndarray, torch.Tensor)) else item)
        except ValueError as error:
            raise ValueError(f"{place}{error}") from error

    def preprocess(self, input_: Any, votes: int = 1, seed: int = 0) -> dict[str, Any]:
        """Read a puzzle, and return it with `votes` views and their model inputs.

        "input_ids" is int64 [views * Q, S] for a puzzle with Q questions. "puzzle_identifiers" has one id per row.
        """
        puzzle = self.read_puzzle(input_)
        views = self.fitted(puzzle.questions.shape[1])[1].views(puzzle, votes, np.random.default_rng(seed))
        shown = np.concatenate([view.show(puzzle.questions) for view in views])
        identifiers = np.repeat([view.identifier for view in views], len(puzzle.questions))
        return {"puzzle": puzzle, "views": views, "input_ids": shown, "puzzle_identifiers": identifiers}

    def _run(self, batch: list[dict], forward_params: dict, postprocess_params: dict) -> Iterator[dict[str, Any]]:
        params = dict(forward_params)
        with_trajectory = params.pop("return_trajectory", False)
        options = SolveOptions(**params)
        if not options.until_valid:
            yield from self._attempt(batch, options, with_trajectory)
            return
        left, results = list(range(len(batch))), {}
        for name, attempt in options.attempts(self.puzzle_task).items():
            if attempt is None:  # the model has answered already; better guesses would not pay for another run
                found = [results[index] | self._search(batch[index]["puzzle"]) for index in left]
            else:
                found = self._attempt([batch[index] for index in left], attempt, with_trajectory)
            results |= {
                index: {**result, "found_by": name if result["valid"] else None} for index, result in zip(left, found)
            }
            left = [index for index in left if not results[index]["valid"]]
            if not left:
                break
        yield from (results[index] for index in range(len(batch)))

    def _attempt(self, batch: list[dict], options: SolveOptions, with_trajectory: bool) -> list[dict[str, Any]]:
        """Solve each puzzle of a batch, and return the results."""
        if options.search:
            self.puzzle_task.validate_searchable()
        by_size: dict[int, list[dict]] = {}
        for item in batch:
            by_size.setdefault(item["input_ids"].shape[1], []).append(item)
        for seq_len, items in by_size.items():
            arguments = options.solve_arguments(self.fitted(seq_len)[1], options.prefer_valid)
            arguments |= {"return_trajectory": with_trajectory, "with_probabilities": options.search}
            names = ("input_ids", "puzzle_identifiers")
            rows = {name: torch.from_numpy(np.concatenate([item[name] for item in items])) for name in names}
            with seeded(self.device, options.seed, NOISE_STREAM):
                solved = iter(self._solve_rows(rows, arguments))
            for item in items:
                item["candidates"] = list(itertools.islice(solved, len(item["input_ids"])))
        return [self.postprocess(item, options.prefer_valid, options.search) for item in batch]

    def _solve_rows(self, rows: dict[str, torch.Tensor], arguments: dict[str, Any]) -> list[Candidate]:
        """Solve the views in chunks that run fast and fit into memory. Return a candidate for each view."""
        count = self.fitted(rows["input_ids"].shape[1])[0].boards_per_call
        candidates: list[Candidate] = []
        for start in range(0, len(rows["input_ids"]), count):
            piece = {name: values[start : start + count] for name, values in rows.items()}
            found = {name: value.numpy() for name, value in self.forward(piece, **arguments).items()}
            for row, steps in enumerate(found["steps"].tolist()):
                candidate = Candidate(found["predictions"][row], steps, float(found["q_halt"][row]))
                if "trajectory" in found:
                    candidate.trajectory = found["trajectory"][:steps, row]
                    candidate.q_trajectory = found["q_trajectory"][:steps, row]
                if "sure" in found:
                    candidate.sure = bool(found["sure"][row])
                if "probabilities" in found:
                    candidate.probabilities = found["probabilities"][row]
                candidates.append(candidate)
        return candidates

    def _forward(
        self, input_tensors: dict[str, torch.Tensor], with_probabilities: bool = False, **forward_params: Any
    ) -> dict[str, torch.Tensor]:
        solver, _ = self.fitted(input_tensors["input_ids"].shape[1])
        solution = solver.solve(**input_tensors, **forward_params)
        output = {"predictions": solution.predictions, "steps": solution.steps, "q_halt": solution.q_halt.float()}
        if solution.trajectory is not None:
            output |= {"trajectory": solution.trajectory, "q_trajectory": solution.q_trajectory.float()}
        if solution.sure is not None:
            output["sure"] = solution.sure
        if with_probabilities:
            output["probabilities"] = solution.logits.float().softmax(-1)
        return output

    def postprocess(
        self, model_outputs: dict[str, Any], prefer_valid: bool = False, search: bool = False
    ) -> dict[str, Any]:
        """Map the answers back to the original puzzle and count votes.

        With `search`, also run a search that tries the most probable tokens first. Its solution replaces the answer.
        """
        puzzle, views = model_outputs["puzzle"], model_outputs["views"]
        task = self.fitted(puzzle.questions.shape[1])[1]
        num_questions = len(puzzle.questions)
        chosen: list[list[Candidate]] = [[] for _ in range(num_questions)]
        for row, candidate in enumerate(model_outputs["candidates"]):
            view = views[row // num_questions]
            candidate.tokens = view.undo(candidate.tokens)
            if candidate.trajectory is not None:
                candidate.trajectory = view.undo(candidate.trajectory)
            if candidate.probabilities is not None:
                candidate.probabilities = view.undo_scores(candidate.probabilities)
            chosen[row % num_questions].append(candidate)
        result = task.result(puzzle, chosen, prefer_valid)
        if search:
            result |= self._search(puzzle, np.mean([candidate.probabilities for candidate in chosen[0]], axis=0))
        return result

    def _search(self, puzzle: Puzzle, scores: np.ndarray | None = None) -> dict[str, Any]:
        """Search, in the order of the probabilities [S, V] if given. Return the entries to update in the result."""
        question, solution = puzzle.questions[0], puzzle.solutions[0]
        task = self.fitted(len(question))[1]
        plain = task.search(question)
        found = plain if scores is None else task.search(question, scores)
        report = {
            "solved": found.tokens is not None,
            "complete": found.complete,
            "nodes": found.nodes,
            "nodes_without_model": plain.nodes,
        }
        if found.tokens is None:  # no solution found, so the caller keeps the model's answer
            return {"search": report}
        answer = {"grid": task.grid(found.tokens), "text": task.text(found.tokens), "valid": True, "violations": []}
        if solution is not None:
            answer["correct"] = bool((found.tokens == solution).all())
        return {**answer, "search": report}


def read_puzzle_file(path: str | Path, task: PuzzleTask | None = None) -> list[Any] | None:
    """Read the puzzles in a file, or return None if `path` is a puzzle or a file with a single ARC task.

    Raises:
        FileNotFoundError: If `path` is named like a file, but there is no such file.
        ValueError: If the file has no puzzle column or no rows, or is not text.
    """
    if isinstance(path, str) and not is_file_name(path):
        return None
    path = Path(path).expanduser()
    if not path.is_file():
        known = f"a puzzle, or a file of puzzles: {FILE_KINDS}"
        raise FileNotFoundError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; expected {known}")
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    if kind == ".csv":
        rows: list[Any] = [row for _, row in csv_dicts(path)]
    elif kind == ".jsonl":
        rows = [json_object(line, place) for place, line in numbered_lines(path)]
    elif kind == ".json":
        content = load_json(path)
        if task.named_by_file(content):
            return None
        rows = task.puzzles_of_json(content)
    else:
        rows = puzzles_of_text(b"".join(line for _, line in read_lines(path)), task, str(path))
    if not rows:
        raise ValueError(f"{path} has no rows; expected at least one puzzle")
    if kind in (".csv", ".jsonl") and not set(QUESTION_NAMES) & set(rows[0]):
        raise ValueError(f"{path} has the columns {list(rows[0])}; expected one of {list(QUESTION_NAMES)}")
    return rows


def puzzles_of_text(content: bytes, task: PuzzleTask, place: str) -> list[Any]:
    """Split a text into puzzles: JSON (one puzzle, a list, or one per line), or boards written as text.

    The text is UTF-8, or UTF-16 with a byte-order mark, which Windows programs write. Errors start with `place`.
    """
    text = decode_marked(content, place).strip("\r\n")
    if not re.match(r"\s*(\{|\[\s*[\[{\"\d\]])", text):
        return task.split(text)
    try:
        return task.puzzles_of_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        if '"' not in text:  # not JSON, but an array as printed by numpy, Python or C
            return task.split(text)
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith("{") for line in lines):
            return [json_object(line.encode(), f"{place}, line {i}") for i, line in enumerate(lines, 1)]
        raise ValueError(f"{place} is not valid JSON: {error}") from error


PIPELINE_REGISTRY.register_pipeline(
    "puzzle-solving",
    PuzzleSolvingPipeline,
    pt_model=(AutoModelForPuzzleSolving,),
    default={"model": (shipped_model("sudoku"), "main")},
    type="text",
)
