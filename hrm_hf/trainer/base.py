"""`HrmTrainer`: transformers' Trainer for recursive models, and the base class of all our trainers.

It adds:

- AdamATan2, and the learning-rate schedule of the original HRM code;
- skipping steps with a non-finite loss or gradient, on all processes; the run stops if they persist;
- a moving average of the weights, which is evaluated and saved instead of the raw weights;
- metrics averaged over all counted items across processes, in logs and evaluations;
- support for data of unknown length, and for processes that run out of data at different times;
- resuming a killed run with the same losses (`saving.py` writes and pushes complete checkpoints).

`PuzzleTrainer`, `CausalLMTrainer` and `RegressionTrainer` are in the `trainer.py` of each task. Everything else
(accumulation, DDP, precision, integrations) is inherited from Trainer.
"""

import os
import sys
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, SchedulerType, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback, TrainerState

from ..hub.manifests import WEIGHT_AVERAGE_FILE, readable
from ..io.usage import counted
from ..registry import architecture_of
from .adapters import MAGNITUDE
from .logging import LastStepCallback, LogLineCallback, MetricAccumulator, OriginalNamesCallback, gpu_memory
from .optim import AdamATan2, WeightAverage, cosine_with_min_ratio
from .preemption import PreemptionCallback, keep_workers
from .recipes import CarrylessTrainingArguments, HrmTrainingArguments
from .saving import CompleteCheckpoints, NonFiniteError


NONFINITE = "nonfinite_steps"  # key in the trainer's state for the numbers of skipped steps (total, consecutive)


