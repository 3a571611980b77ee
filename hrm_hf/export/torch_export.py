"""Export of model graphs (`graphs.py`) to `torch.export` files. `onnx.py` exports the same graphs to ONNX.

    export_torch("runs/sudoku", "sudoku.pt2", check=True)
    step = torch.export.load("sudoku.pt2").module()

Everything is exported in float32 on the CPU, with dynamic batch size and text length.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from ..hub.kinds import load_config
from ..registry import architecture_of
from .checkpoint import complete_or_nothing, load_model
from .graphs import Graph, exporter_of, graphs, random_inputs


META_FILE = "hrm_hf.json"  # file in the .pt2 archive that describes the architecture, inputs and outputs
TOLERANCE = 1e-3  # maximum error relative to an output's largest value; float32 rounding is much smaller


def export_graph(graph: Graph) -> ExportedProgram:
    """Export a graph as a program of ATen operators. Dynamic axes accept any size of at least 1."""
    dims = {name: Dim(name, min=1) for axes in graph.axes.values() for name in axes.values()}
    shapes = tuple({axis: dims[name] for axis, name in graph.axes[key].items()} for key in graph.inputs)
    with torch.no_grad():
        program = torch.export.export(graph.module.eval(), tuple(graph.inputs.values()), dynamic_shapes=shapes)
    # Code in a no_grad or autocast context becomes a nested graph, so search nested graphs too.
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    used = {node.target for part in parts for node in part.graph.nodes} & REPLACED.keys()
    return program.run_decompositions({target: REPLACED[target] for target in used}) if used else program


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the custom operator of `hyper_connections` with operators that every runtime supports."""
    comb, sums = torch.softmax(logits, dim=1) + eps, []
    for step in range(2 * iterations - 1):
        total = comb.sum(dim=step % 2, keepdim=True) + eps
        comb = comb / total
        sums.append(total.squeeze(step % 2))
    return comb, torch.stack(sums)


def _running_maximum(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `cummax` along the last axis of integers [B, T] with T * T comparisons per row."""
    if values.dim() != 2 or dim not in (1, -1):
        raise NotImplementedError(f"cummax along axis {dim} of {values.dim()} axes; expected axis 1 of [B, T]")
    steps = torch.arange(values.shape[1], device=values.device)
    seen = steps.unsqueeze(0) <= steps.unsqueeze(1)
    lowest = torch.iinfo(values.dtype).min
    return torch.where(seen, values.unsqueeze(1), lowest).max(dim=-1)


def _where(condition: torch.Tensor, chosen: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if chosen.dtype != torch.bool:
        return NotImplemented  # makes torch keep `aten.where` for this call
    return (condition & chosen) | (~condition & other)


REPLACED = {
    torch.ops.hrm_hf.sinkhorn.default: _sinkhorn,  # our own operator, unknown to programs without this package
    torch.ops.aten.cummax.default: _running_maximum,  # not an ONNX operator
    torch.ops.aten.where.self: _where,  # ONNX Runtime does not implement `Where` for booleans
}


def load_exportable(model: str, passes: int | None = None) -> PreTrainedModel:
    """Load a checkpoint as `load_model` does, but with float32 weights and activations (no `forward_dtype`)."""
    config = load_config(model)
    exporter_of(config, model, passes)
    if config.to_dict().get("forward_dtype"):
        config.forward_dtype = None
    return load_model(model, architecture_of(config).head_auto_classes[0], config=config, dtype=torch.float32)


def export_torch(
    model: str | Path, out: str | Path, passes: int | None = None, force: bool = False, check: bool = False
) -> dict[str, Any]:
    """Write a model's main graph to a `torch.export` archive. The file appears only once it is complete.

    See `ExportTorch` for the arguments. With `check`, the file is loaded and compared before `out` appears.

    Raises:
        FileExistsError: `out` exists.
        ValueError: a wrong suffix, an unsupported architecture, a corrupted checkpoint, or different outputs (with
            `check`).
    """
    if Path(out).suffix != ".pt2":
        raise ValueError(f"out={out}: must end in .pt2, as torch.export.save and load require")
    with complete_or_nothing(Path(out), force, "model.pt2") as unfinished:
        network = load_exportable(str(model), passes)
        graph = graphs(network, passes)["model"]
        program = export_graph(graph)
        meta = {"architecture": network.config.model_type, **describe(graph)}
        torch.export.save(program, unfinished, extra_files={META_FILE: json.dumps(meta)})
        result = {
            "out": str(out),
            "architecture": network.config.model_type,
            "parameters": network.num_parameters(),
            "inputs": list(graph.inputs),
            "outputs": graph.outputs,
            "bytes": unfinished.stat().st_size,
        }
        if check:
            loaded = torch.export.load(unfinished).module()
            result |= compare(network, lambda inputs: loaded(*inputs.values()), passes=passes)
    return result


def describe(graph: Graph) -> dict[str, Any]:
    """Return the output names, and each input's name, dtype and shape. In shapes, dynamic axes are names."""
    inputs = []
    for name, value in graph.inputs.items():
        shape = [graph.axes[name].get(axis, size) for axis, size in enumerate(value.shape)]
        inputs.append({"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": shape})
    return {"inputs": inputs, "outputs": graph.outputs}


@torch.no_grad()
def compare(network: PreTrainedModel, run: Any, rows: int = 4, passes: int | None = None) -> dict[str, Any]:
    """Compare the outputs `run(inputs)` of the exported main graph with the model's outputs, at a new batch size.

    Raises:
        ValueError: an output differs by more than TOLERANCE times its largest value.
    """
    graph = graphs(network, passes)["model"]
    inputs = random_inputs(network.config, rows, seed=1)
    given = inputs.get("attention_mask", torch.ones(())).bool()  # outputs at padding positions are undefined
    differences, result = {}, {}
    for name, ours, theirs in zip(graph.outputs, graph.module(*inputs.values()), run(inputs), strict=True):
        if given.dim():
            ours, theirs = ours[given], theirs[given]
        differences[name], reach = (
            tensor.abs().max().item() if tensor.numel() else 0.0 for tensor in (ours - theirs, ours)
        )  # SE-RRM's state is an empty tensor, which has no maximum
        if not differences[name] <= TOLERANCE * max(1.0, reach):
            raise ValueError(
                f"the exported graph computes a different {name}: it differs from the model's by up to "
                f"{differences[name]:.3g}, with values up to {reach:.3g}. Nothing was written"
            )
        if name == "logits":
            result["argmax_agreement"] = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return {"max_difference": differences, **result}
