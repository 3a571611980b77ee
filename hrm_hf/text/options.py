"""Options of `hrm-hf serve`, `rlm`, `retrofit`, `data reasoning`, `eval lm` and `eval reasoning`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..io.evaluation import EvaluationOptions, validate_data
from ..io.options import Options, option
from ..io.usage import UsageError


# Halting criteria: the keys of `hrm_hf.models.early_exit.EXIT_CRITERIA`.
Exit = Literal["q", "cdf", "kl", "latent_diff", "second_diff", "entropy_diff", "confidence", "fixed"]
# Reasoning tasks: the keys of `hrm_hf.text.reasoning.tasks.TASKS`.
ReasoningTask = Literal["automaton", "pointers", "permutations", "addition", "brackets", "maze"]


@dataclass(kw_only=True)
class ThinkingOptions(Options):
    """Options that override the halting fields in an `hrm_lm` config."""

    exit_criterion: Exit | None = option("Halting criterion (hrm_lm). [default: the config's criterion]", None)
    exit_threshold: float | None = option(
        "Threshold of the halting criterion; q and fixed have none. [default: depends on the criterion]", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_threshold is None:
            return
        if self.exit_criterion in (None, "q", "fixed"):
            problem = "requires a criterion with a threshold; pass --exit-criterion (not q or fixed)"
        elif self.exit_threshold <= 0 or (self.exit_criterion in ("cdf", "confidence") and self.exit_threshold > 1):
            problem = f"must be > 0 (and <= 1 for cdf and confidence); the criterion is {self.exit_criterion}"
        else:
            return
        raise UsageError(f"exit_threshold={self.exit_threshold:g}: {problem}", "--exit-threshold")

    @property
    def halting(self) -> dict[str, Any]:
        """Halting options that are set."""
        given = {"exit_criterion": self.exit_criterion, "exit_threshold": self.exit_threshold}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(kw_only=True)
class WriteText(ThinkingOptions):
    """Generation options of the app's text page. An option that is None takes the model's default."""

    max_new_tokens: int = option("Maximum number of new tokens.", 120, min=1)
    temperature: float = option("Sampling temperature; 0 always selects the most likely token.", 0.8, min=0)
    top_p: float = option("Sample only from the most likely tokens with this total probability.", 1.0, min=0, max=1)
    top_k: int = option("Sample only from the N most likely tokens; 0 for all.", 0, min=0)
    seed: int = option("Random seed for sampling.", 0, min=0)
    num_segments: int | None = option("Maximum segments per token, for models that halt.", None, min=1)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    @property
    def thinking(self) -> dict[str, Any]:
        """Halting options that are set, as arguments of the model's forward pass."""
        return self.halting | ({"num_segments": self.num_segments} if self.num_segments else {})


@dataclass(kw_only=True)
class EvaluateLm(EvaluationOptions, ThinkingOptions):
    """Options of `hrm-hf eval lm`."""

    data: list[str] = option("Text: .txt, .jsonl, .parquet, .gz, a folder, or OWNER/NAME on the Hub; can be repeated.")
    split: str = option("Split of a Hub data set; for files, the split name to report.", "test")
    last_percentage: float | None = option(
        "Evaluate only the last N percent of each source, which run_clm.py holds out.", None, min=0.01, max=99.99
    )
    text_column: str = option("JSON key or column that contains the text.", "text")
    document_separator: str | None = option("Line that separates documents in plain text.", None)
    on_bad_line: Literal["stop", "skip"] = option("What to do with an unreadable line.", "stop")
    tokenizer: str | None = option("Tokenizer to use instead of the checkpoint's own.", None)
    block_size: int | None = option("Tokens per row. [default: the context length, at most 1024]", None, min=2)
    overlap: int = option("Number of tokens to repeat from the previous row, as context.", 0, min=0)
    num_segments: int | None = option("Maximum segments per token (hrm_lm). [default: as in the config]", None, min=1)
    batch_size: int = option("Number of rows per batch.", 8, min=1)
    limit: int | None = option(
        "Evaluate only the first N rows; bits per byte use the average bytes per token of all rows.", None, min=1
    )


