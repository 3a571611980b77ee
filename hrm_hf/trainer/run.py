"""`run_training`: all that a training script does once its options are read; and the folder of a run.

    options = parse_script((PuzzleDataArguments, PuzzleTrainingArguments), __doc__)
    run_training(PuzzleRun(*options))

Each task overrides methods of `TrainingRun`, called in the order in which they stand there.

A run locks its folder while it writes, and has an id, which is in the manifest of each of its checkpoints and which a
resumed run keeps. A new run does not start where checkpoints are, unless it is told to delete them.

The lock is `flock`, by the library filelock, of the first process of a run; the kernel releases it with the process.
Local file systems and NFS from version 4 on have it between machines, Lustre only if it is mounted with `flock`. A
file system without locks gets a warning, and local locks only keep out runs of the same machine.
"""

import contextlib
import copy
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from filelock import FileLock
from transformers import BitsAndBytesConfig, IntervalStrategy, PreTrainedModel, Trainer, TrainerCallback

from ..hub.cards import record_evaluation
from ..hub.kinds import Kind, load_config
from ..hub.manifests import CheckpointError, list_checkpoints, resolve_checkpoint, run_id_of, step_of
from ..io.files import lock_folder
from ..io.usage import counted, validate_extra
from ..registry import architecture_of
from .adapters import quantization_config, save_trained, settle_base, with_adapters
from .optim import WITHOUT_WARMUP
from .preemption import exit_if_preempted
from .recipes import ModelArguments, TuningArguments, hardware_of, save_recipe, write_results


TRACKERS = {"tensorboard", "trackio", "wandb"}  # each is an extra, a value of --report_to and a module
LOCK_FILE = ".run.lock"
_held_to_the_end: list[FileLock] = []  # a lock that nobody refers to is released

Found = TypeVar("Found")


