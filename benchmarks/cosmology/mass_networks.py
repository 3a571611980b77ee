"""Test whether iteration improves mass maps: compare networks with Wiener filters and the exact posterior.

    python -m benchmarks.cosmology.mass_networks --data DIR --models main=runs/mass one_segment=runs/one unet=runs/unet
        [--two_steps runs/two_steps] [--floor 100] [--shift_maps 500] [--masks 0,0.15,0.3,0.45,0.6]

The first model is compared with all others. One command trains each model:

    R="python training/run_mass_mapping.py --recipe training/recipes/mass_lognormal_64_cpu.yaml"
    $R --output_dir runs/mass
    $R --output_dir runs/one --config_overrides halt_max_steps=1,H_cycles=4    # same number of updates, one residual
    $R --output_dir runs/unet --model_type cosmo_unet --max_steps 8300    # same training time; its steps are shorter

On the test maps in DIR, the script measures the error after each segment, the paired ratio of the last error to the
first, the paired ratio of the first model's error to that of every other method, the posterior of the parameters, and
the operations per map (convolutions and matrix products, as counted by torch). On maps with the same settings but
different mask fractions, it measures how many segments adaptive halting uses and how much it increases the error. It
also tests maps unlike the training maps: twice the noise, and Gaussian fields. For the first `--floor` test maps, it
samples the exact posterior. With `--two_steps`, the report includes the metrics of a run of `two_steps.py`.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoFeatureExtractor, AutoModelForImageToImage

from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.rows import MapSet, load_cosmology_info
from hrm_hf.cosmology.evaluation import MassMaps, error_ratio, relative_error, squared_errors
from hrm_hf.cosmology.evaluation_run import map_distances, network_metrics, predict_maps
from hrm_hf.cosmology.plots import plot_mass_maps, plot_segments
from hrm_hf.cosmology.reconstruction import estimate_maps, map_estimator
from hrm_hf.trainer.plots import ACCENT, EXTRA, MUTED, new_figure, save_figure
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report
from .lognormal_posterior import lognormal_estimator


IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHIFTS = {"twice the noise": {"sigma_e": 0.52}, "gaussian": {"kind": "gaussian"}}


def main() -> None:
    parser = make_parser(__doc__, quick="60 test maps, few shifted maps")
    parser.add_argument("--data", required=True, help="shear data set")
    parser.add_argument(
        "--models", nargs="+", required=True, help="models as NAME=FOLDER; the first is compared with all others"
    )
    parser.add_argument("--two_steps", type=Path, help="output folder of a two_steps.py run")
    parser.add_argument("--limit", type=int, help="number of test maps; all by default")
    parser.add_argument("--train", type=int, default=1000, help="number of training maps for the mean spectrum")
    parser.add_argument(
        "--floor", type=int, default=100, help="number of test maps whose exact posterior is sampled; 0 to disable"
    )
    parser.add_argument(
        "--masks",
        default="0,0.15,0.3,0.45,0.6",
        help="mask fractions at which to measure adaptive halting, comma-separated",
    )
    parser.add_argument(
        "--shift_maps", type=int, default=500, help="number of maps for each mask fraction and each changed setting"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.limit, args.train, args.floor, args.shift_maps, args.masks = 60, 60, 8, 20, "0,0.5"
    torch.set_num_threads(args.threads)
    pictures = Path(args.out) if args.quick else IMAGES
    pictures.mkdir(parents=True, exist_ok=True)
    info, rows = load_cosmology_info(args.data), MapSet.read(args.data, "test", args.limit, kappa=True)
    models = {name: load(folder) for name, folder in (pair.split("=", 1) for pair in args.models)}
    errors, report = {}, {"models": {}, "methods": {}}
    for name, (model, extractor) in models.items():
        found = predict_maps(model, extractor, rows)
        errors[name] = found.map_errors[:, -1]
        distances = map_distances(model, extractor, rows)
        size = {"parameters": model.num_parameters(), "flops_a_map": flops(model, extractor, rows)}
        report["models"][name] = size | network_metrics(found, info) | {"map_distance": distances}
        print(f"{name:14} error after each segment: {report['models'][name]['per_step']['error']}", flush=True)
        if len(report["models"]) == 1:
            judged, curve = name, report["models"][name]["per_step"]["error"]
            plot_mass_maps(found.mass_maps, rows.maps, pictures / "cosmo_mass_network.png")
            plot_segments(found.shown, found.mass_maps.truth[0], curve, pictures / "cosmo_mass_segments.png")
    training = MapSet.read(args.data, "train", args.train, kappa=True)
    for method in ("kaiser-squires", "wiener-mean", "wiener", *(["lognormal"] if args.floor else [])):
        some = rows[: args.floor] if method == "lognormal" else rows
        estimator = lognormal_estimator(info.settings)
        if method != "lognormal":
            estimator, _ = map_estimator(method, info.settings, training)
        maps = MassMaps(some.kappa, estimate_maps(estimator, some, 50)[0], some.masks)
        errors[method] = squared_errors(maps)[0]
        report["methods"][method] = {"maps": len(some.kappa), "error": relative_error(maps)}
        print(f"{method:14} {report['methods'][method]}", flush=True)
    if args.two_steps:
        two_steps = json.loads((args.two_steps / "results.json").read_text())
        report["two_steps"] = {name: two_steps[name] for name in ("parameters", "steps", "metrics")}
    report["ratio_to"] = {name: ratio(errors[judged], other) for name, other in errors.items() if name != judged}
    if "lognormal" in errors:
        report["floor_to"] = {name: ratio(errors["lognormal"], other) for name, other in errors.items()}
    for name in ("ratio_to", "floor_to"):
        print(name, report.get(name))
    with tempfile.TemporaryDirectory() as folder:
        shares = [float(share) for share in args.masks.split(",")]
        report["halting"] = halting(models[judged], info, shares, args.shift_maps, Path(folder))
        report["shifted"] = {
            name: shifted(models, info, changes, args.shift_maps, Path(folder) / name)
            for name, changes in SHIFTS.items()
        }
    plot_halting(report["halting"], pictures / "cosmo_mass_halting.png")
    report |= {"maps": len(rows.kappa), "data": dataclasses.asdict(info.settings), "versions": library_versions()}
    write_report(args, "cosmology_mass_networks", report)


def load(folder: str) -> tuple:
    return AutoModelForImageToImage.from_pretrained(folder).eval(), AutoFeatureExtractor.from_pretrained(folder)


def ratio(first: np.ndarray, second: np.ndarray) -> dict:
    """Return the `error_ratio` of two methods on the maps that both have estimated, the first ones of the split."""
    count = min(len(first), len(second))
    return error_ratio(first[:count], second[:count])


def flops(model, extractor, rows: MapSet) -> int:
    """Return a model's floating-point operations per map; a multiply-add counts as two."""
    inputs = extractor(rows.maps[:1], mask=rows.masks[:1])["pixel_values"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs)
    return counter.get_total_flops()


