"""Data sets of maps read from files (`files.py`), in the layout of `rows.py`.

Columns: `map` float32 [channels, size, size]; `mask` bool [size, size] where there is one; of shear `kappa` float32
[planes, size, size], the convergence; `source`, the file; for patches of the sky `longitude` and `latitude` in
degrees; for slabs of a cube `axis`, `slab` and `redshift`. `omega_m`, `sigma_8`, `s_8` and `cosmology_id` are there if
the user gave a table of parameters, and only then: such a set is trained on and evaluated like one that was drawn;
maps of others can be given to a trained model.

Shear is what a survey would see of maps of convergence, with noise and masks. `models.shear_operator` is exact on a
sky whose opposite edges meet. A patch of a larger map is no such sky: the mass beyond its edges shears it too. So the
relation is applied to a cut that is larger than the patch on all sides, with nothing around it, and the patch is its
middle. What is missing is the shear by mass beyond the cut, which is smooth over the patch. Its rms over the rms of
the shear, on log-normal maps of sources at redshift 1, and in brackets without its mean over the patch
(`test_cosmology_files_shear.py` measures it):

    margin on each side    patches of 5 degrees    of 2.5 degrees
    none                   0.47 (0.38)             0.56 (0.41)
    1/4 of the patch       0.24 (0.15)             0.34 (0.19)
    1/2, the default       0.18 (0.09)             0.27 (0.13)
    as wide as the patch   0.10 (0.04)             0.15 (0.06)

Pixels of the cut that the file does not have count as the mean of those that it has: where many are missing, near them
and in the margin, the shear is less exact than that.
"""

import csv
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ...io.usage import UsageError, as_usage_errors
from ..options import BuildFromFiles
from ..simulation.maps import observe_shear
from ..simulation.settings import SurveySettings
from .files import is_healpix, quijote_maps, read_fits_image, read_healpix_patches, read_quijote_cube
from .info import PARAMETERS, SPLITS, FileSettings, FilesInfo
from .shards import Rows, claim_folder, finish_folder, pixel_statistics, read_header, shard_names, write_shard


READS_IN_SHARD = 50
MARGIN = 0.5  # around a patch of shear, on each side, in sides of the patch: the cut is twice as wide as the patch
LABEL_NAMES = {"omega_m": ("omega_m", "omegam", "om"), "sigma_8": ("sigma_8", "sigma8")}  # not s8, which may be S_8
LABEL_RANGE = {"omega_m": (0.0, 1.0), "sigma_8": (0.0, 2.0)}  # open below


@dataclass(frozen=True)
class Reading:
    """One or several files: `read` returns their columns of rows, all of one universe; `path` is the first file."""

    path: Path
    read: Callable[[], Rows]


def build_from_files(options: BuildFromFiles) -> dict[str, Any]:
    """Cut maps out of local files, as a command asks; returns what the data set holds. Nothing is downloaded."""
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
            progress=True,
        )
    except (FileNotFoundError, FileExistsError) as error:
        raise UsageError(str(error)) from error
    report: dict[str, Any] = {"out": str(options.out), "kind": kind, "map": info.units()["map"]}
    report |= {f"{split}_rows": rows for split, rows in info.counts.items()} | {"skipped": info.skipped}
    report |= {"pixel_mean": list(info.pixel_mean), "pixel_std": list(info.pixel_std), "labels": info.labels}
    report |= {"prior": None if info.prior_bounds is None else dict(info.prior_bounds)}
    return report | {"seconds": round(time.perf_counter() - started, 1)}


def _readings(options: BuildFromFiles) -> tuple[str, dict[str, Any], list[Reading]]:
    """Kind of the files, options of their reader as they are noted, and a reading of each or of all together."""
    paths, shear = options.paths, options.observable == "shear"
    if all(path.suffix == ".npy" for path in paths):
        noted = {"slab_mpc": 125.0} | options.reader("quijote")
        if shear:
            raise UsageError(
                "observable='shear': Quijote cubes hold density contrast, and shear is of convergence; give HEALPix "
                "or FITS maps of convergence", "--observable",
            )  # fmt: skip
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
        raise UsageError("pixel_arcmin is missing: noise and masks of shear depend on it", "--pixel-arcmin")
    reader = {name: value for name, value in noted.items() if name != "pixel_arcmin"}
    return "fits", noted, [image_reading(path, mask=mask, **reader) for path in paths]


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
        text = self.path.read_text(encoding="utf-8-sig").lstrip("# ")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path} is empty; expected a header and a row for each universe")
        table = list(csv.reader(lines)) if "," in lines[0] else [line.split() for line in lines]
        header = [name.strip().lower() for name in table[0]]
        columns = {}
        for name, spellings in LABEL_NAMES.items():
            found = [number for number, spelling in enumerate(header) if spelling in spellings]
            if len(found) != 1:
                raise ValueError(f"{path} has {len(found)} columns {name}, expected one; its header is {header}")
            columns[name] = found[0]
        self.rows = [self._parse(row, number, columns) for number, row in enumerate(table[1:], 1)]
        self.files: list[tuple[tuple, tuple]] | None = None  # parts of the path, and labels
        if "file" in header:
            files = [Path(row[header.index("file")].strip()).parts for row in table[1:]]
            self.files = list(zip(files, self.rows))

    def _parse(self, row: list[str], number: int, columns: dict[str, int]) -> tuple[float, ...]:
        values = []
        for name, column in columns.items():
            cell, (low, high) = "".join(row[column : column + 1]), LABEL_RANGE[name]
            try:
                values.append(float(cell))
            except ValueError:
                values.append(np.nan)
            if not low < values[-1] <= high:
                raise ValueError(f"{self.path}, row {number}: {name}={cell}: expected a number in ({low:g}, {high:g}]")
        return tuple(values)

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
        found = [labels for end, labels in self.files if parts[-len(end) :] == end]
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

    return Reading(Path(paths[0]), read)


