"""Build data sets in the layout of `rows.py` from map files (`files.py`).

Additional columns: `source`, the file; `longitude` and `latitude` in degrees for sky patches; `axis`, `slab` and
`redshift` for slabs of a cube. The data set has parameters only if the user provides a table of them. A trained model
can be applied to maps without parameters, but not trained on them.

`models.shear_operator` is exact on a periodic sky, but a patch of a larger map is also sheared by mass beyond its
edges. The operator is therefore applied to a cutout that extends beyond the patch on all sides, surrounded by empty
sky, and the patch is the middle. Only shear from mass outside the cutout is missing. With the default margin of half
a patch on each side, the missing part has 18% of the full shear's rms for patches of 5 degrees, 27% for 2.5 degrees;
without a margin, 47% and 56% (log-normal maps of sources at redshift 1, measured by `test_cosmology_files_shear.py`).
Unobserved pixels of the cutout are set to the mean of the others, which makes the shear near them less accurate.
"""

import csv
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ...io.files import decode_marked, open_unpacked
from ...io.usage import UsageError, as_usage_errors
from ..options import BuildFromFiles
from ..simulation.maps import observe_shear
from ..simulation.settings import SurveySettings
from .files import is_healpix, quijote_maps, read_fits_image, read_healpix_patches, read_quijote_cube
from .info import PARAMETERS, SPLITS, FileSettings, FilesInfo
from .rows import Rows, claimed_folder, finish_folder, pixel_statistics, read_header, shard_names, write_shard


READS_IN_SHARD = 50
MARGIN = 0.5  # default margin around a shear patch, in units of its side; the cutout is twice as wide as the patch
LABEL_NAMES = {"omega_m": ("omega_m", "omegam", "om"), "sigma_8": ("sigma_8", "sigma8")}  # "s8" may mean S_8
FILE_NAMES = ("file", "file_name", "filename", "path")
INDEX_NAMES = ("", "index", "unnamed: 0")  # names that pandas and R give to the index column
LABEL_RANGE = {"omega_m": (0.0, 1.0), "sigma_8": (0.0, 2.0)}  # (low, high]


@dataclass(frozen=True)
class Reading:
    """Files from one universe. `read` reads their rows, and `path` is the first file."""

    path: Path
    read: Callable[[], Rows]


def build_from_files(options: BuildFromFiles) -> dict[str, Any]:
    """Build the data set that `options` describe from local files, and return a report."""
    started = time.perf_counter()
    survey = as_usage_errors(SurveySettings, **options.survey())
    try:
        kind, noted, readings = _readings(options)
        info = write_files_dataset(
            readings,
            options.out,
            kind=kind,
            options=noted if options.mask is None else noted | {"mask": options.mask.name},
            survey=survey,
            labels=None if options.labels is None else LabelTable(options.labels),
            prior=options.prior(),
            test_share=options.test_share,
            seed=options.seed,
        )
    except (FileNotFoundError, FileExistsError) as error:
        raise UsageError(str(error)) from error
    report: dict[str, Any] = {"out": str(options.out), "kind": kind, "map": info.units()["map"]}
    report |= {f"{split}_rows": rows for split, rows in info.counts.items()} | {"skipped": info.skipped}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std), "labels": info.labels}
    report |= {"prior": None if info.prior_bounds is None else dict(info.prior_bounds)}
    return report | {"seconds": round(time.perf_counter() - started, 1)}


