"""`pipeline("puzzle-solving", model=...)`: puzzles in, checked answers out, with test-time scaling.

    solve = pipeline("puzzle-solving")  # a trained 9x9 Sudoku solver comes with the package; or model="org/hrm-sudoku"
    solve("53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79")["text"]

Three ways to spend more compute on a puzzle, all of them inference only:

- `max_steps` beyond the number of ACT steps in training;
- `votes`: the puzzle is shown in several symmetric views, and the answers, brought back, vote;
- `restarts`: runs with noise on the latent states, of which `choose` takes the best (for each view, if both).

And one that is no longer the model's own answer: `search`, for Sudoku (`search.py`).

What a puzzle looks like, its rules and its symmetries are in `tasks.py` and `arc_pipeline.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Pipeline
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import cached_file

from ..io.bounded_files import MAX_TABLE_LINE_BYTES, bounded_lines, csv_rows, load_json, validate_table_line
from ..io.sources import parse_json, shorten
from ..models.pipeline_batches import OwnBatchesMixin, seeded
from ..registry import AutoModelForPuzzleSolving
from .arc_pipeline import puzzle_task
from .breadth import boards_per_call, choice_of_answers
from .dataset import IDENTIFIERS_FILE
from .search import searched_answer, validate_searchable
from .shipped import shipped_model
from .tasks import QUESTION_NAMES, Candidate, Puzzle


TABLE_KINDS = (".csv", ".jsonl", ".csv.gz", ".jsonl.gz")
NOISE_STREAM = 1  # keeps the noise independent of the views that the same seed draws


class PuzzleSolvingPipeline(OwnBatchesMixin, Pipeline):
    """Solves puzzles with any model that `AutoModelForPuzzleSolving` loads.

    The task, board and vocabulary are those of `model.config`. A puzzle is

    - Sudoku: a string of 16, 36 or 81 cells (`.` or `0` blank), rows of digits, or a flat list;
    - maze: a string (lines, or all cells in one), a list of lines, or tokens;
    - ARC: a dict `{"train": [...], "test": [...], "name": "007bbfb7"}`, or the path of its JSON file;
    - generic: token ids;
    - a dict `{"puzzle": ..., "solution": ...}` of these (also "question" and "answer"); the result says then if the
      answer is "correct".

    A list of puzzles gives a list of results; so does the path of a .csv or .jsonl file with such columns (or .gz),
    or of a JSON file `{name: ARC task}`.

    Args:
        identifiers: names of the rows of the puzzle table, a list or the path of `identifiers.json`; found beside the
            checkpoint if None. Only ARC needs them.

    Parameters of the constructor and of every call:
        max_steps (`int`): most ACT steps, by default `config.halt_max_steps`; more is allowed.
        min_steps (`int`, 1): fewest ACT steps before a puzzle may stop.
        min_confidence (`float`, 0): least sigmoid(q_halt) at which a puzzle may stop.
        halt (`str`, "q"): "q" stops when the model prefers to, "fixed" always uses `max_steps`.
        votes (`int`, 1): views of each puzzle. Sudoku: the puzzle and random permutations of digits, rows, columns,
            bands and stacks; mazes: up to the 8 symmetries of the square; ARC: the task's own augmentations (those in
            `identifiers.json`, so with a puzzle row of their own). Votes are weighted by sigmoid(q_halt); ARC answers
            are ranked by number of votes first, as its scores are.
        restarts (`int`, 1): runs of each view. The first is undisturbed, the others have noise.
        noise (`float`, 0.2; 0 for a model that draws random numbers itself): std of that noise. Which noise a puzzle
            gets depends on its neighbours in the batch.
        noise_at (`str`, "start"): "start" adds it to the initial latent states, "every_step" before every ACT step.
        choose (`str`, "q"): which of the runs of a view stands: "q", that of the highest q_halt; "residual", that
            whose last steps moved the state least; "vote", the answer of most runs; "rules", the first that obeys the
            rules, at the first step that it does (this *uses the rules*, as `prefer_valid`; Sudoku and mazes, while
            other tasks fall back to "q").
        exit_when_still (`float`): a run also stops when its last three steps moved the state by less than this share
            of its norm; 1e-3, for example. For `max_steps` far beyond training.
        prefer_valid (`bool`, False): among several candidates, one that obeys the rules wins whatever its votes. This
            *uses the rules* of the task, which the model was not told: say so where you report results.
        search (`bool`, False): Sudoku only. The answer is found by a search with backtracking, whose guesses the
            model orders; it is right whenever there is one, and *not the model's answer*.
        return_trajectory (`bool`, False): adds "trajectory", the tokens [steps, S] after each ACT step of the winning
            candidate, for `hrm_hf.puzzles.plots`, and "confidences" [steps].
        seed (`int`, 0): of views and noise.
        batch_size (`int`): puzzles at a time; their votes and restarts go into the same calls of `model.solve`.

    Returns, per puzzle, a dict:
        grid: rows of the answer (digits, 0 for a blank; characters; colors; tokens). text: the same as a string.
        steps: ACT steps of the winning candidate. confidence: mean sigmoid(q_halt) of the votes for it.
        valid: whether the answer obeys the rules (ARC: is a grid); None for task "generic", which has none.
        violations: what is wrong with it, a list of sentences: a clue changed, a digit twice, a path not connected.
        votes: {"agree": votes for the answer, "of": all votes, "answers": different answers}.
        attempts: ARC only, the two best grids. tests: ARC tasks with several test inputs, a dict for each of them.
        correct: if a solution was given (ARC: whether one of the attempts is right).
        search: with `search`, {"solved", "complete", "nodes", "nodes_without_model"}: boards that were looked at, and
            those of the same search with the digits ascending. Steps and confidence are those of the model's answer.
    """

    def __init__(self, model, *args: Any, identifiers: list[str] | str | Path | None = None, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        if isinstance(identifiers, (str, Path)):
            identifiers = load_json(identifiers)
        if identifiers is None and model.config.task == "arc":
            identifiers = load_identifiers(model)
        self.puzzle_task = puzzle_task(model.config, identifiers)

    def _sanitize_parameters(
        self,
        max_steps: int | None = None,
        min_steps: int | None = None,
        min_confidence: float | None = None,
        halt: str | None = None,
        votes: int | None = None,
        restarts: int | None = None,
        noise: float | None = None,
        noise_at: str | None = None,
        choose: str | None = None,
        exit_when_still: float | None = None,
        prefer_valid: bool | None = None,
        search: bool | None = None,
        return_trajectory: bool | None = None,
        seed: int | None = None,
    ) -> tuple[dict, dict, dict]:
        preprocess = {"votes": votes, "seed": seed}
        forward = {
            "max_steps": max_steps,
            "min_steps": min_steps,
            "min_confidence": min_confidence,
            "halt": halt,
            "return_trajectory": return_trajectory,
            "restarts": restarts,
            "noise": noise,
            "noise_at": noise_at,
            "choose": choose,
            "exit_when_still": exit_when_still,
            "seed": seed,
        }
        postprocess = {"prefer_valid": prefer_valid, "search": search}
        for name, value in (("votes", votes), ("restarts", restarts)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; expected at least 1")
        parts = (preprocess, forward, postprocess)
        return tuple({name: value for name, value in part.items() if value is not None} for part in parts)

    def __call__(self, inputs: Any, **kwargs: Any) -> dict[str, Any] | list[dict[str, Any]] | Iterator:
        """Solves one puzzle, or a list, file, generator or `Dataset` of them; see the class for all parameters."""
        if isinstance(inputs, (np.ndarray, torch.Tensor)):
            inputs = inputs.tolist()
        if isinstance(inputs, (str, Path)) and (rows := read_puzzle_file(inputs)) is not None:
            inputs = rows
        if isinstance(inputs, (list, tuple)):
            if self.puzzle_task.is_single(inputs) and len(inputs):
                return super().__call__(self.read_puzzle(inputs), **kwargs)
            if not inputs:
                return []
            inputs = [self.read_puzzle(item, f"puzzle {i}: ") for i, item in enumerate(inputs)]
        return super().__call__(inputs, **kwargs)

    def read_puzzle(self, item: Any, place: str = "") -> Puzzle:
        """Reads one puzzle in any form listed above; pipelines take the result too. `place` goes into errors."""
        if isinstance(item, Puzzle):
            return item
        try:
            return self.puzzle_task.read(item.tolist() if isinstance(item, (np.ndarray, torch.Tensor)) else item)
        except ValueError as error:
            raise ValueError(f"{place}{error}") from error

    def preprocess(self, input_: Any, votes: int = 1, seed: int = 0) -> dict[str, Any]:
        """Reads a puzzle and shows it in its views: "input_ids" int64 [views * Q, S], "puzzle_identifiers"."""
        puzzle = self.read_puzzle(input_)
        views = self.puzzle_task.views(puzzle, votes, np.random.default_rng(seed))
        shown = np.concatenate([view.show(puzzle.questions) for view in views])
        identifiers = np.repeat([view.identifier for view in views], len(puzzle.questions))
        return {"puzzle": puzzle, "views": views, "input_ids": shown, "puzzle_identifiers": identifiers}

    def _run(self, batch: list[dict], forward_params: dict, postprocess_params: dict) -> Iterator[dict[str, Any]]:
        params = dict(forward_params)
        restarts, noise = params.get("restarts", 1), params.get("noise")
        if noise and restarts == 1:
            raise ValueError(f"restarts={restarts} with noise={noise}: restarts need noise, and noise needs restarts")
        if search := postprocess_params.get("search", False):
            validate_searchable(self.puzzle_task.name)
        prefer_valid = postprocess_params.get("prefer_valid", False)
        if prefer_valid or "choose" in params:
            params |= choice_of_answers(self.puzzle_task, params.get("choose", "q"), prefer_valid)
        names = ("input_ids", "puzzle_identifiers")
        rows = {name: torch.from_numpy(np.concatenate([item[name] for item in batch])) for name in names}
        with seeded(self.device, params.pop("seed", 0), NOISE_STREAM):
            solved = self._solve_rows(rows, params, search)
        start = 0
        for item in batch:
            stop = start + len(item["input_ids"])
            outputs = {"puzzle": item["puzzle"], "views": item["views"], "candidates": solved[start:stop]}
            yield self.postprocess(outputs, **postprocess_params)
            start = stop

    def _solve_rows(self, rows: dict[str, torch.Tensor], params: dict, with_probabilities: bool) -> list[Candidate]:
        """Answers to the views, in pieces that are fast and fit into memory."""
        count = boards_per_call(self.model)
        candidates: list[Candidate] = []
        for start in range(0, len(rows["input_ids"]), count):
            piece = {name: values[start : start + count] for name, values in rows.items()}
            found = self.forward(piece, with_probabilities=with_probabilities, **params)
            output = {name: value.numpy() for name, value in found.items()}
            candidates += [_candidate(output, i) for i in range(len(output["steps"]))]
        return candidates

    def _forward(
        self, input_tensors: dict[str, torch.Tensor], with_probabilities: bool = False, **forward_params: Any
    ) -> dict[str, torch.Tensor]:
        solution = self.model.solve(**input_tensors, **forward_params)
        output = {"predictions": solution.predictions, "steps": solution.steps, "q_halt": solution.q_halt.float()}
        if solution.trajectory is not None:
            output |= {"trajectory": solution.trajectory, "q_trajectory": solution.q_trajectory.float()}
        if with_probabilities:
            output["probabilities"] = solution.logits.float().softmax(-1)
        return output

    def postprocess(
        self, model_outputs: dict[str, Any], prefer_valid: bool = False, search: bool = False
    ) -> dict[str, Any]:
        """Undoes the views and lets them vote, or order the guesses of a search."""
        puzzle, views = model_outputs["puzzle"], model_outputs["views"]
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
        result = self.puzzle_task.result(puzzle, chosen, prefer_valid)
        if search:
            scores = np.mean([candidate.probabilities for candidate in chosen[0]], axis=0)
            result |= searched_answer(self.puzzle_task, puzzle, scores)
        return result


def load_identifiers(model) -> list[str] | None:
    """Names of the rows of a model's puzzle table, from `identifiers.json` beside its checkpoint; None without it."""
    name = model.name_or_path
    if not name:
        return None
    file = cached_file(name, IDENTIFIERS_FILE, _raise_exceptions_for_missing_entries=False)
    return load_json(file) if file else None


