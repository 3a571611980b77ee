"""A loopback Hub for tests, backed by a folder: the API that huggingface_hub 2.4 and transformers 5.23 use.

Supports repositories of type model, dataset and space; commits, branches and tags; pull requests; LFS uploads;
resumable downloads; private repositories; and tokens with different rights. Answers, error codes and headers match the
Hub's, so clients behave as usual. As on the Hub, a new repository starts with a commit of `.gitattributes`. Tests can
inject faults: connections that are dropped or paused after some bytes, wrong answers (`lie`), and other file contents
(`instead`).

Not supported: the Xet protocol, gated repositories, organizations with members, discussions other than pull requests,
redirects to a content network, multipart uploads, the git protocol, and most validation of model cards (see
`hub_storage.read_card`).
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hub_handler import Account, Handler
from hub_storage import OWNER, Storage


# Variables of the calling process that would make a client use another Hub or home.
FORGOTTEN = (
    "HF_TOKEN HF_TOKEN_PATH HUGGING_FACE_HUB_TOKEN HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_XET_CACHE HF_ASSETS_CACHE "
    "HF_DATASETS_CACHE HF_MODULES_CACHE"
).split()


class _Listener(ThreadingHTTPServer):
    """Accepts connections for a Hub, with one thread each, and tracks the open ones."""

    daemon_threads = True  # an open connection must not block the end of the tests
    request_queue_size = 64

    def __init__(self, hub: "HubServer"):
        self.hub = hub
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), Handler)

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Close connections that clients keep alive, so that a closed Hub stops answering."""
        for connection in list(self.open):
            with suppress(OSError):  # the client may just have closed it
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """Ignore broken connections, which some tests cause; print other errors, which are bugs of this server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@dataclass
class Fault:
    """A fault in the bodies of `times` requests whose path contains `part`, after `after` bytes."""

    part: str
    after: int
    times: int
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event | None = None  # None: drop the connection; otherwise wait for this event, then continue


@dataclass
class Lie:
    """A wrong answer of the Hub to requests whose path contains `part`."""

    part: str
    change: Callable[[Any], Any] | None = None  # of the JSON of the correct answer
    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    body: Iterable[bytes] | None = None  # instead of a file


class HubServer:
    """Serves `folder` on a free port of 127.0.0.1 while the context is open.

    `token` may read and write everything, `read_token` only read. `other_token` belongs to another account, which may
    read public repositories, write its own (`other/...`) and propose changes to others. Requests without a token see
    public repositories. `requests` logs (method, path) and `ranges` (path, Range header) in order of arrival.
    """

    def __init__(self, folder: str | Path, token: str = "hf_test"):
        self.token, self.read_token, self.other_token = token, f"{token}_read", f"{token}_other"
        self.accounts = {
            self.token: Account(OWNER, may_write=True),
            self.read_token: Account(OWNER, may_write=False),
            self.other_token: Account("other", may_write=True),
        }
        self.storage = Storage(Path(folder))
        self.requests: list[tuple[str, str]] = []
        self.ranges: list[tuple[str, str]] = []
        self.grants: dict[str, tuple[str, int]] = {}  # key of an upload address -> SHA-256 and size it is for
        self.faults: list[Fault] = []
        self.lies: list[Lie] = []
        self.lock = threading.Lock()
        self._http = _Listener(self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.release()
        self._http.shutdown()
        self._http.server_close()
        self._http.hang_up()
        self._thread.join()

    def environment(self, home: str | Path, token: bool | str = True) -> dict[str, str]:
        """Return environment variables for a process that uses this Hub, with this token and caches in `home`."""
        chosen = {True: self.token, False: None}.get(token, token)
        kept = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
        return {
            **kept,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            **({"HF_TOKEN": chosen} if chosen else {}),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def files(self, repo: str, revision: str = "main", repo_type: str = "model") -> dict[str, bytes]:
        """Return every file of a revision with its content, as a reader sees it."""
        tree = self.storage.find(repo_type, repo).commit(revision).tree
        return {path: self.storage.content(entry) for path, entry in tree.items()}

    def commits(self, repo: str, repo_type: str = "model", revision: str = "main") -> list[str]:
        """Return the commit shas of a revision, newest first; the last one created the repository."""
        return [commit.sha for commit in self.storage.find(repo_type, repo).history(revision)]

    def cut_after(self, path_contains: str, bytes: int, times: int = 1) -> None:
        """Close the connection after `bytes` of a body, for the next `times` matching requests.

        This is the request's body for PUT and POST, and the response's for GET; a shorter body is unaffected. The URL
        of an LFS upload does not contain the file name: "/upload/" matches any of them.
        """
        self.faults.append(Fault(path_contains, bytes, times))

    def hold(self, path_contains: str, bytes: int = 1) -> threading.Event:
        """Pause the next matching body after `bytes` until `release`; the event is set at the pause."""
        fault = Fault(path_contains, bytes, 1, released=threading.Event())
        self.faults.append(fault)
        return fault.reached

    def lie(self, path_contains: str, change: Callable[[Any], Any] | None = None, **more: Any) -> Lie:
        """Change the JSON, headers or status of every matching answer; see `Lie`."""
        self.lies.append(Lie(path_contains, change, **more))
        return self.lies[-1]

    def instead(self, path_contains: str, body: Iterable[bytes], **headers: str) -> Lie:
        """Send `body` for a file, in as many blocks as the client accepts."""
        return self.lie(path_contains, body=body, headers=headers)

    def lie_for(self, path: str) -> Lie | None:
        """Return the lie for a request for `path`."""
        return next((lie for lie in self.lies if lie.part in path), None)

    def release(self) -> None:
        """Continue every paused body."""
        for fault in self.faults:
            if fault.released:
                fault.released.set()

    def fault_for(self, path: str, start: int, end: int) -> Fault | None:
        """Return the fault within these bytes of the body for `path`, and count it as used."""
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.part in path and start < fault.after <= end:
                    fault.times -= 1
                    return fault
        return None
