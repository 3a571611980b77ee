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
from ..io.evaluation import chosen_device, write_results
from ..io.usage import UsageError
from ..models.pipeline_batches import seeded
from ..models.settings_puzzle import SolveSettings
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
from .dataset import PuzzleInfo, load_puzzle_dataset, load_puzzle_info
from .npy_layout import is_original, read_original
from .options import BoardOptions, EvaluatePuzzles, values_of
from .search import search_sudoku, validate_searchable
from .sudoku_rules import BLANK
from .tasks import PuzzleTask, sigmoid


DIFFICULTY_COLUMNS = ("rating", "path_length")
ALWAYS_TOLD = ("max_steps", "min_steps", "min_confidence", "halt")
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
    progress: bool | None = False,
    on_batch: OnBatch | None = None,
    shared: bool = False,
    difficulty: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Solves puzzles with known answers and measures how well; numbers, lists and strings only, ready for JSON.

    Args:
        model: a puzzle-solving head; it is put into eval mode and back.
        input_ids, labels: token ids [N, S], numpy arrays, tensors or lists; labels are -100 where ignored. Rows
            without labels are solved, but not scored.
        puzzle_identifiers: [N]; 0 if None.
        batch_size: puzzles at a time; those of `model.boards_per_call` by default.
        progress: a progress bar; None shows it on a terminal only.
        on_batch: called with every batch's input_ids, puzzle_identifiers and `PuzzleSolution`, for voting.
        shared: all processes of the group call this with the same arguments; each solves every N-th batch (and calls
            `on_batch` with it), and all return the metrics of all rows, which are those of one process.
        difficulty: measures of difficulty by name, a number for each row [N].
        options: of `BoardOptions`. With choose="rules" the model is told which of its answers are right.

    Returns:
        count, cell_accuracy, exact_accuracy (see `accuracy.py`); NAME_interval: [low, high], the Wilson interval of
        95 %, with each share of puzzles;
        exact_accuracy_per_step [max_steps]; average_steps; steps_histogram [max_steps], puzzles by steps used;
        q_halt_accuracy: how often q_halt >= 0 agrees with the answer being right;
        reliability: confidence sigmoid(q_halt) against accuracy in 10 bins, and ece, the mean gap over puzzles;
        average_steps_of_all_runs, with restarts;
        valid_fraction, for Sudoku and mazes: answers that obey the rules; search_exact_accuracy and the nodes of the
        search (mean and most), with the model and without it, after a search;
        puzzles_per_second (of solving alone, by all processes); by_difficulty, a table of `accuracy_by_difficulty` for
        each measure, if there are any; and the settings: those of halting, and others that are not the default.

    Raises:
        TypeError: an unknown option.
        ValueError: shapes disagree with each other or the model, no row has a label, or there is no search.
    """
    from tqdm.auto import tqdm

    options = BoardOptions(**options)
    if options.max_steps is None:
        options = options.replace(max_steps=model.config.halt_max_steps)
    if options.search:
        validate_searchable(model.config.task)
    arrays, task = _checked(model, input_ids, labels, puzzle_identifiers), _task_with_rules(model.config)
    batch_size = batch_size or model.boards_per_call
    starts = range(0, len(arrays[0]), batch_size)
    rank, processes = _place_in_group() if shared else (0, 1)
    hide_bar = None if progress is None else not progress
    parts, seconds, was_training = [], 0.0, model.training
    model.eval()
    try:
        for start in tqdm(starts[rank::processes], desc="evaluating", unit="batch", disable=hide_bar):
            rows = [torch.as_tensor(np.array(each[start : start + batch_size])).long() for each in arrays]
            batch, _, identifiers = rows
            started = time.perf_counter()
            with seeded(model.device, options.seed, start):  # the same in whatever process
                boards = (batch.to(model.device), identifiers.to(model.device))
                solution = model.solve(*boards, return_trajectory=True, **options.solve_arguments(task))
            solution.steps.cpu()  # waits for the device, so that the time is that of the work
            seconds += time.perf_counter() - started
            parts.append(_columns(task, options, rows, solution))
            if on_batch is not None:
                on_batch(batch, identifiers, solution)
    finally:
        model.train(was_training)
    columns, seconds = _gathered(parts, seconds, len(starts), processes)
    defaults, settings = vars(SolveSettings()), values_of(options, SolveSettings)
    told = {n: value for n, value in settings.items() if n in ALWAYS_TOLD or value != defaults[n]}
    return {**_metrics(columns, seconds, difficulty or {}), **told}


def _columns(
    task: PuzzleTask, options: BoardOptions, rows: list[torch.Tensor], solution: PuzzleSolution
) -> dict[str, np.ndarray]:
    """What there is to know of each row of a batch, [n, ...]."""
    batch, labels, _ = rows
    predictions = solution.predictions.cpu()
    num_correct, num_labels = correct_cells(predictions, labels)
    # After its last step a batch keeps its answers: repeat them up to max_steps.
    per_step, _ = correct_cells(solution.trajectory.cpu(), labels)
    per_step = torch.cat((per_step, per_step[-1:].expand(options.max_steps - len(per_step), -1)))
    columns = {
        "num_correct": num_correct,
        "num_labels": num_labels,
        "exact": (per_step == num_labels).T,
        "steps": solution.steps,
        "q_halt": solution.q_halt.float(),
        "steps_of_all_runs": solution.steps_of_all_runs,
    }
    columns = {name: value.cpu().numpy() for name, value in columns.items() if value is not None}
    if task.has_rules:
        columns["valid"] = task.obeys(batch.numpy(), predictions.numpy())
    if options.search:
        scores = solution.logits.float().softmax(-1).cpu().numpy()
        boards = zip(batch.numpy(), labels.numpy(), scores)
        columns["search"] = np.array([_searched(*each) for each in boards])
    return columns


def _searched(question: np.ndarray, labels: np.ndarray, scores: np.ndarray) -> tuple[bool, int, int]:
    """Whether a search finds the solution, and its nodes with the model and without it; nothing without labels."""
    if (labels == IGNORE_LABEL).all():
        return False, 0, 0
    found, plain = search_sudoku(question, scores), search_sudoku(question)
    right = found.tokens is not None and bool(((labels == IGNORE_LABEL) | (found.tokens == labels)).all())
    return right, found.nodes, plain.nodes


def _gathered(parts: list[dict], seconds: float, count: int, processes: int) -> tuple[dict[str, np.ndarray], float]:
    """Columns of all rows in their order, from the batches of all processes, and the time of the slowest process."""
    by_process, times = [parts], [seconds]
    if processes > 1:
        by_process, times = (gather_object([value]) for value in (parts, seconds))
    batches = [by_process[number % processes][number // processes] for number in range(count)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, max(times)


def _metrics(columns: dict[str, np.ndarray], seconds: float, difficulty: Mapping[str, Any]) -> dict[str, Any]:
    result = accuracies(columns["num_correct"], columns["num_labels"])
    rows, scored = len(columns["num_labels"]), columns["num_labels"] > 0
    columns = {name: value[scored] for name, value in columns.items()}
    right, steps, max_steps = (
        columns["num_correct"] == columns["num_labels"],
        columns["steps"],
        columns["exact"].shape[1],
    )
    per_step = [share_of("of_step", exact) for exact in columns["exact"].T]
    result |= {
        "exact_accuracy_per_step": [step["of_step"] for step in per_step],
        "exact_accuracy_per_step_interval": [step["of_step_interval"] for step in per_step],
        "average_steps": float(steps.mean()),
        "steps_histogram": np.bincount(steps, minlength=max_steps + 1)[1:].tolist(),
        **share_of("q_halt_accuracy", (columns["q_halt"] >= 0) == right),
        **calibration(sigmoid(columns["q_halt"]), right),
    }
    if "valid" in columns:
        result |= share_of("valid_fraction", columns["valid"])
    if "steps_of_all_runs" in columns:
        result["average_steps_of_all_runs"] = float(columns["steps_of_all_runs"].mean())
    if "search" in columns:
        solved, nodes, plain = columns["search"].T
        result |= share_of("search_exact_accuracy", solved)
        for name, count in (("search_nodes", nodes), ("search_nodes_without_model", plain)):
            result |= {f"{name}_mean": float(count.mean()), f"{name}_most": int(count.max())}
    result["puzzles_per_second"] = rows / max(seconds, 1e-9)
    tables = {n: accuracy_by_difficulty(np.asarray(values)[scored], right) for n, values in difficulty.items()}
    return {**result, "by_difficulty": tables} if tables else result


def _place_in_group() -> tuple[int, int]:
    """The number of this process, and how many there are; the group is made if it is not there."""
    state = PartialState()
    return state.process_index, state.num_processes


def _task_with_rules(config) -> PuzzleTask:
    """The task; ARC and those of your own have no rules here: that an answer is a grid says nothing about it."""
    return puzzle_task(config) if config.task in ("sudoku", "maze") else PuzzleTask(config)


def _checked(model, input_ids, labels, puzzle_identifiers) -> list[Any]:
    arrays = [value if isinstance(value, torch.Tensor) else np.asarray(value) for value in (input_ids, labels)]
    expected = (len(arrays[0]), model.config.seq_len)
    for name, array in zip(("input_ids", "labels"), arrays):
        if tuple(array.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {expected} (rows, config.seq_len)")
    if not expected[0]:
        raise ValueError("there are no puzzles to evaluate")
    identifiers = (
        np.zeros(expected[0], dtype=np.int64) if puzzle_identifiers is None else np.asarray(puzzle_identifiers)
    )
    if len(identifiers) != expected[0]:
        raise ValueError(f"{len(identifiers)} puzzle_identifiers for {expected[0]} rows; expected one for each")
    limits = [("input_ids", arrays[0], model.config.vocab_size)]
    if model.config.puzzle_emb_ndim:
        limits.append(("puzzle_identifiers", identifiers, model.config.num_puzzle_identifiers))
    for name, values, limit in limits:
        if int(values.max()) >= limit:
            raise ValueError(
                f"{name} hold {int(values.max())}: the model's are below {limit}; use data like those that it was "
                "trained on"
            )
    return [*arrays, identifiers]


# ---- a checkpoint on a data set ----


def evaluate_checkpoint(options: EvaluatePuzzles, shared: bool = False) -> dict[str, Any]:
    """Evaluates a saved model on a data set, with pass@K by voting for ARC.

    Args:
        shared: all processes that torchrun has started call this and share the rows. All return the result; the first
            one writes.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a device that is not here, or not one for each process, or data without a measure of difficulty.
        ModelError: a model of another kind.
        ValueError: a model that was not made for such data, or a split without puzzles.
    """
    config = load_config(options.model, PUZZLE_SOLVER)
    device = chosen_device(options.device)
    info, dataset = _open(options.data, options.split)
    _validate_fit(config, info, options.model, options.data)
    rows = _load_rows(dataset, options.limit, f"{options.data}, split {options.split!r}")
    difficulty = _difficulty(rows, info) if options.by_difficulty else None
    voting = _voting(options.data, info)
    with _process_group(device, shared) as (device, is_first):
        network = AutoModelForPuzzleSolving.from_pretrained(options.model).to(device).eval()
        metrics = evaluate_puzzles(
            network,
            rows["input_ids"],
            rows["labels"],
            rows["puzzle_identifiers"],
            batch_size=options.batch_size,
            progress=None if is_first else False,
            on_batch=partial(_vote, voting) if voting else None,
            shared=shared,
            difficulty=difficulty,
            **values_of(options, BoardOptions),
        )
        if voting and shared:
            voting.replace_votes(gather_object([voting.votes]))
    if voting:
        metrics |= voting.result(VOTING_PASS_AT)
    result = {
        "task": info.task,
        "model": options.model,
        "dataset": options.data,
        "split": options.split,
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    return result | (_written(result, options) if is_first else {})


def _written(result: dict[str, Any], options: EvaluatePuzzles) -> dict[str, str]:
    """Writes what was asked for, and returns the names of the files."""
    written, data, split, metrics = {}, options.data, options.split, result["metrics"]
    if options.out:
        written = write_results(result, options.out)
        title = f"{Path(options.model).name}, {data} ({split})"
        written["plot"] = str(plot_evaluation(metrics, options.out / "evaluation.png", title))
    if options.update_card:
        more = {"limit": options.limit} if options.limit else {}
        card = record_evaluation(options.model, with_bounds(metrics), data, split, result["parameters"], **more)
        written["card"] = str(card)
    return written


@contextmanager
def _process_group(device: str, shared: bool) -> Iterator[tuple[str, bool]]:
    """The device of this process and whether it is the first; a group that is made here ends with the block."""
    if not shared:
        yield device, True
        return
    if torch.device(device).index is not None:
        raise UsageError(f"device={device}: processes take one each; name its kind alone", "--device")
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
