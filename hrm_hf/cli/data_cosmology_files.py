"""`hrm-hf data cosmology-files`: observed or simulated maps from local files as a data set."""

from pathlib import Path
from typing import Annotated

import typer

from .report import AsJson, run


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
    seed: Annotated[int, typer.Option(min=0, help="Of the split, and of noise and masks.")] = 0,
    observable: Annotated[
        str, typer.Option(help="convergence, the maps as they are; or shear: g1 and g2, with the convergence.")
    ] = "convergence",
    sigma_e: Annotated[
        float | None, typer.Option(help="Shear: dispersion of ellipticities, shape noise. Default 0, none.")
    ] = None,
    galaxies: Annotated[
        float | None, typer.Option(help="Shear: sources per square arcmin, of all channels; default 10.")
    ] = None,
    mask_fraction: Annotated[
        float | None, typer.Option(help="Shear: share of pixels that a drawn mask hides, default 0.")
    ] = None,
    mask_edge_share: Annotated[
        float | None, typer.Option(help="Of these, the share beyond the survey's edge, default 0.5; others: holes.")
    ] = None,
    hole_arcmin: Annotated[
        str | None, typer.Option(help="Smallest and largest radius of a hole around a star, default 2,12.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Shear: sky around a patch whose mass shears it too, in sides of the patch; default 0.5."),
    ] = None,
    pixel_arcmin: Annotated[float | None, typer.Option(help="FITS, shear: side of a pixel in arcmin.")] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most pixels of a map or cells of a cube; default 268,435,456 (NSIDE 4096), cubes 1,073,741,824.",
        ),
    ] = None,
    as_json: AsJson = False,
):
    """Cut maps out of local files: DES Y3 mass maps (HEALPix), FITS images, Quijote cubes. Nothing is downloaded.

    With --labels and a --test-share below 1 the data set is trained on and evaluated like one of `data cosmology`;
    without labels its maps can be given to a trained model, no more. A command that was interrupted is finished by
    the same one: finished shards are kept.

    --observable shear makes what a survey would see of maps of convergence: shear with noise and a mask, and the
    convergence beside it. Patches are sheared by the mass around them too: a FITS image gives the patch in its middle,
    half as wide as the image. With the default margin 18 % of the shear's rms is missing in patches of 5 degrees, 9 %
    but for a constant; with --margin 1 10 and 4 %. Quijote's cubes are no convergence, and refused.

    Example: hrm-hf data cosmology-files kappa_bin1.fits kappa_bin2.fits --mask mask.fits --out data/des_y3

    Example: hrm-hf data cosmology-files latin_hypercube/*/df_m_256_PCS_z=0.npy --labels latin_hypercube_params.txt
    --slab-mpc 125 --test-share 0.1 --out data/quijote

    Example: hrm-hf data cosmology-files kappa_z1.fits --observable shear --sigma-e 0.26 --galaxies 30
    --mask-fraction 0.3 --out data/shear
    """
    options = dict(locals())
    from ..cosmology.dataset.commands import build_from_files

    run(build_from_files, options)
