"""`hrm-hf data cosmology-files`: observed or simulated maps from local files as a data set."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer


FILES_HELP = "HEALPix files of one sky, a channel each; or FITS images; or Quijote cubes df_m_N_CIC_z=Z.npy."
LABELS_HELP = "Table with columns omega_m, sigma_8 and file, or Quijote's latin_hypercube_params.txt; none: no labels."


def cosmology_files(
    paths: Annotated[list[Path], typer.Argument(help=FILES_HELP)],
    out: Annotated[Path, typer.Option(help="Folder to write, new or empty.")],
    labels: Annotated[Path | None, typer.Option(help=LABELS_HELP)] = None,
    mask: Annotated[
        Path | None, typer.Option(help="HEALPix or FITS file like the maps, above 0 where observed.")
    ] = None,
    side_deg: Annotated[float | None, typer.Option(help="HEALPix: side of a patch in degrees, default 5.")] = None,
    size: Annotated[int | None, typer.Option(min=8, help="HEALPix: pixels a side, default 64.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="HEALPix: at most so many patches.")] = None,
    centre: Annotated[
        list[str] | None, typer.Option(help="HEALPix: LONGITUDE,LATITUDE of a patch in degrees. Several times.")
    ] = None,
    min_observed: Annotated[
        float | None, typer.Option(help="HEALPix: least share of observed pixels of a patch, default 0.5.")
    ] = None,
    field: Annotated[int | None, typer.Option(min=0, help="HEALPix: number of the map in a file, default 0.")] = None,
    hdu: Annotated[int | None, typer.Option(min=0, help="FITS: number of the image; default the first one.")] = None,
    slab_mpc: Annotated[float | None, typer.Option(help="Quijote: thickness of a slab in Mpc/h, default 125.")] = None,
    omega_m: Annotated[
        str | None, typer.Option(help="Prior of the labels: lowest and highest value; default as in the table.")
    ] = None,
    sigma_8: Annotated[
        str | None, typer.Option(help="Prior of the labels: lowest and highest value; default as in the table.")
    ] = None,
    test_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the universes in the test split; 1: all, no train split.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most pixels of a map or cells of a cube; default 268,435,456 (NSIDE 4096), cubes 1,073,741,824.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Cut maps out of local files: DES Y3 mass maps (HEALPix), FITS images, Quijote cubes. Nothing is downloaded.

    With --labels and a --test-share below 1 the data set is trained on and evaluated like one of `data cosmology`;
    without labels its maps can be given to a trained model, no more.

    Example: hrm-hf data cosmology-files kappa_bin1.fits kappa_bin2.fits --mask mask.fits --out data/des_y3

    Example: hrm-hf data cosmology-files latin_hypercube/*/df_m_256_PCS_z=0.npy --labels latin_hypercube_params.txt
    --slab-mpc 125 --test-share 0.1 --out data/quijote
    """
    from ..cosmology.dataset import from_files as files
    from ..cosmology.dataset.files import is_healpix

    started = time.perf_counter()
    sky = {"side_deg": side_deg, "size": size, "count": count, "centre": centre}
    sky |= {"min_observed": min_observed, "field": field}
    bound = {} if max_pixels is None else {"max_pixels": max_pixels}
    try:
        if all(path.suffix == ".npy" for path in paths):
            _refuse_unused("Quijote cubes", sky | {"hdu": hdu, "mask": mask})
            kind, options = "quijote", {"slab_mpc": slab_mpc or 125.0}
            readings = [files.cube_reading(path, **options, **bound) for path in paths]
        elif is_healpix(paths[0], **bound):
            _refuse_unused("HEALPix files", {"hdu": hdu, "slab_mpc": slab_mpc})
            kind, options = "healpix", {"side_deg": 5.0, "size": 64}
            options |= {name: value for name, value in sky.items() if value is not None}
            if "centre" in options:
                options["centres"] = [_centre(text) for text in options.pop("centre")]
            readings = [files.sky_reading(paths, mask=mask, **options, **bound)]
        else:
            _refuse_unused("FITS images", sky | {"slab_mpc": slab_mpc})
            kind, options = "fits", {} if hdu is None else {"hdu": hdu}
            readings = [files.image_reading(path, mask=mask, **options, **bound) for path in paths]
        given = {"omega_m": omega_m, "sigma_8": sigma_8}
        prior = {name: _pair(name, text) for name, text in given.items() if text is not None}
        if prior and labels is None:
            raise typer.BadParameter(f"--{_option(next(iter(prior)))} has no effect without --labels")
        table = None if labels is None else files.LabelTable(labels)
        noted = options if mask is None else options | {"mask": mask.name}
        info = files.write_files_dataset(
            readings, out, kind=kind, options=noted, labels=table, prior=prior, test_share=test_share, seed=seed
        )
    except (FileNotFoundError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from error
    report: dict[str, Any] = {"out": str(out), "kind": kind, "map": info.units()["map"]}
    report |= {f"{split}_rows": rows for split, rows in info.counts.items()} | {"skipped": info.skipped}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std), "labels": info.labels}
    report |= {"prior": None if info.prior_bounds is None else dict(info.prior_bounds)}
    report["seconds"] = round(time.perf_counter() - started, 1)
    typer.echo(json.dumps(report) if as_json else "\n".join(f"{key}: {value}" for key, value in report.items()))


def _refuse_unused(what: str, options: dict[str, Any]) -> None:
    """An option that these files would not read is an error, not a surprise."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"--{_option(name)} has no effect on {what}")


def _option(name: str) -> str:
    return name.replace("_", "-")


def _pair(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--{_option(name)} is {text!r}; expected LOW,HIGH") from error
    return low, high


def _centre(text: str) -> tuple[float, float]:
    try:
        longitude, latitude = map(float, text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--centre is {text!r}; expected LONGITUDE,LATITUDE in degrees") from error
    return longitude, latitude
