"""Read weights from other projects' checkpoints as plain tensors, without running the projects' code.

A file contains either a state_dict or a training state: a state_dict, sometimes averaged weights, and the
configuration of the run. Only tensors and plain values are unpickled. Objects of the classes in INERT (OmegaConf
configurations, NumPy arrays, carries) are reduced to their fields, and any other class is rejected.
"""

import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file


MODEL_ENTRIES = ("model", "model_state_dict", "state_dict")  # possible keys of the state_dict in a training state
INERT = (
    *(f"builtins.{name}" for name in ("dict", "list", "int", "float", "str", "bool")),
    *("collections.defaultdict", "typing.Any", "omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata"),
    *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig"),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *("numpy.ndarray", "numpy.dtype", "models.eqr.ModelCarry", "models.eqr.LatentCarry"),
)


class StoredModel(NamedTuple):
    """Contents of a checkpoint: tensors by name, configuration, and whether the tensors are averaged (EMA)."""

    state: dict[str, torch.Tensor]
    config: dict[str, Any] | None = None
    averaged: bool = False


class _Inert:
    """Placeholder that keeps only the fields of an object whose class is in `INERT`."""

    def __new__(cls, *arguments: Any):
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


def read_stored_model(file: Path, wrappers: re.Pattern) -> StoredModel:
    """Read a model from a safetensors file, a file saved by `torch.save(model.state_dict())`, or a training state.

    If a training state contains averaged weights (`ema`), they replace the weights.

    Args:
        wrappers: pattern of the prefixes that wrapper modules add to names; the prefixes are removed.

    Raises:
        ValueError: the file is corrupted or contains other objects or no tensors, or removing `wrappers` makes two
            names equal.
    """
    content = _load(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} contains {type(content).__name__}; expected a state_dict (tensors by name)")
    model = next((content[name] for name in MODEL_ENTRIES if _is_state_dict(content.get(name))), content)
    if content and not _is_state_dict(model):
        kinds = sorted({type(value).__name__ for value in content.values()})
        raise ValueError(
            f"{file} contains {kinds}; expected a state_dict (tensors by name), or a dict with a state_dict under "
            f"{' or '.join(MODEL_ENTRIES)}"
        )
    state = _unwrapped(model, wrappers, file)
    if model is content:
        return StoredModel(state)
    config = _plain(content.get("config"))
    average = content.get("ema")
    average = average.get("shadow", average) if isinstance(average, dict) else None
    averaged = _is_state_dict(average)
    if averaged:
        state |= _unwrapped(average, wrappers, file)
    return StoredModel(state, config if isinstance(config, dict) else None, averaged)


def _load(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with torch.serialization.safe_globals([(_Inert, name) for name in INERT]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is not a plain state_dict: it is corrupted, or contains Python objects, which are never loaded "
            f"because they can run code. Expected torch.save(model.state_dict()). ({str(error).splitlines()[0]})"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{file} cannot be read: truncated or corrupted; download it again. ({error})") from error


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, torch.Tensor) for each in value.values())


def _unwrapped(state: dict[str, torch.Tensor], wrappers: re.Pattern, file: Path) -> dict[str, torch.Tensor]:
    unwrapped = {wrappers.sub("", str(name)): tensor for name, tensor in state.items()}
    if len(unwrapped) < len(state):
        raise ValueError(
            f"{file}: after removing prefixes {wrappers.pattern}, several tensors have the same name: {sorted(state)}"
        )
    return unwrapped


def _plain(value: Any) -> Any:
    """Convert a stored configuration to dicts, lists, strings and numbers. Other values become None."""
    if isinstance(value, _Inert):  # the stand-in for an OmegaConf node
        return _plain(value.fields.get("_content", value.fields.get("_val")))
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float)) else None
