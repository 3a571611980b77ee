"""Package the app as a Hub Space: a folder with everything needed to run the app.

hrm_hf is not on PyPI, so the Space contains its source. The requirements are the packages that the app imports, pinned
to the versions installed here. `hrm_hf.hub.push_space` uploads the folder.
"""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from huggingface_hub import SpaceCardData
from huggingface_hub.utils import validate_repo_id

from ..hub import checkpoint_contents
from ..io.model_names import is_path
from ..io.usage import install_command
from . import validate_gradio


# Packages that the tabs import. Those in the last line check Go code without a Go toolchain and read FITS files.
REQUIREMENTS = (
    "torch", "transformers", "accelerate", "huggingface_hub", "safetensors", "numpy", "scipy", "pyyaml", "typer",
    "tqdm", "packaging", "psutil", "matplotlib", "pillow", "gradio", "markdown-it-py",
    "tree-sitter", "tree-sitter-go", "astropy",
)  # fmt: skip
PACKAGE, MODELS = "hrm_hf", "models"
APP = '''"""A demo of trained models, written by `hrm_hf.app.space.write_space`."""

from pathlib import Path

from hrm_hf.app import build_app, launch


HERE = Path(__file__).parent
demo = build_app([{models}], title={title!r})

if __name__ == "__main__":
    launch(demo)
'''
README = """---
{metadata}
---

# {title}

A demo of recursive reasoning models. Each model has its own tab, which shows the answer to a puzzle after each step,
text colored by the number of segments per token, Go code with its plan, verdict and repairs, gains of
hyper-connections, or posteriors of cosmological parameters.

- `app.py` builds the page from {what}.
- `{package}/` is the source of the package (Apache-2.0), which is not on PyPI.
- `requirements.txt` pins the versions that were installed when this Space was created.
"""


def write_space(folder: str | Path, models: list[str], title: str | None = None, embed: bool = False) -> Path:
    """Write a Space that runs the app for `models`, and return its folder.

    Args:
        folder: new or empty folder.
        models: names on the Hub; with `embed` also local checkpoint folders.
        title: title of the Space; the folder's name if None.
        embed: copy the checkpoints of local folders into the Space.

    Raises:
        ValueError: no model, a local folder without `embed`, folders with the same name, or an invalid Hub name.
        FileExistsError: the folder is not empty.
        ImportError: gradio or another requirement is not installed here, so its version is unknown.
    """
    validate_gradio()
    folder = Path(folder)
    if not models:
        raise ValueError("models=[]: must not be empty; pass names on the Hub, or checkpoint folders with embed=True")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; choose a new folder")
    local = {name: Path(name).expanduser() for name in models if is_path(name)}
    if local and not embed:
        raise ValueError(
            f"{next(iter(local))} is a local folder, which a Space cannot read; push it and pass its name on the Hub, "
            "or copy it into the Space with embed=True (--embed)"
        )
    short = [path.resolve().name for path in local.values()]
    if len(set(short)) < len(short):
        raise ValueError(f"two folders have the same name ({', '.join(sorted(short))}); rename one")
    on_hub = [name for name in models if name not in local]
    for name in on_hub:
        validate_repo_id(name)
    title = title or folder.resolve().name
    contents = {path: checkpoint_contents(path, f"{MODELS}/{path.resolve().name}") for path in local.values()}
    requirements = _pins()  # may raise, so it runs before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    for path, found in contents.items():
        _copy(found.files, folder / MODELS / path.resolve().name)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.pyi")
    shutil.copytree(str(files(PACKAGE)), folder / PACKAGE, ignore=ignored)
    shown = [f'str(HERE / "{MODELS}" / {local[x].resolve().name!r})' if x in local else repr(x) for x in models]
    (folder / "app.py").write_text(APP.format(title=title, models=", ".join(shown)), encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    (folder / "README.md").write_text(_readme(on_hub, title), encoding="utf-8")
    return folder


def _copy(contents: dict[str, Path | bytes], target: Path) -> None:
    for name, source in contents.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            (target / name).write_bytes(source)
        else:
            shutil.copyfile(source, target / name)


def _pins() -> str:
    """Return the requirements pinned to the installed versions, without local labels such as +cpu."""
    lines = []
    for name in REQUIREMENTS:
        try:
            lines.append(f"{name}=={version(name).split('+')[0]}\n")
        except PackageNotFoundError as error:
            needed = install_command("app,cosmology,go")
            raise ImportError(f"{name} is not installed, so the Space cannot pin its version: {needed}") from error
    return "".join(lines)


def _readme(on_hub: list[str], title: str) -> str:
    metadata = SpaceCardData(
        title=title, sdk="gradio", sdk_version=version("gradio"), app_file="app.py", license="apache-2.0",
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}", models=on_hub or None,
        colorFrom="blue", colorTo="gray",
    ).to_yaml()  # fmt: skip
    what = " and ".join(f"[{name}](https://huggingface.co/{name})" for name in on_hub) or f"the models in `{MODELS}/`"
    return README.format(metadata=metadata, title=title, what=what, package=PACKAGE)
