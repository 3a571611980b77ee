"""Options of the Go commands, which write, evaluate, build data and run the demo. This module needs no torch."""

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
    """Sampling options for a Go coder, and the validator for its code."""

    validator: GoValidator = option("Validator; auto uses parser if Go is installed, else tree-sitter.", "auto")
    repetition_guard: bool = option("Prevent plans and code from repeating themselves endlessly.", True)
    seed: int = option("Random seed.", 0, min=0)
    device: str | None = option("Device: cpu, cuda, mps, ... [default: the best available device]", None)


@dataclass(kw_only=True)
class WriteGo(SamplingOptions):
    """Options of `hrm-hf go` and `generate_code`."""

    model: str = option("Go coder: checkpoint folder, or a model on the Hub.", argument=True)
    prompts: list[str] | None = option("Descriptions of the code to write.", None, argument=True)
    prefix: list[str] | None = option("Beginning of the code, e.g. a signature; one per prompt.", None)
    records: Path | None = option("Read the prompts from this file of records instead.", None)
    limit: int = option("Number of records to use, evenly spaced over the file.", 3, min=1)
    validator: Literal[GoValidator, "none"] = option("Validator; auto: parser, or tree-sitter without Go.", "auto")
    max_iterations: int | None = option("Maximum attempts; defaults to the model's setting.", None, min=1, max=5)
    threshold: float | None = option("Minimum P(DONE) to stop; defaults to the model's setting.", None, min=0, max=1)
    max_new_tokens: int | None = option("Maximum new tokens per attempt; defaults to the model's budget.", None, min=1)
    temperature: float | None = option("Sampling temperature; 0 (greedy) by default, 0.8 with --repair.", None, min=0)
    repair: bool = option("Try records until the model repairs a failed attempt, and show only that record.", False)
    stream: bool | None = option("Stream the first attempt for a single prompt; on by default in a terminal.", None)
    out: Path | None = option("Also save the complete output to this JSON file.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompts) == (self.records is not None):
            raise UsageError("no prompts; pass either PROMPTS or --records FILE", "PROMPTS")
        if self.records is not None and not self.records.is_file():
            raise UsageError(f"records={str(self.records)!r}: no such file", "--records")
        if self.prompts and self.prefix and len(self.prefix) != len(self.prompts):
            expected = counted(len(self.prompts), "prompt")
            raise UsageError(f"prefix: got {len(self.prefix)} for {expected}; pass one prefix per prompt", "--prefix")
        if self.repair and (self.records is None or self.validator == "none"):
            raise UsageError("repair=True: needs --records and a validator", "--repair")
        if self.stream and (self.repair or len(self.prompts or []) != 1):
            raise UsageError("stream=True: needs exactly one prompt, and no --repair", "--stream")


@dataclass(kw_only=True)
class DemoGo(Options):
    """Options of `hrm-hf demo-go` and `run_demo`."""

    source: str = option("Folder with Go files; std: standard library of the installed Go or golang-src.", "std")
    minutes: float = option("Total minutes for the demo; training gets the time left by other steps.", 20, min=0.1)
    vocab_size: int = option("Vocabulary size of the tokenizer.", 16384, min=512)
    out: Path = option("Folder for data, checkpoint and results.", Path("runs/go_demo"))
    extra: str = option("Extra flags for run_go_coder.py, e.g. '--max_steps 20'.", "")


@dataclass(kw_only=True)
class EvaluateGo(EvaluationOptions, SamplingOptions):
    """Options of `hrm-hf eval go` and `evaluate_checkpoint`."""

    records: list[Path] | None = option("File of held-out records (JSON Lines); repeat for more files.", None)
    trajectories: list[Path] | None = option("File of held-out trajectories; repeat for more files.", None)
    benchmark: list[str] | None = option(
        "NAME=FILE of a local test set, such as humaneval-go=FILE.jsonl.gz; repeat for more.", None
    )
    limit: int | None = option("Use at most N records, N trajectories, and N tasks per test set.", None, min=1)
    max_iterations: int = option("Maximum refinement attempts; the baseline draws as many samples.", 3, min=1, max=5)
    temperature: float = option("Sampling temperature.", 0.8, min=0.01)
    samples: int = option("Samples per benchmark task; 1 uses greedy decoding.", 1, min=1)
    batch_size: int = option("Sequences per batch.", 8, min=1)
    max_length: int | None = option("Maximum tokens per sequence; defaults to the model's maximum.", None, min=32)
    problem_budget: int | None = option("Maximum problem tokens. [default: as in training, or 256]", None, min=18)
    context_budget: int | None = option("Maximum context tokens. [default: as in training, or 512]", None, min=1)
    max_code_tokens: int = option("Maximum new tokens per code sample.", 512, min=1)
    on_bad_line: Literal["stop", "skip"] = option("What to do with a corrupted line in a file.", "stop")
    out: Path | None = option("Folder for results.json and all generated code.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.records or self.trajectories or self.benchmark):
            raise UsageError("nothing to evaluate on; pass --records, --trajectories or --benchmark")
        if self.benchmark and self.out is None:
            raise UsageError("benchmark: needs a folder for the generated samples; pass --out", "--out")
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
            f"benchmark={text!r}: must be NAME=FILE, with NAME one of {', '.join(BENCHMARKS)}", "--benchmark"
        )
    return name, Path(file)


@dataclass(kw_only=True)
class BuildGo(Options):
    """Options of `hrm-hf data go` and `build_records`."""

    sources: list[str] = option(SOURCES, argument=True, metavar="SOURCE")
    out: Path = option("Output folder for train.jsonl, validation.jsonl, test.jsonl and report.json.")
    license: str | None = option("SPDX license name for sources that do not state one.", None)
    split_by: Literal["package", "repository"] = option("Keep each package or repository in one split.", "package")
    validation_share: float = option("Fraction of groups in the validation split.", 0.05, min=0, max=1)
    test_share: float = option("Fraction of groups in the test split.", 0.05, min=0, max=1)
    seed: int = option("Seed for the splits and the trajectories.", 0, min=0)
    deduplicate: Literal["none", "exact", "near"] = option("Duplicates to remove; near requires datasketch.", "exact")
    near_threshold: float = option("Minimum Jaccard similarity of near duplicates.", 0.85, min=0.1, max=1)
    exclude_eval: list[Path] | None = option(
        "Evaluation file (JSON Lines); records that share 20 consecutive tokens with it are dropped.", None
    )
    trajectories: int = option("Number of refinement trajectories per record, labeled by a validator.", 0, min=0)
    validator: GoValidator = option("Validator for trajectories; auto uses parser if Go is installed.", "auto")
    oracle: Literal["none", "types"] = option(
        "types: hide type errors in half the trajectories to create REFINE decisions; needs --validator types.", "none"
    )
    on_bad_line: Literal["stop", "skip"] = option("What to do with a corrupted line in a JSON source.", "stop")
    text: Path | None = option("Also write the source files to this folder as rows of text, for run_clm.py.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_share + self.test_share >= 1:
            raise UsageError(
                f"validation_share={self.validation_share}, test_share={self.test_share}: nothing is left to train "
                "on; use shares that sum to less than 1"
            )
        if self.oracle == "types" and self.validator != "types":
            raise UsageError(f"validator={self.validator!r}: --oracle types needs --validator types", "--validator")
        if self.text is not None and not any(map(is_folder, self.sources)):
            raise UsageError(
                f"text={str(self.text)!r}: requires at least one folder among the sources; otherwise omit "
                "--text (go-tokenizer can train on the records alone)",
                "--text",
            )
        if self.text is not None and self.text.resolve() in (self.out.resolve(), self.out.resolve() / "trajectories"):
            raise UsageError(
                f"text={str(self.text)!r}: must be neither --out nor its subfolder trajectories", "--text"
            )


@dataclass(kw_only=True)
class BuildGoTokenizer(Options):
    """Options of `hrm-hf data go-tokenizer` and `build_tokenizer`."""

    source: list[str] = option(
        'DIR with Go files, std, or a .jsonl file of records or of rows {"text": ...}; repeat for more.'
    )
    out: Path = option("Output folder, which AutoTokenizer.from_pretrained can load.")
    vocab_size: int = option(
        "Vocabulary size, including 43 tags and 256 bytes; smaller if the sources cannot fill it.", 16384, min=299
    )
    pre_tokenizer: Literal["gpt-2", "qwen2"] = option(
        "How to split text before BPE merging; the names are llama.cpp's.", "gpt-2"
    )


@dataclass(kw_only=True)
class BuildGoPrompts(Options):
    """Options of `hrm-hf data go-prompts` and `build_prompts`."""

    model: str = option("Go coder to train: checkpoint folder, or a model on the Hub.", argument=True)
    records: list[Path] = option("File of records from hrm-hf data go; repeat for more files.")
    out: Path = option("Output file, JSON Lines.")
    limit: int | None = option("Maximum number of records, evenly spaced over the files.", None, min=1)
    max_length: int = option("Maximum tokens per prompt; records with longer prompts are dropped.", 1024, min=64)
    max_reference: int | None = option(
        "Maximum tokens per solution; a small model cannot finish longer ones, so it earns no reward.", None, min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_files(self.records, "--records")


def is_folder(source: str) -> bool:
    """Check whether a source is a folder of Go files rather than commits, a data set or pull requests."""
    return source.partition(":")[0] not in ("git", "hub", "prs")
