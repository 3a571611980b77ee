"""The boundary to a Hub, inwards: a Hub that lies when a model is pulled, and what lies in the folder already.

Nothing outside of the folder or the cache is written, no more is fetched than was stated and allowed, and a refusal
names what is wrong in characters that a terminal only prints. What must not leave with a push is in
test_push_boundary.py.
"""

import json
import random
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from hub_here import NAME, TOKEN, call, point_at
from hub_server import HubServer
from huggingface_hub import CommitOperationAdd, HfApi, constants

from hrm_hf.cli import main
from hrm_hf.hub import PULL_RECORD, HubError, pull_checkpoint, verify_checkpoint


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


def test_where_one_file_is_wrong_the_others_stop_and_keep_their_bytes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10)
    model.lie("/tree/", changed("large.bin", size=10**6, lfs={"size": 10**6}))
    begun = threading.Event()

    def slowly():
        for _ in range(6000):  # a minute, unless the reader leaves
            yield bytes(10)
            begun.set()
            time.sleep(0.01)

    def wrong():
        begun.wait(60)
        yield b"another text\n"

    model.instead("large.bin", slowly(), Content_Length="1000000")
    model.instead("small.txt", wrong(), Content_Length=str(len(SMALL)))
    with pytest.raises(HubError, match=r"small.txt.*digest"):
        pull("folder", tmp_path)
    (part,) = (tmp_path / "deep" / "er" / ".pulled.incoming").glob("large.bin.*.part")
    assert 0 < part.stat().st_size < 60_000


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


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_of_chosen_files_only_their_bytes_count_and_no_other_is_fetched(where, model, tmp_path):
    result = pull(where, tmp_path, choose=lambda names: [name for name in names if name == "small.txt"], max_size=100)
    assert (result.path / "small.txt").read_bytes() == SMALL and result.bytes == len(SMALL)
    assert not any("large.bin" in path for _, path in model.requests)
    with pytest.raises(HubError, match="has more than 100 bytes"):
        pull(where, tmp_path, choose=lambda names: ["large.bin"], max_size=100)


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
    with pytest.raises(ValueError, match="is corrupted: it is no record of a pull"):
        pull("folder", tmp_path)
    with pytest.raises(ValueError, match="is corrupted: it is no record of a pull"):
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
