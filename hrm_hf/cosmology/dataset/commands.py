"""Cosmology data sets from beginning to end: options, a builder, a folder, and a report of what is in it.

These functions are the commands `hrm-hf data cosmology` and `cosmology-files`, and what a recipe's `build_data` calls.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...io.usage import UsageError, as_usage_errors


if TYPE_CHECKING:
    from ..simulation.survey import SurveySettings
    from .from_files import Reading


def build_maps(
    out: Path,
    *,
    samples: int,
    kind: str = "lognormal",
    test_samples: int | None = None,
    size: int = 64,
    side_deg: float | None = None,
    source_redshifts: str | None = None,
    sigma_e: float | None = None,
    galaxies: float | None = None,
    smoothing_arcmin: float | None = None,
    observable: str = "convergence",
    mask_fraction: float | None = None,
    mask_edge_share: float | None = None,
    hole_arcmin: str | None = None,
    box_mpc: float | None = None,
    box_grid: int | None = None,
    omega_m: str = "0.1,0.5",
    sigma_8: str = "0.6,1.0",
    maps_per_cosmology: int = 1,
    seed: int = 0,
    workers: int = 1,
    shard_size: int = 1000,
) -> dict[str, Any]:
    """Builds a data set of simulated maps, or finishes one that was interrupted.

    Args:
        samples, test_samples: maps of the train and the test split; an eighth if not given.
        kind: one of `maps.KINDS`.
        size, side_deg: of a map, in pixels and degrees.
        source_redshifts: of the sources of each channel, as "0.5,1.0".
        sigma_e, galaxies: dispersion of ellipticities, and sources per square arcmin: shape noise.
        observable, mask_fraction, mask_edge_share: see `MapSettings`. hole_arcmin: radii as "2,12".
        omega_m, sigma_8: priors, lowest and highest value as "0.1,0.5".
        workers: processes that simulate maps, one thread each; the maps do not depend on it.
    """
    from ..simulation.maps import KINDS, MASKED, MapSettings
    from ..simulation.survey import DES_Y3
    from .build import build_cosmology_dataset
    from .rows import CosmologyPlan

    if kind not in KINDS:
        raise UsageError(f"--kind is {kind!r}; expected one of {', '.join(KINDS)}")
    sky = {"side_deg": side_deg, "sigma_e": sigma_e, "galaxies_per_arcmin2": galaxies}
    sky |= {"source_redshifts": source_redshifts, "smoothing_arcmin": smoothing_arcmin}
    box = {"box_mpc": box_mpc, "box_grid": box_grid}
    masks = {"mask_fraction": mask_fraction, "mask_edge_share": mask_edge_share, "hole_arcmin": hole_arcmin}
    unused = {} if kind in MASKED or observable == "shear" else dict(masks)
    unused |= sky if kind.startswith("legacy-") else {}
    unused |= {} if kind == "2lpt" else box
    _validate_unused(f"maps of kind {kind}", unused)
    given = sky | masks | box | {"observable": observable}
    given = {name: value for name, value in given.items() if value is not None}
    if source_redshifts is not None:
        given["source_redshifts"] = _numbers("source_redshifts", source_redshifts)
    if hole_arcmin is not None:
        given["hole_arcmin"] = _numbers("hole_arcmin", hole_arcmin, 2)
    if kind == "des":
        given = DES_Y3 | given
    prior = {"omega_m": _numbers("omega_m", omega_m, 2), "sigma_8": _numbers("sigma_8", sigma_8, 2)}
    test_samples = samples // 8 if test_samples is None else test_samples
    settings = as_usage_errors(MapSettings, kind=kind, size=size, **given)
    shared = {"seed": seed, "prior": prior, "maps_per_cosmology": maps_per_cosmology, "shard_size": shard_size}
    as_usage_errors(CosmologyPlan, settings=settings, counts={"train": samples, "test": test_samples}, **shared)

    started = time.perf_counter()
    try:
        info = build_cosmology_dataset(settings, out, samples, test_samples, workers=workers, progress=True, **shared)
    except FileExistsError as error:
        raise UsageError(str(error)) from error
    report: dict[str, Any] = {"out": str(out), "kind": kind, "train_rows": samples, "test_rows": test_samples}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std)}
    return report | {"seconds": round(time.perf_counter() - started, 1)}


def build_from_files(
    paths: list[Path],
    out: Path,
    *,
    labels: Path | None = None,
    mask: Path | None = None,
    side_deg: float | None = None,
    size: int | None = None,
    count: int | None = None,
    centre: list[str] | None = None,
    min_observed: float | None = None,
    field: int | None = None,
    hdu: int | None = None,
    slab_mpc: float | None = None,
    omega_m: str | None = None,
    sigma_8: str | None = None,
    test_share: float = 1.0,
    seed: int = 0,
    observable: str = "convergence",
    sigma_e: float | None = None,
    galaxies: float | None = None,
    mask_fraction: float | None = None,
    mask_edge_share: float | None = None,
    hole_arcmin: str | None = None,
    margin: float | None = None,
    pixel_arcmin: float | None = None,
    max_pixels: int | None = None,
) -> dict[str, Any]:
    """Cuts maps out of local files: HEALPix files of one sky, FITS images, or Quijote cubes. Nothing is downloaded.

    Args:
        labels: table of parameters by file; without one the maps can be given to a trained model, no more.
        side_deg, size, count, centre, min_observed, field: of patches of a HEALPix map.
        hdu: number of the image in FITS files.
        slab_mpc: thickness of a slab of a cube.
        omega_m, sigma_8: priors of the labels, lowest and highest value; as in the table if not given.
        test_share: share of the universes in the test split.
        seed: of the split, and of noise and masks.
        observable, sigma_e, galaxies, mask_fraction, mask_edge_share: of maps of convergence, see `SurveySettings`.
        hole_arcmin: radii as "2,12".
        margin: around a patch of shear, see `patch_shear`. pixel_arcmin: side of a pixel of FITS images of shear.
        max_pixels: most pixels of a map or cells of a cube.
    """
    from . import from_files as files

    started = time.perf_counter()
    survey = _survey(observable, sigma_e, galaxies, mask_fraction, mask_edge_share, hole_arcmin)
    given = {"side_deg": side_deg, "size": size, "count": count, "centre": centre, "min_observed": min_observed}
    given |= {"field": field, "hdu": hdu, "slab_mpc": slab_mpc, "mask": mask, "margin": margin}
    given |= {"pixel_arcmin": pixel_arcmin}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        kind, options, readings = _readings(paths, given, survey.observable == "shear", max_pixels)
        priors = {"omega_m": omega_m, "sigma_8": sigma_8}
        prior = {name: _pair(name, text) for name, text in priors.items() if text is not None}
        if prior and labels is None:
            raise UsageError(f"{_option(next(iter(prior)))} has no effect without --labels")
        info = files.write_files_dataset(
            readings,
            out,
            kind=kind,
            options=options if mask is None else options | {"mask": mask.name},
            survey=survey,
            labels=None if labels is None else files.LabelTable(labels),
            prior=prior,
            test_share=test_share,
            seed=seed,
            progress=True,
        )
    except (FileNotFoundError, FileExistsError) as error:
        raise UsageError(str(error)) from error
    report: dict[str, Any] = {"out": str(out), "kind": kind, "map": info.units()["map"]}
    report |= {f"{split}_rows": rows for split, rows in info.counts.items()} | {"skipped": info.skipped}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std), "labels": info.labels}
    report |= {"prior": None if info.prior_bounds is None else dict(info.prior_bounds)}
    return report | {"seconds": round(time.perf_counter() - started, 1)}


def _survey(
    observable: str,
    sigma_e: float | None,
    galaxies: float | None,
    mask_fraction: float | None,
    mask_edge_share: float | None,
    hole_arcmin: str | None,
) -> "SurveySettings":
    from ..simulation.survey import SurveySettings

    given = {"sigma_e": sigma_e, "galaxies_per_arcmin2": galaxies, "mask_fraction": mask_fraction}
    given |= {"mask_edge_share": mask_edge_share, "hole_arcmin": hole_arcmin}
    if observable == "convergence":
        _validate_unused("convergence from files", given)
    given = {name: value for name, value in given.items() if value is not None}
    if hole_arcmin is not None:
        given["hole_arcmin"] = _numbers("hole_arcmin", hole_arcmin, 2)
    return as_usage_errors(SurveySettings, observable=observable, **given)


def _readings(
    paths: list[Path], given: dict[str, Any], shear: bool, max_pixels: int | None
) -> tuple[str, dict[str, Any], list["Reading"]]:
    """Kind of the files, options of their reader as they are noted, and a reading of each or of all together."""
    from . import from_files as files
    from .files import is_healpix
    from .patch_shear import MARGIN

    bound = {} if max_pixels is None else {"max_pixels": max_pixels}
    margin = given.get("margin", MARGIN)
    if shear and not 0 <= margin <= 2:
        raise UsageError(f"--margin is {margin:g}; expected 0 to 2, in sides of a patch")
    if all(path.suffix == ".npy" for path in paths):
        if shear:
            raise UsageError(
                "--observable shear is of convergence, and Quijote cubes hold density contrast; give HEALPix or FITS "
                "maps of convergence"
            )
        _validate_known("Quijote cubes", given, {"slab_mpc"})
        options = {"slab_mpc": given.get("slab_mpc", 125.0)}
        return "quijote", options, [files.cube_reading(path, **options, **bound) for path in paths]
    mask = given.get("mask")
    if is_healpix(paths[0], **bound):
        known = {"mask", "side_deg", "size", "count", "centre", "min_observed", "field"}
        _validate_known("HEALPix files", given, known | ({"margin"} if shear else set()))
        options = {"side_deg": 5.0, "size": 64}
        options |= {name: value for name, value in given.items() if name != "mask"}
        if "centre" in options:
            options["centres"] = [_centre(text) for text in options.pop("centre")]
        if shear:
            options["margin"] = round(margin * options["size"])
        return "healpix", options, [files.sky_reading(paths, mask=mask, **options, **bound)]
    _validate_known("FITS images", given, {"mask", "hdu"} | ({"margin", "pixel_arcmin"} if shear else set()))
    if shear and "pixel_arcmin" not in given:
        raise UsageError("--pixel-arcmin is missing: noise and masks of shear hang on the side of a pixel in arcmin")
    reader = {"hdu": given["hdu"]} if "hdu" in given else {}
    reader |= {"margin": margin} if shear else {}
    options = reader | ({"pixel_arcmin": given["pixel_arcmin"]} if shear else {})
    return "fits", options, [files.image_reading(path, mask=mask, **reader, **bound) for path in paths]


BUILDERS = {"cosmology": build_maps, "cosmology-files": build_from_files}


def _validate_unused(what: str, options: dict[str, Any]) -> None:
    """An option that would not be read is an error, not a surprise."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{_option(name)} has no effect on {what}")


def _validate_known(what: str, given: dict[str, Any], known: set[str]) -> None:
    _validate_unused(what, {name: value for name, value in given.items() if name not in known})


def _option(name: str) -> str:
    return "--" + ("galaxies" if name == "galaxies_per_arcmin2" else name.replace("_", "-"))


def _numbers(name: str, text: str, count: int | None = None) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{_option(name)} is {text!r}; expected numbers with commas between them") from error
    if count and len(numbers) != count:
        raise UsageError(f"{_option(name)} is {text!r}; expected {count} numbers with a comma between them")
    return numbers


def _pair(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError as error:
        raise UsageError(f"{_option(name)} is {text!r}; expected LOW,HIGH") from error
    return low, high


def _centre(text: str) -> tuple[float, float]:
    try:
        longitude, latitude = map(float, text.split(","))
    except ValueError as error:
        raise UsageError(f"--centre is {text!r}; expected LONGITUDE,LATITUDE in degrees") from error
    return longitude, latitude
