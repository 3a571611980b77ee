"""Models as graphs of tensors, and `torch.export` files of them; `onnx.py` writes the same graphs as ONNX.

    export_torch("runs/sudoku", "sudoku.pt2", check=True)
    step = torch.export.load("sudoku.pt2").module()

A graph has no loop that depends on data, so it is what a loop repeats:

- puzzles: one ACT step; the loop and who halts stay outside;
- `hrm_cosmo`: all segments of halt="fixed", and for adaptive halting two graphs more, stem and segment;
- `cosmo_cnn`: the forward;
- causal language models: the forward without a cache. That of `hrm_lm` runs all segments and freezes a token that
  halts, so logits are those of adaptive halting.

Everything is exported in float32 on the CPU, with batch and text length dynamic. Left out: training, generation with a
cache, the Go coder's refinement head, quantised models.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel

from ..registry import AutoModelForPuzzleSolving
from .checkpoint import load_config, load_model, whole_or_nothing


PUZZLES = ("hrm_puzzle", "trm_puzzle")
REGRESSORS = ("hrm_cosmo", "cosmo_cnn")
CAUSAL_LMS = ("hrm_lm", "rlm_mhc", "hrm_go_coder")
AUTO_CLASSES = {
    **dict.fromkeys(PUZZLES, AutoModelForPuzzleSolving),
    **dict.fromkeys(REGRESSORS, AutoModelForImageClassification),
    **dict.fromkeys(CAUSAL_LMS, AutoModelForCausalLM),
}
POSTERIOR = ("log_weights", "loc", "scale_tril")
META_FILE = "hrm_hf.json"  # inside a .pt2 archive: architecture, inputs, outputs
TOLERANCE = 1e-3  # of the largest value of an output; float32 in another order of sums stays well below


@dataclass
class Graph:
    """A module whose forward takes and returns tensors alone, with what an exporter must know.

    Attributes:
        inputs: example tensors by name, in the order of the forward.
        axes: for each input its dynamic axes and their names.
        outputs: names of what the forward returns.
    """

    module: nn.Module
    inputs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    outputs: list[str]


class PuzzleStep(nn.Module):
    """One ACT step.

    Args of the forward: input_ids int64 [B, S], puzzle_identifiers int64 [B], z_H and z_L [B, T, D], and reset bool
    [B]: a row that is reset starts from the initial states, whatever is in z_H and z_L.
    Returns logits [B, S, V], q_halt_logits and q_continue_logits [B], next_z_H and next_z_L [B, T, D].
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, puzzle_identifiers, z_H, z_L, reset):
        model, reasoner = self.model, self.model.model
        rows = None
        if reasoner.puzzle_emb is not None:  # not its forward, which looks at the identifiers
            rows = F.embedding(puzzle_identifiers, reasoner.puzzle_emb.weight)
        x, rotary = reasoner.embed(input_ids, rows, torch.float32)
        reset = reset.view(-1, 1, 1)
        z_H, z_L = (torch.where(reset, new, old) for new, old in zip(reasoner.fresh_states(x), (z_H, z_L)))
        z_H, z_L = reasoner.reason(x, rotary, z_H, z_L)
        q_halt, q_continue = model.q_values(z_H)
        return model.lm_head(z_H[:, model.config.prefix_len :]), q_halt, q_continue, z_H, z_L


class PosteriorOfMaps(nn.Module):
    """pixel_values [B, C, S, S] to the posterior; names and shapes of the outputs as in `CosmoRegressionOutput`."""

    def __init__(self, model: PreTrainedModel, outputs: list[str]):
        super().__init__()
        self.model, self.fields = model, [field_of(name) for name in outputs]

    def forward(self, pixel_values):
        output = self.model(pixel_values=pixel_values)
        return tuple(output[field] for field in self.fields)


class CosmoStemGraph(nn.Module):
    """pixel_values [B, C, S, S] to tokens [B, tokens, D]."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model.model.embed(pixel_values)


class CosmoSegment(nn.Module):
    """One segment: tokens, z_H, z_L [B, tokens, D] to the posterior, the expected gain halt_logits [B], both states.

    The states are zeros before the first segment.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens, z_H, z_L):
        model, head = self.model, self.model.posterior_head
        states = model.model(tokens=tokens, z_H=z_H, z_L=z_L, return_dict=True)
        posterior = head(states.z_H[:, 0])
        parts = (posterior.log_weights, posterior.loc, posterior.scale_tril)
        return *head.moments(posterior), *parts, model._gain(states.z_H), states.z_H, states.z_L


class LanguageModelForward(nn.Module):
    """input_ids and attention_mask int64 [B, T] to logits [B, T, V]; `hrm_lm` adds halt_steps int64 [B, T]."""

    def __init__(self, model: PreTrainedModel, outputs: list[str]):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids, attention_mask):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return tuple(output[name] for name in self.outputs)


