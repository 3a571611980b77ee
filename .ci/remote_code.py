"""A new model of every architecture, with the package and then without it; `release_check.py` runs both.

python remote_code.py save FOLDER      where hrm_hf is installed: checkpoints, and what their heads compute
python remote_code.py load FOLDER      where it is not: the same, by the code that each checkpoint carries
"""

import importlib.util
import sys
from pathlib import Path

import torch
import transformers


# Of cosmology, whose presets leave them to the data.
DATA_FIELDS = {"prior_bounds": [[0.1, 0.5], [0.6, 1.0]], "pixel_mean": [0.0], "pixel_std": [1.0]}
TOLERANCE = 1e-4  # weights that are mapped from a file lie elsewhere in memory, and kernels may sum in another order


def save(folder: Path) -> None:
    """Save the smallest preset of each architecture with its inputs and logits."""
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
    """Two rows of what a model of this config takes."""
    if hasattr(config, "image_size"):
        return {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
    length = getattr(config, "seq_len", None) or 16
    return {"input_ids": torch.randint(1, config.vocab_size, (2, length))}


def logits_of(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Seeded: some models start from random states."""
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**inputs).logits


def load(folder: Path) -> None:
    """Raise AssertionError if the package can be imported, or if a model's outputs differ."""
    assert importlib.util.find_spec("hrm_hf") is None, "hrm_hf can still be imported"
    files = sorted(folder.glob("*.pt"))
    for file in files:
        known = torch.load(file, weights_only=True)
        auto_class = getattr(transformers, known["auto_class"])
        model = auto_class.from_pretrained(file.with_suffix(""), trust_remote_code=True).eval()
        print(file.stem, flush=True)
        torch.testing.assert_close(logits_of(model, known["inputs"]), known["logits"], atol=TOLERANCE, rtol=TOLERANCE)
    print(f"{len(files)} architectures loaded without the package, with equal results")


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
