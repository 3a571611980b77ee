"""Tensor graphs that `torch_export.py` and `onnx.py` export, with one exporter class per kind of model.

A graph cannot contain a data-dependent loop, so it contains only the loop body:

- puzzles: one ACT step; the loop and halting stay outside the graph;
- recurrent regressors: all segments with halt="fixed", and the graphs stem and segment for adaptive halting;
- other regressors: the forward pass;
- causal language models: the forward pass without a cache. Models that halt run all segments but freeze halted
  tokens, so the logits equal those of adaptive halting.

The registry names the exporter of each architecture. Not supported: training, generation with a cache, the Go coder's
refinement head, quantized models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.act import replace_rows
from ..registry import ARCHITECTURES, architecture_of, load_function
from .checkpoint import validate_passes


POSTERIOR = ("log_weights", "loc", "scale_tril")
REGRESSION_FIELDS = {"posterior_mean": "reported_means", "posterior_std": "reported_stds"}  # graph output: model field


@dataclass
class Graph:
    """Module that maps tensors to tensors, with example inputs.

    Attributes:
        inputs: example tensors by name, in the order of the forward's arguments.
        axes: names of the dynamic axes of each input.
        outputs: names of the returned tensors.
    """

    module: nn.Module
    inputs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    outputs: list[str]


class Exporter:
    """Base class that provides the graphs of one kind of model, and inputs to test them.

    Attributes:
        settings: config fields that users of the graphs need.
        passes: number of segments to run for each token, instead of halting; None for the model's own rule.
        has_loop: whether halting happens outside the graphs, in a class of `onnx_runtime.py`.
    """

    settings: tuple[str, ...] = ()
    has_loop = False

    def __init__(self, config: PreTrainedConfig, passes: int | None = None):
        self.config, self.passes = config, passes

    def graphs(self, model: PreTrainedModel) -> dict[str, Graph]:
        """Return the graphs of a float32 model in eval mode, keyed by name. The main graph is called "model"."""
        raise NotImplementedError

    def random_inputs(self, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random but valid inputs for the main graph."""
        raise NotImplementedError

    def settings_of(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the settings needed to run the halting loop and to use the outputs."""
        return {name: getattr(self.config, name) for name in self.settings}

    def same_steps(self, folder: str | Path, model: PreTrainedModel) -> float:
        """Return the fraction of `loop_inputs` rows with equal step counts in the exported loop and in the model."""
        raise NotImplementedError

    def loop_inputs(self) -> dict[str, torch.Tensor]:
        """Return random inputs for the complete halting loop."""
        inputs = self.random_inputs(rows=8, seed=2)
        return {name: inputs[name] for name in inputs.keys() & {"input_ids", "puzzle_identifiers", "pixel_values"}}


class PuzzleStep(nn.Module):
    """Graph of one ACT step.

    The forward takes input_ids int64 [B, S], puzzle_identifiers int64 [B], z_H and z_L with the shapes of
    `config.state_shapes`, and reset bool [B]; reset rows start from the initial states instead of z_H and z_L.
    It returns logits [B, S, V], q_halt_logits and q_continue_logits [B], next_z_H and next_z_L.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, puzzle_identifiers, z_H, z_L, reset):
        model, reasoner = self.model, self.model.model
        rows = None
        if reasoner.puzzle_emb is not None:  # puzzle_emb.forward validates ids, and the check cannot be traced
            rows = F.embedding(puzzle_identifiers, reasoner.puzzle_emb.weight)
        x, rotary = reasoner.embed(input_ids, rows, torch.float32)
        z_H, z_L = (replace_rows(reset, new, old) for new, old in zip(reasoner.fresh_states(x), (z_H, z_L)))
        z_H, z_L = reasoner.reason(x, rotary, z_H, z_L)
        logits = model.read_out(z_H)
        return logits, *model.q_values(z_H, logits), z_H, z_L


