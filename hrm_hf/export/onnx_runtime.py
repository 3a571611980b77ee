"""Adaptive halting in ONNX Runtime for graphs exported by `hrm-hf export onnx`.

This file needs only numpy and onnxruntime and is copied into the folder of the graphs:

    from onnx_runtime import OnnxPuzzleSolver

    answer = OnnxPuzzleSolver("sudoku_onnx").solve(boards)

In shapes, B is the batch, S the number of positions, and V the size of the vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as errors


META_KEY = "hrm_hf"  # metadata key in each .onnx file; the value is the content of onnx.json
UNREADABLE = (errors.Fail, errors.InvalidGraph, errors.InvalidProtobuf, errors.InvalidArgument, errors.NotImplemented)


@dataclass
class OnnxPuzzleSolution:
    """Result of `solve`: predictions int64 [B, S], steps int32 [B], q_halt float32 [B], logits [B, S, V]."""

    predictions: np.ndarray
    steps: np.ndarray
    q_halt: np.ndarray
    logits: np.ndarray


class OnnxPuzzleSolver:
    """Solver that runs ACT with the exported step, and removes finished rows from the batch.

    Args:
        path: folder of the export, or its model.onnx.
        session: arguments for `onnxruntime.InferenceSession`, such as `providers` and `sess_options`.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or not an exported puzzle model.
    """

    def __init__(self, path: str | Path, **session: Any):
        self.session, self.meta = open_graph(path, "model.onnx", **session)
        self.settings = self.meta["settings"]
        if "latent_shapes" not in self.settings:
            raise ValueError(f"{path} is a {self.meta['architecture']}; OnnxPuzzleSolver only runs puzzle models")

    def solve(
        self,
        input_ids: np.ndarray,
        puzzle_identifiers: np.ndarray | None = None,
        max_steps: int | None = None,
        min_steps: int = 1,
        min_confidence: float = 0.0,
        halt: str = "q",
    ) -> OnnxPuzzleSolution:
        """Run ACT steps until every row halts.

        Args:
            input_ids, puzzle_identifiers: token ids [B, S], and puzzle ids [B] (all 0 by default).
            max_steps: maximum number of ACT steps; defaults to `halt_max_steps` in the model's config.
            min_steps: minimum number of ACT steps before a row may halt.
            min_confidence: minimum sigmoid(q_halt), in [0, 1], at which a row may halt.
            halt: "q" halts a row when the model prefers to halt; "fixed" runs `max_steps` for all rows.

        Raises:
            ValueError: ids out of range, a wrong shape, or contradictory settings.
        """
        settings = self.settings
        max_steps = settings["halt_max_steps"] if max_steps is None else max_steps
        if halt not in ("q", "fixed"):
            raise ValueError(f'halt={halt!r}: must be "q" (halt when the model prefers it) or "fixed"')
        if not 1 <= min_steps <= max_steps:
            raise ValueError(f"min_steps={min_steps}: must be in [1, max_steps={max_steps}]")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence={min_confidence}: must be in [0, 1]")
        min_confidence = max(min_confidence, settings["halt_confidence"])
        data = self._checked(input_ids, puzzle_identifiers)
        batch, seq_len = data["input_ids"].shape
        solution = OnnxPuzzleSolution(
            predictions=np.zeros((batch, seq_len), dtype=np.int64),
            steps=np.zeros(batch, dtype=np.int32),
            q_halt=np.zeros(batch, dtype=np.float32),
            logits=np.zeros((batch, seq_len, settings["vocab_size"]), dtype=np.float32),
        )
        for name, shape in settings["latent_shapes"].items():
            data[name] = np.zeros((batch, *shape), dtype=np.float32)
        active, step = np.arange(batch), 0
        while len(active):
            step += 1
            data["reset"] = np.full(len(active), step == 1)
            logits, q_halt, q_continue, data["z_H"], data["z_L"] = self.session.run(None, data)
            done = np.full(len(active), step == max_steps)
            if halt == "q" and step >= min_steps:
                prefers = q_halt > q_continue if settings["has_continue_value"] else q_halt > 0
                done |= prefers & (sigmoid(q_halt) >= min_confidence)
            rows = active[done]
            solution.logits[rows], solution.predictions[rows] = logits[done], logits[done].argmax(-1)
            solution.q_halt[rows], solution.steps[rows] = q_halt[done], step
            if done.any():
                active, data = active[~done], {name: value[~done] for name, value in data.items()}
        return solution

    def _checked(self, input_ids: np.ndarray, puzzle_identifiers: np.ndarray | None) -> dict[str, np.ndarray]:
        input_ids = np.asarray(input_ids)
        if puzzle_identifiers is None:
            puzzle_identifiers = np.zeros(len(input_ids), dtype=np.int64)
        data = {"input_ids": input_ids, "puzzle_identifiers": np.asarray(puzzle_identifiers)}
        for (name, ids), table, shape in zip(
            data.items(), ("vocab_size", "num_puzzle_identifiers"), ((self.settings["seq_len"],), ())
        ):
            if ids.shape != (len(input_ids), *shape):
                raise ValueError(f"{name} has shape {list(ids.shape)}; expected {['batch', *shape]}")
            count = self.settings[table]
            if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < count):
                raise ValueError(f"{name} ({ids.dtype}): must be integers from 0 to {count - 1}")
        return {name: ids.astype(np.int64) for name, ids in data.items()}


@dataclass
class OnnxCosmoPosterior:
    """Posteriors of B maps, as in `CosmoRegressionOutput`. halt_logits [B] come from each map's last segment.

    posterior_mean and posterior_std [B, R] are in physical units, in the order of the setting "reported_names".
    """

    posterior_mean: np.ndarray
    posterior_std: np.ndarray
    log_weights: np.ndarray
    loc: np.ndarray
    scale_tril: np.ndarray
    halt_logits: np.ndarray
    steps: np.ndarray


class OnnxCosmoRegressor:
    """Regressor that runs the exported stem and segments of `hrm_cosmo`, with adaptive halting.

    The arguments are those of `OnnxPuzzleSolver`. To run all segments, or `cosmo_cnn`, use model.onnx directly.
    """

    def __init__(self, folder: str | Path, **session: Any):
        self.stem, self.meta = open_graph(folder, "stem.onnx", **session)
        self.segment, _ = open_graph(folder, "segment.onnx", **session)

    def predict(
        self, pixel_values: np.ndarray, max_steps: int | None = None, halt: str = "adaptive"
    ) -> OnnxCosmoPosterior:
        """Return the posteriors of maps [B, C, S, S], which must be scaled as in preprocessor_config.json.

        Args:
            max_steps: maximum number of segments; defaults to `halt_max_steps` in the model's config.
            halt: "adaptive" halts a map when the expected gain is below the config's threshold; "fixed" runs them all.

        Raises:
            ValueError: no maps, a wrong shape, or invalid settings.
        """
        settings = self.meta["settings"]
        max_steps = settings["halt_max_steps"] if max_steps is None else max_steps
        if max_steps < 1 or halt not in ("fixed", "adaptive"):
            raise ValueError(f"max_steps={max_steps}, halt={halt!r}: needs max_steps >= 1, halt='fixed' or 'adaptive'")
        pixel_values = np.asarray(pixel_values, dtype=np.float32)
        expected = self.stem.get_inputs()[0].shape[1:]
        if pixel_values.ndim != 4 or list(pixel_values.shape[1:]) != expected or not len(pixel_values):
            shape = ", ".join(map(str, expected))
            raise ValueError(f"pixel_values has shape {list(pixel_values.shape)}; expected [batch >= 1, {shape}]")
        (tokens,) = self.stem.run(None, {"pixel_values": pixel_values})
        z_H = z_L = np.zeros_like(tokens)
        active, answer = np.arange(len(tokens)), None
        used = np.zeros(len(tokens), dtype=np.int64)
        for _ in range(max_steps):
            *found, z_H, z_L = self.segment.run(None, {"tokens": tokens, "z_H": z_H, "z_L": z_L})
            if answer is None:
                answer = found
            for kept, new in zip(answer, found):
                kept[active] = new
            used[active] += 1
            going = found[-1] >= settings["halt_threshold"] if halt == "adaptive" else np.full(len(active), True)
            if not going.any():
                break
            active, tokens, z_H, z_L = active[going], tokens[going], z_H[going], z_L[going]
        return OnnxCosmoPosterior(*answer, steps=used)


def open_graph(path: str | Path, name: str, **session: Any) -> tuple[onnxruntime.InferenceSession, dict]:
    """Open an ONNX file, or the file `name` in a folder. Return the session and the metadata."""
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; create it with `hrm-hf export onnx MODEL --out FOLDER`")
    try:
        opened = onnxruntime.InferenceSession(str(file), **{"providers": ["CPUExecutionProvider"], **session})
    except UNREADABLE as error:
        raise ValueError(f"{file} is not an ONNX file that this version of onnxruntime can read: {error}") from error
    meta = opened.get_modelmeta().custom_metadata_map.get(META_KEY)
    if meta is None:
        raise ValueError(f"{file} was not written by `hrm-hf export onnx`: its metadata has no halting settings")
    return opened, json.loads(meta)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
