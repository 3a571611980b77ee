"""Save, resume and push complete checkpoints.

`CompleteCheckpoints` is a mixin for Trainer classes of transformers and TRL. It changes the following:

- A run locks its folder, and does not start if checkpoints from two runs would be mixed (`run.py`).
- The first process verifies a checkpoint before the run resumes from it (`hub/manifests.py`). Weights from a
  different model are rejected, whereas Trainer would load those with matching names.
- The manifest, which marks a checkpoint as complete, is written last. Only then are old checkpoints deleted.
- A resumed run uses its own optimizer and scheduler options, and prints those that changed.
- Non-finite weights are not saved, and a run does not resume from them.
- Each push is a complete checkpoint with its code, as from `hrm-hf push`. The final push has the averaged weights, if
  there are any. Pickles and event files are not uploaded, and an edited model card is not overwritten.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, run_as_future
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import HubStrategy, unwrap_peft_model
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import PushInProgress

from ..hub import Contents, PushOptions, PushResult, checkpoint_contents, commit_contents, hub_errors
from ..hub.cards import CARD_FILE, new_card_text
from ..hub.manifests import (
    MANIFEST,
    RAW_WEIGHTS_FILE,
    TORCH_CANNOT_WRITE,
    CheckpointError,
    find_corruption,
    list_checkpoints,
    out_of_memory,
    readable,
    validate_plain_metadata,
    write_manifest,
)
from ..hub.push import own_files
from ..hub.secrets import validate_no_secrets
from ..io.options import wanted_checkpoint
from ..models.modeling_utils import broken_weights
from ..registry import ARCHITECTURES
from .optim import (
    SCHEDULE_OPTIONS,
    STEP_OPTIONS,
    WITHOUT_WARMUP,
    apply_settings,
    group_settings,
    optimization_record,
    validate_resumable,
)
from .preemption import PreemptionCallback
from .run import in_first_process, locked_folder, plan_start, rotate


# Error messages from gloo and NCCL after another process has ended.
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "remote process exited")
PUSH_FAILED = "a push during training failed, but training continued: {}"
OPTIMIZATION = "optimization"  # key of the `optimization_record` in the trainer's state
WITH_STATE = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class NonFiniteError(RuntimeError):
    """Raised if loss, gradients or weights are not finite."""


class CompleteCheckpoints:
    """Mixin that adds complete, resumable checkpoints to Trainer classes. Subclasses set `preemption`."""

    average: Any = None
    cache_at_inference: bool | None = None  # the config's `use_cache` before training, if it has this field
    preemption: PreemptionCallback
    run_id: str | None = None
    push_in_progress: PushInProgress | None = None
    _stale: list[Path] = []
    _resumed = False
    _settings: list[dict[str, Any]] = []  # each parameter group's settings, from this run's options
    _num_training_steps = 0

    # ---- training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Train the model. `resume_from_checkpoint` may also be "last" or "last-complete".

        Raises:
            FileExistsError, FolderInUseError: the folder has checkpoints of an earlier run, or another run uses it.
            CheckpointError: the checkpoint is corrupted or belongs to another model.
            NonFiniteError: the weights are not finite, after loading or at the end.
            ValueError: the data do not fill a single step.
        """
        args, is_first = self.args, self.args.process_index == 0
        resume_from_checkpoint = wanted_checkpoint(resume_from_checkpoint)
        overwrite = getattr(args, "overwrite_output_dir", False)  # TRL's arguments may lack this option
        with locked_folder(args.output_dir, is_first):
            start = in_first_process(lambda: plan_start(args.output_dir, resume_from_checkpoint, overwrite), is_first)
            checkpoint, self.run_id, self._stale = start
            self._resumed = checkpoint is not None
            if checkpoint is not None:
                _validate_state(checkpoint)
            elif resume_from_checkpoint and is_first:
                print(f"no complete checkpoint in {args.output_dir}: the run starts from the beginning", flush=True)
            with self.preemption.listening(), self._explained_failures():
                result = super().train(resume_from_checkpoint=checkpoint, **kwargs)
                if not self.state.global_step:
                    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_drop_last")
                    options = ", ".join(f"{name}={getattr(args, name)}" for name in names)
                    raise ValueError(f"{options}: not enough data for one step; lower the batch size, or add data")
                self.validate_finite_weights()
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, or stop at once if the run is complete; otherwise, Trainer would take one more step."""
        if self._resumed:
            self._resumed = False
            self.validate_finite_weights()
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Delete an earlier run's checkpoints after the first step, then log, save and evaluate."""
        if self._stale:
            print(f"deleting {len(self._stale)} checkpoints of an earlier run (overwrite_output_dir)", flush=True)
            in_first_process(lambda: [shutil.rmtree(folder) for folder in self._stale], self.args.process_index == 0)
            self._stale = []
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @contextlib.contextmanager
    def _explained_failures(self) -> Iterator[None]:
        """Add the step, a remedy and the last complete checkpoint to out-of-memory and lost-process errors."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            first, step = " ".join(str(error).split())[:300], self.state.global_step + 1
            if out_of_memory(error):
                reason = f"out of memory in step {step} ({first or type(error).__name__}): lower "
                reason += f"--per_device_train_batch_size (now {self.args.per_device_train_batch_size}) or row length"
            elif self.args.world_size > 1 and any(words in first for words in PEER_LOST):
                reason = f"process {self.args.process_index} of {self.args.world_size} has lost the others in step "
                reason += f"{step} ({first}): one was killed or has failed, see its output and the launcher's"
            else:
                raise
            saved = [folder for folder in list_checkpoints(self.args.output_dir) if not find_corruption(folder, False)]
            left = (
                f"{saved[-1]} is intact: continue from it with --resume_from_checkpoint last-complete"
                if saved
                else "No checkpoint was saved"
            )
            raise type(error)(f"{reason}. {left}") from error

    # ---- non-finite weights ----

    def validate_finite_weights(self) -> None:
        """Raise NonFiniteError in all processes if any of them has non-finite weights (collective)."""
        trained = {id(t) for group in getattr(self.optimizer, "param_groups", ()) for t in group["params"]}
        named = dict(self.model.named_parameters())
        named |= {name: buffer for name, buffer in self.model.named_buffers() if id(buffer) in trained}
        named |= {f"the average of {name}": value for name, value in getattr(self.average, "shadow", {}).items()}
        broken = broken_weights(named)
        count = torch.tensor(float(len(broken)), device=self.args.device)
        if self.args.world_size > 1:
            count = self.accelerator.reduce(count, "sum")
        if count.item():
            raise NonFiniteError(
                f"weights are not finite after step {self.state.global_step}: "
                f"{_some(broken) or 'those of another process'}. They were not saved. Lower the learning rate "
                f"({self.args.learning_rate:.3g}), check the data for extreme values, and restart or resume from an "
                "earlier checkpoint with --resume_from_checkpoint FOLDER"
            )

    # ---- saving ----

    def _save_checkpoint(self, model, trial) -> None:
        """Save as `Trainer` does, but write the manifest last and only then delete old checkpoints."""
        self.validate_finite_weights()
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        if self.args.should_save and folder.exists():  # do not mix the files of different runs
            (folder / MANIFEST).unlink(missing_ok=True)  # delete first, so a partial folder never counts as complete
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        self.state.stateful_callbacks[OPTIMIZATION] = optimization_record(self.args, self.optimizer, self.lr_scheduler)
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                write_manifest(folder, self.run_id)
            if self.args.push_to_hub:
                self.push_checkpoint(folder)
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
        """Save the model with its original `use_cache`, which Trainer turns off for training."""
        if self.cache_at_inference is None:
            return super()._save(output_dir, state_dict)
        config = self.model.config
        config.use_cache, in_training = self.cache_at_inference, config.use_cache
        try:
            super()._save(output_dir, state_dict)
        finally:
            config.use_cache = in_training

    # ---- loading ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Load weights, rejecting those with names or shapes that differ from this model's."""
        if not self.is_fsdp_enabled:
            _validate_same_weights(Path(resume_from_checkpoint), self.model)
        with readable(resume_from_checkpoint, "a file of weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about missing weights, but not about tied weights, which are saved only once."""
        if load_result.missing_keys:
            weights, missing = self.model.state_dict(), load_result.missing_keys
            there = {tensor.data_ptr() for name, tensor in weights.items() if name not in missing}
            missing = [name for name in missing if weights[name].data_ptr() not in there]
            load_result = load_result._replace(missing_keys=missing)
        super()._issue_warnings_after_load(load_result)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """Create the scheduler, and remember the optimizer's settings before a checkpoint overwrites them."""
        warmup = 0 if self.args.lr_scheduler_type in WITHOUT_WARMUP else self.args.get_warmup_steps(num_training_steps)
        if warmup > num_training_steps and self.is_world_process_zero():
            warnings.warn(
                f"warmup_steps={self.args.warmup_steps:g}: longer than the run of {num_training_steps} steps, which "
                f"reaches only {num_training_steps / warmup:.1%} of the learning rate; pass e.g. 0.1 (10% of the run)",
                stacklevel=2,
            )
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._settings = group_settings(self.optimizer) if self.optimizer is not None else []
        self._num_training_steps = num_training_steps
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and scheduler, but apply this run's options, which Trainer ignores on resuming."""
        if checkpoint is None:
            return
        present = optimization_record(self.args, self.optimizer, self.lr_scheduler)
        state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        if state.global_step > self._num_training_steps:
            raise ValueError(
                f"max_steps={self.args.max_steps}, num_train_epochs={self.args.num_train_epochs:g}: {checkpoint} is "
                f"at step {state.global_step}, but the run ends at {self._num_training_steps}; raise either option"
            )
        saved = state.stateful_callbacks.get(OPTIMIZATION, {})
        if saved:
            validate_resumable(saved, present, checkpoint)
        with readable(checkpoint, "optimizer.pt or scheduler.pt"):
            super()._load_optimizer_and_scheduler(checkpoint)
        changes = apply_settings(self.optimizer, self.lr_scheduler, self._settings)
        names = (*SCHEDULE_OPTIONS, *STEP_OPTIONS) if saved else ()
        changes += [f"{name} {saved[name]} -> {present[name]}" for name in names if saved[name] != present[name]]
        if changes and self.is_world_process_zero():
            print(f"resuming {checkpoint} with changed options: {', '.join(changes)}", flush=True)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with readable(checkpoint, "scaler.pt"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with readable(checkpoint, "rng_state*.pth"):
            super()._load_rng_state(checkpoint)

    # ---- pushing ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the Hub repository. Reject settings that would upload the token, and explain Hub errors."""
        if self.args.hub_token and self.args.hub_strategy in WITH_STATE:
            raise ValueError(
                f"hub_token with hub_strategy={self.args.hub_strategy.value}: would upload the token in "
                "training_args.bin; log in with `hf auth login` instead, or set HF_TOKEN"
            )
        with hub_errors("push", self.args.hub_model_id or Path(self.args.output_dir).name):
            super().init_hf_repo(token, private)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """At the end of a run, save the averaged weights as the model, plus the raw weights, and push."""
        if _internal_call:  # Trainer is saving a checkpoint, which needs the raw weights
            super().save_model(output_dir, _internal_call=True)
            return
        self._save_final(output_dir or self.args.output_dir)
        if self.args.push_to_hub:
            self._push_final("Model save")

    def _save_final(self, output_dir: str) -> None:
        with self.averaged_weights():
            super().save_model(output_dir, _internal_call=True)
            if self.average is not None and self.args.should_save:
                # While the model has the averaged weights, `average.shadow` contains the raw ones.
                save_file(self.average.shadow, str(Path(output_dir, RAW_WEIGHTS_FILE)))

    @contextlib.contextmanager
    def averaged_weights(self):
        """Swap the averaged weights, if any, into the model during a `with` block."""
        if self.average is not None:
            self.average.swap()
        try:
            yield
        finally:
            if self.average is not None:
                self.average.swap()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> PushResult | None:
        """Save and push the model, passing `card` to `create_model_card`. Return None except on the main process."""
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self._save_final(self.args.output_dir)
        return self._push_final(commit_message, token, revision, **card)

    def push_results(self) -> None:
        """Push results, plots and metrics written after `save_model`, if `push_to_hub` is set."""
        if self.args.push_to_hub:
            self._push_final("Results")

    def _push_final(self, message, token=None, revision=None, **card: Any) -> PushResult | None:
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        self.create_model_card(**card)
        return self._commit(checkpoint_contents(self.args.output_dir, self.hub_model_id), message, token, revision)

    def _commit(self, contents: Contents, message: str, token: str | None = None, revision: str | None = None):
        revision = revision or self.args.hub_revision
        target = PushOptions(
            sources=[self.args.output_dir], repo_id=self.hub_model_id, message=message, revision=revision
        )
        return commit_contents(contents, target, token or self.args.hub_token)

    def create_model_card(
        self, license: str | None = None, tags: str | list[str] | None = None, **kwargs: Any
    ) -> None:
        """Write our model card, or add `license` and `tags` to the metadata of an existing card."""
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir, CARD_FILE)
        if type(self.model.config) not in ARCHITECTURES or not Path(self.args.output_dir, "config.json").exists():
            super().create_model_card(license=license, tags=tags, **kwargs)  # for adapters and other libraries' models
            return
        card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(self.args.output_dir))
        card.data.license = license or card.data.license
        more = [tags] if isinstance(tags, str) else tags or []
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *more]))
        card.save(path)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing, because Trainer calls this before the checkpoint is complete."""

    def push_checkpoint(self, folder: Path) -> None:
        """Push a complete checkpoint during training, according to `hub_strategy`.

        The raw weights are uploaded in the background. Strategies that include checkpoints then upload the training
        state in the foreground.
        """
        args, busy = self.args, self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if busy and not args.hub_always_push:
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        try:
            # Upload from the run's folder, because the checkpoint may be deleted during the upload.
            for name, source in own_files(folder).files.items():
                Path(args.output_dir, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, Path(args.output_dir, name))
            self.create_model_card()
            contents = checkpoint_contents(args.output_dir, self.hub_model_id)
            self.push_in_progress = PushInProgress([run_as_future(self._commit, contents, message)])
            if args.hub_strategy in WITH_STATE:
                place = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
                own = own_files(folder, with_training_state=True, include=("*",)).files
                contents = Contents({f"{place}/{name}": file for name, file in own.items()})
                validate_no_secrets(contents.files)
                self._finish_current_push()
                self._commit(contents, f"{message}, checkpoint")
        except (OSError, ValueError) as error:
            warnings.warn(PUSH_FAILED.format(error), stacklevel=2)

    def _finish_current_push(self) -> None:
        """Wait for the background push, and warn if it failed."""
        super()._finish_current_push()
        for job in self.push_in_progress.jobs if self.push_in_progress is not None else ():
            if error := job.exception():
                warnings.warn(PUSH_FAILED.format(error), stacklevel=2)
        self.push_in_progress = None


# ---- weights ----


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _validate_state(folder: str) -> None:
    """Raise CheckpointError unless the trainer's state can be read and is valid."""
    validate_plain_metadata(folder)
    with readable(folder, TRAINER_STATE_NAME):
        state = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
        for name, kinds in {"global_step": int, "max_steps": int, "log_history": list, "epoch": (int, float)}.items():
            value = getattr(state, name)
            if not isinstance(value, kinds) or (name == "global_step" and value < 0):
                raise ValueError(f"{name} is {str(value)[:40]!r}")


