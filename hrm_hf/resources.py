"""Finds the files beside the package: card templates, recipes, training scripts, accelerate's configs, measurements.

In a checkout they are in the folders of the repository, in an installed wheel in `hrm_hf/_resources`, where the build
(`setup.py`) puts copies of the same folders: `resource("training/recipes")` is right in both.
"""

import os
from pathlib import Path


PACKAGE = Path(__file__).parent
INSTALLED = PACKAGE / "_resources"
ROOT = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent


def resource(name: str) -> Path:
    """The file or folder `name`, a path as in the repository.

    Raises:
        FileNotFoundError: it is not there, as in a package that was copied without its resources.
    """
    path = ROOT / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; install the package from its wheel or its checkout (pip install .)"
        )
    return path


def existing_path(path: str | Path) -> Path:
    """`path`; where nothing is there, the resource of that name if there is one: recipes name their data so."""
    path = Path(path)
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def typed_path(path: str | Path) -> str:
    """A path as one would type it: relative to the working directory if it is below that."""
    return os.path.relpath(path) if Path(path).resolve().is_relative_to(Path.cwd()) else str(path)
