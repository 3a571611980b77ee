"""Options of the commands on maps: building data sets, and evaluating regressors, mass maps and baselines."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ..io.evaluation import EvaluationOptions, validate_data, validate_evaluation, validate_output
from ..io.options import Options, option
from ..io.usage import UsageError


Kind = Literal["lognormal", "gaussian", "2lpt", "des", "legacy-synthetic", "legacy-des", "legacy-2lpt"]
Observable = Literal["convergence", "shear"]
Baseline = Literal[
    "spectrum-ridge", "spectrum-quadratic", "spectrum-gp", "spectrum-pdf-ridge", "spectrum-pdf-quadratic"
]
MapMethod = Literal["kaiser-squires", "wiener", "wiener-mean"]
Steps = Literal["fixed", "adaptive"]

NOISE_AND_MASKS = ("sigma_e", "galaxies", "mask_fraction", "mask_edge_share", "hole_arcmin")
# Options of the reader of each kind of file, and its further options for shear.
READS = {
    "healpix": ("mask", "side_deg", "size", "count", "centre", "min_observed", "field"),
    "fits": ("mask", "hdu"),
    "quijote": ("slab_mpc",),
}
READS_FOR_SHEAR = {"healpix": ("margin",), "fits": ("margin", "pixel_arcmin"), "quijote": ()}


def numbers(name: str, text: str, count: int | None = None) -> tuple[float, ...]:
    """Parse numbers separated by commas. Raises UsageError for other text, or another count than `count`."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if not values or (count and len(values) != count):
        raise UsageError(f"{name}={text!r}: expected {count or 'some'} numbers with commas between them", _flag(name))
    return values


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclasses.dataclass(kw_only=True)
class SurveyOptions(Options):
    """Options of every data set of maps."""

    out: Path = option("Folder to write.")
    observable: Observable = option(
        "convergence; or shear: g1 and g2 of each plane of sources, with the convergence behind them.", "convergence"
    )
    sigma_e: float | None = option(
        "Dispersion of ellipticities: shape noise. Default 0, none; des: 0.37 (0.26 for each component).", None
    )
    galaxies: float | None = option("Sources per square arcmin, of all channels; default 10, des: 5.59.", None)
    mask_fraction: float | None = option("des, shear: share of pixels that a drawn mask hides, default 0.", None)
    mask_edge_share: float | None = option(
        "Share of these beyond the survey's edge, default 0.5; the others are in holes.", None
    )
    hole_arcmin: str | None = option("Smallest and largest radius of a hole around a star, default 2,12.", None)
    omega_m: str | None = option("Prior: lowest and highest value; default 0.1,0.5, of files as in the table.", None)
    sigma_8: str | None = option("Prior: lowest and highest value; default 0.6,1.0, of files as in the table.", None)
    seed: int = option("Seed of everything that is drawn.", 0, min=0)

    def survey(self) -> dict[str, Any]:
        """Return the given fields of `SurveySettings`."""
        holes = None if self.hole_arcmin is None else numbers("hole_arcmin", self.hole_arcmin, 2)
        fields = {"observable": self.observable, "sigma_e": self.sigma_e, "galaxies_per_arcmin2": self.galaxies}
        fields |= {"mask_fraction": self.mask_fraction, "mask_edge_share": self.mask_edge_share, "hole_arcmin": holes}
        return {name: value for name, value in fields.items() if value is not None}

    def prior(self) -> dict[str, tuple[float, float]]:
        """Return the given bounds of parameters."""
        given = {name: getattr(self, name) for name in ("omega_m", "sigma_8")}
        return {name: numbers(name, text, 2) for name, text in given.items() if text is not None}

    def _refuse(self, names: Iterable[str], what: str) -> None:
        """Raise UsageError for the first option that was given although it has no effect."""
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"{name}={getattr(self, name)}: has no effect on {what}; leave it out", _flag(name))


