"""Pull requests: first of the loopback Hub, tested by huggingface_hub's client, then those of our push.

test_cli_hub.py tests the output of the commands.
"""

import every
import pytest
import torch
from hub_here import NAME, TOKEN
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from transformers import AutoModelForMaskedLM

from hrm_hf.hub import HubError, pull_checkpoint, push_checkpoint, push_space, verify_checkpoint


FIRST, SECOND = "refs/pr/1", "refs/pr/2"


@pytest.fixture
def api(hub):
    """A client with a repository that contains the files a, b and c."""
    client = HfApi(endpoint=hub.url, token=hub.token)
    client.create_repo(NAME)
    files = [CommitOperationAdd(f"{name}.txt", name.encode()) for name in "abc"]
    client.create_commit(NAME, files, commit_message="files")
    return client


def shown(hub, revision="main"):
    """Text files of a revision."""
    return {name: text.decode() for name, text in hub.files(NAME, revision).items() if name.endswith(".txt")}


def change(client, options=None, **texts):
    """Commit that writes each file NAME.txt, or deletes it if the text is None."""
    operations = [
        CommitOperationDelete(f"{name}.txt") if text is None else CommitOperationAdd(f"{name}.txt", text.encode())
        for name, text in texts.items()
    ]
    return client.create_commit(NAME, operations, commit_message="Change", **options or {"create_pr": True})


# ---- the loopback Hub ----


def test_pull_request_commits_stay_off_main_until_merged(hub, api, tmp_path):
    before = hub.commits(NAME)
    made = change(api, a="A")
    assert made.pr_url == f"{hub.url}/{NAME}/discussions/1"
    assert (made.pr_num, made.pr_revision) == (1, FIRST)
    second = change(api, {"revision": FIRST, "parent_commit": made.oid}, d="D")
    assert hub.commits(NAME) == before
    assert hub.commits(NAME, revision=FIRST) == [second.oid, made.oid, *before]
    assert shown(hub, FIRST) == {"a.txt": "A", "b.txt": "b", "c.txt": "c", "d.txt": "D"}
    (listed,) = api.get_repo_discussions(NAME, discussion_type="pull_request", discussion_status="open")
    assert (listed.num, listed.title, listed.status, listed.author) == (1, "Change", "open", "tester")
    (reference,) = api.list_repo_refs(NAME, include_pull_requests=True).pull_requests
    assert (reference.ref, reference.target_commit) == (FIRST, second.oid)
    with HubServer(tmp_path / "hub", token=TOKEN) as again:
        assert again.files(NAME, FIRST) == hub.files(NAME, FIRST)

    api.merge_pull_request(NAME, 1)
    details = api.get_discussion_details(NAME, 1)
    assert details.status == "merged" and details.target_branch == "refs/heads/main"
    assert hub.commits(NAME) == [details.merge_commit_oid, *before]
    assert hub.files(NAME) == hub.files(NAME, FIRST)
    assert [event.type for event in details.events] == ["commit", "commit", "status-change"]
    assert api.list_repo_commits(NAME)[0].title == "Change (#1)"
    assert not list(api.get_repo_discussions(NAME, discussion_status="open"))


def test_merge_keeps_changes_on_main_and_rejects_conflicts(hub, api):
    parent = hub.commits(NAME)[0]
    change(api, a="A", b=None)
    change(api, {"revision": "main"}, c="C")
    change(api, {"create_pr": True, "parent_commit": parent}, c="other")
    api.merge_pull_request(NAME, 1)
    assert shown(hub) == {"a.txt": "A", "c.txt": "C"}
    assert api.get_discussion_details(NAME, 2).conflicting_files == ["c.txt"]
    with pytest.raises(HfHubHTTPError, match=r"has conflicts: c\.txt"):
        api.merge_pull_request(NAME, 2)
    assert shown(hub) == {"a.txt": "A", "c.txt": "C"}
    assert api.get_discussion_details(NAME, 2).status == "open"


def test_only_an_open_pull_request_can_be_merged(hub, api):
    assert api.create_pull_request(NAME, "Empty").status == "draft"
    change(api, {"revision": FIRST}, a="A")
    with pytest.raises(HfHubHTTPError, match="it is draft"):
        api.merge_pull_request(NAME, 1)
    assert api.change_discussion_status(NAME, 1, "closed").new_status == "closed"
    assert [found.num for found in api.get_repo_discussions(NAME, discussion_status="closed")] == [1]
    with pytest.raises(HfHubHTTPError, match="it is closed"):
        api.merge_pull_request(NAME, 1)
    assert shown(hub)["a.txt"] == "a"
    api.change_discussion_status(NAME, 1, "open")
    api.merge_pull_request(NAME, 1)
    assert shown(hub)["a.txt"] == "A"
    with pytest.raises(HfHubHTTPError, match="stays merged"):
        api.change_discussion_status(NAME, 1, "open")


