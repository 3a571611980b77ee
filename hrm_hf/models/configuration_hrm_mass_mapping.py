"""Configuration of the recurrent model that reconstructs mass maps from noisy, masked shear."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import COUNT, bounded, whole
from .configuration_cosmo import MassMappingConfig
from .configuration_hrm_cosmo import HrmCosmoConfig


@strict
class HrmMassMappingConfig(MassMappingConfig, HrmCosmoConfig):
    r"""Configuration of `hrm_mass_mapping`: convolutions over pixels combined with attention over patches.

    It has the fields of `MassMappingConfig` for maps, and those of `HrmCosmoConfig` for the stem, its statistics, the
    high level, cycles and halting. The halting threshold is a fraction of the map's squared error. Other fields:

    Args:
        cell_size (`int`, defaults to 2): side length in pixels of a low-level cell.
        cell_channels (`int`, defaults to 32): channels of the low level.
        num_proposals (`int`, defaults to 4): number of maps that the low level proposes in addition to those from the
            forward operator.
        num_gain_nodes (`int`, defaults to 16): multipoles between which the gain of each proposal is interpolated.
    """

    model_type = "hrm_mass_mapping"

    padding_mode: str = "circular"
    hidden_size: int = bounded(64, COUNT)
    H_cycles: int = bounded(1, COUNT)
    cell_size: int = bounded(2, whole(1, 64))
    cell_channels: int = bounded(32, COUNT)
    num_proposals: int = bounded(4, whole(1, 1024))
    num_gain_nodes: int = bounded(16, whole(2, 65_536))

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "test": {
            "image_size": 16, "stem_channels": [8, 16], "hidden_size": 16, "num_attention_heads": 2, "expansion": 1,
            "num_ps_bins": 4, "halt_max_steps": 2, "cell_channels": 8, "num_proposals": 2, "num_gain_nodes": 4,
            "num_error_rings": 4,
        },
        "mass-64": {"num_components": 4, "mse_loss_weight": 0.5},
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        if self.stem_channels is None:
            self.stem_channels = [16, 32, 64]
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        if self.patch_size % self.cell_size:
            raise ValueError(
                f"cell_size={self.cell_size}: must divide {self.patch_size}, the patch size after "
                f"{len(self.stem_channels)} stages"
            )


__all__ = ["HrmMassMappingConfig"]
