"""How a run saves and resumes: complete checkpoints in a folder of its own, and messages for what can go wrong.

`CompleteCheckpoints` stands before a Trainer of transformers or TRL. What it changes:

- `train` holds the run's folder (`run_folder.py`), and checks the checkpoint that it resumes from before anything is
  loaded (`hub/manifests.py`): in the first process, for all;
- weights of another model, which the library loads as far as their names agree, are refused;
- a checkpoint ends with a manifest, and older ones are deleted only then;
- weights that are not finite are neither saved nor trained on;
- a full disk, no memory, and processes that have gone are named with what is left to go on from.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..hub.manifests import (
    MANIFEST,
    TORCH_CANNOT_WRITE,
    CheckpointError,
    find_corruption,
    list_checkpoints,
    out_of_memory,
    readable,
    validate_plain_metadata,
    write_manifest,
)
from .preemption import PreemptionCallback
from .run_folder import agreed, begin, delete_checkpoints, held, overwrites, rotate


# What gloo and NCCL say when another process has gone.
OTHERS_GONE = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "remote process exited")
LARGEST_WEIGHT = 1e18  # its square is about the largest 32-bit number, so that nothing computed with more is finite


class NonFiniteError(RuntimeError):
    """Loss, gradients or weights are not finite."""


class CompleteCheckpoints:
    """For a trainer, before those of the libraries; `preemption` and `add_callback` are set up by `listen`."""

    average: Any = None
    cache_at_inference: bool | None = None  # `use_cache` of the model's config before training; None without
    preemption: PreemptionCallback
    run_id: str | None = None
    _stale: Iterable[Path] = ()
    _resumed = False

    # ---- training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """As in the library; `resume_from_checkpoint` may also be "last" or "last-complete"; see `resolve_checkpoint`.

        Raises:
            FileExistsError: the folder holds checkpoints, and this run neither resumes nor overwrites them.
            FolderInUseError: another run writes into the folder.
            CheckpointError: the checkpoint is corrupted, or not one of this model.
            NonFiniteError: the weights, as loaded or at the end, are not finite.
        """
        args, is_first = self.args, self.args.process_index == 0
        with held(args.output_dir, is_first):
            start = agreed(lambda: begin(args.output_dir, resume_from_checkpoint, overwrites(args)), is_first)
            if start.checkpoint is not None:
                _validate_state(start.checkpoint)
            elif resume_from_checkpoint and is_first:
                print(f"no complete checkpoint in {args.output_dir}: the run starts from the beginning", flush=True)
            self.run_id, self._stale = start.run_id, start.stale
            self._resumed = start.checkpoint is not None
            with self.preemption.listening(), self._failures_named():
                result = super().train(resume_from_checkpoint=start.checkpoint, **kwargs)
                self.validate_finite_weights()
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in the library; by the first one, all that is resumed from has been loaded."""
        if self._resumed:
            self._resumed = False
            self.validate_finite_weights()
        super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As in the library. A step has been made by now, so the run works, and what it replaces may go."""
        if self._stale:
            stale, self._stale = self._stale, ()
            agreed(lambda: delete_checkpoints(stale), self.args.process_index == 0)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        """Raises failures of the machine with the step and with what is left of the run."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            first = " ".join(str(error).split())[:300]
            if out_of_memory(error):
                reason = (
                    f"out of memory in step {self.state.global_step + 1} ({first or type(error).__name__}): lower "
                    f"--per_device_train_batch_size (now {self.args.per_device_train_batch_size}) or the length of "
                    "the rows"
                )
            elif self.args.world_size > 1 and any(words in first for words in OTHERS_GONE):
                reason = (
                    f"process {self.args.process_index} of {self.args.world_size} has lost the others in step "
                    f"{self.state.global_step + 1} ({first}): one was killed or has failed, see what it and the "
                    "launcher printed"
                )
            else:
                raise
            raise type(error)(f"{reason}. {self._what_is_left()}") from error

    def _what_is_left(self) -> str:
        saved = [folder for folder in list_checkpoints(self.args.output_dir) if not find_corruption(folder, False)]
        if not saved:
            return "No checkpoint had been saved yet"
        return f"{saved[-1]} is intact: --resume_from_checkpoint last-complete goes on from there"

    # ---- weights that are not finite ----

    def validate_finite_weights(self) -> None:
        """Raises NonFiniteError in all processes if weights of one of them are not finite. A collective call."""
        broken = broken_weights(self._named_weights())
        count = torch.tensor(float(len(broken)), device=self.args.device)
        if self.args.world_size > 1:
            count = self.accelerator.reduce(count, "sum")
        if count.item():
            raise NonFiniteError(
                f"weights are not finite after step {self.state.global_step}: "
                f"{_some(broken) or 'those of another process'}. They were not saved, and earlier checkpoints are as "
                f"they were. Lower the learning rate ({self.args.learning_rate:.3g}), look at the data for extreme "
                "values, and start anew or resume from an earlier checkpoint with --resume_from_checkpoint FOLDER"
            )

    def _named_weights(self) -> dict[str, torch.Tensor]:
        """Parameters, rows that an optimizer trains without their being parameters, and averages."""
        trained = {id(t) for group in getattr(self.optimizer, "param_groups", ()) for t in group["params"]}
        named = dict(self.model.named_parameters())
        named |= {name: buffer for name, buffer in self.model.named_buffers() if id(buffer) in trained}
        shadow = getattr(self.average, "shadow", {})
        return named | {f"the average of {name}": value for name, value in shadow.items()}

    # ---- saving ----

    def _save_checkpoint(self, model, trial) -> None:
        """Writes the manifest after everything else, and deletes old checkpoints only then."""
        self.validate_finite_weights()
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        if self.args.should_save and folder.exists():  # another run's files must not become part of this one
            (folder / MANIFEST).unlink(missing_ok=True)  # while it is written a second time, it is not complete
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                write_manifest(folder, self.run_id)
            if self.args.push_to_hub:
                self.push_checkpoint(str(folder))
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in TORCH_CANNOT_WRITE):
                raise
            raise OSError(
                f"could not write checkpoint {folder}: {error}. Earlier checkpoints are intact; free some disk space "
                "and resume with --resume_from_checkpoint last-complete"
            ) from error
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate(folder, self.run_id, limit, self.state.best_model_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Saves `use_cache` as it was: the library switches the cache off to train, and the model would stay slow."""
        if self.cache_at_inference is None:
            super()._save(output_dir, state_dict)
            return
        config = self.model.config
        config.use_cache, in_training = self.cache_at_inference, config.use_cache
        try:
            super()._save(output_dir, state_dict)
        finally:
            config.use_cache = in_training

    # ---- loading ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """As in the library, for weights with the names and shapes of this model alone."""
        if not self.is_fsdp_enabled:
            _validate_same_weights(Path(resume_from_checkpoint), self.model)
        with readable(resume_from_checkpoint, "a file of weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with readable(checkpoint, "optimizer.pt or scheduler.pt"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with readable(checkpoint, "scaler.pt"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with readable(checkpoint, "rng_state*.pth"):
            super()._load_rng_state(checkpoint)


def broken_weights(named: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not finite, or so large that nothing computed with them is."""
    local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in named.items()}
    local = {n: t.detach() for n, t in local.items() if t.numel() and t.is_floating_point() and t.element_size() > 1}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in local.items():
        by_device.setdefault(tensor.device, []).append(name)
    broken = []
    for names in by_device.values():  # one answer a device: a question for each tensor would stop a GPU each time
        largest = torch.stack([torch.linalg.vector_norm(local[name], torch.inf).float() for name in names])
        broken += [name for name, value in zip(names, largest.tolist()) if not value < LARGEST_WEIGHT]
    return broken


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _validate_state(folder: str) -> None:
    """Raises CheckpointError unless the state of a run can be read, and says where the run was."""
    validate_plain_metadata(folder)
    with readable(folder, TRAINER_STATE_NAME):
        state = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
        for name, kinds in {"global_step": int, "max_steps": int, "log_history": list, "epoch": (int, float)}.items():
            value = getattr(state, name)
            if not isinstance(value, kinds) or (name == "global_step" and value < 0):
                raise ValueError(f"{name} is {str(value)[:40]!r}")


