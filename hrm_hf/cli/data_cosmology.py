"""`hrm-hf data cosmology` and `cosmology-files`: maps with the parameters of the universes that made them."""

import typer

from ..cosmology.options import BuildCosmology, BuildFromFiles
from .options import takes
from .report import report, usage_errors


@takes(BuildCosmology)
def cosmology(options: BuildCosmology, as_json: bool):
    """Build a cosmology data set, or finish one that was interrupted: the same command again makes what is missing.

    The maps depend on the settings and the seed alone, not on --workers; a larger set begins with a smaller one.

    Maps of kind des have four planes of sources and noise like DES Y3, unless options say otherwise. The figures are
    approximate: rounded after Myles et al. 2021 (arXiv 2012.08566) and Gatti et al. 2021 (arXiv 2011.03408), and not
    checked against their tables. The mask is random, and only there with --mask-fraction.

    Example: hrm-hf data cosmology --samples 8000 --test-samples 1000 --workers 4 --out data/kappa64

    Example: hrm-hf data cosmology --kind des --samples 8000 --mask-fraction 0.2 --out data/des64

    Example: hrm-hf data cosmology --observable shear --sigma-e 0.26 --galaxies 30 --mask-fraction 0.3 \\
        --samples 8000 --out data/shear64
    """
    from ..cosmology.dataset.build import build_maps

    try:
        with usage_errors():
            report(build_maps(options), as_json)
    except KeyboardInterrupt as error:
        typer.echo(
            f"interrupted; finished shards in {options.out} are kept, the same command makes the others", err=True
        )
        raise typer.Exit(130) from error


@takes(BuildFromFiles)
def cosmology_files(options: BuildFromFiles, as_json: bool):
    """Cut maps out of local files: DES Y3 mass maps (HEALPix), FITS images, Quijote cubes. Nothing is downloaded.

    With --labels and a --test-share below 1 the data set is trained on and evaluated like one of `data cosmology`;
    without labels its maps can be given to a trained model, no more. A command that was interrupted is finished by
    the same one: finished shards are kept.

    --observable shear makes what a survey would see of maps of convergence: shear with noise and a mask, and the
    convergence beside it. Patches are sheared by the mass around them too: a FITS image gives the patch in its middle,
    half as wide as the image. With the default margin 18 % of the shear's rms is missing in patches of 5 degrees, 9 %
    but for a constant; with --margin 1 10 and 4 %. Quijote's cubes are no convergence, and rejected.

    Example: hrm-hf data cosmology-files kappa_bin1.fits kappa_bin2.fits --mask mask.fits --out data/des_y3

    Example: hrm-hf data cosmology-files latin_hypercube/*/df_m_256_PCS_z=0.npy --labels latin_hypercube_params.txt
    --slab-mpc 125 --test-share 0.1 --out data/quijote

    Example: hrm-hf data cosmology-files kappa_z1.fits --observable shear --sigma-e 0.26 --galaxies 30
    --mask-fraction 0.3 --out data/shear
    """
    from ..cosmology.dataset.from_files import build_from_files

    with usage_errors():
        report(build_from_files(options), as_json)
