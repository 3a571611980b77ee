"""Model names on command lines: a local folder, or OWNER/NAME on the Hub.

`find_model` reports a missing model immediately, without heavy imports. Libraries would look up any name on the Hub,
even a path, and retry for a minute if there is no connection.
"""

import difflib
import os
from pathlib import Path

from .usage import UsageError


CONFIG, ADAPTER_CONFIG = CONFIGS = ("config.json", "adapter_config.json")  # every model folder has one of them
HUB_SECONDS = 5.0  # timeout of the request that checks whether a model exists on the Hub
EXPECTED = "expected the folder of a model, or OWNER/NAME on the Hub"


class ModelError(UsageError):
    """Raised when a model does not exist or has the wrong type. The message is one line long."""


def is_path(name: str) -> bool:
    """Return whether a name is a local path, not OWNER/NAME on the Hub.

    A path exists, or starts with ".", "/", "~" or a local folder (`runs/...`), or has more than two parts.
    """
    return name.count("/") > 1 or is_local(name)


def is_local(text: str) -> bool:
    """Return whether a path exists, or starts with ".", "/", "~" or a local folder."""
    owner, slash, _ = text.partition("/")
    return text[:1] in "./~" or Path(text).exists() or (bool(slash) and Path(owner).is_dir())


def is_no_folder(name: str) -> bool:
    """Return whether a name is a local path but not a folder. Such a name is not looked up on the Hub."""
    return is_path(name) and not Path(name).is_dir()


def find_model(name: str) -> None:
    """Raise ModelError if no local folder, cached model or model on the Hub has this name.

    Sends one request to the Hub, or none with HF_HUB_OFFLINE.
    """
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / config).is_file() for config in CONFIGS):
            raise ModelError(f"{name} is not a model folder: config.json is missing{_checkpoints(folder)}; {EXPECTED}")
    elif is_path(name):
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{name} {problem}; {EXPECTED}{_nearest(folder)}")
    else:
        _find_on_hub(name)


def _find_on_hub(name: str) -> None:
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if any(isinstance(try_to_load_from_cache(name, config), str) for config in CONFIGS):
            return
        if constants.is_offline_mode():
            raise ModelError(
                f"{name} is neither a local folder nor in the cache of huggingface_hub, and HF_HUB_OFFLINE is set; "
                f"{EXPECTED}"
            )
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_SECONDS)
    except (errors.GatedRepoError, errors.EntryNotFoundError):
        return  # the model exists; loading it will report the error
    except errors.HFValidationError as error:
        raise ModelError(f"{name!r} is neither a local folder nor a valid name on the Hub; {EXPECTED}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is not a local folder, and it does not exist on the Hub; if it is private, run `hf auth login` "
            f"or set HF_TOKEN; {EXPECTED}"
        ) from error
    except (errors.HTTPError, OSError) as error:
        said = " ".join(str(error).split())[:120]
        raise ModelError(
            f"{name} is not a local folder, and the Hub ({constants.ENDPOINT}) cannot be reached "
            f"({type(error).__name__}: {said}); {EXPECTED}"
        ) from error


def _nearest(folder: Path) -> str:
    """Return a hint that names a similar model in the same folder, or ""."""
    above = next((each for each in folder.parents if each.is_dir()), None)
    if above is None or folder.parent != above:
        return ""
    models = [each.name for each in above.iterdir() if any((each / config).is_file() for config in CONFIGS)]
    close = difflib.get_close_matches(folder.name, models, n=1)
    return f". Did you mean {above / close[0]}?" if close else ""


def nearest_file(path: Path, pattern: str, *elsewhere: Path) -> str:
    """Return a hint that names a similar file in the same folder or `elsewhere`, or ""."""
    folders = [folder for folder in (*elsewhere, path.parent) if folder.is_dir()]
    files = {file.stem: file for folder in folders for file in folder.glob(pattern)}
    close = difflib.get_close_matches(path.stem, files, n=1)
    return f"; did you mean {files[close[0]]}?" if close else ""


def _checkpoints(folder: Path) -> str:
    """Return a hint that names the newest checkpoint of an unfinished run, or ""."""
    steps = [each.name for each in folder.glob("checkpoint-*") if (each / CONFIG).is_file()]
    newest = max(steps, key=lambda name: int(name.rpartition("-")[2]) if name[11:].isdecimal() else -1, default=None)
    return f" (its newest checkpoint is {os.path.join(folder, newest)})" if newest else ""
