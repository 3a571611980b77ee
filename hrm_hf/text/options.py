"""Options of the commands about text: `hrm-hf serve`, `rlm`, `data reasoning`, `eval lm` and `eval reasoning`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..io.evaluation import EvaluationOptions, validate_data
from ..io.options import Options, option
from ..io.usage import UsageError


# When a token stops thinking; the names of `hrm_hf.models.early_exit.EXIT_CRITERIA`.
Exit = Literal["q", "cdf", "kl", "latent_diff", "second_diff", "entropy_diff", "confidence", "fixed"]
# The keys of `hrm_hf.text.reasoning.tasks.TASKS`.
ReasoningTask = Literal["automaton", "pointers", "permutations", "addition", "brackets", "maze"]


@dataclass(kw_only=True)
class ThinkingOptions(Options):
    """When the tokens of an `hrm_lm` halt; the fields of its config by default."""

    exit_criterion: Exit | None = option("Criterion that halts a token (hrm_lm); the config's by default.", None)
    exit_threshold: float | None = option(
        "Threshold of the criterion (not for q, fixed); its default otherwise.", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_threshold is None:
            return
        if self.exit_criterion in (None, "q", "fixed"):
            problem = "needs a criterion that has a threshold; give --exit-criterion (not q, fixed)"
        elif self.exit_threshold <= 0 or (self.exit_criterion in ("cdf", "confidence") and self.exit_threshold > 1):
            problem = f"must be above 0, and of cdf and confidence at most 1, for {self.exit_criterion}"
        else:
            return
        raise UsageError(f"exit_threshold={self.exit_threshold:g}: {problem}", "--exit-threshold")

    @property
    def halting(self) -> dict[str, Any]:
        """The options that were given."""
        given = {"exit_criterion": self.exit_criterion, "exit_threshold": self.exit_threshold}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(kw_only=True)
class WriteText(ThinkingOptions):
    """How the page writes text; None leaves a choice to the model."""

    max_new_tokens: int = option("Most tokens.", 120, min=1)
    temperature: float = option("0 takes the likeliest token.", 0.8, min=0)
    top_p: float = option("Sample from the likeliest tokens that have this probability in total.", 1.0, min=0, max=1)
    top_k: int = option("Sample from this many of the likeliest tokens; 0 for all.", 0, min=0)
    seed: int = option("Seed of sampling.", 0, min=0)
    num_segments: int | None = option("Most segments of a token, of a model that halts.", None, min=1)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    @property
    def thinking(self) -> dict[str, Any]:
        """Arguments of the forward of a model that halts, as far as they were chosen."""
        return self.halting | ({"num_segments": self.num_segments} if self.num_segments else {})


@dataclass(kw_only=True)
class EvaluateLm(EvaluationOptions, ThinkingOptions):
    """Options of `hrm-hf eval lm`."""

    data: list[str] = option("Text: .txt, .jsonl, .parquet, .gz, a folder, or OWNER/NAME; repeat for more.")
    split: str = option("Split of a Hub data set; for files, the name to report.", "test")
    last_percentage: float | None = option(
        "Evaluate only the end of each source, the part that run_clm.py holds out.", None, min=0.01, max=99.99
    )
    text_column: str = option("JSON key or column that holds the text.", "text")
    document_separator: str | None = option("Line that separates documents in plain text.", None)
    on_bad_line: Literal["stop", "skip"] = option("What to do at a corrupt line of JSON Lines.", "stop")
    tokenizer: str | None = option("Tokenizer to use instead of the checkpoint's own.", None)
    block_size: int | None = option("Tokens per row; the model's positions, at most 1024, by default.", None, min=2)
    overlap: int = option("Tokens of the previous row that a row repeats as context.", 0, min=0)
    num_segments: int | None = option("Maximum segments per token (hrm_lm); the config's by default.", None, min=1)
    batch_size: int = option("Rows at a time.", 8, min=1)
    limit: int | None = option(
        "Evaluate only the first rows; bits per byte then use the text's average bytes per token.", None, min=1
    )


@dataclass(kw_only=True)
class EvaluateReasoning(EvaluationOptions, ThinkingOptions):
    """Options of `hrm-hf eval reasoning`."""

    data: str = option("Folder of `hrm-hf data reasoning`, or such a data set on the Hub.", argument=True)
    splits: str = option("Comma-separated splits; by default test, and beyond if the data set has it.", "")
    passes: str = option("Comma-separated numbers of passes (hrm_lm: segments) besides the model's choice.", "")
    batch_size: int = option("Rows at a time.", 64, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_data(self.data, "data set of `hrm-hf data reasoning`")
        parts = [part.strip() for part in self.passes.split(",")] if self.passes else []
        if not all(part.isdecimal() and int(part) >= 1 for part in parts):
            raise UsageError(f"passes={self.passes!r}: must be numbers from 1 with commas, as 1,2,4,8", "--passes")
        self.numbers = sorted({int(part) for part in parts})


@dataclass(kw_only=True)
class BuildReasoning(Options):
    """Options of `hrm-hf data reasoning`. Defaults of None are those of the task."""

    task: ReasoningTask = option("Reasoning task.", argument=True)
    out: Path = option("Folder to write.")
    size: int | None = option(
        "Cells (automaton), nodes (pointers), items (permutations), digits (addition), kinds (brackets), cells a side "
        "(maze).",
        None,
    )
    difficulty: str | None = option(
        "Difficulty of the training data, as 8 or 1-8: steps, hops, generators, numbers, depth.", None
    )
    beyond: str | None = option(
        "Difficulty of the split beyond, or none. [default: up to twice that of the training data]", None
    )
    answers: Literal["all", "last"] | None = option("Ask for the result of every step, or of the last one.", None)
    num_train: int = option("Training rows.", 100_000, min=1)
    num_validation: int = option("Rows of the split validation.", 1000, min=0)
    num_test: int = option("Rows of each difficulty in the splits test and beyond.", 500, min=0)
    seed: int = option("Seed of the complete set.", 0, min=0)


@dataclass(kw_only=True)
class ServeOptions(Options):
    """Options of `hrm-hf serve`. Those from `host` on are passed to `transformers serve`."""

    model: str = option("Checkpoint folder, or a model on the Hub.", argument=True)
    max_new_tokens: int | None = option(
        "Most tokens of an answer; by default what the model's window leaves.", None, min=1
    )
    max_requests: int = option("Requests at once; further ones get 429.", 16, min=1)
    max_body_bytes: int = option("Bytes of a request's body.", 2**20, min=1)
    allow_host: list[str] | None = option("Another name of this server, or *.NAME; repeat.", None)
    host: str = option("Address to listen on; 0.0.0.0 is every one.", "localhost")
    port: int = option("Port to listen on.", 8000, min=1, max=65535)
    enable_cors: bool = option("Let pages of all hosts send requests.", False)
    device: str = option("auto, cpu, cuda:0, ...", "auto")
    dtype: str = option("Data type of the weights, such as bfloat16; auto: as they were saved.", "auto")
    attn_implementation: str | None = option("Attention implementation, such as sdpa or flash_attention_2.", None)
    compile: bool = option("Decode with a static cache and torch.compile.", False)
    continuous_batching: bool = option("Batch requests over a paged cache (models without recurrence).", False)
    quantization: Literal["bnb-4bit", "bnb-8bit"] | None = option("Quantize the weights with bitsandbytes.", None)
    reasoning: Literal["auto", "on", "off"] = option("Thinking, where the chat template has a switch.", "auto")
    chat_template_kwargs: str | None = option("JSON object of arguments for the chat template.", None)
    default_seed: int | None = option("Seed of sampling.", None)
    trust_remote_code: bool = option("Run model code from the Hub.", False)
    log_level: str = option("Log level, such as info or warning.", "warning")


@dataclass(kw_only=True)
class RlmCaps(Options):
    """Bounds of one run of a recursive language model."""

    max_turns: int = option("Replies of the root model, and of each child.", 30, min=1)
    max_sub_calls: int = option("Prompts of llm_query and rlm_query, at all depths.", 100, min=1)
    max_depth: int = option("Levels of REPLs; from 2 on, rlm_query opens a child with a REPL of its own.", 1, min=1)
    max_new_tokens: int | None = option(
        "Most tokens of each reply. [default: 1024, or a quarter of a window below 4096]", None, min=1
    )
    max_wall_seconds: float = option(
        "Time limit of the run in seconds; its last tenth is reserved for a final answer.", 600.0, min=0.001
    )
    max_output_chars: int = option("Printed characters that the model is shown after each turn.", 20_000, min=1)
    batch_size: int = option("Prompts of llm_query_batched in one call of generate.", 16, min=1)
    seed: int = option("Seed of sampling, and of `random` in the REPL.", 0, min=0)


@dataclass(kw_only=True)
class RlmOptions(RlmCaps):
    """Options of `hrm-hf rlm`."""

    model: str = option("Checkpoint folder, or a model on the Hub; an instruct model.", argument=True)
    question: str = option("Question about the context.")
    context_file: Path = option("Text, or .json (a list or dict), or .jsonl (a list).")
    out: Path | None = option("Write every turn to this .jsonl file.", None)
    device: str | None = option("cpu, cuda, mps, ...; the best there is by default.", None)

    @property
    def caps(self) -> dict[str, Any]:
        """The fields of `RlmCaps`."""
        return {each.name: getattr(self, each.name) for each in fields(RlmCaps)}
