"""Evaluation of puzzle models: accuracy per ACT step, halting, calibration of q_halt, and obedience to the rules.

One pass over the data in one halting mode. With halt="fixed" the accuracy per step is that of the model at each step;
with halt="q" it is that of the answers standing at each step, where finished puzzles keep theirs, and the average of
steps is what adaptive computation costs. The data are arrays: a trainer calls this as well as the command line.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ..hub.cards import record_evaluation
from ..hub.kinds import PUZZLE_SOLVER, load_config
from ..io.evaluation import chosen_device, validate_data, validate_evaluation, write_results
from ..io.usage import UsageError
from ..models.pipeline_batches import seeded
from ..models.solving_puzzle import PuzzleSolution
from ..registry import AutoModelForPuzzleSolving
from ..trainer.plots import plot_evaluation
from ..trainer.recipes import library_versions
from .accuracy import (
    IGNORE_LABEL,
    accuracies,
    accuracy_by_difficulty,
    calibration,
    correct_cells,
    share_of,
    with_bounds,
)
from .arc_pipeline import puzzle_task
from .arc_voting import TEST_PUZZLES_FILE, ArcVoting, load_test_puzzles
from .breadth import boards_per_call, choice_of_answers
from .dataset import PuzzleInfo, load_puzzle_dataset, load_puzzle_info
from .npy_layout import is_original, read_original
from .search import search_sudoku, validate_searchable
from .sudoku_rules import BLANK
from .tasks import PuzzleTask, sigmoid


DIFFICULTY_COLUMNS = ("rating", "path_length")
PLAIN_RUN = {"restarts": 1, "noise": None, "noise_at": "start", "choose": "q", "exit_when_still": None}
VOTING_PASS_AT = (1, 2, 5, 10, 100, 1000)

# Rows of a batch as int64 tensors on the CPU (input_ids, puzzle_identifiers), and what the model made of them.
OnBatch = Callable[[torch.Tensor, torch.Tensor, PuzzleSolution], None]


def evaluate_puzzles(
    model,
    input_ids: Any,
    labels: Any,
    puzzle_identifiers: Any = None,
    *,
    batch_size: int | None = None,
    max_steps: int | None = None,
    min_steps: int = 1,
    min_confidence: float = 0.0,
    halt: str = "q",
    check_rules: bool = True,
    search: bool = False,
    seed: int = 0,
    progress: bool | None = False,
    on_batch: OnBatch | None = None,
    shared: bool = False,
    difficulty: Mapping[str, Any] | None = None,
    **breadth: Any,
) -> dict[str, Any]:
    """Solves puzzles with known answers and says how well; numbers, lists and strings only, ready for JSON.

    Args:
        model: a puzzle-solving head; it is put into eval mode and back.
        input_ids, labels: token ids [N, S], numpy arrays, tensors or lists; labels are -100 where ignored. Rows
            without labels are solved, but not scored.
        puzzle_identifiers: [N]; 0 if None.
        batch_size: puzzles at a time; those of `model.boards_per_call` by default.
        max_steps, min_steps, min_confidence, halt: as for `model.solve`.
        check_rules: add "valid_fraction" for Sudoku and mazes, judged by the rules, not by the labels.
        search: Sudoku only: add what a search finds whose guesses the model orders (see `search.py`).
        seed: of the noise of restarts, and of models that draw random numbers themselves.
        progress: a progress bar; None shows it on a terminal only.
        on_batch: called with every batch's input_ids, puzzle_identifiers and `PuzzleSolution`, for voting.
        shared: all processes of the group call this with the same arguments; each solves every N-th batch (and calls
            `on_batch` with it), and all return the figures of all rows, which are those of one process.
        difficulty: measures of difficulty by name, a number for each row [N].
        breadth: restarts, noise, noise_at, choose and exit_when_still of `model.solve`. With choose="rules" the
            figures are those of a model that is told which of its answers are right (Sudoku and mazes; other tasks
            fall back to "q").

    Returns:
        count, cell_accuracy, exact_accuracy (see `accuracy.py`); NAME_interval: [low, high], the Wilson interval of
        95 %, with each share of puzzles;
        exact_accuracy_per_step [max_steps]; average_steps; steps_histogram [max_steps], puzzles by steps used;
        q_halt_accuracy: how often q_halt >= 0 agrees with the answer being right;
        reliability: confidence sigmoid(q_halt) against accuracy in 10 bins, and ece, the mean gap over puzzles;
        average_steps_of_all_runs, with restarts;
        valid_fraction, where the task has rules; search_exact_accuracy and the nodes of the search (mean and most),
        with the model and without it, after a search;
        puzzles_per_second (of solving alone, by all processes); by_difficulty, a table of `accuracy_by_difficulty` for
        each measure, if there are any; and the settings: those of halting, and of breadth where not plain.

    Raises:
        ValueError: shapes disagree with each other or the model, no row has a label, or there is no search.
    """
    from tqdm.auto import tqdm

    if search:
        validate_searchable(model.config.task)
    max_steps = model.config.halt_max_steps if max_steps is None else max_steps
    batch_size = batch_size or boards_per_call(model)
    breadth = _unusual(breadth)
    choice = choice_of_answers(puzzle_task(model.config), breadth["choose"]) if "choose" in breadth else {}
    arrays = _checked(model, input_ids, labels, puzzle_identifiers)
    rules = _task_with_rules(model.config) if check_rules else None
    hide_bar = None if progress is None else not progress
    starts = range(0, len(arrays[0]), batch_size)
    rank, processes = _place_in_group() if shared else (0, 1)
    tallies: list[_Tally] = []
    was_training = model.training
    model.eval()
    try:
        total = sum(min(batch_size, len(arrays[0]) - start) for start in starts[rank::processes])
        with tqdm(total=total, desc="evaluating", unit="puzzle", disable=hide_bar) as bar:
            for start in starts[rank::processes]:
                batch, right, identifiers = (
                    torch.as_tensor(np.array(a[start : start + batch_size])).long() for a in arrays
                )
                started = time.perf_counter()
                with seeded(model.device, seed, start):  # the same in whatever process
                    solution = model.solve(
                        batch.to(model.device),
                        identifiers.to(model.device),
                        max_steps=max_steps,
                        min_steps=min_steps,
                        min_confidence=min_confidence,
                        halt=halt,
                        return_trajectory=True,
                        **(breadth | choice),
                    )
                steps = solution.steps.cpu()  # waits for the device, so that the time is that of the work
                seconds = time.perf_counter() - started
                tallies.append(_Tally(max_steps, rules, search))
                tallies[-1].add(batch, right, steps, solution, seconds)
                if on_batch is not None:
                    on_batch(batch, identifiers, solution)
                bar.update(len(batch))
    finally:
        model.train(was_training)
    settings = {"max_steps": max_steps, "min_steps": min_steps, "min_confidence": min_confidence, "halt": halt}
    tally = _Tally(max_steps, rules, search)
    tally.take(tallies, len(starts), processes)
    result = tally.result()
    if difficulty:
        result["by_difficulty"] = tally.by_difficulty(difficulty)
    return {**result, **settings, **breadth}


def _unusual(breadth: dict[str, Any]) -> dict[str, Any]:
    """The options of breadth that are not those of one plain run.

    Raises:
        TypeError: an option that there is not.
    """
    if unknown := sorted(breadth.keys() - PLAIN_RUN.keys()):
        raise TypeError(f"evaluate_puzzles has no option {unknown[0]!r}; of breadth there are {list(PLAIN_RUN)}")
    return {name: value for name, value in breadth.items() if value != PLAIN_RUN[name]}


class _Tally:
    """Per-row figures of a batch, or of all of them."""

    def __init__(self, max_steps: int, rules: PuzzleTask | None, search: bool = False):
        self.max_steps, self.rules, self.seconds = max_steps, rules, 0.0
        self.steps_of_all_runs: list[np.ndarray] = []
        self.searches: list[tuple[bool, int, int]] | None = [] if search else None
        self.num_correct, self.num_labels, self.steps, self.q_halt, self.valid, self.exact = ([] for _ in range(6))

    def take(self, batches: "list[_Tally]", count: int, processes: int) -> None:
        """Takes over the figures of all batches in their order; each process has the `batches` that it solved.

        The time is that of the process which needed most.
        """
        own = [{name: value for name, value in vars(one).items() if isinstance(value, list)} for one in batches]
        parts, seconds = [own], [sum(one.seconds for one in batches)]
        if processes > 1:
            parts, seconds = (gather_object([value]) for value in (own, seconds[0]))
        self.seconds = max(seconds)
        for number in range(count):
            for name, figures in parts[number % processes][number // processes].items():
                getattr(self, name).extend(figures)

    def add(
        self,
        batch: torch.Tensor,
        labels: torch.Tensor,
        steps: torch.Tensor,
        solution: PuzzleSolution,
        seconds: float,
    ) -> None:
        self.seconds += seconds
        predictions = solution.predictions.cpu()
        num_correct, num_labels = correct_cells(predictions, labels)
        # After its last step a batch keeps its answers: repeat them up to max_steps.
        per_step, _ = correct_cells(solution.trajectory.cpu(), labels)
        per_step = torch.cat((per_step, per_step[-1:].expand(self.max_steps - len(per_step), -1)))
        self.num_correct.append(num_correct.numpy())
        self.num_labels.append(num_labels.numpy())
        self.exact.append((per_step == num_labels).numpy())
        self.steps.append(steps.numpy())
        self.q_halt.append(solution.q_halt.float().cpu().numpy())
        if self.rules is not None:
            rows = zip(batch.numpy(), predictions.numpy(), num_labels.numpy())
            self.valid += [not self.rules.violations(*pair) for *pair, labelled in rows if labelled]
        if solution.steps_of_all_runs is not None:
            self.steps_of_all_runs.append(solution.steps_of_all_runs.cpu().numpy())
        if self.searches is not None:
            scores = solution.logits.float().softmax(-1).cpu().numpy()
            scored = (num_labels > 0).numpy()
            self.searches += map(_searched, batch.numpy()[scored], labels.numpy()[scored], scores[scored])

    def result(self) -> dict[str, Any]:
        num_correct, num_labels, steps, q_halt = map(
            np.concatenate, (self.num_correct, self.num_labels, self.steps, self.q_halt)
        )
        result = accuracies(num_correct, num_labels)
        scored = num_labels > 0
        right, steps = (num_correct == num_labels)[scored], steps[scored]
        per_step = [share_of("of_step", exact) for exact in np.concatenate(self.exact, axis=1)[:, scored]]
        result |= {
            "exact_accuracy_per_step": [step["of_step"] for step in per_step],
            "exact_accuracy_per_step_interval": [step["of_step_interval"] for step in per_step],
            "average_steps": float(steps.mean()),
            "steps_histogram": np.bincount(steps, minlength=self.max_steps + 1)[1:].tolist(),
            **share_of("q_halt_accuracy", (q_halt[scored] >= 0) == right),
            **calibration(sigmoid(q_halt[scored]), right),
        }
        if self.rules is not None:
            result |= share_of("valid_fraction", self.valid)
        if self.steps_of_all_runs:
            result["average_steps_of_all_runs"] = float(np.concatenate(self.steps_of_all_runs)[scored].mean())
        if self.searches is not None:
            right, nodes, plain = np.array(self.searches).T
            result |= share_of("search_exact_accuracy", right)
            for name, count in (("search_nodes", nodes), ("search_nodes_without_model", plain)):
                result |= {f"{name}_mean": float(count.mean()), f"{name}_most": int(count.max())}
        return {**result, "puzzles_per_second": len(num_labels) / max(self.seconds, 1e-9)}

    def by_difficulty(self, difficulty: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        num_correct, num_labels = np.concatenate(self.num_correct), np.concatenate(self.num_labels)
        scored = num_labels > 0
        right = (num_correct == num_labels)[scored]
        return {name: accuracy_by_difficulty(np.asarray(values)[scored], right) for name, values in difficulty.items()}


def _searched(question: np.ndarray, labels: np.ndarray, scores: np.ndarray) -> tuple[bool, int, int]:
    """Whether a search finds the solution, and its nodes with the model and without it."""
    found, plain = search_sudoku(question, scores), search_sudoku(question)
    right = found.tokens is not None and bool(((labels == IGNORE_LABEL) | (found.tokens == labels)).all())
    return right, found.nodes, plain.nodes


def _place_in_group() -> tuple[int, int]:
    """The number of this process, and how many there are; the group is made if it is not there."""
    state = PartialState()
    return state.process_index, state.num_processes


def _task_with_rules(config) -> PuzzleTask | None:
    """ARC's rule, that an answer is a grid, says nothing about being right; and its views need identifiers."""
    return puzzle_task(config) if config.task in ("sudoku", "maze") else None


