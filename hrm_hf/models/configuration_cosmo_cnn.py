"""Configuration of the convolutional baseline for cosmological parameters, and its sizes."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_cosmo import CosmoRegressionConfig


@strict
class CosmoCnnConfig(CosmoRegressionConfig):
    r"""Configuration of `cosmo_cnn`: a residual network without recurrence, beside which `hrm_cosmo` is judged.

    The fields for maps, targets and posterior are those of `CosmoRegressionConfig`.

    Args:
        embedding_size (`int`, defaults to 24): channels of the stem, which keeps the resolution.
        hidden_sizes (`list[int]`, defaults to `[32, 64, 128]`): channels of each stage; each halves the side.
        depths (`list[int]`, defaults to 1 for each): residual blocks of each stage.
        hidden_act (`str`, defaults to "relu"): activation, as in transformers.
    """

    model_type = "cosmo_cnn"

    embedding_size: int = 24
    hidden_sizes: list[int] | None = None
    depths: list[int] | None = None
    hidden_act: str = "relu"

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "test": {"image_size": 16, "embedding_size": 4, "hidden_sizes": [8, 16]},
        "cosmo-64": {"num_components": 4, "mse_loss_weight": 0.5},
        "cosmo-256": {
            "image_size": 256,
            "hidden_sizes": [32, 64, 96, 128, 128],
            "num_components": 4,
            "mse_loss_weight": 0.5,
        },
    }

    def __post_init__(self, **kwargs):
        if self.hidden_sizes is None:
            self.hidden_sizes = [32, 64, 128]
        if self.depths is None:
            self.depths = [1] * len(self.hidden_sizes)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict` validation: relations between fields."""
        super().validate_architecture()
        if not self.hidden_sizes or min(self.hidden_sizes) < 1 or self.embedding_size < 1:
            raise ValueError(
                f"hidden_sizes={self.hidden_sizes} and embedding_size={self.embedding_size} must be positive numbers"
            )
        if len(self.depths) != len(self.hidden_sizes) or min(self.depths) < 1:
            raise ValueError(
                f"depths={self.depths} must hold a positive number for each of {len(self.hidden_sizes)} hidden_sizes"
            )
        if self.image_size < 2 ** len(self.hidden_sizes):
            raise ValueError(
                f"image_size={self.image_size} leaves nothing after {len(self.hidden_sizes)} stages that halve it"
            )


__all__ = ["CosmoCnnConfig"]
