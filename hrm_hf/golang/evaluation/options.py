"""Options of `hrm-hf eval go`, checked before anything heavy is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...io.evaluation import EvaluationOptions, validate_files
from ...io.options import option
from ...io.usage import UsageError
from ..options import SamplingOptions


BENCHMARKS = ("humaneval-go", "humaneval-go-mxeval", "mbxp-go", "humanevalpack-go", "humanevalfix-go")


@dataclass(kw_only=True)
class EvaluateGo(EvaluationOptions, SamplingOptions):
    """Options of `hrm-hf eval go` and `evaluate_checkpoint`."""

    records: list[Path] | None = option("Held-out records (JSON Lines); repeat for more.", None)
    trajectories: list[Path] | None = option("Held-out trajectories; repeat for more.", None)
    benchmark: list[str] | None = option(
        "NAME=FILE of a local test set, such as humaneval-go=FILE.jsonl.gz; repeat for more.", None
    )
    limit: int | None = option("Most records, trajectories and tasks, taken from all over the files.", None, min=1)
    max_iterations: int = option("Attempts of the loop, and samples of its baseline.", 3, min=1, max=5)
    temperature: float = option("Temperature of everything that is sampled.", 0.8, min=0.01)
    samples: int = option("Samples of each task of a test set; 1 is greedy.", 1, min=1)
    batch_size: int = option("Sequences at a time.", 8, min=1)
    max_length: int | None = option("Tokens of a sequence; the model's by default.", None, min=32)
    problem_budget: int | None = option("Tokens of a problem; as the Go coder was trained, or 256.", None, min=18)
    context_budget: int | None = option("Tokens of a context; as the Go coder was trained, or 512.", None, min=1)
    max_code_tokens: int = option("Most new tokens of a code sample.", 512, min=1)
    on_bad_line: Literal["stop", "skip"] = option("What to do at a corrupt line of JSON Lines.", "stop")
    out: Path | None = option("Folder for results.json, evaluation.png and everything that is written.", None)

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
