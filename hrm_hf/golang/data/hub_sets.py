"""Records from code data sets of the Hub, or local files with the same columns.

What a row is, its columns tell:

    edits      old_contents, new_contents, subject   bigcode/commitpackft, nuprl/EditPackFT-Multi
    functions  whole_func_string, func_documentation_string   code-search-net/code_search_net
    files      content   bigcode/the-stack-smol (gated: accept its terms on the Hub and log in first)

Edits become records as commits do (`go_edits`); documented functions, alone or in files, ask for themselves
(`go_functions`). Rows in other languages are left out. Sets that once needed a loading script, which `datasets` no
longer runs, are read from their data files.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...hub.licenses import UNKNOWN_LICENSE
from ...io.sources import HUB_PREFIX, BadLineError, json_object, numbered_lines, shorten
from .edits import Edit, edit_record, path_problem, text_problem, without_trailers
from .functions import Declaration, declarations, parse_file
from .plans import derived_steps, doc_plan, sentences
from .records import new_record
from .sources import GENERATED, Dropped


MIN_DOC_CHARACTERS, MIN_BODY_LINES = 20, 2
# Where the Go part of a set lies that cannot be named as a configuration.
GO_FILES = {
    "bigcode/commitpackft": {"data_files": "data/go/data.jsonl"},
    "bigcode/the-stack-smol": {"data_dir": "data/go"},
}
GO_CONFIGS = {"code-search-net/code_search_net": "go"}
# Columns that may hold each part of a row; the first that is there is taken.
COLUMNS = {
    "edits": {
        "before": ("old_contents",),
        "after": ("new_contents",),
        "title": ("subject",),
        "message": ("message",),
        "path": ("new_file", "old_file"),
        "licence": ("license", "licence"),
        "group": ("repos", "repository_name"),
        "language": ("lang", "language", "config"),
        "id": ("commit",),
    },
    "functions": {
        "code": ("whole_func_string",),
        "doc": ("func_documentation_string",),
        "path": ("func_path_in_repository",),
        "licence": ("license", "licenses"),
        "group": ("repository_name",),
        "language": ("language", "lang"),
        "id": ("func_code_url",),
    },
    "files": {
        "text": ("content",),
        "path": ("path", "max_stars_repo_path"),
        "licence": ("licenses", "license", "max_stars_repo_licenses"),
        "group": ("repository_name", "repo_name", "max_stars_repo_name"),
        "language": ("lang", "language"),
        "id": ("hexsha", "blob_id"),
    },
}
NEEDED = {"edits": ("before", "after", "title"), "functions": ("code", "doc"), "files": ("text",)}
PARTS = sorted({part for roles in COLUMNS.values() for part in roles})


@dataclass(frozen=True)
class Schema:
    """The kind of a set's rows ("edits", "functions" or "files") and the column of each of their parts."""

    kind: str
    columns: dict[str, str]

    def text(self, row: dict[str, Any], part: str) -> str:
        """A part of a row; "" if the set has no such column or the row no value; of a list its first entry."""
        value = row.get(self.columns[part]) if part in self.columns else None
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, str) else ""


def hub_records(
    name_or_path: str | Path,
    config: str | None = None,
    split: str = "train",
    columns: dict[str, str] | None = None,
    *,
    streaming: bool = True,
    on_bad_line: str = "stop",
    dropped: Dropped | None = None,
) -> Iterator[dict[str, Any]]:
    """Records of a data set.

    Args:
        name_or_path: OWNER/NAME on the Hub (`hub:` in front is allowed), or a .jsonl, .jsonl.gz or .parquet file, or a
            folder of these.
        config: configuration of a Hub set; known sets need none.
        split: of a Hub set.
        columns: column of a part, where it is not named as in the known sets: {"after": "new_code"}.
        streaming: read a Hub set while it is used, instead of downloading it first.
        on_bad_line: "stop" or "skip" (and count) lines of local files that are no JSON.
        dropped: counts the rows that give no record, by reason.

    Yields:
        Records of `go_records` without attempts.

    Raises:
        FileNotFoundError: no such file, folder or Hub set.
        ValueError: columns of no known kind; names what is missing and the columns that are there.
        BadLineError: see `on_bad_line`.
    """
    dropped = Dropped() if dropped is None else dropped
    name = str(name_or_path).removeprefix(HUB_PREFIX)
    local = not str(name_or_path).startswith(HUB_PREFIX) and Path(name_or_path).expanduser().exists()
    schema = None
    rows = _local_rows(Path(name_or_path).expanduser(), on_bad_line, dropped) if local else None
    rows = rows if rows is not None else _hub_rows(name, config, split, streaming)
    for number, (place, row) in enumerate(rows):
        # Lines of a file need not all have the same keys, so the first row of each file decides.
        if schema is None or (schema.columns and not set(schema.columns.values()) & set(row)):
            schema = recognize(row, columns, place)
        yield from _records(schema, row, Path(name).name, f"{Path(name).name}:{number}", dropped)


