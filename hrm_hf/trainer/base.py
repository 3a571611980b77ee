"""`HrmTrainer`: transformers' Trainer for models that think in steps. The only trainer of the package.

Here is what all of them share:

- AdamATan2 beside the library's optimizers, sign descent on puzzle rows, the original schedule;
- a step whose loss or gradient is not finite is skipped on all processes together, counted, and fatal if it persists;
- a moving average of weights, evaluated and saved in their place;
- a killed run resumes with the same losses; `saving.py` has what makes its checkpoints whole.

`puzzles/trainer.py` has the part for models with a carry (puzzles), `text/trainer.py` the part for models without
(causal language models), `cosmology/trainer.py` what regressors count instead of tokens, `pushing.py` the saved
and pushed model. Everything else (accumulation, DDP, precision, integrations) is the library's.
"""

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, SchedulerType, Trainer
from transformers.trainer_callback import ProgressCallback

from ..cosmology.trainer import RegressionTraining
from ..hub.manifests import NONFINITE_FILE, WEIGHT_AVERAGE_FILE, CheckpointError, readable
from ..puzzles.trainer import CarryTraining, adopt_precision_and_compile
from ..text.trainer import LmTraining, check_label_smoothing
from .adapters import MAGNITUDE, magnitudes, split_weight_decay_groups
from .arguments import (
    LOSS_WEIGHTS,
    CarrylessTrainingArguments,
    CosmoTrainingArguments,
    GoTrainingArguments,
    HrmTrainingArguments,
    LmTrainingArguments,
    PuzzleTrainingArguments,
)
from .callbacks import (
    COSMO_FIGURES,
    LM_FIGURES,
    PUZZLE_FIGURES,
    BackpropWarmupCallback,
    FigureProgressCallback,
    HaltingWarmupCallback,
    RefinementWarmupCallback,
    WeightAverageCallback,
)
from .logging import OriginalNamesCallback, gpu_memory
from .metric_accumulator import LossMeter
from .optim import AdamATan2, CompositeOptimizer, SignSGD, WeightAverage, cosine_with_min_ratio, embeddings_in_32_bits
from .preemption import PreemptionCallback, keep_workers
from .pushing import HubTraining
from .saving import NonFiniteError, WholeCheckpoints, broken_weights


