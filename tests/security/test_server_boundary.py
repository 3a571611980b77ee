"""`hrm-hf serve` under requests that mean harm: each is refused by name, and the server answers the next one.

One server in a process of its own, with a model of 256 positions and one whose answers take minutes if nothing stops
them. Its limits are small, so that reaching them is cheap.
"""

import http.client
import json
import re
import socket
import threading
import time

import every
import psutil
import pytest
from serving_process import post, serving


SECONDS, WAITING, BODY = 3, 1, 2**21
LEAVING = 4  # clients, in less than the time of an answer
LONG = {"generation_config": json.dumps({"do_sample": False, "max_new_tokens": 15000, "min_new_tokens": 15000})}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a server (host, port), the names of its models, one that is small and one that is slow, and its
    process."""
    folder = tmp_path_factory.mktemp("served")
    small = every.save("hrm_lm", folder / "small")
    slow = folder / "slow"
    every.model("rlm_mhc", max_position_embeddings=20000).save_pretrained(slow)
    every.processor("rlm_mhc").save_pretrained(slow)
    options = ["--request-seconds", SECONDS, "--waiting", WAITING, "--body-seconds", 2, "--max-messages", 8]
    options += ["--max-stop-strings", 4, "--max-stop-length", 32, "--max-body-bytes", BODY]
    options += ["--allow-host", "known.example"]
    with serving(folder, str(small), str(slow), *map(str, options)) as (address, process):
        yield ("localhost", int(address.rpartition(":")[2])), str(small), str(slow), process


def ask(address, path, raw, method="POST", timeout=60, **headers):
    """Status, headers and content of an answer; `raw` is bytes, or what becomes JSON."""
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    raw = raw if isinstance(raw, bytes) or raw is None else json.dumps(raw).encode()
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): one for name, one in headers.items()}}
    connection.request(method, path, raw, headers)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer.status, answer.headers, found


def refused(address, path, raw, status, *words, **headers):
    """Asserts an error in OpenAI's form that has all words, and that the server is well."""
    found, _, content = ask(address, path, raw, **headers)
    message = json.loads(content)["error"]["message"]
    assert found == status, (found, message)
    assert all(word in message for word in words), message
    assert ask(address, "/health", None, "GET")[0] == 200


# ---- what a body may say ----

