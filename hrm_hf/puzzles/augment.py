"""The eight symmetries of a grid, numbered as in the original HRM, shared by mazes and ARC.

Only the geometry lives here. What a task adds (digit permutations, color permutations, who gets augmented) is in the
task's own module.
"""

from collections.abc import Sequence

import numpy as np


NUM_DIHEDRAL = 8
# Rotations by 90 and 270 degrees undo each other; every reflection undoes itself.
DIHEDRAL_INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)


def dihedral(grid: np.ndarray, transform: int) -> np.ndarray:
    """Applies symmetry `transform` to the last two axes of `grid`.

    Args:
        grid: array [..., rows, columns]; leading axes are a batch.
        transform: 0 identity, 1-3 rotation by 90, 180, 270 degrees counter-clockwise, 4 left-right flip,
            5 up-down flip, 6 transpose, 7 left-right flip of rotation 1 (the anti-transpose).

    Returns:
        A view of `grid`; rows and columns change places for transforms 1, 3, 6 and 7.
    """
    if transform <= 3:
        return np.rot90(grid, k=transform, axes=(-2, -1))
    if transform == 4:
        return np.flip(grid, axis=-1)
    if transform == 5:
        return np.flip(grid, axis=-2)
    if transform == 6:
        return np.swapaxes(grid, -2, -1)
    return np.flip(np.rot90(grid, axes=(-2, -1)), axis=-1)


def inverse_dihedral(grid: np.ndarray, transform: int) -> np.ndarray:
    """Undoes `dihedral(grid, transform)`; arguments as there."""
    return dihedral(grid, DIHEDRAL_INVERSE[transform])


def box_symmetries(shape: Sequence[int]) -> Sequence[int]:
    """The turns and reflections that take a box of `shape` (rows, columns) to itself: all eight if it is square."""
    return range(NUM_DIHEDRAL) if shape[0] == shape[1] else (0, 2, 4, 5)
