"""A tiny model of every architecture, and the files saved with it, for tests of common behavior.

The registry lists the architectures and their kinds. An architecture without a tiny model here uses its smallest
preset, so registering it is enough. `tiny.py`, `tiny_hrm_lm.py`, `tiny_mhc.py`, `tiny_go.py` and `tiny_cosmo.py` have
more models of each kind.
"""

import functools
from collections.abc import Iterable
from pathlib import Path

import pytest
import tiny
import tiny_cosmo
import tiny_go
import tiny_mhc
import torch

from hrm_hf import (
    CosmoCnnConfig,
    CosmoCnnForRegression,
    CosmoUnetForMassMapping,
    HrmLmConfig,
    HrmLmForCausalLM,
    RlmMhcConfig,
    RlmMhcForCausalLM,
    registry,
)
from hrm_hf.puzzles.dataset import IDENTIFIERS_FILE
from hrm_hf.text.byte_tokenizer import byte_tokenizer


ROWS = {row.model_type: row for row in registry.ARCHITECTURES.values()}
PUZZLES, CAUSAL_LMS, REGRESSORS, MASS_MAPPERS = (
    tuple(name for name, row in ROWS.items() if row.pipeline == pipeline)
    for pipeline in ("puzzle-solving", "text-generation", "cosmology-regression", "mass-mapping")
)
OF_MAPS = (*REGRESSORS, *MASS_MAPPERS)  # both predict posteriors of parameters
ARCHITECTURES = (*PUZZLES, *CAUSAL_LMS, *OF_MAPS)
EXPORTED = tuple(name for name in ARCHITECTURES if ROWS[name].exporter)
# The Auto class of the head that `model` builds; a process without the package knows it too.
AUTO_CLASSES = {name: row.head_auto_classes[0].__name__ for name, row in ROWS.items()}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": 256}
# Variants of the tiny model, as fields of its config.
VARIANTS = {
    "trm_puzzle": {"mlp": tiny.MLP},
    "se_rrm_puzzle": {
        "symbols apart": {"equivariant_symbols": False},
        "units": {
            **tiny.MEANS,
            "mixing": "units",
            "pooling": "softmax",
            "special_symbols": False,
            "puzzle_emb_ndim": 0,
        },
        "mlp": {**tiny.MEANS, "mixing": "mlp_t", "position_intermediate_size": 24},
        "neighbours": {**tiny.MEANS, "mixing": "neighbours", "equivariant_symbols": False, "puzzle_emb_ndim": 33},
    },
    "hrm_lm": {"one segment": {"halt_max_steps": 1}},
    "rlm_mhc": tiny_mhc.VARIANTS,
    "hrm_go_coder": tiny_go.VARIANTS,
    "hrm_cosmo": {"mixture": {"num_components": 3}, "patch": {"stem": "patch", "pos_encodings": "learned"}},
    "cosmo_cnn": {"mixture": {"num_components": 3}},
    "hrm_mass_mapping": {
        "mixture": {"num_components": 3},
        "patch": {"stem": "patch", "pos_encodings": "learned", "padding_mode": "zeros"},
    },
    "cosmo_unet": {"mixture": {"num_components": 3}, "edges": {"padding_mode": "zeros"}},
}


def model(architecture: str, seed: int = 0, **overrides):
    """Return a seeded model with its head in eval mode; `overrides` are config fields."""
    torch.manual_seed(seed)
    if architecture in TINY:
        return TINY[architecture](seed, overrides).eval()
    row = ROWS[architecture]
    return row.head(row.config.from_preset(smallest_preset(architecture), **overrides)).eval()


@functools.cache
def smallest_preset(architecture: str) -> str:
    """Return the preset with the fewest parameters."""
    row = ROWS[architecture]

    def parameters(name: str) -> int:
        with torch.device("meta"):
            return row.head(row.config.from_preset(name)).num_parameters()

    return min(row.config.presets(), key=parameters)


def wake(built):
    """Give a model large seeded weights and open gates, so that every token and part affects the output."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("scale"):
                parameter.fill_(1.0)
            elif parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return built


def with_variants(architectures: Iterable[str]):
    """Parametrize a test over architectures and the config fields of their variants."""
    pairs = {name: (name, {}) for name in architectures}
    for name in architectures:
        pairs |= {f"{name}-{variant}": (name, fields) for variant, fields in VARIANTS.get(name, {}).items() if fields}
    return pytest.mark.parametrize(("architecture", "fields"), pairs.values(), ids=pairs)


@functools.cache
def _config(architecture: str):
    with torch.random.fork_rng():
        return model(architecture).config


def inputs(architecture: str, rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of the forward, without labels."""
    generator, config = torch.Generator().manual_seed(seed), _config(architecture)
    if architecture in PUZZLES:
        return {name: value for name, value in tiny.batch(rows, seed, config).items() if name != "labels"}
    if architecture in OF_MAPS:
        shape = (rows, config.num_channels, config.image_size, config.image_size)
        maps = torch.randn(shape, generator=generator)
        return {"pixel_values": tiny_cosmo.masked(maps) if config.mask_channel else maps}
    return {"input_ids": torch.randint(*_tokens(architecture), (rows, 24), generator=generator)}