def _validate_same_weights(folder: Path, model: torch.nn.Module) -> None:
    """Raises CheckpointError unless a checkpoint has the weights of `model`, by names and shapes in its headers."""
    plain = unwrap_peft_model(model) is model
    main = folder / (SAFE_WEIGHTS_NAME if plain else ADAPTER_SAFE_WEIGHTS_NAME)
    expected = {name: tuple(t.shape) for name, t in _weights_of(model, plain).items()}
    with readable(folder, "a file of weights"):
        files = [main]
        if plain and not main.exists() and (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
            index = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"]
            files = [folder / Path(name).name for name in sorted(set(index.values()))]
        if not files[0].exists():
            raise CheckpointError(
                f"checkpoint {folder} has no {main.name}; weights of other formats are not resumed from. Start anew "
                "from them with --model_name_or_path"
            )
        found = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    wrong = sorted(name for name in found if name not in expected)
    wrong += [f"{n} {list(s)} instead of {list(expected[n])}" for n, s in found.items() if expected.get(n, s) != s]
    wrong += sorted(f"{name} is missing" for name in _absent(model, found, expected, plain))
    if wrong:
        raise CheckpointError(
            f"checkpoint {folder} holds the weights of another model than this "
            f"{type(unwrap_peft_model(model)).__name__}: {_some(wrong)}. Nothing was loaded; resume with the "
            "--model_type, --preset and --config_overrides that the run began with"
        )


def _weights_of(model: torch.nn.Module, plain: bool) -> dict[str, torch.Tensor]:
    return model.state_dict() if plain else get_peft_model_state_dict(model)


def _absent(model: torch.nn.Module, found: dict, expected: dict, plain: bool) -> set[str]:
    """Weights that a checkpoint lacks. Of tensors that are one, a checkpoint has one name."""
    weights = _weights_of(model, plain)
    there = {weights[name].data_ptr() for name in found if name in weights}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return {n for n in expected if n not in found and n not in ignored and weights[n].data_ptr() not in there}