def recognize(names: Iterable[str], columns: dict[str, str] | None = None, place: str = "the data set") -> Schema:
    """The schema of a set with columns of these names.

    Args:
        names: columns that are there.
        columns: column of a part, before the known names.
        place: named in errors.

    Raises:
        ValueError: an unknown part, a column that is not there, or columns of no known kind.
    """
    there, columns = list(names), columns or {}
    for part, column in columns.items():
        if part not in PARTS:
            raise ValueError(f"columns names the part {part!r}; expected one of {', '.join(PARTS)}")
        if column not in there:
            raise ValueError(f"{place}: no column {column!r} (for {part}); there are {', '.join(there)}")
    missing = []
    for kind, roles in COLUMNS.items():
        known = {part: (columns[part],) if part in columns else names for part, names in roles.items()}
        found = {part: next((name for name in names if name in there), None) for part, names in known.items()}
        absent = [f"{part} ({' or '.join(known[part])})" for part in NEEDED[kind] if found[part] is None]
        if not absent:
            return Schema(kind, {part: column for part, column in found.items() if column is not None})
        missing.append(f"{kind} lack {', '.join(absent)}")
    raise ValueError(
        f"{place}: these columns are of no known kind: {', '.join(there)}. {'; '.join(missing)}. Name columns with "
        'columns={"part": "column"}'
    )


def _records(schema: Schema, row: dict[str, Any], source: str, place: str, dropped: Dropped) -> Iterator[dict]:
    language, path = schema.text(row, "language"), schema.text(row, "path")
    if language and language.lower() not in ("go", "golang"):
        dropped.add("another language", place)
        return
    reason = path_problem(path) if path else None
    if reason:
        dropped.add(reason, place)
        return
    shared = {
        "source": source,
        "license": schema.text(row, "licence") or UNKNOWN_LICENSE,
        # commitpackft lists all repositories with the same commit.
        "group": schema.text(row, "group").split(",")[0] or source,
        "path": path,
    }
    identity = f"{source}:{schema.text(row, 'id')}" if schema.text(row, "id") else place
    if schema.kind == "edits":
        record = edit_record(_edit(schema, row, identity, shared), dropped)
        if record:
            yield record
    elif schema.kind == "functions":
        yield from _functions(schema.text(row, "code"), schema.text(row, "doc"), identity, shared, dropped)
    else:
        yield from _functions(schema.text(row, "text"), None, identity, shared, dropped)


def _edit(schema: Schema, row: dict[str, Any], identity: str, shared: dict[str, str]) -> Edit:
    title, message = schema.text(row, "title").strip(), schema.text(row, "message").strip()
    return Edit(
        id=identity,
        before=schema.text(row, "before"),
        after=schema.text(row, "after"),
        title=title,
        body=without_trailers(message.removeprefix(title)),
        **shared,
    )


def _functions(
    code: str, doc: str | None, identity: str, shared: dict[str, str], dropped: Dropped
) -> Iterator[dict[str, Any]]:
    """Records of the documented functions of a text; with `doc`, of its first function, which this documents."""
    reason = text_problem(code, doc or "")
    if reason or GENERATED.search(code[:5000]):
        dropped.add(reason or "generated", identity)
        return
    parts = list(declarations(parse_file(code)))
    if not parts:
        dropped.add("no function", identity)
    for part in parts[:1] if doc is not None else parts:
        part.doc = part.doc if doc is None else doc.strip()
        reason = _too_little(part)
        if reason:
            dropped.add(reason, f"{identity}:{part.line}")
            continue
        title, *rest = sentences(part.doc, keep_layout=True)
        yield new_record(
            identity if doc is not None else f"{identity}:{part.line}:{part.qualified_name}",
            title=title,
            body="".join(rest).strip("\n"),
            plan=doc_plan(part.doc, part.name, [part.target], derived_steps(part.body)),
            code_prefix=part.prefix,
            code=part.code,
            **shared,
        )


def _too_little(part: Declaration) -> str | None:
    if part.broken:
        return "syntax error"
    if part.body is None:
        return "no body"
    if len(part.doc) < MIN_DOC_CHARACTERS:
        return f"doc comment below {MIN_DOC_CHARACTERS} characters"
    if part.body_lines < MIN_BODY_LINES:
        return f"fewer than {MIN_BODY_LINES} body lines"
    return None


# ---- rows ----


def _local_rows(path: Path, on_bad_line: str, dropped: Dropped) -> Iterator[tuple[str, dict[str, Any]]]:
    kinds = (".jsonl", ".jsonl.gz", ".parquet")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.name.endswith(kinds))
    if not files or not files[0].name.endswith(kinds):
        raise ValueError(f"{path}: expected a {', '.join(kinds)} file, or a folder with such files")
    for file in files:
        if file.suffix == ".parquet":
            from datasets import load_dataset

            rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
            yield from ((str(file), row) for row in rows)
            continue
        for place, line in numbered_lines(file):
            try:
                yield place, json_object(line, place)
            except BadLineError as error:
                if on_bad_line == "stop":
                    raise BadLineError(f"{error}. Mend it, or skip such lines") from None
                dropped.add("broken line", shorten(str(error)))


def _hub_rows(name: str, config: str | None, split: str, streaming: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset

    config = config or GO_CONFIGS.get(name)
    files = GO_FILES.get(name, {}) if config is None else {}
    try:
        rows = load_dataset(name, config, split=split, streaming=streaming, **files)
    except (ConnectionError, FileNotFoundError, RuntimeError) as error:
        raise FileNotFoundError(
            f"{name} is no file or folder here, and the Hub did not give it as a data set: {error}"
        ) from error
    yield from ((f"{name}, split {split}", row) for row in rows)
