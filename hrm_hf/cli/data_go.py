"""`hrm-hf data go` and `hrm-hf data go-tokenizer`: records for the Go coder, and a tokenizer."""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm


REPORT = "report.json"
SOURCE_HELP = (
    "DIR with Go files; std for this machine's Go installation; git:REPOSITORY for its commits; hub:NAME[:CONFIG]; "
    "prs:FILE.jsonl for pull requests. May be given several times."
)
CONTEXT_HELP = "Given beside the problem: none, type (of a method's receiver), file (imports as well)."
EVALUATION_HELP = "Evaluation file (JSON lines); records that share 20 tokens in a row with it are left out."
TRAJECTORIES_HELP = "Also write trajectories/: N refinement records for each record, labelled by a validator."


def go(
    source: Annotated[list[str], typer.Option(help=SOURCE_HELP)],
    out: Annotated[Path, typer.Option(help="Folder to write: train, validation and test .jsonl, report.json.")],
    context: Annotated[str, typer.Option(help=CONTEXT_HELP)] = "type",
    types: Annotated[bool, typer.Option("--types", help="Type declarations too.")] = False,
    min_body_lines: Annotated[int, typer.Option(min=0, help="Lines of a function's body.")] = 2,
    min_doc_characters: Annotated[int, typer.Option(min=1, help="Characters of its doc comment.")] = 20,
    licence: Annotated[str | None, typer.Option(help="SPDX name, where the source does not say it.")] = None,
    split_by: Annotated[str, typer.Option(help="Never divided among splits: package or repository.")] = "package",
    validation_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the groups.")] = 0.05,
    test_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the groups.")] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of trajectories.")] = 0,
    deduplicate: Annotated[str, typer.Option(help="none, exact or near (needs datasketch).")] = "exact",
    near_threshold: Annotated[float, typer.Option(min=0.1, max=1, help="Similarity of near duplicates.")] = 0.85,
    exclude_eval: Annotated[list[Path] | None, typer.Option(help=EVALUATION_HELP)] = None,
    trajectories: Annotated[int, typer.Option(min=0, help=TRAJECTORIES_HELP)] = 0,
    validator: Annotated[str, typer.Option(help="Of trajectories: auto, tree-sitter, parser or types.")] = "auto",
    on_bad_line: Annotated[str, typer.Option(help="stop or skip, at broken lines of JSON sources.")] = "stop",
    text: Annotated[
        Path | None, typer.Option(help="Folder for the plain files as well, {text} a line, for run_clm.py.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
):
    """Build records for the Go coder: documented functions, commits, pull requests.

    Example: hrm-hf data go --source std --licence BSD-3-Clause --deduplicate near --out data/go

    Example: hrm-hf data go --source git:../cobra --source prs:pulls.jsonl --trajectories 3 --out data/go_repair
    """
    from ..golang.data.selection import SPLITS, Selection, evaluation_ngrams, split_of
    from ..golang.data.sources import Dropped

    started = time.perf_counter()
    _usage(split_of, "", seed, validation_share, test_share)
    _one_of("--context", context, ("none", "type", "file"))
    _one_of("--split-by", split_by, ("package", "repository"))
    _one_of("--deduplicate", deduplicate, ("none", "exact", "near"))
    _one_of("--validator", validator, ("auto", "tree-sitter", "parser", "types"))
    _one_of("--on-bad-line", on_bad_line, ("stop", "skip"))
    read = Dropped()
    selection = Selection(seed, validation_share, test_share, deduplicate, near_threshold)
    selection.evaluation_ngrams = evaluation_ngrams(exclude_eval or ())
    options = {
        "context": context,
        "types": types,
        "min_body_lines": min_body_lines,
        "min_doc_characters": min_doc_characters,
        "licence": licence,
        "group_by": split_by,
    }
    if text is not None and not any(map(_is_folder, source)):
        raise typer.BadParameter("--text writes the files of folders; none of the sources is a folder with Go files")
    asked = options | {"sources": source, "seed": seed, "shares": [validation_share, test_share]}
    asked |= {"deduplicate": deduplicate, "near_threshold": near_threshold, "trajectories": trajectories}
    asked["exclude_eval"] = [path.name for path in exclude_eval or ()]
    _refuse_other_build(out, asked)
    counts: dict[str, int] = {}
    splits = selection.split(_read_all(source, options, on_bad_line, read, counts))
    if not any(splits.values()):
        raise ValueError(f"no records in {', '.join(source)}; {_why(read, selection.dropped)}")
    report = {"out": str(out), "records_read": counts, **_write(out, splits)}
    report["groups"] = {name: len({record["group"] for record in splits[name]}) for name in SPLITS}
    report["licences"] = _counted(record["licence"] for name in SPLITS for record in splits[name])
    if trajectories:
        report["trajectories"] = _write_trajectories(out, splits, validator, seed, trajectories)
    if text is not None:
        report["text"] = _write_texts(text, source, selection, split_by)
    report |= {"not_read": read.report(), "left_out": selection.dropped.report(), "options": asked}
    report["seconds"] = round(time.perf_counter() - started, 1)
    (out / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _print(report, as_json)


def go_tokenizer(
    source: Annotated[
        list[str], typer.Option(help="DIR with Go files, std, or a .jsonl file with {text} a line. Several times.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, for AutoTokenizer.from_pretrained.")],
    vocab_size: Annotated[int, typer.Option(min=299, help="Ids in all, 43 tags and 256 bytes among them.")] = 16384,
    pre_tokenizer: Annotated[
        str, typer.Option(help="How text is split before merging, by llama.cpp's name: gpt-2 or qwen2.")
    ] = "gpt-2",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Train a byte-level BPE tokenizer on Go source files.

    Train it on the training split only: write that with `hrm-hf data go --text DIR`.

    Example: hrm-hf data go-tokenizer --source data/go_text/train.jsonl --vocab-size 16384 --out data/go_tokenizer

    Example: hrm-hf data go-tokenizer --source std --vocab-size 8192 --out data/go_tokenizer
    """
    from ..golang.data.sources import Dropped
    from ..golang.data.tokenizer import PRE_TOKENIZERS, bytes_per_token, train_on_texts

    started = time.perf_counter()
    _one_of("--pre-tokenizer", pre_tokenizer, tuple(PRE_TOKENIZERS))
    dropped = Dropped()
    texts = list(tqdm((text for name in source for text in _texts(name, dropped)), desc="Reading", unit=" files"))
    if not texts:
        raise ValueError(f"no Go text in {', '.join(source)}; {_why(dropped)}")
    tokenizer = train_on_texts(iter(texts), vocab_size, True, pre_tokenizer)
    tokenizer.save_pretrained(out)
    report = {"out": str(out), "vocab_size": len(tokenizer), "files": len(texts)}
    report["megabytes"] = round(sum(len(text.encode()) for text in texts) / 1e6, 2)
    report["bytes_per_token"] = round(bytes_per_token(tokenizer, texts), 3)
    report |= {"not_read": dropped.report(), "seconds": round(time.perf_counter() - started, 1)}
    _print(report, as_json)


# ---- sources ----


def _read_all(sources: list[str], options: dict, on_bad_line: str, dropped, counts: dict[str, int]) -> Iterator[dict]:
    """The records of all sources, counted by source."""
    for source in sources:
        counts[source] = 0
        for record in tqdm(_open(source, options, on_bad_line, dropped), desc=source, unit=" records"):
            counts[source] += 1
            yield record


def _open(source: str, options: dict[str, Any], on_bad_line: str, dropped) -> Iterable[dict[str, Any]]:
    from ..golang.data.selection import refuse_evaluation_file

    kind, _, name = source.partition(":")
    if kind == "git":
        from ..golang.data.commits import commit_records

        return commit_records(name, dropped=dropped)
    if kind == "hub":
        from ..golang.data.hub_sets import hub_records

        name, _, config = name.partition(":")
        refuse_evaluation_file(name)
        return hub_records(name, config or None, on_bad_line=on_bad_line, dropped=dropped)
    if kind == "prs":
        from ..golang.data.pull_requests import pull_request_records

        refuse_evaluation_file(name)
        return pull_request_records(name, on_bad_line=on_bad_line, dropped=dropped)
    from ..golang.data.functions import function_records

    return function_records(_folder(source), dropped=dropped, **options)


def _is_folder(source: str) -> bool:
    return source.partition(":")[0] not in ("git", "hub", "prs")


def _folder(source: str) -> Path:
    from ..golang.data.selection import refuse_evaluation_file
    from ..golang.data.sources import find_go_source

    if source == "std":
        return find_go_source()
    folder = Path(source).expanduser()
    refuse_evaluation_file(folder)
    if not folder.exists():
        raise typer.BadParameter(f"--source {source} does not exist; expected {SOURCE_HELP}")
    if folder.is_file() and folder.suffix != ".go":
        raise typer.BadParameter(f"--source {source} is a file; expected {SOURCE_HELP}")
    return folder


def _texts(source: str, dropped) -> Iterator[str]:
    """Texts for the tokenizer."""
    from ..golang.data.selection import refuse_evaluation_file
    from ..golang.data.sources import go_files
    from ..text.sources import read_json_lines

    if not source.endswith((".jsonl", ".jsonl.gz")):
        yield from (file.text for file in go_files(_folder(source), dropped))
        return
    refuse_evaluation_file(source)
    if not Path(source).is_file():
        raise typer.BadParameter(f"--source {source} does not exist")
    for row in read_json_lines(source, "text", "skip"):
        if row["text"] is None:
            dropped.add("unreadable line", row["error"])
        else:
            yield row["text"]


# ---- what is written ----


def _write(out: Path, splits: dict[str, Iterable[dict]]) -> dict[str, int]:
    from ..golang.data.records import write_records

    return {f"{name}_rows": write_records(out / f"{name}.jsonl", records) for name, records in splits.items()}


def _write_trajectories(out: Path, splits: dict[str, list[dict]], kind: str, seed: int, per_record: int) -> dict:
    """Trajectories of every split, and of each the shares of its decisions and what was left out."""
    from ..golang import best_validator
    from ..golang.data.trajectories import TrajectoryCounts, build_trajectories

    counts = {name: TrajectoryCounts() for name in splits}
    with best_validator(kind) as validator:
        made = {
            name: build_trajectories(records, validator, seed=seed, per_record=per_record, counts=counts[name])
            for name, records in splits.items()
        }
        rows = _write(out / "trajectories", made)
    decisions = {
        f"{name}_decisions": {k: round(v, 3) for k, v in each.shares().items()} for name, each in counts.items()
    }
    return rows | decisions | {f"{name}_left_out": dict(each.dropped) for name, each in counts.items()}


def _write_texts(folder: Path, sources: list[str], selection, split_by: str) -> dict[str, Any]:
    """Plain files by the same split, without exact copies of held-out ones in training."""
    from ..golang.data.records import write_lines
    from ..golang.data.selection import SPLITS, split_of
    from ..golang.data.sources import Dropped, go_files

    dropped, found = Dropped(), {name: [] for name in SPLITS}
    for source in sources:
        if _is_folder(source):
            for file in go_files(_folder(source), dropped):
                group = file.package if split_by == "package" else file.module
                split = split_of(group, selection.seed, selection.validation_share, selection.test_share)
                found[split].append({"text": file.text, "path": file.name, "group": group})
    seen: set[str] = set()
    for name in reversed(SPLITS):
        found[name] = [row for row in found[name] if not (row["text"] in seen or seen.add(row["text"]))]
    rows = {f"{name}_rows": write_lines(folder / f"{name}.jsonl", found[name]) for name in SPLITS}
    megabytes = {f"{name}_megabytes": _megabytes(found[name]) for name in SPLITS}
    return {"out": str(folder), **rows, **megabytes}


def _megabytes(rows: list[dict]) -> float:
    return round(sum(len(row["text"].encode()) for row in rows) / 1e6, 2)


def _counted(names: Iterable[str]) -> dict[str, int]:
    from collections import Counter

    return dict(Counter(names).most_common())


def _why(*dropped) -> str:
    reasons = [f"{count} {reason}" for each in dropped for reason, count in each.counts.most_common()]
    return f"left out: {', '.join(reasons)}" if reasons else "there are no Go files in it"


# ---- usage and printing ----


def _one_of(option: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise typer.BadParameter(f"{option} is {value!r}; expected one of {', '.join(values)}")


def _refuse_other_build(out: Path, options: dict[str, Any]) -> None:
    """Says before a long build, not after it, that `out` is taken."""
    file = out / REPORT
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("options") != options:
        raise typer.BadParameter(f"{out} already holds records made with other options; choose another --out")


def _usage(function, *args) -> None:
    try:
        function(*args)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    for key, value in report.items():
        if key == "options":
            continue
        if key in ("not_read", "left_out"):
            counts = value["counts"].items()
            value = ", ".join(f"{count} {reason}" for reason, count in counts) or "nothing"
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {number}" for name, number in value.items())
        typer.echo(f"{key}: {value}")
