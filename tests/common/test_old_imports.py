"""Import paths of `hrm_hf.data`, which documents and scripts used, for one release."""

import sys
from importlib import import_module

import pytest

import hrm_hf.data


OLD = sorted(hrm_hf.data.MOVED)


@pytest.fixture
def fresh(monkeypatch):
    """Forgets what has been forwarded, so that it is forwarded and warned about again."""
    for name in OLD:
        monkeypatch.delitem(sys.modules, f"hrm_hf.data.{name}", raising=False)
        monkeypatch.delitem(vars(hrm_hf.data), name, raising=False)


@pytest.mark.parametrize("name", OLD)
def test_an_old_module_is_the_new_one_and_says_so(name, fresh):
    new = f"hrm_hf.{hrm_hf.data.MOVED[name]}"
    with pytest.warns(DeprecationWarning, match=f"hrm_hf.data.{name} is {new} now"):
        old = import_module(f"hrm_hf.data.{name}")
    assert old is sys.modules[new] and old.__name__ == old.__spec__.name == new


def test_names_can_be_imported_from_an_old_module(fresh):
    from hrm_hf.text.byte_tokenizer import byte_tokenizer as expected

    with pytest.warns(DeprecationWarning) as warned:
        from hrm_hf.data.byte_tokenizer import byte_tokenizer
    assert byte_tokenizer is expected and warned[0].filename == __file__


def test_an_old_module_can_be_imported_from_the_package(fresh):
    with pytest.warns(DeprecationWarning):
        from hrm_hf.data import sudoku
    assert sudoku is sys.modules["hrm_hf.puzzles.sudoku"]


def test_other_names_are_unknown_as_in_any_module():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hrm_hf.data.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        import_module("hrm_hf.data.nothing")