def _readings(options: BuildFromFiles) -> tuple[str, dict[str, Any], list[Reading]]:
    """Return the kind of the files, the reader options to record, and a list of `Reading` objects."""
    paths, shear = options.paths, options.observable == "shear"
    if all(path.suffix == ".npy" for path in paths):
        noted = {"slab_mpc": 125.0} | options.reader("quijote")
        if shear:
            reason = "Quijote cubes hold density contrast, not convergence; use HEALPix or FITS maps"
            raise UsageError(f"observable='shear': {reason}", "--observable")
        return "quijote", noted, [cube_reading(path, **noted) for path in paths]
    margin = {"margin": MARGIN} if shear else {}
    if is_healpix(paths[0]):
        noted = {"side_deg": 5.0, "size": 64} | margin | options.reader("healpix")
        mask = noted.pop("mask", None)
        if shear:
            noted["margin"] = round(noted["margin"] * noted["size"])
        return "healpix", noted, [sky_reading(paths, mask=mask, **noted)]
    noted = margin | options.reader("fits")
    mask = noted.pop("mask", None)
    if shear and "pixel_arcmin" not in noted:
        raise UsageError("pixel_arcmin=None: shear needs it for noise and masks; set --pixel-arcmin", "--pixel-arcmin")
    reader = {name: value for name, value in noted.items() if name != "pixel_arcmin"}
    return "fits", noted, [image_reading(path, mask=mask, **reader) for path in paths]


