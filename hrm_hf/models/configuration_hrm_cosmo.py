"""Configuration of the hierarchical recurrent model that infers cosmological parameters from maps."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .bounds import ANY_NUMBER, COUNT, LOSS_WEIGHT, PROBABILITY, bounded, number, whole
from .configuration_cosmo import CosmoRegressionConfig


@strict
class HrmCosmoConfig(CosmoRegressionConfig):
    r"""Configuration of `hrm_cosmo`, in which HRM's two levels process the tokens of a convolutional stem.

    In addition to the fields of `CosmoRegressionConfig` (maps, targets, posterior):

    Args:
        stem (`str`, defaults to "conv"): "conv", or "patch" for a linear projection of patches, as in ViT.
        stem_channels (`list[int]`, defaults to `[16, 48, 96, 96]`): channels after each stage; each stage halves the
            resolution. With "patch", only the number of stages matters: a patch is 2^stages pixels wide.
        use_summary_tokens (`bool`, defaults to `True`): add the mean of each stage's features over the map as a token.
        use_power_spectrum (`bool`, defaults to `True`): add binned log power spectra of the maps to the CLS token.
        num_ps_bins (`int`, defaults to 12): number of bins of the power spectrum, up to the Nyquist frequency.
        use_histogram (`bool`, defaults to `True`): also add histograms and moments at four scales.
        statistics_dropout (`float`, defaults to 0.3): dropout on the hidden layer that reads these statistics.
        max_map_distance (`float`, *optional*): limit for `HrmCosmoForRegression.map_distance`. The posterior of a map
            beyond the limit is not trustworthy. Training sets it to the value that one in 200 held-out maps exceeds.
        pos_encodings (`str`, defaults to "none"): "none" (the sky has no preferred position) or "learned".
        hidden_size (`int`, defaults to 96), num_attention_heads (`int`, defaults to 4): as in transformers, for both
            levels.
        expansion (`float`, defaults to 4): the SwiGLU width is round(expansion * D * 2 / 3), rounded up to a multiple
            of 256.
        H_layers, L_layers (`int`, defaults to 1): blocks of the high- and of the low-level module.
        H_cycles, L_cycles (`int`, defaults to 2): high-level cycles per segment, low-level steps per cycle.
        halt_max_steps (`int`, defaults to 4): number of segments in training, and default maximum in inference.
        halt_threshold (`float`, defaults to 0.01): adaptive halting stops a map when the expected gain from further
            segments, in nats, is below this threshold.
        halt_loss_weight (`float`, defaults to 0.1): weight of the loss on the predicted gain.
        rms_norm_eps (`float`, defaults to 1e-5): epsilon of the gain-free RMS norms.
    """

    model_type = "hrm_cosmo"
    attribute_map = {"num_heads": "num_attention_heads"}

    stem: str = "conv"
    stem_channels: list[int] | None = bounded(None, whole(1, 2**20, lists=(1, 16)))
    use_summary_tokens: bool = True
    use_power_spectrum: bool = True
    num_ps_bins: int = bounded(12, whole(1, 65_536))
    use_histogram: bool = True
    statistics_dropout: float | int = bounded(0.3, PROBABILITY)
    max_map_distance: float | None = bounded(None, number(0, 1e9))
    pos_encodings: str = "none"
    hidden_size: int = bounded(96, COUNT)
    num_attention_heads: int = bounded(4, COUNT)
    expansion: float | int = bounded(4.0, number(1e-6, 1e4))
    H_layers: int = bounded(1, COUNT)
    L_layers: int = bounded(1, COUNT)
    H_cycles: int = bounded(2, COUNT)
    L_cycles: int = bounded(2, COUNT)
    halt_max_steps: int = bounded(4, COUNT)
    halt_threshold: float | int = bounded(0.01, ANY_NUMBER)
    halt_loss_weight: float | int = bounded(0.1, LOSS_WEIGHT)
    rms_norm_eps: float = bounded(1e-5, PROBABILITY)

    _presets: ClassVar[dict[str, dict[str, Any]]] = {
        "test": {
            "image_size": 16, "stem_channels": [8, 16], "hidden_size": 16, "num_attention_heads": 2, "expansion": 1,
            "num_ps_bins": 4, "halt_max_steps": 2,
        },
        "cosmo-64": {"num_components": 4, "mse_loss_weight": 0.5},
        "cosmo-256": {
            "image_size": 256, "stem_channels": [16, 48, 96, 128, 128], "hidden_size": 128, "num_ps_bins": 24,
            "H_layers": 2, "L_layers": 2, "num_components": 4, "mse_loss_weight": 0.5,
        },
    }  # fmt: skip

    def __post_init__(self, **kwargs):
        if self.stem_channels is None:
            self.stem_channels = [16, 48, 96, 96]
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        for name, allowed in {"stem": ("conv", "patch"), "pos_encodings": ("none", "learned")}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size}: must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size}: must be a multiple of {self.patch_size}, the patch size after "
                f"{len(self.stem_channels)} stages"
            )

    @property
    def patch_size(self) -> int:
        """Side length of a token's patch, in pixels."""
        return 2 ** len(self.stem_channels)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_hidden_layers(self) -> int:
        return self.H_layers + self.L_layers


__all__ = ["HrmCosmoConfig"]
