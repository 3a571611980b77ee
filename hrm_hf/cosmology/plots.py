"""Plots of posteriors over cosmological parameters, and of mass maps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..trainer.plots import ACCENT, EXTRA, INK, MUTED, new_figure, save_figure
from .evaluation import CosmologyPredictions, MassMaps, central_coverage, covariances, smoothed_density, squared_errors


SYMBOLS = {"omega_m": r"$\Omega_\mathrm{m}$", "sigma_8": r"$\sigma_8$", "s_8": r"$S_8$"}
COLORS = (ACCENT, *EXTRA, "#7a4fa3")
SHOWN_POINTS = 400  # approximate number of points in a scatter plot


def plot_posteriors(predictions: CosmologyPredictions, metrics: dict[str, Any], out: Path, title: str) -> None:
    """Save corner.png, predictions.png and calibration.png; `metrics` comes from `evaluate_predictions`."""
    plot_corner(predictions, out / "corner.png", title=title)
    plot_predictions(predictions, out / "predictions.png", metrics, title)
    plot_calibration(predictions, out / "calibration.png", metrics, title)


def plot_corner(predictions: CosmologyPredictions, path: str | Path, count: int = 3, title: str = "") -> Path:
    """Plot the posteriors of a few maps: 68% and 95% regions, with the true values as crosses."""
    order = np.argsort(predictions.truth[:, 0])
    chosen = order[((np.arange(count) + 0.5) / count * len(order)).astype(int)]
    truths = [dict(zip(predictions.names, predictions.truth[row])) for row in chosen]
    figure = corner_figure(predictions.names, list(zip(predictions.samples[chosen], truths)))
    return save_figure(figure, path, title)


def corner_figure(names: Sequence[str], posteriors: list[tuple[np.ndarray, Mapping[str, float]]]) -> Any:
    """Plot each posterior's draws [S, R] as histograms and credible regions, with true values if known."""
    figure, axes = _panels(len(names), len(names), 2.3)
    for row, column in np.ndindex(len(names), len(names)):
        panel, first, second = axes[row, column], names[column], names[row]
        if column > row:
            panel.set_visible(False)
            continue
        for color, (draws, truth) in zip(COLORS, posteriors):
            if column == row:
                panel.hist(draws[:, row], bins=30, density=True, histtype="step", color=color)
                panel.axvline(truth.get(first, np.nan), color=color, linestyle="--", linewidth=1)
            else:
                draw_region(panel, draws[:, [column, row]], color)
                place = truth.get(first, np.nan), truth.get(second, np.nan)
                panel.plot(*place, marker="+", markersize=11, markeredgewidth=2, color=color)
        if row == len(names) - 1:
            panel.set_xlabel(_symbol(first))
        if column == 0 and row:
            panel.set_ylabel(_symbol(second))
        if column == row:
            panel.set_yticks([])
    return figure


def draw_region(panel, draws: np.ndarray, color: str) -> None:
    """Draw the 68% and 95% contours of posterior samples [S, 2], unless all samples lie on a line."""
    covariance = covariances(draws[None])[0]
    if np.linalg.det(covariance) <= 0:
        return
    plane, density, levels, _ = smoothed_density(draws, covariance, (0.9545, 0.6827))
    levels = sorted(set(levels))  # very few draws can give equal levels, which `contour` rejects
    panel.contour(plane[..., 0], plane[..., 1], density, levels=levels, colors=color, linewidths=(0.8, 1.4))


