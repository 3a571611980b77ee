"""Options of a run on Go: records and their budgets, and the training of the Go coder."""

from dataclasses import dataclass
from typing import get_args

from transformers.hf_argparser import HfArg

from ..text.arguments import LmTrainingArguments
from ..trainer.recipes import split_names
from .options import GoValidator


VALIDATOR_CHOICES = get_args(GoValidator)
BUDGETS = ("problem_budget", "context_budget", "plan_budget", "code_budget")
LOSS_WEIGHTS = ("plan_loss_weight", "code_loss_weight", "refinement_loss_weight")


@dataclass
class GoDataArguments:
    """Which records of Go tasks, and how they become rows of tokens. See `golang/data/streams.py`."""

    train_data: list[str] = HfArg(
        default_factory=list, help="Files of records (.jsonl, .jsonl.gz) to train on; with commas."
    )
    eval_data: list[str] = HfArg(default_factory=list, help="Files of held-out records.")
    on_bad_line: str = HfArg(default="stop", help="Lines that are no record: stop, or skip and count.")
    max_train_samples: int | None = HfArg(default=None, help="Train on the first records only.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on the first records only.")
    tokenizer_name: str | None = HfArg(
        default=None, help="Folder of `hrm-hf data go-tokenizer`; that of the weights by default."
    )
    max_length: int = HfArg(default=2048, help="Most tokens of a row.")
    problem_budget: int = HfArg(default=256, help="Most tokens of a problem; its end is cut.")
    context_budget: int = HfArg(default=512, help="Most tokens of a context; its middle is cut.")
    plan_budget: int = HfArg(default=512, help="Records with a longer plan are dropped.")
    code_budget: int = HfArg(
        default=1024, help="Records with a longer solution are dropped, longer failed attempts left out."
    )
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenize.")
    data_cache_dir: str | None = HfArg(default=None, help="Where converted data are kept.")

    def __post_init__(self):
        self.train_data, self.eval_data = split_names(self.train_data), split_names(self.eval_data)
        if self.on_bad_line not in ("stop", "skip"):
            raise ValueError(f"on_bad_line={self.on_bad_line!r}: must be stop or skip")
        for name in ("max_train_samples", "max_eval_samples", "max_length", *BUDGETS):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    def budgets(self) -> dict[str, int]:
        """Return the budgets of the segments, as in a Go coder's config."""
        return {name: getattr(self, name) for name in BUDGETS}


@dataclass
class GoTrainingArguments(LmTrainingArguments):
    """For the Go coder, and for other causal language models on the same records."""

    train_sampling_strategy: str = HfArg(
        default="group_by_length", help="random, sequential or group_by_length: rows of about one length make a batch."
    )
    remove_unused_columns: bool | None = HfArg(
        default=False, help="Off: the collator reads columns that no model takes."
    )

    refinement_warmup: int = HfArg(
        default=0, help="Steps with solutions only: no attempts in the data, no refinement loss."
    )
    refinement_ramp: int = HfArg(
        default=1000, help="Steps after that over which the refinement loss grows to its weight."
    )
    plan_loss_weight: float | None = HfArg(default=None, help="Instead of the config's.")
    code_loss_weight: float | None = HfArg(default=None, help="Instead of the config's.")
    refinement_loss_weight: float | None = HfArg(default=None, help="Instead of the config's.")
    balance_decisions: bool = HfArg(
        default=False, help="Weigh each kind of decision by how rare it is in the training data; kept in the config."
    )

    validation_frequency: int = HfArg(default=0, help="Write and check code every so many steps; 0 for never.")
    validation_prompts: int = HfArg(default=16, help="Evaluation records that are written then.")
    validation_max_new_tokens: int = HfArg(default=256, help="Most tokens of that code.")
    validator: str = HfArg(
        default="tree-sitter", help=f"What checks it: {', '.join(VALIDATOR_CHOICES)} (parser where Go is)."
    )
    replay_file: str | None = HfArg(
        default=None, help="Also write as many training records then, and append those that fail here, as attempts."
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("refinement_warmup", "refinement_ramp", "validation_frequency", *LOSS_WEIGHTS):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0")
        for name in ("validation_prompts", "validation_max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.validator not in VALIDATOR_CHOICES:
            raise ValueError(f"validator={self.validator!r}: must be one of {', '.join(VALIDATOR_CHOICES)}")
        if self.replay_file and not self.validation_frequency:
            raise ValueError(f"replay_file={self.replay_file!r}: needs --validation_frequency")
