"""Options of a puzzle training run: which data it uses, and how it trains a model with a carry."""

from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from ..trainer.recipes import HrmTrainingArguments, validate_minimum


DIFFICULTIES = ("uniform", "hard_first")


@dataclass
class PuzzleDataArguments:
    """Options that select the puzzle data."""

    data_path: str | None = HfArg(default=None, help="Puzzle data set: a folder, or OWNER/NAME on the Hub.")
    build_data: str | None = HfArg(
        default=None, help="Arguments of `hrm-hf data` that build data_path if it does not exist."
    )
    task: str | None = HfArg(
        default=None, help="The data's task, if hrm_hf does not ship it: FILE.py:CLASS or MODULE:CLASS."
    )
    train_split: str = HfArg(default="train", help="Split to train on.")
    eval_split: str | None = HfArg(default="test", help="Split to evaluate on; leave empty to disable evaluation.")
    max_train_samples: int | None = HfArg(default=None, help="Train on only the first N rows.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on only the first N rows.")
    puzzle_embeddings: str = HfArg(
        default="keep", help="With --model_name_or_path: keep the puzzle table, reset it (new puzzles), or extend it."
    )
    freeze_weights: bool = HfArg(default=False, help="Freeze the weights and train only the puzzle table.")

    def __post_init__(self):
        validate_minimum(self, 1, "max_train_samples", "max_eval_samples")


@dataclass
class PuzzleTrainingArguments(HrmTrainingArguments):
    """Training arguments for models with a carry. The defaults are those of the original HRM's recipes."""

    learning_rate: float = HfArg(default=1e-4, help="Base learning rate of the dense weights.")
    weight_decay: float = HfArg(default=1.0, help="Weight decay of all dense weights.")
    warmup_steps: float = HfArg(default=2000, help="Number of linear warm-up steps.")
    max_grad_norm: float = HfArg(default=0.0, help="Maximum gradient norm for clipping; 0 disables clipping.")
    adam_atan2: bool = HfArg(default=True, help="Train the dense weights with AdamATan2; False uses --optim.")
    lr_min_ratio: float | None = HfArg(
        default=1.0, help="Final learning rate of the cosine decay as a fraction of the base rate; 1 for no decay."
    )

    puzzle_emb_lr: float = HfArg(default=1e-2, help="Learning rate of sign descent on the puzzle table.")
    puzzle_emb_weight_decay: float = HfArg(
        default=0.1, help="Weight decay of the puzzle table, applied only to the rows used in each step."
    )
    augment: bool = HfArg(
        default=False,
        help="Apply a new random symmetry each time a row is used (Sudoku, mazes, and ARC without a puzzle table).",
    )
    difficulty: str = HfArg(
        default="uniform",
        help='"hard_first": start with the hardest quarter of the rows and add the others gradually (see '
        '--difficulty_ramp), ranked by column "rating" or else the number of cells to fill. "uniform": use all rows.',
    )
    difficulty_ramp: float = HfArg(
        default=0.5, help="Fraction of the training steps after which --difficulty hard_first uses all rows."
    )
    late_starts: float = HfArg(
        default=0.0,
        help="Fraction of the rows that first run 1, 2, 4, ... or --late_start_max_steps ACT steps (drawn uniformly) "
        "without gradient. This teaches the model to continue after many steps.",
    )
    late_start_max_steps: int = HfArg(default=32, help="Maximum number of steps for --late_starts, a power of two.")
    drop_unplaced_rows: bool = HfArg(
        default=False,
        help="Drop rows whose slot is busy, as the original HRM code does; by default, rows wait for their slot.",
    )
    eval_max_steps: int | None = HfArg(
        default=None,
        help="Maximum number of ACT steps in evaluation and in the saved model; by default halt_max_steps.",
    )
    eval_halt: str = HfArg(default="fixed", help='Evaluation: "fixed" runs all steps, as HRM does; "q" halts early.')

    def __post_init__(self):
        super().__post_init__()
        if self.difficulty not in DIFFICULTIES:
            raise ValueError(f"difficulty={self.difficulty!r}: must be one of {', '.join(DIFFICULTIES)}")
        if self.difficulty != "uniform" and self.difficulty_ramp == 0:
            raise ValueError("difficulty_ramp=0: must be > 0; to start with all rows, set --difficulty uniform")
        most = self.late_start_max_steps
        if not isinstance(most, int) or most.bit_count() != 1:
            raise ValueError(f"late_start_max_steps={most}: must be a power of two (1, 2, 4, ...)")
