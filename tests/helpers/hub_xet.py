"""The Xet content store of the loopback Hub: what the hf_xet client uploads to and downloads from over HTTP.

Xet cuts files into chunks and packs them into xorbs; a shard tells which chunks of which xorbs make up a file. The
store keeps both as they come and answers with the reconstruction of a file. It reads the two formats only as far as
that needs (Xet protocol specification, "Shard Format" and "Xorb Format"), and leaves decoding to hf_xet itself.

Left out: global deduplication between clients, and checking a xorb's hash. A file's bytes are checked against its
SHA-256 before a commit may name it.
"""

import json
import os
import secrets
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hub_storage import HubError, Storage


LINE = 48  # bytes of every record of a shard; its header is one too
FILE_FLAGS = {"verification": 1 << 31, "metadata": 1 << 30}  # extra records that follow those of a file
END_OF_FILES = b"\xff" * 32
TOKEN_SECONDS = 3600
DOWNLOAD = f"""
import json, sys, time, hf_xet
asked = json.loads(sys.argv[1])
access = {{"token": asked["token"], "token_expiry_unix_secs": int(time.time()) + {TOKEN_SECONDS}}}
with hf_xet.XetSession().new_file_download_group(endpoint=asked["endpoint"], **access) as group:
    for name, size, destination in asked["files"]:
        group.start_download_file(hf_xet.XetFileInfo(name, size), destination)
"""


@dataclass(frozen=True)
class Term:
    """A run of chunks [first, end) of a xorb, and how many bytes of the file they hold."""

    xorb: str
    first: int
    end: int
    size: int


