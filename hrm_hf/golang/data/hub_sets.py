"""Records from code data sets on the Hub, or from local files with the same columns.

The columns of a row determine its kind:

    edits      old_contents, new_contents, subject   bigcode/commitpackft, nuprl/EditPackFT-Multi
    functions  whole_func_string, func_documentation_string   code-search-net/code_search_net
    files      content or text   bigcode/the-stack-smol (gated: accept its terms on the Hub and log in first)

Edits are converted like commits (`edits.py`). Documented functions, alone or in files, are converted like source trees
(`functions.py`). Rows in other languages are dropped. `datasets` no longer runs loading scripts, so data sets that
have one are read from their data files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...hub.licenses import UNKNOWN_LICENSE
from ...io.files import json_object, shorten, visible_files
from .edits import Edit, edit_record, path_problem, text_problem, without_trailers
from .functions import declarations, documented_record, parse_file
from .records import parsed_lines
from .sources import GENERATED, Dropped, go_text


# Location of the Go files in data sets that have no Go configuration.
GO_FILES = {
    "bigcode/commitpackft": {"data_files": "data/go/data.jsonl"},
    "bigcode/the-stack-smol": {"data_dir": "data/go"},
}
GO_CONFIGS = {"code-search-net/code_search_net": "go"}
# Column names to try for each part of a row; the first existing column is used.
COLUMNS = {
    "edits": {
        "before": "old_contents", "after": "new_contents", "title": "subject", "message": "message",
        "path": "new_file old_file", "licence": "license licence", "group": "repos repository_name",
        "language": "lang language config", "id": "commit",
    },
    "functions": {
        "code": "whole_func_string", "doc": "func_documentation_string", "path": "func_path_in_repository",
        "licence": "license licenses", "group": "repository_name", "language": "language lang", "id": "func_code_url",
    },
    "files": {
        "text": "content text", "path": "path max_stars_repo_path",
        "licence": "licenses license max_stars_repo_licenses",
        "group": "repository_name repo_name max_stars_repo_name", "language": "lang language", "id": "hexsha blob_id",
    },
}  # fmt: skip
NEEDED = {"edits": ("before", "after", "title"), "functions": ("code", "doc"), "files": ("text",)}


def hub_records(
    source: str, config: str | None = None, *, on_bad_line: str = "stop", dropped: Dropped | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records from a data set.

    Args:
        source: OWNER/NAME on the Hub, or a .jsonl, .jsonl.gz or .parquet file, or a folder of these.
        config: configuration of a Hub data set; known data sets need none.
        on_bad_line: "stop" at lines of local files that are not JSON, or "skip" and count them.
        dropped: counts rows without a record, by reason.

    Raises:
        FileNotFoundError: the file, folder or Hub data set does not exist.
        ValueError: the columns match no known kind; the message names the missing and the available columns.
        BadLineError: see `on_bad_line`.
    """
    path, kind, columns, dropped = Path(source).expanduser(), "", {}, dropped or Dropped()
    rows = _local_rows(path, on_bad_line, dropped) if path.exists() else _hub_rows(source, config)
    for number, (place, row) in enumerate(rows):
        # A JSON object may omit keys, so use the columns found in an earlier row until a row has none of them.
        if not set(columns.values()) & set(row):
            kind, columns = _recognize(list(row), place)
        parts = {part: _text(row.get(columns.get(part))) for part in COLUMNS[kind]}
        yield from _records(kind, parts, path.name, f"{path.name}:{number}", dropped)


def _text(value: Any) -> str:
    """Return a string, or the first string in a list, normalized by `go_text`. Return "" for other values."""
    value = value[0] if isinstance(value, list) and value else value
    return go_text(value) if isinstance(value, str) else ""