@dataclass(kw_only=True)
class EvaluateReasoning(EvaluationOptions, ThinkingOptions):
    """Options of `hrm-hf eval reasoning`."""

    data: str = option("Data set from `hrm-hf data reasoning`: a folder or a name on the Hub.", argument=True)
    splits: str = option("Comma-separated splits. [default: test, and beyond if the data set has it]", "")
    passes: str = option("Also evaluate with these numbers of passes (hrm_lm: segments), separated by commas.", "")
    batch_size: int = option("Number of rows per batch.", 64, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_data(self.data, "data set of `hrm-hf data reasoning`")
        parts = [part.strip() for part in self.passes.split(",")] if self.passes else []
        if not all(part.isdecimal() and int(part) >= 1 for part in parts):
            raise UsageError(f"passes={self.passes!r}: must be positive integers, such as 1,2,4,8", "--passes")
        self.numbers = sorted({int(part) for part in parts})


@dataclass(kw_only=True)
class BuildReasoning(Options):
    """Options of `hrm-hf data reasoning`. An option that is None takes the task's default."""

    task: ReasoningTask = option("Reasoning task.", argument=True)
    out: Path = option("Output folder.")
    size: int | None = option(
        "Size of a question: cells (automaton), nodes (pointers), items (permutations), digits (addition), kinds of "
        "brackets (brackets), or cells per side (maze).",
        None,
    )
    difficulty: str | None = option(
        "Difficulty of the training data, e.g. 8 or 1-8: the depth, or the number of steps, hops, generators, or "
        "addends.",
        None,
    )
    beyond: str | None = option(
        "Difficulty of the beyond split, or none. [default: up to twice the training maximum]", None
    )
    answers: Literal["all", "last"] | None = option(
        "all: ask for the result of every step; last: ask only for the last result.", None
    )
    num_train: int = option("Number of training rows.", 100_000, min=1)
    num_validation: int = option("Number of validation rows.", 1000, min=0)
    num_test: int = option("Number of rows per difficulty in the test and beyond splits.", 500, min=0)
    seed: int = option("Random seed of the data set.", 0, min=0)


@dataclass(kw_only=True)
class ServeOptions(Options):
    """Options of `hrm-hf serve`. The fields from `host` on are passed to `transformers serve`."""

    model: str = option("Checkpoint folder, or a model on the Hub.", argument=True)
    max_new_tokens: int | None = option(
        "Maximum number of tokens per answer. [default: limited only by the context window]", None, min=1
    )
    max_requests: int = option("Maximum number of concurrent requests; further ones get status 429.", 16, min=1)
    max_body_bytes: int = option("Maximum size of a request body in bytes.", 2**20, min=1)
    allow_host: list[str] | None = option("Additional host name of this server, or *.NAME; can be repeated.", None)
    host: str = option("Address to listen on; 0.0.0.0 for all interfaces.", "localhost")
    port: int = option("Port to listen on.", 8000, min=1, max=65535)
    enable_cors: bool = option("Allow requests from web pages of any origin.", False)
    device: str = option("Device: auto, cpu, cuda:0, ...", "auto")
    dtype: str = option("Data type of the weights, such as bfloat16; auto uses the saved type.", "auto")
    attn_implementation: str | None = option("Attention implementation, such as sdpa or flash_attention_2.", None)
    compile: bool = option("Decode with a static cache and torch.compile.", False)
    continuous_batching: bool = option("Batch requests with a paged cache.", False)
    quantization: Literal["bnb-4bit", "bnb-8bit"] | None = option("Quantize the weights with bitsandbytes.", None)
    reasoning: Literal["auto", "on", "off"] = option(
        "Turn thinking mode on or off, if the chat template has a switch for it.", "auto"
    )
    chat_template_kwargs: str | None = option("JSON object of arguments for the chat template.", None)
    default_seed: int | None = option("Default random seed for sampling.", None)
    trust_remote_code: bool = option("Run model code from the Hub.", False)
    log_level: str = option("Log level, such as info or warning.", "warning")


@dataclass(kw_only=True)
class RlmCaps(Options):
    """Limits for one run of a recursive language model."""

    max_turns: int = option("Maximum number of replies in the root REPL, and in each child REPL.", 30, min=1)
    max_sub_calls: int = option("Maximum total number of prompts in calls to llm_query and rlm_query.", 100, min=1)
    max_depth: int = option("Maximum depth of nested REPLs; at 2 or more, rlm_query opens a child REPL.", 1, min=1)
    max_new_tokens: int | None = option(
        "Maximum number of tokens per reply. [default: 1024, or a quarter of the context window if less]", None, min=1
    )
    max_wall_seconds: float = option(
        "Time limit of the run in seconds; its last tenth is reserved for a final answer.", 600.0, min=0.001
    )
    max_output_chars: int = option("Maximum number of printed characters that the model sees per turn.", 20_000, min=1)
    batch_size: int = option("Batch size of llm_query_batched.", 16, min=1)
    seed: int = option("Random seed for sampling, and for `random` in the REPL.", 0, min=0)


@dataclass(kw_only=True)
class RlmOptions(RlmCaps):
    """Options of `hrm-hf rlm`."""

    model: str = option("Instruct model: a checkpoint folder, or a model on the Hub.", argument=True)
    question: str = option("Question about the context.")
    context_file: Path = option("File with the context: text, .json (a list or dict), or .jsonl (a list).")
    out: Path | None = option("Write every turn to this .jsonl file.", None)
    device: str | None = option("Device: cpu, cuda, mps, ... [default: the best available device]", None)

    @property
    def caps(self) -> dict[str, Any]:
        """The caps of this run, as arguments of `RlmCaps`."""
        return {each.name: getattr(self, each.name) for each in fields(RlmCaps)}


@dataclass(kw_only=True)
class RetrofitOptions(Options):
    """Options of `hrm-hf retrofit`. The choices for `input_injection` and `loop_step` are those of `HrmLmConfig`."""

    model: str = option(
        "Llama, Qwen2, Qwen3 or Mistral model with safetensors weights: a folder, or a Hub name.", argument=True
    )
    out: Path = option("Folder to write.")
    prelude: int | None = option("Layers before the loop. [default: 40 % of the layers]", None, min=0)
    loop: int | None = option("Layers in the loop. [default: an eighth of the layers, at least 2]", None, min=1)
    coda: int | None = option("Layers after the loop. [default: the remaining layers]", None, min=0)
    passes: int = option("Maximum number of passes through the loop.", 4, min=1)
    input_injection: Literal["add", "none", "gated", "bridge", "concat"] = option(
        "How each pass after the first combines the state with the prelude's output.", "gated"
    )
    loop_step: Literal["replace", "damped", "rescaled"] = option(
        "How passes after the first update the state: replace it; move it a learned fraction of the way (damped); or "
        "replace it, with inputs scaled to the size of the prelude's output (rescaled).", "damped"
    )  # fmt: skip
    force: bool = option("Overwrite existing files.", False)
