"""Fetch transformers' own common tests: `python tests/upstream/fetch.py`.

They are not in the wheel. The installed version's source distribution on the package registry has
`tests/test_modeling_common.py` and its siblings, but not the subfolders of `tests/` that they import; `stand_ins/`
supplies these. The tests are unpacked to `.cache/` under a package name that differs from our own `tests/`. Nothing
else of the distribution is kept, and nothing is built.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path


PACKAGE = "transformers_tests"  # the tests use relative imports, so any name works

# A folder with this name in a later entry of sys.path supplies missing modules.
INIT = "from pkgutil import extend_path\n\n__path__ = extend_path(__path__, __name__)\n"


def cache_folder() -> Path:
    """Return the folder for `sys.path`: one per version of transformers, next to our own tests."""
    return Path(__file__).parents[2] / ".cache" / f"transformers-{version('transformers')}"


def is_fetched() -> bool:
    return (cache_folder() / PACKAGE / "__init__.py").is_file()


def download(folder: Path) -> Path:
    """Download the source distribution of the installed transformers with pip."""
    wanted = f"transformers=={version('transformers')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    done = subprocess.run([*command, "--dest", str(folder), wanted], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{done.stderr}\npip could not download the source distribution of {wanted}. Is the package registry "
            "within reach (pip config list)? By hand: python tests/upstream/fetch.py transformers-X.Y.Z.tar.gz"
        )
    return next(folder.glob("transformers-*.tar.gz"))


def unpack(archive: Path) -> Path:
    """Replace the cached tests with those of an archive; that of a full checkout has the subfolders too."""
    target = cache_folder()
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as tar:
            members = [member for member in tar.getmembers() if member.name.split("/")[1:2] == ["tests"]]
            tar.extractall(scratch, members, filter="data")
        found = list(Path(scratch).glob("*/tests/test_modeling_common.py"))
        if len(found) != 1:
            raise SystemExit(
                f"{archive} holds {len(found)} tests/test_modeling_common.py, expected 1 as in transformers"
            )
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(found[0].parent, target / PACKAGE)
    (target / PACKAGE / "__init__.py").write_text(INIT)
    return target


def main() -> None:
    if sys.argv[1:]:
        print(f"unpacked into {unpack(Path(sys.argv[1]))}")
    elif is_fetched():
        print(f"already there: {cache_folder()}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(f"unpacked into {unpack(download(Path(folder)))}")


if __name__ == "__main__":
    main()
