"""Write tiny untrained checkpoints and test data for `quantization.py --quick` and other benchmarks."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from hrm_hf import (
    CosmoCnnConfig,
    CosmoCnnForRegression,
    HrmCosmoConfig,
    HrmCosmoForRegression,
    HrmGoCoderConfig,
    HrmGoCoderForCausalLM,
    HrmLmConfig,
    HrmLmForCausalLM,
    HrmPuzzleConfig,
    HrmPuzzleForSolving,
    RlmMhcConfig,
    RlmMhcForCausalLM,
    TrmPuzzleConfig,
    TrmPuzzleForSolving,
)
from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.golang.data.build import train_on_texts
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.puzzles.dataset import save_puzzle_dataset
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.text.byte_tokenizer import byte_tokenizer

from ..text.models import text_file


TEXT_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "max_position_embeddings": 512}
GO = "func Add{n}(a, b int) int {{\n\treturn a + b + {n}\n}}\n"


def quick_checkpoints(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Write a tiny model of every architecture and its data to `folder`; yield NAME, FOLDER and DATA of each."""
    torch.manual_seed(0)
    yield from puzzle_models(folder)
    yield from text_models(folder)
    yield "hrm_go_coder", *go_coder(folder)
    yield from regressors(folder)


def puzzle_models(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    splits, info = generated_sudoku(4, num_train=16, num_test=16)
    data = save_puzzle_dataset(splits, info, folder / "sudoku")
    fields = {"hidden_size": 64, "num_attention_heads": 2, "L_layers": 1, "halt_max_steps": 4, **info.config_fields()}
    hrm = HrmPuzzleForSolving(HrmPuzzleConfig(H_layers=1, **fields))
    trm = TrmPuzzleForSolving(TrmPuzzleConfig(**fields))
    for model in (hrm, trm):
        yield model.config.model_type, save(model, folder), data


def text_models(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    tokenizer, data = byte_tokenizer(), folder / "text"
    data.write_bytes(bytes(tokenizer.decode(text_file(None, "valid", quick=True)[:8192]), "utf-8"))
    fields = {"vocab_size": len(tokenizer), **TEXT_WIDTHS}
    hrm = HrmLmForCausalLM(HrmLmConfig(num_h_layers=1, num_l_layers=1, halt_max_steps=2, **fields))
    mhc = RlmMhcForCausalLM(RlmMhcConfig(num_hidden_layers=2, num_key_value_heads=2, **fields))
    for model in (hrm, mhc):
        yield model.config.model_type, save(model, folder, tokenizer), data


def go_coder(folder: Path) -> tuple[Path, Path]:
    tokenizer = train_on_texts((GO.format(n=n) for n in range(200)), 400)
    config = HrmGoCoderConfig.from_preset("test", vocab_size=len(tokenizer))
    data = folder / "records.jsonl"
    data.write_text("".join(json.dumps(go_record(n)) + "\n" for n in range(4)))
    return save(HrmGoCoderForCausalLM(config), folder, tokenizer), data


def go_record(n: int) -> dict:
    target = f"func:Add{n}"
    return {
        "id": f"sum.go:{n}", "source": "made up", "licence": "Apache-2.0", "group": "sum",
        "problem": {"title": f"Add{n} returns the sum", "body": ""},
        "context": {"path": "sum.go", "before": "package sum\n"},
        "plan": {"intent": "ADD", "targets": [target], "steps": [{"intent": "ADD", "target": target, "text": "sum"}]},
        "attempts": [], "code_prefix": f"func Add{n}(a, b int) int {{", "solution": {"code": GO.format(n=n)},
    }  # fmt: skip


def regressors(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    data = folder / "maps"
    build_cosmology_dataset(MapSettings(size=16), data, 40, 16, workers=0)
    fields = {"prior_bounds": [[0.1, 0.5], [0.6, 1.0]], "pixel_mean": [0.0], "pixel_std": [0.01]}
    hrm = HrmCosmoForRegression(HrmCosmoConfig.from_preset("test", **fields))
    cnn = CosmoCnnForRegression(CosmoCnnConfig.from_preset("test", **fields))
    for model in (hrm, cnn):
        yield model.config.model_type, save(model, folder, CosmoMapFeatureExtractor.from_config(model.config)), data


def save(model, folder: Path, beside=None) -> Path:
    """Save a checkpoint with its tokenizer or feature extractor."""
    folder = folder / model.config.model_type
    model.save_pretrained(folder)
    if beside is not None:
        beside.save_pretrained(folder)
    return folder
