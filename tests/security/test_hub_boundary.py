"""The boundary to a Hub: a Hub that lies when a model is pulled, and what must not leave with a push.

What holds for a pull: nothing outside of the folder or the cache is written, no more is fetched than was stated and
allowed, and a refusal names what is wrong in characters that a terminal only prints. What holds for a push: no file
from outside, no secret, no path of this machine. Referee for cards: markdown-it, which renders as the Hub does.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_here import NAME, TOKEN, call, point_at
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, HfApi, constants
from markdown_it import MarkdownIt
from safetensors.torch import save_file

from hrm_hf.cards import new_card_text, update_model_card
from hrm_hf.cli import main
from hrm_hf.hub import (
    PULL_RECORD,
    HubError,
    checkpoint_contents,
    pull_checkpoint,
    push_checkpoint,
    push_space,
    verify_checkpoint,
)
from hrm_hf.hub.secrets import secret_in


SMALL, LARGE = b"a small file\n", b"\0" * 1000  # the second is an LFS object
SHA = "0123456789abcdef" * 4
OUTSIDE = "/../../../../outside"


@pytest.fixture
def model(hub):
    """A repository of two files."""
    HfApi().create_repo(NAME)
    files = [CommitOperationAdd("small.txt", SMALL), CommitOperationAdd("large.bin", LARGE)]
    HfApi().create_commit(NAME, files, commit_message="two files")
    hub.requests.clear()
    return hub


def everything(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def written(tmp_path: Path) -> set[str]:
    """Files of a pull that stay, besides locks and what the Hub itself keeps."""
    kept = {path for path in everything(tmp_path) if (tmp_path / path).is_file() and not path.startswith("hub/")}
    return {path for path in kept if not path.endswith(".lock")}


def pull(where: str, tmp_path: Path, **options):
    """Into a folder or into the cache, both of which are below `tmp_path`."""
    return pull_checkpoint(NAME, tmp_path / "deep" / "er" / "pulled" if where == "folder" else None, **options)


def changed(name: str, **values):
    """A lie about one file of a listing."""

    def change(lines):
        for line in lines:
            if line["path"] == name:
                lfs = values.get("lfs")
                line.update({**values, "lfs": {**line["lfs"], **lfs}} if isinstance(lfs, dict) else values)
        return [{k: v for k, v in line.items() if v is not ...} for line in lines]

    return change


def renamed(*names: str):
    """A lie about the names of a listing: as many copies of one small file."""

    def change(lines):
        (line,) = [line for line in lines if line["path"] == "small.txt"]
        return [{**line, "path": name} for name in names]

    return change


# ---- pull: what a Hub says ----

HASHES = {
    "a digest that leads out": ("large.bin", {"lfs": {"oid": OUTSIDE.ljust(64, "x")}}, "SHA-256 of 'large.bin'"),
    "a digest that leads out at once": ("large.bin", {"lfs": {"oid": OUTSIDE}}, "expected 64 hexadecimal digits"),
    "an absolute digest": ("large.bin", {"lfs": {"oid": "/tmp/outside"}}, "expected 64 hexadecimal digits"),
    "a digest in capitals": ("large.bin", {"lfs": {"oid": SHA.upper()}}, "expected 64 hexadecimal digits"),
    "a digest with a line end": ("large.bin", {"lfs": {"oid": SHA + "\n"}}, r"\\n"),
    "a digest that is a number": ("large.bin", {"lfs": {"oid": 5}}, "is 5, expected 64"),
    "no digest": ("large.bin", {"lfs": {"oid": None}}, "is None, expected 64"),
    "a blob that leads out": ("small.txt", {"oid": OUTSIDE}, "git hash of 'small.txt'"),
    "a blob of other length": ("small.txt", {"oid": "ab" * 32}, "expected 40 hexadecimal digits"),
    "no blob": ("small.txt", {"oid": ...}, "is None, expected 40"),
    "a Xet hash that leads out": ("large.bin", {"xetHash": OUTSIDE}, "Xet hash of 'large.bin'"),
}  # fmt: skip


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize("lie", HASHES)
def test_a_hash_that_is_none_is_used_nowhere(lie, where, model, tmp_path):
    name, values, said = HASHES[lie]
    model.lie("/tree/", changed(name, **values))
    with pytest.raises(HubError, match=said):
        pull(where, tmp_path)
    assert not written(tmp_path) and not any("/resolve/" in path for _, path in model.requests)


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize("sha", [OUTSIDE, "", "main", "a" * 39, "A" * 40, "a" * 40 + "\n", None, 7, ["a" * 40]])
def test_a_commit_that_is_none_is_used_nowhere(sha, where, model, tmp_path):
    model.lie(f"/api/models/{NAME}", lambda answer: {**answer, "sha": sha} if isinstance(answer, dict) else answer)
    with pytest.raises(HubError, match="is no sha of 40 hexadecimal digits"):
        pull(where, tmp_path)
    assert not written(tmp_path) and len(model.requests) == 1


def test_another_commit_than_the_pinned_one_is_refused(model, tmp_path):
    pinned = model.commits(NAME)[0]
    model.lie("/revision/", lambda answer: {**answer, "sha": "f" * 40})
    with pytest.raises(HubError, match=f"commit {'f' * 40} where {pinned} was asked for"):
        pull("cache", tmp_path, revision=pinned)


@pytest.mark.parametrize("etag", ["../../../../outside", "/outside", "a" * 63])
def test_the_cache_takes_no_name_from_the_headers_of_an_answer(etag, model, tmp_path):
    model.lie("/resolve/", headers={"ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"', "X-Repo-Commit": OUTSIDE})
    path = pull("cache", tmp_path).path
    assert {file.name for file in path.iterdir()} == {"small.txt", "large.bin", ".gitattributes"}
    blobs = {file.name for file in (path.parents[1] / "blobs").iterdir()}
    assert all(len(name) in (40, 64) for name in blobs) and not any("outside" in name for name in everything(tmp_path))


NAMES = {
    "upwards": "../outside", "upwards in the middle": "a/../../outside", "absolute": "/tmp/outside", "empty": "",
    "an empty part": "a//b", "a folder's": "a/", "this folder": "./a", "a backslash": "..\\outside", "a drive": "C:/x",
    "a drive's own folder": "a/C:x", "a zero": "a\0b", "a terminal escape": "a\x1b[2Jb", "its short form": "a\x9b2Jb",
    "a line end": "a\nb", "a bell": "a\x07", "a turned name": "txt.\u202egpj", "half a character": "a\ud800",
    "a line separator": "a\u2028b", "git's files": ".git/hooks/post-checkout", "git's, in capitals": "a/.GIT/x",
    "git's, for Windows": ".git./config", "that of our record": PULL_RECORD, "the same in capitals": ".PULLED.JSON",
    "a long part": "a" * 300, "a long name": "a/" * 600 + "a", "a number": 5, "nothing": None, "a list": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_one_of_a_file_in_the_folder_is_refused(name, where, model, tmp_path):
    model.lie("/tree/", renamed("config.json", NAMES[name]))
    with pytest.raises(
        HubError, match=r"org/model is not to be trusted, or the Hub it is on: it names a file"
    ) as refused:
        pull(where, tmp_path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 500
    assert not written(tmp_path) and not any("/resolve/" in path for _, path in model.requests)


LISTINGS = {
    "a file and a folder": (renamed("a", "a/b"), "'a' is at once a file and a folder"),
    "one name twice": (renamed("a", "a"), "'a' is listed twice"),
    "a name of an unfinished file": (
        lambda lines: renamed("a", f"a.{line_of(lines, 'small.txt')['oid'][:16]}.part")(lines),
        "would be one file here",
    ),
    "no list": (lambda lines: {"error": "x"}, "its listing is {'error': 'x'}, expected a list"),
    "a list of texts": (lambda lines: ["small.txt"], "its listing has 'small.txt', expected a file or a folder"),
    "a kind that is none": (changed("small.txt", type="symlink"), "expected a file or a folder"),
    "a size below nothing": (changed("small.txt", size=-1), "size of 'small.txt' is -1, expected a number of bytes"),
    "a size with a fraction": (changed("small.txt", size=13.0), "is 13.0, expected a number of bytes"),
    "a size that is a text": (changed("small.txt", size="13"), "is '13', expected a number of bytes"),
    "a size that is a truth": (changed("small.txt", size=True), "is True, expected a number of bytes"),
    "no size": (changed("small.txt", size=...), "is None, expected a number of bytes"),
    "a size beyond all disks": (changed("small.txt", size=10**30), r"more than 50,000,000,000 bytes.*--max-size"),
    "two sizes": (changed("large.bin", lfs={"size": 5}), "has 1000 bytes and the large file"),
    "a large file that is a text": (changed("large.bin", lfs="x"), "has 1000 bytes and the large file 'x'"),
    "files without end": (
        lambda lines: renamed(*(f"f{n}" for n in range(10_001)))(lines),
        r"more than 10,000 files and folders.*--max-files",
    ),
    "folders without end": (
        lambda lines: [{"type": "directory", "path": f"f{n}", "oid": "0" * 40, "size": 0} for n in range(10_001)],
        "more than 10,000 files and folders",
    ),
}  # fmt: skip


def line_of(lines, name):
    return next(line for line in lines if line["path"] == name)


@pytest.mark.parametrize("lie", LISTINGS)
def test_a_listing_that_cannot_be_is_refused_before_anything_is_fetched(lie, model, tmp_path):
    change, said = LISTINGS[lie]
    model.lie("/tree/", change)
    with pytest.raises(HubError, match=said):
        pull("folder", tmp_path)
    assert not written(tmp_path) and not any("/resolve/" in path for _, path in model.requests)


@pytest.mark.parametrize("page", [[], None], ids=["empty pages", "full pages"])
def test_a_listing_that_never_ends_is_left(page, model, tmp_path):
    numbers = iter(range(10**9))

    def another(lines):
        name = f"f{next(numbers)}"
        return (
            page if page is not None else [{**line_of(lines, "small.txt"), "path": f"{name}.{n}"} for n in range(999)]
        )

    following = f'<{model.url}/api/models/{NAME}/tree/{model.commits(NAME)[0]}?recursive=true&cursor=x>; rel="next"'
    model.lie("/tree/", another, headers={"Link": following})
    with pytest.raises(HubError, match=r"empty page that is not the last|more than 10,000 files and folders"):
        pull("folder", tmp_path)
    assert len(model.requests) < 20


def test_two_names_that_a_disk_takes_for_one_are_refused(model, tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / ".PULLED.INCOMING").symlink_to(".pulled.incoming")  # as on a disk that folds case
    model.lie("/tree/", renamed("config.json", "Config.json"))
    with pytest.raises(HubError, match=r"'config.json' and 'Config.json', which would be one file here"):
        pull("folder", tmp_path)


def test_an_answer_without_end_is_left(model, tmp_path, monkeypatch):
    monkeypatch.setattr("hrm_hf.hub.download.LARGEST_ANSWER", 100_000)
    model.lie("/tree/", lambda lines: [{**line, "more": "x" * 10**6} for line in lines])
    with pytest.raises(HubError, match="has more than 100,000 bytes"):
        pull("folder", tmp_path)


@pytest.mark.parametrize(
    "body", ["<html>", "[" * 100_000, '{"sha": ' + "9" * 5000 + "}"], ids=["page", "deep", "number"]
)
def test_an_answer_that_is_no_json_is_named(body, model, tmp_path, monkeypatch):
    monkeypatch.setattr("hub_handler.json.dumps", lambda answer: body)
    with pytest.raises(HubError, match=r"did not answer in JSON|is no sha"):
        pull("folder", tmp_path)


def test_what_a_hub_says_of_a_refusal_cannot_steer_a_terminal(model, tmp_path, monkeypatch, capsys):
    said = "\x1b]0;owned\x07\x1b[2J" + "x" * 5000
    model.lie("/tree/", headers={"X-Error-Message": said}, status=403)
    monkeypatch.setattr(sys, "argv", ["hrm-hf", "pull", NAME, "--out", str(tmp_path / "pulled")])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert "\\x1b]0;owned\\x07" in error and "\x1b" not in error and len(error) < 1000


# ---- pull: what a Hub sends ----


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_a_file_ends_at_its_stated_size(where, model, tmp_path):
    sent = []

    def blocks():
        for _ in range(4096):  # 256 MiB
            sent.append(1)
            yield bytes(2**16)

    model.instead("large.bin", blocks())
    with pytest.raises(
        HubError, match=r"large.bin is longer than the 1,000 bytes that the Hub says it has, so it was del"
    ):
        pull(where, tmp_path)
    assert len(sent) < 1024
    assert not any("large" in name or name.endswith(".part") for name in written(tmp_path))


@pytest.mark.parametrize("size", [10, 2**30], ids=["less", "more"])
def test_a_file_that_comes_by_xet_has_its_stated_size_or_does_not_stay(size, tmp_path, monkeypatch):
    pytest.importorskip("hf_xet", reason="the Xet protocol needs hf_xet")
    with HubServer(tmp_path / "hub", token=TOKEN, xet=True) as hub:
        point_at(hub, monkeypatch, tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        HfApi().create_repo(NAME)
        file = CommitOperationAdd("large.bin", random.Random(0).randbytes(2**19))
        HfApi().create_commit(NAME, [file], commit_message="a file in chunks")
        hub.lie("/tree/", changed("large.bin", size=size, lfs={"size": size}))
        with pytest.raises(HubError, match=r"large.bin .*so it was deleted"):
            pull("cache", tmp_path)
        assert any("xet-read-token" in path for _, path in hub.requests)
    assert all((tmp_path / name).stat().st_size < 2000 for name in written(tmp_path) if "/blobs/" in name)


def test_a_file_that_ends_too_early_is_named(model, tmp_path):
    model.instead("large.bin", [b"\0" * 900])
    with pytest.raises(HubError, match=r"large.bin ended after 900 of the 1,000 bytes"):
        pull("folder", tmp_path)
    assert not any("large" in name for name in written(tmp_path))


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "deflate", "x\x1b[2J"])
def test_a_compressed_answer_is_not_unpacked(encoding, model, tmp_path):
    import gzip

    model.instead("large.bin", [gzip.compress(bytes(2**26))], Content_Encoding=encoding)
    with pytest.raises(HubError, match=r"came compressed \(") as refused:
        pull("folder", tmp_path)
    assert str(refused.value).isprintable()
    assert not any("large" in name for name in written(tmp_path))


def test_other_bytes_of_the_right_length_never_become_a_model(model, tmp_path):
    model.instead("large.bin", [b"\1" * 1000])
    for where in ("folder", "cache"):
        with pytest.raises(HubError, match=r"large.bin.*digest"):
            pull(where, tmp_path)
    assert not (tmp_path / "deep" / "er" / "pulled").exists()
    assert not any((tmp_path / "cache").rglob("refs/*"))  # nor does the cache note it


def test_a_hub_that_begins_anew_again_and_again_is_left(model, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10)

    class Broken:
        def __iter__(self):
            yield bytes(500)
            raise ConnectionError

    model.instead("large.bin", Broken(), Content_Length="1000")
    with pytest.raises(HubError, match="Run the same command again"):
        pull("folder", tmp_path)
    assert len([path for _, path in model.requests if path.endswith("large.bin")]) < 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_size": 1000}, r"has more than 1,000 bytes"),
        ({"max_files": 2}, r"has more than 2 files and folders"),
        ({"max_size": 0}, r"max_size=0 is no limit"),
        ({"max_files": True}, r"max_files=True is no limit"),
    ],
)
def test_a_pull_has_limits_that_can_be_set(options, said, model, tmp_path):
    with pytest.raises((HubError, ValueError), match=said):
        pull("folder", tmp_path, **options)
    assert not written(tmp_path)
    pull("folder", tmp_path, max_size=10**6, max_files=3)


def test_the_limits_are_flags(model, tmp_path):
    out = ("pull", NAME, "--out", tmp_path / "pulled")
    assert "more than 1,000 bytes" in str(call(*out, "--max-size", "1KB", status=1).exception)
    assert "more than 2 files" in str(call(*out, "--max-files", "2", status=1).exception)
    assert "'much' is no size" in call(*out, "--max-size", "much", status=2).stderr
    assert call(*out, "--max-size", "1.5MB", "--json").stdout


# ---- pull: what lies in the folder ----


def links(tmp_path: Path, model) -> tuple[Path, Path]:
    """A folder of an earlier pull, and another one that nothing may be written to."""
    HfApi().create_commit(NAME, [CommitOperationAdd("sub/a.txt", b"of the Hub")], commit_message="a folder")
    folder, other = pull("folder", tmp_path).path, tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("mine")
    return folder, other


def test_a_linked_folder_is_not_written_through(model, tmp_path):
    folder, other = links(tmp_path, model)
    shutil.rmtree(folder / "sub")
    (folder / "sub").symlink_to(other)
    with pytest.raises(ValueError, match=r"sub is a link, and the pull would write where it leads; remove it"):
        pull("folder", tmp_path)
    assert (other / "a.txt").read_text() == "mine"


def test_a_linked_file_is_replaced_and_what_it_led_to_stays(model, tmp_path):
    folder, other = links(tmp_path, model)
    (folder / "sub" / "a.txt").unlink()
    (folder / "sub" / "a.txt").symlink_to(other / "a.txt")
    pull("folder", tmp_path)
    assert (folder / "sub" / "a.txt").read_bytes() == b"of the Hub" and not (folder / "sub" / "a.txt").is_symlink()
    assert (other / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("what", ["incoming", "lock", "incoming/sub"])
def test_a_link_beside_the_folder_is_not_followed(what, model, tmp_path):
    folder, other = links(tmp_path, model)
    shutil.rmtree(folder)
    beside = folder.parent / f".pulled.{what}"
    beside.parent.mkdir(exist_ok=True)
    beside.unlink(missing_ok=True)
    beside.symlink_to(other / "a.txt" if what == "lock" else other)
    with pytest.raises(ValueError, match="is a link, and the pull would write where it leads"):
        pull("folder", tmp_path)
    assert everything(other) == {"a.txt"} and (other / "a.txt").read_text() == "mine"


def test_a_linked_unfinished_file_is_not_appended_to(model, tmp_path):
    folder, other = links(tmp_path, model)
    shutil.rmtree(folder)
    entry = model.storage.find("model", NAME).commit("main").tree["large.bin"]
    incoming = folder.with_name(".pulled.incoming")
    incoming.mkdir()
    (incoming / f"large.bin.{entry.sha256[:16]}.part").symlink_to(other / "a.txt")
    assert (pull("folder", tmp_path).path / "large.bin").read_bytes() == LARGE
    assert (other / "a.txt").read_text() == "mine"


RECORDS = {
    "no json": "{", "a list": "[]", "null": "null", "nothing in it": "{}",
    "names that lead out": json.dumps({"repo_id": NAME, "commit": "0" * 40, "files": ["../../../other/a.txt"]}),
    "an absolute name": json.dumps({"repo_id": NAME, "commit": "0" * 40, "files": ["OTHER/a.txt"]}),
    "a commit that is none": json.dumps({"repo_id": NAME, "commit": "x", "files": []}),
}  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_that_no_pull_wrote_deletes_nothing(record, model, tmp_path):
    folder, other = links(tmp_path, model)
    (folder / PULL_RECORD).write_text(RECORDS[record].replace("OTHER", str(other)))
    before = everything(folder)
    with pytest.raises(ValueError, match="is damaged: it is no record of a pull"):
        pull("folder", tmp_path)
    with pytest.raises(ValueError, match="is damaged: it is no record of a pull"):
        verify_checkpoint(folder, NAME)
    assert everything(folder) == before and (other / "a.txt").exists()


def test_a_file_of_ones_own_in_the_place_of_a_pulled_one_stays(model, tmp_path):
    folder, _ = links(tmp_path, model)
    (folder / "new").mkdir()
    (folder / "new" / "mine.txt").write_text("mine")
    HfApi().create_commit(NAME, [CommitOperationAdd("new", b"a file")], commit_message="another")
    with pytest.raises(ValueError, match=r"mine.txt is in the place of new, which is to be pulled; move it away"):
        pull("folder", tmp_path)
    assert (folder / "new" / "mine.txt").read_text() == "mine"


def test_a_folder_of_the_hub_may_become_a_file_and_the_reverse(model, tmp_path):
    from huggingface_hub import CommitOperationDelete

    folder, _ = links(tmp_path, model)
    change = [CommitOperationDelete("sub/a.txt"), CommitOperationDelete("small.txt")]
    change += [CommitOperationAdd("sub", b"a file"), CommitOperationAdd("small.txt/b", b"in a folder")]
    HfApi().create_commit(NAME, change, commit_message="the reverse")
    pull("folder", tmp_path)
    assert (folder / "sub").read_bytes() == b"a file" and (folder / "small.txt" / "b").read_bytes() == b"in a folder"


# ---- push: links ----


@pytest.mark.parametrize("name", ["results.json", "model.safetensors", "README.md", "notes.txt"])
def test_a_link_out_of_the_folder_does_not_leave_with_a_push(name, puzzle, tmp_path):
    (tmp_path / "private.txt").write_text("private")
    if (puzzle / name).exists():
        shutil.move(puzzle / name, tmp_path / "private.txt")
    (puzzle / name).symlink_to(tmp_path / "private.txt")
    if name == "notes.txt":
        contents = checkpoint_contents(puzzle, NAME)
        assert name not in contents.files and "link to a file outside" in contents.left_out[name]
    with pytest.raises(ValueError, match=f"{name} is a link to a file outside of the folder.*nothing was uploaded"):
        checkpoint_contents(puzzle, NAME, include=("*.txt",))


@pytest.mark.parametrize("target", ["/etc", "..", "nowhere"])
def test_a_linked_folder_does_not_leave_with_a_push(target, puzzle):
    (puzzle / "eval_more").symlink_to(target)
    assert "is a link to" in checkpoint_contents(puzzle, NAME).left_out["eval_more"]
    with pytest.raises(ValueError, match="eval_more is a link to"):
        checkpoint_contents(puzzle, NAME, include=("eval_*",))


def test_a_link_out_of_a_space_stops_its_push(hub, tmp_path):
    space = tmp_path / "space"
    space.mkdir()
    (space / "README.md").write_text("---\nsdk: gradio\n---\n")
    (space / "app.py").write_text("")
    (space / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="passwd is a link to a file outside of the folder"):
        push_space(space, "org/demo")
    assert not hub.storage.repositories


def test_links_within_the_folder_and_those_of_the_cache_are_pushed(hub, puzzle, tmp_path):
    (puzzle / "results.json").write_text("{}")
    (puzzle / "eval_same").mkdir()
    (puzzle / "eval_same" / "results.json").symlink_to("../results.json")
    push_checkpoint(puzzle, NAME)
    assert hub.files(NAME)["eval_same/results.json"] == b"{}"
    snapshot = pull_checkpoint(NAME).path
    assert (snapshot / "model.safetensors").is_symlink()
    push_checkpoint(snapshot, "org/again")
    assert hub.files("org/again")["model.safetensors"] == (puzzle / "model.safetensors").read_bytes()


def test_a_folder_that_only_looks_like_the_cache_gets_no_more(hub, puzzle, tmp_path):
    fake = tmp_path / "models--x" / "snapshots" / "0"
    fake.parent.mkdir(parents=True)
    shutil.move(puzzle, fake)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "secret").write_text("{}")
    (fake / "results.json").symlink_to("../../blobs/secret")
    with pytest.raises(ValueError, match=r"results.json is a link to a file outside"):
        checkpoint_contents(fake, NAME)


@pytest.mark.parametrize("name", ["a\x1b[2J.png", "a\n.png", "a\u202e.png"])
def test_a_name_that_no_pull_would_take_is_not_pushed(name, puzzle):
    (puzzle / name).write_bytes(b"a picture")
    with pytest.raises(ValueError, match="has a name that is not pulled again"):
        checkpoint_contents(puzzle, NAME)


# ---- push: secrets ----

# In two parts each, lest this file holds any.
SECRETS = {
    "GitHub": "ghp_" + "a1B2c3D4e5F6" * 3, "GitHub, of an app": "ghs_" + "a1B2c3D4e5F6" * 3,
    "GitHub, fine-grained": "github_pat_" + "11ABCDEFG0" * 3 + "_x", "GitLab": "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "Slack": "xoxb-" + "123456789012-1234567890123-AbCdEfGhIjKlMnOpQrStUvWx",
    "a webhook of Slack": "https://hooks.slack." + "com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE", "AWS, temporary": "ASIA" + "IOSFODNN7EXAMPLE",
    "Google": "AIza" + "SyA-1234567890abcdefghijklmnopqrstu",
    "JWT": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "a private key": "-----BEGIN RSA PRIV" + "ATE KEY-----",
    "an encrypted key": "-----BEGIN ENCRYPTED PRIV" + "ATE KEY-----",
    "a key of SSH": "-----BEGIN OPENSSH PRIV" + "ATE KEY-----",
    "W&B": "WANDB_API_" + "KEY=" + "0123456789abcdef" * 2 + "01234567",
    "W&B in .netrc": "machine api.wandb" + ".ai\n  login user\n  password " + "0123456789abcdef" * 2 + "01234567",
    "W&B, new": "wandb_" + "v1_" + "a1B2c3D4e5" * 7,
    "a database": "postgresql://me:" + "hunter2@db.example.com/runs",
    "a database, signs in the password": "mysql://me:" + "hunter$2!x@10.0.0.5:3306/runs",
    "Redis": "redis://:" + "hunter2hunter2@cache:6379/0", "the Hub": "hf_" + "a1B2" * 9,
    "OpenAI": "sk-" + "proj-" + "a1B2c3D4" * 5, "Anthropic": "sk-" + "ant-api03-" + "a1B2c3D4" * 5,
    "npm": "npm_" + "a1B2c3D4e5F6" * 3, "Stripe": "sk_" + "live_" + "a1B2c3D4e5F6a1B2c3D4e5F6",
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + "a1B2c3D4e5" * 8,
}  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_stops_a_push_whatever_file_it_is_in(kind, puzzle, tmp_path):
    secret = SECRETS[kind]
    for name, content in {
        "a.json": json.dumps({"logged": f"with {secret} in it"}).encode(),
        "a.md": f"{secret}\n".encode(),
        "a.txt": secret.encode("utf-16"),
        "a.bin": bytes(range(256)) * 2000 + secret.encode() + bytes(range(256)) * 2000,
        "one_line.json": b"[" + b'"word", ' * 40_000 + json.dumps(secret).encode() + b"]",
    }.items():
        assert secret_in(name, content), name
    torch.save({"weights": torch.zeros(3), "note": secret}, tmp_path / "optimizer.pt")
    assert secret_in("optimizer.pt", tmp_path / "optimizer.pt")
    save_file({"weight": torch.zeros(3)}, tmp_path / "a.safetensors", metadata={"note": secret})
    assert secret_in("a.safetensors", tmp_path / "a.safetensors")


PLACES = {
    "a recipe": ("recipe.yaml", {}), "results": ("results.json", {}), "a tokenizer": ("tokenizer_config.json", {}),
    "an included file": ("deploy/settings.ini", {"include": ("deploy/*",)}),
    "included weights": ("other.safetensors", {"include": ("*.safetensors",)}),
    "a state": ("optimizer.pt", {"with_training_state": True}), "the weights": ("model.safetensors", {}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_secrets_are_looked_for_wherever_a_push_takes_files_from(place, puzzle, hub):
    name, options = PLACES[place]
    secret = SECRETS["GitHub"]
    (puzzle / name).parent.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file

        weights = load_file(puzzle / "model.safetensors")
        save_file(weights, puzzle / name, metadata={"format": "pt", "notes": json.dumps({"token": secret})})
    elif name.endswith(".pt"):
        torch.save({"note": secret}, puzzle / name)
    else:
        (puzzle / name).write_text(json.dumps({"note": secret}))
    with pytest.raises(ValueError, match=f"{name} holds a token of GitHub; nothing was uploaded") as refused:
        push_checkpoint(puzzle, NAME, **options)
    assert secret not in str(refused.value) and not hub.storage.repositories


def test_push_to_hub_of_a_model_looks_for_secrets_too(hub):
    import every

    model = every.model("hrm_puzzle")
    model.config.note = SECRETS["AWS"]
    with pytest.raises(ValueError, match=r"config.json holds an access key of AWS"):
        model.push_to_hub(NAME)
    assert "config.json" not in hub.files(NAME)


def test_a_trainer_looks_for_secrets_too(hub, tmp_path):
    import tiny_cosmo

    run = tiny_cosmo.trainer(tmp_path / "run", push_to_hub=True, hub_model_id=NAME, max_steps=1)
    run.model.config.note = SECRETS["Slack"]
    with pytest.raises(ValueError, match=r"config.json holds a token of Slack"):
        run.push_to_hub()
    assert "config.json" not in hub.files(NAME)


def test_a_secret_that_lies_between_two_blocks_is_found(monkeypatch):
    secret = SECRETS["AWS"].encode()
    for start in range(2**18 - 25, 2**18 + 5):
        assert secret_in("a.log", b"x " * (start // 2) + secret + b" y" * 1000), start


def test_what_is_no_secret_is_pushed(puzzle, tmp_path):
    import every
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # A byte-level vocabulary of the package's own source: code, names in it, all bytes.
    source = sorted(str(file) for file in Path(every.__file__).parents[1].rglob("hrm_hf/**/*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(source[:150], trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert secret_in("tokenizer.json", tmp_path / "tokenizer.json") is None
    for file in source:
        assert secret_in(file, Path(file)) is None, file
    numbers = torch.arange(300_000, dtype=torch.int32).numpy().tobytes()
    assert secret_in("a.bin", numbers) is None
    harmless = "\n".join([
        "highs_and_other_words_of_a_long_name_in_code", "https://huggingface.co/me/model@main",
        "risk-" + "averse-" * 8, "sha256:" + SHA, "git@github.com:me/model.git", "https://user@host/path",
        "wandb_project: key to everything", "ssh://git@host:22/x", '"eyJ.eyJ.x"',
    ])  # fmt: skip
    assert secret_in("a.md", harmless.encode()) is None
    every.save("hrm_lm", tmp_path / "lm")
    assert checkpoint_contents(tmp_path / "lm", NAME).files and checkpoint_contents(puzzle, NAME).files


# ---- push: paths of this machine ----


def test_paths_of_this_machine_stay_at_home(hub, puzzle, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "data_path": f"{tmp_path}/data/sudoku", "output_dir": "/scratch/jane/runs/it", "tokenizer_name": "~jane/tok",
        "model_name_or_path": "org/base", "train_data": ["/home/jane/a.txt,/home/jane/b.txt", "allenai/c4:en"],
        "build_data": "arc /home/jane/arc --out=/home/jane/built --url https://example.org/a/b",
        "run_name": str(puzzle),
        "data_cache_dir": "C:\\Users\\jane\\cache", "logging_dir": "file:///home/jane/logs", "stop": "/", "seed": 7,
    }  # fmt: skip
    (puzzle / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    state = {"best_model_checkpoint": f"{puzzle}/checkpoint-5", "global_step": 5, "log_history": [{"loss": 0.5}]}
    (puzzle / "trainer_state.json").write_text(json.dumps(state))
    (puzzle / "results.json").write_text(json.dumps({"files": {"/home/jane/test.csv": 0.5}, "speed": "5 tokens/s"}))
    (puzzle / "eval_more").mkdir()
    (puzzle / "eval_more" / "results.json").write_text(json.dumps({"data": "/home/jane/test.csv"}))
    before = {file: file.read_bytes() for file in puzzle.rglob("*") if file.is_file()}
    result = push_checkpoint(puzzle, NAME)
    files = hub.files(NAME)
    for name, content in files.items():
        assert b"jane" not in content and str(tmp_path).encode() not in content, name
    assert yaml.safe_load(files["recipe.yaml"]) == {
        "data_path": "data/sudoku", "output_dir": "it", "tokenizer_name": "tok", "model_name_or_path": "org/base",
        "train_data": ["a.txt,b.txt", "allenai/c4:en"], "build_data": "arc arc --out=built --url https://example.org/a/b",
        "run_name": "puzzle", "data_cache_dir": "cache", "logging_dir": "logs", "stop": "/", "seed": 7,
    }  # fmt: skip
    assert json.loads(files["trainer_state.json"]) == {**state, "best_model_checkpoint": "puzzle/checkpoint-5"}
    assert json.loads(files["results.json"]) == {"files": {"test.csv": 0.5}, "speed": "5 tokens/s"}
    assert any(note.startswith("recipe.yaml: without the place of files on this machine") for note in result.notes)
    assert {file: file.read_bytes() for file in puzzle.rglob("*") if file.is_file()} == before


def test_the_place_of_an_adapters_base_stays_at_home(tmp_path):
    save_file({"lora_A": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "/home/jane/models/base", "target_modules": "/a/b"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "README.md").write_text(
        "---\nlibrary_name: peft\nbase_model: /home/jane/models/base\n---\nan adapter\n"
    )
    files = checkpoint_contents(tmp_path, NAME).files
    assert json.loads(files["adapter_config.json"]) == {**config, "base_model_name_or_path": "base"}
    assert b"jane" not in files["README.md"]


def test_the_state_of_training_goes_to_the_byte_since_its_manifest_counts_them(puzzle):
    from hrm_hf.checkpoints import write_manifest

    (puzzle / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "/home/jane/checkpoint-5"}))
    write_manifest(puzzle)
    whole = checkpoint_contents(puzzle, NAME, with_training_state=True)
    assert whole.files["trainer_state.json"] == puzzle / "trainer_state.json"
    assert b"jane" not in checkpoint_contents(puzzle, NAME).files["trainer_state.json"]


# ---- cards ----

MARKUP = {
    "a script": "<script>alert(1)</script>", "a picture": '<img src=x onerror="alert(1)">',
    "a link": "[x](https://evil.example)", "a picture in Markdown": "![x](https://evil.example/x.png)",
    "the end of a table": "x |\n\n<script>alert(1)</script>\n\n", "metadata": "x\n---\nlicense: mit\n---\n",
    "code": "`<script>`", "the end of code": 'x"\n```\n<script>alert(1)</script>\n',
    "a program": 'x"); import os; os.abort(); ("', "the end of our part": "<!-- end of hrm_hf results --><script>",
    "a terminal escape": "x\x1b[2Jy",
}  # fmt: skip


def assert_plain(text: str) -> None:
    """A card has no HTML besides our two kinds of comments, no link to elsewhere, and its own headings."""
    metadata, _, body = text[4:].partition("\n---\n")
    assert isinstance(yaml.safe_load(metadata), dict)
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(body)
    inline = [child for token in tokens for child in token.children or []]
    html = [token.content for token in [*tokens, *inline] if token.type.startswith("html")]
    assert all(part.strip().startswith("<!--") and "<script" not in part for part in html), html
    addresses = [child.attrs.get("href") or child.attrs.get("src") for child in inline if child.attrs]
    assert not [address for address in addresses if address and "evil" in address]
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[1:] == ["Use", "Training", "Training data", "Results", "Architecture", "Limits", "Licence"]
    assert "\x1b" not in text
    for token in tokens:
        if token.type == "fence" and token.info == "python":
            compile(token.content, "card", "exec")
            assert "os.abort()" not in token.content or '\\"); import os' in token.content


@pytest.mark.parametrize("markup", MARKUP)
def test_names_are_words_in_a_card_and_nothing_else(markup, saved_puzzle, tmp_path):
    name = MARKUP[markup]
    folder = Path(shutil.copytree(saved_puzzle, tmp_path / name.replace("/", "\u2215").strip()))
    recipe = {
        "preset": name, "seed": name, "optim": name, "lr_scheduler_type": name, "train_data": [name, f"/data/{name}"],
        "model_name_or_path": f"/models/{name}", "load_in": name, "lora_rank": 4, "data_path": name,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "results.json").write_text(json.dumps({"hardware": name, "versions": {name: name}, "steps": 5}))
    assert_plain(new_card_text(folder))
    update_model_card(folder, {name: 0.5, "loss": 1.0}, name, name, {name: name}, parameters=5)
    update_model_card(folder, {"loss": 0.5}, name, name, {name: name}, parameters=5)
    assert_plain((folder / "README.md").read_text())
    contents = checkpoint_contents(folder, NAME, license=name)
    assert_plain(contents.files["README.md"].decode())


@pytest.mark.parametrize("markup", MARKUP)
def test_names_of_parameters_and_tasks_are_words_in_a_card(markup, tmp_path):
    import every

    name = MARKUP[markup]
    cosmo = every.save("hrm_cosmo", tmp_path / "cosmo")
    config = json.loads((cosmo / "config.json").read_text())
    config |= {"derived_s8": False}
    config["target_names"] = [name, *config["target_names"][1:]]
    (cosmo / "config.json").write_text(json.dumps(config))
    assert_plain(new_card_text(cosmo))
