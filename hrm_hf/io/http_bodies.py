"""How much may be sent: the body of a request, bounded in bytes and in the time it takes, however it is sent.

A length in the header is checked before a byte is read; without one (chunked transfer) bytes are counted as they come.
"""

import time
from asyncio import wait_for

from .http_hosts import send_error


DISCARDED = 8  # times the limit that is read and thrown away before the connection is closed


class BodyRefused(Exception):  # noqa: N818 - an answer to a request, not a failure of the server
    """A body that is too large or too slow; `status` is that of the answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class BoundedBody:
    """A `receive` of ASGI that stops at a number of bytes or seconds.

    Args:
        scope, receive: of the request. limit: most bytes. seconds: most time until the last byte.
        option: the flag that raises the limit, for the message.
    """

    def __init__(self, scope, receive, limit: int, seconds: float, option: str):
        self.receive, self.limit, self.seconds, self.option = receive, limit, seconds, option
        self.read, self.complete, self.refused = 0, False, None
        self.until = time.monotonic() + seconds
        self.stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")

    async def __call__(self) -> dict:
        """The next message. Raises BodyRefused, then and ever after."""
        if self.refused is not None:
            raise self.refused
        if self.complete:
            return await self.receive()
        if self.stated.isdigit() and int(self.stated[:18]) > self.limit:
            await self._refuse(413, f"the body has {int(self.stated[:18]):,} bytes")
        try:
            message = await wait_for(self.receive(), max(0.001, self.until - time.monotonic()))
        except TimeoutError:
            came = f"{self.read:,} bytes did"
            await self._refuse(
                408, f"the body did not arrive within {self.seconds:g} seconds ({came}); send it faster"
            )
        if message["type"] != "http.request":
            return message
        self.read += len(message.get("body", b""))
        if self.read > self.limit:
            await self._refuse(413, f"the body has more than {self.limit:,} bytes")
        self.complete = not message.get("more_body", False)
        return message

    async def all(self) -> bytes | None:
        """The body, or None if the client left before its end."""
        parts = []
        while not self.complete:
            message = await self()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
        return b"".join(parts)

    async def _refuse(self, status: int, what: str) -> None:
        limit = f"; the limit is {self.limit:,} bytes, set by {self.option}" if status == 413 else ""
        self.refused = BodyRefused(status, f"{what}{limit}")
        if status == 413:
            await self._discard()
        raise self.refused

    async def _discard(self) -> None:
        """Reads on for a while and keeps nothing: a client that still sends would not see the answer."""
        most, read = DISCARDED * self.limit, 0
        while read < most:
            try:
                message = await wait_for(self.receive(), max(0.001, self.until - time.monotonic()))
            except TimeoutError:
                return
            read += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return


class BodyLimit:
    """Middleware that bounds the bodies of an app which reads them itself.

    Args:
        limit: bytes of a request, and what sets it. upload_path: end of the path that files are sent to.
        upload_limit: the same there. seconds: until the last byte.
    """

    def __init__(self, app, limit: tuple[int, str], upload_path: str, upload_limit: tuple[int, str], seconds: float):
        self.app, self.limit, self.seconds = app, limit, seconds
        self.upload_path, self.upload_limit = upload_path, upload_limit

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        is_upload = scope["path"].rstrip("/").endswith(self.upload_path)
        limit, option = self.upload_limit if is_upload else self.limit
        body = BoundedBody(scope, receive, limit, self.seconds, option)
        answered = False

        async def answer(message) -> None:
            # An app that cannot read its body answers so in its own words; these say why.
            nonlocal answered
            if body.refused is None:
                await send(message)
            elif not answered:
                answered = True
                await send_error(send, body.refused.status, str(body.refused), connection="close")

        try:
            await self.app(scope, body, answer)
        except BodyRefused as error:
            if not answered:
                await send_error(send, error.status, str(error), connection="close")
