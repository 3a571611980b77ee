"""Records for the Go coder and its tokenizer, from sources to files and a report of what is in them.

These functions are the commands `hrm-hf data go`, `go-tokenizer` and `go-prompts`.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ...hub.kinds import GO_CODER, load_config
from ...io.evaluation import validate_files
from ...io.usage import UsageError, as_usage_errors
from ...models.processing_hrm_go_coder import plan_segment
from ...text.sources import read_json_lines
from ..validators.go_validators import VALIDATOR_CHOICES, best_validator
from .collator import GoStreamBuilder
from .commits import commit_records
from .functions import function_records
from .hub_sets import hub_records
from .pull_requests import pull_request_records
from .records import read_records, spread, write_lines, write_records
from .selection import SPLITS, Selection, evaluation_ngrams, split_of, validate_no_evaluation_file
from .sources import Dropped, find_go_source, go_files
from .tokenizer import PRE_TOKENIZERS, bytes_per_token, train_on_texts
from .trajectories import ORACLES, TrajectoryCounts, build_trajectories


REPORT = "report.json"
SOURCES = (
    "DIR with Go files; std for this machine's Go installation; git:REPOSITORY for its commits; hub:NAME[:CONFIG]; "
    "prs:FILE.jsonl for pull requests. May be given several times."
)


def build_records(
    source: list[str],
    out: Path,
    *,
    context: str = "type",
    types: bool = False,
    min_body_lines: int = 2,
    min_doc_characters: int = 20,
    license: str | None = None,
    split_by: str = "package",
    validation_share: float = 0.05,
    test_share: float = 0.05,
    seed: int = 0,
    deduplicate: str = "exact",
    near_threshold: float = 0.85,
    exclude_eval: list[Path] | None = None,
    trajectories: int = 0,
    validator: str = "auto",
    oracle: str = "none",
    on_bad_line: str = "stop",
    text: Path | None = None,
) -> dict[str, Any]:
    """Builds records from documented functions, commits and pull requests, and returns the report beside them.

    Args:
        source: as SOURCES says, one or more.
        out: folder for train, validation and test .jsonl and report.json.
        context: given beside the problem: "none", "type" (of a method's receiver) or "file" (imports as well).
        types: type declarations too.
        split_by: what is never divided among splits, "package" or "repository".
        deduplicate: "none", "exact" or "near" (at `near_threshold`; needs datasketch).
        exclude_eval: files of evaluation tasks; records that share 20 tokens in a row with one are left out.
        trajectories: refinement records for each record, labelled by `validator`, written to trajectories/.
        oracle: "types" (of a validator that looks at them) where verdicts show syntax alone, so that there are
            attempts to plan anew; or "none".
        text: folder for the plain files as well, {text} a line.
    """
    started = time.perf_counter()
    as_usage_errors(split_of, "", seed, validation_share, test_share)
    _validate_choice("--context", context, ("none", "type", "file"))
    _validate_choice("--split-by", split_by, ("package", "repository"))
    _validate_choice("--deduplicate", deduplicate, ("none", "exact", "near"))
    _validate_choice("--validator", validator, VALIDATOR_CHOICES)
    _validate_choice("--oracle", oracle, ORACLES)
    if oracle == "types" and validator != "types":
        raise UsageError(
            f"--oracle types asks a validator that looks at types; give --validator types, not {validator}"
        )
    _validate_choice("--on-bad-line", on_bad_line, ("stop", "skip"))
    read = Dropped()
    selection = Selection(seed, validation_share, test_share, deduplicate, near_threshold)
    selection.evaluation_ngrams = evaluation_ngrams(exclude_eval or ())
    options = {
        "context": context,
        "types": types,
        "min_body_lines": min_body_lines,
        "min_doc_characters": min_doc_characters,
        "license": license,
        "group_by": split_by,
    }
    if text is not None and not any(map(_is_folder, source)):
        raise UsageError("--text writes the files of folders; none of the sources is a folder with Go files")
    asked = options | {"sources": source, "seed": seed, "shares": [validation_share, test_share]}
    asked |= {
        "deduplicate": deduplicate,
        "near_threshold": near_threshold,
        "trajectories": trajectories,
        "oracle": oracle,
    }
    asked["licence"] = asked.pop("license")  # the key of report.json
    asked["exclude_eval"] = [path.name for path in exclude_eval or ()]
    _validate_place(out, asked)
    counts: dict[str, int] = {}
    splits = selection.split(_read_all(source, options, on_bad_line, read, counts))
    if not any(splits.values()):
        raise ValueError(f"no records in {', '.join(source)}; {_why(read, selection.dropped)}")
    report = {"out": str(out), "records_read": counts, **_write(out, splits)}
    if empty := _empty_splits(splits, validation_share, test_share):
        report["note"] = empty
    report["groups"] = {name: len({record["group"] for record in splits[name]}) for name in SPLITS}
    report["licences"] = _counted(record["licence"] for name in SPLITS for record in splits[name])
    if trajectories:
        report["trajectories"] = _write_trajectories(out, splits, validator, oracle, seed, trajectories)
    if text is not None:
        report["text"] = _write_texts(text, source, selection, split_by)
    report |= {"not_read": read.report(), "left_out": selection.dropped.report(), "options": asked}
    report["seconds"] = round(time.perf_counter() - started, 1)
    (out / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def build_tokenizer(
    source: list[str], out: Path, *, vocab_size: int = 16384, pre_tokenizer: str = "gpt-2"
) -> dict[str, Any]:
    """Trains a byte-level BPE tokenizer on Go files, or on the {text} of .jsonl files, and saves it in `out`."""
    started = time.perf_counter()
    _validate_choice("--pre-tokenizer", pre_tokenizer, tuple(PRE_TOKENIZERS))
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
    return report


# ---- sources ----


def _read_all(sources: list[str], options: dict, on_bad_line: str, dropped, counts: dict[str, int]) -> Iterator[dict]:
    """The records of all sources, counted by source."""
    for source in sources:
        counts[source] = 0
        for record in tqdm(_open(source, options, on_bad_line, dropped), desc=source, unit=" records"):
            counts[source] += 1
            yield record


def _open(source: str, options: dict[str, Any], on_bad_line: str, dropped) -> Iterable[dict[str, Any]]:
    kind, _, name = source.partition(":")
    if kind == "git":
        return commit_records(name, dropped=dropped)
    if kind == "hub":
        name, _, config = name.partition(":")
        validate_no_evaluation_file(name)
        return hub_records(name, config or None, on_bad_line=on_bad_line, dropped=dropped)
    if kind == "prs":
        validate_no_evaluation_file(name)
        return pull_request_records(name, on_bad_line=on_bad_line, dropped=dropped)

    return function_records(_folder(source), dropped=dropped, **options)


def _is_folder(source: str) -> bool:
    return source.partition(":")[0] not in ("git", "hub", "prs")


def _folder(source: str) -> Path:
    if source == "std":
        return find_go_source()
    folder = Path(source).expanduser()
    validate_no_evaluation_file(folder)
    if not folder.exists():
        raise UsageError(f"--source {source} does not exist; expected {SOURCES}")
    if folder.is_file() and folder.suffix != ".go":
        raise UsageError(f"--source {source} is a file; expected {SOURCES}")
    return folder


def build_prompts(
    model: str,
    records: list[Path],
    out: Path,
    *,
    limit: int | None = None,
    max_length: int = 1024,
    max_reference: int | None = None,
) -> dict[str, Any]:
    """Writes the problems of records as prompts for `training/run_grpo.py`, and their solutions as references.

    A prompt is the Go coder's stream up to the given beginning of the code, the record's plan included; problems and
    contexts are cut as in training.

    Args:
        model: that is to be trained: a folder, or a name on the Hub; of its tokenizer and budgets.
        out: file of {"prompt", "reference"} rows.
        max_length: longest prompt in tokens; longer ones are left out.
        max_reference: longest solution in tokens; any if None. Of long ones a small model writes none that is whole,
            and where all completions of a prompt get the same reward nothing is learned.

    Returns:
        how many rows were written, and the records that were left out: too long, or with tags in their text, which
        a prompt could not tell from its own.
    """
    from transformers import AutoTokenizer

    validate_files(records, "--records")
    config = load_config(model, GO_CODER)
    budgets = {name: getattr(config, name) for name in ("problem_budget", "context_budget")}
    builder = GoStreamBuilder(AutoTokenizer.from_pretrained(model), max_length, **budgets)
    dropped, rows = Dropped(), []
    for record in spread(list(read_records(records)), limit):
        solution = record["solution"]["code"]
        if max_reference is not None and len(builder.tokenizer(solution, verbose=False)["input_ids"]) > max_reference:
            dropped.add(f"solution longer than {max_reference} tokens", record["id"])
            continue
        plan = record["plan"]
        steps = [step["text"] for step in plan["steps"]]
        planned = plan_segment(builder.tokenizer, plan["intent"], plan["targets"], steps)[1:]
        ids = [*builder.prompt_ids(record), *planned, *builder.code_prompt_ids(record)]
        if len(ids) > max_length:
            dropped.add(f"longer than {max_length} tokens", record["id"])
            continue
        prompt = builder.tokenizer.decode(ids[1:])  # a tokenizer puts <s> in front by itself
        if builder.tokenizer(prompt)["input_ids"] != ids:
            dropped.add("tags in the text, or cut within a character", record["id"])
            continue
        rows.append({"prompt": prompt, "reference": solution})
    return {"out": str(out), "rows": write_lines(out, rows), "left_out": dropped.report()}


def _texts(source: str, dropped) -> Iterator[str]:
    """Texts for the tokenizer."""

    if not source.endswith((".jsonl", ".jsonl.gz")):
        yield from (file.text for file in go_files(_folder(source), dropped))
        return
    validate_no_evaluation_file(source)
    if not Path(source).is_file():
        raise UsageError(f"--source {source} does not exist")
    for row in read_json_lines(source, "text", "skip"):
        if row["text"] is None:
            dropped.add("unreadable line", row["error"])
        else:
            yield row["text"]


# ---- what is written ----


def _write(out: Path, splits: dict[str, Iterable[dict]]) -> dict[str, int]:
    return {f"{name}_rows": write_records(out / f"{name}.jsonl", records) for name, records in splits.items()}


def _empty_splits(splits: dict[str, list[dict]], validation_share: float, test_share: float) -> str | None:
    """A sentence if a split that was asked for has no record."""
    shares = {"train": 1 - validation_share - test_share, "validation": validation_share, "test": test_share}
    empty = [name for name in SPLITS if shares[name] and not splits[name]]
    if not empty:
        return None
    groups = len({record["group"] for records in splits.values() for record in records})
    return (
        f"{' and '.join(empty)}: no record. A split gets whole groups, each by chance, and there "
        f"{'is only 1' if groups == 1 else f'are only {groups}'}: give larger --validation-share and --test-share, "
        "another --seed, or more sources"
    )


def _write_trajectories(
    out: Path, splits: dict[str, list[dict]], kind: str, oracle: str, seed: int, per_record: int
) -> dict:
    """Trajectories of every split, and of each the shares of its decisions and what was left out."""

    counts = {name: TrajectoryCounts() for name in splits}
    with best_validator(kind) as validator:
        made = {
            name: build_trajectories(
                records, validator, seed=seed, per_record=per_record, oracle=oracle, counts=counts[name]
            )
            for name, records in splits.items()
        }
        rows = _write(out / "trajectories", made)
    decisions = {
        f"{name}_decisions": {k: round(v, 3) for k, v in each.shares().items()} for name, each in counts.items()
    }
    return rows | decisions | {f"{name}_left_out": dict(each.dropped) for name, each in counts.items()}


def _write_texts(folder: Path, sources: list[str], selection, split_by: str) -> dict[str, Any]:
    """Plain files by the same split, without exact copies of held-out ones in training."""

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
    return dict(Counter(names).most_common())


def _why(*dropped) -> str:
    reasons = [f"{count} {reason}" for each in dropped for reason, count in each.counts.most_common()]
    return f"left out: {', '.join(reasons)}" if reasons else "there are no Go files in it"


# ---- options ----


def _validate_choice(option: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise UsageError(f"{option} is {value!r}; expected one of {', '.join(values)}")


def _validate_place(out: Path, options: dict[str, Any]) -> None:
    """Says before a long build, not after it, that `out` is taken."""
    file = out / REPORT
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("options") != options:
        raise UsageError(f"{out} already holds records made with other options; choose another --out")
