"""One tiny model of every architecture, with what is saved beside it: for tests of what all of them must do.

`tiny.py`, `tiny_hrm_lm.py`, `tiny_mhc.py`, `tiny_go.py` and `tiny_cosmo.py` have more of each kind.
"""

from pathlib import Path

import tiny
import tiny_cosmo
import tiny_go
import torch

from hrm_hf import (
    CosmoCnnConfig,
    CosmoCnnForRegression,
    HrmLmConfig,
    HrmLmForCausalLM,
    RlmMhcConfig,
    RlmMhcForCausalLM,
)
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.puzzles.dataset import IDENTIFIERS_FILE
from hrm_hf.text.byte_tokenizer import byte_tokenizer


PUZZLES = ("hrm_puzzle", "trm_puzzle")
CAUSAL_LMS = ("hrm_lm", "rlm_mhc", "hrm_go_coder")
REGRESSORS = ("hrm_cosmo", "cosmo_cnn")
ARCHITECTURES = (*PUZZLES, *CAUSAL_LMS, *REGRESSORS)
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": 256}
# The Auto class whose head `model` builds, known to a process without the package too.
AUTO_CLASSES = {
    **dict.fromkeys(PUZZLES, "AutoModelForMaskedLM"),
    **dict.fromkeys(CAUSAL_LMS, "AutoModelForCausalLM"),
    **dict.fromkeys(REGRESSORS, "AutoModelForImageClassification"),
}


def model(architecture: str, seed: int = 0, **overrides):
    """A seeded model with its head, in eval mode; `overrides` are fields of its config."""
    torch.manual_seed(seed)
    if architecture in PUZZLES:
        return tiny.model(architecture.removesuffix("_puzzle"), seed, **overrides)
    if architecture == "hrm_go_coder":
        return tiny_go.model(seed, awake=True, **overrides)
    if architecture == "hrm_cosmo":
        return tiny_cosmo.model(seed, **overrides).eval()
    if architecture == "cosmo_cnn":
        fields = {"prior_bounds": tiny_cosmo.PRIOR, "pixel_mean": [0.5], "pixel_std": [2.0], **overrides}
        return CosmoCnnForRegression(CosmoCnnConfig.from_preset("test", **fields)).eval()
    return {"hrm_lm": _hrm_lm, "rlm_mhc": _rlm_mhc}[architecture](overrides)


def inputs(architecture: str, rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Keyword arguments of the forward, without labels."""
    generator = torch.Generator().manual_seed(seed)
    if architecture in PUZZLES:
        return {name: value for name, value in tiny.batch(rows, seed).items() if name != "labels"}
    if architecture in REGRESSORS:
        return {"pixel_values": torch.randn(rows, 1, tiny_cosmo.SIZE, tiny_cosmo.SIZE, generator=generator)}
    first, last = (64, tiny_go.VOCAB_SIZE) if architecture == "hrm_go_coder" else (97, 123)  # text, or letters
    return {"input_ids": torch.randint(first, last, (rows, 24), generator=generator)}


def labels(architecture: str, rows: int = 2, seed: int = 1) -> torch.Tensor:
    """What the forward takes as `labels` beside `inputs` of the same rows and seed."""
    if architecture in PUZZLES:
        return tiny.batch(rows, seed)["labels"]
    if architecture in REGRESSORS:
        return torch.tensor([[0.3, 0.8]]).repeat(rows, 1)
    return inputs(architecture, rows, seed)["input_ids"]


def processor(architecture: str):
    """Tokenizer or feature extractor; None for puzzles, which have neither."""
    if architecture in PUZZLES:
        return None
    if architecture in REGRESSORS:
        return CosmoMapFeatureExtractor.from_config(model(architecture).config)
    return tiny_go.tokenizer() if architecture == "hrm_go_coder" else byte_tokenizer()


def save(architecture: str, folder: str | Path, seed: int = 0, **options) -> Path:
    """A whole checkpoint, as a training script leaves it but for results; `options` are those of save_pretrained."""
    folder = Path(folder)
    model(architecture, seed).save_pretrained(folder, **options)
    if (beside := processor(architecture)) is not None:
        beside.save_pretrained(folder)
    else:
        (folder / IDENTIFIERS_FILE).write_text('["<blank>", "a", "b", "c", "d"]')
    return folder


def _hrm_lm(overrides: dict) -> HrmLmForCausalLM:
    fields = {"vocab_size": len(byte_tokenizer()), "num_h_layers": 1, "num_l_layers": 1, "halt_max_steps": 3, **WIDTHS}
    built = HrmLmForCausalLM(HrmLmConfig(**{**fields, **overrides})).eval()
    with torch.no_grad():  # tokens halt after different numbers of segments
        built.model.q_head.weight.normal_()
        built.model.q_head.bias.zero_()
    return built


def _rlm_mhc(overrides: dict) -> RlmMhcForCausalLM:
    fields = {"vocab_size": len(byte_tokenizer()), "num_hidden_layers": 2, "num_key_value_heads": 2, **WIDTHS}
    return RlmMhcForCausalLM(RlmMhcConfig(**{**fields, **overrides})).eval()
