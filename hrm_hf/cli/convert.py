"""`hrm-hf convert`, `retrofit` and `export`: convert checkpoints, and export models to other runtimes."""

from pathlib import Path

import typer

from ..export import ExportGguf, ExportHrmText, ExportOnnx, ExportTorch
from ..puzzles.options import ONLY_OUT, ConvertCheckpoint
from ..text.options import RetrofitOptions
from .command import report, takes, validate_model


app = typer.Typer(no_args_is_help=True, help="Export models to the formats of other runtimes.")


@takes(ConvertCheckpoint)
def convert(options: ConvertCheckpoint, as_json: bool):
    """Convert an original project's checkpoint to our format, or back with --to-original (HRM and TRM only).

    Examples: hrm-hf convert hrm HRM/checkpoints/Sudoku/run --out hrm-sudoku;
    hrm-hf convert eqr locuslab/EqR-model/sudoku-extreme/eqr.pth --out eqr-sudoku
    """
    from ..io.model_names import ModelError, find_model, is_local
    from ..io.usage import as_usage_errors

    src = options.src
    if options.revision is None and not Path(src).exists() and ("/" not in src or is_local(src)):
        raise ModelError(f"{src} does not exist; use a checkpoint folder, or OWNER/NAME on the Hub")
    from ..hub import hub_address, pull_address

    address = as_usage_errors(hub_address, src, options.revision)
    if address is not None:
        find_model(address.repo_id)
        if options.architecture in ONLY_OUT or options.to_original:
            src = pull_address(address)
    if options.architecture in ONLY_OUT:
        from ..text.convert import convert_hrm_text1, convert_rlm_mhc

        converter = convert_hrm_text1 if options.architecture == "hrm_lm" else convert_rlm_mhc
        result = converter(Path(src), options.out)
    elif options.to_original:
        from ..puzzles.convert import convert_to_original

        result = convert_to_original(src, options.out, options.step, options.architecture)
    else:
        from ..puzzles.convert import convert_original

        given = {name: getattr(options, name) for name in ("seq_len", "step", "vocab_size", "config", "revision")}
        result = convert_original(src, options.out, options.architecture, **given)
    report(result, as_json)


@takes(RetrofitOptions)
def retrofit(options: RetrofitOptions, as_json: bool):
    """Turn a pretrained decoder into a looped model to train. With --passes 1, its outputs do not change.

    Example: hrm-hf retrofit HuggingFaceTB/SmolLM2-135M --prelude 12 --loop 4 --coda 14 --passes 4 --out smollm2-looped
    """
    validate_model(options.model)
    from ..text.retrofit import retrofit_decoder

    report(retrofit_decoder(options), as_json)


@app.command()
@takes(ExportGguf)
def gguf(options: ExportGguf, as_json: bool):
    """Export a model and its tokenizer to a GGUF file for llama.cpp.

    Example: hrm-hf export gguf runs/go-unified --out go-unified.gguf --dtype q8_0
    """
    validate_model(options.model)
    from ..export.gguf import export_gguf

    report(export_gguf(**vars(options)), as_json)


@app.command()
@takes(ExportOnnx)
def onnx(options: ExportOnnx, as_json: bool):
    """Export a model to ONNX graphs, plus a halting loop that needs only ONNX Runtime and numpy.

    Example: hrm-hf export onnx runs/sudoku_demo --out sudoku_onnx --check
    """
    validate_model(options.model)
    from ..export.onnx import export_onnx

    report(export_onnx(**vars(options)), as_json)


@app.command("torch")
@takes(ExportTorch)
def torch_(options: ExportTorch, as_json: bool):
    """Export a model to a torch.export archive that torch can run without this package.

    Example: hrm-hf export torch runs/sudoku_demo --out sudoku.pt2 --check
    """
    validate_model(options.model)
    from ..export.torch_export import export_torch

    report(export_torch(**vars(options)), as_json)


@app.command("hrm-text")
@takes(ExportHrmText)
def hrm_text(options: ExportHrmText, as_json: bool):
    """Export an hrm_lm model as transformers' own hrm_text architecture, which needs none of our code.

    Example: hrm-hf export hrm-text runs/loop --out loop-hrm-text --check
    """
    validate_model(options.model)
    from ..export.hrm_text import export_hrm_text

    report(export_hrm_text(**vars(options)), as_json)
