"""The tab of a cosmology regressor: a map, sampled on the spot or read from a file, and the posterior it leaves."""

import gradio as gr
import numpy as np
from PIL import Image

from ..cosmology.plots import map_panels
from ..cosmology.simulation.maps import MapSettings, generate_columns
from ..models.pipeline_cosmo import CosmologyRegressionPipeline
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


def sample_map(
    config, omega_m: float, sigma_8: float, seed: int, sigma_e: float = 0.0, observable: str = "convergence"
) -> dict[str, np.ndarray]:
    """A map of the generator with the size and channels of a model: {"map": [C, H, W]} and, for some, "mask".

    Everything else is the generator's default (log-normal, 5 degrees, sources at redshift 1; several planes from
    redshift 0.5 to 1.5): checkpoints do not say which maps they were trained on. "shear" has two channels a plane.

    Raises:
        ValueError: parameters that the generator does not take.
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
    """The channels of a map beside each other, in the unit of the data; what is not observed stays white."""
    maps, mask = np.asarray(item["map"]), item.get("mask")
    shown = maps if mask is None else np.where(mask, maps, np.nan)
    names = ["Convergence"] if len(maps) == 1 else [f"Channel {number}" for number in range(1, len(maps) + 1)]
    return figure_image(
        map_panels([(name, channel, None) for name, channel in zip(names, shown)], columns=len(maps), bars=True)
    )


def cosmology_tab(regressor: CosmologyRegressionPipeline, shown: gr.State) -> None:
    """Adds the components and events of one model to the page that is being built.

    Its example runs when the state `shown` changes.
    """
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
                    ["convergence", "shear"], value="convergence", label="Drawn maps",
                    info="As in training, which the checkpoint does not tell: of shear two channels are a plane.",
                    visible=config.num_map_channels % 2 == 0,
                )  # fmt: skip
            size = config.image_size
            controls = map_controls(config, "Sample a map and infer", f"Or upload a map of {size} x {size} pixels")
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
