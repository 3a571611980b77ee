"""Execute docs/adding_an_architecture.md in a copy of the package: its files and its row give an architecture that
trains, is saved, pushed, adapted and exported."""

import shutil
from pathlib import Path

import clean_process
import docs_pages
import pytest
from hub_server import HubServer
from safetensors.torch import load_file
from tolerances import assert_copied
from transformers import AutoModelForMaskedLM

import hrm_hf


PAGE = "docs/adding_an_architecture.md"
WRITTEN = "written to "
IMPORTS_END = "\n\n\nclass AutoModelForPuzzleSolving"
ROWS_BEGIN = "    for row in (\n"
# Imports that a process without the package needs from a puzzle model: only its classes and their siblings.
CARRIED = {
    "act.py", "bounds.py", "configuration_hrm_puzzle.py", "configuration_plain_puzzle.py", "modeling_plain_puzzle.py",
    "modeling_puzzle.py", "modeling_utils.py", "pipeline_batches.py", "pipeline_puzzle.py", "puzzle_layers.py",
    "puzzle_table.py", "settings_puzzle.py", "solving_puzzle.py",
}  # fmt: skip


def blocks():
    """Return the code blocks of the page by the comment above each."""
    return {block.reason: block.text for block in docs_pages.blocks(PAGE)}


def replace_once(text, place, new):
    assert text.count(place) == 1, place
    return text.replace(place, new)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder in which the page's steps ran, and the files that they pushed to the Hub."""
    folder = tmp_path_factory.mktemp("page")
    package = folder / "hrm_hf"
    shutil.copytree(Path(hrm_hf.__file__).parent, package)
    shutil.copytree(docs_pages.ROOT / "model_cards", folder / "model_cards")
    parts = blocks()
    for reason, text in parts.items():
        if reason.startswith(WRITTEN):
            file = folder / reason.removeprefix(WRITTEN)
            assert not file.exists()
            file.write_text(text)
    registry = (package / "registry.py").read_text()
    imports, row = parts["imports of hrm_hf/registry.py"], parts["row of hrm_hf/registry.py"]
    registry = replace_once(registry, IMPORTS_END, f"\n{imports}{IMPORTS_END}")
    (package / "registry.py").write_text(replace_once(registry, ROWS_BEGIN, f"{ROWS_BEGIN}{row.rstrip()},\n"))
    (folder / "use.py").write_text(parts["run by tests/common/test_adding_an_architecture.py"])
    with HubServer(folder / "hub") as hub:
        home = folder / "home"
        ended = clean_process.run(
            "import runpy; runpy.run_path('use.py', run_name='__main__')",
            cwd=folder, home=home, hub=hub.environment(home), package=folder,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-3000:]
        return folder, hub.files("org/plain")


def test_new_architecture_needs_only_three_files_and_a_registry_row():
    reasons = blocks()
    assert sum(reason.startswith(WRITTEN) for reason in reasons) == 3
    assert reasons["row of hrm_hf/registry.py"].count("\n") == 1


def test_the_new_architecture_is_trained_saved_and_loaded_by_its_own_code(finished):
    folder, _ = finished
    model = AutoModelForMaskedLM.from_pretrained(folder / "plain", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    assert_copied(model.state_dict(), load_file(folder / "plain" / "model.safetensors"))
    assert {file.name for file in (folder / "plain").glob("*.py")} == CARRIED


def test_the_new_architecture_is_pushed_with_its_card_and_its_code(finished):
    _, files = finished
    card = " ".join(files["README.md"].decode().split())
    assert "(`plain_puzzle`) for Sudoku on boards of 4 x 4" in card and "# plain" in card
    assert files.keys() >= CARRIED | {"config.json", "model.safetensors"}


def test_the_new_architecture_is_adapted(finished):
    folder, _ = finished
    names = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(".L_level." in name and "lora_B" in name and value.abs().max() > 0 for name, value in names.items())
    assert any(".q_head." in name for name in names), "held whole, as the row says"


def test_the_new_architecture_is_exported(finished):
    folder, _ = finished
    assert (folder / "plain.pt2").stat().st_size > 10_000
