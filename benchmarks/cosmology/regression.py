"""Compare the recurrent regressor with summary statistics and a CNN for inferring cosmological parameters.

    python -m benchmarks.cosmology.regression          # build both sets, train missing runs (hours on two cores)
    python -m benchmarks.cosmology.regression --evaluate_only     # evaluate existing runs, train nothing
    python -m benchmarks.cosmology.regression --quick        # small maps and models, a few seconds of training

Two data sets show the same 9,000 skies (8,000 for training): log-normal convergence without noise, and with the shape
noise of 10 galaxies per square arcmin. Baselines train on these maps unchanged. The networks for noisy maps train on
the noiseless maps and add fresh noise at every step. All methods are tested on the same 1,000 maps. The CNN trains for
the same time as the recurrent regressor on the same set.

The script also reports the error after each segment, and the fraction of segments that adaptive halting saves at
several thresholds. The error is compared with that of random halting (each map gets one of the two integers nearest to
the average).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from transformers import AutoFeatureExtractor, AutoModelForImageClassification

from hrm_hf.cosmology.baselines import run_baseline
from hrm_hf.cosmology.dataset.rows import MapSet, load_cosmology_info
from hrm_hf.cosmology.evaluation import compare, evaluate_predictions
from hrm_hf.cosmology.evaluation_run import predict_maps
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "training/recipes/cosmo_lognormal_64_cpu.yaml"
SIGMA_E = 0.26
METHODS = ("spectrum-gp", "spectrum-ridge", "spectrum-pdf-ridge", "spectrum-pdf-quadratic")
THRESHOLDS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.0)  # nats
PILOT_STEPS = 20


def main() -> None:
    args = parse()
    sets = {name: build(args, name, sigma_e) for name, sigma_e in (("noiseless", 0.0), ("noisy", SIGMA_E))}
    report = {"sets": {}, "machine": machine(), "versions": library_versions()}
    for name, folder in sets.items():
        report["sets"][name] = found = {}
        prior, train, test = (
            load_cosmology_info(folder).prior,
            MapSet.read(folder, "train"),
            MapSet.read(folder, "test"),
        )
        for method in METHODS:
            started = time.perf_counter()
            metrics = evaluate_predictions(run_baseline(method, train, test), prior)
            found[method] = {"metrics": metrics, "seconds": time.perf_counter() - started}
        for kind in ("hrm_cosmo", "cosmo_cnn"):
            run = trained(args, kind, name, sets)
            if run is not None:
                found[kind] = evaluate(run, test, prior, found["spectrum-gp"]["metrics"])
        for method, entry in found.items():
            print_line(name, method, entry)
        for point in found.get("hrm_cosmo", {}).get("halting", []):
            print(
                f"cosmology {name}, halting at {point['threshold']:g}: {point['average_steps']:.2f} segments, "
                + errors_of(point)
            )
    write_report(args, "cosmology", report)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--models",
        type=Path,
        default=Path("runs/cosmology"),
        help="folder with one subfolder per run, named KIND_SET; missing runs are trained",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("runs/data/cosmology"),
        help="folder with the data sets; the script builds missing ones",
    )
    parser.add_argument("--steps", type=int, default=3000, help="number of training steps of the recurrent regressor")
    parser.add_argument("--evaluate_only", action="store_true", help="skip missing runs instead of training them")
    args = parser.parse_args()
    if args.quick:
        args.models, args.data, args.steps = Path("runs/cosmology_quick"), Path("runs/data/cosmology_quick"), 30
    return args


def build(args: argparse.Namespace, name: str, sigma_e: float) -> Path:
    folder = args.data / name
    size = ["--samples", "300", "--test-samples", "50", "--size", "16"] if args.quick else ["--samples", "8000"]
    command = [
        sys.executable,
        "-m",
        "hrm_hf.cli",
        "data",
        "cosmology",
        *size,
        "--sigma-e",
        str(sigma_e),
        "--workers",
        "2",
    ]
    if not args.quick:
        command += ["--test-samples", "1000"]
    subprocess.run([*command, "--workers", "2", "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def trained(args: argparse.Namespace, kind: str, name: str, sets: dict[str, Path]) -> Path | None:
    """Return a run's folder. If the run is missing, train it; with --evaluate_only, return None instead."""
    folder = args.models / f"{kind}_{name}"
    if (folder / "results.json").exists():
        return folder
    if args.evaluate_only:
        return None
    options = ["--data_path", sets["noiseless"], "--build_data", "", "--model_type", kind, "--max_test_samples", 0]
    if name == "noisy":
        options += ["--noise_sigma", load_cosmology_info(sets["noisy"]).settings.pixel_noise]
    if args.quick:
        options += ["--preset", "test", "--val_samples", 20, "--eval_strategy", "no", "--save_strategy", "no"]
    steps = args.steps
    if kind == "cosmo_cnn":
        pilot_options = ["--output_dir", args.models / "pilot", "--overwrite_output_dir", "true"]
        run_training([*options, "--max_steps", PILOT_STEPS, *pilot_options])
        pilot, peer = results_of(args.models / "pilot"), results_of(args.models / f"hrm_cosmo_{name}")
        steps = max(1, round(PILOT_STEPS * peer["train_seconds"] / pilot["train_seconds"]))
    run_training([*options, "--max_steps", steps, "--output_dir", folder, "--resume_from_checkpoint", "last-complete"])
    return folder


