"""`PuzzleRun`: a run of `training/run_puzzle.py`."""

from typing import Any

from transformers import PreTrainedModel, set_seed

from ..hub.kinds import PUZZLE_SOLVER
from ..io.usage import counted
from ..registry import AutoModelForPuzzleSolving
from ..trainer.plots import plot_evaluation, plot_training
from ..trainer.recipes import build_config
from ..trainer.run import TrainingRun
from .accuracy import with_bounds
from .build import ensure_built
from .dataloader import PuzzleRows
from .dataset import IDENTIFIERS_FILE, load_puzzle_dataset, load_puzzle_info
from .trainer import PuzzleTrainer


class PuzzleRun(TrainingRun):
    """Trains a puzzle reasoner; `data_args` is a `PuzzleDataArguments`, `args` a `PuzzleTrainingArguments`."""

    kind = PUZZLE_SOLVER

    def validate_options(self) -> None:
        if self.data_args.freeze_weights and self.tuning_args.adapts:
            raise ValueError("freeze_weights trains the puzzle table alone, lora_rank adapters too: leave out one")

    def load_data(self) -> None:
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
            model = AutoModelForPuzzleSolving.from_pretrained(
                weights, attn_implementation=attention, quantization_config=quantized
            )
            wanted, there = self.info.num_puzzle_identifiers, model.config.num_puzzle_identifiers
            if self.tuning_args.saves_adapter and wanted != there:
                raise ValueError(
                    f"the data have {wanted} puzzle identifiers, the base has {there}, and no adapter fits a base "
                    "with another table: give --merge_adapter true, or change the base's table before "
                    "(--freeze_weights true)"
                )
            model.adapt_puzzle_embeddings(wanted, self.data_args.puzzle_embeddings)
        if self.data_args.freeze_weights:
            model.requires_grad_(False)
        return model

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
