"""Data sets of maps read from files (`files.py`), in the layout of `rows.py`.

    README.md         a data card; its YAML header names the files of each split
    train/*.parquet, test/*.parquet
    cosmology.json    `FilesInfo`: what was read, how, units, parameters, mean and standard deviation of a pixel

Columns: `map` float32 [channels, size, size]; `mask` bool [size, size] where there is one; of shear (`patch_shear.py`)
`kappa` float32 [planes, size, size], the convergence; `source`, the file; for
patches of the sky `longitude` and `latitude` in degrees; for slabs of a cube `axis`, `slab` and `redshift`. `omega_m`,
`sigma_8`, `s_8` and `cosmology_id` are there if the user gave a table of parameters, and only then: such a set is
trained on and evaluated like one that was drawn; maps of others can be given to a trained model.

An interrupted command is finished by the same one: `unfinished.json` says what was asked of which files, and shards
that are there are complete.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from ...io.complete_files import TEMPORARY, write_text
from ..simulation.survey import SurveySettings
from .build import UNFINISHED
from .files import (
    MAX_CUBE_CELLS,
    MAX_SKY_PIXELS,
    quijote_maps,
    read_fits_image,
    read_healpix_patches,
    read_quijote_cube,
)
from .info import INFO_FILE, PARAMETERS, SPLITS, FileSettings, FilesInfo, maps_features
from .patch_shear import sheared
from .shards import Rows, read_header, write_shard


if TYPE_CHECKING:
    import datasets

READS_IN_SHARD = 50
LABEL_NAMES = {"omega_m": ("omega_m", "omegam", "om"), "sigma_8": ("sigma_8", "sigma8")}  # not s8, which may be S_8
LABEL_RANGE = {"omega_m": (0.0, 1.0), "sigma_8": (0.0, 2.0)}  # open below


@dataclass(frozen=True)
class Reading:
    """One or several files: `read` returns their columns of rows, all of one universe; `path` is the first file.

    `others` are further files that it reads, a mask among them.
    """

    path: Path
    read: Callable[[], Rows]
    others: tuple[Path, ...] = ()

    def identity(self) -> list[list]:
        """Path, size and time of change of each file: another file is not the one that was read before."""
        stats = [(path, path.stat()) for path in (self.path, *self.others)]
        return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


class LabelTable:
    """Parameters of universes, from a table that the user gives.

    The table is CSV, or columns with blanks between them as Quijote's `latin_hypercube_params.txt`; the first line,
    with or without a #, names the columns. It needs omega_m and sigma_8 (any case, with or without underscore). A
    column `file` says which file a row is for, by its name or the end of its path; without it a row is for the files
    in the folder named by its number, from 0, as in `latin_hypercube/17/df_m_128_CIC_z=0.npy`.

    Raises:
        FileNotFoundError: no such table. ValueError: a column is missing; a value is no number or impossible.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected a table with columns omega_m and sigma_8")
        lines = [line for line in self.path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path} is empty; expected a header and a row for each universe")
        comma = "," in lines[0]
        table = list(csv.reader(lines)) if comma else [line.split() for line in lines]
        header = [name.strip().lstrip("#").strip().lower() for name in table[0]]
        header = [name for name in header if name]  # "# a b" has a # of its own
        columns = {}
        for name, spellings in LABEL_NAMES.items():
            found = [number for number, spelling in enumerate(header) if spelling in spellings]
            if len(found) != 1:
                raise ValueError(f"{path} has {len(found)} columns {name}, expected one; its header is {header}")
            columns[name] = found[0]
        self.rows = [self._parse(row, number, len(header), columns) for number, row in enumerate(table[1:], 1)]
        self.files: dict[str, list] | None = None  # parts of the path and labels, by the file's name
        if "file" in header:
            self.files = defaultdict(list)
            for row, labels in zip(table[1:], self.rows, strict=True):
                file = Path(row[header.index("file")].strip())
                self.files[file.name].append((file.parts, labels))

    def _parse(self, row: list[str], number: int, width: int, columns: dict[str, int]) -> tuple[float, float]:
        place = f"{self.path}, row {number}"
        if len(row) != width:
            raise ValueError(f"{place} has {len(row)} columns, the header has {width}")
        values = []
        for name, column in columns.items():
            try:
                value = float(row[column])
            except ValueError as error:
                raise ValueError(f"{place}: {name} is {row[column]!r}, expected a number") from error
            low, high = LABEL_RANGE[name]
            if not low < value <= high:
                raise ValueError(f"{place}: {name}={value:g} is not in ({low:g}, {high:g}]")
            values.append(value)
        return values[0], values[1]

    def __call__(self, path: Path) -> tuple[float, float]:
        """omega_m and sigma_8 of a file.

        Raises:
            ValueError: no row is for this file, or several are.
        """
        if self.files is None:
            folder = path.resolve().parent.name
            if not folder.isdigit() or int(folder) >= len(self.rows):
                raise ValueError(
                    f"{path}: no row of {self.path} is for it; without a column `file` its folder must be the number "
                    f"of a row, 0 to {len(self.rows) - 1}, not {folder!r}"
                )
            return self.rows[int(folder)]
        parts = path.resolve().parts
        found = [labels for end, labels in self.files.get(parts[-1], ()) if parts[-len(end) :] == end]
        if len(found) != 1:
            raise ValueError(f"{path}: {len(found)} rows of {self.path} name it, expected one")
        return found[0]

    def bounds(self, name: str) -> tuple[float, float]:
        """Ends of the flat prior of a parameter, of which the whole table is a sample, whichever files are read.

        The least and the greatest value, moved apart by the mean distance of neighbouring values: an unbiased
        estimate, and no universe lies on the edge.

        Raises:
            ValueError: all rows have the same value.
        """
        values = sorted({row[PARAMETERS.index(name)] for row in self.rows})
        if len(values) < 2:
            raise ValueError(
                f"{self.path}: all rows have {name}={values[0]:g}, which says nothing of its prior; give it with "
                f"--{name.replace('_', '-')} LOW,HIGH"
            )
        gap = (values[-1] - values[0]) / (len(values) - 1)
        low, high = LABEL_RANGE[name]
        return max(values[0] - gap, low), min(values[-1] + gap, high)


