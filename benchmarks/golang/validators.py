"""Measure the speed of the Go validators, and their agreement with gofmt on corrupted standard-library files.

    python -m benchmarks.golang.validators [--quick] [--source GOROOT/src] [--files 200] [--corruptions 8]

Each file is tested unchanged, and with one corruption of each of eight kinds. `gofmt -e` determines which texts have
syntax errors and where the first error is. Speed is measured on functions from the same files: after a warm-up, one
call validates all functions. Times are CPU time of this process for tree-sitter, and wall time for the other
validators, which run in a separate process.
"""

import os
import platform
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path

from hrm_hf.golang import GoNotFoundError, GoParserValidator, GoTypesValidator, TreeSitterValidator, find_go
from hrm_hf.golang.validators.syntax import parse
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


TOKEN = re.compile(r"\w+|[^\w\s]")


def main() -> None:
    parser = make_parser(__doc__, quick="20 files, 100 functions")
    parser.add_argument(
        "--source", type=Path, help="folder of Go files; by default, the standard library of the installed Go"
    )
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--corruptions", type=int, default=8)
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.files, args.functions = 20, 100
    try:
        go = find_go()
    except GoNotFoundError as error:  # exit with status 0, so that `make bench` continues
        print(f"go validators: not measured: {error}")
        return
    generator = random.Random(args.seed)
    files = sample_files(args.source or go.root / "src", args.files, generator)
    corrupted = [
        corrupt(text, kind % len(CORRUPTIONS), generator) for text in files for kind in range(args.corruptions)
    ]
    texts = [*files, *corrupted]
    functions = [function for text in files for function in functions_of(text)]
    generator.shuffle(functions)
    functions = functions[: args.functions]
    referee = gofmt_errors(texts)
    sides = {"tree-sitter": TreeSitterValidator, "go/parser": GoParserValidator, "go/types": GoTypesValidator}
    report = {
        "files": len(files), "corruptions": len(corrupted), "errors_by_gofmt": sum(e is not None for e in referee),
        "functions": len(functions), "function_bytes": sum(map(len, functions)),
        "ms_per_function": {}, "agreement": {},
    }  # fmt: skip
    for name, kind in sides.items():
        with kind() as validator:
            report["ms_per_function"][name] = milliseconds(validator, functions, name)
            if name != "go/types":
                report["agreement"][name] = agreement(validator(texts), referee, len(files))
    report |= {
        "go": go.version,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": library_versions(),
    }
    write_report(args, "go_validators", report)
    for name, value in report["ms_per_function"].items():
        print(f"go validators {name:12} {value:8.3f} ms per function")
    for name, figures in report["agreement"].items():
        print(f"go validators {name:12} " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))


def sample_files(source: Path, count: int, generator: random.Random) -> list[str]:
    """Return the texts of up to `count` random Go files of 1 to 40 kB, excluding tests and test data."""
    skipped = ("testdata", "vendor")
    found = [
        path for path in sorted(Path(os.path.realpath(source)).rglob("*.go"))
        if not path.name.endswith("_test.go") and not any(part in skipped for part in path.parts)
        and 1000 < path.stat().st_size < 40000
    ]  # fmt: skip
    generator.shuffle(found)
    texts = []
    for path in found:
        text = path.read_text()
        if len(text) - _clause_end(text) > 500:
            texts.append(text)
        if len(texts) == count:
            break
    return texts


def _clause_end(text: str) -> int:
    """Return the character offset at which the line of the package clause ends."""
    data = text.encode()
    clause = next(node for node in parse(data).root_node.children if node.type == "package_clause")
    return len(data[: data.index(b"\n", clause.end_byte) + 1].decode())


def functions_of(text: str) -> list[str]:
    data = text.encode()
    kinds = ("function_declaration", "method_declaration")
    nodes = [node for node in parse(data).root_node.children if node.type in kinds]
    return [data[node.start_byte : node.end_byte].decode() for node in nodes]


