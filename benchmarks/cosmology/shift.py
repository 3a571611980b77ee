"""Measure how often `hrm_cosmo` flags maps as unusual: maps like its training maps, noisier maps, and other kinds.

    python -m benchmarks.cosmology.shift [--quick] [--train 4000] [--maps 1000] [--lpt_maps 200] [--workers 2]

The summary statistics of `hrm_cosmo` (preset cosmo-64) are fitted to log-normal maps of 64 x 64 pixels over 5 x 5
degrees. As in training, the limit is set so that one in 200 held-out maps exceeds it. The network itself is not used.
There are three observables: convergence without noise; convergence with shape noise; masked shear with shape noise
(sigma_e 0.26, 30 galaxies per square arcmin, 30 % masked). "Noisier" doubles the noise, or adds noise to noiseless
maps. Fractions have Wilson intervals.
"""

from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

import numpy as np
import torch

from hrm_hf import HrmCosmoConfig, HrmCosmoForRegression
from hrm_hf.cosmology.dataset.collator import MapCollator, MapRows
from hrm_hf.cosmology.dataset.rows import MapSet
from hrm_hf.cosmology.evaluation_run import map_distances
from hrm_hf.cosmology.run import fit_map_distance
from hrm_hf.cosmology.simulation.fields import PRIOR
from hrm_hf.cosmology.simulation.maps import generate_columns
from hrm_hf.cosmology.simulation.settings import PERIODIC, MapSettings
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.trainer.logging import wilson_interval
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


NOISE = {"sigma_e": 0.26, "galaxies_per_arcmin2": 30.0}
OBSERVATIONS = {
    "convergence": {},
    "noisy convergence": NOISE,
    "noisy masked shear": NOISE | {"observable": "shear", "mask_fraction": 0.3},
}


def main() -> None:
    parser = make_parser(__doc__, quick="a few dozen maps")
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--maps", type=int, default=1000)
    parser.add_argument("--lpt_maps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    train, count, lpt = (200, 40, 4) if args.quick else (args.train, args.maps, args.lpt_maps)
    report = {}
    with ProcessPoolExecutor(args.workers) as pool:
        for name, options in OBSERVATIONS.items():
            shares = report[name] = shares_beyond(pool, options, train, count, lpt)
            for kind, found in shares["sets"].items():
                low, high = found["interval"]
                print(
                    f"{name:20} {kind:16} {found['share_beyond']:7.1%} ({low:.1%} to {high:.1%}) of {found['maps']} "
                    f"maps flagged, median distance {found['median']:.2f}, limit {found['limit']:.2f}",
                    flush=True,
                )
    write_report(args, "cosmology_shift", report | {"versions": library_versions()})


def shares_beyond(pool, options: dict, train: int, count: int, lpt: int) -> dict:
    held_out = max(train // 4, 40)
    maps, masks = draw(pool, "lognormal", train + held_out, 0, options)
    observed = maps if masks is None else np.moveaxis(maps, 1, 0)[:, masks]
    axes = (0, 2, 3) if masks is None else 1
    config = HrmCosmoConfig.from_preset(
        "cosmo-64", num_channels=maps.shape[1] + (masks is not None), mask_channel=masks is not None,
        padding_mode="circular", pixel_mean=observed.mean(axes).tolist(), pixel_std=observed.std(axes).tolist(),
    )  # fmt: skip
    torch.manual_seed(0)
    model, extractor = HrmCosmoForRegression(config).eval(), CosmoMapFeatureExtractor.from_config(config)
    batches = []
    for start in range(0, train, 250):
        part = slice(start, min(start + 250, train))
        batches.append(extractor(maps[part], mask=None if masks is None else masks[part])["pixel_values"])
    model.fit_statistics(batches)
    rows = MapRows(maps, np.zeros((len(maps), 2), np.float32), masks, np.arange(train, train + held_out))
    fit_map_distance(model, rows, MapCollator(extractor), 250)
    noisier = options | {"sigma_e": 2 * options.get("sigma_e", NOISE["sigma_e"] / 2)}
    others = {
        "same kind": ("lognormal", count, options),
        "gaussian": ("gaussian", count, options),
        "2lpt": ("2lpt", lpt, options),
        "noisier": ("lognormal", count, noisier),
    }
    sets = {}
    for number, (name, (kind, wanted, settings)) in enumerate(others.items(), 1):
        if settings.get("observable") == "shear" and kind not in PERIODIC:
            continue  # shear can be computed only from periodic maps
        maps, masks = draw(pool, kind, wanted, number * 10**6, settings)
        found = map_distances(model, extractor, MapSet(maps, {}, masks))
        low, high = wilson_interval(round(found["share_beyond"] * wanted), wanted)
        sets[name] = found | {"interval": [low, high], "maps": wanted}
    return {"settings": options, "train": train, "held_out": held_out, "sets": sets}


def draw(pool, kind: str, count: int, first_seed: int, options: dict) -> tuple[np.ndarray, np.ndarray | None]:
    """Generate maps with cosmologies drawn from the prior; return the maps, and their masks if they have any."""
    columns = list(
        pool.map(draw_one, repeat(kind), range(first_seed, first_seed + count), repeat(options), chunksize=8)
    )
    masks = np.stack([one["mask"] for one in columns]) if "mask" in columns[0] else None
    return np.stack([one["map"] for one in columns]), masks


def draw_one(kind: str, seed: int, options: dict) -> dict:
    torch.set_num_threads(1)
    low, high = np.transpose([PRIOR["omega_m"], PRIOR["sigma_8"]])
    omega_m, sigma_8 = np.random.default_rng([seed, 1]).uniform(low, high)
    return generate_columns(MapSettings(kind, **options), omega_m, sigma_8, seed)


if __name__ == "__main__":
    main()
