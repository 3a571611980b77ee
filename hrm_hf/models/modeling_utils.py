"""What the pretrained-model classes of the package share: the code in their checkpoints, and care of 4-bit weights.

A checkpoint that carries its code names every head of its architecture, not only the one that was saved, and goes to
the Hub with a card of ours where it would get the library's empty one.
"""

from collections.abc import Callable

from .quantised_weights import mend_4bit_maps


class CheckpointCodeMixin:
    """For pretrained-model classes; `hrm_hf.registry` fills `_auto_map` with Auto class -> "module.Class".

    It also fills `_complete_push`, which adds a model card and the code's licence to a folder (argument 1) that goes
    to a repository (2). Where the code runs without the package, a push has the library's card.
    """

    _auto_map: dict[str, str] | None = None
    _complete_push: Callable[[str, str], None] | None = None

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers."""
        if self._auto_map:
            self.config.auto_map = dict(self._auto_map)
        super().save_pretrained(save_directory, **kwargs)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """The last step of `push_to_hub` in transformers, with a card that says what the model is."""
        if self._complete_push:
            self._complete_push(working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers; 4-bit weights of bitsandbytes are then right on the CPU, too."""
        loaded = super().from_pretrained(*args, **kwargs)
        mend_4bit_maps(loaded[0] if isinstance(loaded, tuple) else loaded)  # a tuple if loading info is asked for
        return loaded

    def load_adapter(self, peft_model_id: str | None = None, *args, **kwargs):
        """As in transformers. Raises ValueError where it would leave out a part of a DoRA adapter (5.23 does)."""
        info = super().load_adapter(peft_model_id, *args, **kwargs)
        lost = [name for name in info.missing_keys if "lora_magnitude_vector" in name]
        if lost:
            raise ValueError(
                f"{peft_model_id} is a DoRA adapter, and its lengths of rows are lost when transformers loads it "
                f"({lost[0]}, ...): use peft's PeftModel.from_pretrained(base, {str(peft_model_id)!r}), or merge it"
            )
        return info
