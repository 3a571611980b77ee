"""ASGI middleware that checks hosts and limits request sizes, for the server and the app."""

import asyncio
import ipaddress
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit


HEADER_BYTES = 2**14  # maximum size of a request's path and headers
DISCARD_SECONDS = 10  # maximum time for discarding a long body


def validate_allowed(names: Sequence[str]) -> list[str]:
    """Return the host names in lower case. Raise ValueError unless each has the form NAME or *.NAME."""
    for name in names:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9._-]+", name):
            raise ValueError(f"--allow-host {name}: must be a host name without a port, like demo.org or *.demo.org")
    return [name.lower() for name in names]


def is_known_host(host: str, allowed: Sequence[str]) -> bool:
    """Return whether a host (without a port) is an IP address, is localhost, or matches a name in `allowed`."""
    host = host.lower().rstrip(".")
    try:
        return bool(ipaddress.ip_address(host.strip("[]")))
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost") or _is_allowed(host, allowed)


def _is_allowed(host: str, allowed: Sequence[str]) -> bool:
    return any(host.endswith(name[1:]) if name.startswith("*.") else host == name for name in allowed)


def _host(address: str) -> str:
    """Return the host of HOST or HOST:PORT in lower case, or "" if the address has a different form."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", address)
    return found[1].lower() if found else ""


class HostGuard:
    """Middleware that rejects (403) requests to unknown host names (DNS rebinding) or from pages on other hosts.

    Args:
        allowed: host names to accept in addition to localhost and IP addresses; their pages may also send requests.
        any_origin: do not check `Origin`, for a server that allows all origins through CORS.
    """

    def __init__(self, app, allowed: Sequence[str] = (), any_origin: bool = False):
        self.app, self.allowed, self.any_origin = app, validate_allowed(allowed), any_origin

    async def __call__(self, scope, receive, send) -> None:
        problem = self._problem(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem[:120]})
        else:
            await send_error(send, 403, problem)

    def _problem(self, scope) -> str | None:
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        host = _host(hosts[0]) if len(hosts) == 1 else ""
        if not host or not is_known_host(host, self.allowed):
            return f"Host={', '.join(hosts)[:80]!r}: must name this server; allow it with --allow-host NAME"
        for origin in [] if self.any_origin else [value for name, value in headers if name == b"origin"]:
            page = urlsplit(origin)
            if page.netloc.lower() != hosts[0].lower() and not _is_allowed(_host(page.netloc), self.allowed):
                return f"Origin={origin[:80]!r}: must be this server; allow its pages with --allow-host NAME"
        return None


class SizeLimit:
    """Reject requests with long headers (431), a long body (413) or a body without a length (411).

    Args:
        limit: maximum bytes in a body, and the name of the option for it. upload_limit: the same for uploads.
        upload_path: suffix of the URL path for uploads.
    """

    def __init__(
        self, app, limit: tuple[int, str], upload_path: str = "", upload_limit: tuple[int, str] | None = None
    ):
        self.app, self.limit, self.upload_path, self.upload_limit = app, limit, upload_path, upload_limit or limit

    async def __call__(self, scope, receive, send) -> None:
        headers = dict(scope.get("headers", ()))
        head = sum(len(name) + len(value) + len(": \r\n") for name, value in scope.get("headers", ()))
        head += len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        is_upload = self.upload_path and scope.get("path", "").rstrip("/").endswith(self.upload_path)
        limit, option = self.upload_limit if is_upload else self.limit
        if head > HEADER_BYTES:
            await send_error(send, 431, f"headers: have {head:,} bytes; the limit is {HEADER_BYTES:,}; send less")
        elif b"transfer-encoding" in headers:
            await send_error(send, 411, "Transfer-Encoding: a body must state its length; send Content-Length instead")
        elif int(headers.get(b"content-length", b"0")) > limit:
            size = int(headers[b"content-length"])
            await _discard(receive, 8 * limit)
            await send_error(send, 413, f"Content-Length={size}: the limit is {limit:,} bytes ({option}); send less")
        else:
            await self.app(scope, receive, send)


async def _discard(receive, most: int) -> None:
    """Discard up to `most` bytes of a body, because a client reads the response only after sending everything."""
    more = True
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while more and most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                more = message.get("more_body", False)


async def send_json(send, status: int, content: dict, **headers: str) -> None:
    """Send a JSON response. In header names, replace `_` with `-`."""
    body = json.dumps(content).encode()
    found = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    found += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": found})
    await send({"type": "http.response.body", "body": body})


async def send_error(send, status: int, message: str, param: str | None = None, **headers: str) -> None:
    """Send an error in the format of the OpenAI API. `param` names the invalid field of the request."""
    await send_json(send, status, error_body(status, message, param), **headers)


def error_body(status: int, message: str, param: str | None = None) -> dict:
    """Return the JSON body of an error response."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
