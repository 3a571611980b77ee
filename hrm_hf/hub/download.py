"""Bytes from a Hub, never more than were announced.

The library's own download writes whatever comes, and its calls of the Hub's interface read an answer whole, however
long it is. Here an answer of the interface has a limit, a file ends at its stated size, compressed answers are not
taken, and of a refusal only the headers are read. Sessions, redirects, tokens and errors are the library's.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import get_session, hf_raise_for_status, tqdm

from .errors import LONGEST, HubError, printable


LARGEST_ANSWER = 64 * 2**20  # bytes of JSON; a page of a listing has 1,000 files and about 300 KB
BLOCK = 2**16
TRIES = 5  # without a new byte in between
PAUSE = 1.0  # seconds before the next try
LONGEST_PAUSE = 60.0  # that a Hub may ask for
BUSY = (408, 429, 500, 502, 503, 504)  # the status of an answer that may be better the next time
ERROR_HEADERS = ("X-Error-Code", "X-Error-Message", "X-Request-Id", "Retry-After")


def get_json(address: str, headers: dict[str, str], options: dict[str, str] | None = None) -> tuple[Any, str | None]:
    """The answer of an address of the Hub's interface, and the address of the next page if there is one.

    Raises:
        HubError: the answer is no JSON, or longer than `LARGEST_ANSWER`.
        HTTPError: as the library's, after some tries.
    """
    for left in reversed(range(TRIES)):
        try:
            with _answer(address, headers, options) as answer:
                content = bytearray()
                for block in answer.iter_raw(BLOCK):
                    content += block
                    if len(content) > LARGEST_ANSWER:
                        raise HubError(
                            f"the answer of {printable(address, LONGEST)} has more than {LARGEST_ANSWER:,} bytes"
                        )
                following = answer.links.get("next", {}).get("url")
            break
        except HTTPError as error:
            if not left or not _may_pass(error):
                raise
            time.sleep(_pause(error))
    try:
        return json.loads(content), following
    except (ValueError, RecursionError) as error:
        raise HubError(
            f"{printable(address, LONGEST)} did not answer in JSON ({type(error).__name__}); check that HF_ENDPOINT "
            "is the address of a Hub"
        ) from error


def get_file(address: str, headers: dict[str, str], part: Path, size: int, name: str, stop: Event) -> None:
    """Appends to `part` what it lacks of a file of `size` bytes, and goes on where a connection broke.

    Raises:
        HubError: more came than `size`, less came although the answer was whole, or it was compressed.
        HTTPError: as the library's, after some tries without a new byte; what has arrived is kept.
        CancelledError: `stop` was set; what has arrived is kept.
    """
    left = TRIES
    with (
        open(part, "ab") as file,
        tqdm(total=size, initial=file.tell(), unit="B", unit_scale=True, desc=name[-40:]) as bar,
    ):
        while (before := file.tell()) < size:
            wanted = {**headers, "Range": f"bytes={before}-"} if before else headers
            try:
                with _answer(address, wanted) as answer:
                    if before and answer.status_code != 206:  # the whole file is coming
                        left -= 1
                        before = 0
                        file.seek(0)
                        file.truncate()
                        bar.reset()
                    for block in answer.iter_raw(constants.DOWNLOAD_CHUNK_SIZE):
                        if file.tell() + len(block) > size:
                            raise HubError(f"{name} is longer than the {size:,} bytes that the Hub says it has")
                        file.write(block)
                        bar.update(len(block))
                        if stop.is_set():
                            raise CancelledError(name)
                if file.tell() < size:
                    raise HubError(
                        f"{name} ended after {file.tell():,} of the {size:,} bytes that the Hub says it has"
                    )
            except HTTPError as error:
                file.flush()
                left = TRIES if file.tell() > before > 0 else left - 1
                if left < 1 or not _may_pass(error):
                    raise
                time.sleep(_pause(error))


@contextmanager
def _answer(address: str, headers: dict[str, str], options: dict[str, str] | None = None) -> Iterator[Any]:
    """An answer of status 200 or 206 whose body is yet to be read, as it is. What the library raises for any other."""
    headers = {**headers, "Accept-Encoding": "identity"}  # else bytes cannot be counted
    stream = get_session().stream(
        "GET", address, headers=headers, params=options, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    )
    with stream as answer:
        if answer.status_code not in (200, 206):
            # A copy without its body, which could be endless and is not needed: the reason is in the headers.
            kept = {name: answer.headers[name] for name in ERROR_HEADERS if name in answer.headers}
            hf_raise_for_status(type(answer)(answer.status_code, headers=kept, content=b"", request=answer.request))
            raise HubError(f"{printable(address, LONGEST)} answered with status {answer.status_code}, expected 200")
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise HubError(
                f"{printable(address, LONGEST)} came compressed ({printable(encoding, 40)}) though it was asked "
                "for as it is, so its bytes cannot be counted"
            )
        yield answer


def _may_pass(error: HTTPError) -> bool:
    return not isinstance(error, HfHubHTTPError) or error.response.status_code in BUSY


def _pause(error: HTTPError) -> float:
    """Seconds to wait: those that the Hub asks for, up to a minute."""
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return min(float(asked), LONGEST_PAUSE) if asked.isdecimal() else PAUSE