WRONG = {
    "messages a string": (CHAT, {"messages": "Hello"}, "messages"),
    "messages empty": (CHAT, {"messages": []}, "messages"),
    "a message that is a number": (CHAT, {"messages": [7]}, "messages.0=7"),
    "a message without role": (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
    "a role that is a list": (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    "content that is a number": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "a picture to fetch": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
        "content",
    ),
    "a tool call with broken arguments": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "arguments is no JSON",
    ),
    "a tool call with deep arguments": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}]},
        "arguments",
    ),
    "tools that are a string": (CHAT, {"messages": HELLO, "tools": "all"}, "tools"),
    "logit_bias of no token": (CHAT, {"messages": HELLO, "logit_bias": {"abc": 1}}, "logit_bias", "'abc'"),
    "logit_bias beyond the vocabulary": (CHAT, {"messages": HELLO, "logit_bias": {"999999": 1}}, "no token id"),
    "logit_bias of 1e30": (CHAT, {"messages": HELLO, "logit_bias": {"97": 1e30}}, "-100 to 100"),
    "prompt a list": (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    "no prompt": (TEXT, {}, "prompt"),
    "temperature hot": (TEXT, {"prompt": "a", "temperature": "hot"}, 'temperature="hot"'),
    "temperature below 0": (TEXT, {"prompt": "a", "temperature": -1}, "temperature=-1"),
    "temperature true": (TEXT, {"prompt": "a", "temperature": True}, "temperature=true"),
    "top_p 2": (TEXT, {"prompt": "a", "top_p": 2}, "top_p=2"),
    "max_tokens many": (TEXT, {"prompt": "a", "max_tokens": "many"}, 'max_tokens="many"'),
    "max_tokens below 0": (TEXT, {"prompt": "a", "max_tokens": -5}, "max_tokens=-5"),
    "max_tokens 0": (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
    "max_tokens 1.5": (TEXT, {"prompt": "a", "max_tokens": 1.5}, "max_tokens=1.5"),
    "seed beyond 64 bits": (TEXT, {"prompt": "a", "seed": 2**64}, "seed"),
    "stream yes": (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
    "stop a number": (TEXT, {"prompt": "a", "stop": 3}, "stop"),
    "an empty stop string": (TEXT, {"prompt": "a", "stop": [""]}, "empty stop string"),
    "a penalty that divides by zero": (TEXT, {"prompt": "a", "frequency_penalty": -1}, "frequency_penalty=-1"),
    "model a list": (TEXT, {"prompt": "a", "model": ["x"]}, "model"),
    "generation_config an object": (TEXT, {"prompt": "a", "generation_config": {}}, "generation_config"),
    "generation_config no JSON": (TEXT, {"prompt": "a", "generation_config": "{"}, "generation_config is no JSON"),
    "generation_config with top_k below 0": (
        TEXT, {"prompt": "a", "generation_config": '{"top_k": -4}'}, "generation_config.top_k=-4",
    ),
    "input a number": (RESPONSES, {"input": 5}, "input"),
    "an input item without type": (RESPONSES, {"input": [{"text": "x"}]}, "input"),
    "an output of a call that is none": (
        RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "function_call_output"}]}, "call_id",
    ),
    "half a surrogate pair": (TEXT, {"prompt": "a\ud800"}, "half a surrogate pair"),
    "questions that are a list": ("/v1/systemone", {"state": "x", "questions": []}, "questions"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_field_of_another_type_is_named_with_its_value(name, server):
    route, body, *words = WRONG[name]
    refused(server[0], route, {"model": server[1], **body}, 422, *words)


RAW = {
    "not JSON": (b"hello", "no JSON"),
    "an empty body": (b"", "no JSON"),
    "a list": (b"[1]", "expected an object"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe\xfd"}', "no UTF-8"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    "Infinity": (b'{"prompt": "a", "top_p": -Infinity}', "Infinity"),
    "1e999": (b'{"prompt": "a", "user": 1e999}', "too large"),
    "an integer of 20,000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 20000 + b"}", "no JSON that can be read"),
    "lists 100,000 deep": (b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", "deep"),
    "lists 100 deep": (b'{"prompt": "a", "user": ' + b"[" * 100 + b"]" * 100 + b"}", "deep"),
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_object_of_json_is_said_so(name, server):
    raw, word = RAW[name]
    refused(server[0], TEXT, raw, 422, word)


LARGE = {
    "a prompt of twice the window": (TEXT, {"prompt": "a" * 512}, "512 tokens", "256"),
    "a prompt of 1 MB": (TEXT, {"prompt": "a" * 10**6}, "1,000,000 characters", "3,840"),
    "a chat of twice the window": (CHAT, {"messages": [{"role": "user", "content": "a" * 512}]}, "tokens", "256"),
    "a chat of 1 MB": (CHAT, {"messages": [{"role": "user", "content": "a" * 10**6}]}, "characters"),
    "responses of 1 MB": (RESPONSES, {"input": "a" * 10**6}, "characters"),
    "an empty prompt": (TEXT, {"prompt": ""}, "empty"),
    "100,000 stop strings": (TEXT, {"prompt": "a", "stop": ["ab"] * 100000}, "100,000 strings", "--max-stop-strings"),
    "a stop string of 100 kB": (TEXT, {"prompt": "a", "stop": "a" * 100000}, "--max-stop-length"),
    "stop strings by generation_config": (
        TEXT, {"prompt": "a", "generation_config": json.dumps({"stop_strings": ["ab"] * 99})}, "--max-stop-strings",
    ),
    "10,000 messages": (CHAT, {"messages": HELLO * 10000}, "10,000 messages", "--max-messages"),
    "10,000 input items": (RESPONSES, {"input": HELLO * 10000}, "--max-messages"),
    "10,000 tools": (CHAT, {"messages": HELLO, "tools": [{}] * 10000}, "10,000 tools"),
    "10,000 biases": (CHAT, {"messages": HELLO, "logit_bias": {str(n): 0 for n in range(10000)}}, "logit_bias"),
    "n of 1000": (TEXT, {"prompt": "a", "n": 1000}, "n=1000", "one choice"),
    "1000 beams": (TEXT, {"prompt": "a", "generation_config": '{"num_beams": 1000}'}, "num_beams=1000"),
    "1000 sequences": (TEXT, {"prompt": "a", "generation_config": '{"num_return_sequences": 9}'}, "sequences=9"),
    "a decoding method from the Hub": (
        TEXT, {"prompt": "a", "generation_config": '{"custom_generate": "evil/code"}'}, "'custom_generate'",
    ),
    "a cache of the request's": (
        TEXT, {"prompt": "a", "generation_config": '{"cache_implementation": "static"}'}, "'cache_implementation'",
    ),
    "a template of the request's": (
        CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{% for i in range(9) %}{% endfor %}"}},
        "'chat_template'",
    ),
    "a temperature next to 0": (TEXT, {"prompt": "a", "temperature": 1e-40}, "temperature=1e-40"),
    "a role that the template does not know": (
        RESPONSES, {"input": "hello", "instructions": "a" * 10**5}, "characters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_what_is_above_a_limit_is_refused_with_the_limit(name, server):
    route, body, *words = LARGE[name]
    refused(server[0], route, {"model": server[1], **body}, 400, *words)


def test_a_prompt_of_5_mb_is_refused_before_it_is_kept(server):
    refused(server[0], TEXT, {"prompt": "a" * 5 * 10**6}, 413, "5,000", f"{BODY:,}", "--max-body-bytes")


def test_a_chunked_body_without_a_length_is_counted_as_it_comes(server):
    with socket.create_connection(server[0], timeout=30) as wire:
        wire.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        answer = b""
        try:
            for _ in range(2 * BODY // 2**16):
                wire.sendall(b"10000\r\n" + b"a" * 2**16 + b"\r\n")
        except OSError:  # the server has hung up
            pass
        try:
            while part := wire.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    assert b" 413 " in answer.split(b"\r\n")[0] and b"--max-body-bytes" in answer


def test_a_body_that_trickles_in_has_a_time_limit(server):
    with socket.create_connection(server[0], timeout=30) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        answer = b""
        while part := wire.recv(65536):
            answer += part
    assert b" 408 " in answer.split(b"\r\n")[0] and b"within 2 seconds" in answer


def test_max_tokens_is_cut_to_what_the_window_leaves(server):
    _, _, content = ask(server[0], TEXT, {
        "model": server[1], "prompt": "a" * 250, "max_tokens": 10**9, "temperature": 0,
    })  # fmt: skip
    assert json.loads(content)["usage"]["completion_tokens"] <= 6


def test_no_answer_is_longer_than_the_window_without_max_tokens(server):
    found = post(f"http://localhost:{server[0][1]}{TEXT}", model=server[1], prompt="a" * 200, temperature=0)
    assert found["usage"]["total_tokens"] <= 256


# ---- which models ----

OTHERS = {
    "another model of the Hub": ("openai-community/gpt2", "is not served here"),
    "a folder of the machine": ("/etc", "is not served here"),
    "a way up": ("../../../../etc", "is not served here"),
    "a revision": ("SMALL@refs/pr/1", "is not served here"),
}


@pytest.mark.parametrize("route", [TEXT, "/load_model"])
@pytest.mark.parametrize("name", OTHERS)
def test_only_the_models_of_the_command_line_are_loaded(name, route, server):
    model, words = OTHERS[name]
    refused(server[0], route, {"model": model.replace("SMALL", server[1]), "prompt": "a"}, 404, words, server[2])


def test_the_models_of_the_command_line_are_listed(server):
    found = json.loads(ask(server[0], "/v1/models", None, "GET")[2])
    assert [one["id"] for one in found["data"]] == list(server[1:3])


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/embeddings", "/v1//completions", "/"])
def test_a_route_that_is_none_is_not_passed_on(path, server):
    refused(server[0], path, {"model": server[1]}, 404, "no route")


# ---- who may ask ----

FOREIGN = {
    "a name that was rebound": {"Host": "evil.example"},
    "a name with our port": {"Host": "evil.example:8000"},
    "a name that begins like ours": {"Host": "localhost.evil.example"},
    "an address in a name": {"Host": "127.0.0.1.evil.example"},
    "an address before an @": {"Host": "127.0.0.1@evil.example"},
    "a page of somebody else": {"Host": "localhost", "Origin": "https://evil.example"},
    "a page without a name": {"Host": "localhost", "Origin": "null"},
    "a page of another port": {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
    "a page of a name like ours": {"Host": "known.example", "Origin": "https://notknown.example"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_page_of_somebody_else_gets_nothing(name, server):
    body = {"model": server[1], "prompt": "a", "max_tokens": 1}
    status, headers, content = ask(server[0], TEXT, body, **FOREIGN[name])
    message = json.loads(content)["error"]["message"]
    assert status == 403 and ("--allow-host" in message or "expected one name of this server" in message)
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "headers",
    [{"Host": "known.example", "Origin": "https://known.example"}, {"Host": "127.0.0.1:1"}, {"Host": "[::1]:8"}],
)
def test_the_names_of_the_server_are_answered(headers, server):
    body = {"model": server[1], "prompt": "a", "max_tokens": 1}
    assert ask(server[0], TEXT, body, **headers)[0] == 200


def test_a_form_of_another_page_is_no_request(server):
    status = ask(server[0], TEXT, b'{"prompt": "a"}', Content_Type="text/plain")[0]
    assert status in (415, 422)


# ---- time, turns, clients that leave ----


def test_an_answer_ends_when_its_time_is_over_and_says_length(server):
    found = post(f"http://localhost:{server[0][1]}{TEXT}", model=server[2], prompt="a", **LONG)
    assert found["choices"][0]["finish_reason"] == "length"
    assert 0 < found["usage"]["completion_tokens"] < 15000


def test_a_streamed_answer_ends_when_its_time_is_over_and_says_length(server):
    content = ask(server[0], CHAT, {"model": server[2], "messages": HELLO, "stream": True, **LONG})[2].decode()
    last = json.loads(content.strip().splitlines()[-1].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert 0 < last["usage"]["completion_tokens"] < 15000


def test_a_response_that_cannot_say_so_is_an_error_when_its_time_is_over(server):
    body = {"model": server[2], "input": "a", "stream": False, **LONG}
    refused(server[0], RESPONSES, body, 504, "--request-seconds")


@pytest.fixture
def busy(server):
    """A thread that has the slow model write; its answer is in the list."""
    answers = []
    body = {"model": server[2], "prompt": "a", **LONG}
    thread = threading.Thread(target=lambda: answers.append(ask(server[0], TEXT, body)[0]))
    thread.start()
    time.sleep(0.5)
    yield answers
    thread.join(timeout=60)
    assert answers == [200]


def test_a_long_answer_blocks_no_page_and_no_other_model(server, busy):
    assert ask(server[0], "/health", None, "GET")[0] == 200
    assert ask(server[0], "/v1/models", None, "GET")[0] == 200
    assert ask(server[0], TEXT, {"model": server[1], "prompt": "a", "max_tokens": 2})[0] == 200
    refused(server[0], TEXT, {"model": server[2], "prompt": "a", "top_p": "x"}, 422, "top_p")
    refused(server[0], "/reset", {}, 409, "answers are being written")
    assert not busy, "the long answer was over before the others"


def test_a_full_queue_says_so_and_who_waits_gets_a_turn(server, busy):
    first = {"model": server[2], "prompt": "a", "max_tokens": 2}
    statuses, found = [], []
    waits = threading.Thread(target=lambda: statuses.append(ask(server[0], TEXT, first)[0]))
    waits.start()
    time.sleep(0.5)
    status, headers, content = ask(server[0], TEXT, first)
    found.append((status, headers["Retry-After"], "--waiting" in json.loads(content)["error"]["message"]))
    waits.join(timeout=60)
    assert found == [(429, "5", True)] and statuses == [200]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_turns(stream, server):
    """One may write and one may wait: answers that nobody reads would leave no room for the last one."""
    body = json.dumps({"model": server[2], "prompt": "a", "stream": stream, **LONG}).encode()
    for _ in range(LEAVING):
        with socket.create_connection(server[0], timeout=30) as wire:
            wire.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            time.sleep(0.4)
    assert ask(server[0], TEXT, {"model": server[2], "prompt": "a", "max_tokens": 1})[0] == 200


def test_a_request_cannot_take_the_name_of_another(server):
    """Continuous batching sends answers by these names."""
    body = {"model": server[1], "prompt": "a", "max_tokens": 1}
    ids = {ask(server[0], TEXT, body, X_Request_ID="mine")[1]["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and "mine" not in ids


def test_after_all_this_the_server_is_as_large_as_before(server):
    """The last test of the file: 5 MB of prompt took 7 GB."""
    assert psutil.Process(server[3]).memory_info().rss < 3 * 2**30
    found = post(f"http://localhost:{server[0][1]}{CHAT}", model=server[1], messages=HELLO, max_tokens=3)
    assert found["choices"][0]["message"]["role"] == "assistant"


# ---- what is refused before a server starts ----


def test_a_server_without_a_model_must_be_asked_for_all_of_them():
    make_server, limits = _maker()
    with pytest.raises(ValueError, match=r"no model to serve; .*--any-model"):
        make_server([], False, [], limits())


def test_code_of_any_model_is_never_run():
    make_server, limits = _maker()
    with pytest.raises(ValueError, match="would run the code of any model that a request names"):
        make_server([], True, [], limits(), trust_remote_code=True)


def test_several_answers_at_once_need_a_batch():
    make_server, limits = _maker()
    with pytest.raises(ValueError, match=r"--running 2: .*--continuous-batching"):
        make_server(["x"], False, [], limits(running=2))


@pytest.mark.parametrize("host", ["https://x", "x:8000", "*", "a.*.b", ""])
def test_a_host_that_is_none_is_refused(host):
    from hrm_hf.io.http_hosts import validate_allowed

    with pytest.raises(ValueError, match=f"--allow-host {re.escape(host)}: expected the name of a host"):
        validate_allowed([host])


def _maker():
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    from hrm_hf.text.serving.server import Limits, make_server

    return make_server, Limits
