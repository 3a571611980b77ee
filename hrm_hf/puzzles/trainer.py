"""Trainer for puzzle models, and `PuzzleRun`, the training run that `training/run_puzzle.py` starts.

An optimizer step is one ACT step on a carry that persists between batches; each process has its own carry.
`CarryDataLoader` gives a slot its next example when the current one has halted. The rows of the puzzle table are
trained with sign descent.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from ..hub.kinds import PUZZLE_SOLVER, load_config
from ..hub.manifests import CARRY_FILE
from ..io.usage import counted
from ..models.act import ActCarry
from ..models.modeling_utils import uncompiled
from ..registry import AutoModelForPuzzleSolving
from ..trainer.adapters import MAGNITUDE
from ..trainer.base import HrmTrainer
from ..trainer.optim import AdamATan2, CompositeOptimizer, SignSGD
from ..trainer.plots import plot_evaluation, plot_training
from ..trainer.recipes import build_config, checked_overrides
from ..trainer.run import TrainingRun
from .arguments import PuzzleTrainingArguments
from .build import ensure_built
from .dataloader import CarryDataLoader, DifficultyPool, LateStarts, PuzzleRows, RandomSymmetries
from .dataset import IDENTIFIERS_FILE, load_identifiers, load_puzzle_dataset, load_puzzle_info, match_identifiers
from .evaluation import evaluate_puzzles, with_bounds
from .options import import_task
from .task_registry import puzzle_task


class PuzzleTrainer(HrmTrainer):
    """Trainer for models that have `initial_carry`, `optimizer_groups` and `compile_act_step`.

    `HrmTrainer` implements the behavior that all trainers share.
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
        """Apply --bf16 and --torch_compile to the model, without accelerate.

        The model casts its weights to the dtype of the activations, so autocast would only change the arithmetic. Only
        the ACT step and the update by AdamATan2 are compiled, excluding random draws and the sparse table rows.
        """
        if args.fp16:
            raise ValueError("fp16=True: not supported for models with a carry; use --bf16 or float32")
        if args.bf16:
            model.config.forward_dtype = "bfloat16"
            args.bf16, args.mixed_precision = False, "no"
        if args.torch_compile:
            self.compile_part(model.compile_act_step, args)

    def validate_arguments(self) -> None:
        """Validate as the base class does, and reject gradient accumulation."""
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}: must be 1, since an optimizer "
                "step is one ACT step on the carry; increase per_device_train_batch_size instead"
            )
        super().validate_arguments()
        self.args.ignore_data_skip = True  # the data loader restores its position itself

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Create one optimizer from AdamATan2 (or `Trainer`'s optimizer) and sign descent for sparse rows."""
        if self.optimizer is not None:
            return self.optimizer
        args = self.args
        groups = [dict(group) for group in self.model.optimizer_groups()]
        sparse = [group for group in groups if group.get("sparse_rows")]
        dense = [{"weight_decay": args.weight_decay, **group} for group in groups if not group.get("sparse_rows")]
        # DoRA's magnitudes set the norms of the weights, so weight decay on them would pull the weights to zero.
        magnitudes = dict.fromkeys(p for name, p in self.model.named_parameters() if MAGNITUDE in name)
        dense = [{**group, "params": [p for p in group["params"] if p not in magnitudes]} for group in dense]
        dense += [{"params": [p for p in magnitudes if p.requires_grad], "weight_decay": 0.0}] if magnitudes else []
        optimizers: list[torch.optim.Optimizer] = []
        if sparse:
            optimizers.append(SignSGD(sparse, lr=args.puzzle_emb_lr, weight_decay=args.puzzle_emb_weight_decay))
        if any(group["params"] for group in dense):
            optimizers.append(self.new_optimizer(dense))
            if self.compile_options is not None and isinstance(optimizers[-1], AdamATan2):
                optimizers[-1].compile(**self.compile_options)
        if not optimizers:
            raise ValueError("nothing to train: all weights are frozen and the model has no puzzle table")
        self.optimizer = CompositeOptimizer(optimizers)
        return self.optimizer

    # ---- data ----

    def get_train_dataloader(self):
        """Return a `CarryDataLoader`."""
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
            symmetries=RandomSymmetries(puzzle_task(self.model.config), seed) if args.augment else None,
            pool=DifficultyPool(rows, args.difficulty_ramp) if args.difficulty == "hard_first" else None,
            late_starts=LateStarts(seed, args.late_starts, args.late_start_max_steps) if args.late_starts else None,
        )
        return self.stream

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Return one batch without a token count, since the loss is already a mean over the slots."""
        self.stream.progress = self.progress
        batch = next(epoch_iterator, None)
        return ([] if batch is None else [batch]), None

    @property
    def progress(self) -> float:
        """Fraction of the run's steps completed so far, in [0, 1]."""
        return self.state.global_step / max(self.state.max_steps, 1)

    def floating_point_ops(self, inputs) -> int:
        """Return 0, because `Trainer` would count operations by a formula for dense transformers."""
        return 0

    # ---- one step ----

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Run one ACT step and its backward pass, and check that loss and gradients are finite."""
        if self._resume_from is not None:  # restore the random state only now: earlier code may draw numbers
            self._load_rng_state(self._resume_from)
            self._resume_from = None
        elif self.carry is None:  # each process explores with different random numbers
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
            # A non-finite latent state would corrupt every later step, so its slot moves on to the next row.
            self.carry.halted |= ~torch.isfinite(self.carry.z_H + self.carry.z_L).flatten(1).all(1)
        self.stream.halted = self.carry.halted.cpu().numpy()
        return loss

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the dense weights, which are the last parameter group."""
        return self.optimizer.param_groups[-1]["lr"]

    def puzzles_begun(self) -> int | None:
        """Return the number of puzzles started in all processes (collective), or None with `drop_unplaced_rows`."""
        if self.args.drop_unplaced_rows:
            return None
        begun = torch.tensor(int(self.stream.taken.sum()), device=self.args.device)
        return int(self.accelerator.reduce(begun, "sum"))

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the correct epoch, since `Trainer` resets the epoch in a resumed run."""
        if "loss" in logs:
            self.state.epoch = self.state.global_step / len(self.stream)
        super().log(logs, start_time)

    def _training_logs(self, sums: dict[str, float], steps: int, seconds: float) -> dict[str, float]:
        """Return the mean loss terms per step, metrics of the examples that halted, and speed."""
        count = sums.pop("count", 0.0)
        logs = {n: v / max(steps, 1) / self.args.world_size for n, v in sums.items() if n.endswith("_loss")}
        if count:
            logs |= {n: v / count for n, v in sums.items() if not n.endswith("_loss") and n != "steps"}
            logs["average_steps"] = sums["steps"] / count
        return logs | {"puzzles_per_second": count / seconds}

    # ---- evaluation ----

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Run `evaluate_puzzles` on all processes, using averaged weights if available."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("eval_dataset=None: evaluation needs data; set it (--eval_split in run_puzzle.py)")
        rows = dataset if isinstance(dataset, PuzzleRows) else PuzzleRows(dataset)
        with self.train_metrics.paused(), self.averaged_weights():
            metrics = self.last_evaluation = evaluate_puzzles(
                self.model,
                rows.input_ids,
                rows.labels,
                rows.puzzle_identifiers,
                batch_size=self.args.per_device_eval_batch_size,
                max_steps=self.args.eval_max_steps,
                halt=self.args.eval_halt,
                shared=self.args.world_size > 1,
            )
        numbers = {n: v for n, v in with_bounds(metrics).items() if isinstance(v, (int, float))}
        logged = {f"{metric_key_prefix}_{n}": v for n, v in numbers.items()}
        self.log(logged)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

    # ---- saving and resuming ----

    def _prepare_for_training(self, *args: Any):
        self.carry = None
        return super()._prepare_for_training(*args)

    def _restore_data_position(self, folder: Path) -> None:
        """Load this process's carry and the data positions of its slots."""
        file = folder / CARRY_FILE.format(self.args.process_index)
        if not file.exists():
            saved = len(list(folder.glob(CARRY_FILE.format("*"))))
            raise ValueError(
                f"{folder} has the carry of {saved} processes, but this run has {self.args.world_size}; resume with "
                "the same number of processes, or start from its weights (--model_name_or_path)"
            )
        state = torch.load(file, weights_only=True)
        self.carry = ActCarry.from_tensors(state["carry"], self.args.device)
        self.stream.load_state_dict(state["stream"])
        self.stream.halted = self.carry.halted.cpu().numpy()
        self._resume_from = str(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, and this process's carry and data positions."""
        super()._save_rng_state(output_dir)
        if self.carry is not None:
            state = {"carry": self.carry.to_tensors(), "stream": self.stream.state_dict()}
            torch.save(state, os.path.join(output_dir, CARRY_FILE.format(self.args.process_index)))


@torch.no_grad()
@uncompiled
def run_ahead(model: Any, carry: ActCarry, steps_ahead: torch.Tensor, batch: dict[str, torch.Tensor]) -> ActCarry:
    """Run new rows for some ACT steps without gradient, and return the carry with their steps reset to 0.

    `steps_ahead` is int [B], 0 for rows that start normally in the next call of the model; rows of busy slots do not
    run. This is not compiled, since the number of rows varies. `batch` has the arguments of the model's forward.
    """
    wanted = steps_ahead * carry.halted
    rows = wanted.argsort(descending=True)[: int(wanted.count_nonzero())]
    if not len(rows):
        return carry
    data = {name: value[rows] for name, value in batch.items()}
    puzzle_rows = model.model.puzzle_rows(data["puzzle_identifiers"], len(rows))
    x, rotary = model.model.embed(data["input_ids"], puzzle_rows, model.compute_dtype)
    z_H, z_L = (z.clone() for z in model.model.fresh_states(x))
    for step in range(int(wanted[rows[0]])):
        n = int((wanted > step).sum())  # rows are sorted; the first n still have steps to run
        z_H[:n], z_L[:n] = model.model.reason(x[:n], rotary, z_H[:n], z_L[:n])
    return ActCarry(
        carry.z_H.index_copy(0, rows, z_H),
        carry.z_L.index_copy(0, rows, z_L),
        carry.steps.index_fill(0, rows, 0),
        carry.halted.index_fill(0, rows, False),
        {n: old.index_copy(0, rows, data[n].to(old.dtype)) for n, old in carry.current_data.items()},
    )


class PuzzleRun(TrainingRun):
    """Training run of a puzzle model, with `PuzzleDataArguments` and `PuzzleTrainingArguments`."""

    kind = PUZZLE_SOLVER

    def validate_options(self) -> None:
        if self.data_args.freeze_weights and self.tuning_args.adapts:
            raise ValueError("freeze_weights=True: trains only the puzzle table, not adapters; remove it or lora_rank")

    def load_data(self) -> None:
        import_task(self.data_args.task)
        with self.args.main_process_first(desc="building the data set"):
            ensure_built(self.data_args.data_path, self.data_args.build_data)
        self.info = load_puzzle_info(self.data_args.data_path)
        self.task = self.info.task
        self.train = self._rows(self.data_args.train_split, self.data_args.max_train_samples)
        self.validation = self._rows(self.data_args.eval_split, self.data_args.max_eval_samples)

    def _rows(self, split: str | None, limit: int | None) -> PuzzleRows | None:
        if not split:
            return None
        dataset = load_puzzle_dataset(self.data_args.data_path, split)
        return PuzzleRows(dataset if limit is None else dataset.select(range(min(limit, len(dataset)))))

    def load_model(self, quantized) -> PreTrainedModel:
        set_seed(self.args.seed)
        weights, attention = self.model_args.model_name_or_path, self.model_args.attn_implementation
        if weights is None:
            config = build_config(self.model_args, **self.info.config_fields())
            model = AutoModelForPuzzleSolving.from_config(config, attn_implementation=attention)
        else:
            given, overrides = self.info.config_fields(), self.model_args.config_overrides
            names = ("task", "symbols", "units") if self.info.symbols else ()  # the weights may be for another task
            changes = {name: given[name] for name in names} | checked_overrides(type(load_config(weights)), overrides)
            model = AutoModelForPuzzleSolving.from_pretrained(
                weights, attn_implementation=attention, quantization_config=quantized, **changes
            )
            self._adapt_table(model)
        if self.data_args.freeze_weights:
            model.requires_grad_(False)
        return model

    def _adapt_table(self, model: PreTrainedModel) -> None:
        """Adapt a loaded model's puzzle table to the data, matching rows by puzzle name."""
        names, how, adapter = self.info.identifiers, self.data_args.puzzle_embeddings, self.tuning_args.adapter
        there, has_table = model.config.num_puzzle_identifiers, model.config.puzzle_emb_ndim
        known = load_identifiers(self.model_args.model_name_or_path) if has_table else None
        if adapter and load_identifiers(adapter) not in (None, names):
            raise ValueError(f"adapter={adapter!r}: its puzzle table must have the data's puzzles in the same order")
        if self.tuning_args.saves_adapter and (len(names) != there or known not in (None, names)):
            raise ValueError(
                f"the puzzle identifiers of the data ({len(names)}) and base model ({there}) differ, but "
                "an adapter must use its base model's table; use --merge_adapter true, or first adapt the "
                "base model's table to the data (--freeze_weights true)"
            )
        if known in (None, names) or how == "reset":
            model.adapt_puzzle_embeddings(len(names), how)
            return
        if missing := sorted(set(known) - set(names)):
            raise ValueError(
                f"puzzle_embeddings={how!r}: {len(missing)} puzzles of the model are missing from the data: "
                f'{", ".join(missing[:5])}; use "reset" for new puzzles'
            )
        places = match_identifiers(names, known)
        model.adapt_puzzle_embeddings(len(names), how)
        added = iter(range(len(known), len(names)))
        model.order_puzzle_embeddings([next(added) if place is None else place for place in places])

    def count_parameters(self, model: PreTrainedModel) -> dict[str, int]:
        return {
            "parameters": model.num_parameters(include_puzzle_table=True),
            "parameters_without_puzzle_table": model.num_parameters(),
        }

    def describe(self) -> str:
        held_out = len(self.validation) if self.validation else 0
        return f"{self.task}: {counted(len(self.train), 'row')} to train on, {held_out:,} held out"

    def save_options(self) -> None:
        super().save_options()
        (self.out / IDENTIFIERS_FILE).write_text(self.info.identifiers_json())

    def make_trainer(self, model: Any) -> PuzzleTrainer:
        return PuzzleTrainer(model, self.args, train_dataset=self.train, eval_dataset=self.validation)

    def before_saving(self, trainer: PuzzleTrainer) -> None:
        """Save eval_max_steps as the model's halt_max_steps, so other evaluations agree with this run's."""
        if self.args.eval_max_steps is not None:
            trainer.model.config.halt_max_steps = self.args.eval_max_steps

    def evaluate(self, trainer: PuzzleTrainer) -> dict[str, Any]:
        self.puzzles = trainer.puzzles_begun()
        return trainer.last_evaluation if super().evaluate(trainer) else {}

    def results(self, trainer: PuzzleTrainer, metrics: dict[str, Any]):
        return metrics, {"puzzles": self.puzzles}

    def plot(self, trainer: PuzzleTrainer, metrics: dict[str, Any]) -> None:
        plot_training(trainer.state.log_history, self.out / "training.png")
        if metrics:
            title = f"{self.task}, {metrics['count']} held-out puzzles"
            plot_evaluation(metrics, self.out / "evaluation.png", title=title)

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        size = self.parameters["parameters_without_puzzle_table"]
        data, split = self.data_args.data_path, self.data_args.eval_split
        return {"metrics": with_bounds(metrics), "dataset": data, "split": split, "parameters": size}
