"""Fields that every model has which makes mass maps of shear: the planes, and the losses of a map."""

from huggingface_hub.dataclasses import strict

from .bounds import LOSS_WEIGHT, bounded, number, whole
from .configuration_cosmo import CosmoRegressionConfig


@strict
class MassMappingConfig(CosmoRegressionConfig):
    r"""Fields shared by `hrm_mass_mapping` and its U-Net baseline.

    Maps, targets and posterior of the parameters are those of `CosmoRegressionConfig`; the channels are g1 and g2 of
    each plane of sources in turn, and maybe the mask.

    Args:
        kappa_std (`list[float]`, *optional*): standard deviation of the convergence in each plane over the training
            set, the unit of the model's maps; 1 if None.
        num_error_rings (`int`, defaults to 12): rings of multipoles for which the power of the map's error is
            predicted.
        map_loss_weight (`float`, defaults to 1): of the map's likelihood in pixels.
        harmonic_loss_weight (`float`, defaults to 1): of its likelihood by multipole.
    """

    model_type = "mass_mapping"
    keys_to_ignore_at_inference = [
        *CosmoRegressionConfig.keys_to_ignore_at_inference,
        "map_loss", "harmonic_loss", "kappa", "kappa_std", "segment_maps",
    ]  # fmt: skip

    num_channels: int = bounded(3, whole(1, 4096))
    mask_channel: bool = True
    kappa_std: list[float] | None = bounded(None, number(1e-30, 1e30, lists=(1, 4096)))
    num_error_rings: int = bounded(12, whole(1, 65_536))
    map_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)
    harmonic_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)

    def validate_architecture(self):
        """Part of `@strict` validation: relations between fields."""
        super().validate_architecture()
        if self.num_map_channels % 2:
            raise ValueError(
                f"num_channels={self.num_channels} with mask_channel={self.mask_channel} leaves "
                f"{self.num_map_channels} maps; expected an even number: g1 and g2 of each plane"
            )
        if self.kappa_std is not None and len(self.kappa_std) != self.num_planes:
            raise ValueError(f"kappa_std has {len(self.kappa_std)} entries for {self.num_planes} planes")

    @property
    def num_planes(self) -> int:
        """Convergence maps that are made."""
        return self.num_map_channels // 2


__all__ = ["MassMappingConfig"]
