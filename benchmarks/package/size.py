"""The floor plan of a checkout: rooms, levels, arrows and circles of its imports, and lines of Python.

    python -m benchmarks.package.size [ROOT] [--out plan.json]

A room is a folder of `hrm_hf` with the folders in it, or a module that is loose in its root; an arrow goes from a room
to one it imports. Imports are read from the source, those inside functions included, those for type checkers only not;
names in strings are not seen. A level is a step of the longest chain of arrows between rooms, a circle of rooms one
level. Needs the standard library alone, so that it measures any commit.
"""

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


PACKAGE = "hrm_hf"
TASKS = ("puzzles", "text", "golang", "cosmology")
Graph = Mapping[str, set[str]]


def modules_of(root: Path) -> dict[str, Path]:
    """File of each module of the package, by its dotted name."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    names = (".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return dict(zip(names, files))


def imports_of(name: str, file: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a module imports, anywhere in it."""
    found = set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {each if (each := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return {each for each in found if each in modules and each != name}


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, but for what is under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from _statements(node)


def room_of(module: str) -> str:
    """The folder or loose module of the package that a module is, or is in; "." for the package itself."""
    return [*module.split("."), "."][1]


def task_of(module: str) -> str | None:
    """The task of a module: the first room of the new plan, or what the names of the old one tell."""
    parts = module.split(".")[1:]
    if parts and parts[0] in TASKS:
        return parts[0]
    words = {
        "puzzles": ("puzzle", "sudoku", "maze", "arc", "augment", "row_stream", "carry", "original_", "readers"),
        "golang": ("go_", "golang", "rewards"),
        "cosmology": ("cosmo", "regression_training"),
        "text": ("text_", "lm_training", "causal_lm", "recursive_lm", "serving", "byte_tokenizer", "answers",
                 "post_training", "executors", "plain_values", "hrm_lm", "rlm_mhc"),
    }  # fmt: skip
    outside = {"models", "cli", "app", "launch", "metrics"}
    if not parts or parts[0] in outside:
        return None
    return next((task for task, names in words.items() if any(word in parts[-1] for word in names)), None)


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def levels(graph: Graph) -> int:
    """Nodes of the longest chain of arrows; a circle counts as one node."""
    member = {node: f"circle {n}" for n, circle in enumerate(circles(graph)) for node in circle}
    below: dict[str, set[str]] = defaultdict(set)
    for node, others in graph.items():
        place = member.get(node, node)
        below[place] |= {member.get(other, other) for other in others} - {place}
    heights: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in heights:
            heights[node] = 1 + max(map(height, below.get(node, ())), default=0)
        return heights[node]

    return max(map(height, list(below)), default=0)


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def floor_plan(root: Path) -> dict:
    """All figures of a checkout."""
    modules = modules_of(root)
    graph = {name: imports_of(name, file, modules) for name, file in modules.items()}
    rooms: dict[str, set[str]] = {room_of(name): set() for name in modules}
    inside = across = across_rooms = 0
    for name, others in graph.items():
        for other in others:
            one, two = room_of(name), room_of(other)
            if one != two:
                rooms[one].add(two)
            tasks = task_of(name), task_of(other)
            if None not in tasks:
                inside, across = inside + (tasks[0] == tasks[1]), across + (tasks[0] != tasks[1])
                across_rooms += tasks[0] == tasks[1] and one != two
    return {
        "modules in the package root": sum(file.parent.name == PACKAGE for file in modules.values()),
        "modules": len(modules),
        "folders": len({file.parent for file in modules.values()}),
        "rooms": len(rooms),
        "levels": levels(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "circles of rooms": circles(rooms),
        "circles of modules": circles(graph),
        "imports between files of one task": inside,
        "of them between folders of the root": across_rooms,
        "imports between tasks": across,
        "lines": {
            folder: lines(file for file in sorted((root / folder).rglob("*.py")) if "fixtures" not in file.parts)
            for folder in (PACKAGE, "tests", "training", "benchmarks")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2], help="a checkout")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    plan = floor_plan(args.root.resolve())
    for name, value in plan.items():
        if isinstance(value, list):
            print(f"{name}: {len(value)}")
            print("".join(f"  {' '.join(circle)}\n" for circle in value), end="")
        else:
            print(f"{name}: {value}")
    if args.out:
        args.out.write_text(json.dumps(plan, indent=1) + "\n")


if __name__ == "__main__":
    main()