def image_reading(path: Path, hdu: int | None = None, mask: Path | None = None, margin: float = 0.0) -> Reading:
    """One flat map; `mask` is a FITS image, above 0 where observed.

    Args:
        margin: of the image around its middle, on each side, in sides of the middle: that is to be the patch.
    """

    def read() -> Rows:
        observed = None if mask is None else read_fits_image(mask)[0] > 0
        image = read_fits_image(path, hdu, observed)
        rows = {"map": image[None], "source": np.array([path.name])}
        rows["margin"] = np.array([round(image.shape[-1] * margin / (1 + 2 * margin))])
        return rows if observed is None else rows | {"mask": observed[None]}

    return Reading(Path(path), read)


def cube_reading(path: Path, slab_mpc: float, axes: Sequence[int] = (0, 1, 2)) -> Reading:
    """Slabs of a Quijote cube; see `quijote_maps`."""

    def read() -> Rows:
        cube = read_quijote_cube(path)
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
        FileExistsError: `out` holds something else. FileNotFoundError: a file is missing.
        ValueError: what the readers and the table reject; maps of several shapes; a split without a universe;
            parameters outside the prior.
        After an error nothing is in `out` but complete shards, and the note by which the same call goes on.
    """
    out = Path(out)
    parameters = None if labels is None else [labels(reading.path) for reading in readings]
    splits = _split(parameters, len(readings), test_share, seed)
    bounds = _prior_bounds(labels, prior or {}, readings)
    start = next(iter(splits.values()))[0]
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
    claim_folder(out, {
        "files": [str(reading.path) for reading in readings], "parameters": parameters, "splits": splits,
        "info": asdict(info), "reads_in_shard": READS_IN_SHARD,
    })  # fmt: skip
    ready = {start: first}  # it says what the columns are, and is not read again
    files: dict[str, list[Path]] = {}
    with tqdm(total=len(readings), desc="Reading", unit=" files", disable=not progress) as bar:
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
) -> dict[str, list[int]]:
    """Numbers of the readings of each split; no universe is in two."""
    if test_share == 1:
        return {"test": list(range(total))}
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
    return splits


def _blocks(
    readings: Sequence[Reading],
    chosen: list[int],
    ready: dict[int, Rows],
    info: FilesInfo,
    parameters: list[tuple[float, float]] | None,
) -> Iterator[Rows]:
    """The rows of the chosen readings, with their parameters."""
    expected = (info.settings.channels, *(info.settings.size,) * 2)
    universes = {pair: number for number, pair in enumerate(dict.fromkeys(parameters or ()))}
    for number in chosen:
        rows = ready.pop(number) if number in ready else readings[number].read()
        if (shape := rows["map"].shape[1:]) != expected:
            raise ValueError(f"{readings[number].path} gives maps of shape {shape}, the first file {expected}")
        if parameters is not None:
            omega_m, sigma_8 = parameters[number]
            values = {"omega_m": omega_m, "sigma_8": sigma_8, "s_8": sigma_8 * (omega_m / 0.3) ** 0.5}
            values["cosmology_id"] = universes[parameters[number]]
            rows |= {name: np.full(len(rows["map"]), value) for name, value in values.items()}
        yield {name: rows[name] for name in info.column_names()}


# ---- shear ----


def sheared(rows: Rows, settings: FileSettings, seed: int, number: int) -> Rows:
    """Rows of convergence with their margins as rows of shear: "map", "mask" and "kappa".

    Args:
        rows: of one reading; "map" [rows, planes, wide, wide], maybe "mask" [rows, wide, wide], "margin" in pixels.
        seed: of the data set. number: of the reading. With the number of the row they decide its noise and its mask.
    """
    wide = rows["map"].shape[-1]
    margin = int(rows["margin"][0])
    middle = np.s_[..., margin : wide - margin, margin : wide - margin]
    observed = rows.get("mask", np.ones((len(rows["map"]), wide, wide), bool))
    columns: dict[str, list[np.ndarray]] = {"map": [], "mask": [], "kappa": []}
    for row, (kappa, seen) in enumerate(zip(rows["map"], observed)):
        if not seen[middle].any():
            raise ValueError(f"{rows['source'][row]}: no pixel of its middle is observed; the patch would be empty")
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number, row)))
        shear, mask = observe_shear(shear_of_cut(_less_mean(kappa, seen))[middle], settings, rng)
        columns["map"].append(shear * seen[middle])
        columns["mask"].append(mask & seen[middle])
        columns["kappa"].append(_less_mean(kappa[middle], seen[middle]).astype(np.float32))
    return rows | {name: np.stack(values) for name, values in columns.items()}


def shear_of_cut(kappa: np.ndarray) -> np.ndarray:
    """Shear [2 planes, wide, wide] of convergence [planes, wide, wide] with nothing around it."""
    import torch  # seconds, which maps of convergence do not need

    from ...models.shear_operator import shear_from_convergence

    wide = kappa.shape[-1]
    alone = np.zeros((len(kappa), 2 * wide, 2 * wide))  # the operator's sky is periodic: its copies are kept away
    alone[:, :wide, :wide] = kappa
    return shear_from_convergence(torch.from_numpy(alone)).numpy()[:, :wide, :wide]


def _less_mean(kappa: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Maps [planes, side, side] in double precision, of mean 0 over the observed pixels and 0 in the others."""
    kappa = kappa.astype(np.float64)
    return np.where(observed, kappa - kappa[:, observed].mean(1)[:, None, None], 0)