@dataclasses.dataclass(kw_only=True)
class BuildCosmology(SurveyOptions):
    """Options of `hrm-hf data cosmology`; None stands for the default of `MapSettings` or of the kind."""

    samples: int = option("Maps of the train split.", min=1)
    kind: Kind = option(
        "Kind of maps. des: a survey with a mask; legacy-*: for compatibility tests only.", "lognormal"
    )
    test_samples: int | None = option("Maps of the test split, of other cosmologies; default an eighth.", None, min=0)
    size: int = option("Pixels a side.", 64, min=8)
    side_deg: float | None = option("Side of the patch in degrees, default 5.", None)
    source_redshifts: str | None = option(
        "Source redshift of each channel, as 0.5,1.0; default 1.0, des: 0.34,0.52,0.74,0.94.", None
    )
    box_mpc: float | None = option("2lpt: side of the box in Mpc/h, default 256.", None)
    box_grid: int | None = option("2lpt: particles a side of the box, default 64.", None)
    maps_per_cosmology: int = option("Maps of each pair of parameters.", 1, min=1)
    workers: int = option("Processes that draw maps, one thread each; the maps do not depend on it.", 1, min=1)
    shard_size: int = option("Maps in a file.", 1000, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = [] if self.kind == "des" or self.observable == "shear" else list(NOISE_AND_MASKS[2:])
        unused += [] if self.kind == "2lpt" else ["box_mpc", "box_grid"]
        if self.kind.startswith("legacy-"):
            unused += ["side_deg", "source_redshifts", "sigma_e", "galaxies"]
        self._refuse(unused, f"maps of kind {self.kind}")

    def settings(self) -> dict[str, Any]:
        """Return the given fields of `MapSettings`."""
        planes = self.source_redshifts
        fields = {"kind": self.kind, "size": self.size, "side_deg": self.side_deg, "box_mpc": self.box_mpc}
        fields |= {"box_grid": self.box_grid}
        fields |= {"source_redshifts": None if planes is None else numbers("source_redshifts", planes)}
        return {name: value for name, value in fields.items() if value is not None} | self.survey()


@dataclasses.dataclass(kw_only=True)
class BuildFromFiles(SurveyOptions):
    """Options of `hrm-hf data cosmology-files`."""

    paths: list[Path] = option(
        "HEALPix files of one sky, a channel each; or FITS images; or Quijote cubes df_m_N_CIC_z=Z.npy.",
        argument=True,
        metavar="PATH",
    )
    labels: Path | None = option(
        "Table with columns omega_m, sigma_8 and file, or Quijote's latin_hypercube_params.txt; none: no labels.", None
    )
    mask: Path | None = option("HEALPix or FITS file like the maps, above 0 where observed.", None)
    side_deg: float | None = option("HEALPix: side of a patch in degrees, default 5.", None)
    size: int | None = option("HEALPix: pixels a side, default 64.", None, min=8)
    count: int | None = option("HEALPix: at most so many patches.", None, min=1)
    centre: list[str] | None = option("HEALPix: LONGITUDE,LATITUDE of a patch in degrees. Several times.", None)
    min_observed: float | None = option(
        "HEALPix: least share of observed pixels of a patch, default 0.5.", None, min=0, max=1
    )
    field: int | None = option("HEALPix: number of the map in a file, default 0.", None, min=0)
    hdu: int | None = option("FITS: number of the image; default the first one.", None, min=0)
    slab_mpc: float | None = option("Quijote: thickness of a slab in Mpc/h, default 125.", None)
    test_share: float = option("Share of the universes in the test split; 1: all, no train split.", 1.0, min=0, max=1)
    margin: float | None = option(
        "Shear: sky around a patch whose mass shears it too, in sides of the patch; default 0.5.", None, min=0, max=2
    )
    pixel_arcmin: float | None = option("FITS, shear: side of a pixel in arcmin.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observable == "convergence":
            self._refuse(NOISE_AND_MASKS, "convergence from files")
        if self.labels is None:
            self._refuse(("omega_m", "sigma_8"), "maps without --labels")

    def reader(self, kind: str) -> dict[str, Any]:
        """Return the given options of the reader of a kind of files. Raises UsageError for others."""
        known = READS[kind] + (READS_FOR_SHEAR[kind] if self.observable == "shear" else ())
        every = dict.fromkeys(name for reads in (READS, READS_FOR_SHEAR) for names in reads.values() for name in names)
        self._refuse([name for name in every if name not in known], f"{self.observable} of {kind} files")
        given = {name: getattr(self, name) for name in known if getattr(self, name) is not None}
        if "centre" in given:
            given["centres"] = [numbers("centre", text, 2) for text in given.pop("centre")]
        return given


@dataclasses.dataclass(kw_only=True)
class EvaluateMaps(Options):
    """Options of every evaluation on maps."""

    data: str = option("Cosmology data set: a folder, or a data set on the Hub.")
    limit: int | None = option("Evaluate only the first maps of the split.", None, min=2)
    seed: int = option("Seed of the draws, the bootstraps and TARP's reference points.", 0, min=0)
    out: Path | None = option("Folder for results.json and plots.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_data(self.data, "cosmology data set")
        if self.out is not None:
            validate_output(self.out)


@dataclasses.dataclass(kw_only=True)
class EvaluateCosmo(EvaluationOptions, EvaluateMaps):
    """Options of `hrm-hf eval cosmo`."""

    split: str = option("Split to evaluate.", "test")
    steps: Steps = option("fixed: run all segments; adaptive: stop when more would gain little.", "fixed")
    max_steps: int | None = option("Maximum number of segments; the config's by default.", None, min=1)
    baseline: Path | None = option("results.json of cosmo-baseline, or its folder: also report ratios to it.", None)
    shift_data: str | None = option("Data set of another generator, to evaluate on as well.", None)
    num_samples: int = option("Draws from each posterior.", 1000, min=100)
    batch_size: int = option("Maps at a time.", 64, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift_data:
            validate_data(self.shift_data, "cosmology data set")


@dataclasses.dataclass(kw_only=True)
class EvaluateBaseline(EvaluateMaps):
    """Options of `hrm-hf eval cosmo-baseline`."""

    method: Baseline = option("Summary statistics of a map, and the regression on them.")
    train: int | None = option("Train on only the first maps of the training split.", None, min=10)
    num_samples: int = option("Draws from each posterior.", 1000, min=100)


# Options of `hrm-hf eval cosmo-map` for one of its two forms alone, and their defaults.
OF_MODELS = {"split": "test", "steps": "fixed", "num_samples": 1000, "batch_size": 50}
OF_METHODS = {"train": 1000, "draws": 0, "batch_size": 100}


@dataclasses.dataclass(kw_only=True)
class EvaluateMassMaps(EvaluateMaps):
    """Options of `hrm-hf eval cosmo-map`: a trained model, or a method that needs none.

    Values that are None become those of `OF_MODELS` or `OF_METHODS`.
    """

    model: str | None = option(
        "Checkpoint folder, or a model on the Hub; or give --method.", None, argument=True, metavar="MODEL"
    )
    method: MapMethod | None = option(
        "Instead of MODEL. kaiser-squires: with the smoothing that is best on training maps; wiener: with the true "
        "spectrum of each map; wiener-mean: with the mean spectrum of the training maps.",
        None,
    )
    split: str | None = option("MODEL: split to evaluate; test by default.", None)
    steps: Steps | None = option(
        "MODEL: fixed (the default) runs all segments; adaptive stops when more would gain little.", None
    )
    max_steps: int | None = option("MODEL: maximum number of segments; the config's by default.", None, min=1)
    num_samples: int | None = option("MODEL: draws from each posterior; 1000 by default.", None, min=100)
    train: int | None = option("--method: number of training maps to use; 1000 by default.", None, min=10)
    draws: int | None = option(
        "Wiener filters: draws of the error, for pixel uncertainties; none by default.", None, min=0
    )
    batch_size: int | None = option("Maps at a time; 50 for a model and 100 for a method by default.", None, min=1)
    device: str | None = option("MODEL: cpu, cuda, mps, ...; the best available by default.", None)
    update_card: bool = option("MODEL: write the results into MODEL/README.md.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.method is None):
            found = "neither is given" if self.model is None else "both are given"
            raise UsageError(f"{found}; expected one: a trained model, or a method", "MODEL or --method")
        of_models = ("split", "steps", "num_samples", "max_steps", "device", "update_card")
        wanted, others = ("--method", ("train", "draws")) if self.model else ("MODEL", of_models)
        for name in others:
            if getattr(self, name):
                raise UsageError(f"goes with {wanted} only, which is not given; leave it out", _flag(name))
        for name, value in (OF_MODELS if self.model else OF_METHODS).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.model:
            validate_evaluation(self.model, self.out, self.update_card)
        if self.draws and self.method == "kaiser-squires":
            raise UsageError("kaiser-squires has no posterior to draw from: take a Wiener filter", "--draws")
