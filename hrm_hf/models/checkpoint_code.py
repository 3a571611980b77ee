"""A checkpoint that carries its code names every head of its architecture, not only the one that was saved."""


class CheckpointCodeMixin:
    """For pretrained-model classes; `hrm_hf.registration` fills `_auto_map` with Auto class -> "module.Class"."""

    _auto_map: dict[str, str] | None = None

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers."""
        if self._auto_map:
            self.config.auto_map = dict(self._auto_map)
        super().save_pretrained(save_directory, **kwargs)
