"""Messages about missing packages name an extra that installs them. Referee: the extras in setup.cfg."""

import ast
import re
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from hrm_hf.io.usage import validate_extra


ROOT = Path(__file__).parents[2]
OWN_PACKAGES = {"sklearn": "scikit-learn"}  # modules whose names differ from their packages'


def extras() -> dict[str, set[str]]:
    """Return the packages of each extra."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return {
        name: set(re.findall(r"^[\w-]+", lines, re.MULTILINE))
        for name, lines in settings["options.extras_require"].items()
    }


def demands() -> list[tuple[str, ...]]:
    """Return the literal arguments of the calls of `validate_extra`, and of `start_script` in the training scripts."""
    found = []
    for file in sorted([*(ROOT / "hrm_hf").rglob("*.py"), *(ROOT / "training").glob("*.py")]):
        text = file.read_text()
        if "validate_extra" not in text and "start_script" not in text:
            continue  # each test process would otherwise parse every file
        for node in ast.walk(ast.parse(text)):
            name = getattr(getattr(node, "func", None), "id", None)
            if name == "validate_extra":
                literal = [one.value if isinstance(one, ast.Constant) else None for one in node.args]
                if literal[0] is not None:
                    found.append((file.name, literal[0], *(one for one in literal[2:] if one)))
            elif name == "start_script":
                found += [(file.name, one.value.value, one.value.value) for one in node.keywords]
    return found


@pytest.mark.parametrize("demand", demands(), ids=lambda demand: "-".join(demand[:2]))
def test_named_extra_installs_the_required_packages(demand):
    _, extra, *modules = demand
    assert {OWN_PACKAGES.get(module, module).replace("_", "-") for module in modules} <= extras()[extra]


def test_trackers_are_extras_of_their_names():
    from hrm_hf.trainer.run import TRACKERS

    assert all(extras()[tracker] == {tracker} for tracker in TRACKERS)


def test_messages_name_the_extra_instead_of_its_package():
    of_users = extras().keys() - {"dev", "docs", "test", "quality"}
    ours = set().union(*(extras()[name] for name in of_users))
    for file in (ROOT / "hrm_hf").rglob("*.py"):
        said = re.findall(r"pip install [\"']?([\w-]+)", file.read_text())
        assert not ours & set(said), file


def test_missing_package_is_reported_with_its_extra_and_alternative(monkeypatch):
    validate_extra("onnx", "this needs json", "json")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError) as error:
        validate_extra("onnx", "export needs onnx", "json", "onnx", instead="export with torch")
    advice = 'pip install ".[onnx]" in the source folder of hrm_hf'
    assert str(error.value) == f"export needs onnx: {advice}, or export with torch"
