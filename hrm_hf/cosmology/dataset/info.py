"""Content of `cosmology.json`: how the maps of a data set were simulated, or which files they were read from.

`CosmologyPlan` determines every map of a simulated data set, `CosmologyInfo` adds the statistics of a finished one,
and `FilesInfo` describes maps from files. `MapsInfo` is their common interface for training.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...io.files import CHECKSUMS
from ..simulation.fields import PRIOR, Cosmology
from ..simulation.lpt import validate_width
from ..simulation.settings import GENERATOR_VERSION, LEGACY, PERIODIC, MapSettings, SurveySettings


if TYPE_CHECKING:
    import datasets

INFO_FILE = "cosmology.json"
SPLITS = ("train", "test")
TEST_ID = 10**9  # first cosmology_id of simulated test maps, so that no id occurs in both splits
PARAMETERS = ("omega_m", "sigma_8")
TYPES = {"source": "string", "longitude": "float64", "latitude": "float64"}  # types of columns that are not float32
TYPES |= dict.fromkeys(("axis", "slab", "seed", "cosmology_id"), "int64")
FILE_COLUMNS = {
    "healpix": ("source", "longitude", "latitude"),
    "fits": ("source",),
    "quijote": ("source", "axis", "slab", "redshift"),
}
UNITS = {
    "mask": "true where observed",
    "kappa": "convergence behind the shear, dimensionless, noiseless, mean 0; 0 where the file has no value",
    "source": "file that the map was read from",
    "longitude": "longitude of the center in degrees, in the coordinates of the file",
    "latitude": "latitude of the center in degrees, in the coordinates of the file",
    "axis": "axis of the cube along which it was projected",
    "slab": "index of the slab along the axis",
    "redshift": "redshift of the snapshot",
    "omega_m": "matter density divided by the critical density, today",
    "sigma_8": "rms linear density contrast in spheres of 8 Mpc/h, today",
    "s_8": "sigma_8 (omega_m / 0.3)^0.5",
    "seed": "seed of generate_map",
    "cosmology_id": f"id of the pair of parameters; starts at {TEST_ID} in the test split of simulated maps",
}
MAP_UNITS = {
    "healpix": "as in the file; convergence kappa, dimensionless, for mass maps",
    "fits": "as in the file",
    "quijote": "density contrast of matter in a slab, dimensionless; NOT convergence",
}  # kinds that are not listed contain convergence or, for legacy kinds, gray values
SHEAR_UNIT = "shear, dimensionless: g1 and g2 of each plane in turn, 0 where not observed"


class MapsInfo:
    """Properties of a map data set that a model needs.

    `pixel_mean` and `pixel_std` are per channel, in map units, over the observed pixels of the train split, or of the
    test split if there is no train split. Subclasses add `target_names`, `column_names()`, and `notes()` for the data
    card.
    """

    labelled = True  # whether the parameters of the maps are known
    origin: ClassVar[str]

    @property
    def kind(self) -> str:
        return self.settings.kind

    def features(self) -> "datasets.Features":
        from datasets import Array2D, Array3D, Features, Value

        settings, size = self.settings, self.settings.size
        pixels = {"map": Array3D((settings.channels, size, size), "float32"), "mask": Array2D((size, size), "bool")}
        if "kappa" in self.column_names():
            pixels["kappa"] = Array3D((settings.planes, size, size), "float32")
        return Features({name: pixels.get(name) or Value(TYPES.get(name, "float32")) for name in self.column_names()})

    def units(self) -> dict[str, str]:
        """Return the meaning and unit of each column."""
        drawn = "gray value, 0 to 1" if self.kind in LEGACY else "convergence kappa, dimensionless"
        maps = SHEAR_UNIT if self.settings.observable == "shear" else MAP_UNITS.get(self.kind, drawn)
        return {name: maps if name == "map" else UNITS[name] for name in self.column_names()}

    def config_fields(self) -> dict[str, Any]:
        """Return the model config fields that depend on the data. Raises ValueError if the maps have no labels."""
        return {
            "image_size": self.settings.size,
            "num_channels": self.settings.channels + self.settings.has_mask,
            "mask_channel": self.settings.has_mask,
            "target_names": self.target_names,
            "derived_s8": "sigma_8" in self.target_names,
            "prior_bounds": [list(self.prior[name]) for name in self.target_names],
            "pixel_mean": list(self.pixel_mean),
            "pixel_std": list(self.pixel_std),
            "padding_mode": "circular" if self.kind in PERIODIC else "zeros",
        }


# ---- drawn maps ----


def column_names(settings: MapSettings) -> list[str]:
    """Return the column names of simulated maps. Workers call this to avoid the slow import of `datasets`."""
    maps = ["map", *(["mask"] if settings.has_mask else []), *(["kappa"] if settings.observable == "shear" else [])]
    parameters = ["omega_m"] if settings.kind in LEGACY else [*PARAMETERS, "s_8"]
    return [*maps, *parameters, "seed", "cosmology_id"]


@dataclass(frozen=True, kw_only=True)
class CosmologyPlan:
    """Options that determine every map of a data set.

    Args:
        counts: number of maps in each split; a larger data set begins with the maps of a smaller one.
        prior: bounds of the uniform prior of `omega_m` and `sigma_8`.
        maps_per_cosmology: maps per pair of parameters. shard_size: maps per file.
        generator_version: other versions may draw different maps from the same seed.
    """

    settings: MapSettings
    counts: Mapping[str, int]
    seed: int = 0
    prior: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(PRIOR))
    maps_per_cosmology: int = 1
    shard_size: int = 1000
    generator_version: int = GENERATOR_VERSION

    def __post_init__(self):
        for name, (low, high) in self.prior.items():
            if not low < high:
                raise ValueError(f"prior of {name}={low},{high}: the lower bound must be below the upper bound")
        for end in (0, 1):  # raises ValueError for invalid bounds
            Cosmology(self.prior["omega_m"][end], self.prior["sigma_8"][end])
        if self.settings.kind == "2lpt":
            widest = Cosmology(self.prior["omega_m"][0], self.prior["sigma_8"][0])
            validate_width(widest, self.settings.box_mpc, self.settings)

    def parameters(self, split: str, cosmology: int) -> dict[str, float]:
        """Draw the parameters of cosmology number `cosmology`, rounded to float32 as in the data set."""
        uniform = self._generator(split, cosmology, 0).random(len(PRIOR))
        ends = [self.prior[name] for name in PRIOR]
        return {name: float(np.float32(low + (high - low) * x)) for name, (low, high), x in zip(PRIOR, ends, uniform)}

    def map_seed(self, split: str, cosmology: int, realisation: int) -> int:
        """Return the seed of a map, below 2^63."""
        return int(self._generator(split, cosmology, 1 + realisation).integers(2**63))

    def _generator(self, split: str, cosmology: int, purpose: int) -> np.random.Generator:
        """Return a random generator. `purpose` is 0 for a cosmology's parameters, and 1 + r for its realization r."""
        entropy = [self.seed, SPLITS.index(split), cosmology, purpose]
        return np.random.default_rng(np.random.SeedSequence(entropy))


