"""Estimate mass maps and parameters from noisy, masked shear without a network, as a baseline for networks.

    python -m benchmarks.cosmology.mass_maps [--quick] [--data DIR] [--train 4000] [--workers 2]

The maps are log-normal, with 64 x 64 pixels over 5 x 5 degrees, sigma_e 0.26, 30 galaxies per square arcmin and 30 %
masked. Each of the 1,000 test maps has its own cosmology. The script builds the data set if `--data` does not contain
it yet. The methods are those of `hrm-hf eval cosmo-map`. Errors are divided by the rms of the true maps and have 95 %
intervals from a bootstrap over maps. Parameters are inferred by regression on the estimated maps (the usual two
steps), and on the spectra of the masked shear.
"""

import tempfile
from pathlib import Path
from typing import get_args

from hrm_hf.cosmology.baselines import run_baseline
from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.rows import MapSet, load_cosmology_info
from hrm_hf.cosmology.evaluation import evaluate_predictions
from hrm_hf.cosmology.evaluation_run import evaluate_baseline, evaluate_reconstruction
from hrm_hf.cosmology.options import EvaluateBaseline, EvaluateMassMaps, MapMethod
from hrm_hf.cosmology.reconstruction import estimate_maps, map_estimator
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


SKY = {"observable": "shear", "sigma_e": 0.26, "galaxies_per_arcmin2": 30.0, "mask_fraction": 0.3}
REGRESSION, SHEAR_REGRESSION = "spectrum-pdf-quadratic", "spectrum-quadratic"
DRAWS = 16


def main() -> None:
    parser = make_parser(__doc__, quick="a few dozen small maps")
    parser.add_argument("--data", type=Path, help="data set folder; by default, a temporary one")
    parser.add_argument("--train", type=int, default=4000, help="number of training maps for fitting each method")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    train, test, settings = args.train, 1000, MapSettings(**SKY)
    if args.quick:
        train, test, settings = 60, 20, MapSettings(**SKY, size=16, side_deg=1.25, hole_arcmin=(5, 10))
    with tempfile.TemporaryDirectory() as folder:
        data = str(args.data or Path(folder) / "shear")
        build_cosmology_dataset(settings, data, train, test, workers=args.workers)
        report = {"maps": {}, "parameters": {}}
        for method in get_args(MapMethod):
            draws = 0 if method == "kaiser-squires" else DRAWS
            options = EvaluateMassMaps(data=data, method=method, train=train, draws=draws)
            found = evaluate_reconstruction(options)
            report["maps"][method] = {"settings": found["settings"], **found["metrics"]}
            print(f"{method:15} error {found['metrics']['error']}")
            if method != "wiener":  # this Wiener filter uses the true parameters of each map
                report["parameters"][method] = parameters(regression(method, data, train), REGRESSION)
        direct = evaluate_baseline(EvaluateBaseline(data=data, method=SHEAR_REGRESSION, train=train))
        report["parameters"]["masked shear"] = parameters(direct["metrics"], SHEAR_REGRESSION)
    for name, found in report["parameters"].items():
        print(f"{name:15} {found}")
    report |= {"train": train, "test": test, "draws": DRAWS, "versions": library_versions()}
    write_report(args, "cosmology_mass_maps", report)


def regression(method: MapMethod, data: str, train: int) -> dict:
    """Infer cosmological parameters from a method's mass maps; return the metrics of these predictions."""
    info = load_cosmology_info(data)
    training, test = (MapSet.read(data, split, limit, True) for split, limit in (("train", train), ("test", None)))
    estimator, _ = map_estimator(method, info.settings, training)
    maps = [MapSet(estimate_maps(estimator, rows, 100)[0], rows.labels, rows.masks) for rows in (training, test)]
    return evaluate_predictions(run_baseline(REGRESSION, *maps), info.prior)


def parameters(metrics: dict, regression: str) -> dict:
    """Return the accuracy and calibration metrics of each parameter."""
    chosen = ("rmse", "rmse_over_prior_std", "mean_z2", "coverage_68")
    names = {name: {one: figures[one] for one in chosen} for name, figures in metrics["parameters"].items()}
    return {"regression": regression, **names, "tarp_deviation": metrics["tarp"]["deviation"]}


if __name__ == "__main__":
    main()
