"""Baselines for neural networks: regressions on summary statistics of maps.

The summaries are the binned power spectrum, which contains all information in a Gaussian field, and optionally moments
and histograms at four scales. The models are scikit-learn's ridge regression (linear or quadratic) and Gaussian
process. Posteriors are Gaussian; their widths come from held-out residuals or from the Gaussian process. Masked maps
use the pseudo spectrum divided by the observed fraction; its mode mixing matches training if the masks are similar.
"""

import warnings
from collections.abc import Iterator
from typing import get_args

import numpy as np
from tqdm.auto import tqdm

from ..io.usage import validate_extra
from .dataset.rows import MapSet
from .evaluation import CosmologyPredictions
from .options import Baseline
from .simulation.fields import map_power_spectrum


METHODS = get_args(Baseline)
GP_MAPS = 2000  # maximum number of training maps: the cost is cubic in it, and more maps change errors by less than 2%
GP_TUNING_MAPS = 500  # number of training maps used to tune the length scales of a Gaussian process
RIDGE_ALPHAS = np.geomspace(1e-4, 1e5, 19)
SPECTRUM_BINS = 13  # bins of a power spectrum for 64 pixels per side; other sizes have the same number per octave
SCALES = (1, 2, 4, 8)  # sides, in pixels, of the blocks to average
# Bin edges in units of the data set's standard deviation at each scale; each tail has its own bin.
HISTOGRAM_EDGES = np.array([-1.5, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5])
QUADRATIC_COMPONENTS = 20  # number of principal components whose products become features
CHUNK_PIXELS = 2**22  # maximum number of pixels processed at a time


def run_baseline(
    method: str, train: MapSet, test: MapSet, *, num_samples: int = 1000, seed: int = 0
) -> CosmologyPredictions:
    """Fit a baseline (one of METHODS) to `train` and predict the parameters of `test`."""
    validate_extra("cosmology", "baselines need scikit-learn", "sklearn")
    names = list(train.labels)
    scale = pixel_scales(train)
    inputs, queries = (_features(method, maps, scale) for maps in (train, test))
    inputs, queries = _standardized(inputs, queries)
    if method.endswith("-quadratic"):
        inputs, queries = _standardized(*_with_products(inputs, queries))
    targets = np.stack([train.labels[name] for name in names], axis=1).astype(np.float64)
    truth = np.stack([test.labels[name] for name in names], axis=1)
    centre, spread = targets.mean(axis=0), targets.std(axis=0)
    fit = _gaussian_process if method.endswith("-gp") else _ridge
    mean, std, correlation = fit(inputs, (targets - centre) / spread, queries)
    mean, std = mean * spread + centre, std * spread
    # Draws are not truncated at the prior bounds: a regression already learns the prior from its training maps, so
    # truncation would make the posteriors too narrow.
    factor = np.linalg.cholesky(correlation + 1e-9 * np.eye(len(names)))
    noise = np.random.default_rng(seed).standard_normal((len(mean), num_samples, len(names)))
    samples = mean[:, None] + std[:, None] * (noise @ factor.T)
    return CosmologyPredictions(names, truth, mean, std, samples)


def _chunks(maps: MapSet) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield chunks of maps in float64, with their masks."""
    size = max(1, CHUNK_PIXELS // int(np.prod(maps.maps.shape[1:])))
    for start in tqdm(range(0, len(maps), size), desc="Summarizing", unit=" batches", disable=None, leave=False):
        part = maps[start : start + size]
        yield part.maps.astype(np.float64), part.masks


def _features(method: str, maps: MapSet, scale: np.ndarray) -> np.ndarray:
    features = spectrum_features(maps)
    return np.concatenate((features, shape_features(maps, scale)), axis=1) if "-pdf-" in method else features


def _standardized(inputs: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standardize both sets of features with the training statistics, and drop constant features."""
    centre, spread = inputs.mean(axis=0), inputs.std(axis=0)
    used = spread > 1e-9 * np.maximum(np.abs(centre), 1e-30)
    return tuple((features[:, used] - centre[used]) / spread[used] for features in (inputs, queries))


