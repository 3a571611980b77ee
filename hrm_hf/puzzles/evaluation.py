"""Evaluate puzzle models: accuracy per ACT step, halting, calibration of q_halt, valid answers.

An evaluation is one pass over the data in one halting mode. With halt="fixed", all puzzles run all ACT steps, and
the accuracy is measured after each. With halt="q", finished puzzles keep their answers, and the average number of
steps is the cost of adaptive computation. Each fraction of puzzles has a 95% Wilson interval, NAME_interval: [low,
high]. Cell accuracy has no interval, because the cells of a puzzle are not independent trials.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ..hub.cards import record_evaluation
from ..hub.kinds import PUZZLE_SOLVER, load_config, load_network
from ..io.evaluation import chosen_device, write_results
from ..io.usage import UsageError
from ..models.pipeline_batches import seeded
from ..models.settings_puzzle import SolveSettings
from ..models.solving_puzzle import PuzzleSolution
from ..registry import AutoModelForPuzzleSolving
from ..trainer.logging import wilson_interval
from ..trainer.plots import plot_evaluation
from ..trainer.recipes import library_versions
from .candidates import sigmoid
from .dataloader import PuzzleRows
from .dataset import (
    IGNORE_LABEL,
    PuzzleInfo,
    load_identifiers,
    load_puzzle_dataset,
    load_puzzle_info,
    match_identifiers,
)
from .npy_layout import is_original, read_original
from .options import BoardOptions, EvaluatePuzzles, values_of
from .task_registry import puzzle_task
from .tasks import PuzzleTask


DIFFICULTY_COLUMNS = ("rating", "path_length")
ALWAYS_REPORTED = ("max_steps", "min_steps", "min_confidence", "halt")
MOST_VALUES = 36  # a difficulty measure with at most this many distinct values has one bin per value
NUM_BINS = 8  # number of bins, of similar sizes, for measures with more than MOST_VALUES values
MOST_WRONG = 1 / 1000  # maximum fraction of wrong answers among those that a model is sure of
CALIBRATION_BINS = 10  # number of confidence bins

# Callback that receives a batch's input_ids and puzzle_identifiers (int64, on the CPU) and the model's answers.
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
    """Solve puzzles with known answers and return metrics that can be saved as JSON.

    Args:
        model: Puzzle-solving model; it is switched to eval mode and back.
        input_ids, labels: Token ids [N, S]; ignored labels are -100. Rows without labels are not scored.
        puzzle_identifiers: Identifiers [N]; 0 if None.
        batch_size: Puzzles per batch; `model.boards_per_call` by default.
        progress: Whether to show a progress bar; None shows it only on a terminal.
        on_batch: Function called with the input_ids, puzzle_identifiers and `PuzzleSolution` of every batch.
        shared: If True, all processes of the group must call this with the same arguments. Each process solves its
            share of the batches (and calls `on_batch` for them), and all return the metrics for all rows.
        difficulty: Measures of difficulty by name, with a number for each row [N].
        options: Fields of `BoardOptions`. Note that choose="rules" reveals which of the model's answers are correct.

    Returns:
        count, cell_accuracy, exact_accuracy (see `accuracies`);
        exact_accuracy_per_step [max_steps]; average_steps; steps_histogram [max_steps], number of puzzles by steps;
        q_halt_accuracy: fraction of puzzles for which q_halt >= 0 correctly tells whether the answer is correct;
        reliability: confidence sigmoid(q_halt) against accuracy in 10 bins, and ece, the mean gap over puzzles;
        confidence_auroc, and with exit_when_still or choose="residual" stillness_auroc (see `auroc`);
        sure_confidence: the confidence from which answers can be trusted, and sure_fraction (see `trusted`);
        with restarts: average_steps_of_all_runs;
        for tasks with rules: valid_fraction, the fraction of answers that obey the rules;
        with search: search_exact_accuracy, and the mean and maximum number of nodes with and without the model;
        puzzles_per_second (only the time for solving, over all processes); by_difficulty, a table from
        `accuracy_by_difficulty` for each measure; and the halting settings, and other settings that are not defaults.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If shapes do not match each other or the model, no row has a label, or the task has no search.
    """
    from tqdm.auto import tqdm

    options = BoardOptions(**options)
    if options.max_steps is None:
        options = options.replace(max_steps=model.config.halt_max_steps)
    task = puzzle_task(model.config)
    if options.search:
        task.validate_searchable()
    arrays = _validate_arrays(model.config, input_ids, labels, puzzle_identifiers)
    batch_size = batch_size or model.boards_per_call
    starts = range(0, len(arrays[0]), batch_size)
    state = PartialState() if shared else None
    rank, processes = (state.process_index, state.num_processes) if state else (0, 1)
    hide_bar = None if progress is None else not progress
    parts, seconds, was_training = [], 0.0, model.training
    model.eval()
    try:
        for start in tqdm(starts[rank::processes], desc="evaluating", unit="batch", disable=hide_bar):
            rows = [torch.as_tensor(np.array(each[start : start + batch_size])).long() for each in arrays]
            batch, _, identifiers = rows
            started = time.perf_counter()
            with seeded(model.device, options.seed, start):  # the same noise for any number of processes
                boards = (batch.to(model.device), identifiers.to(model.device))
                solution = model.solve(*boards, return_trajectory=True, **options.solve_arguments(task))
            solution.steps.cpu()  # wait for the device, so the measured time includes its work
            seconds += time.perf_counter() - started
            parts.append(_columns(task, options, rows, solution))
            if on_batch is not None:
                on_batch(batch, identifiers, solution)
    finally:
        model.train(was_training)
    columns, seconds = _gather(parts, seconds, len(starts), processes)
    defaults, settings = vars(SolveSettings()), values_of(options, SolveSettings)
    reported = {n: value for n, value in settings.items() if n in ALWAYS_REPORTED or value != defaults[n]}
    return {**_metrics(columns, seconds, difficulty or {}), **reported}


def _columns(task: PuzzleTask, options: BoardOptions, rows: list, solution: PuzzleSolution) -> dict[str, np.ndarray]:
    """Return the columns [n, ...] needed to compute the metrics of a batch."""
    batch, labels, _ = rows
    predictions = solution.predictions.cpu()
    num_correct, num_labels = correct_cells(predictions, labels)
    # A batch may stop early. Its answers then stay the same, so repeat the last answers up to max_steps.
    per_step, _ = correct_cells(solution.trajectory.cpu(), labels)
    per_step = torch.cat((per_step, per_step[-1:].expand(options.max_steps - len(per_step), -1)))
    columns = {
        "num_correct": num_correct,
        "num_labels": num_labels,
        "exact": (per_step == num_labels).T,
        "steps": solution.steps,
        "q_halt": solution.q_halt.float(),
        "steps_of_all_runs": solution.steps_of_all_runs,
        "residual": solution.residual,
    }
    columns = {name: value.cpu().numpy() for name, value in columns.items() if value is not None}
    if task.has_rules and task.reports_valid:
        columns["valid"] = task.obeys(batch.numpy(), predictions.numpy())
    if options.search:
        scores = solution.logits.float().softmax(-1).cpu().numpy()
        boards = zip(batch.numpy(), labels.numpy(), scores)
        columns["search"] = np.array([_search_both(task, *each) for each in boards])
    return columns


def _search_both(
    task: PuzzleTask, question: np.ndarray, labels: np.ndarray, scores: np.ndarray
) -> tuple[bool, int, int]:
    """Search with and without `scores`. Return whether `scores` led to the right answer, and both node counts."""
    if (labels == IGNORE_LABEL).all():
        return False, 0, 0
    found, plain = task.search(question, scores), task.search(question)
    right = found.tokens is not None and bool(((labels == IGNORE_LABEL) | (found.tokens == labels)).all())
    return right, found.nodes, plain.nodes


def _gather(parts: list[dict], seconds: float, count: int, processes: int) -> tuple[dict[str, np.ndarray], float]:
    """Gather the columns of all rows from all processes. Also return the time of the slowest process."""
    by_process, times = [parts], [seconds]
    if processes > 1:
        by_process, times = (gather_object([value]) for value in (parts, seconds))
    batches = [by_process[number % processes][number // processes] for number in range(count)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, max(times)


def _metrics(columns: dict[str, np.ndarray], seconds: float, difficulty: Mapping[str, Any]) -> dict[str, Any]:
    result = accuracies(columns["num_correct"], columns["num_labels"])
    rows, scored = len(columns["num_labels"]), columns["num_labels"] > 0
    columns = {name: value[scored] for name, value in columns.items()}
    right, steps = columns["num_correct"] == columns["num_labels"], columns["steps"]
    per_step = [share_of("of_step", exact) for exact in columns["exact"].T]
    result |= {
        "exact_accuracy_per_step": [step["of_step"] for step in per_step],
        "exact_accuracy_per_step_interval": [step["of_step_interval"] for step in per_step],
        "average_steps": float(steps.mean()),
        "steps_histogram": np.bincount(steps, minlength=len(per_step) + 1)[1:].tolist(),
        **share_of("q_halt_accuracy", (columns["q_halt"] >= 0) == right),
        **calibration(sigmoid(columns["q_halt"]), right),
        **trusted(sigmoid(columns["q_halt"]), right),
        "confidence_auroc": auroc(columns["q_halt"], right),
    }
    if "residual" in columns:
        result["stillness_auroc"] = auroc(-columns["residual"], right)
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


def _validate_arrays(config, input_ids, labels, puzzle_identifiers) -> list[np.ndarray]:
    count = len(input_ids)
    identifiers = np.zeros(count, dtype=np.int64) if puzzle_identifiers is None else np.asarray(puzzle_identifiers)
    arrays, expected = [np.asarray(input_ids), np.asarray(labels), identifiers], (count, config.seq_len)
    for name, array in zip(("input_ids", "labels"), arrays):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; expected {expected} (rows, config.seq_len)")
    if not count:
        raise ValueError("input_ids has no rows, so there are no puzzles to evaluate")
    if len(identifiers) != count:
        raise ValueError(f"puzzle_identifiers has {len(identifiers)} entries for {count} rows; expected one per row")
    limits = (config.vocab_size, config.num_puzzle_identifiers if config.puzzle_emb_ndim else math.inf)
    if arrays[1].max() == IGNORE_LABEL:
        raise ValueError(f"none of the {count} rows has a label (all are {IGNORE_LABEL}), so none can be scored")
    for name, values, limit in zip(("input_ids", "puzzle_identifiers"), (arrays[0], identifiers), limits):
        if values.max() >= limit:
            raise ValueError(f"{name} contain {values.max()}: must be < {limit}; use data that fit the model")
    return arrays


def correct_cells(predictions: Any, labels: Any) -> tuple[Any, Any]:
    """Count correct and labeled cells in token ids [..., S] (arrays or tensors), ignoring labels of -100."""
    labeled = labels != IGNORE_LABEL
    return ((predictions == labels) & labeled).sum(-1), labeled.sum(-1)


def accuracies(num_correct: Sequence[int] | np.ndarray, num_labels: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Compute cell_accuracy, exact_accuracy and the number of rows from the counts [N] of `correct_cells`.

    As in the original code, cell accuracy is the mean over rows of each row's fraction of correct cells. Rows
    without labels are ignored. Raise ValueError if no row has labels.
    """
    num_correct, num_labels = np.asarray(num_correct), np.asarray(num_labels)
    kept = num_labels > 0
    if not kept.any():
        raise ValueError(f"none of the {len(kept)} rows has a label (all are {IGNORE_LABEL}), so none can be scored")
    share = num_correct[kept] / num_labels[kept]
    return {
        "cell_accuracy": float(share.mean()),
        **share_of("exact_accuracy", num_correct[kept] == num_labels[kept]),
        "count": int(kept.sum()),
    }


