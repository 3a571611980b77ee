"""Run a training script once its options are parsed (`run_training`), and manage the run's folder.

    options = parse_script((PuzzleDataArguments, PuzzleTrainingArguments), __doc__)
    run_training(PuzzleRun(*options))

Each task overrides methods of `TrainingRun`, which are called in the order of their definition.

A run locks its folder while it writes. The manifest of each checkpoint stores the run's id, which a resumed run
keeps. A new run does not start in a folder with checkpoints unless an option says to delete them.

The first process of a run holds the lock (`flock`, through the filelock library); the kernel releases it when the
process ends. NFS supports such locks across machines from version 4 on, Lustre only if mounted with `flock`. The run
warns if the file system has no locks. Locks that are local to a machine only keep out runs on that machine.
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
from .adapters import quantization_config, resolve_base_model, save_trained, with_adapters
from .optim import WITHOUT_WARMUP
from .preemption import exit_if_preempted
from .recipes import ModelArguments, TuningArguments, hardware_of, save_recipe, write_results


TRACKERS = {"tensorboard", "trackio", "wandb"}  # each is the name of an extra, a --report_to value and a module
LOCK_FILE = ".run.lock"
_locks_until_exit: list[FileLock] = []  # references that keep the locks from being released

Found = TypeVar("Found")


class TrainingRun:
    """Base class for a run of a training script. Each task has a subclass.

    Attributes:
        task: name of the task in results.json.
        kind: the kind of model that saved weights must be.
        train, validation: the data, set by `load_data`, or None.
        parameters: parameter counts for results.json.
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
        """Raise ValueError for options that contradict each other. Called before the data are loaded."""

    def load_data(self) -> None:
        """Set `train` and `validation`. Called in all processes."""
        raise NotImplementedError

    def skip_evaluation(self) -> None:
        """Turn off evaluation for a run without held-out data. Called in all processes.

        Raises:
            ValueError: the run needs evaluations for early stopping or to choose its best checkpoint.
        """
        args = self.args
        needing = ("early_stopping_patience", "load_best_model_at_end")
        if name := next((name for name in needing if getattr(args, name, None)), None):
            raise ValueError(f"{name}={getattr(args, name)}: requires held-out data; add some, or remove the option")
        if args.should_save and args.eval_strategy != IntervalStrategy.NO:
            print(f"eval_strategy={args.eval_strategy.value} is ignored, because there is no held-out data")
        args.eval_strategy, args.eval_on_start = IntervalStrategy.NO, False

    def load_model(self, quantized: BitsAndBytesConfig | None) -> PreTrainedModel:
        """Create a new model for the data, or load saved weights."""
        raise NotImplementedError

    def count_parameters(self, model: PreTrainedModel) -> dict[str, int]:
        """Return parameter counts for results.json."""
        return {"parameters": model.num_parameters()}

    def describe(self) -> str:
        """Return the text to print before training."""
        raise NotImplementedError

    def save_options(self) -> None:
        """Save recipe.yaml and other files that the model needs. Called only in processes that save."""
        save_recipe(self.out / "recipe.yaml", *self.options)

    def make_trainer(self, model: Any) -> Trainer:
        """Create the trainer for a model with or without an adapter."""
        raise NotImplementedError

    def before_saving(self, trainer: Any) -> None:
        """Change a trained model before it is saved, if necessary. Called in all processes."""

    def evaluate(self, trainer: Any) -> dict[str, Any]:
        """Return metrics on held-out data. Called in all processes, after the model is saved."""
        metrics = trainer.evaluate() if self.validation is not None and self.args.do_eval is not False else {}
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    def results(self, trainer: Any, metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return metrics and other fields for results.json. Only process 0 calls this and the methods below."""
        return metrics, {}

    def plot(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Plot the training history."""

    def record(self, metrics: dict[str, Any]) -> None:
        """Record the metrics, if any, in the model card. Called only for complete checkpoints."""
        if metrics:
            record_evaluation(self.out, **self.card_entry(metrics))

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for `record_evaluation`: metrics, data set, split, parameters and settings."""
        raise NotImplementedError


class SaveOptionsCallback(TrainerCallback):
    """Callback that saves the options once training begins, so a failed resume keeps the earlier options."""

    def __init__(self, run: TrainingRun):
        self.run = run

    def on_train_begin(self, args, state, control, **kwargs):
        if args.should_save:
            self.run.save_options()


def run_training(run: TrainingRun) -> None:
    """Train, and save the model, results, plots and model card in the run's folder."""
    model_args, args, tuning_args = run.model_args, run.args, run.tuning_args
    claim_run_folder(args)
    resolve_base_model(model_args, tuning_args)
    for tracker in TRACKERS.intersection(args.report_to):  # Trainer checks trackers only after loading the data
        validate_extra(tracker, f"report_to={tracker} requires {tracker}", tracker, instead="--report_to none")
    run.validate_options()
    if model_args.model_name_or_path:
        load_config(model_args.model_name_or_path, run.kind)
    run.load_data()
    if run.validation is None:
        run.skip_evaluation()
    model = run.load_model(quantization_config(tuning_args, model_args.model_name_or_path, bool(args.bf16)))
    run.parameters = run.count_parameters(model)  # counted before the trainer shards the model
    model = with_adapters(model, tuning_args)
    run.options = tuple(map(copy.copy, run.options))  # copies for recipe.yaml, as the trainer may change the originals
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
    try:
        metrics = run.evaluate(trainer)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"training is complete, and its model is saved in {run.out}") from None
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
    """Return a one-line summary of the run's main options, including those from recipes and defaults."""
    rate = getattr(args, "peak_learning_rate", args.learning_rate)
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if not args.warmup_steps or schedule in WITHOUT_WARMUP:
        warmup = "no warm-up"
    else:
        steps = args.warmup_steps
        warmup = f"warm-up {counted(int(steps), 'step') if steps >= 1 else f'{steps:.0%} of the run'}"
    factors = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    rows = f"{math.prod(factors):,} rows per step ({' x '.join(map(str, factors))}: device, accumulation, processes)"
    length = counted(args.max_steps, "step") if args.max_steps > 0 else f"num_train_epochs {args.num_train_epochs:g}"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
    rate = f"learning rate {rate:g} ({schedule}, {warmup})"
    return f"options: {length}, {rows}, {rate}, weight decay {args.weight_decay:g}, {precision}"