def _checked(model, input_ids, labels, puzzle_identifiers) -> list[Any]:
    arrays = [value if isinstance(value, torch.Tensor) else np.asarray(value) for value in (input_ids, labels)]
    expected = (len(arrays[0]), model.config.seq_len)
    for name, array in zip(("input_ids", "labels"), arrays):
        if tuple(array.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {expected} (rows, config.seq_len)")
    if not expected[0]:
        raise ValueError("there are no puzzles to evaluate")
    if puzzle_identifiers is None:
        puzzle_identifiers = np.zeros(expected[0], dtype=np.int64)
    if len(puzzle_identifiers) != expected[0]:
        raise ValueError(f"{len(puzzle_identifiers)} puzzle_identifiers for {expected[0]} rows; expected one for each")
    top_token = int(arrays[0].max())
    if top_token >= model.config.vocab_size:
        raise ValueError(f"input_ids hold token {top_token}; the model's vocab_size is {model.config.vocab_size}")
    identifiers = np.asarray(puzzle_identifiers)
    top = int(identifiers.max())
    if model.config.puzzle_emb_ndim and top >= model.config.num_puzzle_identifiers:
        raise ValueError(
            f"puzzle identifier {top} is not in the model's table of {model.config.num_puzzle_identifiers} rows; "
            "evaluate on the data set that the model was trained on, or resize_puzzle_embeddings first"
        )
    return [*arrays, identifiers]


# ---- a checkpoint on a data set ----


def evaluate_checkpoint(
    model: str,
    data: str,
    *,
    split: str = "test",
    max_steps: int | None = None,
    min_steps: int = 1,
    min_confidence: float = 0.0,
    halt: str = "q",
    batch_size: int | None = None,
    limit: int | None = None,
    search: bool = False,
    seed: int = 0,
    out: Path | None = None,
    device: str | None = None,
    update_card: bool = False,
    shared: bool = False,
    by_difficulty: bool = False,
    **breadth: Any,
) -> dict[str, Any]:
    """Evaluates a saved model on a data set, with pass@K by voting for ARC.

    Args:
        model, data: folders, or names on the Hub; data also in the layout of the original, of .npy arrays.
        max_steps, min_steps, min_confidence, halt, batch_size, search, seed, breadth: as for `evaluate_puzzles`.
        limit: only the first rows of the split.
        out: folder for results.json and evaluation.png.
        device: the best there is by default.
        update_card: write the results into the model's README.md.
        shared: all processes that torchrun has started call this and share the rows. All return the result; the first
            one writes.
        by_difficulty: also the accuracy in bins of the ratings and path lengths that the data have, and of the number
            of clues of Sudoku boards.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a path that is no folder, or a device that is not here, or not one for each process.
        ModelError: a model that is nowhere, or of another kind.
        ValueError: a model that was not made for such data, or a split without puzzles.
    """
    validate_evaluation(model, out, update_card)
    config = load_config(model, PUZZLE_SOLVER)
    validate_data(data, "puzzle data set")
    device = chosen_device(device)
    info, dataset = _open(data, split)
    _validate_fit(config, info, model, data)
    rows = _load_rows(dataset, limit, f"{data}, split {split!r}")
    difficulty = _difficulty(rows, info) if by_difficulty else None
    voting = _voting(data, info)
    with _process_group(device, shared) as (device, is_first):
        network = AutoModelForPuzzleSolving.from_pretrained(model).to(device).eval()
        metrics = evaluate_puzzles(
            network,
            rows["input_ids"],
            rows["labels"],
            rows["puzzle_identifiers"],
            batch_size=batch_size,
            max_steps=max_steps,
            min_steps=min_steps,
            min_confidence=min_confidence,
            halt=halt,
            search=search,
            seed=seed,
            progress=None if is_first else False,
            on_batch=partial(_vote, voting) if voting else None,
            shared=shared,
            difficulty=difficulty,
            **breadth,
        )
        if voting and shared:
            voting.replace_votes(gather_object([voting.votes]))
    if voting:
        metrics |= voting.result(VOTING_PASS_AT)
    result = {
        "task": info.task,
        "model": model,
        "dataset": data,
        "split": split,
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    if not is_first:
        return result
    written = write_results(result, out) if out else {}
    if out:
        plot = plot_evaluation(metrics, out / "evaluation.png", f"{Path(model).name}, {data} ({split})")
        written["plot"] = str(plot)
    if update_card:
        more = {"limit": limit} if limit else {}
        written["card"] = str(
            record_evaluation(model, with_bounds(metrics), data, split, result["parameters"], **more)
        )
    return result | written


@contextmanager
def _process_group(device: str, shared: bool) -> Iterator[tuple[str, bool]]:
    """The device of this process and whether it is the first; a group that is made here ends with the block."""
    if not shared:
        yield device, True
        return
    if torch.device(device).index is not None:
        raise UsageError(f"{device} is one device, and processes take one each; name its kind alone", "--device")
    is_new = not PartialState._shared_state
    state = PartialState(cpu=device == "cpu")
    yield str(state.device), state.is_main_process
    state.wait_for_everyone()
    if is_new:
        state.destroy_process_group()
        PartialState._reset_state()


def _validate_fit(config, info: PuzzleInfo, model: str, data: str) -> None:
    """A model for puzzles meets only data of its own shape and table."""
    wanted, names = info.config_fields(), ["seq_len", "vocab_size"]
    names += ["task"] if config.task != "generic" else []
    names += ["num_puzzle_identifiers"] if config.puzzle_emb_ndim else []
    wrong = [
        f"{name}: {getattr(config, name)} and {wanted[name]}"
        for name in names
        if getattr(config, name) != wanted[name]
    ]
    if wrong:
        raise ValueError(f"{model} was not made for {data}; model and data differ in {'; '.join(wrong)}")


def _open(data: str, split: str) -> tuple[PuzzleInfo, Any]:
    """A data set's description and one split, from our layout or from the original's arrays as they are."""
    if not is_original(data):
        info = load_puzzle_info(data)
        return info, load_puzzle_dataset(data, split)
    splits, info = read_original(data, only=split)
    if split not in splits:
        raise ValueError(f"{data} has no split {split!r} in the original's layout; expected train or test")
    return info, splits[split]


def _load_rows(dataset, limit: int | None, where: str) -> dict[str, Any]:
    """Columns of the split as numpy arrays; int8 for tokens, so that a large ARC split fits."""
    dataset = dataset.select(range(min(limit, len(dataset)))) if limit else dataset
    names = ["input_ids", "labels", "puzzle_identifiers"]
    difficulty = [name for name in DIFFICULTY_COLUMNS if name in dataset.column_names]
    if missing := [name for name in names if name not in dataset.column_names]:
        raise ValueError(
            f"{where}: no column {', '.join(missing)}, it has {', '.join(dataset.column_names)}; "
            "build the data set anew with hrm-hf data"
        )
    if not len(dataset):
        raise ValueError(f"{where} holds no puzzle")
    return dataset.select_columns(names + difficulty).with_format("numpy")[:]


def _difficulty(rows: dict[str, Any], info: PuzzleInfo) -> dict[str, Any]:
    """The column that says how hard each row is.

    Raises:
        UsageError: nothing does.
    """
    found = {name: rows[name] for name in DIFFICULTY_COLUMNS if name in rows}
    if info.task == "sudoku":
        found["clues"] = (np.asarray(rows["input_ids"]) > BLANK).sum(axis=1)
    if not found:
        raise UsageError(
            f"the data are of task {info.task!r} without a column {' or '.join(DIFFICULTY_COLUMNS)}: nothing says how "
            "hard a puzzle is",
            "--by-difficulty",
        )
    return found


def _voting(data: str, info: PuzzleInfo) -> ArcVoting | None:
    """Votes are possible for ARC with `test_puzzles.json` beside the data."""
    if info.task != "arc" or not Path(data, TEST_PUZZLES_FILE).exists():
        return None
    return ArcVoting(load_test_puzzles(data), info.identifiers)


def _vote(voting: ArcVoting, input_ids, puzzle_identifiers, solution: PuzzleSolution) -> None:
    predictions, q_halt = solution.predictions.cpu().numpy(), solution.q_halt.float().cpu().numpy()
    voting.update(input_ids.numpy(), puzzle_identifiers.numpy(), predictions, q_halt)
