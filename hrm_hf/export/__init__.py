"""Export models to other runtimes. This module defines the options of `hrm-hf export`, without heavy imports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..io.options import Options, option


@dataclass(kw_only=True)
class ExportOptions(Options):
    """Options common to all export formats."""

    model: str = option("Checkpoint folder, or a model on the Hub.", argument=True)
    out: Path = option("Output file (gguf, torch) or folder (onnx, hrm-text).")
    check: bool = option("Load the exported model in its runtime and compare its outputs with PyTorch's.", False)
    force: bool = option("Overwrite existing files.", False)
    passes: int | None = option(
        "Number of segments per token in the exported model (hrm_lm), which then does not halt.", None, min=1
    )


@dataclass(kw_only=True)
class ExportGguf(ExportOptions):
    """Options of `hrm-hf export gguf` for Llama, GPT-2, some `hrm_lm` loops and the Go coder preset `unified`."""

    dtype: Literal["f32", "f16", "bf16", "q8_0"] = option("Data type of weight matrices; vectors stay in f32.", "f16")
    layout: Literal["nanbeige", "hrm_text", "llama"] | None = option(
        "Architecture in llama.cpp. [default: of those that fit the model, the one with the smallest file]", None
    )


@dataclass(kw_only=True)
class ExportOnnx(ExportOptions):
    """Options of `hrm-hf export onnx`."""

    opset: int = option("ONNX opset version.", 18, min=18, max=23)


@dataclass(kw_only=True)
class ExportTorch(ExportOptions):
    """Options of `hrm-hf export torch`."""


@dataclass(kw_only=True)
class ExportHrmText(ExportOptions):
    """Options of `hrm-hf export hrm-text`."""
