"""Sources of an evaluation of Go coders, as a command names them; checked before anything heavy is loaded."""

from pathlib import Path

from ...io.evaluation import validate_files
from ...io.usage import UsageError


BENCHMARKS = ("humaneval-go", "humaneval-go-mxeval", "mbxp-go", "humanevalpack-go", "humanevalfix-go")


def validate_sources(
    records: list[Path] | None,
    trajectories: list[Path] | None,
    benchmark: list[str] | None,
    out: Path | None,
    failures: int = 0,
    calibrate_on: list[Path] | None = None,
) -> list[tuple[str, Path]]:
    """Names and files of the benchmarks, from texts NAME=FILE.

    Raises:
        UsageError: nothing to evaluate on, a folder for a file, another name, no folder for a benchmark's samples, or
            no problems for failures of the model's own; nothing that a calibration could be for.
    """
    if not (records or trajectories or benchmark):
        raise UsageError("nothing to evaluate on; give --records, --trajectories or --benchmark")
    if benchmark and out is None:
        raise UsageError("--benchmark keeps its samples in a folder; give --out", "--out")
    if failures and not records:
        raise UsageError("failures are codes for held-out problems; give their --records", "--failures")
    validate_files(records, "--records")
    validate_files(trajectories, "--trajectories")
    validate_files(calibrate_on, "--calibrate-on")
    if calibrate_on and not trajectories:
        raise UsageError("a calibration is judged on other trajectories; give --trajectories", "--calibrate-on")
    return [_named_file(text) for text in benchmark or []]


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, file = text.partition("=")
    if not equals or name not in BENCHMARKS:
        raise UsageError(f"{text!r}: expected NAME=FILE with a name of {', '.join(BENCHMARKS)}", "--benchmark")
    return name, Path(file)
