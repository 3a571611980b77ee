"""The saved model of a run and its way to the Hub: the part of `HrmTrainer` that deals with complete checkpoints.

What it changes of `Trainer(push_to_hub=True)`: averaged weights are pushed where a run has an average; each push is a
complete checkpoint with its code, as `hrm-hf push` makes them, so pickles and event files stay at home; the card is
that of our template, and one that people have edited stays.
"""

import shutil
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, run_as_future
from safetensors.torch import save_file
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from ..hub import Contents, PushOptions, PushResult, checkpoint_contents, commit_contents, hub_errors
from ..hub.cards import CARD_FILE, new_card_text
from ..hub.manifests import RAW_WEIGHTS_FILE
from ..hub.push import own_files
from ..hub.secrets import validate_no_secrets
from ..registry import ARCHITECTURES


PUSH_FAILED = "a push during training failed, and training went on: {}"
WITH_STATE = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class PushesToHub:
    """For `HrmTrainer`, before `Trainer`."""

    push_in_progress: PushInProgress | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in the library, with errors that say what to do, and no token among arguments that are uploaded."""
        if self.args.hub_token and self.args.hub_strategy in WITH_STATE:
            raise ValueError(
                f"hub_token with hub_strategy={self.args.hub_strategy.value}: the token is in training_args.bin, "
                "which would be uploaded. Log in with `hf auth login`, or set HF_TOKEN"
            )
        with hub_errors("push", self.args.hub_model_id or Path(self.args.output_dir).name):
            super().init_hf_repo(token, private)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A finished run saves averaged weights as the model and keeps the raw ones beside them."""
        if _internal_call:  # a checkpoint, which goes on with raw weights
            super().save_model(output_dir, _internal_call=True)
            return
        self._save_final(output_dir or self.args.output_dir)
        if self.args.push_to_hub:
            self._push_final("Model save")

    def _save_final(self, output_dir: str) -> None:
        if self.average is None:
            super().save_model(output_dir, _internal_call=True)
            return
        with self.averaged_weights():
            super().save_model(output_dir, _internal_call=True)
            if self.args.should_save:
                # Inside the block the average holds the raw weights.
                save_file(self.average.shadow, str(Path(output_dir, RAW_WEIGHTS_FILE)))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> PushResult | Future | None:
        """Saves and pushes the model as it is; arguments as in the library.

        Returns:
            What was pushed, a future of it if `blocking` is False, None in processes other than the first.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self._save_final(self.args.output_dir)
        return self._push_final(commit_message, blocking, token, revision, **kwargs)

    def push_results(self) -> None:
        """Pushes what a script has written after `save_model`: results, plots, figures in the card; if at all."""
        if self.args.push_to_hub:
            self._push_final("Results")

    def _push_final(self, message, blocking=True, token=None, revision=None, **card: Any):
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        self.create_model_card(**card)
        push = self._commit_of(self.args.output_dir, message, token, revision)
        return push() if blocking else run_as_future(push)

    def _commit_of(self, folder: str, message: str, token: str | None = None, revision: str | None = None):
        """Return a call that uploads `folder`, whose files have been checked already."""
        contents = checkpoint_contents(folder, self.hub_model_id)
        target = self._target(folder, message, revision)
        return partial(commit_contents, contents, target, token or self.args.hub_token)

    def _target(self, folder: str | Path, message: str, revision: str | None = None) -> PushOptions:
        revision = revision or self.args.hub_revision
        return PushOptions(sources=[str(folder)], repo_id=self.hub_model_id, message=message, revision=revision)

    def create_model_card(
        self, license: str | None = None, tags: str | list[str] | None = None, **kwargs: Any
    ) -> None:
        """The card of our template; one that is there stays, with `license` and `tags` added to its metadata."""
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir, CARD_FILE)
        if type(self.model.config) not in ARCHITECTURES or not Path(self.args.output_dir, "config.json").exists():
            super().create_model_card(license=license, tags=tags, **kwargs)  # another library's model, or an adapter
            return
        card = ModelCard.load(path) if path.exists() else ModelCard(new_card_text(self.args.output_dir))
        card.data.license = license or card.data.license
        more = [tags] if isinstance(tags, str) else tags or []
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *more]))
        card.save(path)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing yet: the library pushes a checkpoint before it is complete; see `push_checkpoint`."""

    def push_checkpoint(self, folder: str) -> None:
        """Pushes a complete checkpoint of a run that goes on, as `hub_strategy` says.

        Weights are the raw ones, as in the checkpoint. They are uploaded in the background, and no second time before
        that has ended unless `hub_always_push`; the state of training (strategies with checkpoints) is waited for.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if not self.args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        try:
            self._push_on_the_way(Path(folder), message)
            if self.args.hub_strategy in WITH_STATE:
                self._push_state(Path(folder), message)
        except (OSError, ValueError) as error:
            warnings.warn(PUSH_FAILED.format(error), stacklevel=2)

    def _push_on_the_way(self, folder: Path, message: str) -> None:
        # Uploaded from the run's folder: the checkpoint may be deleted before that has ended.
        for name, source in own_files(folder).files.items():
            Path(self.args.output_dir, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, Path(self.args.output_dir, name))
        self.create_model_card()
        self.push_in_progress = PushInProgress([run_as_future(self._commit_of(self.args.output_dir, message))])

    def _push_state(self, folder: Path, message: str) -> None:
        place = "last-checkpoint" if self.args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
        own = own_files(folder, with_training_state=True, include=("*",)).files
        contents = Contents({f"{place}/{name}": file for name, file in own.items()})
        validate_no_secrets(contents.files)
        self._finish_current_push()
        commit_contents(contents, self._target(folder, f"{message}, checkpoint"), self.args.hub_token)

    def _finish_current_push(self) -> None:
        """As in the library, which does not say when a push in the background has failed."""
        super()._finish_current_push()
        for job in self.push_in_progress.jobs if self.push_in_progress is not None else ():
            if error := job.exception():
                warnings.warn(PUSH_FAILED.format(error), stacklevel=2)
        self.push_in_progress = None