@dataclass(frozen=True, kw_only=True)
class CosmologyInfo(CosmologyPlan, MapsInfo):
    """Description of a finished data set of simulated maps."""

    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    origin: ClassVar[str] = "Simulated, not observed."

    @property
    def target_names(self) -> list[str]:
        return ["omega_m"] if self.kind in LEGACY else list(PARAMETERS)

    def column_names(self) -> list[str]:
        return column_names(self.settings)

    def notes(self) -> dict[str, Any]:
        return asdict(self.settings) | {"seed": self.seed, "generator_version": self.generator_version}


# ---- maps from files ----


@dataclass(frozen=True)
class FileSettings(SurveySettings):
    """Settings of maps read from files; the noise and masks of `SurveySettings` apply to shear only.

    Args:
        kind: one of FILE_COLUMNS. size: pixels per side. channels: number of channels, without the mask.
        side_deg: side of a patch in degrees, None if unknown. options: options of the reader.
    """

    kind: str
    size: int
    channels: int
    has_mask: bool
    side_deg: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    source_redshifts: ClassVar[None] = None  # unknown

    def __post_init__(self):
        super().__post_init__()
        if self.observable == "shear" and not (self.side_deg and 0 < self.side_deg < np.inf):
            raise ValueError(f"side_deg={self.side_deg}: must be positive; shear needs it for noise and masks")

    @property
    def planes(self) -> int:
        return self.channels // 2 if self.observable == "shear" else self.channels


@dataclass(frozen=True, kw_only=True)
class FilesInfo(MapsInfo):
    """Description of a data set with maps that were read from files.

    Args:
        seed: seed of the split by universe, and of the noise and masks of shear.
        labels: file name of the table of parameters, or None. prior_bounds: bounds per parameter; None without labels.
        skipped: number of sky patches that were skipped because too little of them was observed.
    """

    settings: FileSettings
    counts: Mapping[str, int]
    labels: str | None
    prior_bounds: Mapping[str, tuple[float, float]] | None
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    seed: int = 0
    skipped: int = 0
    origin: ClassVar[str] = "Read from files."

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    @property
    def prior(self) -> Mapping[str, tuple[float, float]]:
        """Return `prior_bounds`. Raise ValueError if there are no labels."""
        if self.prior_bounds is None:
            raise ValueError(
                f"the {self.kind} maps of this data set have no labels {' and '.join(PARAMETERS)}, so models cannot "
                "be trained or evaluated on them; read the files again with --labels TABLE, or apply a trained model "
                'to the maps with pipeline("cosmology-regression")'
            )
        return self.prior_bounds

    @property
    def target_names(self) -> list[str]:
        return list(self.prior)

    def column_names(self) -> list[str]:
        masks = ["mask"] if self.settings.has_mask else []
        kappa = ["kappa"] if self.settings.observable == "shear" else []
        parameters = [] if self.labels is None else [*PARAMETERS, "s_8", "cosmology_id"]
        return ["map", *masks, *kappa, *FILE_COLUMNS[self.kind], *parameters]

    def notes(self) -> dict[str, Any]:
        survey = {each.name: getattr(self.settings, each.name) for each in fields(SurveySettings)}
        noted = {"kind": self.kind, **self.settings.options, "labels": self.labels, "patches skipped": self.skipped}
        return noted | (survey if self.settings.observable == "shear" else {})


def info_from_json(values: dict[str, Any]) -> CosmologyInfo | FilesInfo:
    """Parse the content of `cosmology.json`. Raises ValueError, TypeError or KeyError if it is invalid."""
    read = values["settings"]["kind"] in FILE_COLUMNS
    values = values | {"settings": (FileSettings if read else MapSettings)(**values["settings"])}
    values.pop(CHECKSUMS, None)
    bounds = "prior_bounds" if read else "prior"
    if values[bounds] is not None:
        values[bounds] = {name: (float(low), float(high)) for name, (low, high) in values[bounds].items()}
    for name in ("pixel_mean", "pixel_std"):
        values[name] = tuple(map(float, values[name]))
    return (FilesInfo if read else CosmologyInfo)(**values)
