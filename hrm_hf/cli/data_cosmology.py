"""`hrm-hf data cosmology`: maps with the parameters of the universes that made them."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer


KIND_HELP = "lognormal, gaussian, 2lpt, des (survey with a mask), or legacy-synthetic, legacy-des, legacy-2lpt."
DES_HELP = ("0.34,0.52,0.74,0.94.", "0.37 (0.26 for each component).", "5.59.")


def cosmology(
    samples: Annotated[int, typer.Option(min=1, help="Maps of the train split.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    kind: Annotated[str, typer.Option(help=KIND_HELP)] = "lognormal",
    test_samples: Annotated[
        int | None, typer.Option(min=0, help="Maps of the test split, of other cosmologies; default an eighth.")
    ] = None,
    size: Annotated[int, typer.Option(min=8, help="Pixels a side.")] = 64,
    side_deg: Annotated[float | None, typer.Option(help="Side of the patch in degrees, default 5.")] = None,
    source_redshifts: Annotated[
        str | None, typer.Option(help="Of the sources of each channel, as 0.5,1.0; default 1.0, des: " + DES_HELP[0])
    ] = None,
    sigma_e: Annotated[
        float | None,
        typer.Option(help="Dispersion of ellipticities: shape noise. Default 0, none; des: " + DES_HELP[1]),
    ] = None,
    galaxies: Annotated[
        float | None, typer.Option(help="Sources per square arcmin, of all channels; default 10, des: " + DES_HELP[2])
    ] = None,
    smoothing_arcmin: Annotated[
        float | None, typer.Option(help="Standard deviation of a Gaussian, in arcmin; default 0, none.")
    ] = None,
    mask_fraction: Annotated[float | None, typer.Option(help="des: share of pixels not observed, default 0.")] = None,
    box_mpc: Annotated[float | None, typer.Option(help="2lpt: side of the box in Mpc/h, default 256.")] = None,
    box_grid: Annotated[int | None, typer.Option(help="2lpt: particles a side of the box, default 64.")] = None,
    omega_m: Annotated[str, typer.Option(help="Prior: lowest and highest value.")] = "0.1,0.5",
    sigma_8: Annotated[str, typer.Option(help="Prior: lowest and highest value.")] = "0.6,1.0",
    maps_per_cosmology: Annotated[int, typer.Option(min=1, help="Maps of each pair of parameters.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the whole set.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that draw maps, one thread each.")] = 1,
    shard_size: Annotated[int, typer.Option(min=1, help="Maps in a file.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Build a cosmology data set, or finish one that was interrupted: the same command again makes what is missing.

    The maps depend on the settings and the seed alone, not on --workers; a larger set begins with a smaller one.

    Maps of kind des have four planes of sources and noise like DES Y3, unless options say otherwise. The figures are
    approximate: rounded after Myles et al. 2021 (arXiv 2012.08566) and Gatti et al. 2021 (arXiv 2011.03408), and not
    checked against their tables. The mask is random, and only there with --mask-fraction.

    Example: hrm-hf data cosmology --samples 8000 --test-samples 1000 --workers 4 --out data/kappa64

    Example: hrm-hf data cosmology --kind des --samples 8000 --mask-fraction 0.2 --out data/des64

    Example: hrm-hf data cosmology --kind des --samples 8000 --sigma-e 0 --source-redshifts 0.5,1.0 --out data/two
    """
    from ..cosmology.dataset.build import build_cosmology_dataset
    from ..cosmology.dataset.rows import CosmologyPlan
    from ..cosmology.simulation.maps import KINDS, MASKED, MapSettings
    from ..cosmology.simulation.survey import DES_Y3

    if kind not in KINDS:
        raise typer.BadParameter(f"--kind is {kind!r}; expected one of {', '.join(KINDS)}")
    sky = {"side_deg": side_deg, "sigma_e": sigma_e, "galaxies_per_arcmin2": galaxies}
    sky |= {"source_redshifts": source_redshifts, "smoothing_arcmin": smoothing_arcmin}
    _refuse_unused(kind, not kind.startswith("legacy-"), sky)
    _refuse_unused(kind, kind in MASKED, {"mask_fraction": mask_fraction})
    _refuse_unused(kind, kind == "2lpt", {"box_mpc": box_mpc, "box_grid": box_grid})
    given = sky | {"mask_fraction": mask_fraction, "box_mpc": box_mpc, "box_grid": box_grid}
    given = {name: value for name, value in given.items() if value is not None}
    if source_redshifts is not None:
        given["source_redshifts"] = _numbers("--source-redshifts", source_redshifts)
    if kind == "des":
        given = DES_Y3 | given
    prior = {"omega_m": _numbers("--omega-m", omega_m, 2), "sigma_8": _numbers("--sigma-8", sigma_8, 2)}
    test_samples = samples // 8 if test_samples is None else test_samples
    settings = _usage(MapSettings, kind=kind, size=size, **given)
    shared = {"seed": seed, "prior": prior, "maps_per_cosmology": maps_per_cosmology, "shard_size": shard_size}
    _usage(CosmologyPlan, settings=settings, counts={"train": samples, "test": test_samples}, **shared)

    started = time.perf_counter()
    try:
        info = build_cosmology_dataset(settings, out, samples, test_samples, workers=workers, progress=True, **shared)
    except FileExistsError as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt as error:
        typer.echo(f"interrupted; finished shards in {out} are kept, the same command makes the others", err=True)
        raise typer.Exit(130) from error
    report: dict[str, Any] = {"out": str(out), "kind": kind, "train_rows": samples, "test_rows": test_samples}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std)}
    report["seconds"] = round(time.perf_counter() - started, 1)
    typer.echo(json.dumps(report) if as_json else "\n".join(f"{key}: {value}" for key, value in report.items()))


def _refuse_unused(kind: str, used: bool, options: dict[str, Any]) -> None:
    """An option that this kind would not read is an error, not a surprise."""
    for name, value in options.items():
        if value is not None and not used:
            option = "galaxies" if name == "galaxies_per_arcmin2" else name.replace("_", "-")
            raise typer.BadParameter(f"--{option} has no effect on maps of kind {kind}")


def _numbers(option: str, text: str, count: int | None = None) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{option} is {text!r}; expected numbers with commas between them") from error
    if count and len(numbers) != count:
        raise typer.BadParameter(f"{option} is {text!r}; expected {count} numbers with a comma between them")
    return numbers


def _usage(function, **fields):
    """Calls a function whose ValueErrors can only come from the options: they are bad usage, exit status 2."""
    try:
        return function(**fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
