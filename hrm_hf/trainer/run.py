"""`run_training`: all that a training script does, from its command line to the results in the run's folder.

    run_training(PuzzleRun, (PuzzleDataArguments, PuzzleTrainingArguments), __doc__)

What a task does its own way are the methods of its `TrainingRun`, called in the order in which they stand there.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import BitsAndBytesConfig, PreTrainedModel, Trainer

from ..hub.cards import record_evaluation
from ..hub.kinds import Kind, load_config
from ..io.usage import validate_extra
from ..registry import architecture_of
from .adapters import TuningArguments, quantization_config, save_trained, settle_base, with_adapters
from .preemption import exit_if_preempted
from .recipes import ModelArguments, hardware_of, parse_recipe, save_recipe, write_results
from .run_folder import claim_run_folder


TRACKERS = {"tensorboard", "trackio", "wandb"}  # each is an extra, a value of --report_to and a module


class TrainingRun:
    """One run of a script, from its options; a subclass in the room of its task says what is the task's.

    Attributes:
        task: what results.json calls it.
        kind: what saved weights have to be.
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
        """Writes recipe.yaml, and what else a model of the run is used with. Called by processes that save."""
        save_recipe(self.out / "recipe.yaml", *self.options)

    def make_trainer(self, model: Any) -> Trainer:
        """The trainer of a model that may have an adapter."""
        raise NotImplementedError

    def before_saving(self, trainer: Any) -> None:
        """Changes a trained model before it is saved, if needed. Called by all processes."""

    def evaluate(self, trainer: Any) -> dict[str, Any]:
        """Metrics of held-out data. Called by all processes, with the model saved."""
        metrics = trainer.evaluate() if self.validation is not None else {}
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    def results(self, trainer: Any, metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The metrics of results.json, and what else is in it. Called by the first process, like the following."""
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


def run_training(run_class: Any, arguments: Sequence[type], description: str | None) -> None:
    """Parses recipe and flags, trains, and leaves model, results, plots and card in the run's folder.

    Args:
        run_class: a `TrainingRun`, or what makes one of the options.
        arguments: classes of the data's and the training's options, then others.
        description: of the script, for --help.
    """
    data_class, training_class, *others = arguments
    options = parse_recipe(
        (ModelArguments, data_class, training_class, TuningArguments, *others), description=description or ""
    )
    run: TrainingRun = run_class(*options)
    model_args, args, tuning_args = run.model_args, run.args, run.tuning_args
    claim_run_folder(args)
    settle_base(model_args, tuning_args)
    for tracker in TRACKERS.intersection(args.report_to):  # the library notices it when the data have been read
        validate_extra(tracker, f"report_to={tracker} needs {tracker}", tracker, instead="--report_to none")
    run.validate_options()
    if model_args.model_name_or_path:
        load_config(model_args.model_name_or_path, run.kind)
    run.load_data()
    model = run.load_model(quantization_config(tuning_args, model_args.model_name_or_path, bool(args.bf16)))
    run.parameters = run.count_parameters(model)  # before it may be sharded
    model = with_adapters(model, tuning_args)
    if args.should_save:  # before the trainer, which may turn options into what the model means by them
        print(run.describe())
        run.save_options()

    trainer = run.make_trainer(model)
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
    write_results(
        run.out,
        run.task,
        metrics,
        train_seconds=seconds,
        hardware=hardware_of(args),
        steps=trainer.state.global_step,
        epochs=trainer.state.epoch,
        **run.parameters,
        **others,
    )
    run.plot(trainer, metrics)
    if is_complete and architecture_of(trainer.model) is not None:
        run.record(metrics)
    trainer.push_results()
    print(f"model, results and plots: {run.out}")
