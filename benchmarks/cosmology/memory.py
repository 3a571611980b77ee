"""Compare reading training maps from disk with holding them in memory: memory use and speed.

    python -m benchmarks.cosmology.memory [--quick] [--maps 8000] [--size 64] [--turns 5]

The two sides take turns, each time in a fresh process. The process opens the train split as the training script does,
reads all maps once in random order in batches of 64, and reports the increase in private memory (RssAnon on Linux,
which the kernel cannot drop) and the maps read per second. Shared pages of mapped files do not count. The maps on disk
are already Arrow files; the time to write these files is reported separately.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.rows import map_arrays, read_arrays
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


READERS = {"in memory": read_arrays, "on the disk": map_arrays}
COLUMNS = ["map", "mask", "omega_m", "sigma_8", "cosmology_id"]
BATCH = 64


def main() -> None:
    parser = make_parser(__doc__, quick="100 small maps, one turn")
    parser.add_argument("--maps", type=int, default=8000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--side", choices=READERS, help="measure one reader in this process, for internal use")
    parser.add_argument("--data", type=Path, help="folder of a data set with masks; by default, generated shear maps")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(read_once(args.data, READERS[args.side])))
        return
    maps, size, turns = (100, 16, 1) if args.quick else (args.maps, args.size, args.turns)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"  # child processes inherit it
        data = args.data or Path(folder) / "maps"
        if args.data is None:
            settings = MapSettings(kind="gaussian", size=size, observable="shear", sigma_e=0.26, mask_fraction=0.3)
            build_cosmology_dataset(settings, data, maps, workers=1 if args.quick else 2)
        first = measure(data, "on the disk")
        found = {side: [] for side in READERS}
        for _ in range(turns):
            for side, results in found.items():
                results.append(measure(data, side))
    report = {"maps": first["maps"], "megabytes": first["megabytes"], "first_opening_seconds": first["open_seconds"]}
    for side, results in found.items():
        report[side] = {name: [result[name] for result in results] for name in results[0]}
        median = {name: statistics.median(values) for name, values in report[side].items()}
        print(
            f"{side:12} {median['private_megabytes']:8.1f} MB of private memory for {median['megabytes']:.1f} MB "
            f"of maps, opened in {median['open_seconds']:.2f} s, {median['maps_per_second']:,.0f} maps/s"
        )
    write_report(args, "cosmology_memory", report | {"versions": library_versions()})


def measure(data: Path, side: str) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, "--side", side, "--data", str(data)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def read_once(data: Path, reader) -> dict[str, float]:
    """Open the split, read all maps once, and return the measurements."""
    import datasets  # not measured

    datasets.disable_progress_bars()
    before, started = private_memory(), time.perf_counter()
    rows = reader(data, "train", COLUMNS)
    opened = time.perf_counter()
    order = np.random.default_rng(0).permutation(len(rows["map"]))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        rows["map"][chosen], rows["mask"][chosen]
    ended = time.perf_counter()
    return {
        "maps": len(order),
        "megabytes": np.prod(rows["map"].shape) * 4 / 1e6,
        "private_megabytes": (private_memory() - before) / 1e6,
        "open_seconds": opened - started,
        "maps_per_second": len(order) / (ended - opened),
    }


def private_memory() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
