"""The tab of a cosmology regressor: a map, sampled on the spot or read from a file, and the posterior it leaves."""

from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from ..cosmology.plots import SYMBOLS, draw_region
from ..cosmology.simulation.maps import MapSettings, generate_map
from ..models.feature_extraction_cosmo import FILE_KINDS
from ..models.pipeline_cosmo import INTERVALS, CosmologyRegressionPipeline
from ..registry import architecture_of
from ..trainer.plots import ACCENT, EXTRA
from .limits import MAX_SEED, UPLOAD_PIXELS, checked, own_uploads
from .messages import MODEL_EVENT, PAGE_EVENT
from .style import figure_image, figure_output


COLUMNS = ["parameter", "mean", "std", "68 %", "95 %", "true value"]
FALLBACK_BOUNDS = {"omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}
EXAMPLES = (("Little matter", 0.2, 0.75), ("Planck-like", 0.31, 0.81), ("Much matter", 0.42, 0.9))
SAMPLES = 4000


# ---------------------------------------------------------------------------------------------------- logic


def sample_map(config, omega_m: float, sigma_8: float, seed: int, sigma_e: float = 0.0) -> dict[str, np.ndarray]:
    """A map of the generator with the size and channels of a model: {"map": [C, H, W]} and, for some, "mask".

    Everything else is the generator's default (log-normal, 5 degrees, sources at redshift 1; several channels from
    redshift 0.5 to 1.5): checkpoints do not say which maps they were trained on.

    Raises:
        ValueError: parameters that the generator does not take.
    """
    channels = config.num_map_channels
    redshifts = (1.0,) if channels == 1 else tuple(np.linspace(0.5, 1.5, channels).tolist())
    kind = "des" if config.mask_channel else "lognormal"
    settings = MapSettings(kind, config.image_size, source_redshifts=redshifts, sigma_e=sigma_e)
    kappa, mask = generate_map(settings, omega_m, sigma_8, seed)
    return {"map": kappa} | ({} if mask is None else {"mask": mask})


def read_map(regressor: CosmologyRegressionPipeline, path: str) -> tuple[dict[str, np.ndarray], int]:
    """The first map of a file, as `sample_map` gives it, and how many the file holds.

    Raises:
        ValueError: no map file, one that holds more than a page may be given, or maps of another size than the
            model's; the file is called by its name alone.
    """
    try:
        maps, masks = regressor.feature_extractor.read(path, max_pixels=UPLOAD_PIXELS)
    except ValueError as error:
        words = str(error).partition("; give a larger max_pixels")[0]  # which is not the visitor's to give
        raise ValueError(words.replace(str(path), Path(path).name)) from error
    return {"map": maps[0].numpy()} | ({} if masks is None else {"mask": masks[0].numpy()}), len(maps)


def infer(regressor: CosmologyRegressionPipeline, item: dict, max_steps: int | None, halt: str) -> dict[str, Any]:
    """The pipeline's result for one map, with samples."""
    options = {"max_steps": max_steps, "halt": halt} if max_steps is not None else {}
    return regressor(item, num_samples=SAMPLES, return_samples=True, **options)


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


def map_image(item: dict[str, np.ndarray]) -> Image.Image:
    """The channels of a map beside each other, in the unit of the data; what is not observed stays white."""
    from matplotlib.figure import Figure

    kappa, mask = np.asarray(item["map"]), item.get("mask")
    figure = Figure(figsize=(3.6 * len(kappa) + 0.6, 3.6), layout="constrained")
    for number, (axes, channel) in enumerate(zip(np.atleast_1d(figure.subplots(1, len(kappa))), kappa), start=1):
        shown = channel if mask is None else np.where(mask, channel, np.nan)
        low, high = np.nanpercentile(shown, [0.5, 99.5])
        image = axes.imshow(shown, cmap="magma", vmin=low, vmax=high, interpolation="nearest")
        axes.set(xticks=[], yticks=[], title=f"Convergence, channel {number}" if len(kappa) > 1 else "Convergence")
        figure.colorbar(image, ax=axes, shrink=0.9)
    return figure_image(figure)


def posterior_image(result: dict[str, Any], names: list[str], truth: dict[str, float]) -> Image.Image:
    """Corner plot of the samples: densities with the 68 % interval, 68 and 95 % regions, true values as dashes."""
    from matplotlib.figure import Figure

    samples, count = result["samples"], len(names)
    figure = Figure(figsize=(2.2 * count + 0.4, 2.0 * count + 0.2), layout="constrained")
    panels = figure.subplots(count, count, squeeze=False)
    for row, column in np.ndindex(count, count):
        axes = panels[row, column]
        if column > row:
            axes.set_visible(False)
            continue
        first, second = names[column], names[row]
        if row == column:
            axes.hist(samples[:, row], bins=40, density=True, color=ACCENT, alpha=0.35)
            axes.axvspan(*result[second]["interval_68"], color=ACCENT, alpha=0.12)
            axes.axvline(result[second]["mean"], color=ACCENT)
            axes.set_yticks([])
        else:
            draw_region(axes, samples[:, [column, row]], ACCENT)
            if second in truth:
                axes.axhline(truth[second], color=EXTRA[0], linestyle="--", linewidth=1)
        if first in truth:
            axes.axvline(truth[first], color=EXTRA[0], linestyle="--", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if row == count - 1:
            axes.set_xlabel(SYMBOLS.get(first, first))
        if column == 0 and row:
            axes.set_ylabel(SYMBOLS.get(second, second))
    words = "line and band: mean and 68 %\ncontours: 68 and 95 %" + ("\ndashed: true values" if truth else "")
    figure.suptitle("Posterior", fontsize="medium")
    figure.text(0.98, 0.93, words, ha="right", va="top", fontsize="small")
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


def cosmology_tab(regressor: CosmologyRegressionPipeline, shown: gr.State) -> None:
    """Adds the components and events of one model to the page that is being built.

    Its example runs when the state `shown` changes.
    """
    config = regressor.model.config
    bounds = FALLBACK_BOUNDS | dict(zip(config.target_names, config.prior_bounds or ()))
    recurrent = architecture_of(config).halts
    with gr.Row():
        with gr.Column(scale=4, min_width=340):
            with gr.Group():
                omega_m = gr.Slider(*bounds["omega_m"], value=0.31, step=0.005, label="Omega_m")
                sigma_8 = gr.Slider(*bounds["sigma_8"], value=0.81, step=0.005, label="sigma_8")
                with gr.Row():
                    noise = gr.Slider(0, 0.4, value=0, step=0.02, label="Shape noise sigma_e")
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED)
            start = gr.Button("Sample a map and infer", variant="primary")
            with gr.Row():
                examples = [gr.Button(name, size="sm", min_width=60) for name, _, _ in EXAMPLES]
            file = own_uploads(
                gr.UploadButton(
                    f"Or upload a map of {config.image_size} x {config.image_size} pixels "
                    f"({', '.join(FILE_KINDS[:3])})",
                    type="filepath",
                    size="sm",
                )
            )
            with gr.Row(visible=recurrent):
                most = gr.Slider(
                    1, 2 * config.halt_max_steps if recurrent else 2, step=1, label="Most segments",
                    value=config.halt_max_steps if recurrent else 1,
                )  # fmt: skip
                halt = gr.Radio(["fixed", "adaptive"], value="fixed", label="Halting")
            picture = figure_output("Map", elem_classes="cosmology-map", height=300)
        with gr.Column(scale=6, min_width=420):
            corner = figure_output("Posterior", elem_classes="cosmology-posterior", height=560)
            said = gr.HTML(elem_classes="caption")
            table = gr.Dataframe(headers=COLUMNS, interactive=False, label="Posterior in numbers")
    outputs = [picture, corner, said, table]

    def answered(item, truth, max_steps, halting):
        result = infer(regressor, item, int(max_steps) if recurrent else None, halting)
        names = config.reported_names
        image, rows = posterior_image(result, names, truth), posterior_rows(result, names, truth)
        return map_image(item), image, summary(config, item, result), rows

    def sampled(omega, sigma, shape_noise, number, max_steps, halting):
        item = sample_map(config, omega, sigma, int(number), shape_noise)
        return answered(item, true_values(omega, sigma), max_steps, halting)

    def uploaded(path, max_steps, halting):
        item, count = read_map(regressor, path)
        if count > 1:
            gr.Info(f"The file holds {count} maps; the first one is shown.")
        return answered(item, {}, max_steps, halting)

    controls = [omega_m, sigma_8, noise, seed, most, halt]
    refused = lambda words: [None, None, words, None]  # noqa: E731
    asked = {"fn": checked(sampled, controls, refused), "inputs": controls, "outputs": outputs, **MODEL_EVENT}
    start.click(**asked, api_name="infer")
    shown.change(**asked, **PAGE_EVENT)
    sent = [file, most, halt]
    file.upload(checked(uploaded, sent, refused), sent, outputs, **MODEL_EVENT, **PAGE_EVENT)
    for (_, *given), button in zip(EXAMPLES, examples):
        button.click(lambda given=given: given, None, [omega_m, sigma_8], **PAGE_EVENT).then(**asked, **PAGE_EVENT)
