"""Measure the size and import structure of a checkout; with --before, compare two checkouts.

    python benchmarks/package/size.py [ROOT] [--before OTHER_ROOT] [--out size.json]

Code, docstring, comment and blank lines are counted separately, so deleting docstrings does not make the code look
smaller. A circle is a group of files that import each other, including imports inside functions and for type checkers.
Parameter counts exclude `self` and `cls`, and skip constructors and forward methods. The script needs only the
standard library, so it runs on any commit.
"""

import argparse
import ast
import configparser
import io
import json
import statistics
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any


PACKAGE = "hrm_hf"
LONG_FUNCTION, MANY_PARAMETERS = 80, 10
Graph = Mapping[str, set[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def kinds_of_lines(source: str) -> Counter[str]:
    """Count the lines of a file by kind: code, docstring, comment, blank."""
    kinds = ["blank" if not line.strip() else "code" for line in source.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        alone = not token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and alone:
            kinds[token.start[0] - 1] = "comment"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            first = node.body[0]
            kinds[first.lineno - 1 : first.end_lineno] = ["docstring"] * (first.end_lineno - first.lineno + 1)
    return Counter(kinds)


def parameters_of(function: Function) -> int:
    """Count the parameters of a function or method, without `self` and `cls`."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def modules_of(root: Path) -> dict[str, Path]:
    """Map the dotted name of each module in the package, and of its entry point, to its file."""
    files = [*sorted((root / PACKAGE).rglob("*.py")), *sorted(root.glob(f"{PACKAGE}_*.py"))]
    names = (".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return dict(zip(names, files))


def imports_of(name: str, file: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports, including imports inside functions."""
    found = set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {each if (each := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return {each for each in found if each in modules and each != name}


def circles(graph: Graph) -> list[list[str]]:
    """Find import cycles: strongly connected components of the import graph with more than one module."""
    reached = {node: _reach(graph, node) for node in graph}
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(each) for each in sorted(found) if len(each) > 1]


def _reach(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph[node])
    return seen


def core_packages(root: Path) -> int:
    """Count the packages that a plain install requires."""
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    return len(settings["options"]["install_requires"].split("\n")) - 1


def measure(root: Path) -> dict[str, Any]:
    """Return the measurements of one checkout."""
    modules = modules_of(root)
    sources = {name: file.read_text(encoding="utf-8") for name, file in modules.items()}
    functions = {
        f"{name}:{node.lineno} {node.name}": node
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Function)
    }
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in functions.items()}
    calls = {name: parameters_of(node) for name, node in functions.items() if node.name not in ("__init__", "forward")}
    kinds = sum(map(kinds_of_lines, sources.values()), Counter())
    tests = [file for file in (root / "tests").rglob("*.py") if "stand_ins" not in file.parts]
    return {
        "lines": sum(kinds.values()),
        **{f"{kind} lines": kinds[kind] for kind in ("code", "docstring", "comment", "blank")},
        "modules": len(modules),
        "median lines of a function": statistics.median(lengths.values()),
        f"functions over {LONG_FUNCTION} lines": sorted(n for n, length in lengths.items() if length > LONG_FUNCTION),
        f"functions with over {MANY_PARAMETERS} parameters": sorted(
            name for name, count in calls.items() if count > MANY_PARAMETERS
        ),
        "circles of files": circles({name: imports_of(name, file, modules) for name, file in modules.items()}),
        "lines of tests": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in tests),
        "lines of benchmarks": sum(
            len(file.read_text(encoding="utf-8").splitlines()) for file in (root / "benchmarks").rglob("*.py")
        ),
        "packages in the core install": core_packages(root),
        "lines by folder": dict(_by_folder(modules, sources)),
    }


def _by_folder(modules: Mapping[str, Path], sources: Mapping[str, str]) -> Counter[str]:
    """Count the lines in each top-level folder of the package."""
    found: Counter[str] = Counter()
    for name, source in sources.items():
        parts = name.split(".")
        folder = parts[1] if len(parts) > 2 or (modules[name].name == "__init__.py" and len(parts) > 1) else "."
        found[folder] += len(source.splitlines())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2], help="a checkout")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    sides = {"before": measure(args.before.resolve())} if args.before else {}
    sides["now"] = measure(args.root.resolve())
    for name in sides["now"]:
        shown = [side[name] for side in sides.values()]
        if isinstance(shown[0], dict):
            for folder in sorted({key for each in shown for key in each}):
                print(f"  {folder:40} " + " ".join(f"{each.get(folder, 0):>8,}" for each in shown))
            continue
        print(f"{name:42} " + " ".join(f"{len(each) if isinstance(each, list) else each:>8,}" for each in shown))
        for each in sides["now"][name] if isinstance(shown[-1], list) else ():
            print(f"    {each if isinstance(each, str) else ' '.join(each)}")
    if args.out:
        args.out.write_text(json.dumps(sides, indent=1) + "\n")


if __name__ == "__main__":
    main()
