"""Export of models to ONNX graphs, together with everything needed to run them without this package.

    export_onnx("runs/sudoku", "sudoku_onnx", check=True)
    OnnxPuzzleSolver("sudoku_onnx").solve(boards)

The graphs come from `graphs.py`. Puzzle models and recurrent regressors halt outside the graphs: the loops are in
`onnx_runtime.py`, which needs only numpy and ONNX Runtime and is copied into the folder. Not supported: generation
with a cache; half precision and quantization, for which ONNX tools can be used on the exported files.
"""

import json
import logging
import shutil
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .._version import __version__
from ..io.files import IDENTIFIERS_FILE
from ..io.usage import validate_extra
from .checkpoint import complete_folder_or_nothing, find_file
from .graphs import Graph, exporter_of, graphs
from .torch_export import compare, describe, export_graph, load_exportable


META_FILE = "onnx.json"
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript")  # packages whose versions are recorded with the graphs
RUNTIME_FILE = "onnx_runtime.py"
COPIED = (
    "config.json", IDENTIFIERS_FILE, "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip


def export_onnx(
    model: str | Path,
    out: str | Path,
    opset: int = 18,
    passes: int | None = None,
    force: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Write all graphs of a model to a folder, or write nothing if the export fails.

    See `ExportOnnx` for the arguments. The folder contains model.onnx (plus model.onnx.data above 1.5 GB),
    config.json, the files of the tokenizer, feature extractor or puzzle identifiers, and onnx.json (inputs, outputs,
    shapes, halting settings). `hrm_cosmo` adds stem.onnx and segment.onnx; models with a loop add onnx_runtime.py.

    Raises:
        FileExistsError: `out` is a file or a folder that is not empty.
        ImportError: a package is missing.
        ValueError: an unsupported architecture, a corrupted checkpoint, or different outputs (with `check`).
    """
    needed = ("onnx", "onnxscript", "onnxruntime")
    validate_extra("onnx", f"ONNX export needs {', '.join(needed)}", *needed)
    with complete_folder_or_nothing(Path(out), force) as unfinished:
        network = load_exportable(str(model), passes)
        parts = graphs(network, passes)
        meta = _meta(network, parts, opset) | ({} if passes is None else {"passes": passes})
        for name, graph in parts.items():
            write_graph(graph, unfinished / f"{name}.onnx", opset, meta)
        (unfinished / META_FILE).write_text(json.dumps(meta, indent=1))
        if exporter_of(network.config, str(model)).has_loop:
            shutil.copyfile(Path(__file__).with_name(RUNTIME_FILE), unfinished / RUNTIME_FILE)
        for name in COPIED:
            if (found := find_file(str(model), name)) is not None:
                shutil.copyfile(found, unfinished / name)
        result = {
            "out": str(out),
            "architecture": network.config.model_type,
            "parameters": network.num_parameters(),
            "opset": opset,
            "files": sorted(file.name for file in unfinished.iterdir()),
            "bytes": sum(file.stat().st_size for file in unfinished.iterdir()),
        }
        if check:
            result |= compare_with_onnxruntime(unfinished, network, passes)
    return result


def write_graph(graph: Graph, file: Path, opset: int, meta: dict[str, Any]) -> None:
    """Write one ONNX file with the metadata `meta`. Raise ValueError if onnx cannot convert it to `opset`."""
    import onnx
    from onnx_ir.passes import common

    logging.disable(logging.WARNING)  # hides warnings about optional packages and constants
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                export_graph(graph), (), dynamo=True, verbose=False, opset_version=opset,
                input_names=list(graph.inputs), output_names=graph.outputs,
                dynamic_shapes=tuple(graph.axes[name] for name in graph.inputs),
            )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    written = program.model.opset_imports[""]
    if written != opset:
        raise ValueError(f"opset={opset}: onnx cannot convert {file.name} from opset {written}; use opset={written}")
    # Remove what the converter adds: repeated copies of transposed weights, and each node's Python stack.
    common.DeduplicateInitializersPass(size_limit=sys.maxsize)(program.model)
    common.ClearMetadataAndDocStringPass()(program.model)
    program.model.metadata_props["hrm_hf"] = json.dumps(meta)
    program.save(file)  # large weights go to a second file
    onnx.checker.check_model(str(file))


def _meta(network: PreTrainedModel, parts: dict[str, Graph], opset: int) -> dict[str, Any]:
    return {
        "architecture": network.config.model_type,
        "parameters": network.num_parameters(),
        "opset": opset,
        "graphs": {f"{name}.onnx": describe(graph) for name, graph in parts.items()},
        "settings": exporter_of(network.config, type(network).__name__).settings_of(network),
        "versions": {"hrm_hf": __version__, **{name: version(name) for name in LIBRARIES}},
    }


def compare_with_onnxruntime(
    folder: str | Path, network: PreTrainedModel, passes: int | None = None
) -> dict[str, Any]:
    """Compare the main graph's outputs, and the step counts of an adaptive loop, with PyTorch's (see `compare`).

    With a loop, the result includes `same_steps`, the fraction of rows that took the same number of steps.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"), providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return [torch.from_numpy(value) for value in found]

    result = compare(network, run, passes=passes)
    exporter = exporter_of(network.config, type(network).__name__)
    if exporter.has_loop:
        result["same_steps"] = exporter.same_steps(folder, network)
    return result