def _recognize(names: list[str], place: str) -> tuple[str, dict[str, str]]:
    """Identify the kind of data set from its column names, and find the column of each part of a record."""
    missing = []
    for kind, roles in COLUMNS.items():
        found = {part: next((name for name in known.split() if name in names), None) for part, known in roles.items()}
        absent = [f"{part} ({' or '.join(roles[part].split())})" for part in NEEDED[kind] if found[part] is None]
        if not absent:
            return kind, {part: column for part, column in found.items() if column is not None}
        missing.append(f"{kind} lack {', '.join(absent)}")
    raise ValueError(f"{place}: the columns ({', '.join(names)}) match no known kind: {'; '.join(missing)}")


def _records(kind: str, parts: dict[str, str], source: str, place: str, dropped: Dropped) -> Iterator[dict]:
    foreign = parts["language"] and parts["language"].lower() not in ("go", "golang")
    reason = "another language" if foreign else parts["path"] and path_problem(parts["path"])
    if reason:
        dropped.add(reason, place)
        return
    shared = {
        "source": source,
        "license": parts["licence"] or UNKNOWN_LICENSE,
        # commitpackft lists every repository that contains the commit.
        "group": parts["group"].split(",")[0] or source,
    }
    identity = f"{source}:{parts['id']}" if parts["id"] else place
    if kind == "edits":
        title = parts["title"].strip()
        body = without_trailers(parts["message"].strip().removeprefix(title))
        changed = {name: parts[name] for name in ("path", "before", "after")}
        if record := edit_record(Edit(id=identity, title=title, body=body, **changed, **shared), dropped):
            yield record
    else:
        shared["context"] = {"path": parts["path"], "before": ""}
        code, doc = (parts["code"], parts["doc"]) if kind == "functions" else (parts["text"], None)
        yield from _functions(code, doc, identity, shared, dropped)


def _functions(
    code: str, doc: str | None, identity: str, shared: dict[str, Any], dropped: Dropped
) -> Iterator[dict[str, Any]]:
    """Yield records for documented functions in `code` or, given `doc`, one for its first function and `doc`."""
    reason = text_problem(code, doc or "")
    if reason or GENERATED.search(code[:5000]):
        dropped.add(reason or "generated", identity)
        return
    parts = list(declarations(parse_file(code)))
    if not parts:
        dropped.add("no function", identity)
    for part in parts[:1] if doc is not None else parts:
        part.doc = part.doc if doc is None else doc.strip()
        if reason := part.problem():
            dropped.add(reason, f"{identity}:{part.line}")
            continue
        place = identity if doc is not None else f"{identity}:{part.line}:{part.qualified_name}"
        yield documented_record(place, part, **shared)


# ---- rows ----


def _local_rows(path: Path, on_bad_line: str, dropped: Dropped) -> Iterator[tuple[str, dict[str, Any]]]:
    kinds = (".jsonl", ".jsonl.gz", ".parquet")
    files = [path] if path.is_file() else [file for file in visible_files(path) if file.name.endswith(kinds)]
    if not files or not files[0].name.endswith(kinds):
        raise ValueError(f"{path}: expected a {', '.join(kinds)} file, or a folder with such files")
    for file in files:
        if file.suffix == ".parquet":
            from datasets import load_dataset

            rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
            yield from ((str(file), row) for row in rows)
            continue
        skip = lambda wrong: dropped.add("broken line", shorten(wrong))  # noqa: E731
        yield from parsed_lines(file, lambda line, place: (place, json_object(line, place)), on_bad_line, skip)


def _hub_rows(name: str, config: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset

    config = config or GO_CONFIGS.get(name)
    files = GO_FILES.get(name, {}) if config is None else {}
    try:
        rows = load_dataset(name, config, split="train", streaming=True, **files)
    except (ConnectionError, FileNotFoundError, RuntimeError) as error:
        raise FileNotFoundError(
            f"{name} is not a local file or folder, and loading it from the Hub as a data set failed: {error}"
        ) from error
    yield from ((name, row) for row in rows)
