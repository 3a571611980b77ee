"""Routes of the loopback Hub (hub_server.py), with one handler per connection.

Answers, error codes and headers are the Hub's; storage is in hub_storage.py.
"""

import base64
import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import hub_pull_requests as pull_requests
from hub_answers import history, information, listing, paths_information, references
from hub_storage import OWNER, PULL_REQUEST, Commit, HubError, Repository, read_card, upload_mode


KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
BLOCK = 16 * 1024  # bytes per read; faults still hit an exact byte
LFS_JSON = "application/vnd.git-lfs+json"


@dataclass(frozen=True)
class Account:
    """Owner of a request's token, and whether it may write. `OWNER` is a member of every organization."""

    name: str
    may_write: bool

    def owns(self, repo_id: str) -> bool:
        return self.name in (OWNER, repo_id.split("/")[0])


class DroppedError(Exception):
    """Raised to close the connection at once, for a fault or because the client closed it."""


class Handler(BaseHTTPRequestHandler):
    """One connection. Each route's handler answers once, or raises `HubError`, which `_serve` answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format, *arguments):
        """Print nothing to stderr; `HubServer.requests` is the log."""

    def do_GET(self):
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        self.hub = self.server.hub
        self.storage = self.hub.storage
        address = urlsplit(self.path)
        self.route, self.query = unquote(address.path), parse_qs(address.query)
        self.hub.requests.append((self.command, self.route))
        self.unread = int(self.headers.get("Content-Length") or 0)
        try:
            try:
                # Split before decoding: a revision may contain an encoded slash.
                self._dispatch([unquote(part) for part in address.path.strip("/").split("/")])
            except HubError as error:
                self._refuse(error)
            except (KeyError, TypeError, ValueError) as error:
                self._refuse(HubError(400, f"Malformed request: {error!r}"))
        except (DroppedError, ConnectionError):
            self.close_connection = True

    def _dispatch(self, parts: list[str]) -> None:
        match self.command, *parts:
            case "GET", "api", "whoami-v2":
                self._whoami()
            case "POST", "api", "validate-yaml":
                self._validate_yaml()
            case "POST", "api", "repos", "create":
                self._create()
            case "DELETE", "api", "repos", "delete":
                self._delete()
            case _, "api", ("models" | "datasets" | "spaces") as kinds, owner, name, *rest:
                self._repository_api(KINDS[kinds], f"{owner}/{name}", rest)
            case "PUT", "upload", key:
                self._receive_object(key)
            case "POST", *prefix, owner, git_name, "info", "lfs", "objects", "batch" if len(prefix) < 2:
                self._lfs_batch(KINDS[prefix[0]] if prefix else "model", f"{owner}/{git_name.removesuffix('.git')}")
            case "GET" | "HEAD", ("datasets" | "spaces") as kinds, owner, name, "resolve", revision, *path:
                self._resolve(KINDS[kinds], f"{owner}/{name}", revision, "/".join(path))
            case "GET" | "HEAD", owner, name, "resolve", revision, *path:
                self._resolve("model", f"{owner}/{name}", revision, "/".join(path))
            case "GET" | "HEAD", name, "resolve", *_:  # without a namespace, so never found
                self._readable("model", name)
            case "GET", "api", "models", name, *_:
                self._readable("model", name)
            case _:
                raise HubError(404, f"Sorry, this Hub does not know {self.command} {self.route}")

    def _repository_api(self, kind: str, repo_id: str, rest: list[str]) -> None:
        repository = self._readable(kind, repo_id)
        if self.command != "GET" and rest[:1] not in (["paths-info"], ["preupload"], ["commit"], ["discussions"]):
            self._authorise(repository)
        match self.command, *rest:
            case ("GET",):
                self._information(repository, repository.commit("main"))
            case "GET", "revision", revision:
                self._information(repository, repository.commit(revision))
            case "GET", "tree", revision, *folder:
                self._listing(repository.commit(revision), "/".join(folder))
            case "POST", "paths-info", revision:
                self._paths(repository.commit(revision))
            case "GET", "refs":
                self._json(references(repository))
            case "GET", "commits", revision:
                self._json(history(repository, revision))
            case "POST", "branch", name:
                start = self._read_json().get("startingPoint", "main")
                self._change(self.storage.set_reference, kind, repo_id, "branches", name, start)
            case "DELETE", "branch", name:
                self._change(self.storage.set_reference, kind, repo_id, "branches", name, None)
            case "POST", "tag", revision:
                tag = self._read_json()["tag"]
                self._change(self.storage.set_reference, kind, repo_id, "tags", tag, revision)
            case "DELETE", "tag", name:
                self._change(self.storage.set_reference, kind, repo_id, "tags", name, None)
            case "PUT", "settings":
                settings = self._read_json()
                if settings.keys().isdisjoint({"visibility", "private"}):
                    raise HubError(400, f"Only the visibility can be set here, not {sorted(settings)}")
                self._change(self.storage.set_private, kind, repo_id, _wants_private(settings))
            case "POST", "preupload", revision:
                self._authorise(repository, self._sent_to(revision))
                self._json(self._preupload(repository.commit(revision)))
            case "POST", "commit", revision:
                account = self._authorise(repository, self._sent_to(revision))
                self._commit(repository, self._sent_to(revision), account.name)
            case _, "discussions", *more:
                self._discussions(repository, more)
            case _:
                raise HubError(404, f"Sorry, this Hub does not know {self.command} {self.route}")

    # Who may do what

    def _account(self) -> Account | None:
        """Return the owner of the request's token, or None without one; 401 for an unknown token."""
        given = self.headers.get("Authorization")
        if given is None:
            return None
        account = self.hub.accounts.get(given.removeprefix("Bearer "))
        if account is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return account

    def _readable(self, kind: str, repo_id: str) -> Repository:
        account = self._account()
        repository = self.storage.repositories.get((kind, repo_id))
        if repository is None or (repository.private and not (account and account.owns(repo_id))):
            # Without a token the Hub does not tell a missing repository from a private one.
            if account is None:
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository

    def _writer(self) -> Account:
        """Return the account of a write token; 401 or 403 for any other request."""
        account = self._account()
        if account is None:
            raise HubError(401, "Invalid username or password.")
        if not account.may_write:
            raise HubError(403, "You don't have the right to write with this token: it may only read")
        return account

    def _authorise(self, repository: Repository, revision: str | None = "main") -> Account:
        """Check the right to commit to a revision; None is a new pull request, which anybody may open."""
        account = self._writer()
        if revision is None or account.owns(repository.repo_id):
            return account
        if not revision.startswith(PULL_REQUEST):
            raise HubError(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        if pull_requests.find(repository, revision.removeprefix(PULL_REQUEST)).author != account.name:
            raise HubError(403, "Forbidden: this pull request belongs to somebody else")
        return account

    def _sent_to(self, revision: str | None) -> str | None:
        """Return the revision that the request's files go to, None for a new pull request."""
        return None if "create_pr" in self.query else revision

    # Account and repositories

    def _whoami(self) -> None:
        account = self._account()
        if account is None:
            raise HubError(401, "Invalid username or password.")
        token = {"displayName": "test", "role": "write" if account.may_write else "read"}
        auth = {"type": "access_token", "accessToken": token}
        name = account.name
        self._json({"type": "user", "id": name, "name": name, "fullname": name, "orgs": [], "auth": auth})

    def _validate_yaml(self) -> None:
        try:
            card = read_card(self._read_json()["content"])
        except HubError as error:
            self._json({"errors": [{"message": error.message}], "warnings": []}, status=400)
            return
        warnings = [] if card else [{"message": "empty or missing yaml metadata in repo card"}]
        self._json({"errors": [], "warnings": warnings})

    def _named(self, request: dict, account: Account) -> tuple[str, str]:
        return request.get("type", "model"), f"{request.get('organization') or account.name}/{request['name']}"

    def _create(self) -> None:
        account, request = self._writer(), self._read_json()
        kind, repo_id = self._named(request, account)
        if not account.owns(repo_id):
            raise HubError(403, f"You don't have the rights to create a {kind} under this namespace: {repo_id}")
        prefix = "" if kind == "model" else f"{kind}s/"
        address = {"url": f"{self.hub.url}/{prefix}{repo_id}", "name": repo_id}
        try:
            self.storage.create(kind, repo_id, _wants_private(request), request.get("sdk"))
        except HubError as error:
            # The client reads the URL from this answer if an existing repository is fine.
            self._json({**address, "error": error.message}, error.status)
            return
        self._json(address)

    def _delete(self) -> None:
        kind, repo_id = self._named(self._read_json(), self._writer())
        self._authorise(self._readable(kind, repo_id))
        self._change(self.storage.delete, kind, repo_id)

    def _change(self, function, *arguments) -> None:
        function(*arguments)
        self._json({})

    # Listings

    def _information(self, repository: Repository, commit: Commit) -> None:
        card = read_card(self.storage.content(commit.tree["README.md"]).decode()) if "README.md" in commit.tree else {}
        self._json(information(repository, commit, card, blobs="blobs" in self.query))

    def _listing(self, commit: Commit, folder: str) -> None:
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        self._json(listing(commit, folder, recursive))

    def _paths(self, commit: Commit) -> None:
        body = self._read_body().decode()
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        asked = json.loads(body)["paths"] if is_json else parse_qs(body).get("paths", [])
        self._json(paths_information(commit, asked))

    # Uploads

    def _preupload(self, commit: Commit) -> dict:
        answer = []
        for file in self._read_json()["files"]:
            path, known = file["path"], commit.tree.get(file["path"])
            mode = upload_mode(path, file["size"], base64.b64decode(file.get("sample", "")))
            oid = known.object_name if known else None
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answer, "commitOid": commit.sha}

    def _lfs_batch(self, kind: str, repo_id: str) -> None:
        repository, request = self._readable(kind, repo_id), self._read_json()
        self._authorise(repository, request.get("ref", {}).get("name"))
        objects = []
        for wanted in request["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if not self.storage.object(wanted["oid"]).is_file():
                key = secrets.token_hex(16)
                self.hub.grants[key] = (wanted["oid"], wanted["size"])
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/upload/{key}"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects}, content_type=LFS_JSON)

    def _receive_object(self, key: str) -> None:
        """The URL itself grants access, like the Hub's signed URLs: no token is sent."""
        if key not in self.hub.grants:
            raise HubError(403, "Unknown upload address")
        incoming = self.storage.incoming()
        try:
            with open(incoming, "wb") as file:
                for block in self._body_blocks():
                    file.write(block)
        except (DroppedError, ConnectionError):
            incoming.unlink()
            raise
        self.storage.accept(incoming, *self.hub.grants[key])
        self._json({})

    def _commit(self, repository: Repository, revision: str | None, author: str) -> None:
        """Commit to a branch, to a pull request, or (None) to a new pull request."""
        lines = [json.loads(line) for line in self._read_body().splitlines() if line.strip()]
        kind, repo_id = repository.kind, repository.repo_id
        prefix = "" if kind == "model" else f"{kind}s/"
        address, more = f"{self.hub.url}/{prefix}{repo_id}", {}
        if revision is None:
            request = pull_requests.propose(self.storage, kind, repo_id, author, lines)
            sha, more = request.head, {"pullRequestUrl": f"{address}/discussions/{request.number}"}
        elif revision.startswith(PULL_REQUEST):
            number = revision.removeprefix(PULL_REQUEST)
            sha = pull_requests.add_commit(self.storage, kind, repo_id, number, author, lines).sha
        else:
            sha = self.storage.commit(kind, repo_id, revision, lines).sha
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{address}/commit/{sha}", "hookOutput": ""}
        self._json({**answer, **more})

    # Pull requests

    def _discussions(self, repository: Repository, rest: list[str]) -> None:
        if self.command == "GET" and not rest:
            self._json(pull_requests.listing(repository, self.query))
            return
        if self.command == "GET" and len(rest) == 1:
            self._json(pull_requests.details(repository, pull_requests.find(repository, rest[0])))
            return
        kind, repo_id, asked = repository.kind, repository.repo_id, self._read_json()
        match self.command, *rest:
            case ("POST",):
                author = self._authorise(repository, None).name
                if not asked.get("pullRequest"):
                    raise HubError(400, "Only discussions that are pull requests are served here")
                title = asked["title"]
                changed = self.storage.change(kind, repo_id, lambda now: pull_requests.draft(now, author, title))
                self._json({"num": len(changed.pull_requests)})
            case "POST", number, "status":
                author = self._authorise(repository, f"{PULL_REQUEST}{number}").name
                status = asked["status"]
                change = pull_requests.with_status
                changed = self.storage.change(kind, repo_id, lambda now: change(now, number, author, status))
                self._json({"newStatus": pull_requests.find(changed, number).events[-1]})
            case "POST", number, "merge":
                author = self._authorise(repository).name
                self.storage.change(kind, repo_id, lambda now: pull_requests.merged(now, number, author))
                self._json({})
            case _:
                raise HubError(404, f"Sorry, this Hub does not know {self.command} {self.route}")

    # Downloads

    def _resolve(self, kind: str, repo_id: str, revision: str, path: str) -> None:
        lie = self.hub.lie_for(self.route)
        if lie and lie.body is not None:
            self._send_blocks(lie.body)
            return
        commit, entry = self._readable(kind, repo_id).entry(revision, path)
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{entry.object_name}"', "Accept-Ranges": "bytes"}
        if entry.sha256:
            headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
        self._send_file(self.storage.object(entry.object_name), {**headers, **(lie.headers if lie else {})})

    def _send_blocks(self, blocks: Iterable[bytes]) -> None:
        """Send a body of unknown length until it ends or the client disconnects."""
        self.send_response(200)
        for name, value in {**self.hub.lie_for(self.route).headers, "Connection": "close"}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True
        if self.command != "HEAD":
            for block in blocks:
                self.wfile.write(block)

    def _send_file(self, file: Path, headers: dict[str, str]) -> None:
        """Send the file, or the part that a Range header requests."""
        size, wanted = file.stat().st_size, self.headers.get("Range")
        start, end, status = 0, size, 200
        if wanted:
            self.hub.ranges.append((self.route, wanted))
            start, end = _parse_range(wanted, size)
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        self._start(status, end - start, {"Content-Type": "application/octet-stream", **headers})
        if self.command != "HEAD":
            with open(file, "rb") as source:
                source.seek(start)
                for block in self._faulty(_blocks(source, end - start)):
                    self.wfile.write(block)

    # Bodies and answers

    def _faulty(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the blocks of a body, with the fault set for this request."""
        passed = 0
        for block in blocks:
            fault = self.hub.fault_for(self.route, passed, passed + len(block))
            if fault:
                yield block[: fault.after - passed]
                self.wfile.flush()
                fault.reached.set()
                if fault.released is None:
                    raise DroppedError
                fault.released.wait()
                block, passed = block[fault.after - passed :], fault.after
            passed += len(block)
            yield block

    def _body_blocks(self) -> Iterator[bytes]:
        """Yield the request's body and count down `unread`, so that an error knows whether data is left."""

        def received() -> Iterator[bytes]:
            while self.unread:
                block = self.rfile.read1(min(BLOCK, self.unread))
                if not block:
                    raise DroppedError
                self.unread -= len(block)
                yield block

        return self._faulty(received()) if self.command in ("POST", "PUT") else received()

    def _read_body(self) -> bytes:
        return b"".join(self._body_blocks())

    def _read_json(self) -> dict:
        return json.loads(self._read_body() or b"{}")

    def _start(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _json(self, answer, status: int = 200, content_type: str = "application/json", headers: dict | None = None):
        lie = self.hub.lie_for(self.route)
        if lie and status < 400:
            answer = lie.change(answer) if lie.change else answer
            status, headers = lie.status or status, {**(headers or {}), **lie.headers}
        body = json.dumps(answer).encode()
        self._start(status, len(body), {"Content-Type": content_type, **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, error: HubError) -> None:
        for _ in self._body_blocks():  # otherwise the rest of the body would be parsed as the next request
            pass
        headers = {"X-Error-Message": error.message}
        if error.code:
            headers["X-Error-Code"] = error.code
        if error.commit:
            headers["X-Repo-Commit"] = error.commit
        self._json({"error": error.message}, error.status, headers=headers)


def _blocks(source, length: int) -> Iterator[bytes]:
    while length:
        block = source.read(min(BLOCK, length))
        length -= len(block)
        yield block


def _parse_range(header: str, size: int) -> tuple[int, int]:
    """Return the first byte and the exclusive end of "bytes=a-b", "bytes=a-" or "bytes=-n"."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= end:
        raise HubError(416, f"Range {header} not satisfiable: the file has {size} bytes")
    return start, end


def _wants_private(request: dict) -> bool:
    return request.get("visibility") == "private" or request.get("private") is True
