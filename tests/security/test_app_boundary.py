"""The app rejects requests that its own page would never send, and still answers the next visitor.

One page with a Sudoku model, a language model and a regressor, in this process. All requests go over HTTP, as a
stranger would send them, bypassing the page's own controls.
"""

import gzip
import io
import json
import os
import re
import urllib.error
import urllib.request
import zipfile
from dataclasses import fields

import every
import numpy as np
import pytest
from started import free_port

from hrm_hf.puzzles.options import SolveOptions


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
gr = pytest.importorskip("gradio", reason="the app needs gradio: pip install .[app]")

UPLOAD = 2**20
API = "/gradio_api"
BOARD = ["1", *[""] * 15]
SOLVE_OPTIONS = {
    "max_steps": 2, "votes": 1, "restarts": 1, "halt": "q", "prefer_valid": False, "seed": 0, "noise": 0.2,
    "noise_at": "start", "choose": "q", "exit_when_still": 0,
}  # fmt: skip
SOLVE_ORDER = [each.name for each in fields(SolveOptions) if each.name in SOLVE_OPTIONS]
SOLVE = [BOARD, *(SOLVE_OPTIONS[name] for name in SOLVE_ORDER)]
WRITE = ["Once", 8, 0.8, 1, 0, 0, 2, "fixed", ""]
INFER = [0.31, 0.81, 0, 0, "convergence", 1, "fixed"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """URL of the page, and the page."""
    from hrm_hf.app import build_app, launch

    root = tmp_path_factory.mktemp("models")
    every.model("hrm_puzzle", task="sudoku", halt_max_steps=2).save_pretrained(root / "sudoku")
    names = [str(root / "sudoku"), *(str(every.save(name, root / name)) for name in ("hrm_lm", "cosmo_cnn"))]
    demo, port = build_app(names), free_port()
    launch(
        demo, allow_hosts=["demo.example", "*.many.example"], max_upload_bytes=UPLOAD, server_name="127.0.0.1",
        server_port=port, prevent_thread_lock=True,
    )  # fmt: skip
    yield f"http://127.0.0.1:{port}", demo
    demo.close(verbose=False)


def send(url, body=None, **headers):
    """Return status and content of an answer; a body that is not bytes is sent as JSON."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): one for name, one in headers.items()}}
    request = urllib.request.Request(url, raw, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(page, fn_index, data):
    """Return the messages that the browser gets for an event."""
    session = os.urandom(6).hex()
    body = {"data": data, "fn_index": fn_index, "session_hash": session, "event_data": None, "trigger_id": None}
    status, content = send(f"{page[0]}{API}/queue/join", body)
    assert status == 200, content
    heard = []
    with urllib.request.urlopen(f"{page[0]}{API}/queue/data?session_hash={session}", timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data:"):
                heard.append(json.loads(line[5:]))
                if heard[-1]["msg"] in ("process_completed", "close_stream"):
                    return heard
    raise AssertionError(f"the stream ended early: {heard}")


def event(page, name) -> int:
    """Return the number of an API event."""
    return next(number for number, fn in page[1].fns.items() if fn.api_name == name)


def refusal(heard) -> str:
    """Return the warning or error among the messages, "" if the event was answered."""
    logs = [one["log"] for one in heard if one["msg"] == "log"]
    last = heard[-1]
    return " ".join(logs) or ("" if last.get("success") else str(last.get("output")))


# ---- who asks ----

FOREIGN = {
    "a name that was rebound": {"Host": "evil.example"},
    "a name with a port": {"Host": "evil.example:7860"},
    "a name that ends like ours": {"Host": "notdemo.example"},
    "a name that begins like ours": {"Host": "localhost.evil.example"},
    "an address before an @": {"Host": "127.0.0.1@evil.example"},
    "a shared link that was not requested": {"Host": "abc.gradio.live"},
    "a page of somebody else": {"Origin": "https://evil.example"},
    "a page without a name": {"Origin": "null"},
    "a page of another port": {"Origin": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("path", ["/", "/config", f"{API}/upload", f"{API}/queue/join"])
def test_requests_from_other_origins_are_rejected(name, path, page):
    status, content = send(f"{page[0]}{path}", None if path in ("/", "/config") else {}, **FOREIGN[name])
    assert status == 403 and b"error" in content


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Host": "localhost:7"}, {"Host": "10.0.0.7"}, {"Host": "demo.example", "Origin": "https://demo.example"},
        {"Host": "a.many.example"}, {"Origin": "https://demo.example"},
    ],
)  # fmt: skip
def test_own_host_names_are_answered(headers, page):
    assert send(f"{page[0]}/config", **headers)[0] == 200


def test_space_and_shared_link_allow_their_host_names(monkeypatch):
    from hrm_hf.app.limits import launch_options

    monkeypatch.setenv("SPACE_HOST", "owner-demo.hf.space")
    allowed = launch_options(True, ["own.example"], 1)["app_kwargs"]["middleware"][0].kwargs["allowed"]
    assert allowed == ["own.example", "*.gradio.live", "owner-demo.hf.space"]
    monkeypatch.delenv("SPACE_HOST")
    assert launch_options(False, [], 1)["app_kwargs"]["middleware"][0].kwargs["allowed"] == []


# ---- values beyond the controls ----

NUMBERS = {
    "steps above the slider": ("solve", SOLVE, "max_steps", 10**9),
    "steps below it": ("solve", SOLVE, "max_steps", -5),
    "steps that are no number": ("solve", SOLVE, "max_steps", "many"),
    "votes above": ("solve", SOLVE, "votes", 10**6),
    "restarts above": ("solve", SOLVE, "restarts", 10**6),
    "a seed of 10^40": ("solve", SOLVE, "seed", 10**40),
    "a halting rule of none": ("solve", SOLVE, "halt", "never"),
    "a noise that is NaN": ("solve", SOLVE, "noise", float("nan")),
    "noise at no place": ("solve", SOLVE, "noise_at", "end"),
    "a choice of none": ("solve", SOLVE, "choose", "best"),
    "stillness below 0": ("solve", SOLVE, "exit_when_still", -1),
    "a prompt of half a megabyte": ("write", WRITE, 0, "a" * 500_000),
    "tokens above": ("write", WRITE, 1, 10**9),
    "a temperature that is NaN": ("write", WRITE, 2, float("nan")),
    "top p that is NaN": ("write", WRITE, 3, float("nan")),
    "top k below 0": ("write", WRITE, 4, -1),
    "segments above": ("write", WRITE, 6, 10**6),
    "a criterion that is a path": ("write", WRITE, 7, "../../etc"),
    "a threshold that is NaN": ("write", WRITE, 8, "nan"),
    "a threshold of 1 MB": ("write", WRITE, 8, "1" * 10**6),
    "Omega_m above": ("infer", INFER, 0, 1e30),
    "sigma_8 that is NaN": ("infer", INFER, 1, float("nan")),
    "a noise of infinity": ("infer", INFER, 2, float("inf")),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_value_outside_its_control_is_rejected(name, page):
    event_name, data, place, value = NUMBERS[name]
    place = 1 + SOLVE_ORDER.index(place) if isinstance(place, str) else place
    found = refusal(ask(page, event(page, event_name), [*data[:place], value, *data[place + 1 :]]))
    assert found, "it was answered"


BOARDS = {
    "a board of 10,000 cells": ["1"] * 10_000,
    "a cell of 100 kB": ["1" * 10**5, *[""] * 15],
    "a board of numbers": list(range(16)),
    "a board in a board": [BOARD, *[""] * 15],
    "a text of another length": "1" * 15,
    "an object": {"0": "1"},
    "nothing": None,
}


@pytest.mark.parametrize("name", BOARDS)
def test_impossible_boards_are_rejected(name, page):
    assert "board" in refusal(ask(page, event(page, "solve"), [BOARDS[name], *SOLVE[1:]]))


def test_valid_values_are_answered(page):
    """Control: the rejections in this file are not due to requests that always fail."""
    for name, data in (("solve", SOLVE), ("write", WRITE), ("infer", INFER)):
        assert refusal(ask(page, event(page, name), data)) == "", name


def test_deeply_nested_task_is_rejected():
    from hrm_hf import HrmPuzzleConfig
    from hrm_hf.puzzles.task_registry import puzzle_task

    with pytest.raises(ValueError, match="nested too deep"):
        puzzle_task(HrmPuzzleConfig(task="arc", seq_len=900, vocab_size=12)).read_typed("[" * 90_000 + "]" * 90_000)


# ---- bodies and files ----


def test_request_of_5_mb_is_rejected_before_it_is_read(page):
    status, content = send(f"{page[0]}{API}/queue/join", {"data": ["a" * 5 * 10**6]})
    assert status == 413 and b"1,048,576" in content


def form(*files) -> tuple[bytes, str]:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="%s"\r\n\r\n%s\r\n' % (name.encode(), content)
        for name, content in files
    ]
    return b"".join(parts) + b"--x--\r\n", "multipart/form-data; boundary=x"


def test_file_above_the_limit_is_rejected(page):
    body, kind = form(("map.npy", bytes(UPLOAD + 10)))
    status, content = send(f"{page[0]}{API}/upload", body, Content_Type=kind)
    assert status == 413 and b"1048576" in content  # gradio's message


def test_files_above_the_total_limit_are_rejected(page):
    body, kind = form(*((f"{number}.npy", bytes(UPLOAD - 10)) for number in range(4)))
    status, content = send(f"{page[0]}{API}/upload", body, Content_Type=kind)
    assert status == 413 and b"--max-upload-mb" in content


def upload_event(page) -> int:
    """Return the event of the upload button."""
    return next(
        number for number, fn in page[1].fns.items() if any(isinstance(one, gr.UploadButton) for one in fn.inputs)
    )


def infer_from(page, path) -> str:
    data = {"path": path, "meta": {"_type": "gradio.FileData"}, "orig_name": "map.npy"}
    return refusal(ask(page, upload_event(page), [data, 1, "fixed"]))


def bomb_npz() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("map.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(
                member, {"descr": "<f4", "fortran_order": False, "shape": (2**12, 2**13)}
            )
            for _ in range(128):
                member.write(bytes(2**20))
    return buffer.getvalue()


MAPS = {
    "a bomb in npz": ("map.npz", bomb_npz, "map.npz"),
    "a bomb in gzip": ("map.fits.gz", lambda: gzip.compress(bytes(2**26)), "map.fits.gz"),
    "a picture": ("map.npy", lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "map.npy"),
}


@pytest.mark.parametrize("name", MAPS)
def test_uploaded_bomb_is_rejected_before_it_is_unpacked(name, page):
    file, make, words = MAPS[name]
    body, kind = form((file, make()))
    status, content = send(f"{page[0]}{API}/upload", body, Content_Type=kind)
    assert status == 200
    found = infer_from(page, json.loads(content)[0])
    assert words in found and "--max-pixels" not in found


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/self/environ", "../../../etc/passwd", "http://127.0.0.1:1/map.npy", "file:///etc/passwd"],
)
def test_a_file_that_was_not_uploaded_is_not_read(path, page):
    found = infer_from(page, path)
    assert found and "root:" not in found
    assert ("URLs are not supported" in found) == path.startswith("http")


@pytest.mark.parametrize("path", ["/file=/etc/passwd", "/file=../../etc/passwd", "/file/etc/passwd"])
def test_local_files_are_not_served(path, page):
    status, content = send(f"{page[0]}{API}{path}")
    assert status in (403, 404) and b"root:" not in content


# ---- concurrency ----


def test_concurrent_events_are_bounded_and_cannot_bypass_the_queue(page):
    from hrm_hf.app.limits import SESSIONS, WAITING

    demo = page[1]
    assert demo._queue.max_size == WAITING and demo.app.state_holder.capacity == SESSIONS
    status, _ = send(f"{page[0]}{API}/run/solve", {"data": SOLVE})
    assert status in (401, 403, 404, 405)
    assert demo._queue.default_concurrency_limit == 1
    assert {fn.concurrency_limit for fn in demo.fns.values() if fn.fn is not None} <= {1, "default"}


def test_no_event_accepts_an_image(page):
    """Otherwise, Pillow would decode visitors' images, and only Pillow itself could limit their size."""
    taken = [type(one).__name__ for fn in page[1].fns.values() for one in fn.inputs]
    assert "Image" not in taken and "UploadButton" in taken


# ---- descriptions in checkpoints ----


CARDS = {
    "a script": "<script>alert(1)</script>",
    "a picture with a script": '<img src=x onerror="alert(1)">',
    "a picture from elsewhere": "![x](https://evil.example/pixel.png)",
    "a picture by reference": "![x][1]\n\n[1]: https://evil.example/pixel.png",
    "a link that is a script": "[x](javascript:alert(1))",
    "a link that is data": "[x](data:text/html,<script>alert(1)</script>)",
    "a frame": '<iframe src="https://evil.example"></iframe>',
    "a comment that hides": "<!<!-- -->-- --><script>alert(1)</script>",
    "a picture in a link": "[![x](https://evil.example/pixel.png)](https://evil.example)",
}


@pytest.mark.parametrize("name", CARDS)
def test_card_injects_no_markup_and_loads_nothing(name, tmp_path):
    from hrm_hf.app.build import card_html

    (tmp_path / "README.md").write_text(CARDS[name], encoding="utf-8")
    tags = re.findall(r"<[^>]*>", card_html(str(tmp_path)))
    assert {tag.split()[0].strip("</>") for tag in tags} <= {"p", "a"}
    assert not any("javascript" in tag or "data:" in tag or "src" in tag for tag in tags)


RECIPES = {
    "aliases": "a0: &a0 [x, x]\n"
    + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 8)}]\n" for n in range(8))
    + "train_data: [*a8]\n",
    "a tag": "train_data: !!python/object/apply:os.system ['true']\n",
    "an open quote": 'build_data: "sudoku \'"\n',
    "a number": "build_data: 7\n",
    "a map": "train_data: {a: b}\n",
    "no map": "- 1\n",
    "markup": "train_data: '<img src=x onerror=alert(1)>.txt'\n",
}


@pytest.mark.parametrize("name", RECIPES)
def test_malformed_recipe_does_not_break_the_page(name, tmp_path):
    from hrm_hf.app.build import training_html

    model = every.model("hrm_puzzle")
    model.save_pretrained(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPES[name], encoding="utf-8")
    words = training_html(str(tmp_path), model)
    assert name == "markup" or words.startswith("How it was trained")
    assert "<img" not in words