def _with_products(inputs: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Append the products of the leading principal components to the features."""
    axes = np.linalg.eigh(inputs.T @ inputs)[1][:, -QUADRATIC_COMPONENTS:]
    first, second = np.triu_indices(axes.shape[1])
    leading = [features @ axes for features in (inputs, queries)]
    products = [components[:, first] * components[:, second] for components in leading]
    return tuple(np.concatenate(pair, axis=1) for pair in zip((inputs, queries), products))


# Summaries


def spectrum_features(maps: MapSet) -> np.ndarray:
    """Return log10 of the binned power spectra of all channels, and the coherence of each pair of channels.

    Coherence C_ij / sqrt(C_ii C_jj) replaces the cross spectrum, which noise can make negative. For masked maps, the
    observed mean is subtracted, hidden pixels are 0, and the power is divided by the observed fraction.
    """
    bins = round(SPECTRUM_BINS * np.log(maps.maps.shape[-1] / 2) / np.log(32))
    return np.concatenate([_spectra(fields, masks, max(bins, 2)) for fields, masks in _chunks(maps)])


def _spectra(fields: np.ndarray, masks: np.ndarray | None, bins: int) -> np.ndarray:
    share = 1.0
    if masks is not None:
        weight = masks[:, None].astype(np.float64)
        share = weight.mean(axis=(2, 3))[..., None]
        fields = (fields - (fields * weight).mean(axis=(2, 3), keepdims=True) / share[..., None]) * weight
    # The patch side only adds a constant to the logarithms, and standardization removes the constant.
    power = map_power_spectrum(fields, 1.0, bins)[1] / share
    tiny = np.finfo(np.float64).tiny
    parts = [np.log10(np.maximum(power, tiny)).reshape(len(fields), -1)]
    for i in range(fields.shape[1]):
        for j in range(i + 1, fields.shape[1]):
            both = map_power_spectrum(fields[:, [i]] + fields[:, [j]], 1.0, bins)[1] / share
            cross = (both[:, 0] - power[:, i] - power[:, j]) / 2
            parts.append(cross / np.maximum(np.sqrt(power[:, i] * power[:, j]), tiny))
    return np.concatenate(parts, axis=1)


def pixel_scales(maps: MapSet) -> np.ndarray:
    """Return the pixel standard deviation at each of SCALES in each channel, [scales, channels]."""
    totals = np.zeros((3, len(SCALES), maps.maps.shape[1]))
    for fields, masks in _chunks(maps):
        for index, scale in enumerate(SCALES):
            values, weight = _averaged(fields, masks, scale)
            moments = [(weight * values**power).sum(axis=(0, 2, 3)) for power in range(3)]
            totals[:, index] += np.stack(moments)
    mean = totals[1] / totals[0]
    return np.sqrt(np.maximum(totals[2] / totals[0] - mean**2, np.finfo(np.float64).tiny))


def shape_features(maps: MapSet, scale: np.ndarray) -> np.ndarray:
    """Return mean, log std, skewness, excess kurtosis and histogram of the pixels at each scale.

    Pixels are in units of `scale`, the `pixel_scales` of the training set. The shape is
    [N, scales * channels * (4 + len(HISTOGRAM_EDGES) + 1)].
    """
    parts = [
        np.concatenate([_shape(*_averaged(fields, masks, size), unit) for size, unit in zip(SCALES, scale)], axis=1)
        for fields, masks in _chunks(maps)
    ]
    return np.concatenate(parts)


def _averaged(fields: np.ndarray, masks: np.ndarray | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Average blocks of `size` x `size` pixels; a block's weight is 0 if less than half of it is observed."""
    number, channels, height, _ = fields.shape
    blocks = height // size
    cut = (slice(None), slice(None), slice(blocks * size), slice(blocks * size))
    shape = (number, -1, blocks, size, blocks, size)
    if masks is None:
        return fields[cut].reshape(shape).mean(axis=(3, 5)), np.ones((number, channels, blocks, blocks))
    weight = masks[:, None].astype(np.float64)
    share = weight[cut].reshape(shape).mean(axis=(3, 5))
    total = (fields * weight)[cut].reshape(shape).mean(axis=(3, 5))
    observed = np.broadcast_to(share >= 0.5, total.shape)
    return np.where(observed, total / np.where(share > 0, share, 1), 0), observed.astype(np.float64)


def _shape(values: np.ndarray, weight: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Return the moments and histograms [N, C * features] of the pixels of maps [N, C, P, P]."""
    number, channels = values.shape[:2]
    values, weight = (array.reshape(number, channels, -1) for array in (values / unit[:, None, None], weight))
    weight = weight / np.maximum(weight.sum(axis=2, keepdims=True), 1)
    mean = (weight * values).sum(axis=2)
    deviation = values - mean[..., None]
    variance = np.maximum((weight * deviation**2).sum(axis=2), 1e-30)
    third, fourth = ((weight * deviation**power).sum(axis=2) for power in (3, 4))
    moments = np.stack((mean, np.log(variance) / 2, third / variance**1.5, fourth / variance**2 - 3), axis=2)
    bins, planes = len(HISTOGRAM_EDGES) + 1, np.arange(number * channels).reshape(number, channels, 1)
    cell = np.digitize(values, HISTOGRAM_EDGES) + bins * planes
    histogram = np.bincount(cell.ravel(), weight.ravel(), bins * planes.size).reshape(number, channels, -1)
    return np.concatenate((moments, histogram), axis=2).reshape(number, -1)


# Regressions map standardized inputs [N, F], targets [N, R] and queries [M, F] to means and standard deviations [M, R]
# and the correlation of their errors [R, R], estimated from leave-one-out residuals of the training maps.


def _ridge(inputs: np.ndarray, targets: np.ndarray, queries: np.ndarray):
    from sklearn.linear_model import RidgeCV

    # With a scorer, RidgeCV stores its leave-one-out predictions instead of only their squared errors.
    model = RidgeCV(RIDGE_ALPHAS, scoring="neg_mean_squared_error", alpha_per_target=True, store_cv_results=True)
    model.fit(inputs, targets)
    chosen = np.searchsorted(RIDGE_ALPHAS, model.alpha_)
    held_out = np.stack([model.cv_results_[:, column, alpha] for column, alpha in enumerate(chosen)], axis=1)
    residuals = targets - held_out
    mean = model.predict(queries)
    std = np.broadcast_to(np.sqrt(np.mean(residuals**2, axis=0)), mean.shape)
    return mean, std, _correlation(residuals)


def _gaussian_process(inputs: np.ndarray, targets: np.ndarray, queries: np.ndarray):
    """Fit one Gaussian process per target, with white noise and one length scale per feature."""
    from scipy.linalg import cho_solve
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    inputs, targets = inputs[:GP_MAPS], targets[:GP_MAPS]
    means, stds, residuals = [], [], []
    for target in targets.T:
        kernel = ConstantKernel(1.0, (1e-2, 1e3)) * RBF(np.full(inputs.shape[1], 5.0), (0.3, 1e3))
        kernel += WhiteKernel(0.1, (1e-4, 2.0))
        with warnings.catch_warnings():
            # A length scale at its upper bound only means that the feature does not matter.
            warnings.simplefilter("ignore", ConvergenceWarning)
            tuned = GaussianProcessRegressor(kernel).fit(inputs[:GP_TUNING_MAPS], target[:GP_TUNING_MAPS])
        process = GaussianProcessRegressor(tuned.kernel_, optimizer=None).fit(inputs, target)
        mean, std = process.predict(queries, return_std=True)
        # Rasmussen & Williams 2006, eq. 5.12: leave-one-out residuals a_i / K^-1_ii with variance 1 / K^-1_ii.
        diagonal = np.diag(cho_solve((process.L_, True), np.eye(len(inputs))))
        means.append(mean)
        stds.append(std)
        residuals.append(process.alpha_ / np.sqrt(diagonal))
    return np.stack(means, axis=1), np.stack(stds, axis=1), _correlation(np.stack(residuals, axis=1))


def _correlation(residuals: np.ndarray) -> np.ndarray:
    return np.corrcoef(residuals, rowvar=False).reshape(residuals.shape[1], residuals.shape[1])
