"""Tabs for sky maps: posteriors from a regressor, and mass maps from shear.

The data set generator draws a map, or the visitor uploads one.
"""

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from ..cosmology.evaluation import MassMaps, squared_errors
from ..cosmology.plots import corner_figure, map_panels, shear_amplitude
from ..cosmology.simulation.maps import MapSettings, generate_columns
from ..models.feature_extraction_cosmo import FILE_KINDS
from ..models.pipeline_cosmo import INTERVALS, CosmologyRegressionPipeline
from ..models.pipeline_mass_mapping import MassMappingPipeline
from ..registry import architecture_of
from .limits import MAX_SEED, MODEL_EVENT, PAGE_EVENT, UPLOAD_PIXELS, ask, checked, own_uploads
from .style import figure_image, figure_output


COLUMNS = ["parameter", "mean", "std", "68 %", "95 %", "true value"]
FALLBACK_BOUNDS = {"omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}
EXAMPLES = (("Low density", 0.2, 0.75), ("Planck-like", 0.31, 0.81), ("High density", 0.42, 0.9))
SAMPLES = 4000
FITS_UNITS = 100
TOO_MUCH = f"the page accepts at most {UPLOAD_PIXELS:,}"
SIGMA_E, MASK_FRACTION = 0.26, 0.3  # default values of the sliders
GALAXIES = (1, 100)  # minimum and maximum number of galaxies per square arcmin


def source_redshifts(planes: int) -> tuple[float, ...]:
    """Return the source redshifts for a generated map: 1.0 for one plane, 0.5 to 1.5 for several."""
    return (1.0,) if planes == 1 else tuple(np.linspace(0.5, 1.5, planes).tolist())


def read_map(regressor: CosmologyRegressionPipeline, path: str) -> tuple[dict[str, np.ndarray], int]:
    """Return the first map in an uploaded file, in the format of `sample_map`, and the number of maps in the file.

    Raises:
        ValueError: the file is too large or not a map file, or its maps do not have the size that the model expects.
    """
    try:
        (validate_numpy if path.lower().endswith((".npy", ".npz")) else validate_fits)(path)
        maps, masks = regressor.feature_extractor.read(path)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        words = str(error).replace(str(path), Path(path).name)
        raise ValueError(words if Path(path).name in words else f"{Path(path).name}: {words}") from error
    return {"map": maps[0].numpy()} | ({} if masks is None else {"mask": masks[0].numpy()}), len(maps)


def validate_numpy(path: str) -> None:
    """Raise ValueError if an .npy or .npz file declares an array of more than UPLOAD_PIXELS pixels."""
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
    if np.lib.format.read_magic(file) != (1, 0):  # .npy headers of version 1.0 are at most 64 KiB long
        raise ValueError("not a numeric array written by numpy.save")
    if (pixels := math.prod(np.lib.format.read_array_header_1_0(file)[0])) > UPLOAD_PIXELS:
        raise ValueError(f"the array has {pixels:.6g} pixels; {TOO_MUCH}")


def validate_fits(path: str) -> None:
    """Raise ValueError if a FITS file is compressed or declares an image of more than UPLOAD_PIXELS pixels.

    The headers are parsed without astropy, because astropy loops over every axis that a header declares.
    """
    with open(path, "rb") as file:
        for _ in range(FITS_UNITS):
            cards: dict[str, str] = {}
            while "END" not in cards:
                block = file.read(2880).decode("ascii", "replace")
                if len(block) < 2880 or (not cards and not block.startswith(("SIMPLE  =", "XTENSION="))):
                    raise ValueError("not a FITS file, or a truncated one; compressed files are not supported")
                for at in range(0, 2880, 80):
                    name, _, value = block[at : at + 80].partition("=")
                    cards.setdefault(name.strip(), value.partition("/")[0].strip())
            keys = (("NAXIS", 0), ("PCOUNT", 0), ("GCOUNT", 1))
            axes, extra, groups = (int(cards.get(key, default)) for key, default in keys)
            if "ZIMAGE" in cards or not 0 <= axes <= 32:
                raise ValueError("the image is compressed or has more than 32 axes; upload an uncompressed image")
            sides = [int(cards[f"NAXIS{axis}"]) for axis in range(1, axes + 1)]
            pixels = math.prod(sides) if sides else 0
            if min([extra, groups, *sides]) < 0 or pixels > UPLOAD_PIXELS:
                raise ValueError(f"the image has {pixels:.6g} pixels; {TOO_MUCH}")
            size = abs(int(cards["BITPIX"])) // 8 * groups * (extra + pixels)
            file.seek(-(-size // 2880) * 2880, os.SEEK_CUR)
            if file.tell() >= os.path.getsize(path):
                return
    raise ValueError(f"the file has more than {FITS_UNITS} HDUs; upload one that contains only the map")


def infer(
    regressor: CosmologyRegressionPipeline, item: dict, max_steps: int | None, halt: str, **options: Any
) -> dict[str, Any]:
    """Run the pipeline with `options` on one map and return the result, which includes posterior samples."""
    depth = {"max_steps": max_steps, "halt": halt} if max_steps is not None else {}
    return regressor(item, num_samples=SAMPLES, return_samples=True, **depth, **options)


def posterior_rows(result: dict[str, Any], names: list[str], truth: dict[str, float]) -> list[list[str]]:
    """Return the table of the posterior: one row per parameter, with the columns in COLUMNS."""
    rows = []
    for name in names:
        found = result[name]
        ranges = [f"{found[key][0]:.3f} to {found[key][1]:.3f}" for key in INTERVALS]
        true = f"{truth[name]:.3f}" if name in truth else "unknown"
        rows.append([name, f"{found['mean']:.3f}", f"{found['std']:.3f}", *ranges, true])
    return rows


def true_values(omega_m: float, sigma_8: float) -> dict[str, float]:
    """Return the true parameters of a generated map, including S_8."""
    return {"omega_m": omega_m, "sigma_8": sigma_8, "s_8": sigma_8 * (omega_m / 0.3) ** 0.5}


def posterior_image(result: dict[str, Any], names: list[str], truth: dict[str, float]) -> Image.Image:
    """Draw a corner plot of the samples, with 68 % and 95 % regions. Dashed lines and crosses mark the true values."""
    figure = corner_figure(names, [(result["samples"], truth)])
    figure.suptitle("Posterior: 68 % and 95 % regions" + (", true values" if truth else ""), fontsize="medium")
    return figure_image(figure)


def summary(config, item: dict[str, np.ndarray], result: dict[str, Any]) -> str:
    """Return HTML that states the number of segments and how much the map differs from the training maps."""
    words = f"{result['steps']} {'segment' if result['steps'] == 1 else 'segments'} used."
    if config.pixel_std:
        observed = item["map"] if "mask" not in item else item["map"][:, item["mask"]]
        words += (
            f" Standard deviation of the map: {float(np.std(observed)):.4g}; "
            f"of the training maps: {config.pixel_std[0]:.4g}."
        )
    distance = result.get("map_distance")
    if distance is None:
        return f"<p>{words}</p>"
    limit = result["max_map_distance"]
    words += f" Distance of its statistics from those of the training maps: {distance:.2f}."
    warning = f"This exceeds {limit:.2f}, the limit for 99.5 % of held-out maps: the posterior may be wrong."
    return f"<p>{words}</p>" + (f"<p><strong>{warning}</strong></p>" if distance > limit else "")


def parameter_sliders(config) -> tuple[gr.Slider, gr.Slider]:
    """Add sliders for Omega_m and sigma_8 of a generated map, bounded by the model's prior."""
    bounds = FALLBACK_BOUNDS | dict(zip(config.target_names, config.prior_bounds or ()))
    return (
        gr.Slider(*bounds["omega_m"], value=0.31, step=0.005, label="Omega_m"),
        gr.Slider(*bounds["sigma_8"], value=0.81, step=0.005, label="sigma_8"),
    )


def seed_field() -> gr.Number:
    """Add a field for the seed of a generated map."""
    return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED)


def map_controls(config, start: str, upload: str, sliders: tuple[gr.Slider, ...]) -> tuple:
    """Add and return the controls below the sliders: start, examples, upload, maximum segments and halting."""
    recurrent = architecture_of(config).halts
    button = gr.Button(start, variant="primary")
    with gr.Row():
        examples = [
            (gr.Button(name, size="sm", min_width=60), lambda values=values: values, list(sliders))
            for name, *values in EXAMPLES
        ]
    file = own_uploads(gr.UploadButton(f"{upload} ({', '.join(FILE_KINDS[:3])})", type="filepath", size="sm"))
    with gr.Row(visible=recurrent):
        most = gr.Slider(
            1, 2 * config.halt_max_steps if recurrent else 2, step=1, label="Maximum segments",
            value=config.halt_max_steps if recurrent else 1,
        )  # fmt: skip
        halt = gr.Radio(["fixed", "adaptive"], value="fixed", label="Halting")
    return button, examples, file, most, halt


def posterior_outputs() -> tuple[gr.Image, gr.HTML, gr.Dataframe]:
    """Add the outputs for a posterior: corner plot, notes and table."""
    corner = figure_output("Posterior", elem_classes="cosmology-posterior", height=560)
    said = gr.HTML(elem_classes="caption")
    return corner, said, gr.Dataframe(headers=COLUMNS, interactive=False, label="Posterior")


def connect(
    served: CosmologyRegressionPipeline,
    controls: tuple,
    sliders: list[gr.Slider | gr.Number | gr.Radio],
    outputs: list[Any],
    drawn: Callable[..., list],
    answered: Callable[..., list],
    shown: gr.State,
    api_name: str,
) -> None:
    """Connect the components of a map tab to their event handlers.

    Args:
        controls: the return value of `map_controls`.
        sliders: inputs that determine a generated map.
        outputs: components that show the result; the HTML component also shows errors.
        drawn: function that maps the values of the sliders, maximum segments and halting to output values.
        answered: function like `drawn` that takes a map from `read_map` instead of slider values.
    """

    def uploaded(path, max_steps, halting):
        item, count = read_map(served, path)
        if count > 1:
            gr.Info(f"The file contains {count} maps; the page shows the first one.")
        return answered(item, max_steps, halting)

    def refused(words: str) -> list:
        return [words if isinstance(output, gr.HTML) else None for output in outputs]

    start, examples, file, *depth = controls
    ask(drawn, [*sliders, *depth], outputs, refused, start, shown, api_name, examples)
    sent = [file, *depth]
    file.upload(checked(uploaded, sent, refused), sent, outputs, **MODEL_EVENT, **PAGE_EVENT)


def sample_map(
    config, omega_m: float, sigma_8: float, seed: int, sigma_e: float = 0.0, observable: str = "convergence"
) -> dict[str, np.ndarray]:
    """Generate a map with the size and channels that a model expects.

    Checkpoints do not store which kind of maps they were trained on, so all other settings are the generator's
    defaults: log-normal, 5 degrees, sources at redshift 1, or 0.5 to 1.5 for several planes. "shear" has two channels
    per plane. Returns {"map": [C, H, W]}, plus "mask" if the model expects one.
    """
    shear = observable == "shear"
    settings = MapSettings(
        "des" if config.mask_channel and not shear else "lognormal",
        config.image_size,
        source_redshifts=source_redshifts(config.num_map_channels // (2 if shear else 1)),
        sigma_e=sigma_e,
        observable=observable,
    )
    columns = generate_columns(settings, omega_m, sigma_8, seed)
    return {name: columns[name] for name in ("map", "mask")[: 1 + config.mask_channel]}


def map_image(item: dict[str, np.ndarray]) -> Image.Image:
    """Plot the channels of a map side by side, in the units of the data. Masked pixels stay white."""
    maps, mask = np.asarray(item["map"]), item.get("mask")
    shown = maps if mask is None else np.where(mask, maps, np.nan)
    names = ["Convergence"] if len(maps) == 1 else [f"Channel {number}" for number in range(1, len(maps) + 1)]
    panels = [(name, channel, None) for name, channel in zip(names, shown)]
    return figure_image(map_panels(panels, columns=len(maps), bars=True))


def cosmology_tab(regressor: CosmologyRegressionPipeline, shown: gr.State) -> None:
    """Build the tab that infers cosmological parameters. Its example runs when the tab is first displayed."""
    config = regressor.model.config
    recurrent = architecture_of(config).halts
    with gr.Row():
        with gr.Column(scale=4, min_width=340):
            with gr.Group():
                omega_m, sigma_8 = parameter_sliders(config)
                with gr.Row():
                    noise = gr.Slider(0, 0.4, value=0, step=0.02, label="Shape noise sigma_e")
                    seed = seed_field()
                observable = gr.Radio(
                    ["convergence", "shear"], value="convergence", label="Generated maps",
                    info="Choose the kind used in training; the checkpoint does not store it.",
                    visible=config.num_map_channels % 2 == 0,
                )  # fmt: skip
            size = config.image_size
            upload = f"Or upload a map of {size} x {size} pixels"
            controls = map_controls(config, "Sample a map and infer", upload, (omega_m, sigma_8))
            picture = figure_output("Map", elem_classes="cosmology-map", height=300)
        with gr.Column(scale=6, min_width=420):
            corner, said, table = posterior_outputs()

    def answered(item, max_steps, halting, truth=None):
        result = infer(regressor, item, int(max_steps) if recurrent else None, halting)
        names, truth = config.reported_names, truth or {}
        image, rows = posterior_image(result, names, truth), posterior_rows(result, names, truth)
        return [map_image(item), image, summary(config, item, result), rows]

    def sampled(omega, sigma, shape_noise, number, kind, max_steps, halting):
        item = sample_map(config, omega, sigma, int(number), shape_noise, kind)
        return answered(item, max_steps, halting, true_values(omega, sigma))

    sliders = [omega_m, sigma_8, noise, seed, observable]
    connect(regressor, controls, sliders, [picture, corner, said, table], sampled, answered, shown, "infer")


def sample_shear(
    config, omega_m: float, sigma_8: float, seed: int, sigma_e: float, galaxies: float, mask_fraction: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Generate shear, {"map": [2P, S, S], "mask"}, and the convergence [P, S, S] that it is computed from."""
    settings = MapSettings(
        size=config.image_size,
        source_redshifts=source_redshifts(config.num_planes),
        observable="shear",
        sigma_e=sigma_e,
        galaxies_per_arcmin2=galaxies,
        mask_fraction=mask_fraction if config.mask_channel else 0.0,
    )
    columns = generate_columns(settings, omega_m, sigma_8, seed)
    kappa = columns.pop("kappa")
    return columns if config.mask_channel else {"map": columns["map"]}, kappa


def galaxies_of_training(config) -> int:
    """Return how many galaxies per square arcmin make maps as noisy as the training maps, with shape noise SIGMA_E.

    The variance of g1, and of g2, is the noise variance plus half the variance of the convergence. Returns the
    generator's default if the config lacks `pixel_std` or `kappa_std`.
    """
    planes = source_redshifts(config.num_planes)
    settings = MapSettings(size=config.image_size, source_redshifts=planes, sigma_e=SIGMA_E)
    galaxies = settings.galaxies_per_arcmin2
    if config.pixel_std and config.kappa_std:
        noise = np.mean(np.square(config.pixel_std)) - np.mean(np.square(config.kappa_std)) / 2
        galaxies *= settings.pixel_noise**2 / max(noise, np.finfo(float).tiny)
    return int(np.clip(galaxies, *GALAXIES).round())


def map_errors(maps: np.ndarray, kappa: np.ndarray, where: np.ndarray | None = None) -> np.ndarray:
    """Return the rms errors [N] of maps [N, P, S, S], relative to the rms of `kappa` [P, S, S], in pixels `where`."""
    pairs = MassMaps(np.broadcast_to(kappa, maps.shape), maps)
    error, signal = squared_errors(pairs, None if where is None else where[None])
    return np.sqrt(error / signal)


def maps_image(item: dict[str, np.ndarray], result: dict[str, Any], kappa: np.ndarray | None) -> Image.Image:
    """Plot the truth (if known), |shear|, mass map and uncertainty of each plane. Masked shear stays blank."""
    size = item["map"].shape[-1]
    estimate, std = (result[name].reshape(-1, size, size) for name in ("kappa", "kappa_std"))
    observed = shear_amplitude(np.asarray(item["map"]), item.get("mask"))
    panels = []
    for plane in range(len(estimate)):
        most = np.abs(estimate[plane] if kappa is None else kappa[plane]).max()
        named = f", plane {plane + 1}" if len(estimate) > 1 else ""
        panels += [] if kappa is None else [(f"Truth{named}", kappa[plane], most)]
        panels += [
            (f"|shear|{named}", observed[plane], None),
            (f"Mass map{named}", estimate[plane], most),
            (f"Uncertainty{named}", std[plane], None),
        ]
    return figure_image(map_panels(panels, columns=2, bars=True))


def segments_image(result: dict[str, Any], kappa: np.ndarray | None) -> Image.Image:
    """Plot the first plane of the map after each segment, with its error if the truth is known."""
    segments = result["segment_maps"][: result["steps"]]  # after halting, entries repeat the last map
    titles = [f"Segment {number}" for number in range(1, len(segments) + 1)]
    if kappa is not None:
        titles = [f"{title}: error {error:.3f}" for title, error in zip(titles, map_errors(segments, kappa))]
    most = np.abs(segments[-1, 0] if kappa is None else kappa[0]).max()
    panels = [(title, one[0], most) for title, one in zip(titles, segments)]
    return figure_image(map_panels(panels, columns=4, bars=False))


def error_remark(item: dict[str, np.ndarray], result: dict[str, Any], kappa: np.ndarray) -> str:
    """Return HTML that states the error of the map."""
    last = result["segment_maps"][-1:]
    words = f"Error of the map: {map_errors(last, kappa)[0]:.3f} of the rms of the truth"
    if "mask" in item and not item["mask"].all():
        words += f"; in masked pixels: {map_errors(last, kappa, ~item['mask'])[0]:.3f}"
    return f"<p>{words}.</p>"


def mass_map_tab(mapper: MassMappingPipeline, shown: gr.State) -> None:
    """Build the tab that estimates mass maps. Its example runs when the tab is first displayed."""
    config = mapper.model.config
    recurrent, size = architecture_of(config).halts, config.image_size
    with gr.Row():
        with gr.Column(scale=4, min_width=340):
            with gr.Group():
                omega_m, sigma_8 = parameter_sliders(config)
                with gr.Row():
                    noise = gr.Slider(0, 0.4, value=SIGMA_E, step=0.02, label="Shape noise sigma_e")
                    density = galaxies_of_training(config)
                    galaxies = gr.Slider(*GALAXIES, value=density, step=1, label="Galaxies per square arcmin")
                with gr.Row():
                    masked = gr.Slider(
                        0, 0.8, value=MASK_FRACTION, step=0.05, label="Masked fraction", visible=config.mask_channel
                    )
                    seed = seed_field()
            upload = f"Or upload shear and mask of {size} x {size} pixels"
            controls = map_controls(config, "Generate shear and map its mass", upload, (omega_m, sigma_8))
            maps = figure_output("Maps", elem_classes="mass-maps")
        with gr.Column(scale=6, min_width=420):
            segments = figure_output("Map after each segment", elem_classes="mass-map-segments", visible=recurrent)
            corner, said, table = posterior_outputs()

    def answered(item, max_steps, halting, truth=None, kappa=None):
        depth = int(max_steps) if recurrent else None
        result = infer(mapper, item, depth, halting, return_segments=True)
        names, truth = config.reported_names, truth or {}
        words = summary(config, item, result) + ("" if kappa is None else error_remark(item, result, kappa))
        image, rows = posterior_image(result, names, truth), posterior_rows(result, names, truth)
        return [maps_image(item, result, kappa), segments_image(result, kappa), image, words, rows]

    def drawn(omega, sigma, shape_noise, density, mask_fraction, number, max_steps, halting):
        item, kappa = sample_shear(config, omega, sigma, int(number), shape_noise, density, mask_fraction)
        return answered(item, max_steps, halting, true_values(omega, sigma), kappa)

    sliders = [omega_m, sigma_8, noise, galaxies, masked, seed]
    connect(mapper, controls, sliders, [maps, segments, corner, said, table], drawn, answered, shown, "map_mass")
