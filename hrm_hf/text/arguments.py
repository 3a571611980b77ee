"""Options of a run on text: documents or prompts with answers, and the training of causal language models."""

from dataclasses import dataclass
from typing import ClassVar

from transformers.hf_argparser import HfArg

from ..trainer.recipes import CarrylessTrainingArguments, split_names


# Groups of parameters with learning rates of their own, and what they are multiplied by without --lr_multipliers.
LR_MULTIPLIERS = {"planner": 1.2, "generator": 0.8, "refinement": 1.0, "shared": 1.0}


@dataclass
class AnswerDataArguments:
    """Which rows a model is trained on. Prompts and answers are described in `text/answers.py`."""

    train_data: list[str] = HfArg(
        default_factory=list, help="Data to train on: files, folders, or OWNER/NAME:CONFIG of the Hub; with commas."
    )
    eval_data: list[str] = HfArg(default_factory=list, help="Held-out data, as --train_data.")
    train_split: str = HfArg(default="train", help="Split of Hub data sets to train on.")
    eval_split: str = HfArg(default="validation", help="Split of Hub data sets in --eval_data.")
    max_train_samples: int | None = HfArg(default=None, help="Train on the first documents only.")
    max_eval_samples: int | None = HfArg(
        default=None, help="Evaluate on the first documents only; of a stream, hold them out."
    )
    tokenizer_name: str | None = HfArg(
        default=None, help="byte, or a tokenizer of the Hub or a folder; that of the weights by default."
    )
    data_cache_dir: str | None = HfArg(default=None, help="Where converted data are kept.")

    def __post_init__(self):
        self.train_data, self.eval_data = split_names(self.train_data), split_names(self.eval_data)
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass
class LmDataArguments(AnswerDataArguments):
    """Which text, and how it becomes rows of tokens: .jsonl, .txt, .parquet, .gz or folders, see `text/sources.py`."""

    validation_split_percentage: float = HfArg(
        default=5.0, help="Without --eval_data: share of each source's end that is held out; 0 for none."
    )
    mix_probabilities: list[str] = HfArg(
        default_factory=list, help="Share of each source of --train_data, e.g. 0.7,0.3; without, one after another."
    )
    mix_stopping: str = HfArg(
        default="first_exhausted",
        help="Mixing ends when the first source does, or (all_exhausted) repeats them until the last.",
    )
    text_column: str = HfArg(default="text", help="JSON key or column that holds the text.")
    document_separator: str | None = HfArg(
        default=None, help="Line that separates documents of a plain text, e.g. <|endoftext|>."
    )
    on_bad_line: str = HfArg(default="stop", help="Unreadable lines: stop, or skip and count them.")
    min_text_length: int | None = HfArg(default=None, help="Drop documents of fewer characters.")
    max_text_length: int | None = HfArg(default=None, help="Longest document in characters.")
    long_texts: str = HfArg(default="drop", help="Above --max_text_length: drop the document or cut it.")
    deduplicate: str = HfArg(
        default="none", help="Remove documents seen before: none, exact, or near (needs datasketch)."
    )
    near_duplicate_threshold: float = HfArg(
        default=0.8, help="Similarity (Jaccard, five-word sequences) from which documents are the same."
    )
    streaming: bool = HfArg(default=False, help="Read training data while training; needs --max_steps.")
    shuffle_buffer: int = HfArg(default=1000, help="Rows among which a stream is shuffled; 0 for none.")
    block_size: int = HfArg(default=1024, help="Tokens of a row.")
    chunk_overlap: int = HfArg(default=0, help="Tokens that a row repeats from the last, as context.")
    drop_last_block: bool = HfArg(default=False, help="Leave out the last row if it is not full.")
    document_mask: bool = HfArg(
        default=False, help="Documents in one row do not see each other (models with position_ids)."
    )
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenize.")
    prompt: str | None = HfArg(default=None, help="Continue this text at the end of the run.")
    prompt_new_tokens: int = HfArg(default=200, help="Tokens of that continuation.")

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
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.streaming and self.deduplicate != "none":
            raise ValueError(f"deduplicate={self.deduplicate!r} has to see all documents first; leave out --streaming")
        held_out = self.eval_data or self.max_eval_samples or not self.validation_split_percentage
        if self.streaming and not held_out:
            raise ValueError(
                f"validation_split_percentage={self.validation_split_percentage:g} of a stream is unknown: give "
                "--eval_data, hold out documents with --max_eval_samples, or none with --validation_split_percentage 0"
            )

    def _validate_numbers(self):
        shares, sources = self.mix_probabilities, len(self.train_data)
        if shares and len(shares) != sources:
            raise ValueError(f"mix_probabilities has {len(shares)} values for {sources} sources: {self.train_data}")
        if shares and (min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"mix_probabilities={shares} must be positive and add up to 1, not {sum(shares):g}")
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(f"validation_split_percentage={self.validation_split_percentage} is outside 0..100")
        if not 0 < self.near_duplicate_threshold <= 1:
            raise ValueError(f"near_duplicate_threshold={self.near_duplicate_threshold} is outside 0..1")
        for name in ("block_size", "max_text_length", "prompt_new_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.chunk_overlap < self.block_size:
            raise ValueError(f"chunk_overlap={self.chunk_overlap} is not from 0 to {self.block_size - 1}")
        if None not in (self.min_text_length, self.max_text_length) and self.min_text_length > self.max_text_length:
            raise ValueError(f"min_text_length={self.min_text_length} is above max_text_length={self.max_text_length}")


@dataclass
class LmTrainingArguments(CarrylessTrainingArguments):
    """For causal language models.

    The learning rate is that of published models of these sizes: 6e-4 at 125M and 3e-4 at 350M parameters (Brown et
    al. 2020, table 2.1), 2.2e-4 to 2.5e-4 at 0.6B to 1B for HRM-Text. Lower it for fine-tuning.
    """

    best_metric: ClassVar[str] = "eval_lm_loss"  # without label smoothing and auxiliary losses

    learning_rate: float = HfArg(default=3e-4, help="Peak learning rate; lower it for fine-tuning.")
    weight_decay: float = HfArg(
        default=0.1, help="Weight decay of matrices and embeddings; biases, norms and scales have none."
    )
    warmup_steps: float = HfArg(default=1000, help="Steps of linear warm-up, or their share if below 1.")

    lr_multipliers: str | None = HfArg(
        default=None,
        help="Learning rates of a model's groups over --learning_rate, e.g. planner=1.2,generator=0.8; what is "
        "not named has 1. By default planner 1.2 and generator 0.8, for models with these groups.",
    )
    bp_warmup_ratio: float = HfArg(
        default=0.2, help="Share of the run over which the back-prop depth grows to the config's bp_steps."
    )
    halt_warmup_ratio: float = HfArg(
        default=0.5, help="Share of the run in which every token gets all segments; then the halting gate decides."
    )

    depth_warmup_ratio: float = HfArg(
        default=0.0, help="Share of the run in which every token gets one segment, at the price of a plain model."
    )
    train_gate_only: bool = HfArg(
        default=False, help="Freeze the language model, and teach its halting gate when all segments have run."
    )

    def __post_init__(self):
        for name in ("bp_warmup_ratio", "halt_warmup_ratio", "depth_warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a share of the run, 0..1")
        super().__post_init__()
        self.group_multipliers()

    def group_multipliers(self) -> dict[str, float]:
        """`lr_multipliers` as numbers, for every group. Raises ValueError for what is no group or no number."""
        if self.lr_multipliers is None:
            return dict(LR_MULTIPLIERS)
        found = dict.fromkeys(LR_MULTIPLIERS, 1.0)
        for item in self.lr_multipliers.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in LR_MULTIPLIERS:
                raise ValueError(f"lr_multipliers: {name!r} is no group; there are {', '.join(LR_MULTIPLIERS)}")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if not 0 <= found[name] < float("inf"):
                raise ValueError(f"lr_multipliers: {item.strip()!r} is not of the form group=number, from 0 up")
        return found
