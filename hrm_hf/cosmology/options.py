"""Options of the map commands, which build data sets and evaluate regressors, mass mappers and baselines."""

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
# Options that the reader for each kind of file accepts, and additional options for shear.
READS = {
    "healpix": ("mask", "side_deg", "size", "count", "centre", "min_observed", "field"),
    "fits": ("mask", "hdu"),
    "quijote": ("slab_mpc",),
}
READS_FOR_SHEAR = {"healpix": ("margin",), "fits": ("margin", "pixel_arcmin"), "quijote": ()}


def numbers(name: str, text: str, count: int | None = None) -> tuple[float, ...]:
    """Parse comma-separated numbers. Raises UsageError for invalid text or if there are not `count` numbers."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if not values or (count and len(values) != count):
        expected = f"{count} numbers" if count else "one or more numbers"
        raise UsageError(f"{name}={text!r}: expected {expected} separated by commas", _flag(name))
    return values


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclasses.dataclass(kw_only=True)
class SurveyOptions(Options):
    """Options common to all builders of map data sets."""

    out: Path = option("Output folder.")
    observable: Observable = option(
        "convergence, or shear (g1 and g2 of each source plane, together with the convergence).", "convergence"
    )
    sigma_e: float | None = option(
        "Dispersion of ellipticities (shape noise). [default: 0; des: 0.37, which is 0.26 per component]", None
    )
    galaxies: float | None = option("Sources per arcmin^2, summed over channels. [default: 10; des: 5.59]", None)
    mask_fraction: float | None = option("des, shear: fraction of pixels hidden by a random mask. [default: 0]", None)
    mask_edge_share: float | None = option(
        "Fraction of hidden pixels that are beyond the survey's edge; the rest are in star holes. [default: 0.5]", None
    )
    hole_arcmin: str | None = option("Smallest and largest radius of star holes in arcmin. [default: 2,12]", None)
    omega_m: str | None = option("Prior bounds of omega_m: LOW,HIGH. [default: 0.1,0.5; files: from --labels]", None)
    sigma_8: str | None = option("Prior bounds of sigma_8: LOW,HIGH. [default: 0.6,1.0; files: from --labels]", None)
    seed: int = option("Random seed.", 0, min=0)

    def survey(self) -> dict[str, Any]:
        """Return the fields of `SurveySettings` that were set."""
        holes = None if self.hole_arcmin is None else numbers("hole_arcmin", self.hole_arcmin, 2)
        fields = {"observable": self.observable, "sigma_e": self.sigma_e, "galaxies_per_arcmin2": self.galaxies}
        fields |= {"mask_fraction": self.mask_fraction, "mask_edge_share": self.mask_edge_share, "hole_arcmin": holes}
        return {name: value for name, value in fields.items() if value is not None}

    def prior(self) -> dict[str, tuple[float, float]]:
        """Return the prior bounds that were set."""
        given = {name: getattr(self, name) for name in ("omega_m", "sigma_8")}
        return {name: numbers(name, text, 2) for name, text in given.items() if text is not None}

    def _reject(self, names: Iterable[str], what: str) -> None:
        """Raise UsageError for the first option in `names` that was set, because it has no effect on `what`."""
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"{name}={getattr(self, name)}: has no effect on {what}; omit it", _flag(name))


@dataclasses.dataclass(kw_only=True)
class BuildCosmology(SurveyOptions):
    """Options of `hrm-hf data cosmology`. Options that are None get a default from `MapSettings` or `kind`."""

    samples: int = option("Number of maps in the train split.", min=1)
    kind: Kind = option(
        "Kind of maps. des: a survey with a mask; legacy-*: for compatibility tests only.", "lognormal"
    )
    test_samples: int | None = option("Number of maps in the test split. [default: --samples / 8]", None, min=0)
    size: int = option("Pixels per side.", 64, min=8)
    side_deg: float | None = option("Side of the patch in degrees. [default: 5]", None)
    source_redshifts: str | None = option(
        "Source redshift of each channel, e.g. 0.5,1.0. [default: 1.0; des: 0.34,0.52,0.74,0.94]", None
    )
    box_mpc: float | None = option("2lpt: side of the box in Mpc/h. [default: 256]", None)
    box_grid: int | None = option("2lpt: particles per side of the box. [default: 64]", None)
    maps_per_cosmology: int = option("Number of maps for each pair of omega_m and sigma_8.", 1, min=1)
    workers: int = option("Number of single-threaded worker processes; does not change the maps.", 1, min=1)
    shard_size: int = option("Number of maps per file.", 1000, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = [] if self.kind == "des" or self.observable == "shear" else list(NOISE_AND_MASKS[2:])
        unused += [] if self.kind == "2lpt" else ["box_mpc", "box_grid"]
        if self.kind.startswith("legacy-"):
            unused += ["side_deg", "source_redshifts", "sigma_e", "galaxies"]
        self._reject(unused, f"maps of kind {self.kind}")

    def settings(self) -> dict[str, Any]:
        """Return the fields of `MapSettings` that were set."""
        planes = self.source_redshifts
        fields = {"kind": self.kind, "size": self.size, "side_deg": self.side_deg, "box_mpc": self.box_mpc}
        fields |= {"box_grid": self.box_grid}
        fields |= {"source_redshifts": None if planes is None else numbers("source_redshifts", planes)}
        return {name: value for name, value in fields.items() if value is not None} | self.survey()


@dataclasses.dataclass(kw_only=True)
class BuildFromFiles(SurveyOptions):
    """Options of `hrm-hf data cosmology-files`."""

    paths: list[Path] = option(
        "HEALPix files of the same sky, one per channel; or FITS images; or Quijote cubes df_m_N_CIC_z=Z.npy.",
        argument=True,
        metavar="PATH",
    )
    labels: Path | None = option(
        "Table with the columns omega_m, sigma_8 and file, or Quijote's latin_hypercube_params.txt.", None
    )
    mask: Path | None = option("HEALPix or FITS mask in the format of the maps, above 0 where observed.", None)
    side_deg: float | None = option("HEALPix: side of a patch in degrees. [default: 5]", None)
    size: int | None = option("HEALPix: pixels per side. [default: 64]", None, min=8)
    count: int | None = option("HEALPix: maximum number of patches.", None, min=1)
    centre: list[str] | None = option("HEALPix: patch center LONGITUDE,LATITUDE in degrees; may be repeated.", None)
    min_observed: float | None = option(
        "HEALPix: minimum fraction of observed pixels in a patch. [default: 0.5]", None, min=0, max=1
    )
    field: int | None = option("HEALPix: index of the map in a file. [default: 0]", None, min=0)
    hdu: int | None = option("FITS: index of the HDU with the image. [default: the first image]", None, min=0)
    slab_mpc: float | None = option("Quijote: thickness of a slab in Mpc/h. [default: 125]", None)
    test_share: float = option("Fraction of universes in the test split; 1 means no train split.", 1.0, min=0, max=1)
    margin: float | None = option(
        "Shear: width of the sky used around a patch, as a multiple of its side. [default: 0.5]", None, min=0, max=2
    )
    pixel_arcmin: float | None = option("FITS, shear: side of a pixel in arcmin.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observable == "convergence":
            self._reject(NOISE_AND_MASKS, "convergence from files")
        if self.labels is None:
            self._reject(("omega_m", "sigma_8"), "maps without --labels")

    def reader(self, kind: str) -> dict[str, Any]:
        """Return the options given for `kind` files. Raise UsageError if an option has no effect on them."""
        known = READS[kind] + (READS_FOR_SHEAR[kind] if self.observable == "shear" else ())
        every = dict.fromkeys(name for reads in (READS, READS_FOR_SHEAR) for names in reads.values() for name in names)
        self._reject([name for name in every if name not in known], f"{self.observable} of {kind} files")
        given = {name: getattr(self, name) for name in known if getattr(self, name) is not None}
        if "centre" in given:
            given["centres"] = [numbers("centre", text, 2) for text in given.pop("centre")]
        return given


@dataclasses.dataclass(kw_only=True)
class EvaluateMaps(Options):
    """Options common to all evaluations on maps."""

    data: str = option("Cosmology data set: a folder, or a data set on the Hub.")
    limit: int | None = option("Evaluate only the first N maps of the split.", None, min=2)
    seed: int = option("Random seed for the draws, the bootstraps and TARP's reference points.", 0, min=0)
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
    steps: Steps = option("fixed: run all segments; adaptive: stop when another segment would gain little.", "fixed")
    max_steps: int | None = option("Maximum number of segments. [default: the config's value]", None, min=1)
    baseline: Path | None = option("Baseline to compare with: results.json from cosmo-baseline, or its folder.", None)
    shift_data: str | None = option("Also evaluate on this data set, made by a different generator.", None)
    num_samples: int = option("Number of draws from each posterior.", 1000, min=100)
    batch_size: int = option("Number of maps per batch.", 64, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift_data:
            validate_data(self.shift_data, "cosmology data set")


@dataclasses.dataclass(kw_only=True)
class EvaluateBaseline(EvaluateMaps):
    """Options of `hrm-hf eval cosmo-baseline`."""

    method: Baseline = option("Summary statistics that the baseline uses for its regression.")
    train: int | None = option("Train on only the first N maps of the train split.", None, min=10)
    num_samples: int = option("Number of draws from each posterior.", 1000, min=100)


# Defaults of `hrm-hf eval cosmo-map` that depend on whether a model or a method is evaluated.
MODEL_DEFAULTS = {"split": "test", "steps": "fixed", "num_samples": 1000, "batch_size": 50}
METHOD_DEFAULTS = {"train": 1000, "draws": 0, "batch_size": 100}


@dataclasses.dataclass(kw_only=True)
class EvaluateMassMaps(EvaluateMaps):
    """Options of `hrm-hf eval cosmo-map`, which evaluates a trained model or a training-free method.

    Options that are None get their values from `MODEL_DEFAULTS` or `METHOD_DEFAULTS`.
    """

    model: str | None = option(
        "Checkpoint folder, or a model on the Hub; alternatively use --method.", None, argument=True, metavar="MODEL"
    )
    method: MapMethod | None = option(
        "Method to use instead of MODEL. kaiser-squires: with the smoothing that works best on training maps; wiener: "
        "Wiener filter with the true spectrum of each map; wiener-mean: with the mean spectrum of the training maps.",
        None,
    )
    split: str | None = option("With MODEL: split to evaluate. [default: test]", None)
    steps: Steps | None = option(
        "With MODEL: run all segments (fixed), or stop if another would gain little (adaptive). [default: fixed]", None
    )
    max_steps: int | None = option("With MODEL: maximum number of segments. [default: the config's]", None, min=1)
    num_samples: int | None = option("With MODEL: number of draws from each posterior. [default: 1000]", None, min=100)
    train: int | None = option("With --method: number of training maps to use. [default: 1000]", None, min=10)
    draws: int | None = option(
        "Wiener filters: number of error draws for pixel uncertainties; 0 omits them. [default: 0]", None, min=0
    )
    batch_size: int | None = option("Number of maps per batch. [default: 50 for MODEL, 100 for a method]", None, min=1)
    device: str | None = option("With MODEL: device, such as cpu, cuda or mps. [default: the best one]", None)
    update_card: bool = option("With MODEL: write the results into MODEL/README.md.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.method is None):
            found = "neither is given" if self.model is None else "both are given"
            raise UsageError(f"{found}; pass either a trained model (MODEL) or a --method", "MODEL or --method")
        of_models = ("split", "steps", "num_samples", "max_steps", "device", "update_card")
        wanted, others = ("--method", ("train", "draws")) if self.model else ("MODEL", of_models)
        for name in others:
            if getattr(self, name):
                raise UsageError(f"only valid with {wanted}; omit it", _flag(name))
        for name, value in (MODEL_DEFAULTS if self.model else METHOD_DEFAULTS).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.model:
            validate_evaluation(self.model, self.out, self.update_card)
        if self.draws and self.method == "kaiser-squires":
            raise UsageError("kaiser-squires has no posterior to draw from; use a Wiener filter", "--draws")
