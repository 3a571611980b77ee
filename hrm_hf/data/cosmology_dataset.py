"""The on-disk form of a cosmology data set: maps with the parameters of the universes that made them.

A data set is a folder that `datasets.load_dataset(folder)` reads and that can be pushed to the Hub as it is:

    README.md          a data card; its YAML header names the files, columns and sizes of each split
    train/*.parquet, test/*.parquet
    cosmology.json     `CosmologyInfo`: how the maps were made, their prior, mean and standard deviation of a pixel

One row is one map: `map` float32 [channels, size, size]; `mask` bool [size, size] (True: observed) for kinds that have
one; `omega_m`, `sigma_8`, `s_8` (legacy kinds: `omega_m` alone, they depend on nothing else); `seed`, which with
these gives the map again through `generate_map`; `cosmology_id`. No cosmology is in two splits.

How the folder is filled is in `cosmology_build.py`. Random access through `datasets` decodes rows one by one, about
100 times slower than an array; `read_arrays` gives the arrays.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .cosmology import PRIOR, Cosmology
from .cosmology_maps import GENERATOR_VERSION, LEGACY, MASKED, PERIODIC, MapSettings
from .cosmology_shards import Rows, check_features, read_rows


if TYPE_CHECKING:
    import datasets

INFO_FILE = "cosmology.json"
SPLITS = ("train", "test")
TEST_ID = 10**9  # cosmology_id of the first test cosmology: one number names a universe in either split
BUILD_COMMAND = "hrm-hf data cosmology --kind lognormal --samples 8000 --out DIR"


@dataclass(frozen=True, kw_only=True)
class CosmologyPlan:
    """What decides every map of a data set, whoever draws it.

    Args:
        settings: of the maps.
        counts: maps of each split; the first maps of a larger set are those of a smaller one.
        seed: of the whole set, 0 to 2^32 - 1.
        prior: lowest and highest value of `omega_m` and `sigma_8`, drawn uniformly.
        maps_per_cosmology: maps drawn of each pair of parameters.
        shard_size: maps in a file.
        generator_version: of `cosmology_maps`; another version may draw other maps from the same seed.
    """

    settings: MapSettings
    counts: Mapping[str, int]
    seed: int = 0
    prior: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(PRIOR))
    maps_per_cosmology: int = 1
    shard_size: int = 1000
    generator_version: int = GENERATOR_VERSION

    def __post_init__(self):
        if set(self.counts) != set(SPLITS) or min(self.counts.values()) < 0 or self.counts["train"] < 1:
            raise ValueError(f"counts={dict(self.counts)}; expected 1 or more train maps and 0 or more test maps")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is not in 0 to 2^32 - 1")
        for name in ("maps_per_cosmology", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if set(self.prior) != set(PRIOR):
            raise ValueError(f"prior of {sorted(self.prior)}; expected {sorted(PRIOR)}")
        for name, (low, high) in self.prior.items():
            if not low < high:
                raise ValueError(f"prior of {name} from {low} to {high} is empty")
        for end in (0, 1):  # what lies between is sound when the ends are
            Cosmology(self.prior["omega_m"][end], self.prior["sigma_8"][end])

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    def parameters(self, split: str, cosmology: int) -> dict[str, float]:
        """Parameters of the cosmology of a number, as float32 values: those that the data set stores."""
        uniform = self._generator(split, cosmology, 0).random(len(PRIOR))
        ends = [self.prior[name] for name in PRIOR]
        return {name: float(np.float32(low + (high - low) * x)) for name, (low, high), x in zip(PRIOR, ends, uniform)}

    def map_seed(self, split: str, cosmology: int, realisation: int) -> int:
        """Seed of a map, 0 to 2^63 - 1."""
        return int(self._generator(split, cosmology, 1 + realisation).integers(2**63))

    def _generator(self, split: str, cosmology: int, purpose: int) -> np.random.Generator:
        """Random numbers of one purpose: 0 for the parameters of a cosmology, 1 + r for its realisation r."""
        entropy = [self.seed, SPLITS.index(split), cosmology, purpose]
        return np.random.default_rng(np.random.SeedSequence(entropy))


@dataclass(frozen=True, kw_only=True)
class CosmologyInfo(CosmologyPlan):
    """What a model must know about a cosmology data set: the plan, and for each channel of the maps of the TRAIN split

    Args:
        pixel_mean, pixel_std: mean and standard deviation of a pixel (observed ones, if there is a mask), in the unit
            of the maps.
    """

    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]

    @property
    def kind(self) -> str:
        return self.settings.kind

    @property
    def channels(self) -> int:
        """Maps in a row, a mask not counted."""
        return channels(self.settings)

    @property
    def has_mask(self) -> bool:
        return self.kind in MASKED

    @property
    def target_names(self) -> list[str]:
        """Parameters that the maps depend on and a model can learn."""
        return ["omega_m"] if self.kind in LEGACY else ["omega_m", "sigma_8"]

    def features(self) -> "datasets.Features":
        return cosmology_features(self.settings)

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"units": units(self.settings)}

    def config_fields(self) -> dict[str, Any]:
        """The fields of `HrmCosmoConfig` that the data decide."""
        return {
            "image_size": self.settings.size,
            "num_channels": self.channels + self.has_mask,
            "mask_channel": self.has_mask,
            "target_names": self.target_names,
            "derived_s8": "sigma_8" in self.target_names,
            "prior_bounds": [list(self.prior[name]) for name in self.target_names],
            "pixel_mean": list(self.pixel_mean),
            "pixel_std": list(self.pixel_std),
            "padding_mode": "circular" if self.kind in PERIODIC else "zeros",
        }


def channels(settings: MapSettings) -> int:
    return 1 if settings.kind in LEGACY else len(settings.source_redshifts)


def units(settings: MapSettings) -> dict[str, str]:
    """What the numbers of each column are."""
    named = {
        "map": "grey value, 0 to 1" if settings.kind in LEGACY else "convergence kappa, dimensionless",
        "mask": "true where the sky is observed",
        "omega_m": "matter density over the critical density, today",
        "sigma_8": "rms linear density contrast in spheres of 8 Mpc/h, today",
        "s_8": "sigma_8 (omega_m / 0.3)^0.5",
        "seed": "of generate_map",
        "cosmology_id": f"number of the pair of parameters; from {TEST_ID} on in the test split",
    }
    return {name: named[name] for name in column_names(settings)}


def column_names(settings: MapSettings) -> list[str]:
    """Columns of a data set of such maps, known without importing `datasets`, which takes a worker seconds."""
    masks = ["mask"] if settings.kind in MASKED else []
    parameters = ["omega_m"] if settings.kind in LEGACY else ["omega_m", "sigma_8", "s_8"]
    return ["map", *masks, *parameters, "seed", "cosmology_id"]


def cosmology_features(settings: MapSettings) -> "datasets.Features":
    """Columns of a data set of such maps with their types."""
    from datasets import Array2D, Array3D, Features, Value

    size = settings.size
    special = {
        "map": Array3D((channels(settings), size, size), "float32"),
        "mask": Array2D((size, size), "bool"),
        "seed": Value("int64"),
        "cosmology_id": Value("int64"),
    }
    return Features({name: special.get(name, Value("float32")) for name in column_names(settings)})


# ---- reading ----


def load_cosmology_info(path: str | Path) -> CosmologyInfo:
    """Reads `cosmology.json` of a local folder or a Hub data set repository.

    Raises:
        FileNotFoundError: no such data set, or one that was not built to its end.
        ValueError: `cosmology.json` is broken or of another version.
    """
    file = _local_folder(path, [INFO_FILE]) / INFO_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"{path} is no cosmology data set: {INFO_FILE} is missing. Build one with `{BUILD_COMMAND}`; the same "
            "command finishes one that was interrupted."
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields.pop("units", None)
        fields["settings"] = MapSettings(**fields["settings"])
        fields["prior"] = {name: tuple(bounds) for name, bounds in fields["prior"].items()}
        for name in ("pixel_mean", "pixel_std"):
            fields[name] = tuple(map(float, fields[name]))
        return CosmologyInfo(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} does not describe a cosmology data set of this version: {error}") from error


def load_cosmology_dataset(path: str | Path, split: str) -> "datasets.Dataset":
    """One split as a `Dataset`, from a local folder or the Hub; see `read_arrays` for speed.

    Labels, columns and shapes are checked, pixels are not: that would read the whole set.

    Raises:
        FileNotFoundError: no such data set. ValueError: no such split, or rows that `cosmology.json` does not allow.
    """
    from datasets import load_dataset

    info, files = _open_split(path, split)
    dataset = load_dataset("parquet", data_files={split: list(map(str, files))}, split=split)
    table = dataset.data.table
    _check_labels({name: table.column(name).to_numpy() for name in info.target_names}, info, f"{path}, split {split}")
    return dataset


def read_arrays(path: str | Path, split: str, columns: list[str] | None = None) -> Rows:
    """One split as arrays by column name, for sets that fit in memory.

    Args:
        columns: those wanted, for example ["omega_m", "sigma_8"]; None for all.

    Returns:
        map: float32 [rows, channels, size, size]. mask: bool [rows, size, size], if the kind has one. The others
        [rows]: float32 parameters, int64 `seed` and `cosmology_id`.

    Raises:
        FileNotFoundError: no such data set.
        ValueError: no such split or column, a missing shard, labels outside the prior, pixels that are no numbers.
    """
    from datasets import Features

    info, files = _open_split(path, split)
    features = info.features()
    unknown = [name for name in columns or () if name not in features]
    if unknown:
        raise ValueError(f"{path} has no column {unknown[0]!r}; it has {list(features)}")
    features = Features({name: features[name] for name in columns or features})
    rows: Rows = {}
    start = 0
    for file in files:
        for group in read_rows(file, features):
            stop = start + len(next(iter(group.values())))
            for name, values in group.items():
                if name not in rows:
                    rows[name] = np.empty((info.counts[split], *values.shape[1:]), values.dtype)
                rows[name][start:stop] = values
            if "map" in group:
                _check_pixels(group["map"], start, f"{path}, split {split}")
            start = stop
    _check_labels(rows, info, f"{path}, split {split}")
    return rows


def _open_split(path: str | Path, split: str) -> tuple[CosmologyInfo, list[Path]]:
    """The info and the checked files of a split."""
    import pyarrow.parquet as pq

    info = load_cosmology_info(path)
    available = [name for name in SPLITS if info.counts[name]]
    if split not in available:
        raise ValueError(f"{path} has no split {split!r}; it has {available}")
    files = sorted((_local_folder(path, [INFO_FILE, f"{split}/*"]) / split).glob("*.parquet"))
    features = info.features()
    for file in files:
        check_features(file, features)
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    if rows != info.counts[split]:
        raise ValueError(
            f"{path}: {len(files)} files of split {split!r} hold {rows} rows, {INFO_FILE} says {info.counts[split]}; "
            "run the command that built it again, it makes what is missing"
        )
    return info, files


def _local_folder(path: str | Path, patterns: list[str]) -> Path:
    """`path` if it is a folder, else the files of a Hub data set that match the patterns."""
    if Path(path).is_dir():
        return Path(path)
    unknown = f"{path} does not exist; build a cosmology data set with `{BUILD_COMMAND}`"
    if Path(path).exists() or Path(path).is_absolute() or str(path)[:1] in ".~" or str(path).count("/") != 1:
        raise FileNotFoundError(unknown)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{unknown}. Nor is it a data set of the Hub: {error}") from error


def _check_labels(rows: Mapping[str, np.ndarray], info: CosmologyInfo, place: str) -> None:
    for name in info.target_names:
        if name not in rows:
            continue
        low, high = info.prior[name]
        slack = 1e-6 * max(abs(low), abs(high))  # the ends, rounded to float32
        bad = ~((rows[name] >= low - slack) & (rows[name] <= high + slack))  # also NaN
        for row in np.flatnonzero(bad)[:1]:
            raise ValueError(
                f"{place}, row {row}: {name}={rows[name][row]:.6g} is outside the prior {low} to {high} that "
                f"{INFO_FILE} states ({bad.sum()} such rows)"
            )


def _check_pixels(maps: np.ndarray, first_row: int, place: str) -> None:
    finite = np.isfinite(maps).all((1, 2, 3))
    for row in np.flatnonzero(~finite)[:1]:
        count = maps[row].size - np.isfinite(maps[row]).sum()
        raise ValueError(
            f"{place}, row {first_row + row}: {count} of {maps[row].size} pixels are NaN or infinite; pixels without "
            "data belong in a mask"
        )