class HrmTrainer(HubTraining, CarryTraining, RegressionTraining, LmTraining, WholeCheckpoints, Trainer):
    """Trainer for every architecture of the package; see the module's docstring for what it adds.

    Args:
        model: with `initial_carry` it is trained as a puzzle reasoner, with the problem type "regression" as a
            regressor, otherwise as a causal language model.
        args: `PuzzleTrainingArguments`, `CosmoTrainingArguments` or `LmTrainingArguments`.
        eval_bytes_per_token: bytes of text that a token of the evaluation data stands for on average, or a dict of
            them for a dict of evaluation sets; adds bits per byte to what is evaluated.
        kwargs: as in the library.
    """

    def __init__(
        self,
        model: Any = None,
        args: HrmTrainingArguments | None = None,
        eval_bytes_per_token: float | dict[str, float] | None = None,
        **kwargs: Any,
    ):
        self.has_carry = hasattr(model, "initial_carry")
        self.has_regression = getattr(getattr(model, "config", None), "problem_type", None) == "regression"
        wanted = CosmoTrainingArguments if self.has_regression else LmTrainingArguments
        wanted = PuzzleTrainingArguments if self.has_carry else wanted
        if not isinstance(args, wanted):
            raise TypeError(f"args is a {type(args).__name__}; {type(model).__name__} needs {wanted.__name__}")
        self.carry = self.average = None
        self.eval_bytes_per_token = eval_bytes_per_token
        self.nonfinite_steps = self.nonfinite_in_a_row = 0
        self.meter = LossMeter()
        self._resume_from: str | None = None
        self._grad_norm: torch.Tensor | None = None
        if args.torch_compile:
            require_compiler(args.device)
        if isinstance(args, GoTrainingArguments):
            override_loss_weights(model, args)
        if self.has_carry:
            adopt_precision_and_compile(model, args)
        self._cache_at_inference = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(model=model, args=args, **kwargs)
        self._refuse_what_is_not_supported()
        self.preemption = PreemptionCallback()
        self.add_callback(self.preemption)
        self.add_callback(OriginalNamesCallback(self))
        if self.has_carry:
            self.args.ignore_data_skip = True  # the stream restores its own position
        if self.has_regression:
            self.model_accepts_loss_kwargs, self.loss_is_scaled_for_ga = False, True  # see its compute_loss
        if self.pop_callback(ProgressCallback):
            figures = COSMO_FIGURES if self.has_regression else LM_FIGURES
            self.add_callback(FigureProgressCallback(PUZZLE_FIGURES if self.has_carry else figures))
        if isinstance(args, LmTrainingArguments):
            if args.bp_warmup_ratio and hasattr(self.model, "set_bp_steps"):
                self.add_callback(BackpropWarmupCallback(args.bp_warmup_ratio))
            if hasattr(self.model, "set_halting"):
                self.add_callback(HaltingWarmupCallback(args.halt_warmup_ratio))
            if isinstance(args, GoTrainingArguments) and hasattr(self.model, "set_refinement_scale"):
                self.add_callback(RefinementWarmupCallback(args.refinement_warmup, args.refinement_ramp))
        if isinstance(args, CarrylessTrainingArguments) and args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_threshold))

    def _refuse_what_is_not_supported(self) -> None:
        args = self.args
        if self.has_carry and args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}: one optimizer step is one "
                "ACT step on the carry, so raise per_device_train_batch_size instead"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process, and neither a carry nor loss components can be split: "
                f"start one process a GPU (torchrun --nproc_per_node {args.n_gpu}) or set CUDA_VISIBLE_DEVICES"
            )
        if args.ema_rate and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"ema_rate={args.ema_rate}: an average of sharded weights cannot be saved; train with DDP, or without"
            )
        if self.has_regression and args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor}: labels here are numbers, not classes"
            )
        if isinstance(args, LmTrainingArguments):
            check_label_smoothing(self.model, args.label_smoothing_factor)
            if args.lr_multipliers is not None and not hasattr(self.model, "parameter_group"):
                raise ValueError(
                    f"lr_multipliers={args.lr_multipliers}: {type(self.model).__name__} has no groups of parameters"
                )

    # ---- optimizer ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamATan2 or the library's optimizer; sign descent on the model's sparse rows, behind one interface."""
        args = self.args
        grouped = hasattr(self.model, "parameter_group")
        if self.optimizer is not None or not (args.adam_atan2 or grouped or hasattr(self.model, "optimizer_groups")):
            return super().create_optimizer(model)
        betas = (args.adam_beta1, args.adam_beta2)
        if not hasattr(self.model, "optimizer_groups"):
            groups = (self._named_groups if grouped else self._decay_groups)(model or self.model)
            if args.adam_atan2:
                self.optimizer = AdamATan2(groups, args.peak_learning_rate, betas)
            else:
                optimizer_class, options = self.get_optimizer_cls_and_kwargs(args, self.model)
                self.optimizer = optimizer_class(groups, **options)
                embeddings_in_32_bits(self.model, options)
            return self.optimizer
        dense = [dict(group) for group in self.model.optimizer_groups() if not group.get("sparse_rows")]
        dense = split_weight_decay_groups(dense, magnitudes(self.model))
        sparse = [dict(group) for group in self.model.optimizer_groups() if group.get("sparse_rows")]
        optimizers: list[torch.optim.Optimizer] = []
        if sparse:
            optimizers.append(SignSGD(sparse, lr=args.puzzle_emb_lr, weight_decay=args.puzzle_emb_weight_decay))
        if any(group["params"] for group in dense):
            if args.adam_atan2:
                optimizers.append(AdamATan2(dense, args.learning_rate, betas, args.weight_decay))
            else:
                optimizer_class, options = self.get_optimizer_cls_and_kwargs(args, self.model)
                optimizers.append(optimizer_class(dense, weight_decay=args.weight_decay, **options))
                embeddings_in_32_bits(self.model, options)
        if not optimizers:
            raise ValueError("nothing to train: every weight is frozen and the model has no puzzle table")
        self.optimizer = CompositeOptimizer(optimizers)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: HrmTrainingArguments, model=None) -> tuple[Any, Any]:
        """As in the library, with the learning rate that the arguments come to."""
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return optimizer_class, options | {"lr": args.peak_learning_rate}

    def _decay_groups(self, model) -> list[dict[str, Any]]:
        decayed = set(self.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": d} for d in (self.args.weight_decay, 0.0)]
        for name, p in model.named_parameters():
            if p.requires_grad:
                groups[name not in decayed]["params"].append(p)
        return [group for group in groups if group["params"]]

    def _named_groups(self, model) -> list[dict[str, Any]]:
        """The groups that a model names, each with its learning rate, with and without weight decay.

        "shared" comes first: the rate that is logged is that of the first group.
        """
        decayed = set(self.get_decay_parameter_names(model))
        multipliers = self.args.group_multipliers()
        groups: dict[tuple[str, bool], list[torch.nn.Parameter]] = {}
        owner: dict[torch.nn.Parameter, tuple[str, str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            group = self.model.parameter_group(name)
            if group not in multipliers:
                raise ValueError(f"{name} belongs to group {group!r}; there are {', '.join(multipliers)}")
            first, of = owner.setdefault(p, (group, name))
            if first != group:
                raise ValueError(f"one tensor is in two groups: as {of} in {first!r}, as {name} in {group!r}")
            if of == name and p.requires_grad:
                groups.setdefault((group, name in decayed), []).append(p)
        if not groups:
            raise ValueError("nothing to train: every weight is frozen")
        return [
            {
                "params": params,
                "lr": self.args.learning_rate * multipliers[group],
                "weight_decay": self.args.weight_decay if decay else 0.0,
            }
            for (group, decay), params in sorted(groups.items(), key=lambda item: (item[0][0] != "shared", item[0]))
        ]

    def get_decay_parameter_names(self, model) -> list[str]:
        """As in the library, but for vectors and scalars: a scale or gate must not be pulled to zero."""
        sizes = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False)}  # tied weights too
        return [n for n in super().get_decay_parameter_names(model) if sizes[n] >= 2 and MAGNITUDE not in n]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The original's warm-up and cosine with a floor, for lr_scheduler_type cosine."""
        if self.args.lr_scheduler_type != SchedulerType.COSINE or self.args.lr_min_ratio is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            factor = cosine_with_min_ratio(
                self.args.get_warmup_steps(num_training_steps), num_training_steps, self.args.lr_min_ratio
            )
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- steps that are not finite ----

    def _close_step(self, loss: torch.Tensor) -> torch.Tensor:
        """After the last backward pass of a step: its loss, or zero if the step is skipped.

        A NaN that is returned would stay in the library's running sum for good.
        """
        if self._dropped_as_nonfinite(loss):
            self.meter.drop()
            return torch.zeros_like(loss)
        self.meter.keep()
        return loss

    def _dropped_as_nonfinite(self, loss: torch.Tensor) -> bool:
        """Drops the gradients of a step that is not finite on some process, so that none updates.

        With a loss scaler (fp16), infinite gradients are its business, and it drops them by itself. DeepSpeed has
        updated already: there the guard can only stop the run.
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
                + self._state_of_weights()
                + "Lower the learning rate, look at the data for extreme values, or resume from an earlier checkpoint"
            )
        return True

    def _state_of_weights(self) -> str:
        if broken := broken_weights(dict(self.model.named_parameters())):
            return f"The weights are not finite after step {self.state.global_step} ({broken[0]}). "
        return "" if self.is_deepspeed_enabled else "The weights are those of the last good step. "

    def _clip_grad_norm(self, model):
        """By the norm that the finiteness check has computed already."""
        if self._grad_norm is None:
            return super()._clip_grad_norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, self._grad_norm)
        return self._grad_norm

    def _get_grad_norm(self, model, grad_norm=None):
        """The norm that the finiteness check has computed already."""
        return super()._get_grad_norm(model, grad_norm) if self._grad_norm is None else self._grad_norm

    # ---- logging and evaluation ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds loss components, metrics, speed of all processes, memory of GPUs and skipped steps to training logs."""
        if "loss" in logs:
            sums, steps, seconds = self.meter.drain(self.accelerator, self.state.global_step)
            logs |= self._training_logs(sums, steps, seconds) | gpu_memory(self.accelerator)
            rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            logs |= {"steps_per_second": steps / seconds, "samples_per_second": steps * rows / seconds}
            if self.nonfinite_steps:
                logs["nonfinite_steps"] = self.nonfinite_steps
        super().log(logs, start_time)

    @contextlib.contextmanager
    def averaged_weights(self):
        """The model holds its averaged weights inside the block, if there is an average."""
        if self.average is None:
            yield
            return
        self.average.swap()
        try:
            yield
        finally:
            self.average.swap()

    # ---- saving and resuming ----

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in the library, which takes a step too many when it resumes a run that is complete."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _get_dataloader(self, *args: Any, **kwargs: Any):
        loader = super()._get_dataloader(*args, **kwargs)
        keep_workers(loader)
        return loader

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not any(p.requires_grad for p in self.model.parameters()):
            # The puzzle table alone, whose optimizer talks to the other processes itself: DDP refuses such a model.
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.remove_callback(WeightAverageCallback)
        if self.args.ema_rate:
            self.average = WeightAverage(self.model, self.args.ema_rate)
            self.add_callback(WeightAverageCallback(self.average))
        self.carry = None
        if resume_from_checkpoint is not None:
            with readable(resume_from_checkpoint, "a file of this package", values_too=False):
                self._load_own_state(Path(resume_from_checkpoint))
        self.meter.restart(self.state.global_step)
        return prepared

    def _load_own_state(self, folder: Path) -> None:
        """Restores what the library does not know of."""
        if not (folder / NONFINITE_FILE).exists():
            raise ValueError(
                f"{folder} holds weights alone (save_only_model), so the run cannot continue from it: start anew from "
                "its weights with --model_name_or_path"
            )
        saved_average = folder / WEIGHT_AVERAGE_FILE
        if self.average is not None and not saved_average.exists():
            raise ValueError(
                f"ema_rate={self.args.ema_rate}, but {folder} was saved without an average of weights: resume with "
                "--ema_rate 0, or start anew from its weights with --model_name_or_path"
            )
        if self.average is not None:
            self.average.load(load_file(saved_average))
        elif saved_average.exists():
            warnings.warn(f"{folder} has an average of weights, which this run drops: ema_rate is 0", stacklevel=2)
        counts = json.loads((folder / NONFINITE_FILE).read_text())
        if not isinstance(counts, list) or [type(count) for count in counts] != [int, int]:
            raise CheckpointError(f"checkpoint {folder}: {NONFINITE_FILE} is {str(counts)[:40]}; expected two numbers")
        self.nonfinite_steps, self.nonfinite_in_a_row = counts
        saved = len(list(folder.glob("rng_state*.pth")))
        if saved != self.args.world_size and not self.has_carry:
            warnings.warn(
                f"{folder} was saved by {saved} processes, this run has {self.args.world_size}: it continues with "
                "other random numbers, and with other data unless the batch size over all processes is the same",
                stacklevel=2,
            )
        stopping = self.state.stateful_callbacks.get(EarlyStoppingCallback.__name__)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback) and stopping:
                callback.early_stopping_patience_counter = stopping["attributes"]["early_stopping_patience_counter"]
        if self.has_carry:
            self._load_carry(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Also saves what else is needed to continue: averaged weights, skipped steps."""
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            if self.average is not None:
                save_file(self.average.shadow, os.path.join(output_dir, WEIGHT_AVERAGE_FILE))
            counts = [self.nonfinite_steps, self.nonfinite_in_a_row]
            Path(output_dir, NONFINITE_FILE).write_text(json.dumps(counts))

    def _save_checkpoint(self, model, trial) -> None:
        with self.meter.paused():
            super()._save_checkpoint(model, trial)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best = Path(self.state.best_model_checkpoint or "") / WEIGHT_AVERAGE_FILE
        if self.average is not None and best.exists():
            self.average.load(load_file(best))

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves `use_cache` as it was: the library switches the cache off to train, and the model would stay slow."""
        if self._cache_at_inference is None:
            super()._save(output_dir, state_dict)
            return
        config = self.model.config
        config.use_cache, in_training = self._cache_at_inference, config.use_cache
        try:
            super()._save(output_dir, state_dict)
        finally:
            config.use_cache = in_training


def _total_norm(model: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
    """Norm of all gradients of all shards of a model."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        return torch.zeros_like(like)
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def override_loss_weights(model: torch.nn.Module, args: GoTrainingArguments) -> None:
    """Writes the loss weights of a run into the model's config. Raises ValueError if it has none."""
    for name in LOSS_WEIGHTS:
        value = getattr(args, name)
        if value is None:
            continue
        if not hasattr(model.config, name):
            raise ValueError(f"{name}={value}: {type(model).__name__} has no such weight; leave the option out")
        setattr(model.config, name, value)


def require_compiler(device: torch.device) -> None:
    """Raises RuntimeError if torch.compile has no C++ compiler for a CPU run."""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise RuntimeError(
            "torch.compile needs a C++ compiler on the CPU and found none: install g++ (Debian: apt install g++), or "
            "train without --torch_compile"
        ) from error
