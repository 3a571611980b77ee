"""The loopback Hub judged by its clients, huggingface_hub and hf_xet, and by requests that they never send.

What packages of ours do with a Hub is tested elsewhere; here only that the stand-in behaves as the Hub does.
"""

import hashlib
import itertools
import json
import random
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


REPO = "org/model"
WEIGHTS = "model.safetensors"
PATIENCE = 60  # seconds until a test gives up on an event

# What a process does in the tests that need one: to be killed, or to use Xet, whose caches are a process's own.
UPLOAD = "import sys, huggingface_hub as hub; hub.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])"
DOWNLOAD = "import sys, huggingface_hub as hub; hub.snapshot_download(sys.argv[1], local_dir=sys.argv[2])"

MISLABEL = """
import sys, hf_xet
access = {"endpoint": sys.argv[1], "token": sys.argv[2], "token_expiry_unix_secs": int(sys.argv[3])}
with hf_xet.XetSession().new_upload_commit(**access) as commit:
    commit.start_upload_bytes(b"bytes" * 999, sha256="ab" * 32)
"""


@pytest.fixture
def online(monkeypatch):
    """Lets huggingface_hub reach loopback from this process (conftest.py turns it offline) and keeps Xet out."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(tmp_path, online):
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def xet_hub(tmp_path, online):
    pytest.importorskip("hf_xet", reason="the Xet protocol needs hf_xet")
    with HubServer(tmp_path / "hub", xet=True) as server:
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
    """Path -> bytes of every file below a folder, without the client's own notes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def shown(hub: HubServer, **where) -> dict[str, bytes]:
    """What the repository holds beside the .gitattributes that every new one begins with."""
    files = hub.files(REPO, **where)
    files.pop(".gitattributes")
    return files


def start(hub: HubServer, home: Path, script: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=hub.environment(home), stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors


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


def test_the_environment_of_a_process_names_the_hub_and_only_the_token_asked_for(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_caller")
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    full = hub.environment(tmp_path)
    assert (full["HF_ENDPOINT"], full["HF_TOKEN"], full["HF_HUB_OFFLINE"]) == (hub.url, hub.token, "0")
    assert "HF_HUB_CACHE" not in full and full["HF_HOME"] == str(tmp_path)
    assert "HF_TOKEN" not in hub.environment(tmp_path, token=False)
    assert hub.environment(tmp_path, token=hub.read_token)["HF_TOKEN"] == hub.read_token


# Reading and writing


def test_a_folder_uploaded_and_downloaded_again_is_equal(hub, api, checkpoint, tmp_path):
    commit = api.upload_folder(repo_id=REPO, folder_path=checkpoint, commit_message="first")
    assert [name.startswith("/upload/") for method, name in hub.requests if method == "PUT"] == [True]
    assert shown(hub) == contents(checkpoint)
    assert hub.commits(REPO)[0] == commit.oid and len(hub.commits(REPO)) == 2
    copy = snapshot_download(REPO, endpoint=hub.url, token=hub.token, local_dir=tmp_path / "copy")
    assert contents(Path(copy)) == hub.files(REPO)


@pytest.mark.parametrize("kind", ["model", "dataset", "space"])
def test_repositories_of_each_type_are_apart_and_created_once(hub, api, tmp_path, kind):
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


def test_a_repository_named_without_a_namespace_belongs_to_the_token(hub, api):
    assert api.create_repo("alone").repo_id == f"{api.whoami()['name']}/alone"


def test_model_info_tells_card_files_and_hashes(api, checkpoint):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    info = api.model_info(REPO, files_metadata=True)
    assert (info.private, info.pipeline_tag, info.tags, info.card_data.license) == (False, "other", ["a", "b"], "mit")
    weights = next(file for file in info.siblings if file.rfilename == WEIGHTS)
    assert weights.lfs.sha256 == hashlib.sha256((checkpoint / WEIGHTS).read_bytes()).hexdigest()
    assert weights.size == weights.lfs.size == 1_000_000


def test_trees_and_paths_list_files_and_folders(api, checkpoint):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    top = {item.path for item in api.list_repo_tree(REPO)}
    assert top == {".gitattributes", "README.md", "config.json", "deep", WEIGHTS}
    assert {item.path for item in api.list_repo_tree(REPO, recursive=True)} == top | {"deep/notes.txt"}
    assert [item.path for item in api.list_repo_tree(REPO, "deep")] == ["deep/notes.txt"]
    # git's own hash of a text file, as `git hash-object` prints it
    notes, folder = api.get_paths_info(REPO, ["deep/notes.txt", "deep", "absent"])
    assert notes.blob_id == hashlib.sha1(b"blob 4\0" + "öl\n".encode()).hexdigest()
    assert folder.path == "deep"


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


def test_a_folder_is_replaced_in_one_commit(hub, api, checkpoint):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint, path_in_repo="old")
    operations = [CommitOperationDelete("old/"), CommitOperationAdd("new.txt", b"n")]
    api.create_commit(REPO, operations, commit_message="replace")
    assert shown(hub) == {"new.txt": b"n"}
    assert len(hub.commits(REPO)) == 3


def test_uploading_what_is_there_already_makes_no_commit(hub, api, checkpoint):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    before = hub.commits(REPO), len([1 for method, _ in hub.requests if method == "PUT"])
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    assert (hub.commits(REPO), len([1 for method, _ in hub.requests if method == "PUT"])) == before


def test_another_server_on_the_same_folder_serves_the_same(hub, api, checkpoint, tmp_path):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    with HubServer(tmp_path / "hub") as again:
        assert again.files(REPO) == hub.files(REPO) and again.commits(REPO) == hub.commits(REPO)


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


def test_a_public_repository_is_read_without_a_token_and_not_written(hub, api, tmp_path):
    api.upload_file(path_or_fileobj=b"open", path_in_repo="a.txt", repo_id=REPO)
    stranger = HfApi(endpoint=hub.url, token=False)
    assert Path(stranger.hf_hub_download(REPO, "a.txt", cache_dir=tmp_path / "cache")).read_bytes() == b"open"
    with pytest.raises(HfHubHTTPError, match="401"):
        stranger.upload_file(path_or_fileobj=b"x", path_in_repo="b.txt", repo_id=REPO)


def test_what_is_missing_is_named_by_the_error(api, tmp_path):
    cache = {"cache_dir": tmp_path / "cache"}
    with pytest.raises(RepositoryNotFoundError, match="404"):
        api.hf_hub_download("org/absent", "a.txt", **cache)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(REPO, "a.txt", revision="absent", **cache)
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(REPO, "absent.txt", **cache)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("gpt2")


@pytest.mark.parametrize("card", ["---\ntags: [a\n---\n", "---\njust words\n---\n"])
def test_a_card_whose_metadata_is_no_yaml_mapping_is_refused(hub, api, card):
    with pytest.raises(ValueError, match="Invalid metadata in README"):
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=REPO)
    assert shown(hub) == {}


