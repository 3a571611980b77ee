"""Pulling from a lying Hub: nothing is written outside the folder or the cache, wrong bytes never
become a model, and files of the user stay.

huggingface_hub downloads; these tests hold it to our promise. What must not leave with a push is in
test_push_boundary.py.
"""

from pathlib import Path

import pytest
from hub_here import NAME
from huggingface_hub import CommitOperationAdd, HfApi

from hrm_hf.hub import PULL_RECORD, HubError, pull_checkpoint


SMALL, LARGE = b"a small file\n", b"\0" * 1000  # the second is an LFS object
OUTSIDE = "../../../../outside"
NAMES = (OUTSIDE, "a/../../../../../outside", "/tmp/hrm_hf_outside", ".git/hooks/post-checkout")


@pytest.fixture
def model(hub):
    """A repository with two files."""
    HfApi().create_repo(NAME)
    files = [CommitOperationAdd("small.txt", SMALL), CommitOperationAdd("large.bin", LARGE)]
    HfApi().create_commit(NAME, files, commit_message="two files")
    return hub


def pull(where: str, tmp_path: Path):
    """Pull to a folder or to the cache, both below `tmp_path`."""
    return pull_checkpoint(NAME, tmp_path / "deep" / "er" / "pulled" if where == "folder" else None)


def files_outside(tmp_path: Path) -> list[Path]:
    """Return files outside the folder, the cache and the Hub's storage that the Hub could have written."""
    places = [tmp_path / "hub", tmp_path / "cache", tmp_path / "deep" / "er"]
    return [file for file in tmp_path.rglob("*") if file.is_file() and not any(map(file.is_relative_to, places))]


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize(
    "name", [OUTSIDE, "a/../../../../../outside", "/tmp/hrm_hf_outside", ".git/hooks/post-checkout"]
)
def test_pull_rejects_names_outside_its_folder(name, where, model, tmp_path):
    def with_another_name(answer):
        for line in answer if isinstance(answer, list) else answer["siblings"]:
            key = "path" if "path" in line else "rfilename"
            line[key] = name if line[key] == "small.txt" else line[key]
        return answer

    model.lie("/api/models/", with_another_name)
    sent = {"X-Repo-Commit": model.commits(NAME)[0], "ETag": '"0123"', "Content-Length": str(len(SMALL))}
    model.instead(name.rpartition("/")[2], [SMALL], **sent)
    with pytest.raises((HubError, ValueError, OSError)):
        pull(where, tmp_path)
    assert not files_outside(tmp_path) and not Path("/tmp/hrm_hf_outside").exists()
    assert not (tmp_path / "deep" / "er" / "pulled").exists()


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_pull_ignores_header_paths_outside_its_folder(where, model, tmp_path):
    model.lie("/resolve/", headers={"ETag": f'"{OUTSIDE}"', "X-Linked-Etag": f'"{OUTSIDE}"'})
    try:
        pull(where, tmp_path)
    except (HubError, ValueError, OSError):
        pass
    assert not files_outside(tmp_path)


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize("body", [b"\1" * 1000, b"\0" * 900, b"\0" * 2000], ids=["other", "shorter", "longer"])
def test_pull_rejects_wrong_bytes(body, where, model, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    model.instead("large.bin", [body], **{"X-Repo-Commit": model.commits(NAME)[0], "ETag": '"x"'})
    with pytest.raises((HubError, OSError)):
        pull(where, tmp_path)
    assert not (tmp_path / "deep" / "er" / "pulled").exists()


def test_resumed_pull_does_not_write_through_symlinks(model, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("mine")
    incoming = tmp_path / "deep" / "er" / ".pulled.incoming"
    incoming.mkdir(parents=True)
    (incoming / "small.txt").symlink_to(tmp_path / "other" / "a.txt")
    folder = pull("folder", tmp_path).path
    assert (folder / "small.txt").read_bytes() == SMALL and (tmp_path / "other" / "a.txt").read_text() == "mine"


def test_user_files_are_kept(model, tmp_path):
    folder = pull("folder", tmp_path).path
    (folder / "notes.txt").write_text("mine")
    (folder / PULL_RECORD).unlink()
    with pytest.raises(ValueError, match="out="):
        pull("folder", tmp_path)
    assert (folder / "notes.txt").read_text() == "mine"