def share_of(name: str, flags: Any) -> dict[str, Any]:
    """Return `{name: fraction of True values, name_interval: [low, high]}` for bool `flags` [N], N >= 1."""
    right = int(np.sum(flags))
    return {name: right / len(flags), f"{name}_interval": list(wilson_interval(right, len(flags)))}


def accuracy_by_difficulty(difficulty: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Compute the exact accuracy in bins of a difficulty measure, in ascending order of the measure.

    Up to `MOST_VALUES` distinct values get one bin each; more share at most `NUM_BINS` bins of similar size.

    Args:
        difficulty: Difficulty of each puzzle [N]. right: Whether each puzzle was solved, bool [N].

    Returns:
        `[{"low", "high", "count", "exact_accuracy", "exact_accuracy_interval"}, ...]`; low and high are inclusive.
    """
    difficulty = np.asarray(difficulty, dtype=float)
    lowest = np.unique(difficulty)
    if len(lowest) > MOST_VALUES:
        lowest = np.unique(np.quantile(difficulty, np.arange(NUM_BINS) / NUM_BINS, method="higher"))
    bins = np.searchsorted(lowest, difficulty, side="right") - 1
    table = []
    for inside in (bins == number for number in range(len(lowest))):
        ends = {"low": float(difficulty[inside].min()), "high": float(difficulty[inside].max())}
        table.append({**ends, "count": int(inside.sum()), **share_of("exact_accuracy", right[inside])})
    return table


def with_bounds(metrics: dict[str, Any]) -> dict[str, Any]:
    """Split exact_accuracy's interval into two numbers, since logs and cards accept only numbers."""
    bounds = metrics.get("exact_accuracy_interval") or ()
    return metrics | dict(zip(("exact_accuracy_low", "exact_accuracy_high"), bounds))


def calibration(confidence: np.ndarray, right: np.ndarray, num_bins: int = CALIBRATION_BINS) -> dict[str, Any]:
    """Compute a reliability table and the expected calibration error for confidences [N].

    `right`, bool [N], tells whether each answer is correct. The result is
    `{"reliability": [{"low", "high", "count", "confidence", "accuracy", "accuracy_interval"}, ...], "ece": ...}`;
    confidence, accuracy and interval of empty bins are None.
    """
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    table, error = [], 0.0
    for i in range(num_bins):
        inside = bins == i
        row = {"low": i / num_bins, "high": (i + 1) / num_bins, "count": int(inside.sum())}
        means = (float(confidence[inside].mean()), float(right[inside].mean())) if inside.any() else (None, None)
        interval = wilson_interval(int(right[inside].sum()), row["count"])
        row |= {"confidence": means[0], "accuracy": means[1], "accuracy_interval": interval and list(interval)}
        table.append(row)
        error += abs(means[0] - means[1]) * row["count"] if inside.any() else 0.0
    return {"reliability": table, "ece": error / len(confidence)}


def auroc(score: np.ndarray, right: np.ndarray) -> float | None:
    """Compute the probability that a correct answer has a higher score [N] than a wrong one (ties count half).

    Return None if all answers are correct or all are wrong.
    """
    wrong, good = np.sort(score[~right]), score[right]
    if not len(wrong) or not len(good):
        return None
    below = np.searchsorted(wrong, good, "left") + np.searchsorted(wrong, good, "right")
    return float(below.mean() / 2 / len(wrong))


def trusted(confidence: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Find the lowest confidence at or above which at most 1 answer in 1,000 is wrong (Wilson's upper bound, 95 %).

    Return it as "sure_confidence", a value for the model's config, and the fraction of answers that reach it as
    "sure_fraction". They are None and 0 if no confidence qualifies, as always with fewer than 3,838 puzzles.
    """
    order = np.argsort(-confidence, kind="stable")
    wrong, ranked = np.cumsum(~right[order]), confidence[order]
    for last in np.flatnonzero(np.append(ranked[1:] < ranked[:-1], True))[::-1].tolist():
        if 1 - wilson_interval(int(last + 1 - wrong[last]), last + 1)[0] <= MOST_WRONG:
            return {"sure_confidence": float(ranked[last]), "sure_fraction": (last + 1) / len(right)}
    return {"sure_confidence": None, "sure_fraction": 0.0}


# ---- a checkpoint on a data set ----


def evaluate_checkpoint(options: EvaluatePuzzles, shared: bool = False) -> dict[str, Any]:
    """Evaluate a saved model on a data set (ARC: also pass@k) and return the content of results.json.

    With `shared`, all processes started by torchrun call this and share the rows; only the first one writes files.

    Raises:
        UsageError: If the device is missing or shared by all processes, or the data have no measure of difficulty.
        ModelError: If the model does not solve puzzles.
        ValueError: If the model does not fit the data, or the split has no puzzles.
    """
    config = load_config(options.model, PUZZLE_SOLVER)
    device = chosen_device(options.device)
    info, dataset = _open(options.data, options.split)
    known = load_identifiers(options.model) if config.puzzle_emb_ndim else None
    _validate_fit(config, info, known, options)
    if options.limit:
        dataset = dataset.select(range(min(options.limit, len(dataset))))
    place = f"{options.data}, split {options.split!r}"
    try:
        rows = PuzzleRows(dataset)
        identifiers, names = _match_rows(rows.puzzle_identifiers, info.identifiers, known, options.model)
        _validate_arrays(config, rows.input_ids, rows.labels, identifiers)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    task = puzzle_task(config)
    difficulty = _difficulty(task, dataset, rows, place) if options.by_difficulty else None
    voting = task.voting(options.data, names)
    with _process_group(device, shared) as (device, is_first):
        network = load_network(options.model, AutoModelForPuzzleSolving).to(device)
        metrics = evaluate_puzzles(
            network,
            rows.input_ids,
            rows.labels,
            identifiers,
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
        metrics |= voting.result()
    result = {
        "task": info.task,
        "model": options.model,
        "dataset": options.data,
        "split": options.split,
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    return result | (_write_files(result, options) if is_first else {})


def _write_files(result: dict[str, Any], options: EvaluatePuzzles) -> dict[str, str]:
    """Write the requested files and return their names."""
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
    """Yield the device and whether this is the main process. At the end, destroy a process group created here."""
    if not shared:
        yield device, True
        return
    if torch.device(device).index is not None:
        raise UsageError(f"device={device}: each process selects its own device; use cuda or cpu", "--device")
    is_new = not PartialState._shared_state
    state = PartialState(cpu=device == "cpu")
    yield str(state.device), state.is_main_process
    state.wait_for_everyone()
    if is_new:
        state.destroy_process_group()
        PartialState._reset_state()


def _validate_fit(config, info: PuzzleInfo, known: list[str] | None, options: EvaluatePuzzles) -> None:
    """Raise ValueError unless model and data match. `known` are the row names of the model's table."""
    names = ["seq_len", "vocab_size"]
    names += ["task"] if config.task != "generic" else []
    names += ["num_puzzle_identifiers"] if config.puzzle_emb_ndim and known is None else []
    pairs = [(name, getattr(config, name), info.config_fields()[name]) for name in names]
    if wrong := [f"{name} ({ours} and {theirs})" for name, ours, theirs in pairs if ours != theirs]:
        differ = f"they differ in {', '.join(wrong)}"
        raise ValueError(f"{options.model} does not fit {options.data}: {differ}; use data made for the model")


def _match_rows(
    identifiers: np.ndarray, names: list[str], known: list[str] | None, model: str
) -> tuple[np.ndarray, list[str]]:
    """Map the data's identifiers to table rows by name, and return the mapped identifiers and the row names."""
    if known is None or known == names:
        return identifiers, names
    places, named = dict(enumerate(match_identifiers(names, known))), dict(enumerate(names))
    if missing := [str(named.get(each, each)) for each in np.unique(identifiers).tolist() if places.get(each) is None]:
        raise ValueError(
            f"{model} has no row in its puzzle table for {len(missing)} of the puzzles: {', '.join(missing[:5])}; "
            "evaluate on puzzles that the model was trained on"
        )
    return np.array([place or 0 for place in places.values()])[identifiers], known


def _open(data: str, split: str) -> tuple[PuzzleInfo, Any]:
    """Load the info and one split of a data set in our layout or the original layout."""
    if not is_original(data):
        info = load_puzzle_info(data)
        return info, load_puzzle_dataset(data, split)
    splits, info = read_original(data, only=split)
    if split not in splits:
        raise ValueError(f"{data} has no split {split!r}; in the original layout, use train or test")
    return info, splits[split]


def _difficulty(task: PuzzleTask, dataset, rows: PuzzleRows, place: str) -> dict[str, Any]:
    """Return the columns that measure each row's difficulty, or raise UsageError if there are none."""
    found = {name: np.asarray(dataset[name][:]) for name in DIFFICULTY_COLUMNS if name in dataset.column_names}
    found |= task.difficulty(rows.input_ids)
    if not found:
        text = f"{place}: by_difficulty needs a column {' or '.join(DIFFICULTY_COLUMNS)} for task {task.name!r}"
        raise UsageError(f"{text}; add one of these columns, or remove the option", "--by-difficulty")
    return found


def _vote(voting: Any, input_ids, puzzle_identifiers, solution: PuzzleSolution) -> None:
    predictions, q_halt = solution.predictions.cpu().numpy(), solution.q_halt.float().cpu().numpy()
    voting.update(input_ids.numpy(), puzzle_identifiers.numpy(), predictions, q_halt)