class TrainingRun:
    """One run of a script, from its options; each task has a subclass.

    Attributes:
        task: its name in results.json.
        kind: kind of model that saved weights must be.
        train, validation: the data, set by `load_data`; None without.
        parameters: sizes of the model, for results.json.
    """

    task: str
    kind: Kind
    train: Any = None
    validation: Any = None
    parameters: dict[str, int]

    def __init__(
        self, model_args: ModelArguments, data_args: Any, args: Any, tuning_args: TuningArguments, *others: Any
    ):
        self.model_args, self.data_args, self.args, self.tuning_args = model_args, data_args, args, tuning_args
        self.options = (model_args, data_args, args, tuning_args, *others)
        self.out = Path(args.output_dir)

    def validate_options(self) -> None:
        """Raises ValueError for options that do not go together, before any work."""

    def load_data(self) -> None:
        """Sets `train` and `validation`. Called by all processes."""
        raise NotImplementedError

    def skip_evaluation(self) -> None:
        """Turn off evaluation while training, for a run without held-out data. Called by all processes.

        Raises:
            ValueError: the run needs evaluations, to stop or to choose its best checkpoint.
        """
        args = self.args
        needing = ("early_stopping_patience", "load_best_model_at_end")
        if name := next((name for name in needing if getattr(args, name, None)), None):
            raise ValueError(f"{name}={getattr(args, name)}: needs held-out data; give some, or leave it out")
        if args.should_save and args.eval_strategy != IntervalStrategy.NO:
            print(f"no held-out data: the run does not evaluate (eval_strategy={args.eval_strategy.value} is ignored)")
        args.eval_strategy, args.eval_on_start = IntervalStrategy.NO, False

    def load_model(self, quantized: BitsAndBytesConfig | None) -> PreTrainedModel:
        """A fresh model for the data, or saved weights."""
        raise NotImplementedError

    def count_parameters(self, model: PreTrainedModel) -> dict[str, int]:
        """Sizes of the model, for results.json."""
        return {"parameters": model.num_parameters()}

    def describe(self) -> str:
        """Returns the text to print before training."""
        raise NotImplementedError

    def save_options(self) -> None:
        """Writes recipe.yaml, and other files that the saved model needs. Called by processes that save."""
        save_recipe(self.out / "recipe.yaml", *self.options)

    def make_trainer(self, model: Any) -> Trainer:
        """The trainer of a model that may have an adapter."""
        raise NotImplementedError

    def before_saving(self, trainer: Any) -> None:
        """Changes a trained model before it is saved, if needed. Called by all processes."""

    def evaluate(self, trainer: Any) -> dict[str, Any]:
        """Metrics of held-out data. Called by all processes, with the model saved."""
        metrics = trainer.evaluate() if self.validation is not None and self.args.do_eval is not False else {}
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    def results(self, trainer: Any, metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The metrics of results.json, and its other fields. Called by the first process, like the following."""
        return metrics, {}

    def plot(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Draws what can be drawn of the run."""

    def record(self, metrics: dict[str, Any]) -> None:
        """Writes metrics, if there are any, into the card of a complete checkpoint of ours."""
        if metrics:
            record_evaluation(self.out, **self.card_entry(metrics))

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `record_evaluation`: metrics, data set, split, parameters and settings."""
        raise NotImplementedError


class SaveOptionsCallback(TrainerCallback):
    """Saves the options of a run when it begins; if it cannot resume, those of the earlier run stay."""

    def __init__(self, run: TrainingRun):
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        if args.should_save:
            self.run.save_options()


def run_training(run: TrainingRun) -> None:
    """Train, and leave model, results, plots and card in the run's folder."""
    model_args, args, tuning_args = run.model_args, run.args, run.tuning_args
    claim_run_folder(args)
    settle_base(model_args, tuning_args)
    for tracker in TRACKERS.intersection(args.report_to):  # the library notices it when the data have been read
        validate_extra(tracker, f"report_to={tracker} needs {tracker}", tracker, instead="--report_to none")
    run.validate_options()
    if model_args.model_name_or_path:
        load_config(model_args.model_name_or_path, run.kind)
    run.load_data()
    if run.validation is None:
        run.skip_evaluation()
    model = run.load_model(quantization_config(tuning_args, model_args.model_name_or_path, bool(args.bf16)))
    run.parameters = run.count_parameters(model)  # before it may be sharded
    model = with_adapters(model, tuning_args)
    run.options = tuple(map(copy.copy, run.options))  # the trainer may turn options into what the model means by them
    if args.should_save:
        print(run.describe(), describe_options(args), sep="\n", flush=True)

    trainer = run.make_trainer(model)
    trainer.add_callback(SaveOptionsCallback(run))
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    exit_if_preempted(trainer)
    seconds = round(time.perf_counter() - started, 1)

    run.before_saving(trainer)
    is_complete = save_trained(trainer, tuning_args)
    metrics = run.evaluate(trainer)
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    metrics, others = run.results(trainer, metrics)
    about = {"train_seconds": seconds, "hardware": hardware_of(args), "steps": trainer.state.global_step}
    write_results(run.out, run.task, metrics, **about, epochs=trainer.state.epoch, **run.parameters, **others)
    run.plot(trainer, metrics)
    if is_complete and architecture_of(trainer.model) is not None:
        run.record(metrics)
    trainer.push_results()
    print(f"model, results and plots: {run.out}")


def describe_options(args: Any) -> str:
    """Return the main options as the run uses them, whether flags, a recipe or defaults gave them."""
    rate = getattr(args, "peak_learning_rate", args.learning_rate)
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if not args.warmup_steps or schedule in WITHOUT_WARMUP:
        warmup = "no warm-up"
    else:
        steps = args.warmup_steps
        warmup = f"warm-up {counted(int(steps), 'step') if steps >= 1 else f'{steps:.0%} of the run'}"
    factors = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    rows = f"{math.prod(factors):,} rows a step ({' x '.join(map(str, factors))}: device, accumulation, processes)"
    length = counted(args.max_steps, "step") if args.max_steps > 0 else f"num_train_epochs {args.num_train_epochs:g}"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
    rate = f"learning rate {rate:g} ({schedule}, {warmup})"
    return f"options: {length}, {rows}, {rate}, weight decay {args.weight_decay:g}, {precision}"


# ---- the folder of a run ----


def agreed(call: Callable[[], Found], is_first: bool) -> Found:
    """Calls `call` in the first process and returns its result, or raises its error, in all. A collective call."""
    found: list[Any] = [None, None]
    if is_first:
        try:
            found = [call(), None]
        except Exception as error:  # raised below, in all processes
            found = [None, error]
    value, error = broadcast_object_list(found)
    if error is not None:
        raise error
    return value


@contextlib.contextmanager
def held(output_dir: str | Path, is_first: bool) -> Iterator[None]:
    """Locks `output_dir` inside the block. A collective call, as it starts."""
    lock = _agreed_lock(output_dir, is_first)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def claim_run_folder(args: Any) -> None:
    """Locks the output folder of TrainingArguments until the process ends; scripts do it before they write.

    Raises:
        FolderInUseError: another run writes there.
        FileExistsError: it holds checkpoints, and the run is told neither to resume nor to delete them.
        OSError: it cannot be written.
    """
    is_first = args.process_index == 0
    lock = _agreed_lock(args.output_dir, is_first)
    if lock is not None:
        _held_to_the_end.append(lock)
    if not args.resume_from_checkpoint and not args.overwrite_output_dir:
        agreed(lambda: begin(args.output_dir, None), is_first)


def _agreed_lock(output_dir: str | Path, is_first: bool) -> FileLock | None:
    """The lock on a folder, acquired once more; None in other processes and where there are no locks."""
    locks: list[FileLock | None] = [None]
    names = LOCK_FILE, "run", "--output_dir"
    agreed(lambda: locks.insert(0, lock_folder(Path(output_dir), *names, again=True)), is_first)
    return locks[0]


def begin(
    output_dir: str | Path, wanted: str | bool | None, overwrite: bool = False
) -> tuple[str | None, str, list[Path]]:
    """Decides how a run starts in a folder; in the first process alone.

    If "last-complete" finds no complete checkpoint, the corrupted ones are renamed: they are not of the new run.

    Args:
        wanted: as in `resolve_checkpoint`.
        overwrite: a run that resumes from nothing here deletes what it finds.

    Returns:
        The checkpoint to resume from, None for a new run; the id of the run, which a resumed run keeps; checkpoints of
        an earlier run, which are deleted after the first step of this one.

    Raises:
        FileExistsError: checkpoints are there, and nothing says what to do with them.
        CheckpointError, FileNotFoundError: as in `resolve_checkpoint`; or checkpoints of two runs are there.
    """
    there = list_checkpoints(output_dir)
    problems: dict[Path, list[str]] = {}
    checkpoint = resolve_checkpoint(output_dir, wanted, problems)
    ids = {folder: run_id_of(folder) for folder in ([checkpoint, *there] if checkpoint else ())}
    run_id = next(filter(None, ids.values()), uuid.uuid4().hex)
    if overwrite and (checkpoint is None or Path(checkpoint).resolve().parent != Path(output_dir).resolve()):
        return checkpoint, run_id, there
    if checkpoint is None and wanted:
        for folder in there:
            aside = folder.with_name(f"damaged-{folder.name}-{run_id[:8]}")
            print(f"{folder} is corrupted ({problems[folder.resolve()][0]}): renamed to {aside.name}", flush=True)
            folder.rename(aside)
    elif checkpoint is None and there:
        raise FileExistsError(
            f"{output_dir} holds checkpoints of an earlier run ({'..., ' if len(there) > 3 else ''}"
            f"{', '.join(folder.name for folder in there[-3:])}), and a new one would mix with it. Continue that run "
            "with --resume_from_checkpoint last (or last-complete), delete its checkpoints with "
            "--overwrite_output_dir true, or choose another --output_dir"
        )
    others = [f"{folder.name} of run {ids[folder][:8]}" for folder in there if ids.get(folder) not in (None, run_id)]
    if others:
        raise CheckpointError(
            f"{output_dir} holds checkpoints of more than one run: {checkpoint} is of run {run_id[:8]}, but "
            f"{', '.join(others)}. Move one run's checkpoints elsewhere, or give another --output_dir; nothing was "
            "loaded"
        )
    return checkpoint, run_id, []


def rotate(folder: Path, run_id: str | None, limit: int | None, best: str | None) -> None:
    """Deletes checkpoints of a run until `limit` are left; `folder` is the one that was just written.

    Later steps, which a run that went back has left behind, go first, then the oldest. The best checkpoint stays,
    however its path is written, and so do checkpoints of other runs.
    """
    if not limit or limit < 0:
        return
    own = [one for one in list_checkpoints(folder.parent) if run_id_of(one) in (None, run_id)]
    old = [one for one in own if one.name not in (folder.name, Path(best or "").name)]
    old.sort(key=lambda one: step_of(one) <= step_of(folder))
    for one in old[: max(len(own) - limit, 0)]:
        shutil.rmtree(one, ignore_errors=True)
