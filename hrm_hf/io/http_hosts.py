"""Who may ask: a check of the `Host` and `Origin` headers, as ASGI middleware.

A page of somebody else can have its own name resolve to 127.0.0.1 and then read a server there as if it were its own
(DNS rebinding). The browser still says the name in `Host`, so a server that answers to its own names alone is safe. A
page can also send requests to a server that it cannot read; then the browser says the page's address in `Origin`.

Addresses in digits are always right, since they cannot be rebound; so are localhost and names below it.
"""

import ipaddress
import json
import re
from collections.abc import Sequence
from urllib.parse import urlsplit


HEADER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
DEFAULT_PORTS = {"http": "80", "https": "443", "ws": "80", "wss": "443"}


def validate_allowed(names: Sequence[str]) -> list[str]:
    """The names in lower case. Raises ValueError for what is no name of a host, or `*.` before one."""
    for name in names:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9._-]+", name):
            raise ValueError(
                f"--allow-host {name}: expected the name of a host without its port, as demo.example.org, or "
                "*.example.org for all below it"
            )
    return [name.lower() for name in names]


def is_known_host(host: str, allowed: Sequence[str]) -> bool:
    """Whether a host without port is an address in digits, localhost or one of `allowed` (names, or `*.NAME`)."""
    host = host.lower().rstrip(".")
    try:
        ipaddress.ip_address(host.strip("[]"))
        return True
    except ValueError:
        pass  # a name, then
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return any(host.endswith(name[1:]) if name.startswith("*.") else host == name for name in allowed)


def split_host(header: str) -> tuple[str, str | None] | None:
    """Host and port of a header, or None for what is no host."""
    found = HEADER.fullmatch(header)
    return (found[1], found[2] and found[2][1:]) if found else None


class HostGuard:
    """Refuses (403) requests to names that are not this server's, and those that pages of others send.

    Args:
        app: the server behind it.
        allowed: names beside localhost and addresses; pages of these hosts may send requests too.
        any_origin: leave `Origin` to the app (a server with CORS for everybody).
    """

    def __init__(self, app, allowed: Sequence[str] = (), any_origin: bool = False):
        self.app, self.allowed, self.any_origin = app, validate_allowed(allowed), any_origin

    async def __call__(self, scope, receive, send) -> None:
        problem = self.problem(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem[:120]})
        else:
            await send_error(send, 403, problem, code="host_not_allowed")

    def problem(self, scope) -> str | None:
        """Returns the fault in the headers of a request, or None."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or (parts := split_host(hosts[0])) is None:
            return f"the request has the Host header {', '.join(hosts)[:80]!r}; expected one name of this server"
        if not is_known_host(parts[0], self.allowed):
            return (
                f"the request is for the host {parts[0][:80]!r}, which is not known as this server; "
                f"start it with --allow-host {parts[0][:80]} if it is"
            )
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if self.any_origin or not origins:
            return None
        if len(origins) == 1 and self._same(origins[0], parts):
            return None
        return (
            f"the request comes from a page of {', '.join(origins)[:80]!r}, not of this server; "
            "start it with --allow-host and the name of that page's host if it may ask"
        )

    def _same(self, origin: str, host: tuple[str, str | None]) -> bool:
        """Whether an origin is the host that was asked, or one of the allowed names."""
        page = urlsplit(origin)
        named = split_host(page.netloc)
        if page.scheme not in ("http", "https") or named is None:
            return False
        ports = DEFAULT_PORTS.values()
        same_port = (named[1] or DEFAULT_PORTS[page.scheme]) == host[1] or (
            host[1] is None and (named[1] is None or named[1] in ports)
        )
        if named[0].lower() == host[0].lower() and same_port:
            return True
        return any(is_known_host(named[0], [name]) for name in self.allowed) and not is_known_host(named[0], ())


async def send_error(send, status: int, message: str, code: str = "", **headers: str) -> None:
    """An error in the form that clients of the OpenAI API read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code or None}}).encode()
    found = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    found += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": found})
    await send({"type": "http.response.body", "body": body})
