"""The front of `hrm-hf serve`: every request passes it before transformers' server sees it (ASGI).

It refuses what `requests.py` and `prompts.py` refuse, lets as many answers be written at once as there
is room for, keeps the others waiting in line (429 when that is full), ends an answer when its time is over or its
client has gone, and says every error as the OpenAI API does. Pages that generate nothing are answered meanwhile.
"""

import asyncio
import json
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from huggingface_hub.errors import CacheNotFound

from ...io.http_bodies import BodyRefused, BoundedBody
from ...io.http_hosts import send_error
from .generation import TICKET, Ticket, time_is_over
from .prompts import Prompts
from .requests import ROUTES, Limits, RequestRefused, read_body, validate_limits, validate_types


LOG = logging.getLogger(__name__)
READING = 64  # bodies that arrive at once
CHECKING = 2  # threads that check requests
RETRY_SECONDS = "5"
AUDIO, LOAD, RESET, MODELS = "/v1/audio/transcriptions", "/load_model", "/reset", "/v1/models"


class Front:
    """Stands before `app`, transformers' server.

    Args:
        models: names that requests may give; the first one is meant if they give none.
        any_model: whether they may give others.
        grace: seconds that an answer whose time is over has for its last token.
    """

    def __init__(self, app, prompts: Prompts, models: list[str], any_model: bool, limits: Limits, grace: float):
        self.app, self.prompts, self.models, self.any_model = app, prompts, models, any_model
        self.limits, self.grace = limits, grace
        self.reading = self.waiting = 0
        self.running: set[Ticket] = set()
        self.turns: dict[str, asyncio.Semaphore] = {}
        self.tasks: set[asyncio.Task] = set()
        self.checks = ThreadPoolExecutor(CHECKING, "checks")

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = Answer(send)
        try:
            await self._route(scope, receive, answer)
        except (RequestRefused, BodyRefused) as error:
            options = {"connection": "close"} if isinstance(error, BodyRefused) else error.headers
            await answer.error(error.status, str(error), getattr(error, "code", ""), **options)
        except Exception:
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            await answer.error(500, "the server failed on this request; its log says why")

    async def _route(self, scope, receive, answer: "Answer") -> None:
        path = scope["path"]
        if scope["method"] in ("GET", "HEAD") and path == MODELS:
            await answer.json({"object": "list", "data": await asyncio.to_thread(self._listed)})
        elif scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, answer)
        elif path in ROUTES or (path == AUDIO and self.any_model):
            await self._generate(path, scope, receive, answer)
        elif path in (LOAD, RESET):
            await self._manage(path, scope, receive, answer)
        else:
            raise RequestRefused(404, f"{scope['method']} {path[:80]} is no route of this server", "not_found")

    def _listed(self) -> list[dict[str, Any]]:
        """The models that requests may name; with any of them allowed, those in the Hub's cache too."""
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in self.models]
        if self.any_model:
            try:
                listed += self.prompts.manager.get_gen_models()
            except CacheNotFound:
                LOG.debug("nothing was ever fetched from the Hub")
        return listed

    async def _read(self, scope, receive) -> bytes | None:
        """The body of a request, or None if its client has gone."""
        if self.reading >= READING:
            raise RequestRefused(503, f"{READING} requests are arriving; try again", retry_after=RETRY_SECONDS)
        self.reading += 1
        try:
            flag = "--max-body-bytes"
            return await BoundedBody(scope, receive, self.limits.max_body_bytes, self.limits.body_seconds, flag).all()
        finally:
            self.reading -= 1

    def _validate(self, path: str, raw: bytes) -> dict[str, Any]:
        body = read_body(raw)
        if path in ROUTES:
            validate_types(path, body)
            validate_limits(path, body, self.limits)
        body["model"] = self._model(body.get("model"))
        return body

    def _model(self, name: Any) -> str:
        """The model that a request means."""
        if name is None and self.models:
            return self.models[0]
        if not isinstance(name, str) or not name:
            raise RequestRefused(422, f"model={name!r:.80}: expected the name of a model")
        if name not in self.models and not self.any_model:
            known = f"this server has {', '.join(self.models)}"
            raise RequestRefused(404, f"model={name!r:.200} is not served here; {known}", "model_not_found")
        return name

    async def _manage(self, path: str, scope, receive, answer: "Answer") -> None:
        """Loading a model, and forgetting all."""
        raw = await self._read(scope, receive)
        if raw is None:
            return
        if path == RESET and (self.running or self.waiting):
            raise RequestRefused(409, "answers are being written; reset when they are done", retry_after=RETRY_SECONDS)
        if path == LOAD:
            raw = json.dumps({"model": self._validate(path, raw)["model"]}).encode()
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self.app(_scope(scope, raw, str(uuid.uuid4())), _replay(raw, gone), answer)
        finally:
            gone.cancel()

    async def _generate(self, path: str, scope, receive, answer: "Answer") -> None:
        raw = await self._read(scope, receive)
        if raw is None:
            return
        gone = asyncio.create_task(_until_gone(receive))
        loop = asyncio.get_running_loop()
        ticket = Ticket(loop, str(uuid.uuid4()), self.limits.request_seconds)
        ticket.says_length = path != "/v1/responses"
        try:
            name = AUDIO
            if path != AUDIO:
                body = await loop.run_in_executor(self.checks, self._validate, path, raw)
                name = body["model"]
            turn = self.turns.setdefault(name, asyncio.Semaphore(self.limits.running))
            if turn.locked() and self.waiting >= self.limits.waiting:
                raise RequestRefused(
                    429, f"{self.waiting} requests are waiting for their turn, as many as may (--waiting); try again",
                    "queue_full", retry_after=RETRY_SECONDS,
                )  # fmt: skip
            self.waiting += 1
            try:
                if path != AUDIO:
                    await asyncio.to_thread(self.prompts.load, name)  # minutes, the first time
                    await loop.run_in_executor(self.checks, self.prompts.prepare, path, body, name)
                    raw = json.dumps(body, allow_nan=False).encode()
                if not await _first(turn.acquire(), gone):
                    return
            finally:
                self.waiting -= 1
            self.running.add(ticket)
            try:
                await self._write(_scope(scope, raw, ticket.id), raw, ticket, gone, answer)
            finally:
                self._keep(self._leave(ticket, turn))
        finally:
            gone.cancel()

    async def _write(self, scope, raw: bytes, ticket: Ticket, gone: asyncio.Task, answer: "Answer") -> None:
        """Has transformers answer, until it has, its time is over or nobody waits."""
        ticket.start()
        token = TICKET.set(ticket)
        try:
            inner = asyncio.create_task(self.app(scope, _replay(raw, gone), answer))
        finally:
            TICKET.reset(token)
        most = ticket.seconds + self.grace
        try:
            await asyncio.wait({inner, gone}, timeout=most, return_when=asyncio.FIRST_COMPLETED)
            if inner.done():
                _log_failure(inner, scope)
            elif not gone.done():
                await answer.error(504, time_is_over(ticket.seconds), "timeout")
        finally:
            if not inner.done():
                answer.close()
                ticket.stop()
                inner.cancel()
                self._keep(_end(inner))

    async def _leave(self, ticket: Ticket, turn: asyncio.Semaphore) -> None:
        """Lets the next one have its turn when no thread works for this one any more."""
        await ticket.finished()
        self.running.discard(ticket)
        turn.release()

    def _keep(self, work) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class Answer:
    """A `send` of ASGI that turns transformers' errors into those of the OpenAI API, and can be cut short."""

    def __init__(self, send):
        self.send = send
        self.started = self.ended = False
        self.failed: dict | None = None
        self.parts: list[bytes] = []

    async def __call__(self, message: dict) -> None:
        if self.ended:
            return
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self.failed = message
        elif self.failed is not None:
            self.parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                status, self.failed = self.failed["status"], None
                await self.error(status, _words(status, b"".join(self.parts)))
        else:
            self.started = True
            self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self.send(message)

    async def json(self, content: dict) -> None:
        """Answers with an object."""
        headers = [(b"content-type", b"application/json")]
        await self({"type": "http.response.start", "status": 200, "headers": headers})
        await self({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def error(self, status: int, message: str, code: str = "", **headers: str) -> None:
        """Answers with an error, as the last event of a stream if that has begun; nothing follows."""
        if self.ended:
            return
        self.ended = True
        if not self.started:
            await send_error(self.send, status, message, code, **headers)
            return
        event = f"data: {json.dumps({'error': {'message': message, 'code': code or None}})}\n\n".encode()
        await self.send({"type": "http.response.body", "body": event})

    def close(self) -> None:
        """Nothing more is sent."""
        self.ended = True


def _words(status: int, body: bytes) -> str:
    """Returns the message of an error of FastAPI."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    detail = (found.get("detail") or found.get("error")) if isinstance(found, dict) else None
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in detail[:5])
    if status >= 500 and not detail:
        return "the server failed on this request; its log says why"
    return str(detail or f"the server answered {status}")


def _scope(scope: dict, raw: bytes, request_id: str) -> dict:
    """The request as transformers shall see it: our body, and a name that no other request has."""
    own = (b"x-request-id", b"content-length", b"transfer-encoding", b"expect")
    headers = [(name, value) for name, value in scope["headers"] if name not in own]
    headers += [(b"x-request-id", request_id.encode()), (b"content-length", str(len(raw)).encode())]
    return {**scope, "headers": headers}


def _replay(raw: bytes, gone: asyncio.Task):
    """A `receive` that gives a body, and then waits until the client has gone."""
    sent = False

    async def receive() -> dict:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await asyncio.wait({gone})
        return {"type": "http.disconnect"}

    return receive


async def _until_gone(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # uvicorn repeats the empty end of the body


async def _first(work, gone: asyncio.Task) -> bool:
    """Waits for `work` as long as the client does; whether it was done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()


async def _end(task: asyncio.Task) -> None:
    """Awaits a cancelled task, so that its errors are nobody's."""
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is not None:
        LOG.debug("a request that was cut short ended with %r", task.exception())


def _log_failure(task: asyncio.Task, scope: dict) -> None:
    """transformers' server raises after it has answered 500."""
    if not task.cancelled() and (error := task.exception()) is not None:
        LOG.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
