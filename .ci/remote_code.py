"""Save a new model of every architecture; load it where the package is not installed (see `release_check.py`).

python remote_code.py save FOLDER      # with hrm_hf installed: save checkpoints, and the logits of their heads
python remote_code.py load FOLDER      # without hrm_hf: compare the logits, using each checkpoint's remote code
"""

import importlib.util
import sys
from pathlib import Path

import torch
import transformers


# Config fields of the cosmology models that their presets leave to the training data.
DATA_FIELDS = {"prior_bounds": [[0.1, 0.5], [0.6, 1.0]], "pixel_mean": [0.0], "pixel_std": [1.0]}
TOLERANCE = 1e-4  # mapping weights from a file changes their alignment, so kernels may sum in a different order


def save(folder: Path) -> None:
    """Save a model of each architecture's smallest preset, with inputs and logits."""
    from hrm_hf.registry import ARCHITECTURES

    for row in ARCHITECTURES.values():
        torch.manual_seed(0)
        fields = DATA_FIELDS if row.feature_extractor else {}
        presets = [row.config.from_preset(name, **fields) for name in row.config.presets()]
        model = row.head(min(presets, key=lambda config: parameters(row.head, config))).eval()
        model.save_pretrained(folder / row.model_type)
        inputs = inputs_of(model.config)
        found = {"auto_class": row.head_auto_classes[0].__name__, "inputs": inputs, "logits": logits_of(model, inputs)}
        torch.save(found, folder / f"{row.model_type}.pt")
    print(f"{len(ARCHITECTURES)} architectures saved")


def parameters(head, config) -> int:
    """Count the parameters of a model without allocating them."""
    with torch.device("meta"):
        return head(config).num_parameters()


def inputs_of(config) -> dict[str, torch.Tensor]:
    """Return two rows of random inputs for a model with this config."""
    if hasattr(config, "image_size"):
        return {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
    length = getattr(config, "seq_len", None) or 16
    return {"input_ids": torch.randint(1, config.vocab_size, (2, length))}


def logits_of(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's logits, seeded because some models start from random states."""
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**inputs).logits


def load(folder: Path) -> None:
    """Raise AssertionError if the package can be imported, or if a model's logits differ from the saved ones."""
    assert importlib.util.find_spec("hrm_hf") is None, "hrm_hf can still be imported"
    files = sorted(folder.glob("*.pt"))
    for file in files:
        known = torch.load(file, weights_only=True)
        auto_class = getattr(transformers, known["auto_class"])
        model = auto_class.from_pretrained(file.with_suffix(""), trust_remote_code=True).eval()
        print(file.stem, flush=True)
        torch.testing.assert_close(logits_of(model, known["inputs"]), known["logits"], atol=TOLERANCE, rtol=TOLERANCE)
    print(f"{len(files)} architectures loaded without the package, with equal logits")


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
