"""`HrmTrainer`: transformers' Trainer for models that think in steps. The only trainer of the package.

What it adds, for a model that has `initial_carry`:

- one optimizer step is one ACT step on a carry that persists from batch to batch, per process;
- the data come from a `RowStream`, which gives a slot its next example when the last one has halted;
- carry, data position and random state are saved, so that a killed run resumes with the same losses;
- AdamATan2 and sign descent on puzzle rows, the original schedule, a moving average of weights;
- a step whose loss or gradient is not finite is skipped on all processes together, counted, and fatal if it persists;
- checkpoints end with a manifest, and a damaged one is refused with the name of what is wrong.

Everything else (logging, saving, DDP, schedulers, integrations) is the library's.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import rotate_checkpoints

from .callbacks import PuzzleProgressCallback, WeightAverageCallback
from .checkpoints import MANIFEST, RAW_WEIGHTS_FILE, WEIGHT_AVERAGE_FILE, resolve_checkpoint, write_manifest
from .data.row_stream import PuzzleRows, RowStream
from .models.act import ActCarry
from .optim import AdamATan2, CompositeOptimizer, SignSGD, WeightAverage, cosine_with_min_ratio


@dataclass
class HrmTrainingArguments(TrainingArguments):
    """TrainingArguments with the fields and defaults that recursive models need."""

    learning_rate: float = field(default=1e-4, metadata={"help": "Base learning rate of the weights."})
    weight_decay: float = field(default=1.0, metadata={"help": "Weight decay, applied to every weight."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamATan2 (or of --optim)."})
    warmup_steps: float = field(default=2000, metadata={"help": "Steps of linear warm-up."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Gradient clipping; 0 for none."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide non-finite losses from the log."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "As in DDP."})
    ddp_broadcast_buffers: bool | None = field(
        default=False, metadata={"help": "As in DDP. Off: the puzzle table is a buffer that each process keeps equal."}
    )
    save_total_limit: int | None = field(default=3, metadata={"help": "Checkpoints kept."})

    global_batch_size: int | None = field(
        default=None, metadata={"help": "Slots over all processes; sets per_device_train_batch_size."}
    )
    adam_atan2: bool = field(default=True, metadata={"help": "Train weights with AdamATan2; False takes --optim."})
    lr_min_ratio: float | None = field(
        default=1.0,
        metadata={"help": "Cosine decay to this share of the learning rate; 1 is constant, None --lr_scheduler_type."},
    )
    puzzle_emb_lr: float = field(default=1e-2, metadata={"help": "Learning rate of puzzle rows (sign descent)."})
    puzzle_emb_weight_decay: float = field(default=0.1, metadata={"help": "Weight decay of the puzzle rows in use."})
    ema_rate: float = field(default=0.0, metadata={"help": "Moving average of weights, e.g. 0.999; 0 for none."})
    drop_unplaced_rows: bool = field(
        default=False, metadata={"help": "As the original: rows offered to busy slots are lost, not kept."}
    )
    max_nonfinite_steps: int = field(
        default=20, metadata={"help": "Stop after so many steps in a row with a non-finite loss or gradient."}
    )
    eval_max_steps: int | None = field(
        default=None, metadata={"help": "Most ACT steps in evaluation; the config's halt_max_steps by default."}
    )
    eval_halt: str = field(default="fixed", metadata={"help": '"fixed" as the original, or "q" for adaptive halting.'})

    def __post_init__(self):
        super().__post_init__()
        if self.global_batch_size is not None:
            if self.global_batch_size % self.world_size:
                raise ValueError(
                    f"global_batch_size={self.global_batch_size} cannot be shared by {self.world_size} processes; "
                    "choose a multiple of their number"
                )
            self.per_device_train_batch_size = self.global_batch_size // self.world_size


class NonFiniteError(RuntimeError):
    """Loss or gradients stayed non-finite; the weights are those of the last good step."""


class HrmTrainer(Trainer):
    """Trainer for every architecture of the package; see the module's docstring for what it adds."""

    def __init__(self, model: Any = None, args: HrmTrainingArguments | None = None, **kwargs: Any):
        self.has_carry = hasattr(model, "initial_carry")
        self.carry: ActCarry | None = None
        self.average: WeightAverage | None = None
        self.nonfinite_steps = self.nonfinite_in_a_row = 0
        self._sums: dict[str, torch.Tensor] = {}
        self._sums_since = (0, time.perf_counter())
        self._resume_from: str | None = None
        self._grad_norm: torch.Tensor | None = None
        if self.has_carry:
            _adopt_precision_and_compile(model, args)
        super().__init__(model=model, args=args, **kwargs)
        if self.has_carry:
            self.args.ignore_data_skip = True  # the stream restores its own position
            if self.args.gradient_accumulation_steps != 1:
                raise ValueError(
                    f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}: one optimizer step is one "
                    "ACT step on the carry, so raise per_device_train_batch_size instead"
                )
            if self.args.n_gpu > 1:
                raise ValueError(
                    f"{self.args.n_gpu} GPUs are visible to one process, and a carry cannot be split: start "
                    f"one process a GPU (torchrun --nproc_per_node {self.args.n_gpu}) or set CUDA_VISIBLE_DEVICES"
                )
            if self.pop_callback(ProgressCallback):
                self.add_callback(PuzzleProgressCallback)

    # ---- data ----

    def get_train_dataloader(self):
        """A `RowStream` for models with a carry."""
        if not self.has_carry:
            return super().get_train_dataloader()
        rows = self.train_dataset if isinstance(self.train_dataset, PuzzleRows) else PuzzleRows(self.train_dataset)
        rows.check_fits(self.model.config)
        self.stream = RowStream(
            rows,
            self._train_batch_size,
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            drop_unplaced_rows=self.args.drop_unplaced_rows,
        )
        return self.stream

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """One batch and no token count: the loss of a model with a carry is already a mean over its slots."""
        if not self.has_carry:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batch = next(epoch_iterator, None)
        return ([] if batch is None else [batch]), None

    def floating_point_ops(self, inputs) -> int:
        """Not counted for models with a carry: the formula for dense transformers would be wrong."""
        return 0 if self.has_carry else super().floating_point_ops(inputs)

    # ---- optimizer ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamATan2 on the model's dense groups and sign descent on its sparse rows, behind one interface."""
        if self.optimizer is not None or not hasattr(self.model, "optimizer_groups"):
            return super().create_optimizer(model)
        args = self.args
        dense = [dict(group) for group in self.model.optimizer_groups() if not group.get("sparse_rows")]
        sparse = [dict(group) for group in self.model.optimizer_groups() if group.get("sparse_rows")]
        optimizers: list[torch.optim.Optimizer] = []
        if sparse:
            optimizers.append(SignSGD(sparse, lr=args.puzzle_emb_lr, weight_decay=args.puzzle_emb_weight_decay))
        if any(group["params"] for group in dense):
            if args.adam_atan2:
                betas = (args.adam_beta1, args.adam_beta2)
                optimizers.append(AdamATan2(dense, args.learning_rate, betas, args.weight_decay))
            else:
                optimizer_class, options = self.get_optimizer_cls_and_kwargs(args, self.model)
                optimizers.append(optimizer_class(dense, weight_decay=args.weight_decay, **options))
        if not optimizers:
            raise ValueError("nothing to train: every weight is frozen and the model has no puzzle table")
        self.optimizer = CompositeOptimizer(optimizers)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The original's warm-up and cosine with a floor, unless `lr_min_ratio` is None."""
        if self.args.lr_min_ratio is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            factor = cosine_with_min_ratio(
                self.args.get_warmup_steps(num_training_steps), num_training_steps, self.args.lr_min_ratio
            )
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- one step ----

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One ACT step, its backward pass, and the check that both are finite."""
        if not self.has_carry:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._resume_from is not None:  # as late as possible: nothing may draw random numbers in between
            self._load_rng_state(self._resume_from)
            self._resume_from = None
        elif self.carry is None:  # exploration is drawn by each process for itself
            torch.manual_seed(self.args.seed + self.args.process_index)
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self.carry is None:
            self.carry = self.model.initial_carry(**inputs)
        outputs = model(**inputs, carry=self.carry)
        self.carry = outputs.carry
        self.accelerator.backward(outputs.loss)
        loss = outputs.loss.detach().float()
        if self._skipped_as_nonfinite(loss):
            loss = torch.zeros_like(loss)  # one NaN would stay in the library's running sum for good
        else:
            self._accumulate(outputs)
        self.stream.halted = self.carry.halted.cpu().numpy()
        return loss

    def _skipped_as_nonfinite(self, loss: torch.Tensor) -> bool:
        """Drops the gradients of a step that is not finite on some process, so that none updates."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._grad_norm = torch.nn.utils.get_total_norm(grads, foreach=True) if grads else torch.zeros_like(loss)
        bad = ~torch.isfinite(loss + self._grad_norm)
        if self.args.world_size > 1:
            bad = self.accelerator.reduce(bad.float(), "sum") > 0
        if not bad.item():
            self.nonfinite_in_a_row = 0
            return False
        self.optimizer.zero_grad()
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        # A latent state that is not finite would poison every following step: its slot starts on the next example.
        broken = ~torch.isfinite(self.carry.z_H + self.carry.z_L).flatten(1).all(1)
        self.carry.halted |= broken
        if self.nonfinite_in_a_row >= self.args.max_nonfinite_steps:
            raise NonFiniteError(
                f"loss or gradients were not finite in {self.nonfinite_in_a_row} steps in a row, the last at step "
                f"{self.state.global_step + 1} (loss {loss.item()}, gradient norm {self._grad_norm.item()}, learning "
                f"rate {self._get_learning_rate():.3g}). The weights are those of the last good step. Lower the "
                "learning rate, look at the data for extreme values, or resume from an earlier checkpoint"
            )
        return True

    def _get_grad_norm(self, model, grad_norm=None):
        """The norm that the finiteness check has computed already."""
        return super()._get_grad_norm(model, grad_norm) if self._grad_norm is None else self._grad_norm

    def _get_learning_rate(self) -> float:
        """That of the weights; the puzzle table's group comes first."""
        return self.optimizer.param_groups[-1]["lr"] if self.has_carry else super()._get_learning_rate()

    # ---- logging ----

    def _accumulate(self, outputs) -> None:
        terms = {name: value.detach() for name, value in outputs.items() if name.endswith("_loss")}
        terms |= outputs.metrics or {}
        if not self._sums:
            self._sums = {name: value.double() for name, value in terms.items()}
        else:
            torch._foreach_add_(list(self._sums.values()), [value.double() for value in terms.values()])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds loss components, accuracies of the examples that halted, speed and skipped steps to training logs."""
        if self.has_carry and "loss" in logs:
            logs |= self._drain_sums()
            self.state.epoch = self.state.global_step / len(self.stream)  # the library starts a resumed epoch anew
        super().log(logs, start_time)

    def _drain_sums(self) -> dict[str, float]:
        step, since = self._sums_since
        sums = self._sums
        if sums:  # not if every step since the last log was skipped
            sums = dict(zip(sums, self.accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()))
        self._sums = {}
        steps, seconds = self.state.global_step - step, time.perf_counter() - since
        self._sums_since = (self.state.global_step, time.perf_counter())
        count = sums.pop("count", 0.0)
        logs = {n: v / max(steps, 1) / self.args.world_size for n, v in sums.items() if n.endswith("_loss")}
        if count:
            logs |= {n: v / count for n, v in sums.items() if not n.endswith("_loss") and n != "steps"}
            logs["average_steps"] = sums["steps"] / count
        logs |= {"puzzles_per_second": count / seconds, "steps_per_second": steps / seconds}
        if self.nonfinite_steps:
            logs["nonfinite_steps"] = self.nonfinite_steps
        return logs

    # ---- evaluation ----

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """For puzzle models: `evaluate_puzzles` on the main process, with averaged weights if there are any."""
        if not self.has_carry:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        from .evaluation.puzzles import evaluate_puzzles  # not needed where nothing is evaluated

        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("nothing to evaluate on: give eval_dataset (--eval_split in run_puzzle.py)")
        rows = dataset if isinstance(dataset, PuzzleRows) else PuzzleRows(dataset)
        result = [None]
        if self.is_world_process_zero():
            with self.averaged_weights():
                result = [
                    evaluate_puzzles(
                        self.model,
                        rows.input_ids,
                        rows.labels,
                        rows.puzzle_identifiers,
                        batch_size=self.args.per_device_eval_batch_size,
                        max_steps=self.args.eval_max_steps,
                        halt=self.args.eval_halt,
                    )
                ]
        metrics = broadcast_object_list(result)[0]
        self.last_evaluation = metrics
        logged = {f"{metric_key_prefix}_{n}": v for n, v in metrics.items() if isinstance(v, (int, float))}
        self.log(logged)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

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

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """As in the library; `resume_from_checkpoint` may also be "last" or "last-whole"."""
        folder = resolve_checkpoint(self.args.output_dir, resume_from_checkpoint)
        return super().train(resume_from_checkpoint=folder, **kwargs)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.args.ema_rate:
            self.average = WeightAverage(self.model, self.args.ema_rate)
            self.add_callback(WeightAverageCallback(self.average))
        self.carry = None
        if resume_from_checkpoint is not None:
            self._load_act_state(Path(resume_from_checkpoint))
        self._sums_since = (self.state.global_step, time.perf_counter())
        return prepared

    def _load_act_state(self, folder: Path) -> None:
        if self.average is not None and (folder / WEIGHT_AVERAGE_FILE).exists():
            self.average.load(load_file(folder / WEIGHT_AVERAGE_FILE, device=str(self.args.device)))
        if not self.has_carry:
            return
        file = folder / f"act_state_{self.args.process_index}.pt"
        if not file.exists():
            saved = len(list(folder.glob("act_state_*.pt")))
            raise ValueError(
                f"{folder} holds the carry of {saved} processes, this run has {self.args.world_size}: resume with the "
                "number of processes it was saved with, or start anew from its weights with --model_name_or_path"
            )
        state = torch.load(file, weights_only=True)
        self.carry = ActCarry.from_tensors(state["carry"], self.args.device)
        self.stream.load_state_dict(state["stream"])
        self.stream.halted = self.carry.halted.cpu().numpy()
        self.nonfinite_steps, self.nonfinite_in_a_row = state["nonfinite"]
        self._resume_from = str(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Also saves what else this process needs to continue: carry, data position, averaged weights."""
        super()._save_rng_state(output_dir)
        if self.average is not None and self.args.should_save:
            save_file(self.average.shadow, os.path.join(output_dir, WEIGHT_AVERAGE_FILE))
        if self.carry is not None:
            state = {
                "carry": self.carry.to_tensors(),
                "stream": self.stream.state_dict(),
                "nonfinite": [self.nonfinite_steps, self.nonfinite_in_a_row],
            }
            torch.save(state, os.path.join(output_dir, f"act_state_{self.args.process_index}.pt"))

    def _save_checkpoint(self, model, trial) -> None:
        """Writes the manifest after everything else, and deletes old checkpoints only then."""
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        if self.args.should_save:  # while a folder is written a second time, it is not whole
            Path(folder, MANIFEST).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                write_manifest(folder)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise OSError(
                f"could not write checkpoint {folder}: {error}. Earlier checkpoints are intact; free some disk space "
                "and resume with --resume_from_checkpoint last-whole"
            ) from error
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=os.path.dirname(folder),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best = Path(self.state.best_model_checkpoint or "") / WEIGHT_AVERAGE_FILE
        if self.average is not None and best.exists():
            self.average.load(load_file(best, device=str(self.args.device)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A finished run saves averaged weights as the model and keeps the raw ones beside them."""
        if _internal_call or self.average is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir or self.args.output_dir
        with self.averaged_weights():
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                # Inside the block the average holds the raw weights.
                save_file(self.average.shadow, os.path.join(output_dir, RAW_WEIGHTS_FILE))


def _adopt_precision_and_compile(model: Any, args: HrmTrainingArguments) -> None:
    """Turns --bf16 and --torch_compile into what these models mean by them, and tells accelerate nothing.

    Weights are cast to the dtype of the activations on use, so autocast would only change the arithmetic; and the
    unit to compile is one ACT step without its random draws and sparse rows, not the whole forward.
    """
    if args.fp16:
        raise ValueError("--fp16 is not supported for models with a carry; use --bf16 or float32")
    if args.bf16:
        model.config.forward_dtype = "bfloat16"
        args.bf16, args.mixed_precision = False, "no"
    if args.torch_compile:
        require_compiler(args.device)
        torch._dynamo.config.optimize_ddp = False  # it would split the one graph at DDP's buckets
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        model.compile_act_step(**{name: value for name, value in options.items() if value is not None})
        args.torch_compile = False
        for name in ("BACKEND", "MODE"):
            os.environ.pop(f"ACCELERATE_DYNAMO_{name}", None)


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