# ---- what files give ----


def sky_reading(paths: Sequence[Path], **options: Any) -> Reading:
    """Patches of the sky; one channel for each file. Options: see `read_healpix_patches`."""

    def read() -> Rows:
        patches = read_healpix_patches(paths, **options)
        names = np.full(len(patches.maps), " ".join(path.name for path in paths))
        longitude, latitude = patches.centres.T
        rows = {"map": patches.maps, "mask": patches.mask, "source": names}
        rows |= {"longitude": longitude, "latitude": latitude, "skipped": np.full(len(names), patches.skipped)}
        return rows | {"margin": np.full(len(names), options.get("margin", 0))}

    mask = options.get("mask")
    others = [*paths[1:], *([] if mask is None else [mask])]
    return Reading(Path(paths[0]), read, tuple(map(Path, others)))


def image_reading(
    path: Path,
    hdu: int | None = None,
    mask: Path | None = None,
    margin: float = 0.0,
    max_pixels: int = MAX_SKY_PIXELS,
) -> Reading:
    """One flat map; `mask` is a FITS image, above 0 where observed.

    Args:
        margin: of the image around its middle, on each side, in sides of the middle: that is to be the patch.
    """

    def read() -> Rows:
        observed = None if mask is None else read_fits_image(mask, max_pixels=max_pixels)[0] > 0
        image = read_fits_image(path, hdu, observed, max_pixels)
        rows = {"map": image[None], "source": np.array([path.name])}
        rows["margin"] = np.array([round(image.shape[-1] * margin / (1 + 2 * margin))])
        return rows if observed is None else rows | {"mask": observed[None]}

    return Reading(Path(path), read, () if mask is None else (Path(mask),))


def cube_reading(
    path: Path, slab_mpc: float, axes: Sequence[int] = (0, 1, 2), max_pixels: int = MAX_CUBE_CELLS
) -> Reading:
    """Slabs of a Quijote cube; see `quijote_maps`."""

    def read() -> Rows:
        cube = read_quijote_cube(path, max_pixels)
        maps = quijote_maps(cube, slab_mpc, axes)
        slabs = len(maps) // len(axes)
        # The folder is the realisation; all cubes of a redshift have one name.
        rows = {"map": maps, "source": np.full(len(maps), f"{path.resolve().parent.name}/{path.name}")}
        rows |= {"axis": np.repeat(axes, slabs), "slab": np.tile(np.arange(slabs), len(axes))}
        return rows | {"redshift": np.full(len(maps), cube.redshift)}

    return Reading(Path(path), read)


# ---- writing ----