def read_puzzle_file(path: str | Path) -> list[dict[str, Any]] | None:
    """Rows of a .csv or .jsonl file, or the tasks of an ARC bundle; None if `path` is a puzzle, not such a file.

    Raises:
        FileNotFoundError: the path ends like a file but is none.
        ValueError: the file has no puzzle column, or no rows.
    """
    text = str(path)
    if not text.endswith((*TABLE_KINDS, ".json")) or "\n" in text:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a puzzle or a file {', '.join(TABLE_KINDS)}, .json")
    if text.endswith(".json"):
        content = load_json(path)
        if not isinstance(content, dict) or "test" in content:
            return None
        return [{"name": name, **task} for name, task in content.items()]
    rows = _csv_table(path) if ".csv" in Path(path).name else _json_table(path)
    if not rows:
        raise ValueError(f"{path} has no rows; expected at least one puzzle")
    if not set(QUESTION_NAMES) & set(rows[0]):
        raise ValueError(f"{path} has the columns {list(rows[0])}; expected one of {list(QUESTION_NAMES)}")
    return rows


def _csv_table(path: str | Path) -> list[dict[str, Any]]:
    (_, header), *rows = [*csv_rows(path)] or [(1, [])]
    for number, row in rows:
        if len(row) not in (0, len(header)):
            raise ValueError(f"{path}, line {number}: {len(row)} fields; expected {len(header)} as in line 1")
    return [dict(zip(header, row)) for _, row in rows if row]


def _json_table(path: str | Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in bounded_lines(path, MAX_TABLE_LINE_BYTES):
        if line.strip():
            place = f"{path}, line {number}"
            validate_table_line(line, place)
            row = parse_json(line, place)
            if not isinstance(row, dict):
                raise ValueError(f"{place}: {shorten(row)}; expected a JSON object")
            rows.append(row)
    return rows


def _candidate(output: dict[str, np.ndarray], row: int) -> Candidate:
    steps = int(output["steps"][row])
    candidate = Candidate(output["predictions"][row], steps, float(output["q_halt"][row]))
    if "trajectory" in output:
        candidate.trajectory = output["trajectory"][:steps, row]
        candidate.q_trajectory = output["q_trajectory"][:steps, row]
    if "probabilities" in output:
        candidate.probabilities = output["probabilities"][row]
    return candidate


PIPELINE_REGISTRY.register_pipeline(
    "puzzle-solving",
    PuzzleSolvingPipeline,
    pt_model=(AutoModelForPuzzleSolving,),
    default={"model": (shipped_model("sudoku"), "main")},
    type="text",
)
