"""Data options and training arguments for the scripts that train causal language models."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformers.hf_argparser import HfArg

from ..trainer.recipes import CarrylessTrainingArguments, split_names, validate_minimum


DEFAULT_BLOCK_SIZE = 1024  # upper limit of the default number of tokens per row
# Parameter groups, and the default factor that multiplies --learning_rate for each group.
LR_MULTIPLIERS = {"planner": 1.2, "generator": 0.8, "refinement": 1.0, "shared": 1.0}


@dataclass
class AnswerDataArguments:
    """Options that select training and evaluation rows. `text/answers.py` lists their formats."""

    train_data: list[str] = HfArg(
        default_factory=list, help="Training data: comma-separated files, folders or Hub data sets OWNER/NAME:CONFIG."
    )
    eval_data: list[str] = HfArg(default_factory=list, help="Held-out data, in the same format as --train_data.")
    train_split: str = HfArg(default="train", help="Split of Hub data sets to train on.")
    eval_split: str = HfArg(default="validation", help="Split of Hub data sets to evaluate on.")
    max_train_samples: int | None = HfArg(default=None, help="Train only on the first N rows or documents.")
    max_eval_samples: int | None = HfArg(
        default=None, help="Evaluate on the first N rows or documents; with --streaming, hold them out of the stream."
    )
    tokenizer_name: str | None = HfArg(
        default=None, help="byte, or a tokenizer's Hub name or folder; if unset, the tokenizer saved with the weights."
    )
    data_cache_dir: str | None = HfArg(default=None, help="Cache folder for converted data.")

    def __post_init__(self):
        self.train_data, self.eval_data = split_names(self.train_data), split_names(self.eval_data)
        validate_minimum(self, 1, "max_train_samples", "max_eval_samples")


@dataclass
class LmDataArguments(AnswerDataArguments):
    """Options that select text and pack it into rows of tokens. `text/sources.py` lists the file formats."""

    validation_split_percentage: float = HfArg(
        default=5.0, help="Percentage of each source to hold out from its end if --eval_data is not set; 0 to disable."
    )
    mix_probabilities: list[str] = HfArg(
        default_factory=list, help="Sampling probability of each source, e.g. 0.7,0.3. [default: concatenate]"
    )
    mix_stopping: str = HfArg(
        default="first_exhausted",
        help="first_exhausted: stop when one source ends; all_exhausted: repeat sources until all have ended.",
    )
    text_column: str = HfArg(default="text", help="JSON key or column that contains the text.")
    document_separator: str | None = HfArg(
        default=None, help="Line that separates documents in plain text files, e.g. <|endoftext|>."
    )
    on_bad_line: str = HfArg(default="stop", help="What to do with unreadable lines: stop, or skip and count them.")
    min_text_length: int | None = HfArg(default=None, help="Drop documents with fewer characters than this.")
    max_text_length: int | None = HfArg(default=None, help="Maximum length of a document in characters.")
    long_texts: str = HfArg(default="drop", help="What to do with texts longer than --max_text_length: drop or cut.")
    deduplicate: str = HfArg(
        default="none", help="Duplicate documents to remove: none, exact, or near (requires datasketch)."
    )
    near_duplicate_threshold: float = HfArg(
        default=0.8, help="Minimum Jaccard similarity of five-word sequences at which documents count as duplicates."
    )
    streaming: bool = HfArg(default=False, help="Stream the training data; requires --max_steps.")
    shuffle_buffer: int = HfArg(default=1000, help="Size of a stream's shuffle buffer in rows; 0 to disable.")
    block_size: int | None = HfArg(
        default=None, help="Number of tokens per row; if unset, 1024, or the saved model's maximum if that is less."
    )
    chunk_overlap: int = HfArg(default=0, help="Number of tokens to repeat from the previous row, as context.")
    drop_last_block: bool = HfArg(default=False, help="Drop the last row if it is not full.")
    document_mask: bool = HfArg(
        default=False, help="Mask attention between documents in one row; requires a model that accepts position_ids."
    )
    preprocessing_num_workers: int | None = HfArg(default=None, help="Number of processes for tokenization.")
    prompt: str | None = HfArg(default=None, help="Generate a continuation of this text at the end of the run.")
    prompt_new_tokens: int = HfArg(default=200, help="Maximum number of tokens to generate after --prompt.")

    def __post_init__(self):
        super().__post_init__()
        self.mix_probabilities = [float(value) for value in split_names(self.mix_probabilities)]
        self._validate_choices()
        self._validate_numbers()

    def _validate_choices(self):
        for name, allowed in {
            "on_bad_line": ("stop", "skip"),
            "long_texts": ("drop", "cut"),
            "deduplicate": ("none", "exact", "near"),
            "mix_stopping": ("first_exhausted", "all_exhausted"),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if self.streaming and self.deduplicate != "none":
            raise ValueError(f"deduplicate={self.deduplicate!r}: is not possible on a stream; remove --streaming")
        held_out = self.eval_data or self.max_eval_samples or not self.validation_split_percentage
        if self.streaming and not held_out:
            raise ValueError(
                f"validation_split_percentage={self.validation_split_percentage:g}: cannot split a stream; pass "
                "--eval_data, --max_eval_samples (documents to hold out), or --validation_split_percentage 0"
            )

    def _validate_numbers(self):
        shares, sources = self.mix_probabilities, len(self.train_data)
        if shares and len(shares) != sources:
            raise ValueError(f"mix_probabilities={shares}: needs {sources} values, one for each of {self.train_data}")
        if shares and (min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"mix_probabilities={shares}: must be positive and sum to 1, not {sum(shares):g}")
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(f"validation_split_percentage={self.validation_split_percentage}: must be in [0, 100)")
        if not 0 < self.near_duplicate_threshold <= 1:
            raise ValueError(f"near_duplicate_threshold={self.near_duplicate_threshold}: must be in (0, 1]")
        validate_minimum(self, 1, "block_size", "max_text_length", "prompt_new_tokens")
        if not 0 <= self.chunk_overlap < self.row_length:
            raise ValueError(f"chunk_overlap={self.chunk_overlap}: must be in [0, {self.row_length - 1}]")
        if None not in (self.min_text_length, self.max_text_length) and self.min_text_length > self.max_text_length:
            raise ValueError(f"min_text_length={self.min_text_length}: exceeds max_text_length={self.max_text_length}")

    @property
    def row_length(self) -> int:
        """Number of tokens per row: `block_size` or its default."""
        return DEFAULT_BLOCK_SIZE if self.block_size is None else self.block_size


@dataclass
class LmTrainingArguments(CarrylessTrainingArguments):
    """Training arguments for causal language models.

    The default learning rate follows published models of similar size: 6e-4 at 125M and 3e-4 at 350M parameters (Brown
    et al. 2020, table 2.1), 2.2e-4 to 2.5e-4 at 0.6B to 1B for HRM-Text. Lower it for fine-tuning.
    """

    best_metric: ClassVar[str] = "eval_lm_loss"  # this metric excludes label smoothing and auxiliary losses

    learning_rate: float = HfArg(default=3e-4, help="Peak learning rate; lower it for fine-tuning.")
    weight_decay: float = HfArg(
        default=0.1, help="Weight decay for matrices and embeddings; biases, norms and scales are not decayed."
    )
    warmup_steps: float = HfArg(default=1000, help="Linear warm-up steps; a value below 1 is a fraction of the run.")

    lr_multipliers: str | None = HfArg(
        default=None,
        help="Learning-rate multipliers of a model's parameter groups, e.g. planner=1.2,generator=0.8; other "
        "groups use 1. The default is planner=1.2,generator=0.8 for models with these groups.",
    )
    bp_warmup_ratio: float = HfArg(
        default=0.2, help="Fraction of the run over which the backpropagation depth grows to the config's bp_steps."
    )
    halt_warmup_ratio: float = HfArg(
        default=0.5, help="Initial fraction of the run in which each token gets all segments; later, the gate decides."
    )

    depth_warmup_ratio: float = HfArg(
        default=0.0, help="Initial fraction of the run with one segment per token, which is as fast as a plain model."
    )
    depth_ramp_ratio: float = HfArg(
        default=0.0,
        help="Fraction of the run, after depth_warmup_ratio, over which the mean number of segments grows from 1 to "
        "halt_max_steps.",
    )
    depth_ramp: Literal["linear", "1-sqrt"] = HfArg(
        default="linear", help="Shape of the --depth_ramp_ratio ramp; 1-sqrt grows slowly at first: 1 - sqrt(1 - t)."
    )
    keep_one_pass: float = HfArg(
        default=0.0,
        help="Fraction of steps with one segment per token, so that the model still works with a single segment.",
    )
    train_adapters_only: bool = HfArg(
        default=False,
        help="Freeze the pretrained weights, and train only what a loop adds to them: gate, bridge, "
        "damping, pass gains, step vectors, and the low-rank updates enabled by pass_lora_rank.",
    )
    train_gate_only: bool = HfArg(
        default=False, help="Freeze the language model and train only its halting gate. All segments run."
    )

    def __post_init__(self):
        ratios = ("bp_warmup_ratio", "halt_warmup_ratio", "depth_warmup_ratio", "depth_ramp_ratio")
        for name in (*ratios, "keep_one_pass"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be in [0, 1], a fraction of the run")
        if self.train_adapters_only and self.train_gate_only:
            raise ValueError("train_adapters_only=True: cannot be combined with train_gate_only; remove one option")
        if self.depth_warmup_ratio + self.depth_ramp_ratio > 1:
            raise ValueError(
                f"depth_ramp_ratio={self.depth_ramp_ratio}: depth_warmup_ratio={self.depth_warmup_ratio} leaves only "
                f"{1 - self.depth_warmup_ratio:g} of the run; lower one of them"
            )
        super().__post_init__()
        self.group_multipliers()

    def group_multipliers(self) -> dict[str, float]:
        """Parse `lr_multipliers` for every group. Raise ValueError for unknown groups and invalid numbers."""
        if self.lr_multipliers is None:
            return dict(LR_MULTIPLIERS)
        found = dict.fromkeys(LR_MULTIPLIERS, 1.0)
        for item in self.lr_multipliers.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in LR_MULTIPLIERS:
                raise ValueError(f"lr_multipliers: {name!r} must be one of the groups {', '.join(LR_MULTIPLIERS)}")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if not 0 <= found[name] < float("inf"):
                raise ValueError(f"lr_multipliers: {item.strip()!r} must have the form group=number, with number >= 0")
        return found