def drawn(info, changes: dict, count: int, folder: Path) -> tuple:
    """Build a data set with changed settings; return its info and its test rows."""
    settings = dataclasses.replace(info.settings, **changes)
    build_cosmology_dataset(settings, folder, 1, count, seed=1, workers=0)
    return load_cosmology_info(folder), MapSet.read(folder, "test", kappa=True)


def halting(judged: tuple, info, shares: list[float], count: int, folder: Path) -> list[dict]:
    """Compare map errors of fixed and adaptive halting, and count segments, for each mask fraction."""
    found = []
    for share in shares:
        _, rows = drawn(info, {"mask_fraction": share}, count, folder / f"masked {share}")
        fixed, adaptive = (predict_maps(*judged, rows, halt=halt) for halt in ("fixed", "adaptive"))
        steps = adaptive.predictions.steps
        found.append({
            "masked": share,
            "error": relative_error(fixed.mass_maps),
            "error_adaptive": relative_error(adaptive.mass_maps),
            "adaptive_over_fixed": error_ratio(adaptive.map_errors[:, -1], fixed.map_errors[:, -1]),
            "average_steps": float(steps.mean()),
            "steps_standard_error": float(steps.std() / np.sqrt(len(steps))),
            "steps_histogram": np.bincount(steps.astype(int))[1:].tolist(),
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def shifted(models: dict, info, changes: dict, count: int, folder: Path) -> dict:
    """Evaluate the models, and a Wiener filter with the true spectra, on maps with changed settings."""
    own, rows = drawn(info, changes, count, folder)
    estimator, _ = map_estimator("wiener", own.settings, None)
    found = {"wiener": {"error": relative_error(MassMaps(rows.kappa, estimate_maps(estimator, rows, 50)[0]))}}
    for name, (model, extractor) in models.items():
        metrics = network_metrics(predict_maps(model, extractor, rows), info)
        s_8 = metrics["posterior"]["parameters"]["s_8"]
        found[name] = {
            "error": metrics["error"],
            "uncertainty": metrics["uncertainty"],
            "s_8": {key: s_8[key] for key in ("rmse", "bias", "mean_z2", "coverage_68")},
            "map_distance": map_distances(model, extractor, rows),
        }
    print(changes, found, flush=True)
    return found


def plot_halting(found: list[dict], path: Path) -> None:
    """Plot the segments used and the error against the mask fraction."""
    figure, axes = new_figure(1, 2, (9, 3.6))
    masked = [each["masked"] for each in found]
    steps, error = axes[0]
    spread = [2 * each["steps_standard_error"] for each in found]
    steps.errorbar(masked, [each["average_steps"] for each in found], spread, color=ACCENT, marker="o", capsize=3)
    steps.set(xlabel="masked share", ylabel="segments used", title="Adaptive halting")
    for name, color in (("error", EXTRA[0]), ("error_adaptive", ACCENT)):
        label = {"error": "all segments", "error_adaptive": "adaptive"}[name]
        error.plot(masked, [each[name]["value"] for each in found], color=color, marker="o", label=label)
    error.set(xlabel="masked share", ylabel="error over the maps' rms", title="Error")
    error.legend(frameon=False, fontsize="small")
    for panel in (steps, error):
        panel.grid(color=MUTED, alpha=0.4)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