def test_other_users_can_propose_but_not_write(hub, api):
    other = HfApi(endpoint=hub.url, token=hub.other_token)
    large = {"path_or_fileobj": b"\0" * 99, "path_in_repo": "x.bin", "repo_id": NAME}
    with pytest.raises(HfHubHTTPError, match="`create_pr=1`"):
        other.upload_file(**large)
    proposal = [CommitOperationAdd("x.bin", b"\0" * 99)]
    assert other.create_commit(NAME, proposal, commit_message="x", create_pr=True).pr_num == 1
    change(other, {"revision": FIRST}, a="A")
    assert hub.files(NAME, FIRST)["x.bin"] == b"\0" * 99 and "x.bin" not in hub.files(NAME)
    change(api, b="B")
    for refused in (
        lambda: change(other, {"revision": SECOND}, c="C"),
        lambda: other.change_discussion_status(NAME, 2, "closed"),
        lambda: other.merge_pull_request(NAME, 1),
        lambda: other.create_branch(NAME, branch="mine"),
        lambda: other.create_repo("org/new"),
    ):
        with pytest.raises(HfHubHTTPError, match="403"):
            refused()
    assert [found.num for found in api.get_repo_discussions(NAME, author="other")] == [1]
    other.create_repo("other/own")
    api.update_repo_settings(NAME, private=True)
    with pytest.raises(RepositoryNotFoundError):
        other.repo_info(NAME)


# ---- our push ----


def test_proposed_model_is_pulled_by_revision_and_reaches_main_when_merged(hub, puzzle, tmp_path):
    push_checkpoint(puzzle, NAME)
    before, commits = hub.files(NAME), hub.commits(NAME)
    proposed = every.model("hrm_puzzle", seed=3)
    proposed.save_pretrained(puzzle)
    result = push_checkpoint(puzzle, NAME, create_pr=True, message="Longer training")
    assert (result.url, result.revision) == (f"{hub.url}/{NAME}/discussions/1", FIRST)
    assert f"`hrm-hf pull {NAME} --revision {FIRST}`" in result.notes[-1]
    assert hub.files(NAME) == before and hub.commits(NAME) == commits

    pulled = pull_checkpoint(NAME, tmp_path / "pulled", revision=FIRST)
    assert pulled.commit == result.commit == verify_checkpoint(pulled.path, NAME, revision=FIRST).commit
    assert pull_checkpoint(NAME, revision=FIRST).path.name == result.commit  # the cache
    for source, revision in ((pulled.path, None), (NAME, FIRST)):
        model = AutoModelForMaskedLM.from_pretrained(source, revision=revision or "main")
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in proposed.state_dict().items())

    (puzzle / "results.json").write_text("{}")
    second = push_checkpoint(puzzle, NAME, revision=FIRST)
    assert (second.url, second.revision) == (result.url, FIRST)
    assert hub.commits(NAME, revision=FIRST)[:3] == [second.commit, result.commit, commits[0]]
    assert hub.files(NAME) == before
    HfApi(endpoint=hub.url).merge_pull_request(NAME, 1)
    assert hub.files(NAME) == hub.files(NAME, FIRST) and "results.json" in hub.files(NAME)
    assert hub.storage.find("model", NAME).commit("main").title == "Longer training (#1)"


def test_proposed_single_file_replaces_shards_only_when_merged(hub, puzzle, tmp_path):
    push_checkpoint(every.save("hrm_puzzle", tmp_path / "sharded", max_shard_size="20KB"), NAME)

    def weights(revision):
        return [name for name in hub.files(NAME, revision) if "safetensors" in name]

    shards = weights("main")
    push_checkpoint(puzzle, NAME, create_pr=True)
    assert weights(FIRST) == ["model.safetensors"] and weights("main") == shards and len(shards) > 3
    push_checkpoint(tmp_path / "sharded", NAME, revision=FIRST)
    assert weights(FIRST) == shards
    push_checkpoint(puzzle, NAME, revision=FIRST)
    HfApi(endpoint=hub.url).merge_pull_request(NAME, 1)
    assert weights("main") == ["model.safetensors"]


