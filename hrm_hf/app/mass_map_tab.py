"""The tab of a model that makes mass maps: shear, drawn on the spot or read from a file, and the mass behind it."""

from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from ..cosmology.map_metrics import MassMaps, squared_errors
from ..cosmology.plots import map_panels, shear_amplitude
from ..cosmology.simulation.maps import MapSettings, generate_columns
from ..models.pipeline_mass_mapping import MassMappingPipeline
from ..registry import architecture_of
from .posteriors import (
    connect,
    infer,
    map_controls,
    parameter_sliders,
    posterior_image,
    posterior_outputs,
    posterior_rows,
    seed_field,
    source_redshifts,
    summary,
    true_values,
)
from .style import figure_image, figure_output


SIGMA_E, MASK_FRACTION = 0.26, 0.3  # before the sliders are moved
GALAXIES = (1, 100)  # per square arcmin, lowest and highest


# ---------------------------------------------------------------------------------------------------- logic


def sample_shear(
    config, omega_m: float, sigma_8: float, seed: int, sigma_e: float, galaxies: float, mask_fraction: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Shear with the size and planes of a model, {"map": [2P, S, S], "mask"}, and the convergence [P, S, S] behind it.

    Everything else is the generator's default (log-normal, 5 degrees, sources at redshift 1; several planes from
    redshift 0.5 to 1.5): checkpoints do not say which maps they were trained on.

    Raises:
        ValueError: parameters that the generator does not take.
    """
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
    """Galaxies per square arcmin with which shape noise of SIGMA_E is that of the training maps, within GALAXIES.

    The noise is what the variance of the shear has beside that of the signal: of the convergence's, half is in g1 and
    half in g2. A config without these figures gives the generator's default.
    """
    settings = MapSettings(
        size=config.image_size, source_redshifts=source_redshifts(config.num_planes), sigma_e=SIGMA_E
    )
    galaxies = settings.galaxies_per_arcmin2
    if config.pixel_std and config.kappa_std:
        noise = np.mean(np.square(config.pixel_std)) - np.mean(np.square(config.kappa_std)) / 2
        galaxies *= settings.pixel_noise**2 / max(noise, np.finfo(float).tiny)
    return int(np.clip(galaxies, *GALAXIES).round())


def map_errors(maps: np.ndarray, kappa: np.ndarray, where: np.ndarray | None = None) -> np.ndarray:
    """Errors [N] of maps [N, P, S, S] over the rms of the one truth [P, S, S], in the pixels `where` [S, S] or all."""
    pairs = MassMaps(np.broadcast_to(kappa, maps.shape), maps)
    error, signal = squared_errors(pairs, None if where is None else where[None])
    return np.sqrt(error / signal)


def maps_image(item: dict[str, np.ndarray], result: dict[str, Any], kappa: np.ndarray | None) -> Image.Image:
    """Truth, if there is one, |shear|, map and uncertainty of each plane; where shear is hidden it stays blank."""
    size = item["map"].shape[-1]
    estimate, std = (result[name].reshape(-1, size, size) for name in ("kappa", "kappa_std"))
    observed = shear_amplitude(np.asarray(item["map"]), item.get("mask"))
    panels = []
    for plane in range(len(estimate)):
        most = _largest(estimate[plane] if kappa is None else kappa[plane])
        named = f", plane {plane + 1}" if len(estimate) > 1 else ""
        panels += [] if kappa is None else [(f"Truth{named}", kappa[plane], most)]
        panels += [
            (f"|shear|{named}", observed[plane], None),
            (f"Mass map{named}", estimate[plane], most),
            (f"Uncertainty{named}", std[plane], None),
        ]
    return figure_image(map_panels(panels, columns=2, bars=True))


def segments_image(result: dict[str, Any], kappa: np.ndarray | None) -> Image.Image:
    """The first plane of the map after each segment that was used, with its error where there is a truth."""
    segments = result["segment_maps"][: result["steps"]]  # those after a halt repeat the last one
    titles = [f"Segment {number}" for number in range(1, len(segments) + 1)]
    if kappa is not None:
        titles = [f"{title}: error {error:.3f}" for title, error in zip(titles, map_errors(segments, kappa))]
    most = _largest(segments[-1, 0] if kappa is None else kappa[0])
    return figure_image(
        map_panels([(title, one[0], most) for title, one in zip(titles, segments)], columns=4, bars=False)
    )


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())


def error_remark(item: dict[str, np.ndarray], result: dict[str, Any], kappa: np.ndarray) -> str:
    """How far the map is from the truth, as HTML."""
    last = result["segment_maps"][-1:]
    words = f"Error of the map: {map_errors(last, kappa)[0]:.3f} of its own rms"
    if "mask" in item and not item["mask"].all():
        words += f"; of its hidden pixels: {map_errors(last, kappa, ~item['mask'])[0]:.3f}"
    return f"<p>{words}.</p>"


# ---------------------------------------------------------------------------------------------------- page


def mass_map_tab(mapper: MassMappingPipeline, shown: gr.State) -> None:
    """Adds the components and events of one model to the page that is being built.

    Its example runs when the state `shown` changes.
    """
    config = mapper.model.config
    recurrent, size = architecture_of(config).halts, config.image_size
    with gr.Row():
        with gr.Column(scale=4, min_width=340):
            with gr.Group():
                omega_m, sigma_8 = parameter_sliders(config)
                with gr.Row():
                    noise = gr.Slider(0, 0.4, value=SIGMA_E, step=0.02, label="Shape noise sigma_e")
                    galaxies = gr.Slider(
                        *GALAXIES, value=galaxies_of_training(config), step=1, label="Galaxies per square arcmin"
                    )
                with gr.Row():
                    masked = gr.Slider(
                        0, 0.8, value=MASK_FRACTION, step=0.05, label="Masked fraction", visible=config.mask_channel
                    )
                    seed = seed_field()
            controls = map_controls(
                config, "Draw shear and map its mass", f"Or upload shear and mask of {size} x {size} pixels"
            )
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