class PuzzleExporter(Exporter):
    """Exporter for puzzle models. The graph is one ACT step."""

    settings = ("seq_len", "vocab_size", "num_puzzle_identifiers", "halt_max_steps")
    has_loop = True

    def graphs(self, model: PreTrainedModel) -> dict[str, Graph]:
        for name in ("noise_scale", "random_initial_states"):
            if getattr(self.config, name, 0):
                raise ValueError(f"{name}={getattr(self.config, name)}: only deterministic models can be exported")
        inputs = self.random_inputs()
        outputs = ["logits", "q_halt_logits", "q_continue_logits", "next_z_H", "next_z_L"]
        return {"model": Graph(PuzzleStep(model), inputs, {name: {0: "batch"} for name in inputs}, outputs)}

    def random_inputs(self, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
        config, generator = self.config, torch.Generator().manual_seed(seed)
        z_H, z_L = (torch.randn(shape, generator=generator) for shape in config.state_shapes(rows))
        return {
            "input_ids": torch.randint(config.vocab_size, (rows, config.seq_len), generator=generator),
            "puzzle_identifiers": torch.randint(config.num_puzzle_identifiers, (rows,), generator=generator),
            "z_H": z_H,
            "z_L": z_L,
            "reset": torch.arange(rows) % 2 == 0,
        }

    def settings_of(self, model: PreTrainedModel) -> dict[str, Any]:
        return {
            **super().settings_of(model),
            "halt_confidence": self.config.halt_confidence,
            "latent_shapes": dict(zip(("z_H", "z_L"), (list(shape[1:]) for shape in self.config.state_shapes(1)))),
            "has_continue_value": model.has_continue_value,
        }

    @torch.no_grad()
    def same_steps(self, folder: str | Path, model: PreTrainedModel) -> float:
        from .onnx_runtime import OnnxPuzzleSolver

        inputs = self.loop_inputs()
        found = OnnxPuzzleSolver(folder).solve(**{name: value.numpy() for name, value in inputs.items()})
        return float((found.steps == model.solve(**inputs).steps.numpy()).mean())


class LanguageModelForward(nn.Module):
    """Map input_ids and attention_mask int64 [B, T] to logits [B, T, V], plus halt_steps [B, T] if the model halts.

    `options` are more arguments of the model's forward.
    """

    def __init__(self, model: PreTrainedModel, outputs: list[str], **options):
        super().__init__()
        self.model, self.outputs, self.options = model, outputs, options

    def forward(self, input_ids, attention_mask):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **self.options)
        return tuple(output[name] for name in self.outputs)


