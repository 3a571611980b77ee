"""Measure the speed of generating cosmology maps, of building a data set with one and two workers, and of reading it.

    python -m benchmarks.cosmology.generation [--quick] [--sizes 64,256] [--turns 15] [--kinds des]

Generation: the median CPU time per map of one process. The kinds take turns, so a noisy machine slows all of them
equally. The baseline ("peer" in the report) is `legacy-synthetic`, which reproduces the original default generator
(256 x 256 maps) without writing a JPEG file. `legacy-des` and `legacy-2lpt` reproduce its other two generators. Every
map has its own cosmology, so the spectra are computed for each map; the row "lognormal, 8 maps of a cosmology"
computes them once for eight maps. A 2LPT box has 64^3 particles.

Workers: the wall time of complete builds, including writing the files, after the processes have started
(`start_seconds`). On a busy machine, two workers cannot double the speed. Reading: the speed of `read_arrays`, and the
time per map of random batches of 64 maps, from its array and from `datasets` in numpy format.
"""

import statistics
import tempfile
import time

import numpy as np
from datasets import load_dataset

from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.rows import read_arrays
from hrm_hf.cosmology.simulation.maps import generate_map
from hrm_hf.cosmology.simulation.settings import KINDS, MapSettings

from ..report import machine, make_parser, write_report


PEER = "legacy-synthetic"
SLOW = ("2lpt",)  # timed with fewer repetitions, because each map takes about a second
REPEATED = "lognormal, 8 maps of a cosmology"


def main() -> None:

    from hrm_hf.trainer.recipes import library_versions

    parser = make_parser(__doc__, quick="only 64 x 64, few turns, no 2LPT, a small build")
    parser.add_argument("--sizes", default="64,256")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of maps; legacy-synthetic is always added")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--build_maps", type=int, default=600, help="number of maps in each timed build")
    args = parser.parse_args()
    kinds = sorted({PEER, *args.kinds.split(",")}, key=KINDS.index)
    if args.quick:
        args.sizes, args.turns, args.build_maps = "64", 3, 64
        kinds = [kind for kind in kinds if kind not in SLOW]
    sizes = list(map(int, args.sizes.split(",")))

    milliseconds = {size: draw_times(kinds, size, args.turns) for size in sizes}
    rates, start_seconds = build_rates(args.build_maps, turns=2 if args.quick else 3)
    report = {
        "turns": args.turns,
        "milliseconds_per_map": milliseconds,
        "maps_per_second_per_core": {
            size: {name: 1e3 / value for name, value in times.items()} for size, times in milliseconds.items()
        },
        "ratios_to_peer": {
            size: {name: times[PEER] / value for name, value in times.items()} for size, times in milliseconds.items()
        },
        "peer": PEER,
        "build": {"maps": args.build_maps, "size": 64, "kind": "lognormal", "start_seconds": start_seconds}
        | {"maps_per_second": rates, "two_workers_over_one": rates["2"] / rates["1"]},
        "reading": reading_times(64 if args.quick else 2000),
        "machine": machine(),
        "versions": library_versions() | {"numpy": np.__version__},
    }
    write_report(args, "cosmology_generation", report)
    for size, times in milliseconds.items():
        for kind, value in times.items():
            ratio = times[PEER] / value
            print(f"cosmology {f'{kind}, {size}^2':44} {1e3 / value:8.1f} maps/s/core, {ratio:.2f} x {PEER}")
    for workers, rate in rates.items():
        print(f"cosmology build of 64 x 64 maps, {workers} worker(s): {rate:18.1f} maps/s")
    for line, value in report["reading"].items():
        print(f"cosmology {line:44} {value:.4g}")


def draw_times(kinds, size: int, turns: int) -> dict[str, float]:
    """Return the median CPU time per map, in milliseconds, for each kind of map. The first turn is a warm-up."""
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {kind: [] for kind in kinds} | {REPEATED: []}
    for turn in range(turns + 1):
        for kind, values in times.items():
            maps = 8 if kind == REPEATED else 1
            if kind in SLOW and turn > 3:
                continue
            settings = MapSettings(kind="lognormal" if kind == REPEATED else kind, size=size)
            omega_m, sigma_8 = rng.uniform(0.1, 0.5), rng.uniform(0.6, 1.0)
            started = time.process_time()
            for seed in range(maps):
                generate_map(settings, omega_m, sigma_8, seed)
            if turn:
                values.append((time.process_time() - started) / maps * 1e3)
    return {kind: statistics.median(values) for kind, values in times.items()}


def build_rates(maps: int, turns: int) -> tuple[dict[str, float], float]:
    """Return the median maps per second with one and two workers, and the seconds that two workers take to start."""
    settings = MapSettings(size=64)
    seconds: dict[str, list[float]] = {"1": [], "2": []}

    def build(count: int, workers: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            build_cosmology_dataset(settings, folder, count, workers=workers)
            return time.perf_counter() - started

    start_seconds = build(16, 2)
    for _ in range(turns):
        for workers, values in seconds.items():
            values.append(build(maps, int(workers)))
    return {workers: maps / statistics.median(values) for workers, values in seconds.items()}, start_seconds


def reading_times(maps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        build_cosmology_dataset(MapSettings(size=64), folder, maps, maps_per_cosmology=8)
        started = time.perf_counter()
        array = read_arrays(folder, "train")["map"]
        seconds = time.perf_counter() - started
        dataset = load_dataset(folder, split="train").with_format("numpy")
        batches = np.random.default_rng(0).integers(0, maps, (20, 64))
        return {
            "read_arrays, MB/s": array.nbytes / 1e6 / seconds,
            "random map from the array, ms": median_milliseconds(lambda rows: array[rows], batches),
            "random map from datasets, ms": median_milliseconds(lambda rows: dataset[rows.tolist()], batches),
        }


def median_milliseconds(read, batches: np.ndarray) -> float:
    """Read the batches of rows one by one; return the median wall-clock time per map in milliseconds."""
    times = []
    for rows in batches:
        started = time.perf_counter()
        read(rows)
        times.append((time.perf_counter() - started) * 1e3 / len(rows))
    return statistics.median(times)


if __name__ == "__main__":
    main()