def test_users_without_write_access_are_told_to_propose(hub, puzzle):
    push_checkpoint(puzzle, NAME)
    before = hub.files(NAME)
    with open(puzzle / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    with pytest.raises(HubError, match=r"org/model .*role write .*--create-pr"):
        push_checkpoint(puzzle, NAME, token=hub.other_token)
    with pytest.raises(HubError, match=r"org/model .*role write"):
        push_checkpoint(puzzle, NAME, token=hub.read_token, create_pr=True)
    assert not hub.storage.find("model", NAME).pull_requests
    result = push_checkpoint(puzzle, NAME, token=hub.other_token, create_pr=True)
    assert hub.files(NAME, result.revision)["model.safetensors"] == (puzzle / "model.safetensors").read_bytes()
    (puzzle / "results.json").write_text("{}")
    push_checkpoint(puzzle, NAME, token=hub.other_token, revision=FIRST)
    assert "results.json" in hub.files(NAME, FIRST) and hub.files(NAME) == before


def test_pull_request_to_a_missing_repository_does_not_create_it(hub, puzzle):
    for options in ({"create_pr": True}, {"revision": FIRST}):
        with pytest.raises(HubError, match=r"org/model .*without --create-pr"):
            push_checkpoint(puzzle, NAME, **options)
    assert not hub.storage.repositories


def test_closed_merged_and_missing_pull_requests_reject_pushes(hub, puzzle):
    push_checkpoint(puzzle, NAME)
    (puzzle / "results.json").write_text("{}")
    push_checkpoint(puzzle, NAME, create_pr=True)
    (puzzle / "results.json").write_text("[]")
    api = HfApi(endpoint=hub.url)
    api.change_discussion_status(NAME, 1, "closed")
    with pytest.raises(HubError, match=r"1 of org/model is closed.*--create-pr"):
        push_checkpoint(puzzle, NAME, revision=FIRST)
    api.change_discussion_status(NAME, 1, "open")
    api.merge_pull_request(NAME, 1)
    with pytest.raises(HubError, match="1 of org/model is merged"):
        push_checkpoint(puzzle, NAME, revision=FIRST)
    with pytest.raises(HubError, match=r"org/model .*'refs/pr/9'"):
        push_checkpoint(puzzle, NAME, revision="refs/pr/9")
    assert hub.files(NAME)["results.json"] == b"{}"


def test_unchanged_model_is_not_proposed(hub, puzzle):
    commit = push_checkpoint(puzzle, NAME).commit
    result = push_checkpoint(puzzle, NAME, create_pr=True)
    assert (result.commit, result.revision, result.url) == (commit, "main", f"{hub.url}/{NAME}")
    assert result.notes[-1] == "nothing differs from main, so no pull request was opened"
    assert not hub.storage.find("model", NAME).pull_requests


@pytest.mark.parametrize("revision", [FIRST, "v2"])
def test_pull_request_from_another_revision_is_rejected(revision, hub, puzzle):
    with pytest.raises(ValueError, match=f"revision='{revision}'"):
        push_checkpoint(puzzle, NAME, create_pr=True, revision=revision)
    assert not hub.requests


def test_a_change_of_a_space_is_proposed_and_merged(hub, tmp_path):
    space = tmp_path / "space"
    space.mkdir()
    (space / "README.md").write_text("---\ntitle: Demo\nsdk: gradio\napp_file: app.py\n---\n")
    (space / "app.py").write_text("old")
    with pytest.raises(HubError, match="org/demo does not exist"):
        push_space(space, "org/demo", create_pr=True)
    push_space(space, "org/demo")
    (space / "app.py").write_text("new")
    result = push_space(space, "org/demo", create_pr=True)
    assert (result.url, result.revision) == (f"{hub.url}/spaces/org/demo/discussions/1", FIRST)
    assert f"hf download --repo-type space org/demo --revision {FIRST}" in result.notes[-1]
    (space / "more.py").write_text("more")
    push_space(space, "org/demo", revision=FIRST)
    assert hub.files("org/demo", repo_type="space")["app.py"] == b"old"
    HfApi(endpoint=hub.url).merge_pull_request("org/demo", 1, repo_type="space")
    files = hub.files("org/demo", repo_type="space")
    assert files["app.py"] == b"new" and files["more.py"] == b"more"