def test_an_object_with_other_bytes_than_announced_is_refused_and_cannot_be_committed(hub, api):
    right, wrong = b"\1" * 50, b"\2" * 50
    oid = hashlib.sha256(right).hexdigest()
    batch = {"operation": "upload", "objects": [{"oid": oid, "size": 50}], "hash_algo": "sha256"}
    _, _, answer = call(hub, "POST", f"/{REPO}.git/info/lfs/objects/batch", batch, hub.token)
    address = json.loads(answer)["objects"][0]["actions"]["upload"]["href"]
    for bad in (wrong, right[:49]):
        assert call(hub, "PUT", address, bad)[0] == 400
    named = ("lfsFile", {"path": WEIGHTS, "algo": "sha256", "oid": oid, "size": 50})
    assert commit_request(hub, named)[0] == 400
    assert call(hub, "PUT", address, right)[0] == 200
    assert commit_request(hub, named)[0] == 200
    assert shown(hub) == {WEIGHTS: right}


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


def test_a_commit_upon_an_outdated_parent_is_refused(hub, api):
    parent = hub.commits(REPO)[0]
    add = [CommitOperationAdd("a.txt", b"a")]
    api.create_commit(REPO, add, commit_message="one", parent_commit=parent)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(REPO, [CommitOperationAdd("b.txt", b"b")], commit_message="two", parent_commit=parent)
    assert shown(hub) == {"a.txt": b"a"}


# Many at once


def test_concurrent_commits_all_arrive_and_readers_never_see_half_of_one(hub, api):
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


@pytest.mark.parametrize("asked, part", [("5-9", slice(5, 10)), ("5-", slice(5, None)), ("-3", slice(-3, None))])
def test_a_range_of_a_file_is_served(hub, api, checkpoint, asked, part):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    weights = (checkpoint / WEIGHTS).read_bytes()
    address = f"/{REPO}/resolve/main/{WEIGHTS}"
    status, headers, body = call(hub, "GET", address, Range=f"bytes={asked}")
    first, end, _ = part.indices(len(weights))
    assert (status, body) == (206, weights[part])
    assert headers["Content-Range"] == f"bytes {first}-{end - 1}/{len(weights)}"
    assert call(hub, "GET", address, Range=f"bytes={len(weights)}-")[0] == 416


