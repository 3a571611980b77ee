"""A loopback Hub for the test's own process: `point_at` redirects huggingface_hub, `call` runs our commands.

The fixtures `hub` (a Hub that is pointed at) and `puzzle` (a checkpoint) are in conftest.py, which has set the library
offline.
"""

from huggingface_hub import constants
from typer.testing import CliRunner

from hrm_hf.cli import app


NAME = "org/model"
TOKEN = "hf_test"


def point_at(hub, monkeypatch, tmp_path):
    """Set in this process what `hub.environment` sets in a new one."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it caches the URL of its first Hub


def call(*arguments, status=0):
    """Run `hrm-hf` in this process, and return its output and exit status."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result
