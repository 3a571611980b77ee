"""Builds a cosmology data set (`rows.py`) with several processes, in shards that survive an interruption.

Workers draw maps, this process writes them in order; so the files are the same whatever the number of workers, and
whether or not the build was interrupted. A shard that is there is complete; a repeated build makes the others.
"""

import errno
import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ...io.complete_files import TEMPORARY, write_text
from ...io.workers import worker_pool
from ..simulation.background import PRIOR
from ..simulation.maps import MapSettings, generate_columns
from .info import INFO_FILE, SPLITS, TEST_ID, CosmologyInfo, CosmologyPlan, column_names, maps_features
from .shards import Rows, read_header, write_shard


UNFINISHED = "unfinished.json"
BLOCK = 8  # maps that a worker draws at a time


@dataclass(frozen=True)
class Shard:
    """A file of a data set: rows `start` to `stop` of a split."""

    split: str
    name: str
    start: int
    stop: int

    def blocks(self) -> list[tuple[str, int, int]]:
        """The portions that workers draw."""
        starts = range(self.start, self.stop, BLOCK)
        return [(self.split, start, min(start + BLOCK, self.stop)) for start in starts]


def shards_of(plan: CosmologyPlan) -> list[Shard]:
    """The files of a data set in the order in which they are written."""
    shards = []
    for split in SPLITS:
        total = -(-plan.counts[split] // plan.shard_size)
        for number in range(total):
            start = number * plan.shard_size
            stop = min(start + plan.shard_size, plan.counts[split])
            shards.append(Shard(split, f"{split}/{number:05d}-of-{total:05d}.parquet", start, stop))
    return shards


def build_cosmology_dataset(
    settings: MapSettings,
    out: str | Path,
    samples: int,
    test_samples: int = 0,
    *,
    seed: int = 0,
    prior: Mapping[str, tuple[float, float]] | None = None,
    maps_per_cosmology: int = 1,
    shard_size: int = 1000,
    workers: int = 1,
    progress: bool = False,
) -> CosmologyInfo:
    """Draws maps and writes them as a data set; finishes one that the same call left unfinished.

    Args:
        out: folder to write. samples, test_samples: maps of the train and the test split.
        workers: processes that draw maps, each with one thread; 1 is this process, which saves the seconds that
            others need to start.
        progress: show a bar with maps per second on stderr.
        The others: see `CosmologyPlan`; `prior` None is `cosmology.PRIOR`.

    Raises:
        FileExistsError: `out` holds maps of other settings; says which.
        OSError: the disk is full, for example. RuntimeError: a worker was killed. ValueError: impossible settings, or
            a map with pixels that are no numbers. After each of these finished shards are kept.
    """
    plan = CosmologyPlan(
        settings=settings, counts={"train": samples, "test": test_samples}, seed=seed, prior=dict(prior or PRIOR),
        maps_per_cosmology=maps_per_cosmology, shard_size=shard_size,
    )  # fmt: skip
    out = Path(out)
    validate_same_plan(out, plan)
    shards = shards_of(plan)
    kept = [shard for shard in shards if _is_complete(out, shard, plan)]
    missing = [shard for shard in shards if shard not in kept]
    with _explained(out, shards):
        if not (out / INFO_FILE).exists():
            write_text(out / UNFINISHED, json.dumps(plan.as_json(), indent=1))
        features = maps_features(settings, column_names(settings))
        with _progress_bar(shards, kept, progress) as bar, _blocks(plan, missing, workers) as blocks:
            for shard in missing:
                counted = _counted(islice(blocks, len(shard.blocks())), bar)
                write_shard(out / shard.name, features, counted, _header(shard, plan))
        return _finish(out, plan, shards)


def validate_same_plan(out: Path, plan: CosmologyPlan) -> None:
    """Says before a long build, not after it, that `out` is taken."""
    expected = plan.as_json()
    for name in (INFO_FILE, UNFINISHED):
        if (out / name).is_file():
            found = json.loads((out / name).read_text(encoding="utf-8"))
            _validate_same(out, found, expected)
    names = {shard.name for shard in shards_of(plan)}
    for split in SPLITS:
        for file in sorted((out / split).glob("*.parquet")):
            if f"{split}/{file.name}" not in names:
                raise FileExistsError(
                    f"{file} is not of this data set, but would be read with it; choose another --out or delete it"
                )


def draw_rows(plan: CosmologyPlan, split: str, start: int, stop: int) -> Rows:
    """Rows `start` to `stop` of a split, as columns.

    Raises:
        ValueError: the map of a row cannot be drawn or has pixels that are no numbers; names the row, its parameters
            and its seed.
    """
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


# ---- shards ----


def _header(shard: Shard, plan: CosmologyPlan) -> dict:
    return {"plan": plan.as_json(), "split": shard.split, "start": shard.start}


def _is_complete(out: Path, shard: Shard, plan: CosmologyPlan) -> bool:
    """Whether the file of a shard is there; refuses one of other settings."""
    if not (out / shard.name).exists():
        return False
    header = read_header(out / shard.name)
    if "plan" not in header:
        raise FileExistsError(f"{out / shard.name} was not written by this command; choose another --out or delete it")
    _validate_same(out, header["plan"], plan.as_json())
    return header["rows"] == shard.stop - shard.start


def _validate_same(out: Path, found: dict, expected: dict) -> None:
    # Settings that an earlier version did not know have their defaults.
    defaults = {"settings": asdict(MapSettings(**found["settings"]))} if _drawn(found) else {}
    found, expected = _flat(json.loads(json.dumps(found | defaults))), _flat(expected)
    changes = [f"{name} is {found.get(name)}, asked {value}" for name, value in expected.items()
               if found.get(name) != value]  # fmt: skip
    if changes:
        raise FileExistsError(
            f"{out} already holds maps of other settings: {'; '.join(changes)}. Choose another --out, or delete it"
        )


def _drawn(plan: dict) -> bool:
    """Whether it is of maps that were drawn, whose settings this version knows."""
    return set(plan.get("settings", {})) <= set(MapSettings.__dataclass_fields__)


def _flat(plan: dict) -> dict:
    flat = {key: value for key, value in plan.items() if key not in ("settings", "counts", "prior")}
    for group, form in (("settings", "{}"), ("counts", "{} maps"), ("prior", "prior of {}")):
        flat |= {form.format(name): value for name, value in plan.get(group, {}).items()}
    return flat


def _finish(out: Path, plan: CosmologyPlan, shards: list[Shard]) -> CosmologyInfo:
    """Writes what describes the whole set; `cosmology.json` last, its presence marks a complete folder."""
    headers = [read_header(out / shard.name) for shard in shards if shard.split == "train"]
    count, total, squares = sum(np.array(header["moments"]) for header in headers)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    # Nine digits: float32 has no more, and sums over shards of another size differ beyond them.
    mean, std = (tuple(float(f"{value:.9g}") for value in values) for values in (mean, std))
    fields = {name: getattr(plan, name) for name in CosmologyPlan.__dataclass_fields__}
    info = CosmologyInfo(**fields, pixel_mean=mean, pixel_std=std)
    write_text(out / "README.md", _data_card(info, out))
    write_text(out / INFO_FILE, json.dumps(info.as_json(), indent=1))
    (out / UNFINISHED).unlink(missing_ok=True)
    for leftover in out.glob(f"*/.*{TEMPORARY}"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    return info


@contextmanager
def _explained(out: Path, shards: list[Shard]) -> Iterator[None]:
    """Says after a full disk or a killed worker what there is, and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, f"no space left on the disk of {out}; {_state(out, shards)}") from error
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process died (killed, or out of memory: try fewer --workers); {_state(out, shards)}"
        ) from error


def _state(out: Path, shards: list[Shard]) -> str:
    finished = sum((out / shard.name).exists() for shard in shards)
    return f"{finished} of {len(shards)} shards are finished and kept, the same command makes the others"


# ---- processes ----


@contextmanager
def _blocks(plan: CosmologyPlan, shards: list[Shard], workers: int) -> Iterator[Iterator[Rows]]:
    """An iterator of the rows of shards, block by block and in order."""
    portions = [portion for shard in shards for portion in shard.blocks()]
    workers = min(workers, len(portions))
    if workers <= 1:
        yield (draw_rows(plan, *portion) for portion in portions)
        return
    pool = worker_pool(workers, __name__)
    try:
        yield _in_order(pool, plan, portions, ahead=3 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, plan: CosmologyPlan, portions: list, ahead: int) -> Iterator[Rows]:
    """Results in the order of the portions; at most `ahead` are drawn before they are asked for."""
    waiting: deque = deque()
    for portion in portions:
        waiting.append(pool.submit(draw_rows, plan, *portion))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _progress_bar(shards: list[Shard], kept: list[Shard], shown: bool):
    from tqdm.auto import tqdm

    total, initial = (sum(shard.stop - shard.start for shard in some) for some in (shards, kept))
    return tqdm(total=total, initial=initial, desc="Drawing", unit=" maps", disable=not shown)


def _counted(blocks: Iterator[Rows], bar) -> Iterator[Rows]:
    for block in blocks:
        yield block
        bar.update(len(block["map"]))


# ---- data card ----


def _data_card(info: CosmologyInfo, out: Path) -> str:
    from datasets import DatasetInfo, SplitInfo
    from datasets.info import DatasetInfosDict
    from datasets.splits import SplitDict
    from huggingface_hub import DatasetCardData

    counts = {split: count for split, count in info.counts.items() if count}
    splits = SplitDict()
    for split, count in counts.items():
        size = sum(file.stat().st_size for file in (out / split).glob("*.parquet"))
        splits.add(SplitInfo(split, num_bytes=size, num_examples=count))
    files = [{"split": split, "path": f"{split}/*.parquet"} for split in counts]
    data = DatasetCardData(configs=[{"config_name": "default", "data_files": files}], tags=["cosmology"])
    DatasetInfosDict({"default": DatasetInfo(features=info.features(), splits=splits)}).to_dataset_card_data(data)
    columns = "".join(f"| {name} | {unit} |\n" for name, unit in info.units().items())
    settings = "".join(f"- {name}: {value}\n" for name, value in asdict(info.settings).items())
    prior = ", ".join(f"{name} from {low} to {high}" for name, (low, high) in info.prior.items())
    sizes = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    return (
        f"---\n{data}\n---\n\n# Maps of kind {info.kind}, {info.settings.size} x {info.settings.size}\n\n"
        f"Simulated, not observed. Maps: {sizes}; {info.maps_per_cosmology} of each cosmology, and no cosmology in "
        f"two splits. Prior, uniform: {prior}. Pixels of the train split have mean {_listed(info.pixel_mean)} and "
        f"standard deviation {_listed(info.pixel_std)}, by channel.\n\n| column | what it is |\n|---|---|\n{columns}\n"
        f"## How the maps were made\n\n{settings}- seed: {info.seed}\n- generator_version: {info.generator_version}\n"
    )


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