def run_training(options: list) -> None:
    script = [sys.executable, str(ROOT / "training/run_cosmo.py"), "--recipe", str(RECIPE)]
    subprocess.run([*script, *map(str, options)], check=True)


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def evaluate(run: Path, test: MapSet, prior: dict, gp: dict) -> dict:
    model = AutoModelForImageClassification.from_pretrained(run)
    extractor = AutoFeatureExtractor.from_pretrained(run)
    answers = predict_maps(model, extractor, test)
    metrics = evaluate_predictions(answers.predictions, prior)
    saved = results_of(run)
    found = {
        "metrics": metrics,
        "over_spectrum_gp": compare(metrics, gp),
        "maps_per_second": answers.maps_per_second,
        "steps": saved["steps"],
        "train_seconds": saved["train_seconds"],
        "parameters": saved["parameters"],
        "posterior_scale": model.config.posterior_scale,
    }
    if model.config.to_dict().get("halt_max_steps", 1) > 1:
        found["rmse_per_step"] = answers.rmse_per_step()
        found["halting"] = [
            halting(model, extractor, test, answers.segment_means, threshold) for threshold in THRESHOLDS
        ]
    return found


def halting(model, extractor, test: MapSet, segments: np.ndarray, threshold: float) -> dict:
    """Compare adaptive halting at a threshold with random halting that uses the same average number of segments."""
    model.config.halt_threshold = threshold
    answers = predict_maps(model, extractor, test, halt="adaptive")
    predictions = answers.predictions
    average = float(predictions.steps.mean())
    lucky = np.random.default_rng(0).random(len(segments)) < average % 1
    by_chance = segments[np.arange(len(segments)), np.floor(average).astype(int) + lucky - 1]
    return {
        "threshold": threshold,
        "average_steps": average,
        "segments_saved": 1 - average / segments.shape[1],
        "maps_per_second": answers.maps_per_second,
        "rmse": rmse(predictions.names, predictions.mean, predictions.truth),
        "rmse_by_chance": rmse(predictions.names, by_chance, predictions.truth),
    }


def rmse(names: list[str], mean: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    return dict(zip(names, np.sqrt(np.square(mean - truth).mean(0)).tolist(), strict=True))


def errors_of(point: dict) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in point["rmse"].items())


def print_line(name: str, method: str, entry: dict) -> None:
    figures = entry["metrics"]["parameters"].values()
    errors = " ".join(f"{found['rmse']:.4f}" for found in figures)
    z = " ".join(f"{found['mean_z2']:.2f}" for found in figures)
    coverage = " ".join(f"{found['coverage_68']:.3f}" for found in figures)
    tarp = entry["metrics"]["tarp"]["deviation"]
    print(f"cosmology {name:9} {method:22} rmse {errors}  z^2 {z}  68 % {coverage}  tarp {tarp:.3f}")


if __name__ == "__main__":
    main()