def write_files_dataset(
    readings: Sequence[Reading],
    out: str | Path,
    *,
    kind: str,
    options: dict[str, Any],
    survey: SurveySettings | None = None,
    labels: LabelTable | None = None,
    prior: Mapping[str, tuple[float, float]] | None = None,
    test_share: float = 1.0,
    seed: int = 0,
    progress: bool = False,
) -> FilesInfo:
    """Reads files one after another and writes their maps as a data set; finishes one that the same call left.

    Args:
        out: folder to write: new, empty, or left unfinished by the same call.
        kind: of the files, one of `FILE_COLUMNS`. options: noted in the info file.
        survey: what is observed of the maps; None for the maps as they are. Shear is of the middle of what was read,
            without the margins that the readings were made with.
        labels: parameters; without them the data set has none.
        prior: lowest and highest value of parameters, where that is known; others are `LabelTable.bounds`.
        test_share: share of the universes whose maps go to the test split, drawn by `seed`; 1 for all of them. Other
            shares need labels, which tell the universes apart.
        seed: also of the noise and the mask of each patch of shear, whichever readings come after it.
        progress: show a bar of the files on stderr.

    Raises:
        FileExistsError: `out` is not empty and was left by no such call. FileNotFoundError: a file is missing.
        ValueError: what the readers and the table refuse; maps of several shapes; a split without a universe;
            parameters outside the prior.
        After an error nothing is in `out` but complete shards, and the note by which the same call goes on.
    """
    out = Path(out)
    _validate_free(out)
    parameters = None if labels is None else [labels(reading.path) for reading in readings]
    splits = _split(parameters, len(readings), test_share, seed)
    bounds = _prior_bounds(labels, prior or {}, readings)
    start = splits[0][1][0]
    first = readings[start].read()
    settings = _settings(first, kind, options, survey or SurveySettings())
    if settings.observable == "shear":
        first = sheared(first, settings, seed, start)
        readings = [_sheared_reading(reading, settings, seed, number) for number, reading in enumerate(readings)]
    info = FilesInfo(
        settings=settings, counts=dict.fromkeys(SPLITS, 0), prior_bounds=bounds, seed=seed,
        labels=None if labels is None else labels.path.name, skipped=int(first.get("skipped", np.zeros(1))[0]),
        pixel_mean=(), pixel_std=(),
    )  # fmt: skip
    features = maps_features(info.settings, info.column_names())
    asked = {
        "files": [reading.identity() for reading in readings], "parameters": parameters, "splits": splits,
        "info": asdict(info), "reads_in_shard": READS_IN_SHARD,
    }  # fmt: skip
    _go_on(out, json.loads(json.dumps(asked)))
    universes = {} if parameters is None else {pair: number for number, pair in enumerate(dict.fromkeys(parameters))}
    ready = {start: first}  # it says what the columns are, and is not read again
    headers: dict[str, list[dict]] = {split: [] for split, _ in splits}
    with tqdm(total=len(readings), desc="Reading", unit=" files", disable=not progress) as bar:
        for split, members in splits:
            total = -(-len(members) // READS_IN_SHARD)
            for number in range(total):
                file = out / split / f"{number:05d}-of-{total:05d}.parquet"
                chosen = members[number * READS_IN_SHARD : (number + 1) * READS_IN_SHARD]
                if file.exists():
                    bar.update(len(chosen))
                else:
                    blocks = _blocks(readings, chosen, ready, features, parameters, universes, bar)
                    write_shard(file, features, blocks, {"kind": kind})
                headers[split].append(read_header(file))
    info = replace(info, **_figures(headers))
    write_text(out / "README.md", _data_card(info))
    write_text(out / INFO_FILE, json.dumps(info.as_json(), indent=1))
    (out / UNFINISHED).unlink()
    for leftover in out.glob(f"*/.*{TEMPORARY}"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    return info


def _validate_free(out: Path) -> None:
    """Says before a long first file is read, not after it, that `out` is taken."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / UNFINISHED).is_file())):
        raise FileExistsError(f"{out} exists and is not an empty folder; choose another or delete it")


def _go_on(out: Path, asked: dict[str, Any]) -> None:
    """Notes what was asked, or sees that it is what an interrupted call was asked.

    Raises:
        FileExistsError: it is not; says what differs.
    """
    if not (out / UNFINISHED).is_file():
        write_text(out / UNFINISHED, json.dumps(asked, indent=1))
        return
    found = json.loads((out / UNFINISHED).read_text(encoding="utf-8"))
    changes = [name for name, value in asked.items() if found.get(name) != value]
    if changes:
        raise FileExistsError(
            f"{out} was left unfinished by a command with other {' and '.join(changes)}; repeat that one, choose "
            "another folder, or delete it"
        )


def _settings(rows: Rows, kind: str, options: dict[str, Any], survey: SurveySettings) -> FileSettings:
    """Returns the settings of one reading's maps; those of the others must be the same."""
    channels, size = rows["map"].shape[1:3]
    side_deg, has_mask = options.get("side_deg"), "mask" in rows
    if survey.observable == "shear":
        channels, has_mask = 2 * channels, True
        size -= 2 * int(rows.get("margin", np.zeros(1))[0])
        if "pixel_arcmin" in options:
            side_deg = size * options["pixel_arcmin"] / 60
    return FileSettings(kind, size, channels, has_mask, side_deg, options, **asdict(survey))


def _sheared_reading(reading: Reading, settings: FileSettings, seed: int, number: int) -> Reading:
    return replace(reading, read=lambda: sheared(reading.read(), settings, seed, number))


def _figures(headers: Mapping[str, list[dict]]) -> dict[str, Any]:
    """Counts of the splits, and mean and standard deviation of a pixel, from the headers of the shards."""
    counts = {split: sum(header["rows"] for header in headers.get(split, [])) for split in SPLITS}
    measured = headers.get("train") or headers["test"]
    count, total, squares = sum(np.array(header["moments"]) for header in measured)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return {"counts": counts, "pixel_mean": tuple(mean.tolist()), "pixel_std": tuple(std.tolist())}


def _prior_bounds(
    labels: LabelTable | None, given: Mapping[str, tuple[float, float]], readings: Sequence[Reading]
) -> dict[str, tuple[float, float]] | None:
    """Returns the given bounds, else the table's; refuses labels outside."""
    if labels is None:
        if given:
            raise ValueError(f"a prior of {', '.join(given)} is for maps with parameters; give their table too")
        return None
    bounds = {name: given[name] if name in given else labels.bounds(name) for name in PARAMETERS}
    for name, (low, high) in bounds.items():
        if not low < high:
            raise ValueError(f"prior of {name} from {low} to {high} is empty")
    for reading in readings:
        for (name, (low, high)), value in zip(bounds.items(), labels(reading.path)):
            if not low <= value <= high:
                place = f"{reading.path}: {name}={value:g} in {labels.path}"
                raise ValueError(f"{place} is outside the prior {low} to {high}; widen it or leave the file out")
    return bounds


def _split(
    parameters: list[tuple[float, float]] | None, total: int, test_share: float, seed: int
) -> list[tuple[str, list[int]]]:
    """Numbers of the readings of each split; no universe is in two."""
    if test_share == 1:
        return [("test", list(range(total)))]
    if parameters is None:
        raise ValueError(f"test_share={test_share} needs labels: a split is by universe, and nothing else tells them")
    universes = list(dict.fromkeys(parameters))
    order = np.random.default_rng(seed).permutation(len(universes))
    held_out = {universes[number] for number in order[: round(test_share * len(universes))]}
    splits = {"train": [], "test": []}
    for number, pair in enumerate(parameters):
        splits["test" if pair in held_out else "train"].append(number)
    if not 0 < test_share < 1 or not all(splits.values()):
        raise ValueError(
            f"test_share={test_share} of {len(universes)} universes leaves a split empty; expected a share between 0 "
            "and 1 that gives each one, or 1 for a test split alone"
        )
    return list(splits.items())


def _blocks(
    readings: Sequence[Reading],
    chosen: list[int],
    ready: dict[int, Rows],
    features: "datasets.Features",
    parameters: list[tuple[float, float]] | None,
    universes: dict[tuple[float, float], int],
    bar: tqdm,
) -> Iterator[Rows]:
    for number in chosen:
        rows = ready.pop(number) if number in ready else readings[number].read()
        shape, expected = rows["map"].shape[1:], features["map"].shape
        if shape != tuple(expected):
            raise ValueError(f"{readings[number].path} gives maps of shape {shape}, the first file {tuple(expected)}")
        if parameters is not None:
            omega_m, sigma_8 = parameters[number]
            values = {"omega_m": omega_m, "sigma_8": sigma_8, "s_8": sigma_8 * (omega_m / 0.3) ** 0.5}
            values["cosmology_id"] = universes[parameters[number]]
            rows |= {name: np.full(len(rows["map"]), value) for name, value in values.items()}
        yield {name: rows[name] for name in features}
        bar.update()


def _data_card(info: FilesInfo) -> str:
    splits = [split for split, count in info.counts.items() if count]
    files = "".join(f"  - split: {split}\n    path: {split}/*.parquet\n" for split in splits)
    columns = "".join(f"| {name} | {unit} |\n" for name, unit in info.units().items())
    noted = dict(info.settings.options)
    if info.settings.observable == "shear":
        noted |= {field.name: getattr(info.settings, field.name) for field in fields(SurveySettings)}
    options = "".join(f"- {name}: {value}\n" for name, value in noted.items())
    labels = "The maps have no parameters."
    if info.labels:
        prior = ", ".join(f"{name} from {low:.6g} to {high:.6g}" for name, (low, high) in info.prior.items())
        labels = f"Parameters are from {info.labels}; prior, uniform: {prior}."
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}tags:\n- cosmology\n---\n\n"
        f"# Maps read from {info.kind} files\n\n{labels}\n\n| column | what it is |\n|---|---|\n{columns}\n"
        f"## How they were read\n\n- kind: {info.kind}\n{options}- patches left out: {info.skipped}\n"
    )
