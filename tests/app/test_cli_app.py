"""`hrm-hf app` reports errors in one line, before a model is loaded."""

import socket
import sys

import pytest
from started import free_port
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cli.serve import validate_port
from hrm_hf.puzzles.options import shipped_model


def run(*arguments: str):
    return CliRunner().invoke(app, ["app", *arguments])


def test_app_shows_packaged_models_by_default(monkeypatch):
    shown = []
    monkeypatch.setattr("hrm_hf.app.build_app", lambda models, device: shown.append((models, device)))
    monkeypatch.setattr("hrm_hf.app.launch", lambda demo, **options: None)
    assert run("--device", "cpu").exit_code == 0
    assert shown == [([shipped_model("sudoku"), shipped_model("maze")], "cpu")]


def test_missing_folder_is_a_usage_error():
    found = run("./no/such/model")
    assert found.exit_code == 2
    assert "./no/such/model" in found.output


def test_occupied_port_is_reported_with_the_option_to_change_it(checkpoints):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = run(str(checkpoints["sudoku"]), "--port", str(port))
    assert found.exit_code == 1
    assert all(part in str(found.exception) for part in (f"127.0.0.1:{port}", "--port"))
    validate_port("127.0.0.1", port)  # free again


def test_missing_gradio_names_the_extra(checkpoints, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    found = run(str(checkpoints["sudoku"]))
    assert found.exit_code == 1
    with pytest.raises(ImportError, match=r"\.\[app\]"):
        raise found.exception


def test_page_is_served_on_the_requested_port(checkpoints, monkeypatch):
    asked = {}
    monkeypatch.setattr("hrm_hf.app.launch", lambda demo, **options: asked.update(options, demo=demo))
    port = free_port()
    found = run(str(checkpoints["sudoku"]), "--port", str(port), "--open")
    assert found.exit_code == 0, found.exception
    assert asked["demo"].title == "Recursive reasoning models"
    assert asked["server_name"] == "127.0.0.1" and asked["server_port"] == port
    assert asked["inbrowser"] and not asked["share"]
