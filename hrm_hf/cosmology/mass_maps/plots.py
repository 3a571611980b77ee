"""Pictures of mass maps: truth, data and estimate side by side, and their agreement by multipole and peak height."""

from pathlib import Path
from typing import Any

import numpy as np

from ...trainer.plots import ACCENT, EXTRA, INK, MUTED, new_figure, save_figure
from .metrics import MassMaps, squared_errors


def plot_mass_maps(maps: MassMaps, shear: np.ndarray, path: str | Path, title: str = "", count: int = 3) -> Path:
    """Truth, observed |shear|, estimate, what is left, and the uncertainty if there is one, a map a row.

    The maps are those whose relative errors are at equal steps from the best to the worst; their first plane is shown.
    Where nothing is observed the data are left blank.
    """
    error, signal = squared_errors(maps)
    order = np.argsort(error / signal)
    rows = order[((np.arange(count) + 0.5) / count * len(order)).astype(int)]
    names = ["truth", "|shear|", "estimate", "estimate - truth", *(["uncertainty"] if maps.std is not None else [])]
    figure, axes = new_figure(count, len(names), (2.6 * len(names), 2.4 * count))
    for panels, row in zip(axes, rows):
        observed = shear_amplitude(shear[row], None if maps.masks is None else maps.masks[row])[0]
        truth, estimate = maps.truth[row, 0], maps.estimate[row, 0]
        most = np.abs(truth).max()
        shown = [(truth, most), (observed, None), (estimate, most), (estimate - truth, most)]
        if maps.std is not None:
            shown.append((maps.std[row, 0], None))
        for panel, name, (values, limit) in zip(panels, names, shown):
            image = draw_map(panel, values, name if row == rows[0] else "", limit)
            if name in ("|shear|", "estimate - truth", "uncertainty"):
                figure.colorbar(image, ax=panel, shrink=0.8)
        panels[0].set_ylabel(f"error {np.sqrt(error[row] / signal[row]):.2f}")
    return save_figure(figure, path, title)


def plot_segments(maps: np.ndarray, truth: np.ndarray, errors: list[float], path: str | Path, title: str = "") -> Path:
    """The first plane of a map after each segment [segments, P, S, S], the truth [P, S, S], and all maps' error."""
    count = len(maps)
    figure, axes = new_figure(1, count + 2, (2.4 * (count + 2), 2.6))
    most = np.abs(truth[0]).max()
    names = [*(f"segment {number}" for number in range(1, count + 1)), "truth"]
    for panel, name, values in zip(axes[0], names, [*maps[:, 0], truth[0]]):
        draw_map(panel, values, name, most)
    curve = axes[0, -1]
    curve.plot(range(1, count + 1), errors, color=ACCENT, marker="o", markersize=4)
    curve.set(xlabel="segments", title="error, all maps")
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.grid(color=MUTED, alpha=0.4)
    return save_figure(figure, path, title)


def draw_map(panel: Any, values: np.ndarray, title: str = "", most: float | None = None) -> Any:
    """Draws one plane [S, S]: in red and blue from -most to most, or a positive quantity in its own range.

    Returns:
        The image, for a color bar.
    """
    colors = {"cmap": "viridis"} if most is None else {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    image = panel.imshow(values, origin="lower", **colors)
    panel.set(xticks=[], yticks=[])
    panel.set_title(title, fontsize="medium")
    return image


def shear_amplitude(shear: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """|shear| [P, S, S] of shear [2P, S, S]; NaN, which is drawn blank, where a mask [S, S] says that it is hidden."""
    amplitude = np.hypot(shear[::2], shear[1::2])
    return amplitude if mask is None else np.where(mask, amplitude, np.nan)


def plot_spectra(metrics: dict[str, Any], path: str | Path, title: str = "") -> Path:
    """Correlation, transfer function and power over the true ones by multipole; peaks by height."""
    figure, axes = new_figure(1, 2, (9, 3.8))
    spectra, peaks = metrics["spectra"], metrics["peaks"]
    curves, bars = axes[0]
    for name, color in zip(("correlation", "transfer", "power"), (ACCENT, *EXTRA)):
        curves.plot(spectra["ell"], spectra[name], color=color, marker="o", markersize=3, label=name)
    curves.axhline(1, color=INK, linestyle="--", linewidth=1)
    curves.set(xscale="log", xlabel="multipole", ylabel="over the true maps", ylim=(0, None), title="Agreement")
    curves.legend(frameon=False, fontsize="small")
    curves.grid(color=MUTED, alpha=0.4)
    places = np.arange(len(peaks["heights"]))
    bars.bar(places - 0.2, peaks["true"], 0.4, color=MUTED, label="truth")
    bars.bar(places + 0.2, peaks["estimated"], 0.4, color=ACCENT, label="estimate")
    bars.set(yscale="log", xlabel="least height, in deviations of the true maps", ylabel="peaks a map", title="Peaks")
    bars.set_xticks(places, [f"{height:g}" for height in peaks["heights"]])
    bars.legend(frameon=False, fontsize="small")
    return save_figure(figure, path, title)
