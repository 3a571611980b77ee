"""The loopback Hub, tested by its client huggingface_hub and by requests that the client never sends.

These tests only show that the loopback Hub behaves like the Hub; other files test how our package uses it.
"""

import itertools
import json
import random
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


REPO = "org/model"
WEIGHTS = "model.safetensors"
PATIENCE = 60  # seconds until a test gives up on an event


@pytest.fixture
def online(monkeypatch):
    """Let huggingface_hub reach loopback from this process (conftest.py sets offline mode) and disable Xet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(tmp_path, online):
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def api(hub):
    client = HfApi(endpoint=hub.url, token=hub.token)
    client.create_repo(REPO)
    return client


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder like a checkpoint: text, a large binary file, a folder within."""
    return write_checkpoint(tmp_path / "checkpoint")


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [a, b]\npipeline_tag: other\n---\n# A model\n")
    (folder / WEIGHTS).write_bytes(random.Random(seed).randbytes(1_000_000))
    (folder / "deep" / "notes.txt").write_text("öl\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file below a folder, without the client's metadata."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def shown(hub: HubServer, **where) -> dict[str, bytes]:
    """Files of the repository except the .gitattributes of every new repository."""
    files = hub.files(REPO, **where)
    files.pop(".gitattributes")
    return files


def call(hub: HubServer, method: str, path: str, body=None, token: str | None = None, **headers):
    """One plain request: status, headers and body of the answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    address = path if path.startswith("http") else f"{hub.url}{path}"
    request = urllib.request.Request(address, data=data, method=method, headers=headers)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def commit_request(hub: HubServer, *operations: tuple[str, dict]):
    lines = [{"key": key, "value": value} for key, value in (("header", {"summary": "test"}), *operations)]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    return call(hub, "POST", f"/api/models/{REPO}/commit/main", body, hub.token)


# Reading and writing


def test_a_folder_uploaded_and_downloaded_again_is_equal(hub, api, checkpoint, tmp_path):
    commit = api.upload_folder(repo_id=REPO, folder_path=checkpoint, commit_message="first")
    assert [name.startswith("/upload/") for method, name in hub.requests if method == "PUT"] == [True]
    assert shown(hub) == contents(checkpoint)
    assert hub.commits(REPO)[0] == commit.oid and len(hub.commits(REPO)) == 2
    copy = snapshot_download(REPO, endpoint=hub.url, token=hub.token, local_dir=tmp_path / "copy")
    assert contents(Path(copy)) == hub.files(REPO)


@pytest.mark.parametrize("kind", ["model", "dataset", "space"])
def test_repository_types_are_separate_and_created_once(hub, api, tmp_path, kind):
    options = {"repo_id": "org/thing", "repo_type": kind, "space_sdk": "gradio" if kind == "space" else None}
    address = api.create_repo(**options)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(**options)
    assert api.create_repo(**options, exist_ok=True) == address
    api.upload_file(path_or_fileobj=b"\0" * 99, path_in_repo="x.bin", repo_id="org/thing", repo_type=kind)
    downloaded = api.hf_hub_download("org/thing", "x.bin", repo_type=kind, cache_dir=tmp_path / "cache")
    assert Path(downloaded).read_bytes() == b"\0" * 99
    assert api.repo_info("org/thing", repo_type=kind).id == "org/thing"
    for other in {"model", "dataset", "space"} - {kind}:
        assert not api.repo_exists("org/thing", repo_type=other)
    api.delete_repo("org/thing", repo_type=kind)
    assert not api.repo_exists("org/thing", repo_type=kind)


def test_branches_tags_and_shas_each_name_their_own_tree(hub, api):
    first = api.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id=REPO).oid
    api.create_tag(REPO, tag="v1")
    api.create_branch(REPO, branch="try/two")
    api.upload_file(path_or_fileobj=b"2", path_in_repo="a.txt", repo_id=REPO, revision="try/two")
    api.delete_file("a.txt", REPO)
    assert shown(hub) == {}
    assert shown(hub, revision="v1") == shown(hub, revision=first[:8]) == {"a.txt": b"1"}
    assert shown(hub, revision="try/two") == {"a.txt": b"2"}
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(REPO, tag="v1")
    api.delete_tag(REPO, tag="v1")
    api.delete_branch(REPO, branch="try/two")
    references = api.list_repo_refs(REPO)
    assert [branch.name for branch in references.branches] == ["main"] and references.tags == []
    assert [commit.commit_id for commit in api.list_repo_commits(REPO)] == hub.commits(REPO)


# Refusals


def test_a_private_repository_is_hidden_without_its_token(hub, api, tmp_path):
    api.update_repo_settings(REPO, private=True)
    api.upload_file(path_or_fileobj=b"secret", path_in_repo="a.txt", repo_id=REPO)
    before = hub.commits(REPO)
    assert api.repo_info(REPO).private
    for repo in (REPO, "org/absent"):  # a stranger cannot tell the two apart
        with pytest.raises(RepositoryNotFoundError, match="401"):
            HfApi(endpoint=hub.url, token=False).hf_hub_download(repo, "a.txt", cache_dir=tmp_path / "none")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials") as refusal:
        HfApi(endpoint=hub.url, token="hf_wrong").repo_info(REPO)
    assert refusal.value.response.status_code == 401
    reader = HfApi(endpoint=hub.url, token=hub.read_token)
    assert Path(reader.hf_hub_download(REPO, "a.txt", cache_dir=tmp_path / "read")).read_bytes() == b"secret"
    with pytest.raises(HfHubHTTPError, match="403"):
        reader.upload_file(path_or_fileobj=b"\0", path_in_repo="b.bin", repo_id=REPO)
    with pytest.raises(HfHubHTTPError, match="403"):
        reader.create_repo("org/other")
    assert hub.commits(REPO) == before


def test_missing_repositories_revisions_and_files_raise_their_errors(api, tmp_path):
    cache = {"cache_dir": tmp_path / "cache"}
    with pytest.raises(RepositoryNotFoundError, match="404"):
        api.hf_hub_download("org/absent", "a.txt", **cache)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(REPO, "a.txt", revision="absent", **cache)
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(REPO, "absent.txt", **cache)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("gpt2")


def test_a_commit_with_one_impossible_operation_changes_nothing(hub, api):
    before = hub.commits(REPO)
    good = ("file", {"path": "a.txt", "content": "YQ==", "encoding": "base64"})
    absent = ("lfsFile", {"path": WEIGHTS, "algo": "sha256", "oid": "0" * 64, "size": 3})
    status, headers, _ = commit_request(hub, good, absent)
    assert status == 400 and "does not exist" in headers["X-Error-Message"]
    for bad, expected in [
        (("deletedFile", {"path": "absent"}), 404),
        (("deletedFolder", {"path": "absent/"}), 404),
        (("file", {"path": "../a", "content": "YQ=="}), 400),
        (("file", {"path": "a.txt/b", "content": "YQ=="}), 400),
        (("file", {"path": "b.txt", "content": "%"}), 400),
        (("file", {"content": "YQ=="}), 400),
        (("rename", {"path": "b.txt"}), 400),
    ]:
        assert commit_request(hub, good, bad)[0] == expected, bad
    assert call(hub, "POST", f"/api/models/{REPO}/commit/main", b"{not json", hub.token)[0] == 400
    assert shown(hub) == {} and hub.commits(REPO) == before


def test_commit_on_an_outdated_parent_is_rejected(hub, api):
    parent = hub.commits(REPO)[0]
    add = [CommitOperationAdd("a.txt", b"a")]
    api.create_commit(REPO, add, commit_message="one", parent_commit=parent)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(REPO, [CommitOperationAdd("b.txt", b"b")], commit_message="two", parent_commit=parent)
    assert shown(hub) == {"a.txt": b"a"}


# Many at once


def test_concurrent_commits_are_atomic(hub, api):
    seen: set[frozenset[str]] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(frozenset(file.rfilename for file in api.model_info(REPO).siblings))

    def commit(number: int) -> None:
        pair = [CommitOperationAdd(f"{part}{number}.bin", bytes([0, number])) for part in "xy"]
        api.create_commit(REPO, pair, commit_message=f"pair {number}")

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(read)
        try:
            list(pool.map(commit, range(8)))
        finally:
            done.set()
        reader.result()
    pairs = [f"{part}{number}.bin" for part, number in itertools.product("xy", range(8))]
    assert sorted(shown(hub)) == sorted(pairs)
    assert len(hub.commits(REPO)) == 9
    assert all((f"x{number}.bin" in names) == (f"y{number}.bin" in names) for names in seen for number in range(8))


# Connections that break


def test_dropped_download_resumes(hub, api, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # not 10 MB, which would all be lost
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    hub.cut_after(WEIGHTS, 300_000)
    downloaded = api.hf_hub_download(REPO, WEIGHTS, cache_dir=tmp_path / "cache")
    assert Path(downloaded).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    ((path, asked),) = hub.ranges
    assert path.endswith(WEIGHTS) and asked == "bytes=300000-"


def test_dropped_upload_is_retried_and_stored_once(hub, api, checkpoint):
    hub.cut_after("/upload/", 300_000)
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    assert len([path for method, path in hub.requests if method == "PUT"]) == 2
    assert shown(hub) == contents(checkpoint)
    assert len(hub.commits(REPO)) == 2
