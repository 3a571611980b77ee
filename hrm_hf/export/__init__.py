"""Models in the formats of other runtimes. Here are the options of `hrm-hf export`; nothing heavy is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..io.options import Options, option


@dataclass(kw_only=True)
class ExportOptions(Options):
    """Options of all formats."""

    model: str = option("Checkpoint folder, or a model on the Hub.", argument=True)
    out: Path = option("File (gguf, torch) or folder (onnx) to write.")
    check: bool = option("Load what was written in its runtime and compare with torch.", False)
    force: bool = option("Overwrite files there.", False)


@dataclass(kw_only=True)
class ExportGguf(ExportOptions):
    """Options of `hrm-hf export gguf`: a Go coder of the preset unified, a Llama or a GPT-2."""

    dtype: Literal["f32", "f16", "bf16", "q8_0"] = option("Type of the matrices; vectors stay f32.", "f16")


@dataclass(kw_only=True)
class ExportOnnx(ExportOptions):
    """Options of `hrm-hf export onnx`."""

    opset: int = option("Version of ONNX's operators.", 18, min=18, max=23)


@dataclass(kw_only=True)
class ExportTorch(ExportOptions):
    """Options of `hrm-hf export torch`."""
