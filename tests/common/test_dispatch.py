"""Rule: code that depends on the architecture asks the registry, and never compares model types.

Searches the package's syntax trees outside `models/` and `registry.py`, which may use names of architectures.
"""

import ast
from pathlib import Path

import pytest

import hrm_hf
from hrm_hf.registry import ARCHITECTURES


PACKAGE = Path(hrm_hf.__file__).parent
MODEL_TYPES = {row.model_type for row in ARCHITECTURES.values()}
# Formats and guides of other programs whose names equal those of our architectures.
FORMATS = {"cli/convert.py", "puzzles/options.py", "trainer/guide_names.py"}


def dispatches(source: str) -> list[str]:
    """List the expressions that depend on a model's architecture: literals, comparisons, look-ups, hasattr.

    A Protocol that isinstance may ask is hasattr by another name.
    """
    tree = ast.parse(source)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    }
    found = []
    for node in ast.walk(tree):
        asks = False
        if isinstance(node, ast.Constant):
            asks = node.value in MODEL_TYPES and id(node) not in documentation
        elif isinstance(node, ast.Compare):
            asks = any(map(_is_model_type, (node.left, *node.comparators)))
            asks = asks and not isinstance(node.left, ast.Constant)  # "model_type" in recipe
        elif isinstance(node, ast.Subscript):
            asks = isinstance(node.slice, ast.Attribute) and _is_model_type(node.slice)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):  # model_type.endswith(...), TABLE.get(model_type)
                asked = {"startswith": [called.value], "endswith": [called.value], "get": node.args}
                asks = any(
                    isinstance(one, ast.Attribute) and _is_model_type(one) for one in asked.get(called.attr, ())
                )
            elif isinstance(called, ast.Name) and called.id == "hasattr":
                thing = ast.unparse(node.args[0]).lower()
                asks = any(word in thing for word in ("model", "coder", "network", "config"))
        elif isinstance(node, ast.ClassDef):
            asks = "runtime_checkable" in map(ast.unparse, node.decorator_list)
        if asks:
            found.append(f"{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def _is_model_type(node: ast.expr) -> bool:
    """`something.model_type` or `something["model_type"]`; the user's own arguments are not dispatch."""
    if isinstance(node, ast.Attribute):
        return node.attr == "model_type" and "arguments" not in ast.unparse(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        node = node.args[0]
    elif isinstance(node, ast.Subscript):
        node = node.slice
    return isinstance(node, ast.Constant) and node.value == "model_type"


def found_in_package() -> dict[str, list[str]]:
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    asked = {
        name: dispatches(file.read_text())
        for name, file in files.items()
        if not name.startswith("models/") and name != "registry.py" and name not in FORMATS
    }
    return {name: lines for name, lines in asked.items() if lines}


def test_no_module_branches_on_an_architecture_name():
    assert found_in_package() == {}


@pytest.mark.parametrize(
    "line",
    [
        'if config.model_type == "other": pass',
        'if config.model_type not in KNOWN: pass',
        'names = ("hrm_lm", "x")',
        'TABLE[model.config.model_type]',
        'TABLE.get(config.model_type)',
        'config.model_type.endswith("_puzzle")',
        'values.get("model_type") in KNOWN',
        'hasattr(self.model, "initial_carry")',
        'hasattr(config, "exit_criterion")',
        "@runtime_checkable\nclass Halts(Protocol): pass",
    ],
)  # fmt: skip
def test_dispatch_is_detected(line):
    assert dispatches(line)


@pytest.mark.parametrize(
    "line",
    ['"""hrm_lm"""', 'f"{name} is a {config.model_type}"', 'hasattr(error, "x")', "architecture_of(model).halts"],
)
def test_other_comparisons_are_ignored(line):
    assert not dispatches(line)
