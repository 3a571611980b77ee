"""Base configs: fields shared by all sky-map models, and fields shared by mass-mapping models."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .bounds import LOSS_WEIGHT, SOME, SPREAD, BoundedFields, bounded, number, whole
from .modeling_utils import PresetsMixin


S_8 = "s_8"


@strict
class CosmoRegressionConfig(PresetsMixin, BoundedFields, PreTrainedConfig):
    r"""Fields shared by `hrm_cosmo` and its CNN baseline.

    Maps:
        image_size (`int`, defaults to 64): side of a map in pixels.
        num_channels (`int`, defaults to 1): channels of `pixel_values`, including the mask.
        mask_channel (`bool`, defaults to `False`): whether the last channel is a mask (1: observed, 0: not observed).
        padding_mode (`str`, defaults to "zeros"): "zeros", or "circular" for periodic maps.
        pixel_mean, pixel_std (`list[float]`, *optional*): mean and standard deviation of each map channel over the
            training set. (Statistics of a single map would remove its amplitude.) The feature extractor applies them;
            the config only records them.
    Targets:
        target_names (`list[str]`, defaults to `["omega_m", "sigma_8"]`): free parameters in the order of the labels;
            `id2label` and `label2id` are derived from them.
        derived_s8 (`bool`, defaults to `True`): also report s_8 = sigma_8 (omega_m / 0.3)^0.5, which is derived.
        prior_bounds (`list[list[float]]`, *optional*): [low, high] of each target under a flat prior. With bounds, the
            posterior is a density on this box; without bounds, it is a density on all real numbers.
        target_mean, target_std (`list[float]`, *optional*): used to scale the targets if there are no bounds.
    Posterior:
        covariance (`str`, defaults to "cholesky"): covariance of each Gaussian, "diag" or "cholesky".
        num_components (`int`, defaults to 1): number of Gaussians in the mixture.
        min_log_std, max_log_std (`float`, defaults to -5 and 2): limits of the log standard deviations.
        posterior_scale (`float`, defaults to 1): factor on all standard deviations of the mixture. It is fitted to
            held-out maps after training, to correct overconfidence (`PosteriorHead.best_scale`).
        nll_loss_weight, mse_loss_weight (`float`, defaults to 1 and 0): weights of the two parts of the loss.
        initializer_range (`float`, *optional*): standard deviation of new weights; None scales it by the input size.
    """

    model_type = "cosmo_regression"
    # Trainer drops these output fields, so its predictions are the means and stds of the targets and of s_8.
    keys_to_ignore_at_inference = [
        "nll_loss", "mse_loss", "halt_loss", "log_weights", "loc", "scale_tril", "halt_logits", "steps",
        "segment_means", "metrics", "hidden_states",
    ]  # fmt: skip

    chunk_size_feed_forward: int = bounded(0, SOME)  # inherited from transformers, redeclared with a bound
    image_size: int = bounded(64, whole(1, 65_536))
    num_channels: int = bounded(1, whole(1, 4096))
    mask_channel: bool = False
    padding_mode: str = "zeros"
    pixel_mean: list[float] | None = bounded(None, number(-1e30, 1e30, lists=(0, 4096)))
    pixel_std: list[float] | None = bounded(None, number(0, 1e30, lists=(0, 4096)))
    target_names: list[str] | None = None
    derived_s8: bool = True
    prior_bounds: list[list[float]] | None = bounded(None, number(-1e30, 1e30, lists=(0, 4096)))
    target_mean: list[float] | None = bounded(None, number(-1e30, 1e30, lists=(0, 4096)))
    target_std: list[float] | None = bounded(None, number(0, 1e30, lists=(0, 4096)))
    covariance: str = "cholesky"
    num_components: int = bounded(1, whole(1, 4096))
    min_log_std: float | int = bounded(-5.0, number(-100, 100))
    max_log_std: float | int = bounded(2.0, number(-100, 100))
    posterior_scale: float | int = bounded(1.0, number(1e-9, 1e9))
    nll_loss_weight: float | int = bounded(1.0, LOSS_WEIGHT)
    mse_loss_weight: float | int = bounded(0.0, LOSS_WEIGHT)
    initializer_range: float | None = bounded(None, SPREAD)
    problem_type: str | None = "regression"

    def __post_init__(self, **kwargs):
        if self.target_names is None:
            self.target_names = ["omega_m", "sigma_8"]
        targets = f"does not match target_names={self.target_names}, which define the labels; set target_names instead"
        if kwargs.get("num_labels") not in (None, len(self.target_names)):
            raise ValueError(f"num_labels={kwargs['num_labels']}: {targets}")
        if self.id2label is not None and list(self.id2label.values()) != self.target_names:
            raise ValueError(f"id2label={self.id2label}: {targets}")
        super().__post_init__(**kwargs)
        self.id2label = dict(enumerate(self.target_names))
        self.label2id = {name: index for index, name in self.id2label.items()}

    def validate_architecture(self):
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        for name, allowed in {
            "padding_mode": ("circular", "zeros"),
            "covariance": ("diag", "cholesky"),
            "problem_type": ("regression",),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")
        if self.num_map_channels < 1:
            raise ValueError(f"num_channels={self.num_channels}: must be >= 2 with mask_channel=True")
        if self.derived_s8 and not {"omega_m", "sigma_8"} <= set(self.target_names):
            raise ValueError(f"derived_s8=True: needs omega_m and sigma_8 in target_names={self.target_names}")
        lengths = dict.fromkeys(("prior_bounds", "target_mean", "target_std"), (len(self.target_names), "targets"))
        lengths |= dict.fromkeys(("pixel_mean", "pixel_std"), (self.num_map_channels, "maps"))
        for name, (length, what) in lengths.items():
            if (value := getattr(self, name)) is not None and len(value) != length:
                raise ValueError(f"{name} has {len(value)} entries: must have {length}, one for each of the {what}")
        for name, bounds in zip(self.target_names, self.prior_bounds or (), strict=False):
            if len(bounds) != 2 or not bounds[0] < bounds[1]:
                raise ValueError(f"prior_bounds of {name}={bounds}: must be [low, high] with low < high")

    @property
    def num_map_channels(self) -> int:
        """Number of channels, excluding the mask."""
        return self.num_channels - self.mask_channel

    @property
    def reported_names(self) -> list[str]:
        """Column names of posterior samples."""
        return [*self.target_names, S_8] if self.derived_s8 else list(self.target_names)


@strict
class MassMappingConfig(CosmoRegressionConfig):
    r"""Fields shared by `hrm_mass_mapping` and its U-Net baseline.

    It adds these fields to `CosmoRegressionConfig`. The channels are g1 and g2 of each source plane in turn, and
    optionally the mask.

    Args:
        kappa_std (`list[float]`, *optional*): standard deviation of the convergence in each plane over the training
            set. The model's maps are in this unit; 1 if None.
        num_error_rings (`int`, defaults to 12): number of multipole rings. The model predicts the power of the map's
            error in each ring.
        map_loss_weight (`float`, defaults to 1): weight of the map's likelihood in pixels.
        harmonic_loss_weight (`float`, defaults to 1): weight of the map's likelihood by multipole.
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
        """Check that the fields are consistent with each other. `@strict` calls this method."""
        super().validate_architecture()
        if self.num_map_channels % 2:
            channels = f"num_channels={self.num_channels} with mask_channel={self.mask_channel}"
            raise ValueError(f"{channels}: leaves {self.num_map_channels} shear maps; each plane needs two, g1 and g2")
        if self.kappa_std is not None and len(self.kappa_std) != self.num_planes:
            raise ValueError(
                f"kappa_std has {len(self.kappa_std)} entries: must have {self.num_planes}, one per plane"
            )

    @property
    def num_planes(self) -> int:
        return self.num_map_channels // 2


__all__ = ["CosmoRegressionConfig", "MassMappingConfig"]
