"""`hrm-hf data cosmology`: maps with the parameters of the universes that made them."""

from pathlib import Path
from typing import Annotated

import typer

from .report import AsJson, run


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
    observable: Annotated[str, typer.Option(help="convergence, or shear: g1 and g2, with the convergence.")] = (
        "convergence"
    ),
    mask_fraction: Annotated[
        float | None, typer.Option(help="des, shear: share of pixels not observed, default 0.")
    ] = None,
    mask_edge_share: Annotated[
        float | None, typer.Option(help="Of these, the share beyond the survey's edge, default 0.5; others: holes.")
    ] = None,
    hole_arcmin: Annotated[
        str | None, typer.Option(help="Smallest and largest radius of a hole around a star, default 2,12.")
    ] = None,
    box_mpc: Annotated[float | None, typer.Option(help="2lpt: side of the box in Mpc/h, default 256.")] = None,
    box_grid: Annotated[int | None, typer.Option(help="2lpt: particles a side of the box, default 64.")] = None,
    omega_m: Annotated[str, typer.Option(help="Prior: lowest and highest value.")] = "0.1,0.5",
    sigma_8: Annotated[str, typer.Option(help="Prior: lowest and highest value.")] = "0.6,1.0",
    maps_per_cosmology: Annotated[int, typer.Option(min=1, help="Maps of each pair of parameters.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the whole set.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that draw maps, one thread each.")] = 1,
    shard_size: Annotated[int, typer.Option(min=1, help="Maps in a file.")] = 1000,
    as_json: AsJson = False,
):
    """Build a cosmology data set, or finish one that was interrupted: the same command again makes what is missing.

    The maps depend on the settings and the seed alone, not on --workers; a larger set begins with a smaller one.

    Maps of kind des have four planes of sources and noise like DES Y3, unless options say otherwise. The figures are
    approximate: rounded after Myles et al. 2021 (arXiv 2012.08566) and Gatti et al. 2021 (arXiv 2011.03408), and not
    checked against their tables. The mask is random, and only there with --mask-fraction.

    Example: hrm-hf data cosmology --samples 8000 --test-samples 1000 --workers 4 --out data/kappa64

    Example: hrm-hf data cosmology --kind des --samples 8000 --mask-fraction 0.2 --out data/des64

    Example: hrm-hf data cosmology --observable shear --sigma-e 0.26 --galaxies 30 --mask-fraction 0.3 \\
        --samples 8000 --out data/shear64

    Example: hrm-hf data cosmology --kind des --samples 8000 --sigma-e 0 --source-redshifts 0.5,1.0 --out data/two
    """
    options = dict(locals())
    from ..cosmology.dataset.commands import build_maps

    try:
        run(build_maps, options)
    except KeyboardInterrupt as error:
        typer.echo(f"interrupted; finished shards in {out} are kept, the same command makes the others", err=True)
        raise typer.Exit(130) from error