class LanguageModelExporter(Exporter):
    """Exporter for causal language models. The graph is the forward pass without a cache."""

    settings = ("vocab_size", "max_position_embeddings")

    def graphs(self, model: PreTrainedModel) -> dict[str, Graph]:
        halts = architecture_of(self.config).halts and self.passes is None
        outputs = ["logits", "halt_steps"] if halts else ["logits"]
        axes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
        fixed = {} if self.passes is None else {"num_segments": self.passes, "exit_criterion": "fixed"}
        return {"model": Graph(LanguageModelForward(model, outputs, **fixed), self.random_inputs(), axes, outputs)}

    def random_inputs(self, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        length = min(24, self.config.max_position_embeddings)
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, : length // 4] = 0  # one left-padded row
        ids = torch.randint(self.config.vocab_size, mask.shape, generator=generator)
        return {"input_ids": ids, "attention_mask": mask}


class PosteriorOfMaps(nn.Module):
    """Map pixel_values [B, C, S, S] to the posterior, with the output shapes of `CosmoRegressionOutput`."""

    def __init__(self, model: PreTrainedModel, outputs: list[str]):
        super().__init__()
        self.model, self.fields = model, [REGRESSION_FIELDS.get(name, name) for name in outputs]

    def forward(self, pixel_values):
        output = self.model(pixel_values=pixel_values)
        return tuple(getattr(output, field) for field in self.fields)


class RegressionExporter(Exporter):
    """Exporter for map regressors. The graph is the complete forward pass."""

    settings = ("reported_names", "target_names", "prior_bounds")
    outputs = ("posterior_mean", "posterior_std", *POSTERIOR)

    def graphs(self, model: PreTrainedModel) -> dict[str, Graph]:
        axes, outputs = {"pixel_values": {0: "batch"}}, list(self.outputs)
        return {"model": Graph(PosteriorOfMaps(model, outputs), self.random_inputs(), axes, outputs)}

    def random_inputs(self, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
        config, generator = self.config, torch.Generator().manual_seed(seed)
        maps = torch.randn((rows, config.num_channels, config.image_size, config.image_size), generator=generator)
        if config.mask_channel:
            maps[:, -1] = (maps[:, -1] > -1).float()
        return {"pixel_values": maps}


class CosmoStemGraph(nn.Module):
    """Map pixel_values [B, C, S, S] to tokens [B, tokens, D]."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model.model.embed(pixel_values)


class CosmoSegment(nn.Module):
    """Run one segment: map tokens, z_H and z_L [B, tokens, D] to the posterior, halt_logits [B] and the new states.

    halt_logits is the expected gain of another segment. The states are zeros before the first segment.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens, z_H, z_L):
        model, head = self.model, self.model.posterior_head
        states = model.model(tokens=tokens, z_H=z_H, z_L=z_L, return_dict=True)
        posterior = head(states.z_H[:, 0])
        parts = (posterior.log_weights, posterior.loc, posterior.scale_tril)
        return *head.moments(posterior), *parts, model.expected_gain(states.z_H), states.z_H, states.z_L


class RecurrentRegressionExporter(RegressionExporter):
    """Exporter for recurrent regressors: a graph of all segments, plus `stem` and `segment` for adaptive halting."""

    settings = (*RegressionExporter.settings, "halt_max_steps", "halt_threshold")
    outputs = (*RegressionExporter.outputs, "halt_logits")
    has_loop = True

    def graphs(self, model: PreTrainedModel) -> dict[str, Graph]:
        found, batch = super().graphs(model), {0: "batch"}
        main = found["model"]
        found["stem"] = Graph(CosmoStemGraph(model), main.inputs, main.axes, ["tokens"])
        with torch.no_grad():
            tokens = model.model.embed(main.inputs["pixel_values"])
        states = {"tokens": tokens, "z_H": torch.randn_like(tokens), "z_L": torch.randn_like(tokens)}
        outputs = [*self.outputs, "next_z_H", "next_z_L"]
        found["segment"] = Graph(CosmoSegment(model), states, dict.fromkeys(states, batch), outputs)
        return found

    @torch.no_grad()
    def same_steps(self, folder: str | Path, model: PreTrainedModel) -> float:
        from .onnx_runtime import OnnxCosmoRegressor

        inputs = self.loop_inputs()
        found = OnnxCosmoRegressor(folder).predict(inputs["pixel_values"].numpy())
        return float((found.steps == model(**inputs, halt="adaptive").steps.numpy()).mean())


def exporter_of(config: PreTrainedConfig, model: str, passes: int | None = None) -> Exporter:
    """Return the exporter for an architecture. Raise ValueError if there is none, or if the model is quantized."""
    row = architecture_of(config)
    if row is None or row.exporter is None:
        known = ", ".join(one.model_type for one in ARCHITECTURES.values() if one.exporter)
        raise ValueError(f"{model} is a {config.model_type}; expected one of {known}")
    if config.to_dict().get("quantization_config") is not None:
        raise ValueError(f"{model} is quantized; export the unquantized checkpoint, and quantize the result")
    validate_passes(config, model, passes)
    return load_function(row.exporter)(config, passes)


def graphs(model: PreTrainedModel, passes: int | None = None) -> dict[str, Graph]:
    """Return the graphs of a model by name. Raise ValueError unless the model is in float32 and in eval mode."""
    exporter = exporter_of(model.config, type(model).__name__, passes)
    if model.training or {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        raise ValueError("the model must be in float32 and in eval mode; call model.float().eval()")
    return exporter.graphs(model)


def random_inputs(config: PreTrainedConfig, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random but valid inputs for a model's main graph."""
    return exporter_of(config, config.model_type).random_inputs(rows, seed)
