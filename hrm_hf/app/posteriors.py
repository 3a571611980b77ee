"""Shared by the tabs of maps of the sky: which map to take, and the posterior of parameters that it leaves."""

import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from ..cosmology.plots import corner_figure
from ..models.feature_extraction_cosmo import FILE_KINDS
from ..models.pipeline_cosmo import INTERVALS, CosmologyRegressionPipeline
from ..registry import architecture_of
from .limits import MAX_SEED, UPLOAD_PIXELS, checked, own_uploads
from .messages import MODEL_EVENT, PAGE_EVENT
from .style import figure_image, figure_output


COLUMNS = ["parameter", "mean", "std", "68 %", "95 %", "true value"]
FALLBACK_BOUNDS = {"omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}
EXAMPLES = (("Little matter", 0.2, 0.75), ("Planck-like", 0.31, 0.81), ("Much matter", 0.42, 0.9))
SAMPLES = 4000
FITS_UNITS = 100
TOO_MUCH = f"the page takes at most {UPLOAD_PIXELS:,}"


# ---------------------------------------------------------------------------------------------------- logic


def source_redshifts(planes: int) -> tuple[float, ...]:
    """Of the planes of a drawn map: the generator's default for one, from 0.5 to 1.5 for several."""
    return (1.0,) if planes == 1 else tuple(np.linspace(0.5, 1.5, planes).tolist())


def read_map(regressor: CosmologyRegressionPipeline, path: str) -> tuple[dict[str, np.ndarray], int]:
    """The first map of an uploaded file, as `sample_map` gives it, and how many the file holds.

    Raises:
        ValueError: no map file, one that promises more than a page may be given, or maps of another size than the
            model's; the file is called by its name alone.
    """
    try:
        (validate_numpy if path.lower().endswith((".npy", ".npz")) else validate_fits)(path)
        maps, masks = regressor.feature_extractor.read(path)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        words = str(error).replace(str(path), Path(path).name)
        raise ValueError(words if Path(path).name in words else f"{Path(path).name}: {words}") from error
    return {"map": maps[0].numpy()} | ({} if masks is None else {"mask": masks[0].numpy()}), len(maps)


def validate_numpy(path: str) -> None:
    """Raise ValueError for an uploaded .npy or .npz file whose headers promise more than UPLOAD_PIXELS an array."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            return _validate_array(file)
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.file_size > 8 * UPLOAD_PIXELS + 2**16:
                raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes; {TOO_MUCH}")
            with archive.open(entry) as file:
                _validate_array(file)


def _validate_array(file: Any) -> None:
    if np.lib.format.read_magic(file) != (1, 0):  # whose headers are short
        raise ValueError("no array of numbers as numpy.save writes it")
    if (pixels := math.prod(np.lib.format.read_array_header_1_0(file)[0])) > UPLOAD_PIXELS:
        raise ValueError(f"an array of {pixels:.6g} pixels; {TOO_MUCH}")


def validate_fits(path: str) -> None:
    """Raise ValueError for an uploaded FITS file that is compressed, or promises more than UPLOAD_PIXELS an image.

    Reads the headers without astropy, which loops over as many axes as a header says.
    """
    with open(path, "rb") as file:
        for _ in range(FITS_UNITS):
            cards: dict[str, str] = {}
            while "END" not in cards:
                block = file.read(2880).decode("ascii", "replace")
                if len(block) < 2880 or (not cards and not block.startswith(("SIMPLE  =", "XTENSION="))):
                    raise ValueError("no plain FITS file, or a truncated one; compressed files are not taken here")
                for at in range(0, 2880, 80):
                    name, _, value = block[at : at + 80].partition("=")
                    cards.setdefault(name.strip(), value.partition("/")[0].strip())
            axes, extra, groups = (
                int(cards.get(name, first)) for name, first in (("NAXIS", 0), ("PCOUNT", 0), ("GCOUNT", 1))
            )
            if "ZIMAGE" in cards or not 0 <= axes <= 32:
                raise ValueError("a compressed image, or one of more than 32 axes; upload a plain one")
            sides = [int(cards[f"NAXIS{axis}"]) for axis in range(1, axes + 1)]
            pixels = math.prod(sides) if sides else 0
            if min([extra, groups, *sides]) < 0 or pixels > UPLOAD_PIXELS:
                raise ValueError(f"an image of {pixels:.6g} pixels; {TOO_MUCH}")
            size = abs(int(cards["BITPIX"])) // 8 * groups * (extra + pixels)
            file.seek(-(-size // 2880) * 2880, os.SEEK_CUR)
            if file.tell() >= os.path.getsize(path):
                return
    raise ValueError(f"more than {FITS_UNITS} units; upload one with the map alone")


def infer(
    regressor: CosmologyRegressionPipeline, item: dict, max_steps: int | None, halt: str, **options: Any
) -> dict[str, Any]:
    """The pipeline's result for one map, with samples; `options` are the pipeline's."""
    depth = {"max_steps": max_steps, "halt": halt} if max_steps is not None else {}
    return regressor(item, num_samples=SAMPLES, return_samples=True, **depth, **options)


def posterior_rows(result: dict[str, Any], names: list[str], truth: dict[str, float]) -> list[list[str]]:
    """A row for each parameter, as COLUMNS."""
    rows = []
    for name in names:
        found = result[name]
        ranges = [f"{found[key][0]:.3f} to {found[key][1]:.3f}" for key in INTERVALS]
        true = f"{truth[name]:.3f}" if name in truth else "unknown"
        rows.append([name, f"{found['mean']:.3f}", f"{found['std']:.3f}", *ranges, true])
    return rows


def true_values(omega_m: float, sigma_8: float) -> dict[str, float]:
    """The parameters that a generated map was made of, and S_8."""
    return {"omega_m": omega_m, "sigma_8": sigma_8, "s_8": sigma_8 * (omega_m / 0.3) ** 0.5}


def posterior_image(result: dict[str, Any], names: list[str], truth: dict[str, float]) -> Image.Image:
    """Corner plot of the samples: histograms, 68 and 95 % regions, true values as dashes and crosses."""
    figure = corner_figure(names, [(result["samples"], truth)])
    figure.suptitle("Posterior: regions of 68 and 95 %" + (", true values" if truth else ""), fontsize="medium")
    return figure_image(figure)


def summary(config, item: dict[str, np.ndarray], result: dict[str, Any]) -> str:
    """Remarks as HTML: segments used, whether the map's amplitude is that of training, and whether the map is."""
    words = f"{result['steps']} {'segment' if result['steps'] == 1 else 'segments'} used."
    if config.pixel_std:
        observed = item["map"] if "mask" not in item else item["map"][:, item["mask"]]
        words += (
            f" Standard deviation of the map: {float(np.std(observed)):.4g}; "
            f"of the maps in training: {config.pixel_std[0]:.4g}."
        )
    distance = result.get("map_distance")
    if distance is None:
        return f"<p>{words}</p>"
    limit = result["max_map_distance"]
    words += f" Distance of its statistics from those of the maps in training: {distance:.2f}."
    warning = f"It is not like those, of which all but one in 200 are within {limit:.2f}: a posterior sure and wrong."
    return f"<p>{words}</p>" + (f"<p><strong>{warning}</strong></p>" if distance > limit else "")


# ---------------------------------------------------------------------------------------------------- page


@dataclass(frozen=True)
class MapControls:
    """Controls of every tab of maps: the buttons that ask a model about a map, and how long it may think about it."""

    start: gr.Button
    examples: list[gr.Button]
    file: gr.UploadButton
    most: gr.Slider
    halt: gr.Radio


def parameter_sliders(config) -> tuple[gr.Slider, gr.Slider]:
    """Omega_m and sigma_8 of a map that is drawn, within the model's prior."""
    bounds = FALLBACK_BOUNDS | dict(zip(config.target_names, config.prior_bounds or ()))
    return (
        gr.Slider(*bounds["omega_m"], value=0.31, step=0.005, label="Omega_m"),
        gr.Slider(*bounds["sigma_8"], value=0.81, step=0.005, label="sigma_8"),
    )


def seed_field() -> gr.Number:
    """The seed of a map that is drawn."""
    return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED)


