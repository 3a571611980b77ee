"""`hrm-hf export`: models in the formats of other runtimes."""

import typer

from ..export.options import ExportGguf, ExportOnnx, ExportTorch
from .options import takes
from .report import report, validate_model


app = typer.Typer(no_args_is_help=True, help="Write models in the formats of other runtimes.")


@app.callback()
def export():
    """Write models in the formats of other runtimes."""


@app.command()
@takes(ExportGguf)
def gguf(options: ExportGguf, as_json: bool):
    """Write a GGUF file for llama.cpp, with the tokenizer in it.

    Example: hrm-hf export gguf runs/go-unified --out go-unified.gguf --dtype q8_0
    """
    validate_model(options.model)
    from ..export.gguf import export_gguf

    report(export_gguf(**vars(options)), as_json)


@app.command()
@takes(ExportOnnx)
def onnx(options: ExportOnnx, as_json: bool):
    """Write ONNX graphs, and for adaptive halting a loop that needs ONNX Runtime and numpy only.

    Example: hrm-hf export onnx runs/sudoku_demo --out sudoku_onnx --check
    """
    validate_model(options.model)
    from ..export.onnx import export_onnx

    report(export_onnx(**vars(options)), as_json)


@app.command("torch")
@takes(ExportTorch)
def torch_(options: ExportTorch, as_json: bool):
    """Write a torch.export archive, which torch runs without this package.

    Example: hrm-hf export torch runs/sudoku_demo --out sudoku.pt2 --check
    """
    validate_model(options.model)
    from ..export.torch_export import export_torch

    report(export_torch(**vars(options)), as_json)