def test_a_dropped_download_goes_on_where_it_broke(hub, api, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # its 10 MB: what it loses of a broken download
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    hub.cut_after(WEIGHTS, 300_000)
    downloaded = api.hf_hub_download(REPO, WEIGHTS, cache_dir=tmp_path / "cache")
    assert Path(downloaded).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    ((path, asked),) = hub.ranges
    assert path.endswith(WEIGHTS) and asked == "bytes=300000-"


def test_a_killed_download_leaves_no_file_and_a_second_one_completes(hub, api, checkpoint, tmp_path):
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    reached = hub.hold(WEIGHTS, 300_000)
    process = start(hub, tmp_path / "home", DOWNLOAD, REPO, tmp_path / "copy")
    assert reached.wait(PATIENCE)
    process.kill()
    process.communicate()
    hub.release()
    assert not (tmp_path / "copy" / WEIGHTS).exists()
    finish(start(hub, tmp_path / "home", DOWNLOAD, REPO, tmp_path / "copy"))
    assert contents(tmp_path / "copy") == hub.files(REPO)


def test_an_upload_whose_connection_drops_is_sent_again_and_taken_once(hub, api, checkpoint):
    hub.cut_after("/upload/", 300_000)
    api.upload_folder(repo_id=REPO, folder_path=checkpoint)
    assert len([path for method, path in hub.requests if method == "PUT"]) == 2
    assert shown(hub) == contents(checkpoint)
    assert len(hub.commits(REPO)) == 2


def test_a_closed_hub_answers_no_more(tmp_path, online):
    with HubServer(tmp_path / "hub") as hub:
        client = HfApi(endpoint=hub.url, token=hub.token)
        client.create_repo(REPO)  # over a connection that the client keeps
    with pytest.raises(httpx2.TransportError):
        client.create_repo("org/late")


@pytest.mark.parametrize("protocol, body", [("hub", "/upload/"), ("xet_hub", "/cas/v1/xorbs/")], ids=["lfs", "xet"])
def test_an_upload_killed_in_the_middle_leaves_no_new_file_and_may_be_repeated(
    request, protocol, body, checkpoint, tmp_path
):
    hub = request.getfixturevalue(protocol)
    HfApi(endpoint=hub.url, token=hub.token).create_repo(REPO)
    reached = hub.hold(body, 300_000)
    process = start(hub, tmp_path / "home", UPLOAD, REPO, checkpoint)
    assert reached.wait(PATIENCE)
    process.kill()
    process.communicate()
    hub.release()
    assert shown(hub) == {} and len(hub.commits(REPO)) == 1
    finish(start(hub, tmp_path / "home", UPLOAD, REPO, checkpoint))
    assert shown(hub) == contents(checkpoint)


# Xet


def test_files_go_up_and_down_by_xet_and_are_readable_without_it(xet_hub, checkpoint, tmp_path):
    client = HfApi(endpoint=xet_hub.url, token=xet_hub.token)
    client.create_repo(REPO, private=True)
    finish(start(xet_hub, tmp_path / "home", UPLOAD, REPO, checkpoint))
    assert any(path.startswith("/cas/v1/xorbs/") for _, path in xet_hub.requests)
    assert not any(method == "PUT" for method, _ in xet_hub.requests)
    assert shown(xet_hub) == contents(checkpoint)

    # Without Xet, from this process
    downloaded = client.hf_hub_download(REPO, WEIGHTS, cache_dir=tmp_path / "cache")
    assert Path(downloaded).read_bytes() == (checkpoint / WEIGHTS).read_bytes()

    # With it, over a connection that breaks within the xorb
    xet_hub.requests.clear()
    xet_hub.cut_after("/cas/xorbs/", 300_000)
    finish(start(xet_hub, tmp_path / "home", DOWNLOAD, REPO, tmp_path / "copy"))
    assert contents(tmp_path / "copy") == xet_hub.files(REPO)
    assert ("GET", f"/{REPO}/resolve/{xet_hub.commits(REPO)[0]}/{WEIGHTS}") not in xet_hub.requests
    assert len([path for _, path in xet_hub.requests if path.startswith("/cas/xorbs/")]) >= 2


def test_the_content_store_wants_its_own_tokens_and_whole_files(xet_hub):
    client = HfApi(endpoint=xet_hub.url, token=xet_hub.token)
    client.create_repo(REPO)
    token_address = f"/api/models/{REPO}/xet-{{}}-token/main"
    assert call(xet_hub, "GET", token_address.format("write"), token=xet_hub.read_token)[0] == 403
    _, _, answer = call(xet_hub, "GET", token_address.format("read"), token=xet_hub.read_token)
    reader = json.loads(answer)["accessToken"]
    assert call(xet_hub, "POST", "/cas/v1/shards", b"", token=reader)[0] == 401
    assert call(xet_hub, "GET", "/cas/v1/reconstructions/" + "0" * 64, token=xet_hub.token)[0] == 401
    assert call(xet_hub, "GET", "/cas/v1/reconstructions/" + "0" * 64, token=reader)[0] == 404


def test_a_file_sent_by_xet_under_a_wrong_hash_cannot_be_committed(xet_hub, tmp_path):
    HfApi(endpoint=xet_hub.url, token=xet_hub.token).create_repo(REPO)
    _, _, answer = call(xet_hub, "GET", f"/api/models/{REPO}/xet-write-token/main", token=xet_hub.token)
    access = [json.loads(answer)[name] for name in ("casUrl", "accessToken", "exp")]
    finish(start(xet_hub, tmp_path / "home", MISLABEL, *access))
    status, headers, _ = commit_request(xet_hub, ("lfsFile", {"path": WEIGHTS, "algo": "sha256", "oid": "ab" * 32}))
    assert status == 400 and "SHA-256" in headers["X-Error-Message"]
    assert shown(xet_hub) == {}
