"""`hrm-hf data go`, `go-tokenizer` and `go-prompts`: records for the Go coder, a tokenizer, prompts for rewards."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .report import AsJson, GoValidator, call, report


SOURCE_HELP = (
    "DIR with Go files; std for this machine's Go installation; git:REPOSITORY for its commits; hub:NAME[:CONFIG]; "
    "prs:FILE.jsonl for pull requests."
)
CONTEXT_HELP = "Given beside the problem: none, type (of a method's receiver), file (imports as well)."
EVALUATION_HELP = "Evaluation file (JSON lines); records that share 20 tokens in a row with it are left out."
ORACLE_HELP = (
    "Of trajectories: types hides the types from half of the verdicts, so that there is code to plan anew; needs "
    "--validator types."
)
TRAJECTORIES_HELP = "Also write trajectories/: N refinement records for each record, labelled by a validator."


def go(
    out: Annotated[Path, typer.Option(help="Folder to write: train, validation and test .jsonl, report.json.")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)] = None,
    source: Annotated[list[str] | None, typer.Option(help="One more of them.")] = None,
    context: Annotated[str, typer.Option(help=CONTEXT_HELP)] = "type",
    types: Annotated[bool, typer.Option("--types", help="Type declarations too.")] = False,
    min_body_lines: Annotated[int, typer.Option(min=0, help="Lines of a function's body.")] = 2,
    min_doc_characters: Annotated[int, typer.Option(min=1, help="Characters of its doc comment.")] = 20,
    license: Annotated[
        str | None, typer.Option("--license", "--licence", help="SPDX name, where the source does not say it.")
    ] = None,
    split_by: Annotated[str, typer.Option(help="Never divided among splits: package or repository.")] = "package",
    validation_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the groups.")] = 0.05,
    test_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the groups.")] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of trajectories.")] = 0,
    deduplicate: Annotated[str, typer.Option(help="none, exact or near (needs datasketch).")] = "exact",
    near_threshold: Annotated[float, typer.Option(min=0.1, max=1, help="Similarity of near duplicates.")] = 0.85,
    exclude_eval: Annotated[list[Path] | None, typer.Option(help=EVALUATION_HELP)] = None,
    trajectories: Annotated[int, typer.Option(min=0, help=TRAJECTORIES_HELP)] = 0,
    validator: Annotated[GoValidator, typer.Option(help="Of trajectories; auto: parser where Go is.")] = "auto",
    oracle: Annotated[str, typer.Option(help=ORACLE_HELP)] = "none",
    on_bad_line: Annotated[str, typer.Option(help="stop or skip, at broken lines of JSON sources.")] = "stop",
    text: Annotated[
        Path | None, typer.Option(help="Folder for the plain files as well, {text} a line, for run_clm.py.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
):
    """Build records for the Go coder: documented functions, commits, pull requests.

    Example: hrm-hf data go ~/src/my_project --out data/mine

    Example: hrm-hf data go std --license BSD-3-Clause --deduplicate near --out data/go

    Example: hrm-hf data go git:../cobra prs:pulls.jsonl --trajectories 3 --out data/go_repair
    """
    options = dict(locals())
    from ..golang.data.build import build_records

    options["source"] = [*(options.pop("sources") or []), *(source or [])]
    if not options["source"]:
        raise typer.BadParameter("nothing to read; name a SOURCE, such as a folder with Go files", param_hint="SOURCE")
    _run(build_records, options)


def go_tokenizer(
    source: Annotated[
        list[str], typer.Option(help="DIR with Go files, std, or a .jsonl file with {text} a line. Several times.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, for AutoTokenizer.from_pretrained.")],
    vocab_size: Annotated[int, typer.Option(min=299, help="Ids in all, 43 tags and 256 bytes among them.")] = 16384,
    pre_tokenizer: Annotated[
        str, typer.Option(help="How text is split before merging, by llama.cpp's name: gpt-2 or qwen2.")
    ] = "gpt-2",
    as_json: AsJson = False,
):
    """Train a byte-level BPE tokenizer on Go source files.

    Train it on the training split only: write that with `hrm-hf data go --text DIR`.

    Example: hrm-hf data go-tokenizer --source data/go_text/train.jsonl --vocab-size 16384 --out data/go_tokenizer

    Example: hrm-hf data go-tokenizer --source std --vocab-size 8192 --out data/go_tokenizer
    """
    options = dict(locals())
    from ..golang.data.build import build_tokenizer

    _run(build_tokenizer, options)


def go_prompts(
    model: Annotated[str, typer.Argument(help="Go coder that is to be trained: folder, or a model on the Hub.")],
    records: Annotated[list[Path], typer.Option(help="Records of hrm-hf data go; repeat for more.")],
    out: Annotated[Path, typer.Option(help="File to write, JSON Lines.")],
    limit: Annotated[int | None, typer.Option(min=1, help="So many records, from all over the files.")] = None,
    max_length: Annotated[int, typer.Option(min=64, help="Tokens of a prompt; longer ones are left out.")] = 1024,
    max_reference: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a solution; a small model writes no longer one whole.")
    ] = None,
    as_json: AsJson = False,
):
    """Write records as prompts for run_grpo.py, with their solutions as references for its rewards.

    Example: hrm-hf data go-prompts runs/go_nano --records data/go/train.jsonl --limit 2000 --out data/go_prompts.jsonl
    """
    options = dict(locals())
    from ..golang.data.build import build_prompts

    _run(build_prompts, options)


def _run(function, options: dict[str, Any]) -> None:
    """Calls a builder and prints its report: --json all, else a line per entry without the options."""
    as_json = options.pop("as_json")
    result = call(function, options)
    report(result if as_json else {key: _line(key, each) for key, each in result.items() if key != "options"}, as_json)


def _line(key: str, value: Any) -> Any:
    if key in ("not_read", "left_out"):
        return ", ".join(f"{count} {reason}" for reason, count in value["counts"].items()) or "nothing"
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value
