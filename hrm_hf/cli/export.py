"""`hrm-hf export`: models in the formats of other runtimes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .report import AsJson, FormerOut, output, report, validate_model


app = typer.Typer(no_args_is_help=True, help="Write models in the formats of other runtimes.")


Dtype = Literal["f32", "f16", "bf16", "q8_0"]  # types of matrices in a GGUF file


@app.callback()
def export():
    """Write models in the formats of other runtimes."""


@app.command()
def gguf(
    model: Annotated[str, typer.Argument(help="Folder or Hub name: Go coder of the preset unified, Llama or GPT-2.")],
    former_out: FormerOut = None,
    out: Annotated[Path | None, typer.Option(help="File to write, such as model.gguf (required).")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the matrices; vectors stay f32.")] = "f16",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Load the file in llama-cpp-python and compare ids and logits.")
    ] = False,
    as_json: AsJson = False,
):
    """Write a GGUF file for llama.cpp, with the tokenizer in it.

    Example: hrm-hf export gguf runs/go-unified --out go-unified.gguf --dtype q8_0
    """
    validate_model(model)
    out = output(out, former_out)
    from ..export.gguf import export_gguf

    report(export_gguf(model, out, dtype=dtype, force=force, check=check), as_json)


@app.command()
def onnx(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    former_out: FormerOut = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write (required).")] = None,
    opset: Annotated[int, typer.Option(min=18, max=23, help="Version of ONNX's operators.")] = 18,
    check: Annotated[bool, typer.Option("--check", help="Compare ONNX Runtime with torch on random input.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files there.")] = False,
    as_json: AsJson = False,
):
    """Write ONNX graphs, and for adaptive halting a loop that needs ONNX Runtime and numpy only.

    Example: hrm-hf export onnx runs/sudoku_demo --out sudoku_onnx --check
    """
    validate_model(model)
    out = output(out, former_out)
    from ..export.onnx import export_onnx

    report(export_onnx(model, out, opset=opset, force=force, check=check), as_json)


@app.command("torch")
def torch_(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    former_out: FormerOut = None,
    out: Annotated[Path | None, typer.Option(help="File to write, ending in .pt2 (required).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read the file back and compare on random input.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: AsJson = False,
):
    """Write a torch.export archive, which torch runs without this package.

    Example: hrm-hf export torch runs/sudoku_demo --out sudoku.pt2 --check
    """
    validate_model(model)
    out = output(out, former_out)
    from ..export.torch_export import export_torch

    report(export_torch(model, out, force=force, check=check), as_json)