class Xet:
    """Xorbs and shards below the folder of `storage`; `url` is the address of the Hub."""

    def __init__(self, storage: Storage, url: str):
        self.storage, self.url = storage, f"{url}/cas"
        self.tokens = {name: f"xet_{name}_{secrets.token_hex(8)}" for name in ("read", "write")}
        self.files: dict[str, list[Term]] = {}  # Xet hash of a file -> its terms
        self.hashes: dict[str, str] = {}  # SHA-256 -> Xet hash
        for name in ("xorbs", "shards"):
            (storage.folder / name).mkdir(exist_ok=True)
        for shard in (storage.folder / "shards").iterdir():
            self._read_shard(shard.read_bytes())

    def token_headers(self, name: str) -> dict[str, str]:
        """Where the store is and with which token; `name` is "read" or "write"."""
        expiry = str(int(time.time()) + TOKEN_SECONDS)
        return {"X-Xet-Cas-Url": self.url, "X-Xet-Access-Token": self.tokens[name], "X-Xet-Token-Expiration": expiry}

    def authorise(self, command: str, authorization: str | None) -> None:
        allowed = [self.tokens["write"]] if command == "POST" else list(self.tokens.values())
        if (authorization or "").removeprefix("Bearer ") not in allowed:
            raise HubError(401, "Invalid token for the content store")

    def xorb(self, xorb_hash: str) -> Path:
        file = self.storage.object(xorb_hash, "xorbs")
        if not file.is_file():
            raise HubError(404, f"Xorb {xorb_hash} does not exist")
        return file

    def put_xorb(self, xorb_hash: str, content: bytes) -> bool:
        """Stores a xorb; False where it was there."""
        file = self.storage.object(xorb_hash, "xorbs")
        new = not file.exists()
        incoming = self.storage.incoming()
        incoming.write_bytes(content)
        incoming.replace(file)
        return new

    def put_shard(self, content: bytes) -> int:
        """Registers the files of a shard; 1 (the protocol's word for "registered")."""
        with self.storage.lock:
            self._read_shard(content)
            (self.storage.folder / "shards" / f"{secrets.token_hex(16)}.mdb").write_bytes(content)
        return 1

    def _read_shard(self, content: bytes) -> None:
        """The first section of a shard: for each file a header, its terms, their proofs, and its SHA-256."""
        at = LINE
        while content[at : at + 32] != END_OF_FILES:
            flags, count = struct.unpack_from("<II", content, at + 32)
            if not flags & FILE_FLAGS["metadata"]:
                raise HubError(400, "Shard without the SHA-256 of a file")
            file_hash = _hash_name(content, at)
            terms = [_read_term(content, at + LINE * (1 + number)) for number in range(count)]
            for term in terms:
                self.xorb(term.xorb)
            at += LINE * (1 + count * (2 if flags & FILE_FLAGS["verification"] else 1))
            self.files[file_hash] = terms
            self.hashes[_hash_name(content, at)] = file_hash
            at += LINE

    def reconstruction(self, file_hash: str, wanted: str | None) -> dict:
        """The terms that cover the bytes of a file asked for, and where to fetch the xorbs they name."""
        if file_hash not in self.files:
            raise HubError(404, f"File {file_hash} does not exist")
        terms, offset = self._covering(self.files[file_hash], wanted)
        return {
            "offset_into_first_range": offset,
            "terms": [
                {"hash": term.xorb, "unpacked_length": term.size, "range": {"start": term.first, "end": term.end}}
                for term in terms
            ],
            "fetch_info": {name: [self._fetch(term) for term in terms if term.xorb == name] for name in _xorbs(terms)},
        }

    def _covering(self, terms: list[Term], wanted: str | None) -> tuple[list[Term], int]:
        """Terms that overlap "bytes=a-b" and how far into the first of them a lies; all without a range."""
        if wanted is None:
            return terms, 0
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        chosen, offset, at = [], 0, 0
        for term in terms:
            if at <= last and first < at + term.size:
                offset = offset if chosen else first - at
                chosen.append(term)
            at += term.size
        if not chosen:
            raise HubError(416, f"Range {wanted} not satisfiable: the file has {at} bytes")
        return chosen, offset

    def _fetch(self, term: Term) -> dict:
        ends = _chunk_ends(self.xorb(term.xorb).read_bytes())
        start = ends[term.first - 1] if term.first else 0
        return {
            "range": {"start": term.first, "end": term.end},
            "url": f"{self.url}/xorbs/{term.xorb}",
            "url_range": {"start": start, "end": ends[term.end - 1] - 1},  # the last byte is included
        }

    def collect(self, wanted: list[str]) -> dict[str, str]:
        """Makes LFS objects of the files among these SHA-256s that came by Xet; returns their Xet hashes.

        So they are readable without Xet too. They are read back through hf_xet, as any client would, and checked.
        """
        found = {sha256: self.hashes[sha256] for sha256 in wanted if sha256 in self.hashes}
        new = {sha256: name for sha256, name in found.items() if not self.storage.object(sha256).is_file()}
        sizes = {sha256: sum(term.size for term in self.files[name]) for sha256, name in new.items()}
        incoming = {sha256: self.storage.incoming() for sha256 in new}
        if new:
            self._download([(new[sha256], sizes[sha256], str(incoming[sha256])) for sha256 in new])
        for sha256 in new:
            self.storage.accept(incoming[sha256], sha256, sizes[sha256])
        return found

    def _download(self, files: list[tuple[str, int, str]]) -> None:
        """Fetches (Xet hash, size, destination) in another process, as hf_xet keeps caches in its home."""
        home = self.storage.folder / "xet_home"
        arguments = json.dumps({"endpoint": self.url, "token": self.tokens["read"], "files": files})
        ended = subprocess.run(
            [sys.executable, "-c", DOWNLOAD, arguments],
            env={**os.environ, "HF_HOME": str(home), "HF_XET_CACHE": str(home / "xet")},
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise HubError(500, f"hf_xet could not read back what it uploaded: {ended.stderr.strip()[-500:]}")


def _hash_name(content: bytes, at: int) -> str:
    """A hash of 32 bytes as Xet writes it: four little-endian numbers in hexadecimal."""
    return "".join(f"{number:016x}" for number in struct.unpack_from("<4Q", content, at))


def _read_term(content: bytes, at: int) -> Term:
    size, first, end = struct.unpack_from("<III", content, at + 36)
    return Term(_hash_name(content, at), first, end, size)


def _xorbs(terms: list[Term]) -> list[str]:
    return sorted({term.xorb for term in terms})


def _chunk_ends(xorb: bytes) -> list[int]:
    """Where each chunk of a xorb ends: a header of 8 bytes (version, stored size in 3, ...), then the stored bytes."""
    ends, at = [], 0
    while at < len(xorb) and xorb[at] == 0:  # version 0; what follows the chunks is a footer that begins otherwise
        at += 8 + int.from_bytes(xorb[at + 1 : at + 4], "little")
        ends.append(at)
    return ends
