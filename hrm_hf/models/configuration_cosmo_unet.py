"""Configuration of the U-Net baseline for mass maps."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import bounded, whole
from .configuration_cosmo import MassMappingConfig


@strict
class CosmoUnetConfig(MassMappingConfig):
    r"""Configuration of `cosmo_unet`, a non-recurrent U-Net and the baseline for `hrm_mass_mapping`.

    In addition to the fields of `MassMappingConfig` (maps, targets, posterior):

    Args:
        hidden_sizes (`list[int]`, defaults to `[16, 32, 40, 50]`): channels of each level. The first level has full
            resolution; each further level halves it.
    """

    model_type = "cosmo_unet"

    padding_mode: str = "circular"
    hidden_sizes: list[int] | None = bounded(None, whole(1, 2**20, lists=(2, 16)))

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "test": {"image_size": 16, "hidden_sizes": [4, 8], "num_error_rings": 4},
        "mass-64": {"num_components": 4, "mse_loss_weight": 0.5},
    }

    def __post_init__(self, **kwargs):
        if self.hidden_sizes is None:
            self.hidden_sizes = [16, 32, 40, 50]
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        halvings = len(self.hidden_sizes) - 1
        if self.image_size % 2**halvings:
            raise ValueError(
                f"image_size={self.image_size}: must be a multiple of {2**halvings}; each level halves it"
            )


__all__ = ["CosmoUnetConfig"]
