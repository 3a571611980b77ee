"""Simulation of cosmology data sets with several processes. An interrupted build can be resumed.

Workers draw maps and this process writes them in order, so the files depend neither on the number of workers nor on
interruptions. Existing shards are always complete; repeating the command builds the missing ones.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import Any

import numpy as np

from ...io.usage import UsageError, as_usage_errors
from ...io.workers import worker_pool
from ..options import BuildCosmology
from ..simulation.fields import PRIOR
from ..simulation.maps import DES_Y3, MapSettings, generate_columns
from .info import SPLITS, TEST_ID, CosmologyInfo, CosmologyPlan, column_names
from .rows import Rows, claimed_folder, finish_folder, pixel_statistics, shard_names, write_shard


BLOCK = 8  # number of maps that a worker draws at a time


def build_maps(options: BuildCosmology) -> dict[str, Any]:
    """Build or finish the data set that `options` describe, and return a report."""
    started = time.perf_counter()
    fields = (DES_Y3 if options.kind == "des" else {}) | options.settings()
    try:
        info = build_cosmology_dataset(
            as_usage_errors(MapSettings, **fields),
            options.out,
            options.samples,
            options.samples // 8 if options.test_samples is None else options.test_samples,
            prior=options.prior(),
            workers=options.workers,
            seed=options.seed,
            maps_per_cosmology=options.maps_per_cosmology,
            shard_size=options.shard_size,
        )
    except FileExistsError as error:
        raise UsageError(str(error)) from error
    report: dict[str, Any] = {"out": str(options.out), "kind": options.kind}
    report |= {f"{split}_rows": count for split, count in info.counts.items()}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std)}
    return report | {"seconds": round(time.perf_counter() - started, 1)}


def build_cosmology_dataset(
    settings: MapSettings,
    out: str | Path,
    samples: int,
    test_samples: int = 0,
    *,
    prior: Mapping[str, tuple[float, float]] | None = None,
    workers: int = 1,
    **choices: int,
) -> CosmologyInfo:
    """Draw maps and write them as a data set, or finish an interrupted build with the same arguments.

    Args:
        samples, test_samples: number of maps in the train and test split.
        prior: bounds of parameters that differ from `PRIOR`.
        workers: number of single-threaded processes that draw maps; with 1, this process draws them.
        choices: other fields of `CosmologyPlan`.

    Raises:
        UsageError: invalid settings. FileExistsError: `out` contains other maps.
        OSError, BrokenProcessPool, ValueError: writing, a worker, or a map failed; finished shards are kept.
    """
    from tqdm.auto import tqdm

    out, counts = Path(out), {"train": samples, "test": test_samples}
    plan = as_usage_errors(CosmologyPlan, settings=settings, counts=counts, prior=PRIOR | dict(prior or {}), **choices)
    info = CosmologyInfo(**vars(plan), pixel_mean=(), pixel_std=())
    names = {split: shard_names(split, -(-plan.counts[split] // plan.shard_size)) for split in SPLITS}
    portions = {}  # shard name -> (split, start, stop) of the blocks that workers draw
    for split in SPLITS:
        for number, name in enumerate(names[split]):
            start, stop = number * plan.shard_size, min((number + 1) * plan.shard_size, plan.counts[split])
            portions[name] = [(split, first, min(first + BLOCK, stop)) for first in range(start, stop, BLOCK)]
    with claimed_folder(out, asdict(plan)):
        missing = {name: of_shard for name, of_shard in portions.items() if not (out / name).exists()}
        total, left = (sum(one[-1][2] - one[0][1] for one in some.values()) for some in (portions, missing))
        with (
            tqdm(total=total, initial=total - left, desc="Drawing", unit=" maps") as bar,
            _drawn(plan, [portion for of_shard in missing.values() for portion in of_shard], workers) as blocks,
        ):
            for name, of_shard in missing.items():
                write_shard(out / name, info.features(), _counted(islice(blocks, len(of_shard)), bar))
        info = replace(info, **pixel_statistics(out / name for name in names["train"]))
        finish_folder(out, info)
    return info


def draw_rows(plan: CosmologyPlan, split: str, start: int, stop: int) -> Rows:
    """Draw rows `start` to `stop` of a split. Raises ValueError naming the row if a map fails or is not finite."""
    rows: dict[str, list] = {name: [] for name in column_names(plan.settings)}
    for row in range(start, stop):
        cosmology, realisation = divmod(row, plan.maps_per_cosmology)
        parameters = plan.parameters(split, cosmology)
        seed = plan.map_seed(split, cosmology, realisation)
        place = f"{split} map {row} ({parameters}, seed {seed})"
        try:
            drawn = generate_columns(plan.settings, **parameters, seed=seed)
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"{place}: {error}") from error
        if not np.isfinite(drawn["map"]).all():
            raise ValueError(f"{place}: {np.count_nonzero(~np.isfinite(drawn['map']))} pixels are NaN or infinite")
        s_8 = parameters["sigma_8"] * (parameters["omega_m"] / 0.3) ** 0.5
        number = cosmology + (TEST_ID if split == "test" else 0)
        values = {**drawn, **parameters, "s_8": s_8, "seed": seed, "cosmology_id": number}
        for name, column in rows.items():
            column.append(values[name])
    dtypes = {"map": np.float32, "mask": bool, "seed": np.int64, "cosmology_id": np.int64}
    return {name: np.asarray(column, dtypes.get(name, np.float32)) for name, column in rows.items()}


@contextmanager
def _drawn(plan: CosmologyPlan, portions: list[tuple[str, int, int]], workers: int) -> Iterator[Iterator[Rows]]:
    """Yield an iterator over the rows of each portion (split, start, stop), drawn by `workers` processes."""
    workers, draw = min(workers, len(portions)), partial(draw_rows, plan)
    if workers <= 1:
        yield starmap(draw, portions)
        return
    pool = worker_pool(workers, __name__)
    try:
        yield pool.map(draw, *zip(*portions))
    finally:
        pool.shutdown(cancel_futures=True)


def _counted(blocks: Iterator[Rows], bar: Any) -> Iterator[Rows]:
    for block in blocks:
        yield block
        bar.update(len(block["map"]))
