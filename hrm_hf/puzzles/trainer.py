"""`PuzzleTrainer`: trains models with a carry, one ACT step an optimizer step.

The carry persists from batch to batch, per process. The data come from a `CarryDataLoader`, which gives a slot its
next example when the last one has halted. Puzzle rows are trained by sign descent, weights by another
optimizer.
"""

import os
from pathlib import Path
from typing import Any

import torch

from ..hub.manifests import CARRY_FILE
from ..models.act import ActCarry
from ..trainer.adapters import magnitudes, split_weight_decay_groups
from ..trainer.base import HrmTrainer
from ..trainer.optim import CompositeOptimizer, SignSGD
from .accuracy import with_bounds
from .arguments import PuzzleTrainingArguments
from .curriculum import DifficultyPool, LateStarts, run_ahead
from .dataloader import CarryDataLoader, PuzzleRows
from .random_symmetries import RandomSymmetries


class PuzzleTrainer(HrmTrainer):
    """Trainer for a model with `initial_carry`, `optimizer_groups` and `compile_act_step`.

    See `HrmTrainer` for what trainers share.
    """

    arguments_class = PuzzleTrainingArguments
    pipeline = "puzzle-solving"
    log_format = {
        "loss": "loss {:.3f}",
        "exact_accuracy": "exact {:6.1%}",
        "average_steps": "steps {:4.1f}",
        "puzzles_per_second": "{:6.1f} puzzles/s",
        "eval_exact_accuracy": "held-out exact {:6.1%}",
        "eval_cell_accuracy": "cells {:6.1%}",
        "eval_average_steps": "steps {:4.1f}",
    }
    carry: ActCarry | None = None
    _resume_from: str | None = None

    def prepare_model(self, model: Any, args: PuzzleTrainingArguments) -> None:
        """Turns --bf16 and --torch_compile into what models with a carry mean by them, and tells accelerate nothing.

        Weights are cast to the dtype of the activations on use, so autocast would only change the arithmetic; and the
        unit to compile is one ACT step without its random draws and sparse rows, not the whole forward.
        """
        if args.fp16:
            raise ValueError("--fp16 is not supported for models with a carry; use --bf16 or float32")
        if args.bf16:
            model.config.forward_dtype = "bfloat16"
            args.bf16, args.mixed_precision = False, "no"
        if args.torch_compile:
            self.compile_part(model.compile_act_step, args)

    def validate_arguments(self) -> None:
        """As in the base; batches cannot be accumulated."""
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}: one optimizer step is one "
                "ACT step on the carry, so raise per_device_train_batch_size instead"
            )
        super().validate_arguments()
        self.args.ignore_data_skip = True  # the data loader restores its own position

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamATan2 or the library's optimizer; sign descent on the model's sparse rows, behind one interface."""
        if self.optimizer is not None:
            return self.optimizer
        args = self.args
        groups = [dict(group) for group in self.model.optimizer_groups()]
        sparse = [group for group in groups if group.get("sparse_rows")]
        dense = [{"weight_decay": args.weight_decay, **group} for group in groups if not group.get("sparse_rows")]
        dense = split_weight_decay_groups(dense, magnitudes(self.model))
        optimizers: list[torch.optim.Optimizer] = []
        if sparse:
            optimizers.append(SignSGD(sparse, lr=args.puzzle_emb_lr, weight_decay=args.puzzle_emb_weight_decay))
        if any(group["params"] for group in dense):
            optimizers.append(self.new_optimizer(dense))
        if not optimizers:
            raise ValueError("nothing to train: every weight is frozen and the model has no puzzle table")
        self.optimizer = CompositeOptimizer(optimizers)
        return self.optimizer

    # ---- data ----

    def get_train_dataloader(self):
        """A `CarryDataLoader`."""
        rows = self.train_dataset if isinstance(self.train_dataset, PuzzleRows) else PuzzleRows(self.train_dataset)
        rows.validate_fits(self.model.config)
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        self.stream = CarryDataLoader(
            rows,
            self._train_batch_size,
            seed,
            rank=args.process_index,
            world_size=args.world_size,
            drop_unplaced_rows=args.drop_unplaced_rows,
            symmetries=RandomSymmetries(self.model.config, seed) if args.augment else None,
            pool=DifficultyPool(rows, args.difficulty_ramp) if args.difficulty == "hard_first" else None,
            late_starts=LateStarts(seed, args.late_starts, args.late_start_max_steps) if args.late_starts else None,
        )
        return self.stream

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """One batch and no token count: the loss of a model with a carry is already a mean over its slots."""
        self.stream.progress = self.progress
        batch = next(epoch_iterator, None)
        return ([] if batch is None else [batch]), None

    @property
    def progress(self) -> float:
        """The share of the run's steps that are done, 0 to 1."""
        return self.state.global_step / max(self.state.max_steps, 1)

    def floating_point_ops(self, inputs) -> int:
        """Not counted: the formula for dense transformers would be wrong."""
        return 0

    # ---- one step ----

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One ACT step, its backward pass, and the check that both are finite."""
        if self._resume_from is not None:  # as late as possible: nothing may draw random numbers in between
            self._load_rng_state(self._resume_from)
            self._resume_from = None
        elif self.carry is None:  # exploration is drawn by each process for itself
            torch.manual_seed(self.args.seed + self.args.process_index)
        model.train()
        inputs = self._prepare_inputs(inputs)
        steps_ahead = inputs.pop("steps_ahead", None)
        if self.carry is None:
            self.carry = self.model.initial_carry(**inputs)
        if steps_ahead is not None:
            self.carry = run_ahead(self.model, self.carry, steps_ahead, inputs)
        outputs = model(**inputs, carry=self.carry)
        self.accelerator.backward(outputs.loss)
        self.carry = outputs.carry
        terms = {name: value.detach() for name, value in outputs.items() if name.endswith("_loss")}
        self.train_metrics.add({name: value.double() for name, value in (terms | (outputs.metrics or {})).items()})
        loss = self._close_step(outputs.loss.detach().float())
        if self.nonfinite_in_a_row:
            # A latent state that is not finite would poison every following step: its slot starts on its next row.
            self.carry.halted |= ~torch.isfinite(self.carry.z_H + self.carry.z_L).flatten(1).all(1)
        self.stream.halted = self.carry.halted.cpu().numpy()
        return loss

    def _get_learning_rate(self) -> float:
        """That of the weights; the puzzle table's group comes first."""
        return self.optimizer.param_groups[-1]["lr"]

    def puzzles_begun(self) -> int | None:
        """Puzzles that were given a slot since the run began, over all processes. A collective call.

        None with `drop_unplaced_rows`, where rows are drawn that no slot takes.
        """
        if self.args.drop_unplaced_rows:
            return None
        begun = torch.tensor(int(self.stream.taken.sum()), device=self.args.device)
        return int(self.accelerator.reduce(begun, "sum"))

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the right epoch: the library starts that of a resumed run anew."""
        if "loss" in logs:
            self.state.epoch = self.state.global_step / len(self.stream)
        super().log(logs, start_time)

    def _training_logs(self, sums: dict[str, float], steps: int, seconds: float) -> dict[str, float]:
        """Loss components of a step, accuracies of the examples that halted, and speed."""
        count = sums.pop("count", 0.0)
        logs = {n: v / max(steps, 1) / self.args.world_size for n, v in sums.items() if n.endswith("_loss")}
        if count:
            logs |= {n: v / count for n, v in sums.items() if not n.endswith("_loss") and n != "steps"}
            logs["average_steps"] = sums["steps"] / count
        return logs | {"puzzles_per_second": count / seconds}

    # ---- evaluation ----

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """`evaluate_puzzles`, whose rows all processes share, with averaged weights if there are any."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("nothing to evaluate on: give eval_dataset (--eval_split in run_puzzle.py)")
        rows = dataset if isinstance(dataset, PuzzleRows) else PuzzleRows(dataset)
        with self.train_metrics.paused():
            metrics = self.last_evaluation = self._evaluate_rows(rows)
        numbers = {n: v for n, v in with_bounds(metrics).items() if isinstance(v, (int, float))}
        logged = {f"{metric_key_prefix}_{n}": v for n, v in numbers.items()}
        self.log(logged)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

    def _evaluate_rows(self, rows: PuzzleRows) -> dict[str, Any]:
        from .evaluation import evaluate_puzzles

        with self.averaged_weights():
            return evaluate_puzzles(
                self.model,
                rows.input_ids,
                rows.labels,
                rows.puzzle_identifiers,
                batch_size=self.args.per_device_eval_batch_size,
                max_steps=self.args.eval_max_steps,
                halt=self.args.eval_halt,
                shared=self.args.world_size > 1,
            )

    # ---- saving and resuming ----

    def _prepare_for_training(self, *args: Any):
        self.carry = None
        return super()._prepare_for_training(*args)

    def _restore_data_position(self, folder: Path) -> None:
        """Loads the carry of this process and the position of each of its slots."""
        file = folder / CARRY_FILE.format(self.args.process_index)
        if not file.exists():
            saved = len(list(folder.glob(CARRY_FILE.format("*"))))
            raise ValueError(
                f"{folder} holds the carry of {saved} processes, this run has {self.args.world_size}: resume with the "
                "number of processes it was saved with, or start anew from its weights with --model_name_or_path"
            )
        state = torch.load(file, weights_only=True)
        self.carry = ActCarry.from_tensors(state["carry"], self.args.device)
        self.stream.load_state_dict(state["stream"])
        self.stream.halted = self.carry.halted.cpu().numpy()
        self._resume_from = str(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Also saves the carry and the data position of this process."""
        super()._save_rng_state(output_dir)
        if self.carry is not None:
            state = {"carry": self.carry.to_tensors(), "stream": self.stream.state_dict()}
            torch.save(state, os.path.join(output_dir, CARRY_FILE.format(self.args.process_index)))
