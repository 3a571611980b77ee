"""Options of a Go coder training run: records, token budgets, and training arguments."""

from dataclasses import dataclass
from typing import get_args

from transformers.hf_argparser import HfArg

from ..text.arguments import LmTrainingArguments
from ..trainer.recipes import split_names, validate_minimum
from .options import GoValidator


VALIDATOR_CHOICES = get_args(GoValidator)
BUDGETS = ("problem_budget", "context_budget", "plan_budget", "code_budget")
LOSS_WEIGHTS = ("plan_loss_weight", "code_loss_weight", "refinement_loss_weight")


@dataclass
class GoDataArguments:
    """Options for converting records of Go tasks to token rows (see `golang/data/streams.py`)."""

    train_data: list[str] = HfArg(
        default_factory=list, help="Files with training records (.jsonl or .jsonl.gz), comma-separated."
    )
    eval_data: list[str] = HfArg(default_factory=list, help="Files with held-out records, comma-separated.")
    on_bad_line: str = HfArg(default="stop", help="What to do with an invalid line: stop, or skip and count it.")
    max_train_samples: int | None = HfArg(default=None, help="Train only on the first N records.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate only on the first N records.")
    tokenizer_name: str | None = HfArg(
        default=None, help="Tokenizer folder from `hrm-hf data go-tokenizer`; defaults to the model's tokenizer."
    )
    max_length: int = HfArg(default=2048, help="Maximum tokens per row.")
    problem_budget: int = HfArg(default=256, help="Maximum tokens per problem; longer ones are truncated.")
    context_budget: int = HfArg(default=512, help="Maximum tokens per context; longer ones are cut in the middle.")
    plan_budget: int = HfArg(default=512, help="Maximum tokens per plan; records with longer plans are dropped.")
    code_budget: int = HfArg(
        default=1024, help="Maximum tokens per attempt; longer attempts and records with longer solutions are dropped."
    )
    preprocessing_num_workers: int | None = HfArg(default=None, help="Number of tokenization processes.")
    data_cache_dir: str | None = HfArg(default=None, help="Cache folder for the converted records.")

    def __post_init__(self):
        self.train_data, self.eval_data = split_names(self.train_data), split_names(self.eval_data)
        if self.on_bad_line not in ("stop", "skip"):
            raise ValueError(f"on_bad_line={self.on_bad_line!r}: must be stop or skip")
        validate_minimum(self, 1, "max_train_samples", "max_eval_samples", "max_length", *BUDGETS)

    def budgets(self) -> dict[str, int]:
        """Return the token budget of each segment, keyed by its field name in a Go coder's config."""
        return {name: getattr(self, name) for name in BUDGETS}


@dataclass
class GoTrainingArguments(LmTrainingArguments):
    """Training arguments for the Go coder, or for another causal language model on the same records."""

    train_sampling_strategy: str = HfArg(
        default="group_by_length", help="Row order: random, sequential, or group_by_length (rows of similar length)."
    )
    remove_unused_columns: bool | None = HfArg(
        default=False, help="Keep this off: the collator needs columns that the model's forward does not accept."
    )

    refinement_warmup: int = HfArg(
        default=0, help="Number of initial steps that train on solutions only, without attempts or refinement loss."
    )
    refinement_ramp: int = HfArg(
        default=1000, help="Number of steps after the warmup over which the refinement loss ramps to full weight."
    )
    plan_loss_weight: float | None = HfArg(default=None, help="Overrides the config's plan loss weight.")
    code_loss_weight: float | None = HfArg(default=None, help="Overrides the config's code loss weight.")
    refinement_loss_weight: float | None = HfArg(default=None, help="Overrides the config's refinement loss weight.")
    balance_decisions: bool = HfArg(
        default=False, help="Weight the loss by inverse decision frequency; save these class weights in the config."
    )

    validation_frequency: int = HfArg(default=0, help="Generate and validate code every N steps; 0 disables it.")
    validation_prompts: int = HfArg(default=16, help="Number of held-out records to generate code for.")
    validation_max_new_tokens: int = HfArg(default=256, help="Maximum new tokens per sample.")
    validator: str = HfArg(
        default="tree-sitter", help=f"Validator ({', '.join(VALIDATOR_CHOICES)}); auto uses parser if Go is installed."
    )
    replay_file: str | None = HfArg(
        default=None, help="Also generate code for training records, and append the failed attempts to this file."
    )

    def __post_init__(self):
        super().__post_init__()
        validate_minimum(self, 0, "refinement_warmup", "refinement_ramp", "validation_frequency", *LOSS_WEIGHTS)
        validate_minimum(self, 1, "validation_prompts", "validation_max_new_tokens")
        if self.validator not in VALIDATOR_CHOICES:
            raise ValueError(f"validator={self.validator!r}: must be one of {', '.join(VALIDATOR_CHOICES)}")
        if self.replay_file and not self.validation_frequency:
            raise ValueError(f"replay_file={self.replay_file!r}: requires --validation_frequency 1 or more")
