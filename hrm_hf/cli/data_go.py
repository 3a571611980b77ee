"""`hrm-hf data go`, `go-tokenizer` and `go-prompts`: records for the Go coder, a tokenizer, prompts for rewards."""

from collections.abc import Callable
from typing import Any

from ..golang.data.options import BuildGo, BuildGoPrompts, BuildGoTokenizer
from ..io.options import Options
from .options import takes
from .report import report, usage_errors


@takes(BuildGo)
def go(options: BuildGo, as_json: bool):
    """Build records for the Go coder: documented functions, commits, pull requests.

    Example: hrm-hf data go ~/src/my_project --out data/mine

    Example: hrm-hf data go std --license BSD-3-Clause --deduplicate near --out data/go

    Example: hrm-hf data go git:../cobra prs:pulls.jsonl --trajectories 3 --out data/go_repair
    """
    from ..golang.data.build import build_records

    _run(build_records, options, as_json)


@takes(BuildGoTokenizer)
def go_tokenizer(options: BuildGoTokenizer, as_json: bool):
    """Train a byte-level BPE tokenizer on Go source files.

    Train it on the training split only: write that with `hrm-hf data go --text DIR`.

    Example: hrm-hf data go-tokenizer --source data/go_text/train.jsonl --vocab-size 16384 --out data/go_tokenizer

    Example: hrm-hf data go-tokenizer --source std --vocab-size 8192 --out data/go_tokenizer
    """
    from ..golang.data.build import build_tokenizer

    _run(build_tokenizer, options, as_json)


@takes(BuildGoPrompts)
def go_prompts(options: BuildGoPrompts, as_json: bool):
    """Write records as prompts for run_grpo.py, with their solutions as references for its rewards.

    Example: hrm-hf data go-prompts runs/go_nano --records data/go/train.jsonl --limit 2000 --out data/go_prompts.jsonl
    """
    from ..golang.data.build import build_prompts

    _run(build_prompts, options, as_json)


def _run(function: Callable[[Any], dict[str, Any]], options: Options, as_json: bool) -> None:
    """Call a builder and print its report: --json all, else a line per entry without the options."""
    with usage_errors():
        result = function(options)
    report(result if as_json else {key: _line(key, each) for key, each in result.items() if key != "options"}, as_json)


def _line(key: str, value: Any) -> Any:
    if key in ("not_read", "left_out"):
        return ", ".join(f"{count} {reason}" for reason, count in value["counts"].items()) or "nothing"
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value