class HrmTrainer(CompleteCheckpoints, Trainer):
    """Base class of all trainers. The module's docstring lists what it adds to Trainer.

    Each task's subclass computes the loss and the sums for metrics (`compute_loss`, `_get_num_items_in_batch`), turns
    the sums into metrics (`_training_logs`, `_evaluation_means`), and rejects invalid options (`validate_arguments`).

    Args:
        args: an instance of `arguments_class`.
    """

    arguments_class: ClassVar[type[HrmTrainingArguments]] = HrmTrainingArguments
    pipeline: ClassVar[str]  # name of the pipeline whose models this trainer accepts
    log_format: ClassVar[dict[str, str]] = {}  # format of each value in a progress line, in order
    average: WeightAverage | None = None
    compile_options: dict[str, Any] | None = None  # arguments of `torch.compile`, with --torch_compile
    _eval_metrics: MetricAccumulator | None = None
    _step_loss: torch.Tensor | float = 0.0
    _ended: Any = None
    _grad_norm: torch.Tensor | None = None

    def __init__(self, model: Any = None, args: HrmTrainingArguments | None = None, **kwargs: Any):
        if not isinstance(args, self.arguments_class):
            name = self.arguments_class.__name__
            raise TypeError(f"args is a {type(args).__name__}; {type(self).__name__} requires {name}")
        row = architecture_of(model)
        if row is not None and row.pipeline != self.pipeline:
            name = f"model: {type(model).__name__} is for {row.pipeline}"
            raise TypeError(f"{name}, but {type(self).__name__} trains models for {self.pipeline}")
        self.nonfinite_steps = self.nonfinite_in_a_row = 0
        self.train_metrics = MetricAccumulator()
        if args.torch_compile:
            validate_compiler(args.device)
        self.prepare_model(model, args)
        self.cache_at_inference = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(model=model, args=args, **kwargs)
        self.validate_arguments()
        self.preemption = PreemptionCallback()
        self.add_callback(self.preemption)
        self.add_callback(LastStepCallback())
        self.add_callback(OriginalNamesCallback(self))
        if self.pop_callback(ProgressCallback):
            self.add_callback(LogLineCallback(self.log_format))
        if isinstance(args, CarrylessTrainingArguments) and args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_threshold))

    def prepare_model(self, model: Any, args: HrmTrainingArguments) -> None:
        """Prepare the model for the run's options, before Trainer's constructor runs."""

    def compile_part(self, compile_it: Callable[..., None], args: HrmTrainingArguments) -> None:
        """Compile only the part of the model that training repeats, instead of the complete forward pass."""
        torch._dynamo.config.optimize_ddp = False  # True would split the compiled graph at DDP's buckets
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        self.compile_options = {name: value for name, value in options.items() if value is not None}
        compile_it(**self.compile_options)
        # Unset Trainer's compile options, because it compiles the complete forward pass if a backend is set.
        args.torch_compile, args.torch_compile_backend, args.torch_compile_mode = False, None, None

    def validate_arguments(self) -> None:
        """Raise ValueError for options that do not fit this trainer or model."""
        args = self.args
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process, but DataParallel is not supported: start one process "
                f"per GPU (torchrun --nproc_per_node {args.n_gpu}) or set CUDA_VISIBLE_DEVICES"
            )
        if args.ema_rate and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"ema_rate={args.ema_rate}: the average of sharded weights cannot be saved; use DDP, or --ema_rate 0"
            )

    # ---- optimizer ----

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: HrmTrainingArguments, model=None) -> tuple[Any, Any]:
        """Return AdamATan2 if `adam_atan2` is set, else Trainer's optimizer. Both use `args.peak_learning_rate`."""
        if args.adam_atan2:
            return AdamATan2, {"lr": args.peak_learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return optimizer_class, options | {"lr": args.peak_learning_rate}

    def new_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create the configured optimizer for parameter groups, each with its own weight decay."""
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer_cls_and_kwargs = kind, options | {"params": groups}
        return Trainer.create_optimizer(self)

    def get_decay_parameter_names(self, model) -> list[str]:
        """Exclude vectors and scalars from weight decay, because scales and gates must not decay to zero."""
        sizes = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False)}  # includes tied weights
        return [n for n in super().get_decay_parameter_names(model) if sizes[n] >= 2 and MAGNITUDE not in n]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Create the scheduler. For "cosine", use the warm-up and minimum rate of the original HRM code."""
        is_ours = self.args.lr_scheduler_type == SchedulerType.COSINE and self.args.lr_min_ratio is not None
        if is_ours and self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            factor = cosine_with_min_ratio(warmup, num_training_steps, self.args.lr_min_ratio)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # ---- steps, and skipping non-finite ones ----

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Run one micro-batch. After the last one of a step, check that loss and gradients are finite.

        Only the last micro-batch returns a loss, the loss of the complete step. A skipped step therefore adds
        nothing to Trainer's running sum.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = self._step_loss + loss.float()
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        loss, self._step_loss = self._step_loss, 0.0
        return self._close_step(loss)

    def _close_step(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a step after its last backward pass, or zero if the step is skipped."""
        if self._dropped_as_nonfinite(loss):
            self.train_metrics.drop()
            return torch.zeros_like(loss)
        self.train_metrics.keep()
        return loss

    def _dropped_as_nonfinite(self, loss: torch.Tensor) -> bool:
        """Drop a step's gradients on all processes if loss or gradients are not finite on any of them.

        The fp16 loss scaler handles infinite gradients itself. DeepSpeed has already updated the weights by now, so
        the check can only stop the run.
        """
        self._grad_norm = None
        can_drop = self.accelerator.scaler is None and not self.is_deepspeed_enabled
        if can_drop:
            self._grad_norm = _total_norm(self.model, loss)
        bad = ~torch.isfinite(loss if self._grad_norm is None else loss + self._grad_norm)
        if self.args.world_size > 1:
            bad = self.accelerator.reduce(bad.float(), "sum") > 0
        if not bad.item():
            self.nonfinite_in_a_row = 0
            return False
        if can_drop:
            self.optimizer.zero_grad()
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row >= self.args.max_nonfinite_steps:
            norm = "unknown" if self._grad_norm is None else self._grad_norm.item()
            raise NonFiniteError(
                f"loss or gradients were not finite in {self.nonfinite_in_a_row} steps in a row, the last at step "
                f"{self.state.global_step + 1} (loss {loss.item()}, gradient norm {norm}, learning "
                f"rate {self._get_learning_rate():.3g}). "
                + ("" if self.is_deepspeed_enabled else "The weights are from the last good step. ")
                + "Lower the learning rate, check the data for extreme values, or resume from an earlier checkpoint"
            )
        return True

    def _clip_grad_norm(self, model):
        """Clip gradients, reusing the norm that the finiteness check computed."""
        if self._grad_norm is None:
            return super()._clip_grad_norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, self._grad_norm)
        return self._grad_norm

    def _get_grad_norm(self, model, grad_norm=None):
        return super()._get_grad_norm(model, grad_norm) if self._grad_norm is None else self._grad_norm

    # ---- logging and evaluation ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss components, metrics, speed, GPU memory and the number of skipped steps to the log."""
        if "loss" in logs:
            sums, steps, seconds = self.train_metrics.drain(self.accelerator, self.state.global_step)
            logs |= self._training_logs(sums, steps, seconds) | gpu_memory(self.accelerator)
            rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            logs |= {"steps_per_second": steps / seconds, "samples_per_second": steps * rows / seconds}
            if self.nonfinite_steps:
                logs["nonfinite_steps"] = self.nonfinite_steps
        super().log(logs, start_time)

    def evaluation_loop(self, dataloader, description, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        """Evaluate the averaged weights, and add our metrics, averaged over the data of all processes.

        `PREFIX_loss` is also such a mean, and excludes the trainer's label smoothing.
        """
        self._eval_metrics, smoother = MetricAccumulator(), self.label_smoother
        self.label_smoother = None
        try:
            with self.train_metrics.paused(), self.averaged_weights():
                kwargs["metric_key_prefix"] = metric_key_prefix
                output = super().evaluation_loop(dataloader, description, *args, **kwargs)
                self._eval_metrics.keep()
                sums, _, _ = self._eval_metrics.drain(self.accelerator, 0)
        finally:
            self._eval_metrics, self.label_smoother = None, smoother
        if sums:
            output.metrics.update(self._evaluation_means(sums, metric_key_prefix))
        return output

    def _rows_that_count(self, rows: int) -> int:
        """Count the rows in this process's batch, excluding those that accelerate repeats to fill it."""
        batches = self.accelerator.gradient_state
        if self.args.world_size == 1 or not batches.end_of_dataloader or batches.remainder < 1:
            return rows
        return min(max(batches.remainder - self.args.process_index * rows, 0), rows)

    # ---- data, saving and resuming ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Fetch a step's batches, and end the epoch on all processes when one of them cannot fill a step.

        Otherwise processes would wait for each other forever, and the gradients of an unfinished step would be added
        to the first step of the next epoch.
        """
        if epoch_iterator is self._ended:
            return [], None
        batches = list(islice(epoch_iterator, num_batches))
        filled = torch.tensor(float(len(batches) == num_batches), device=device)
        if self.args.world_size > 1:
            filled = self.accelerator.reduce(filled, "mean")
        if filled.item() < 1:
            self._ended = epoch_iterator
            return [], None
        if hasattr(self.data_collator, "at_step"):  # select or augment rows, depending on the step
            batches = [self.data_collator.at_step(batch, self.state.global_step) for batch in batches]
        return batches, self._get_num_items_in_batch(batches, device)

    def _init_training_state(self, max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial):
        """Find where to resume in data of unknown length, which Trainer treats as a single endless epoch."""
        epochs, batches = super()._init_training_state(
            max_steps, steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or num_train_epochs != sys.maxsize:
            return epochs, batches
        saved = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
        # If the epoch length is unknown, `epoch` is finished epochs + (steps in the current epoch) / max_steps.
        batches = round(saved.epoch % 1 * saved.max_steps * self.args.gradient_accumulation_steps)
        return int(saved.epoch), 0 if self.args.ignore_data_skip else batches

    def _get_dataloader(self, *args: Any, **kwargs: Any):
        loader = super()._get_dataloader(*args, **kwargs)
        keep_workers(loader)
        return loader

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not any(p.requires_grad for p in self.model.parameters()):
            # DDP rejects models without trainable parameters. The puzzle table is a buffer, which its optimizer syncs.
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.remove_callback(WeightAverage)
        if self.args.ema_rate:
            self.average = WeightAverage(self.model, self.args.ema_rate)
            self.add_callback(self.average)
        if resume_from_checkpoint is not None:
            with readable(resume_from_checkpoint, "a file of this package", values_too=False):
                self._load_own_state(Path(resume_from_checkpoint))
        self.train_metrics.restart(self.state.global_step)
        return prepared

    def _load_own_state(self, folder: Path) -> None:
        """Restore our part of the training state, such as the weight average, from a checkpoint."""
        if not any(folder.glob("rng_state*.pth")):
            raise ValueError(
                f"{folder} contains only weights (save_only_model), so it cannot be resumed; start a new run from "
                "its weights with --model_name_or_path"
            )
        saved_average = folder / WEIGHT_AVERAGE_FILE
        if self.average is not None and not saved_average.exists():
            raise ValueError(
                f"ema_rate={self.args.ema_rate}: {folder} was saved without a weight average; resume with "
                "--ema_rate 0, or start a new run from its weights with --model_name_or_path"
            )
        if self.average is not None:
            self.average.load(load_file(saved_average))
        elif saved_average.exists():
            warnings.warn(f"{folder} has a weight average, which this run drops because ema_rate is 0", stacklevel=2)
        self.nonfinite_steps, self.nonfinite_in_a_row = self.state.stateful_callbacks.get(NONFINITE, (0, 0))
        self._restore_data_position(folder)
        stopping = self.state.stateful_callbacks.get(EarlyStoppingCallback.__name__)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback) and stopping:
                callback.early_stopping_patience_counter = stopping["attributes"]["early_stopping_patience_counter"]

    def _restore_data_position(self, folder: Path) -> None:
        """Warn if resuming may skip the wrong batches because the number of processes has changed."""
        saved = len(list(folder.glob("rng_state*.pth")))
        if saved != self.args.world_size:
            warnings.warn(
                f"{folder} was saved by {counted(saved, 'process', 'processes')}, but this run has "
                f"{self.args.world_size}: random numbers will differ, and so will the data unless the total batch "
                "size is the same",
                stacklevel=2,
            )

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the averaged weights and the number of skipped steps along with the random state."""
        super()._save_rng_state(output_dir)
        if self.args.should_save and self.average is not None:
            save_file(self.average.shadow, os.path.join(output_dir, WEIGHT_AVERAGE_FILE))
        self.state.stateful_callbacks[NONFINITE] = [self.nonfinite_steps, self.nonfinite_in_a_row]

    def _save_checkpoint(self, model, trial) -> None:
        with self.train_metrics.paused():
            super()._save_checkpoint(model, trial)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best = Path(self.state.best_model_checkpoint or "") / WEIGHT_AVERAGE_FILE
        if self.average is not None and best.exists():
            self.average.load(load_file(best))


def _total_norm(model: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of all gradients, across all shards of the model."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        return torch.zeros_like(like)
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def validate_compiler(device: torch.device) -> None:
    """Raise RuntimeError if a CPU run has no C++ compiler for torch.compile."""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise RuntimeError(
            "torch_compile=True: torch.compile needs a C++ compiler on the CPU; install g++ (Debian: apt install "
            "g++), or remove --torch_compile"
        ) from error
