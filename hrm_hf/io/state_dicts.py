"""Weights of other projects' checkpoints: read as plain tensors, or refused."""

import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file


def read_state_dict(file: Path, wrappers: re.Pattern) -> dict[str, torch.Tensor]:
    """Tensors by name, from a safetensors file or from `torch.save(model.state_dict())`. Refuses pickled code.

    Args:
        wrappers: what wrapping modules put in front of names, and is removed.

    Raises:
        ValueError: a corrupted file, one that holds more than tensors, or names that coincide without `wrappers`.
    """
    try:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is no plain state_dict: it is corrupted, or holds Python objects, which are never loaded because "
            f"they can run code. Expected torch.save(model.state_dict()). ({str(error).splitlines()[0]})"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{file} cannot be read, it is truncated or corrupted; fetch it again. ({error})") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        kinds = {type(value).__name__ for value in state.values()} if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"{file} holds {kinds}; expected a state_dict, that is tensors by name")
    unwrapped = {wrappers.sub("", str(name)): tensor for name, tensor in state.items()}
    if len(unwrapped) < len(state):
        raise ValueError(f"{file}: tensors coincide once {wrappers.pattern} is removed from {sorted(state)}")
    return unwrapped
