"""Configuration of the convolutional baseline for cosmological parameters."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import COUNT, bounded, whole
from .configuration_cosmo import CosmoRegressionConfig


@strict
class CosmoCnnConfig(CosmoRegressionConfig):
    r"""Configuration of `cosmo_cnn`, a non-recurrent residual network and the baseline for `hrm_cosmo`.

    In addition to the fields of `CosmoRegressionConfig` (maps, targets, posterior):

    Args:
        embedding_size (`int`, defaults to 24): channels of the stem, which keeps the resolution.
        hidden_sizes (`list[int]`, defaults to `[32, 64, 128]`): channels of each stage; each stage halves the
            resolution.
        depths (`list[int]`, defaults to 1 for each): residual blocks of each stage.
        hidden_act (`str`, defaults to "relu"): name of the activation function, as in transformers.
    """

    model_type = "cosmo_cnn"

    embedding_size: int = bounded(24, COUNT)
    hidden_sizes: list[int] | None = bounded(None, whole(1, 2**20, lists=(1, 16)))
    depths: list[int] | None = bounded(None, whole(1, 10_000, lists=(1, 16)))
    hidden_act: str = "relu"

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "test": {"image_size": 16, "embedding_size": 4, "hidden_sizes": [8, 16]},
        "cosmo-64": {"num_components": 4, "mse_loss_weight": 0.5},
        "cosmo-256": {
            "image_size": 256, "hidden_sizes": [32, 64, 96, 128, 128], "num_components": 4, "mse_loss_weight": 0.5,
        },
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        if self.hidden_sizes is None:
            self.hidden_sizes = [32, 64, 128]
        if self.depths is None:
            self.depths = [1] * len(self.hidden_sizes)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        stages = len(self.hidden_sizes)
        if len(self.depths) != stages:
            raise ValueError(f"depths={self.depths}: must have {stages} entries, like hidden_sizes")
        if self.image_size < 2**stages:
            raise ValueError(f"image_size={self.image_size}: must be >= {2**stages}, because each stage halves it")


__all__ = ["CosmoCnnConfig"]