# ---- the folder of a run ----


def in_first_process(call: Callable[[], Found], is_first: bool) -> Found:
    """Run `call` in the first process, and return its result or raise its error in all processes."""
    found: list[Any] = [None, None]
    if is_first:
        try:
            found = [call(), None]
        except Exception as error:  # the error is raised below, in all processes
            found = [None, error]
    value, error = broadcast_object_list(found)
    if error is not None:
        raise error
    return value


@contextlib.contextmanager
def locked_folder(output_dir: str | Path, is_first: bool) -> Iterator[None]:
    """Lock `output_dir` during a `with` block, which all processes must enter together."""
    lock = _first_process_lock(output_dir, is_first)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def claim_run_folder(args: Any) -> None:
    """Lock the output folder until the process ends. Scripts call this before they write to it.

    Raises:
        FolderInUseError: another run is using the folder.
        FileExistsError: the folder contains checkpoints, and no option says to resume or to delete them.
        OSError: the folder is not writable.
    """
    is_first = args.process_index == 0
    lock = _first_process_lock(args.output_dir, is_first)
    if lock is not None:
        _locks_until_exit.append(lock)
    if not args.resume_from_checkpoint and not args.overwrite_output_dir:
        in_first_process(lambda: plan_start(args.output_dir, None), is_first)


def _first_process_lock(output_dir: str | Path, is_first: bool) -> FileLock | None:
    """Lock a folder in the first process. Return None in others, or if locks are not supported."""
    locks: list[FileLock | None] = [None]
    names = LOCK_FILE, "run", "--output_dir"
    in_first_process(lambda: locks.insert(0, lock_folder(Path(output_dir), *names, again=True)), is_first)
    return locks[0]


def plan_start(
    output_dir: str | Path, wanted: str | bool | None, overwrite: bool = False
) -> tuple[str | None, str, list[Path]]:
    """Decide whether a run starts from scratch in a folder or resumes there. Called only in the first process.

    If "last-complete" finds no complete checkpoint, corrupted ones are renamed to keep them out of the new run.

    Args:
        wanted: as in `resolve_checkpoint`.
        overwrite: delete existing checkpoints unless the run resumes from one of them.

    Returns:
        The checkpoint to resume from (None for a new run), the id of the run (unchanged on resuming), and an earlier
        run's checkpoints to delete after the first step of this run.

    Raises:
        FileExistsError: the folder contains checkpoints, and no option says what to do with them.
        CheckpointError, FileNotFoundError: see `resolve_checkpoint`; or the folder has checkpoints from several runs.
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
            f"{output_dir} contains checkpoints of an earlier run ({'..., ' if len(there) > 3 else ''}"
            f"{', '.join(folder.name for folder in there[-3:])}). Continue that run with --resume_from_checkpoint "
            "last (or last-complete), delete its checkpoints with --overwrite_output_dir true, or choose another "
            "--output_dir"
        )
    others = [f"{folder.name} of run {ids[folder][:8]}" for folder in there if ids.get(folder) not in (None, run_id)]
    if others:
        raise CheckpointError(
            f"{output_dir} contains checkpoints of several runs: {checkpoint} is from run {run_id[:8]}, but "
            f"{', '.join(others)}. Nothing was loaded. Move the checkpoints of one run elsewhere, or choose another "
            "--output_dir"
        )
    return checkpoint, run_id, []


def rotate(folder: Path, run_id: str | None, limit: int | None, best: str | None) -> None:
    """Delete checkpoints of a run until `limit` are left, but never `folder`, which is the newest one.

    If the run has gone back to an earlier checkpoint, the remaining later ones are deleted first, then the oldest.
    The best checkpoint and checkpoints of other runs are kept.
    """
    if not limit or limit < 0:
        return
    own = [one for one in list_checkpoints(folder.parent) if run_id_of(one) in (None, run_id)]
    old = [one for one in own if one.name not in (folder.name, Path(best or "").name)]
    old.sort(key=lambda one: step_of(one) <= step_of(folder))
    for one in old[: max(len(own) - limit, 0)]:
        shutil.rmtree(one, ignore_errors=True)