def plot_predictions(
    predictions: CosmologyPredictions, path: str | Path, metrics: dict[str, Any], title: str = ""
) -> Path:
    """Plot posterior mean and standard deviation of each map against the truth."""
    figure, axes = _panels(1, len(predictions.names), 3.6)
    shown = slice(None, None, max(1, len(predictions.truth) // SHOWN_POINTS))
    for column, (name, panel) in enumerate(zip(predictions.names, axes[0])):
        truth, mean = predictions.truth[shown, column], predictions.mean[shown, column]
        std = predictions.std[shown, column]
        panel.errorbar(truth, mean, std, fmt="o", markersize=2, linewidth=0.5, color=ACCENT, alpha=0.6)
        ends = (truth.min(), truth.max())
        panel.plot(ends, ends, color=INK, linestyle="--", linewidth=1)
        found = metrics["parameters"][name]
        panel.set(xlabel=f"true {_symbol(name)}", ylabel="posterior mean and std")
        panel.set_title(f"RMSE {found['rmse']:.4f}, R$^2$ {found['r2']:.3f}", fontsize="medium")
        panel.grid(color=MUTED, alpha=0.4)
    return save_figure(figure, path, title)


def plot_calibration(
    predictions: CosmologyPredictions, path: str | Path, metrics: dict[str, Any], title: str = ""
) -> Path:
    """Plot the coverage of credible intervals, TARP's expected coverage, and the ranks of the truths."""
    names = predictions.names
    figure, axes = _panels(1, 2 + len(names), 3.2)
    coverage, tarp = axes[0, :2]
    levels = np.linspace(0, 1, 51)
    for name, color in zip(names, COLORS):
        coverage.plot(levels, central_coverage(predictions, name, levels), color=color, label=_symbol(name))
    coverage.set(xlabel="credibility", ylabel="fraction of truths inside", title="Central intervals")
    coverage.legend(frameon=False, fontsize="small")
    found = metrics["tarp"]
    tarp.plot(found["credibility"], found["expected_coverage"], color=ACCENT)
    tarp.fill_between(found["credibility"], *found["band"], color=ACCENT, alpha=0.2)
    tarp.set(xlabel="credibility", ylabel="expected coverage", title=f"TARP, largest gap {found['deviation']:.3f}")
    for panel in (coverage, tarp):
        panel.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
        panel.grid(color=MUTED, alpha=0.4)
    for name, panel in zip(names, axes[0, 2:]):
        ranks = metrics["parameters"][name]["sbc"]
        bins = len(ranks["histogram"])
        expected = metrics["count"] / bins
        panel.bar(range(bins), ranks["histogram"], width=0.9, color=ACCENT)
        panel.axhspan(expected - 2 * expected**0.5, expected + 2 * expected**0.5, color=INK, alpha=0.15)
        panel.axhline(expected, color=INK, linestyle="--", linewidth=1)
        panel.set(xlabel=f"rank of true {_symbol(name)}", ylabel="maps", xticks=[])
        panel.set_title(f"Ranks, p = {ranks['p_value']:.2g}")
    return save_figure(figure, path, title)


def plot_steps(per_step: dict[str, Any], path: str | Path, title: str = "") -> Path:
    """Plot "per_step" of `hrm-hf eval cosmo`: RMSE after each segment, and the number of segments used."""
    adaptive = per_step.get("adaptive")
    figure, axes = _panels(1, 2 if adaptive else 1, 3.8)
    curve = axes[0, 0]
    for (name, rmse), color in zip(per_step["rmse"].items(), COLORS):
        steps = range(1, len(rmse) + 1)
        curve.plot(steps, rmse, color=color, marker="o", markersize=4, label=_symbol(name))
        if adaptive:
            point = (adaptive["average_steps"], adaptive["rmse"][name])
            curve.plot(*point, marker="*", markersize=12, linestyle="", color=color)
    curve.set(xlabel="segments (star: adaptive halting)" if adaptive else "segments", ylabel="RMSE")
    curve.set_ylim(bottom=0)
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.grid(axis="y", color=MUTED, alpha=0.4)
    curve.legend(frameon=False, fontsize="small")
    if adaptive:
        histogram = adaptive["steps_histogram"]
        axes[0, 1].bar(range(1, len(histogram) + 1), histogram, color=ACCENT, width=0.85)
        axes[0, 1].set(xlabel="segments used", ylabel="maps", title=f"Average {adaptive['average_steps']:.2f}")
        axes[0, 1].xaxis.get_major_locator().set_params(integer=True)
    return save_figure(figure, path, title)


# ---- mass maps ----


def plot_mass_maps(maps: MassMaps, shear: np.ndarray, path: str | Path, title: str = "", count: int = 3) -> Path:
    """Plot truth, observed |shear|, estimate, error and optional uncertainty, one map per row.

    Maps are picked at evenly spaced ranks by relative error, from best to worst. Only their first plane is shown.
    """
    error, signal = squared_errors(maps)
    order = np.argsort(error / signal)
    rows = order[((np.arange(count) + 0.5) / count * len(order)).astype(int)]
    panels = []
    for row in rows:
        truth, estimate = maps.truth[row, 0], maps.estimate[row, 0]
        most = np.abs(truth).max()
        observed = shear_amplitude(shear[row], None if maps.masks is None else maps.masks[row])[0]
        panels += [(f"truth, error {np.sqrt(error[row] / signal[row]):.2f}", truth, most), ("|shear|", observed, None)]
        panels += [("estimate", estimate, most), ("estimate - truth", estimate - truth, most)]
        panels += [] if maps.std is None else [("uncertainty", maps.std[row, 0], None)]
    return save_figure(map_panels(panels, len(panels) // count, bars=True), path, title)


def plot_segments(maps: np.ndarray, truth: np.ndarray, errors: list[float], path: str | Path, title: str = "") -> Path:
    """Plot the first plane of estimates [segments, P, S, S] for each segment, and the error over all maps."""
    most = np.abs(truth[0]).max()
    panels = [(f"segment {n}, error {error:.3f}", one[0], most) for n, (one, error) in enumerate(zip(maps, errors), 1)]
    return save_figure(map_panels([*panels, ("truth", truth[0], most)], len(panels) + 1, bars=False), path, title)


def map_panels(panels: list[tuple[str, np.ndarray, float | None]], columns: int, bars: bool) -> Any:
    """Plot (title, map [S, S], limit) panels in a grid with `columns` columns.

    A map with a limit uses a red-blue scale from -limit to limit; a map without one uses its own range.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(rows, columns, (2.8 * columns, 2.6 * rows))
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (title, values, most) in zip(axes.flat, panels):
        colors = {"cmap": "viridis"} if most is None else {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
        image = panel.imshow(values, origin="lower", **colors)
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontsize="medium")
        if bars:
            figure.colorbar(image, ax=panel, shrink=0.8)
    return figure


def shear_amplitude(shear: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return |shear| [P, S, S] from shear [2P, S, S], with NaN (drawn blank) outside the mask [S, S]."""
    amplitude = np.hypot(shear[::2], shear[1::2])
    return amplitude if mask is None else np.where(mask, amplitude, np.nan)


def plot_spectra(metrics: dict[str, Any], path: str | Path, title: str = "") -> Path:
    """Plot correlation, transfer function and power ratio by multipole, and peak counts by height."""
    figure, axes = new_figure(1, 2, (9, 3.8))
    spectra, peaks = metrics["spectra"], metrics["peaks"]
    curves, bars = axes[0]
    for name, color in zip(("correlation", "transfer", "power"), (ACCENT, *EXTRA)):
        curves.plot(spectra["ell"], spectra[name], color=color, marker="o", markersize=3, label=name)
    curves.axhline(1, color=INK, linestyle="--", linewidth=1)
    curves.set(xscale="log", xlabel="multipole", ylabel="relative to the true maps", ylim=(0, None), title="Agreement")
    curves.legend(frameon=False, fontsize="small")
    curves.grid(color=MUTED, alpha=0.4)
    places = np.arange(len(peaks["heights"]))
    bars.bar(places - 0.2, peaks["true"], 0.4, color=MUTED, label="truth")
    bars.bar(places + 0.2, peaks["estimated"], 0.4, color=ACCENT, label="estimate")
    bars.set(yscale="log", xlabel="minimum height / std of the true maps", ylabel="peaks per map", title="Peaks")
    bars.set_xticks(places, [f"{height:g}" for height in peaks["heights"]])
    bars.legend(frameon=False, fontsize="small")
    return save_figure(figure, path, title)


def _symbol(name: str) -> str:
    return SYMBOLS.get(name, name)


def _panels(rows: int, columns: int, side: float):
    """Create a figure of nearly square panels, `side` inches each."""
    return new_figure(rows, columns, (side * columns + 0.4, side * rows + 0.2))
