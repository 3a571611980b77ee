"""`hrm-hf serve` rejects excessive or unsupported requests, and answers the next one.

One server in a separate process, with a model whose answers would take minutes without limits.
"""

import asyncio
import contextlib
import functools
import http.client
import json
import re
import socket
import threading

import every
import psutil
import pytest
from serving_process import post, serving

from hrm_hf.io import http_guards


BODY, MOST, WINDOW = 2**18, 2, 512
LONG = {"generation_config": json.dumps({"do_sample": False, "max_new_tokens": 400, "min_new_tokens": 400})}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HELLO = [{"role": "user", "content": "Hello"}]
PICTURE = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(host, port), model and process ID of a server."""
    folder = tmp_path_factory.mktemp("served")
    model = folder / "model"
    every.model("rlm_mhc", max_position_embeddings=WINDOW).save_pretrained(model)
    every.processor("rlm_mhc").save_pretrained(model)
    options = ["--max-requests", str(MOST), "--max-body-bytes", str(BODY), "--allow-host", "known.example"]
    with serving(folder, str(model), *options, "--max-new-tokens", "400") as (address, process):
        yield ("localhost", int(address.rpartition(":")[2])), str(model), process


def ask(address, path, raw, method="POST", **headers):
    """Return status, headers and content of an answer; `raw` is bytes, or is sent as JSON."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    raw = raw if isinstance(raw, bytes) or raw is None else json.dumps(raw).encode()
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): one for name, one in headers.items()}}
    connection.request(method, path, raw, headers)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer.status, answer.headers, found


def assert_rejected(address, path, raw, status, *words, **headers):
    """Assert an error in OpenAI's format with all words, and a healthy server."""
    found, _, content = ask(address, path, raw, **headers)
    error = json.loads(content)["error"]
    assert found == status and error["type"] == "invalid_request_error", (found, error)
    assert all(word in error["message"] for word in words), error
    assert error["param"] is None or error["message"].startswith(error["param"]), error
    assert ask(address, "/health", None, "GET")[0] == 200


# ---- fields ----

