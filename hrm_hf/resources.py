"""Find the files that ship with the package: cards, recipes, training scripts, configs, measurements.

In a checkout, they are in the repository's folders. `setup.py` copies these folders to `hrm_hf/_resources` in a wheel.
"""

import os
from pathlib import Path


PACKAGE = Path(__file__).parent
INSTALLED = PACKAGE / "_resources"
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent


def resource(name: str) -> Path:
    """Return the local path of a file or folder from its path in the repository."""
    path = ROOT / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found; install the package from its wheel or checkout (pip install .)")
    return path


def existing_path(path: str | Path) -> Path:
    """Return `path`, or the package's file with this relative path if only that file exists."""
    path = Path(path)
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def typed_path(path: str | Path) -> str:
    """Return the path as a user would type it: relative if it is below the working directory."""
    return os.path.relpath(path) if Path(path).resolve().is_relative_to(Path.cwd()) else str(path)