def field_of(output: str) -> str:
    """The field of `CosmoRegressionOutput` behind an output's name."""
    return {"posterior_mean": "logits", "posterior_std": "std"}.get(output, output)


def graphs(model: PreTrainedModel) -> dict[str, Graph]:
    """The graphs of a float32 model in eval mode; "model" is the main one.

    Raises:
        ValueError: another architecture, or a model that is not in float32.
    """
    config = model.config
    require_exportable(config, type(model).__name__)
    if model.training or {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        raise ValueError("the model must be in float32 and in eval mode: model.float().eval()")
    if config.model_type in PUZZLES:
        return {"model": _puzzle_graph(model)}
    if config.model_type in CAUSAL_LMS:
        outputs = ["logits", "halt_steps"] if config.model_type == "hrm_lm" else ["logits"]
        axes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
        return {"model": Graph(LanguageModelForward(model, outputs), random_inputs(config), axes, outputs)}
    posterior, batch = ["posterior_mean", "posterior_std", *POSTERIOR], {0: "batch"}
    outputs = posterior + (["halt_logits"] if config.model_type == "hrm_cosmo" else [])
    maps, axes = random_inputs(config), {"pixel_values": batch}
    found = {"model": Graph(PosteriorOfMaps(model, outputs), maps, axes, outputs)}
    if config.model_type == "hrm_cosmo":
        found["stem"] = Graph(CosmoStemGraph(model), maps, axes, ["tokens"])
        with torch.no_grad():
            tokens = model.model.embed(maps["pixel_values"])
        states = {"tokens": tokens, "z_H": torch.randn_like(tokens), "z_L": torch.randn_like(tokens)}
        names = [*posterior, "halt_logits", "next_z_H", "next_z_L"]
        found["segment"] = Graph(CosmoSegment(model), states, dict.fromkeys(states, batch), names)
    return found


def _puzzle_graph(model: PreTrainedModel) -> Graph:
    inputs = random_inputs(model.config)
    outputs = ["logits", "q_halt_logits", "q_continue_logits", "next_z_H", "next_z_L"]
    return Graph(PuzzleStep(model), inputs, {name: {0: "batch"} for name in inputs}, outputs)


def random_inputs(config: PreTrainedConfig, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Valid inputs of the main graph, seeded. A language model's first row is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    if config.model_type in REGRESSORS:
        shape = (rows, config.num_channels, config.image_size, config.image_size)
        maps = torch.randn(shape, generator=generator)
        if config.mask_channel:
            maps[:, -1] = (maps[:, -1] > -1).float()
        return {"pixel_values": maps}
    if config.model_type in CAUSAL_LMS:
        length = min(24, config.max_position_embeddings)
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, : length // 4] = 0
        return {"input_ids": torch.randint(config.vocab_size, mask.shape, generator=generator), "attention_mask": mask}
    states = (rows, config.max_position_embeddings, config.hidden_size)
    return {
        "input_ids": torch.randint(config.vocab_size, (rows, config.seq_len), generator=generator),
        "puzzle_identifiers": torch.randint(config.num_puzzle_identifiers, (rows,), generator=generator),
        "z_H": torch.randn(states, generator=generator),
        "z_L": torch.randn(states, generator=generator),
        "reset": torch.arange(rows) % 2 == 0,
    }


def export_graph(graph: Graph) -> ExportedProgram:
    """The graph as a program of ATen operators alone, whose dynamic axes take any size of at least 1."""
    dims = {name: Dim(name, min=1) for axes in graph.axes.values() for name in axes.values()}
    shapes = tuple({axis: dims[name] for axis, name in graph.axes[key].items()} for key in graph.inputs)
    with torch.no_grad():
        program = torch.export.export(graph.module.eval(), tuple(graph.inputs.values()), dynamic_shapes=shapes)
    used = {node.target for graph in program.graph_module.modules() for node in _nodes(graph)} & REPLACED.keys()
    return program.run_decompositions({target: REPLACED[target] for target in used}) if used else program


def _nodes(module: nn.Module) -> list[torch.fx.Node]:
    """Of a graph or a part of one: what runs without autocast or gradients is a part of its own."""
    return list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else []


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As the operator in `hyper_connections`, of operators that every runtime has."""
    comb, sums = torch.softmax(logits, dim=1) + eps, []
    for step in range(2 * iterations - 1):
        total = comb.sum(dim=step % 2, keepdim=True) + eps
        comb = comb / total
        sums.append(total.squeeze(step % 2))
    return comb, torch.stack(sums)


def _running_maximum(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`cummax` along the last axis of integers [B, T], with T * T comparisons a row."""
    if values.dim() != 2 or dim not in (1, -1):
        raise NotImplementedError(f"cummax of {values.dim()} axes along axis {dim}; expected [B, T] along the last")
    steps = torch.arange(values.shape[1], device=values.device)
    seen = steps.unsqueeze(0) <= steps.unsqueeze(1)
    lowest = torch.iinfo(values.dtype).min
    return torch.where(seen, values.unsqueeze(1), lowest).max(dim=-1)


def _where(condition: torch.Tensor, chosen: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if chosen.dtype != torch.bool:
        return NotImplemented  # stays as it is
    return (condition & chosen) | (~condition & other)


REPLACED = {
    torch.ops.hrm_hf.sinkhorn.default: _sinkhorn,  # or a file would need this package to be loaded
    torch.ops.aten.cummax.default: _running_maximum,  # which ONNX lacks
    torch.ops.aten.where.self: _where,  # which ONNX Runtime lacks for booleans
}


def require_exportable(config: PreTrainedConfig, model: str) -> None:
    """Raises ValueError for an architecture without graphs, or a quantised model."""
    if config.model_type not in AUTO_CLASSES:
        raise ValueError(f"{model} is a {config.model_type}; exportable are {', '.join(AUTO_CLASSES)}")
    if config.to_dict().get("quantization_config") is not None:
        raise ValueError(f"{model} is quantised; export the checkpoint it was made from, and quantise what you get")


def load_exportable(model: str) -> PreTrainedModel:
    """A checkpoint in float32, activations too (`forward_dtype` is dropped). Raises ValueError, see `load_model`."""
    config = load_config(model)
    require_exportable(config, model)
    if config.model_type in PUZZLES:
        config.forward_dtype = None
    return load_model(model, AUTO_CLASSES[config.model_type], config=config, dtype=torch.float32)


def export_torch(model: str | Path, out: str | Path, force: bool = False, check: bool = False) -> dict[str, Any]:
    """Writes the main graph of a model as a `torch.export` archive; either the whole file or none.

    Args:
        model: folder or Hub name.
        out: file to write, ending in .pt2.
        force: overwrite `out`.
        check: read the file back and compare with the model on other inputs, before `out` is there.

    Returns:
        What was written, and with `check` the largest differences.

    Raises:
        FileExistsError: `out` exists.
        ValueError: another ending or architecture, a damaged checkpoint, or with `check` another result.
    """
    if Path(out).suffix != ".pt2":
        raise ValueError(f"{out} must end in .pt2, which torch.export.save and load insist on")
    with whole_or_nothing(Path(out), force, "model.pt2") as unfinished:
        network = load_exportable(str(model))
        graph = graphs(network)["model"]
        program = export_graph(graph)
        torch.export.save(program, unfinished, extra_files={META_FILE: json.dumps(describe(network, graph))})
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
            result |= compare(network, lambda inputs: loaded(*inputs.values()))
    return result


def describe(network: PreTrainedModel, graph: Graph) -> dict[str, Any]:
    """Architecture, and inputs with type and shape, where a dynamic axis has its name."""
    shapes = {
        name: [graph.axes[name].get(axis, size) for axis, size in enumerate(value.shape)]
        for name, value in graph.inputs.items()
    }
    inputs = [
        {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": shapes[name]}
        for name, value in graph.inputs.items()
    ]
    return {"architecture": network.config.model_type, "inputs": inputs, "outputs": graph.outputs}


@torch.no_grad()
def compare(network: PreTrainedModel, run: Any, rows: int = 4) -> dict[str, Any]:
    """Compares the main graph, computed by `run(inputs) -> tensors`, with the model on random inputs of other size.

    Returns:
        max_difference: of each output, absolute. argmax_agreement: of logits, 0..1.

    Raises:
        ValueError: an output differs by more than TOLERANCE of its largest value.
    """
    graph = graphs(network)["model"]
    inputs = random_inputs(network.config, rows, seed=1)
    given = inputs.get("attention_mask", torch.ones(())).bool()  # padding may give anything
    differences, result = {}, {}
    for name, ours, theirs in zip(graph.outputs, graph.module(*inputs.values()), run(inputs), strict=True):
        if given.dim():
            ours, theirs = ours[given], theirs[given]
        differences[name] = (ours - theirs).abs().max().item()
        if not differences[name] <= TOLERANCE * max(1.0, ours.abs().max().item()):
            raise ValueError(
                f"the exported graph computes another {name}: it differs by up to {differences[name]:.3g}, where "
                f"values reach {ours.abs().max():.3g}. Nothing was written"
            )
        if name == "logits":
            result["argmax_agreement"] = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return {"max_difference": differences, **result}