def _validate_same_weights(folder: Path, model: torch.nn.Module) -> None:
    """Raise CheckpointError unless a checkpoint's weights have the names and shapes of `model`."""
    plain = unwrap_peft_model(model) is model
    weights = model.state_dict() if plain else get_peft_model_state_dict(model)
    main = folder / (SAFE_WEIGHTS_NAME if plain else ADAPTER_SAFE_WEIGHTS_NAME)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    found: dict[str, tuple[int, ...]] = {}
    with readable(folder, "a file of weights"):
        files = {main.name}
        if plain and not main.exists() and index.exists():
            files = set(json.loads(index.read_text())["weight_map"].values())
        elif not main.exists():
            raise CheckpointError(
                f"checkpoint {folder} has no {main.name}, and a run cannot resume from other formats; start a new run "
                "from its weights with --model_name_or_path"
            )
        for name in files:
            with safe_open(folder / Path(name).name, "pt") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    # Tied weights are saved under only one of their names.
    there = {weights[name].data_ptr() for name in found if name in weights}
    known = {*found, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    wrong = [f"{name} {list(shape)} is not in the model" for name, shape in found.items() if name not in weights]
    for name, tensor in weights.items():
        if (shape := found.get(name, tensor.shape)) != tensor.shape:
            wrong.append(f"{name} has shape {list(shape)}, expected {list(tensor.shape)}")
        elif name not in known and tensor.data_ptr() not in there:
            wrong.append(f"{name} {list(tensor.shape)} is missing")
    if wrong:
        raise CheckpointError(
            f"checkpoint {folder} has weights that do not fit this {type(unwrap_peft_model(model)).__name__}: "
            f"{_some(sorted(wrong))}. Nothing was loaded; resume with the --model_type, --preset and "
            "--config_overrides of the original run"
        )
