"""`hrm-hf serve`: `transformers serve` for one of our models, behind a gate that checks requests.

`transformers serve` looks up model classes only in its own namespace, ignores many fields of the OpenAI API, and sets
no limits on requests. The gate (ASGI) rejects fields that would be ignored and values that are too large. Users, TLS,
time limits and queues are left to a gateway in front of the server. Use vLLM for high throughput.
"""

import asyncio
import json
import math
import socket
from dataclasses import fields
from typing import Any

import torch
import transformers
import uvicorn
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import BaseHandler, Modality
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..io.http_guards import HEADER_BYTES, HostGuard, SizeLimit, error_body, is_known_host, send_error, send_json
from ..registry import ARCHITECTURES, has_ability
from .options import ServeOptions
from .serving_fields import GENERATION, ROUTES, Rejection, parse


NEW_TOKENS = 1024  # default maximum length of an answer
HEAD_SECONDS, BODY_SECONDS = 10, 30  # time limits for the headers and the body of a request
CONNECTIONS = 256  # above this number, requests are rejected; above twice the number, new connections are closed


class Gate:
    """ASGI middleware that validates each request before passing it to `app` (`transformers serve`)."""

    app: Any

    def __init__(self, options: ServeOptions):
        self.options, self.running = options, 0
        trust = options.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=trust)
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=trust)
        self.window = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.has_segments = has_ability(config, "recurrent_depth") and not options.continuous_batching
        self.template = json.loads(options.chat_template_kwargs or "{}")

    async def __call__(self, scope, receive, send) -> None:
        if scope.get("method") == "POST":
            try:
                await self._answer(scope, receive, send)
            except Rejection as error:
                await send_error(send, error.status, str(error), error.param, **error.headers)
        elif scope.get("path") == "/v1/models" and scope["method"] == "GET":
            listed = {"id": self.options.model, "object": "model", "created": 0, "owned_by": ""}
            await send_json(send, 200, {"object": "list", "data": [listed]})
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope, receive, send) -> None:
        path, most = scope["path"], self.options.max_requests
        if path not in ROUTES:
            raise Rejection(404, f"POST {path[:80]}: this server has no such route")
        if not dict(scope["headers"]).get(b"content-type", b"").lower().startswith(b"application/json"):
            raise Rejection(415, "Content-Type: must be application/json")
        try:  # read first, so a slow body does not take a slot from other requests
            raw = await asyncio.wait_for(Request(scope, receive).body(), BODY_SECONDS)
        except (TimeoutError, ClientDisconnect) as error:
            raise Rejection(408, f"the body did not arrive within {BODY_SECONDS} seconds; send it faster") from error
        if self.running >= most:
            raise Rejection(429, f"{most} requests are running (--max-requests); try again later", retry_after="5")
        self.running += 1
        try:
            body = await asyncio.to_thread(self._checked, path, raw)
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> dict[str, Any]:
                return messages.pop() if messages else await receive()

            # Continuous batching identifies requests by this id, so a client must not choose another client's id.
            headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
            await self.app({**scope, "headers": headers}, replay, send)
        finally:
            self.running -= 1

    def _checked(self, path: str, raw: bytes) -> bytes:
        """Check a request body; return it without nulls, and with an answer length that fits the context window."""
        schema, lengths = ROUTES[path]
        body = parse(schema, raw)
        if body.setdefault("model", self.options.model) != self.options.model:
            raise Rejection(404, f"model={body['model'][:80]!r}: is not served here; omit this field", "model")
        if not lengths:
            return json.dumps(body).encode()
        generation = parse(GENERATION, body.get("generation_config", "{}"), "generation_config")
        if "num_segments" in generation and not self.has_segments:
            name, reason = "generation_config.num_segments", "needs an hrm_lm and no --continuous-batching"
            raise Rejection(400, f"{name}={generation['num_segments']}: {reason}; remove it", name)
        requested = [body.pop(name, None) for name in lengths] + [generation.get("max_new_tokens"), NEW_TOKENS]
        wanted = next(value for value in requested if value is not None)
        limits = [wanted, self.options.max_new_tokens, self.window and self._tokens_left(path, body)]
        body[lengths[0]] = min(limit for limit in limits if limit is not None)
        body.setdefault("stream", False)
        return json.dumps(body).encode()

    def _tokens_left(self, path: str, body: dict[str, Any]) -> int:
        """Return the number of tokens left for the answer, after building the prompt as the handlers do."""
        field = next(name for name in ("prompt", "messages", "input") if name in body)
        try:
            text = body[field] if field == "prompt" else self._chat(body[field], body)
            tokens = len(self.tokenizer(text, add_special_tokens=field == "prompt").input_ids)
        except Exception as error:  # a chat template is a program and may raise any error
            raise Rejection(400, f"{field}: rejected by the chat template ({error})", field) from error
        if tokens >= self.window:
            limit = f"the window of {self.options.model} is {self.window}, including the answer"
            raise Rejection(400, f"{field}: has {tokens} tokens, but {limit}; shorten it", field)
        return self.window - tokens

    def _chat(self, messages: str | list[dict[str, Any]], body: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if "instructions" in body:
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        turns = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
        options = {"tools": body.get("tools"), "add_generation_prompt": True, "tokenize": False}
        return self.tokenizer.apply_chat_template(turns, **options, **self.template)


class Connection(H11Protocol):
    """Connection that closes if no request arrives within HEAD_SECONDS. uvicorn would wait forever."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > 2 * CONNECTIONS:
            transport.abort()
        else:
            self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        self.loop.call_later(HEAD_SECONDS, self._close_idle, self.cycle)

    def _close_idle(self, before) -> None:
        """Close the connection if no headers have arrived since the latest request (`before`) was answered."""
        if self.cycle is before and (before is None or before.response_complete) and not self.transport.is_closing():
            self.transport.close()


class Server(Serve):
    """`transformers serve`, except that `run`, not the constructor, serves the application."""

    _thread = None  # there is no server thread that `kill_server` could wait for

    def start_server(self) -> None:
        """Do nothing, because the constructor calls this method before `run` serves the application."""

    def run(self) -> None:
        """Serve until interrupted, then stop the batching thread, which would otherwise keep the process alive."""
        try:
            self.server.run()
        finally:
            self.kill_server()


async def _answer_error(request, error: Exception) -> JSONResponse:
    status = getattr(error, "status_code", 400 if isinstance(error, ValueError) else 500)
    message = str(error) if status == 400 else "internal error; see the server's log"
    return JSONResponse(error_body(status, str(getattr(error, "detail", message))), status)


def make_server(options: ServeOptions) -> Server:
    """Load the model and return a server that is ready to `run()`."""
    for row in ARCHITECTURES.values():
        if AutoModelForCausalLM in row.heads:
            setattr(transformers, row.head.__name__, row.head)
    names = [each.name for each in fields(options)]
    theirs = {name: getattr(options, name) for name in names[names.index("host") :]}
    gate = Gate(options)
    if gate.window and not (torch.cuda.is_available() and options.device != "cpu"):
        # By default, transformers reserves most of the machine's memory for cache pages.
        theirs["cb_num_blocks"] = options.max_requests * math.ceil(gate.window / ContinuousBatchingConfig.page_size)
    server = Server(force_model=options.model, non_blocking=True, **theirs)
    app = gate.app = server.server.config.app
    for kind in (HTTPException, ValueError, Exception):  # a ValueError in generate is caused by the request
        app.add_exception_handler(kind, _answer_error)
    own = [name for name in (options.host, socket.gethostname()) if not is_known_host(name, ())]
    gate = SizeLimit(gate, (options.max_body_bytes, "--max-body-bytes"))
    gate = HostGuard(gate, [*(options.allow_host or ()), *own], options.enable_cors)
    bounds = {"h11_max_incomplete_event_size": HEADER_BYTES, "limit_concurrency": CONNECTIONS}
    bounds |= {"http": Connection, "ws": "none"}
    server.server = uvicorn.Server(uvicorn.Config(gate, options.host, options.port, **bounds))
    return server
