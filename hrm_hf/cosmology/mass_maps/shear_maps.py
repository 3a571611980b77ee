"""Rows of a data set of shear, as arrays."""

from dataclasses import dataclass

import numpy as np

from ...io.usage import UsageError
from ..dataset.rows import CosmologyInfo, load_cosmology_info, map_arrays
from ..simulation.maps import MapSettings
from .reconstruction import spectra_of_cosmologies


def load_shear_info(data: str) -> CosmologyInfo:
    """The description of a data set. Raises UsageError for one that does not hold shear."""
    info = load_cosmology_info(data)
    if info.settings.observable != "shear":
        raise UsageError(
            f"{data} holds {info.settings.observable}, not shear: hrm-hf data cosmology --observable shear"
        )
    return info


@dataclass(frozen=True)
class ShearMaps:
    """Rows of a split: shear [N, 2P, S, S], masks [N, S, S], the convergence kappa [N, P, S, S] and the parameters."""

    shear: np.ndarray
    masks: np.ndarray
    kappa: np.ndarray
    labels: dict[str, np.ndarray]

    @classmethod
    def read(cls, data: str, split: str, limit: int | None) -> "ShearMaps":
        """The first `limit` rows of a split, or all."""
        rows = map_arrays(data, split)  # a training split may be larger than the memory
        chosen = np.arange(len(rows["map"]))[:limit]
        labels = {name: rows[name][chosen] for name in ("omega_m", "sigma_8", "s_8")}
        return cls(*(rows[name][chosen] for name in ("map", "mask", "kappa")), labels)

    def take(self, rows: slice | np.ndarray) -> "ShearMaps":
        """Some rows, by slice or number."""
        labels = {name: values[rows] for name, values in self.labels.items()}
        return ShearMaps(self.shear[rows], self.masks[rows], self.kappa[rows], labels)

    def spectra(self, settings: MapSettings, rows: slice) -> np.ndarray:
        """The true spectra of some rows, as `spectra_of_cosmologies`."""
        return spectra_of_cosmologies(settings, self.labels["omega_m"][rows], self.labels["sigma_8"][rows])