REJECTED = {
    "logprobs": (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs=True"),
    "top_logprobs": (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs=2"),
    "completion logprobs": (TEXT, {"prompt": "a", "logprobs": 0}, "logprobs=0"),
    "response_format": (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    "several choices": (TEXT, {"prompt": "a", "n": 2}, "n=2"),
    "template of the request": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": ""}}, "template"),
    "unknown field": (TEXT, {"prompt": "a", "magic": 1}, "magic=1"),
    "beam search": (TEXT, {"prompt": "a", "generation_config": '{"num_beams": 1000}'}, "generation_config.num_beams"),
    "decoding method from the Hub": (
        TEXT, {"prompt": "a", "generation_config": '{"custom_generate": "x/y"}'}, "generation_config.custom_generate",
    ),
    "generation_config broken": (TEXT, {"prompt": "a", "generation_config": "{"}, "generation_config"),
    "generation_config top_k": (TEXT, {"prompt": "a", "generation_config": '{"top_k": -4}'}, "top_k=-4"),
    "messages a string": (CHAT, {"messages": "Hello"}, "messages"),
    "messages empty": (CHAT, {"messages": []}, "messages"),
    "too many messages": (CHAT, {"messages": HELLO * 257}, "messages"),
    "message a number": (CHAT, {"messages": [7]}, "messages.0=7"),
    "message without role": (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
    "image to fetch": (CHAT, {"messages": [{"role": "user", "content": PICTURE}]}, "content"),
    "broken tool call": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
    "prompt a list": (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    "prompt empty": (TEXT, {"prompt": ""}, "prompt"),
    "prompt missing": (TEXT, {}, "prompt"),
    "temperature hot": (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature='hot'"),
    "temperature below 0": (TEXT, {"prompt": "a", "temperature": -1}, "temperature=-1"),
    "temperature tiny": (TEXT, {"prompt": "a", "temperature": 1e-30}, "temperature=1e-30"),
    "temperature true": (TEXT, {"prompt": "a", "temperature": True}, "temperature=True"),
    "top_p 2": (TEXT, {"prompt": "a", "top_p": 2}, "top_p=2"),
    "max_tokens many": (TEXT, {"prompt": "a", "max_tokens": "many"}, "max_tokens='many'"),
    "max_tokens 0": (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
    "seed beyond 64 bits": (TEXT, {"prompt": "a", "seed": 2**64}, "seed"),
    "stream yes": (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
    "empty stop string": (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
    "long stop string": (TEXT, {"prompt": "a", "stop": "x" * 257}, "stop"),
    "many stop strings": (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    "penalty that divides by 0": (TEXT, {"prompt": "a", "frequency_penalty": -1}, "frequency_penalty=-1"),
    "input a number": (RESPONSES, {"input": 5}, "input"),
    "function call in input": (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input"),
    "previous response": (RESPONSES, {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
    "half a surrogate pair": (TEXT, {"prompt": "a\ud800"}, "prompt"),
    "not JSON": (TEXT, b"hello", "the body"),
    "empty body": (TEXT, b"", "the body"),
    "list": (TEXT, b"[1]", "the body"),
    "deep list": (TEXT, DEEP.encode(), "the body"),
    "not UTF-8": (TEXT, b'{"prompt": "\xff"}', "the body"),
    "NaN": (TEXT, b'{"prompt": "a", "temperature": NaN}', "temperature"),
    "prompt above the window": (TEXT, {"prompt": "a" * (WINDOW + 1)}, f"the window of {{}} is {WINDOW}"),
    "chat above the window": (CHAT, {"messages": [{"role": "user", "content": "a" * WINDOW}]}, "messages", "window"),
    "input above the window": (RESPONSES, {"input": "a" * WINDOW}, "input", "window"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_request_is_rejected_with_the_field(name, server):
    route, body, *words = REJECTED[name]
    assert_rejected(server[0], route, body, 400, *(word.format(server[1]) for word in words))


def test_harmless_values_are_accepted(server):
    body = {"messages": HELLO, "max_tokens": 2, "n": 1, "user": "me", "logprobs": None, "response_format": None}
    assert ask(server[0], CHAT, body)[0] == 200


# ---- sizes ----


def test_body_above_the_limit_is_rejected(server):
    assert_rejected(server[0], TEXT, b"x" * (BODY + 1), 413, f"Content-Length={BODY + 1}", "--max-body-bytes")


def test_body_without_a_length_is_rejected(server):
    with socket.create_connection(server[0], timeout=30) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 411 " in wire.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("head", [
    b"/health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**17,  # a header without an end
    b"/health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**15 + b"\r\n\r\n",
    b"/health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 5000 + b"\r\n",
    b"/health?" + b"a" * 2**15 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
], ids=["endless", "one", "many", "path"])  # fmt: skip
def test_headers_above_the_limit_are_rejected(head, server):
    with socket.create_connection(server[0], timeout=30) as wire:
        wire.sendall(b"GET " + head)
        status = wire.recv(4096).split(b"\r\n")[0]
        assert b" 400 " in status or b" 431 " in status


def test_connections_without_a_request_are_closed(monkeypatch):
    uvicorn, serving = pytest.importorskip("uvicorn"), pytest.importorskip("hrm_hf.text.serving")
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http_guards, "DISCARD_SECONDS", 0.2)

    async def slow(scope, receive, send):
        await asyncio.sleep(0.5)
        await serving.send_json(send, 200, {})

    listener = socket.create_server(("127.0.0.1", 0))
    limited, how = http_guards.SizeLimit(slow, (9, "")), {"lifespan": "off", "log_level": "error"}
    one = uvicorn.Server(uvicorn.Config(limited, http=serving.Connection, **how))
    thread = threading.Thread(target=one.run, args=([listener],))
    wires = [socket.create_connection(listener.getsockname(), timeout=30) for _ in range(4)]
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    for wire, begun in zip(wires, (b"", b"GET / HT", head + b"\r\n", head + b"Content-Length: 99\r\n\r\n")):
        wire.sendall(begun)
    thread.start()  # started after sending, so that a slow client does not look idle
    received = [b"".join(iter(functools.partial(wire.recv, 4096), b"")) for wire in wires]
    monkeypatch.setattr(serving, "CONNECTIONS", 0)
    with contextlib.suppress(ConnectionResetError), socket.create_connection(listener.getsockname(), 30) as wire:
        assert wire.recv(1) == b""
    one.should_exit = True
    thread.join()
    assert received[:2] == [b"", b""] and received[2].endswith(b"{}") and b" 413 " in received[3]


def test_answer_is_truncated_to_the_remaining_window(server):
    for body in ({"max_tokens": 10**9}, {}):
        content = ask(server[0], TEXT, {"prompt": "a" * (WINDOW - 6), "temperature": 0, **body})[2]
        assert json.loads(content)["usage"]["total_tokens"] <= WINDOW


# ---- routes and models ----


@pytest.mark.parametrize("name", ["openai-community/gpt2", "/etc", "../../../../etc", "MODEL@refs/pr/1"])
@pytest.mark.parametrize("route, body", [(TEXT, {"prompt": "a"}), ("/load_model", {})])
def test_other_models_are_not_loaded(route, body, name, server):
    assert_rejected(server[0], route, {"model": name.replace("MODEL", server[1]), **body}, 404, "model=")


def test_served_model_is_listed_and_loaded(server):
    found = json.loads(ask(server[0], "/v1/models", None, "GET")[2])
    assert [one["id"] for one in found["data"]] == [server[1]]
    status, _, content = ask(server[0], "/load_model", {"model": server[1]})
    assert status == 200 and b'"ready"' in content


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/embeddings", "/v1/systemone", "/reset", "/"])
def test_other_routes_are_not_forwarded(path, server):
    assert_rejected(server[0], path, {"model": server[1]}, 404, path)


# ---- allowed hosts and origins ----

FOREIGN = {
    "rebound name": {"Host": "evil.example"},
    "name with our port": {"Host": "evil.example:8000"},
    "name that begins like ours": {"Host": "localhost.evil.example"},
    "address in a name": {"Host": "127.0.0.1.evil.example"},
    "address before an @": {"Host": "127.0.0.1@evil.example"},
    "page of another host": {"Host": "localhost", "Origin": "https://evil.example"},
    "page without a name": {"Host": "localhost", "Origin": "null"},
    "page of another port": {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
    "page of a name like ours": {"Host": "known.example", "Origin": "https://notknown.example"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_hosts_and_pages_are_rejected(name, server):
    status, headers, content = ask(server[0], TEXT, {"prompt": "a", "max_tokens": 1}, **FOREIGN[name])
    assert status == 403 and "--allow-host" in json.loads(content)["error"]["message"]
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "headers",
    [{"Host": "known.example", "Origin": "https://known.example"}, {"Host": "127.0.0.1:1"}, {"Host": "[::1]:8"}],
)
def test_own_names_are_answered(headers, server):
    assert ask(server[0], TEXT, {"prompt": "a", "max_tokens": 1}, **headers)[0] == 200


def test_form_of_another_page_is_rejected(server):
    assert_rejected(server[0], TEXT, b'{"prompt": "a"}', 415, "Content-Type", Content_Type="text/plain")


# ---- concurrent requests ----


def test_slow_bodies_take_the_place_of_no_other_request(server):
    with contextlib.ExitStack() as stack:
        for _ in range(MOST):
            wire = stack.enter_context(socket.create_connection(server[0], timeout=30))
            wire.sendall(POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
            assert b" 100 " in wire.recv(4096)  # the server waits for the body
        assert ask(server[0], TEXT, {"prompt": "a", "max_tokens": 1})[0] == 200


@contextlib.contextmanager
def streamed(address):
    """Yield a connection that requested a long answer; close it at the end."""
    body = json.dumps({"prompt": "a", "stream": True, **LONG}).encode()
    with socket.create_connection(address, timeout=120) as wire:
        wire.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        yield wire


def test_requests_above_the_number_at_once_get_429(server):
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(streamed(server[0])) for _ in range(MOST)]  # the server reads these first
        status, headers, content = ask(server[0], TEXT, {"prompt": "a", "max_tokens": 1})
        assert ask(server[0], "/health", None, "GET")[0] == 200
        assert all(b" 200 " in wire.recv(4096).split(b"\r\n")[0] for wire in wires)
    assert (status, headers["Retry-After"]) == (429, "5") and b"--max-requests" in content


def test_streams_whose_clients_leave_are_stopped(server):
    """Several abandoned streams cost the server less processor time than one complete answer."""

    def spent():
        return sum(psutil.Process(server[2]).cpu_times()[:2])

    before = spent()
    while ask(server[0], TEXT, {"prompt": "a", **LONG})[0] == 429:
        before = spent()  # streams of the previous test may still run
    complete = spent() - before
    for _ in range(2 * MOST):
        with streamed(server[0]) as wire:
            assert wire.recv(4096).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 429 "))
        while ask(server[0], TEXT, {"prompt": "a", "max_tokens": 1})[0] == 429:
            pass
    assert spent() - before < 2 * complete


def test_request_cannot_choose_its_id(server):
    """Continuous batching routes answers by these IDs."""
    body = {"prompt": "a", "max_tokens": 1}
    ids = {ask(server[0], TEXT, body, X_Request_ID="mine")[1]["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and "mine" not in ids


def test_server_does_not_grow(server):
    """This test must run after those that strain the server."""
    assert psutil.Process(server[2]).memory_info().rss < 3 * 2**30
    found = post(f"http://localhost:{server[0][1]}{CHAT}", messages=HELLO, max_tokens=3)
    assert found["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("host", ["https://x", "x:8000", "*", "a.*.b", ""])
def test_allow_host_must_be_a_name(host):
    from hrm_hf.io.http_guards import validate_allowed

    with pytest.raises(ValueError, match=f"--allow-host {re.escape(host)}: "):
        validate_allowed([host])