class LabelTable:
    """Parameters of each universe, read from a table.

    The table is CSV (separated by commas, tabs, semicolons or bars), or has columns separated by spaces like Quijote's
    `latin_hypercube_params.txt`. The first line, with or without a leading #, names the columns, which must include
    omega_m and sigma_8 (any case, with or without underscore). A column `file` assigns a row to a file by its name or
    the end of its path. Without it, row N (from 0) applies to the files in the folder N, as in
    `latin_hypercube/17/df_m_128_CIC_z=0.npy`. A leading pandas index column may also contain the numbers or files.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected a table with columns omega_m and sigma_8")
        header, table = self._read()
        columns = {}
        for name, spellings in LABEL_NAMES.items():
            found = [number for number, spelling in enumerate(header) if spelling in spellings]
            if len(found) != 1:
                raise ValueError(f"{path} has {len(found)} {name} columns; expected one in its header {header}")
            columns[name] = found[0]
        self.rows = [self._parse(row, number, columns) for number, row in enumerate(table, 1)]
        self.files: list[tuple[tuple, tuple]] | None = None  # path parts and labels of each listed file
        self.numbered = dict(enumerate(self.rows))
        place = next((header.index(name) for name in FILE_NAMES if name in header), None)
        index = [
            [row[at].strip() for row in table] for at, _ in enumerate(takewhile(INDEX_NAMES.__contains__, header))
        ]
        if place is None:
            place = next((at for at, cells in enumerate(index) if not all(map(str.isdecimal, cells))), None)
        if place is not None:
            self.files = [(Path(row[place].strip()).parts, labels) for row, labels in zip(table, self.rows)]
        elif index:
            self.numbered = dict(zip(map(int, index[0]), self.rows))
            if len(self.numbered) < len(table):
                raise ValueError(f"{path}: the first column has repeated numbers; expected one row per number")

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """Return the column names in lower case and the cells of each row."""
        with open_unpacked(self.path) as file:
            text = decode_marked(file.read(), str(self.path)).lstrip("#")
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise ValueError(f"{self.path} has no rows; expected a header and one row per universe")
        comma = next((character for character in ",;|\t" if character in lines[0]), " ")
        lines = [" ".join(line.split()) for line in lines] if comma == " " else lines
        table = list(csv.reader(lines, delimiter=comma))
        header, rows = [name.strip().lower() for name in table[0]], table[1:]
        if rows and all(len(row) == len(header) + 1 for row in rows):
            header.insert(0, "")
        for number, row in enumerate(rows, 1):
            if len(row) != len(header):
                raise ValueError(f"{self.path}, row {number}: {len(row)} fields; expected {len(header)}")
        return header, rows

    def _parse(self, row: list[str], number: int, columns: dict[str, int]) -> tuple[float, ...]:
        values = []
        for name, column in columns.items():
            cell, (low, high) = "".join(row[column : column + 1]), LABEL_RANGE[name]
            try:
                values.append(float(cell.replace(",", ".")))  # decimal comma in a table with semicolons
            except ValueError:
                values.append(np.nan)
            if not low < values[-1] <= high:
                raise ValueError(f"{self.path}, row {number}: {name}={cell}: expected a number in ({low:g}, {high:g}]")
        return tuple(values)

    def __call__(self, path: Path) -> tuple[float, float]:
        """Return omega_m and sigma_8 for a file. Raises ValueError unless exactly one row applies to the file."""
        if self.files is None:
            folder = path.resolve().parent.name
            if not folder.isdecimal() or int(folder) not in self.numbered:
                raise ValueError(
                    f"{path}: {self.path} has no column `file`, so the file's folder must be the number of a row "
                    f"({min(self.numbered)} to {max(self.numbered)}), not {folder!r}"
                )
            return self.numbered[int(folder)]
        parts = path.resolve().parts
        found = [labels for end, labels in self.files if parts[-len(end) :] == end]
        if len(found) != 1:
            raise ValueError(f"{path}: {len(found)} rows of {self.path} match this file; expected one")
        return found[0]

    def bounds(self, name: str) -> tuple[float, float]:
        """Estimate the bounds of the flat prior that the table was sampled from.

        The minimum and maximum, moved apart by the mean spacing of the values, are an unbiased estimate.
        """
        values = sorted({row[PARAMETERS.index(name)] for row in self.rows})
        if len(values) < 2:
            raise ValueError(
                f"{self.path}: all rows have {name}={values[0]:g}, so the prior is unknown; set it with "
                f"--{name.replace('_', '-')} LOW,HIGH"
            )
        gap = (values[-1] - values[0]) / (len(values) - 1)
        low, high = LABEL_RANGE[name]
        return max(values[0] - gap, low), min(values[-1] + gap, high)


# ---- readings ----


def sky_reading(paths: Sequence[Path], **options: Any) -> Reading:
    """Return a `Reading` of sky patches, one channel per file; `options` are passed to `read_healpix_patches`."""

    def read() -> Rows:
        patches = read_healpix_patches(paths, **options)
        names = np.full(len(patches.maps), " ".join(path.name for path in paths))
        longitude, latitude = patches.centres.T
        rows = {"map": patches.maps, "mask": patches.mask, "source": names}
        rows |= {"longitude": longitude, "latitude": latitude, "skipped": np.full(len(names), patches.skipped)}
        return rows | {"margin": np.full(len(names), options.get("margin", 0))}

    return Reading(Path(paths[0]), read)


def image_reading(path: Path, hdu: int | None = None, mask: Path | None = None, margin: float = 0.0) -> Reading:
    """Return a `Reading` of one flat map; `mask` is a FITS image, above 0 where observed.

    For shear, the patch is the middle of the image, and the margin around it is `margin` times its side.
    """

    def read() -> Rows:
        observed = None if mask is None else read_fits_image(mask)[0] > 0
        image = read_fits_image(path, hdu, observed)
        rows = {"map": image[None], "source": np.array([path.name])}
        rows["margin"] = np.array([round(image.shape[-1] * margin / (1 + 2 * margin))])
        return rows if observed is None else rows | {"mask": observed[None]}

    return Reading(Path(path), read)


def cube_reading(path: Path, slab_mpc: float) -> Reading:
    """Return a `Reading` of slabs along the three axes of a Quijote cube; see `quijote_maps`."""

    def read() -> Rows:
        cube = read_quijote_cube(path)
        maps = quijote_maps(cube, slab_mpc)
        slabs = len(maps) // 3
        # Include the folder, because it names the realization: all cubes at one redshift have the same file name.
        rows = {"map": maps, "source": np.full(len(maps), f"{path.resolve().parent.name}/{path.name}")}
        rows |= {"axis": np.repeat(range(3), slabs), "slab": np.tile(np.arange(slabs), 3)}
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
) -> FilesInfo:
    """Write maps from files as a data set, or finish an interrupted build with the same arguments.

    Args:
        kind: kind of the files, one of `FILE_COLUMNS`. options: reader options, recorded in the info file.
        survey: settings of shear, which is computed for the patch without its margin; None keeps the maps unchanged.
        labels: parameters of the maps. prior: known bounds of parameters; `LabelTable.bounds` estimates the others.
        test_share: fraction of the universes in the test split, drawn with `seed`; values below 1 need labels.
        seed: seed of the split, and of the noise and the mask of each shear patch.

    Raises FileExistsError if `out` has different content, and ValueError for invalid files, labels, priors or splits.
    """
    out = Path(out)
    parameters = None if labels is None else [labels(reading.path) for reading in readings]
    splits = _split(parameters, len(readings), test_share, seed)
    bounds = _prior_bounds(labels, prior or {}, readings)
    start = next(iter(splits.values()))[0]
    first = readings[start].read()
    settings = _settings(first, kind, options, survey or SurveySettings())
    info = FilesInfo(
        settings=settings, counts=dict.fromkeys(SPLITS, 0), prior_bounds=bounds, seed=seed,
        labels=None if labels is None else labels.path.name, skipped=int(first.get("skipped", np.zeros(1))[0]),
        pixel_mean=(), pixel_std=(),
    )  # fmt: skip
    build_options = {
        "files": [str(reading.path) for reading in readings], "parameters": parameters, "splits": splits,
        "info": asdict(info), "reads_in_shard": READS_IN_SHARD,
    }  # fmt: skip
    with claimed_folder(out, build_options):
        ready = {start: first}  # the first rows, which were read above to determine the settings
        files: dict[str, list[Path]] = {}
        with tqdm(total=len(readings), desc="Reading", unit=" files") as bar:
            for split, members in splits.items():
                files[split] = [out / name for name in shard_names(split, -(-len(members) // READS_IN_SHARD))]
                for number, file in enumerate(files[split]):
                    chosen = members[number * READS_IN_SHARD : (number + 1) * READS_IN_SHARD]
                    if not file.exists():
                        write_shard(file, info.features(), _blocks(readings, chosen, ready, info, parameters))
                    bar.update(len(chosen))
        counts = {split: sum(read_header(file)["rows"] for file in files.get(split, ())) for split in SPLITS}
        info = replace(info, counts=counts, **pixel_statistics(files.get("train") or files["test"]))
        finish_folder(out, info)
    return info


def _settings(rows: Rows, kind: str, options: dict[str, Any], survey: SurveySettings) -> FileSettings:
    """Return the settings of the maps in `rows`. The maps in all other files must have the same settings."""
    channels, size = rows["map"].shape[1:3]
    side_deg, has_mask = options.get("side_deg"), "mask" in rows
    if survey.observable == "shear":
        channels, has_mask = 2 * channels, True
        size -= 2 * int(rows.get("margin", np.zeros(1))[0])
        if "pixel_arcmin" in options:
            side_deg = size * options["pixel_arcmin"] / 60
    return FileSettings(kind, size, channels, has_mask, side_deg, options, **asdict(survey))


def _prior_bounds(
    labels: LabelTable | None, given: Mapping[str, tuple[float, float]], readings: Sequence[Reading]
) -> dict[str, tuple[float, float]] | None:
    """Return the given bounds, or estimates from the table. Reject labels outside the bounds."""
    if labels is None:
        if given:
            raise ValueError(f"prior of {', '.join(given)}: has no effect without labels; pass a table of labels")
        return None
    bounds = {name: given[name] if name in given else labels.bounds(name) for name in PARAMETERS}
    for name, (low, high) in bounds.items():
        if not low < high:
            raise ValueError(f"prior of {name}={low},{high}: the lower bound must be below the upper bound")
    for reading in readings:
        for (name, (low, high)), value in zip(bounds.items(), labels(reading.path)):
            if not low <= value <= high:
                place = f"{reading.path}: {name}={value:g} in {labels.path}"
                raise ValueError(f"{place} is outside the prior, {low} to {high}; widen the prior or omit the file")
    return bounds


def _split(
    parameters: list[tuple[float, float]] | None, total: int, test_share: float, seed: int
) -> dict[str, list[int]]:
    """Return the indices of the `Reading` objects in each split. No universe is in two splits."""
    if test_share == 1:
        return {"test": list(range(total))}
    if parameters is None:
        raise ValueError(f"test_share={test_share}: requires labels to tell universes apart; pass a table of labels")
    universes = list(dict.fromkeys(parameters))
    order = np.random.default_rng(seed).permutation(len(universes))
    held_out = {universes[number] for number in order[: round(test_share * len(universes))]}
    splits = {"train": [], "test": []}
    for number, pair in enumerate(parameters):
        splits["test" if pair in held_out else "train"].append(number)
    if not 0 < test_share < 1 or not all(splits.values()):
        raise ValueError(
            f"test_share={test_share} of {len(universes)} universes leaves a split empty; use a fraction in (0, 1) "
            "that puts at least one universe into each split, or 1 for a test split only"
        )
    return splits


def _blocks(
    readings: Sequence[Reading],
    chosen: list[int],
    ready: dict[int, Rows],
    info: FilesInfo,
    parameters: list[tuple[float, float]] | None,
) -> Iterator[Rows]:
    """Yield rows from the chosen `Reading` objects. Convert maps to shear if requested, and add the parameters."""
    expected = (info.settings.channels, *(info.settings.size,) * 2)
    universes = {pair: number for number, pair in enumerate(dict.fromkeys(parameters or ()))}
    for number in chosen:
        rows = ready.pop(number) if number in ready else readings[number].read()
        if info.settings.observable == "shear":
            rows = sheared(rows, info.settings, info.seed, number)
        if (shape := rows["map"].shape[1:]) != expected:
            raise ValueError(f"{readings[number].path} has maps of shape {shape}; expected {expected}, as in file 1")
        if parameters is not None:
            omega_m, sigma_8 = parameters[number]
            values = {"omega_m": omega_m, "sigma_8": sigma_8, "s_8": sigma_8 * (omega_m / 0.3) ** 0.5}
            values["cosmology_id"] = universes[parameters[number]]
            rows |= {name: np.full(len(rows["map"]), value) for name, value in values.items()}
        yield {name: rows[name] for name in info.column_names()}


# ---- shear ----


def sheared(rows: Rows, settings: FileSettings, seed: int, number: int) -> Rows:
    """Convert convergence rows with margins to shear rows without margins.

    Args:
        rows: one reading; "map" [rows, planes, wide, wide], "margin" in pixels, optional "mask" [rows, wide, wide].
        seed, number: seed of the data set and index of the reading; with the row, they determine noise and mask.
    """
    wide = rows["map"].shape[-1]
    margin = int(rows["margin"][0])
    middle = np.s_[..., margin : wide - margin, margin : wide - margin]
    observed = rows.get("mask", np.ones((len(rows["map"]), wide, wide), bool))
    columns: dict[str, list[np.ndarray]] = {"map": [], "mask": [], "kappa": []}
    for row, (kappa, seen) in enumerate(zip(rows["map"], observed)):
        if not seen[middle].any():
            raise ValueError(f"{rows['source'][row]}: no pixel of the patch inside the margin is observed")
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number, row)))
        shear, mask = observe_shear(shear_of_cut(_subtract_mean(kappa, seen))[middle], settings, rng)
        columns["map"].append(shear * seen[middle])
        columns["mask"].append(mask & seen[middle])
        columns["kappa"].append(_subtract_mean(kappa[middle], seen[middle]).astype(np.float32))
    return rows | {name: np.stack(values) for name, values in columns.items()}


def shear_of_cut(kappa: np.ndarray) -> np.ndarray:
    """Return the shear [2 * planes, wide, wide] from convergence [planes, wide, wide] surrounded by empty sky."""
    import torch  # slow import, not needed for convergence maps

    from ...models.shear_operator import shear_from_convergence

    wide = kappa.shape[-1]
    alone = np.zeros((len(kappa), 2 * wide, 2 * wide))  # zero padding, because the operator is periodic
    alone[:, :wide, :wide] = kappa
    return shear_from_convergence(torch.from_numpy(alone)).numpy()[:, :wide, :wide]


def _subtract_mean(kappa: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Subtract the mean of the observed pixels from maps [planes, side, side], and set unobserved pixels to 0."""
    kappa = kappa.astype(np.float64)
    return np.where(observed, kappa - kappa[:, observed].mean(1)[:, None, None], 0)