def padded(architecture: str, side: str = "left") -> dict[str, torch.Tensor]:
    """Return padded texts of several lengths: `input_ids` and `attention_mask`."""
    if architecture == "hrm_go_coder":
        return tiny_go.batch(tiny_go.REPAIRED, tiny_go.ONE_ATTEMPT, tiny_go.PLAIN, side=side)
    ids = inputs(architecture, rows=3)["input_ids"]
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 15, 7)):
        place = slice(0, missing) if side == "left" else slice(ids.shape[1] - missing, None)
        ids[row, place], mask[row, place] = _config(architecture).pad_token_id or 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _tokens(architecture: str) -> tuple[int, int]:
    """Return the range [first, end) of ordinary text tokens."""
    size = _config(architecture).vocab_size
    if architecture == "hrm_go_coder":
        return 64, size
    return (97, 123) if size >= 123 else (0, size)  # letters of the byte tokenizer


def labels(architecture: str, rows: int = 2, seed: int = 1) -> torch.Tensor:
    """Return the `labels` for the `inputs` with the same rows and seed."""
    if architecture in PUZZLES:
        return tiny.batch(rows, seed, _config(architecture))["labels"]
    if architecture in OF_MAPS:
        return torch.tensor([[0.3, 0.8]]).repeat(rows, 1)
    return inputs(architecture, rows, seed)["input_ids"]


def targets(architecture: str, rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return all targets of the loss: `labels`, and the true maps for models that predict maps."""
    found = {"labels": labels(architecture, rows, seed)}
    if architecture in MASS_MAPPERS:
        config, generator = _config(architecture), torch.Generator().manual_seed(seed)
        shape = (rows, config.num_planes, config.image_size, config.image_size)
        found["kappa"] = config.kappa_std[0] * torch.randn(shape, generator=generator)
    return found


def processor(architecture: str):
    """Return the tokenizer or feature extractor, or None for puzzles."""
    if architecture in PUZZLES:
        return None
    if ROWS[architecture].feature_extractor:
        return ROWS[architecture].feature_extractor.from_config(_config(architecture))
    return tiny_go.tokenizer() if architecture == "hrm_go_coder" else byte_tokenizer()


def save(architecture: str, folder: str | Path, seed: int = 0, **options) -> Path:
    """Save a checkpoint as training scripts do, but without results; `options` are for save_pretrained."""
    folder = Path(folder)
    model(architecture, seed).save_pretrained(folder, **options)
    if (beside := processor(architecture)) is not None:
        beside.save_pretrained(folder)
    else:
        (folder / IDENTIFIERS_FILE).write_text('["<blank>", "a", "b", "c", "d"]')
    return folder


def _hrm_lm(overrides: dict) -> HrmLmForCausalLM:
    fields = {"vocab_size": len(byte_tokenizer()), "num_h_layers": 1, "num_l_layers": 1, "halt_max_steps": 3, **WIDTHS}
    built = HrmLmForCausalLM(HrmLmConfig(**{**fields, **overrides}))
    if built.model.q_head is not None:
        with torch.no_grad():  # so that tokens halt after different numbers of segments
            built.model.q_head.weight.normal_()
            built.model.q_head.bias.zero_()
    return built


def _rlm_mhc(overrides: dict) -> RlmMhcForCausalLM:
    fields = {"vocab_size": len(byte_tokenizer()), "num_hidden_layers": 2, "num_key_value_heads": 2, **WIDTHS}
    return RlmMhcForCausalLM(RlmMhcConfig(**{**fields, **overrides}))


def _cosmo_cnn(overrides: dict) -> CosmoCnnForRegression:
    fields = {"prior_bounds": tiny_cosmo.PRIOR, "pixel_mean": [0.5], "pixel_std": [2.0], **overrides}
    return CosmoCnnForRegression(CosmoCnnConfig.from_preset("test", **fields))


def _cosmo_unet(seed: int, overrides: dict) -> CosmoUnetForMassMapping:
    built = tiny_cosmo.mass_mapper(CosmoUnetForMassMapping, seed, **{"hidden_sizes": [8, 16], **overrides})
    with torch.no_grad():  # otherwise features of maps would differ by little more than rounding
        built.posterior_head.hidden.weight.mul_(5)
    return built


TINY = {
    "hrm_puzzle": lambda seed, fields: tiny.model("hrm", seed, **fields),
    "se_rrm_puzzle": lambda seed, fields: tiny.se_rrm(seed, **fields),
    "trm_puzzle": lambda seed, fields: tiny.model("trm", seed, **fields),
    "hrm_lm": lambda seed, fields: _hrm_lm(fields),
    "rlm_mhc": lambda seed, fields: _rlm_mhc(fields),
    "hrm_go_coder": lambda seed, fields: tiny_go.model(seed, awake=True, **fields),
    "hrm_cosmo": lambda seed, fields: tiny_cosmo.model(seed, **fields),
    "cosmo_cnn": lambda seed, fields: _cosmo_cnn(fields),
    "hrm_mass_mapping": lambda seed, fields: tiny_cosmo.mass_mapper(seed=seed, **fields),
    "cosmo_unet": _cosmo_unet,
}
