"""Turns huggingface_hub in this process to a loopback Hub; conftest.py has set it offline."""

from huggingface_hub import constants


NAME = "org/model"
TOKEN = "hf_test"


def point_at(hub, monkeypatch, tmp_path):
    """What the environment variables of `hub.environment` set in a new process."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the address of its first Hub