def map_controls(config, start: str, upload: str) -> MapControls:
    """Adds the controls below the sliders; `start` and `upload` are what their buttons say."""
    recurrent = architecture_of(config).halts
    button = gr.Button(start, variant="primary")
    with gr.Row():
        examples = [gr.Button(name, size="sm", min_width=60) for name, _, _ in EXAMPLES]
    file = own_uploads(gr.UploadButton(f"{upload} ({', '.join(FILE_KINDS[:3])})", type="filepath", size="sm"))
    with gr.Row(visible=recurrent):
        most = gr.Slider(
            1, 2 * config.halt_max_steps if recurrent else 2, step=1, label="Most segments",
            value=config.halt_max_steps if recurrent else 1,
        )  # fmt: skip
        halt = gr.Radio(["fixed", "adaptive"], value="fixed", label="Halting")
    return MapControls(button, examples, file, most, halt)


def posterior_outputs() -> tuple[gr.Image, gr.HTML, gr.Dataframe]:
    """Corner plot, remarks and table of a posterior."""
    corner = figure_output("Posterior", elem_classes="cosmology-posterior", height=560)
    said = gr.HTML(elem_classes="caption")
    return corner, said, gr.Dataframe(headers=COLUMNS, interactive=False, label="Posterior in numbers")


def connect(
    served: CosmologyRegressionPipeline,
    controls: MapControls,
    sliders: list[gr.Slider | gr.Number | gr.Radio],
    outputs: list[Any],
    drawn: Callable[..., list],
    answered: Callable[..., list],
    shown: gr.State,
    api_name: str,
) -> None:
    """Adds the events of a tab. Its example runs when the state `shown` changes.

    Args:
        sliders: what a map is drawn with; the first two are those of `parameter_sliders`.
        outputs: of which the one of HTML says why there is no answer, where there is none.
        drawn: of the sliders' values, most segments and halting: values of the outputs.
        answered: the same of a map as `read_map` gives it, most segments and halting.
    """

    def uploaded(path, max_steps, halting):
        item, count = read_map(served, path)
        if count > 1:
            gr.Info(f"The file holds {count} maps; the first one is shown.")
        return answered(item, max_steps, halting)

    def refused(words: str) -> list:
        return [words if isinstance(output, gr.HTML) else None for output in outputs]

    depth = [controls.most, controls.halt]
    given = [*sliders, *depth]
    asked = {"fn": checked(drawn, given, refused), "inputs": given, "outputs": outputs, **MODEL_EVENT}
    controls.start.click(**asked, api_name=api_name)
    shown.change(**asked, **PAGE_EVENT)
    sent = [controls.file, *depth]
    controls.file.upload(checked(uploaded, sent, refused), sent, outputs, **MODEL_EVENT, **PAGE_EVENT)
    for (_, *values), button in zip(EXAMPLES, controls.examples):
        button.click(lambda values=values: values, None, sliders[:2], **PAGE_EVENT).then(**asked, **PAGE_EVENT)
