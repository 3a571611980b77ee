"""One word for one thing: names that the package has given up do not come back, and docstrings say what a thing is.

Names are read from the syntax tree of every module, so prose, keys of files and flags may have these words. Old import
paths are forwarded by `hrm_hf/data/__init__.py`, which is left out.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hrm_hf


PACKAGE = Path(hrm_hf.__file__).parent
OLD_NAMES = {
    "license": "licence",
    "color": "colour",
    "quantize": "quantis",
    "normalize": "normalis",
    "what was said or shown": "_(said|shown)$",
    "what the words are for": "^_?words_of",
    "plain": r"(^|_)bare(_|$)",
    "MODULES_TO_SAVE": "^trained_whole$",
    "split_weight_decay_groups": "decay_apart",
    "MetricAccumulator": "lossmeter",
    "*_LOG_FORMAT": "(?-i:_FIGURES)$",
    "dequantize_weight": "unpacked_weight",
    "LayerCacheView": "cacheslots",
    "RecurrentCache": "segmentkeyvalues",
    "CarryDataLoader": "rowstream",
    "mutations": "go_corruption",
    "pretrain_options": "original_options",
    "npy_layout": "original_layout",
}
# `_check_and_adjust_attn_implementation` is a method of transformers, `_refuse_bits` writes a rule of the sandbox.
OTHER_CHECKS = {"_check_and_adjust_attn_implementation", "_refuse_bits"}


@cache
def modules() -> dict[Path, ast.Module]:
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "data" / "__init__.py"]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module has, defines, imports and passes."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from value.split(".")


@cache
def names() -> set[tuple[str, str]]:
    """(file, name) of all modules, their own names among them."""
    return {(file.name, name) for file, tree in modules().items() for name in (file.stem, *names_of(tree))}


def functions() -> Iterator[tuple[Path, str]]:
    for file, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield file, node.name


@pytest.mark.parametrize("name", OLD_NAMES)
def test_a_name_that_was_given_up_is_in_no_module(name):
    old = re.compile(OLD_NAMES[name], re.IGNORECASE)
    found = {f"{file}: {one}" for file, one in names() if old.search(one)}
    assert not found, f"say {name} instead"


def test_every_check_is_named_validate():
    other = {
        f"{file.name}: {name}"
        for file, name in functions()
        if re.match("_*(check|require|refuse)_", name) and name not in OTHER_CHECKS
    }
    assert not other, "name it validate_*"


def test_no_docstring_opens_with_what():
    found = []
    for file, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if re.match(r"What\b", text):
                    found.append(f"{file.name}: {text[:60]}")
    assert not found, "open with the verb or the thing"


def test_the_search_finds_what_it_is_for():
    tree = ast.parse("def check_it(licence):\n    return a.bare.MAX_FIGURES + words_of(it_said)\n")
    found = set(names_of(tree))
    assert {"licence", "check_it", "bare", "MAX_FIGURES", "words_of", "it_said"} <= found
    assert sum(any(re.search(old, name) for old in OLD_NAMES.values()) for name in found) == 5
