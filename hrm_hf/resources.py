"""Find the files beside the package: card templates, recipes, training scripts, accelerate's configs, measurements.

They are in the folders of a checkout, or in `hrm_hf/_resources` of a wheel, where `setup.py` copies the same folders.
"""

import os
from pathlib import Path


PACKAGE = Path(__file__).parent
INSTALLED = PACKAGE / "_resources"
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent


def resource(name: str) -> Path:
    """Return the file or folder `name`, a path as in the repository."""
    path = ROOT / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; install the package from its wheel or checkout (pip install .)")
    return path


def existing_path(path: str | Path) -> Path:
    """Return `path`, or the resource of that name where only that exists: recipes name their data so."""
    path = Path(path)
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def typed_path(path: str | Path) -> str:
    """Return a path as one would type it: relative to the working directory if it is below that."""
    return os.path.relpath(path) if Path(path).resolve().is_relative_to(Path.cwd()) else str(path)
