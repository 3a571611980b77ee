"""Options of a run on puzzles: the data, and the training of models with a carry."""

from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from ..trainer.recipes import HrmTrainingArguments


DIFFICULTIES = ("uniform", "hard_first")


@dataclass
class PuzzleDataArguments:
    """Which puzzles."""

    data_path: str | None = HfArg(default=None, help="Puzzle data set: folder or OWNER/NAME.")
    build_data: str | None = HfArg(
        default=None, help="Arguments of `hrm-hf data` that build data_path if it does not exist."
    )
    train_split: str = HfArg(default="train", help="Split to train on.")
    eval_split: str | None = HfArg(default="test", help="Split to evaluate on; empty for none.")
    max_train_samples: int | None = HfArg(default=None, help="Train on the first rows only.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on the first rows only.")
    puzzle_embeddings: str = HfArg(
        default="keep", help="With --model_name_or_path: keep the table, reset it (new puzzles), or extend it."
    )
    freeze_weights: bool = HfArg(default=False, help="Train the puzzle table alone.")


@dataclass
class PuzzleTrainingArguments(HrmTrainingArguments):
    """For models with a carry. The defaults are those of the original HRM's recipes."""

    learning_rate: float = HfArg(default=1e-4, help="Base learning rate of the weights.")
    weight_decay: float = HfArg(default=1.0, help="Weight decay, applied to every weight.")
    warmup_steps: float = HfArg(default=2000, help="Steps of linear warm-up.")
    max_grad_norm: float = HfArg(default=0.0, help="Gradient clipping; 0 for none.")
    adam_atan2: bool = HfArg(default=True, help="Train weights with AdamATan2; False takes --optim.")
    lr_min_ratio: float | None = HfArg(
        default=1.0, help="Cosine decay ends at this share of the learning rate; 1 is constant."
    )

    puzzle_emb_lr: float = HfArg(default=1e-2, help="Learning rate of puzzle rows (sign descent).")
    puzzle_emb_weight_decay: float = HfArg(default=0.1, help="Weight decay of the puzzle rows in use.")
    augment: bool = HfArg(
        default=False,
        help="Give every row a new random symmetry of its task each time it is trained on: Sudoku, mazes, and "
        "ARC for models without a puzzle table.",
    )
    difficulty: str = HfArg(
        default="uniform",
        help='"hard_first": begin with the hardest quarter of the rows and come to all of them along '
        '--difficulty_ramp; by the column "rating", else by the number of cells to fill. "uniform": all rows.',
    )
    difficulty_ramp: float = HfArg(
        default=0.5, help="Share of the steps after which --difficulty makes no difference any more."
    )
    late_starts: float = HfArg(
        default=0.0,
        help="Share of the rows that run 1, 2, 4, ... or --late_start_max_steps ACT steps (drawn evenly) "
        "without gradient before those that are trained on, so that a model learns to go on after many steps.",
    )
    late_start_max_steps: int = HfArg(default=32, help="Most steps of --late_starts, a power of two.")
    drop_unplaced_rows: bool = HfArg(
        default=False, help="As the original: rows offered to busy slots are lost, not kept."
    )
    eval_max_steps: int | None = HfArg(
        default=None,
        help="Most ACT steps in evaluation, and of the saved model; halt_max_steps, as in training, by default.",
    )
    eval_halt: str = HfArg(default="fixed", help='"fixed" as the original, or "q" for adaptive halting.')

    def __post_init__(self):
        super().__post_init__()
        if self.difficulty not in DIFFICULTIES:
            raise ValueError(f"difficulty={self.difficulty!r} is not one of {', '.join(DIFFICULTIES)}")
        if self.difficulty != "uniform" and self.difficulty_ramp == 0:
            raise ValueError("difficulty_ramp=0: must be > 0; use --difficulty uniform to disable")
        most = self.late_start_max_steps
        if not isinstance(most, int) or most.bit_count() != 1:
            raise ValueError(f"late_start_max_steps={most}: must be a power of two (1, 2, 4, ...)")