def _token(text: str, generator: random.Random, pattern: str = r"\w+|[^\w\s]") -> re.Match:
    return generator.choice(list(re.finditer(pattern, text)) or list(TOKEN.finditer(text)))


def _cut(text: str, match: re.Match, new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def _swap(text: str, generator: random.Random) -> str:
    tokens = list(TOKEN.finditer(text))
    at = generator.randrange(len(tokens) - 1)
    left, right = tokens[at], tokens[at + 1]
    between = text[left.end() : right.start()]
    return text[: left.start()] + right[0] + between + left[0] + text[right.end() :]


def _line(text: str, generator: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    del lines[generator.randrange(len(lines))]
    return "".join(lines)


def _newline(text: str, generator: random.Random) -> str:
    return _cut(text, _token(text, generator, r"(?<=\S)[ ]"), "\n")


def _truncate(text: str, generator: random.Random) -> str:
    return text[: generator.randrange(len(text) // 4, len(text))]


def _double(text: str, generator: random.Random) -> str:
    match = _token(text, generator)
    return _cut(text, match, f"{match[0]} {match[0]}")


CORRUPTIONS = (
    lambda text, generator: _cut(text, _token(text, generator), ""),
    _double,
    _swap,
    lambda text, generator: _cut(text, _token(text, generator, r"[{}()\[\]]"), ""),
    _line,
    _newline,
    _truncate,
    lambda text, generator: _cut(text, _token(text, generator, r"\n"), " "),
)


def corrupt(text: str, kind: int, generator: random.Random) -> str:
    """Corrupt a Go file once, somewhere after its package clause.

    A token is deleted, doubled or swapped, a bracket or a line deleted, a newline inserted, the end cut off, or two
    lines joined. The package clause stays intact, because a text without it is valid here (as declarations) but an
    error for gofmt.
    """
    head = _clause_end(text)
    return text[:head] + CORRUPTIONS[kind](text[head:], generator)


def gofmt_errors(texts: list[str]) -> list[tuple[int, str] | None]:
    """Run gofmt once; return the line and message of the first error in each text, or None for valid texts."""
    gofmt = find_go().root / "bin" / "gofmt"
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{index}.go" for index in range(len(texts))]
        for path, text in zip(paths, texts):
            (Path(folder) / path).write_text(text)
        run = subprocess.run([gofmt, "-e", "-l", *paths], cwd=folder, capture_output=True, text=True)
    errors: list[tuple[int, str] | None] = [None] * len(texts)
    for index, line, message in re.findall(r"^(\d+)\.go:(\d+):\d+: (.*)$", run.stderr, re.MULTILINE):
        errors[int(index)] = errors[int(index)] or (int(line), message)
    return errors


def agreement(found: list, referee: list[tuple[int, str] | None], clean: int) -> dict[str, float]:
    """Return the precision and recall of detecting syntax errors, and how often line and message match gofmt's."""
    bad = [(feedback, error) for feedback, error in zip(found, referee) if error and feedback.syntax_ok is False]
    flagged = sum(feedback.syntax_ok is False for feedback in found)
    return {
        "false_alarms_on_clean_files": sum(feedback.syntax_ok is False for feedback in found[:clean]),
        "precision": len(bad) / max(flagged, 1),
        "recall": len(bad) / max(sum(error is not None for error in referee), 1),
        "same_line": sum(feedback.line == error[0] for feedback, error in bad) / max(len(bad), 1),
        "line_within_1": sum(abs(feedback.line - error[0]) <= 1 for feedback, error in bad) / max(len(bad), 1),
        "same_message": sum(feedback.message == error[1] for feedback, error in bad) / max(len(bad), 1),
    }


def milliseconds(validator, functions: list[str], name: str) -> float:
    validator(functions)
    clock = time.process_time if name == "tree-sitter" else time.perf_counter
    start = clock()
    validator(functions)
    return (clock() - start) / len(functions) * 1e3


if __name__ == "__main__":
    main()
