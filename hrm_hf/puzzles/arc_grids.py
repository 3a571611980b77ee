"""Symmetries of grids (for mazes and ARC), and the encoding and augmentation of ARC grids.

Tokens: 0 is padding, 1 is end of grid, and color c is c + 2. A grid lies in a 30 x 30 frame; the row below it and the
column to its right are filled with end-of-grid tokens. An augmentation can be undone from its name.
"""

import re
from collections.abc import Sequence

import numpy as np

from .dataset import IGNORE_LABEL, PAD_ID


FRAME = 30
SEQ_LEN = FRAME * FRAME
EOS_ID = 1
COLOR_OFFSET = 2
NUM_COLORS = 10
VOCAB_SIZE = COLOR_OFFSET + NUM_COLORS

IDENTITY_COLORS = np.arange(NUM_COLORS, dtype=np.uint8)
TRM_IDENTIFIER = re.compile(r"(.+)\|\|\|t([0-7])\|\|\|(\d{10})")
HRM_IDENTIFIER = re.compile(r"(.+)_t([0-7])_(\d{10})")

NUM_DIHEDRAL = 8
# Rotations by 90 and 270 degrees undo each other; every reflection undoes itself.
DIHEDRAL_INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)


def dihedral(grid: np.ndarray, transform: int) -> np.ndarray:
    """Return a view of `grid` [..., rows, columns] under symmetry `transform`, numbered as in HRM.

    The symmetries are: 0 identity; 1-3 rotation by 90, 180, 270 degrees counterclockwise; 4 left-right flip; 5 up-down
    flip; 6 transpose; 7 left-right flip of rotation 1 (anti-transpose).
    """
    if transform <= 3:
        return np.rot90(grid, k=transform, axes=(-2, -1))
    if transform == 6:
        return np.swapaxes(grid, -2, -1)
    grid = np.rot90(grid, axes=(-2, -1)) if transform == 7 else grid
    return np.flip(grid, axis=-2 if transform == 5 else -1)


def inverse_dihedral(grid: np.ndarray, transform: int) -> np.ndarray:
    """Undo `dihedral(grid, transform)`."""
    return dihedral(grid, DIHEDRAL_INVERSE[transform])


def box_symmetries(shape: Sequence[int]) -> Sequence[int]:
    """Return the symmetries that preserve a grid's `shape`: all eight if it is square, otherwise four."""
    return range(NUM_DIHEDRAL) if shape[0] == shape[1] else (0, 2, 4, 5)


def encode_grid(grid: np.ndarray, offset: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Encode colors [rows, columns] as tokens, int8 [900], with the top left cell at `offset`."""
    frame = np.zeros((FRAME, FRAME), dtype=np.int8)
    place_grid(np.asarray(grid), offset, frame)
    return frame.reshape(SEQ_LEN)


def encode_pair(
    grid: np.ndarray, answer: np.ndarray | None, offset: tuple[int, int] = (0, 0)
) -> tuple[np.ndarray, np.ndarray]:
    """Return `(input_ids, labels)`, int8 [900]. Labels are -100 on padding, and everywhere if there is no answer."""
    if answer is None:
        return encode_grid(grid, offset), np.full(SEQ_LEN, IGNORE_LABEL, dtype=np.int8)
    labels = encode_grid(answer, offset)
    return encode_grid(grid, offset), np.where(labels == PAD_ID, np.int8(IGNORE_LABEL), labels)


def crop_prediction(tokens: np.ndarray) -> np.ndarray:
    """Crop a predicted frame [900] to its grid, uint8 [rows, columns].

    The grid is the largest rectangle of colors in the top left corner. If two have the same area, the one with fewer
    rows wins, as in the original code. If the first token is not a color, the grid has shape [0, 0].
    """
    frame = np.asarray(tokens).reshape(FRAME, FRAME)
    other = (frame < COLOR_OFFSET) | (frame >= VOCAB_SIZE)
    widths = np.where(other.any(axis=1), other.argmax(axis=1), FRAME)
    widths = np.minimum.accumulate(widths)
    rows = int(np.argmax(widths * np.arange(1, FRAME + 1))) + 1
    columns = int(widths[rows - 1])
    rows = rows if columns else 0
    return (frame[:rows, :columns] - COLOR_OFFSET).astype(np.uint8)


def place_grid(grid: np.ndarray, offset: tuple[int, int], frame: np.ndarray) -> None:
    """Write a grid and its end-of-grid row and column (but not their corner) into a zeroed frame [30, 30]."""
    top, left = offset
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    frame[top:bottom, left:right] = grid
    frame[top:bottom, left:right] += COLOR_OFFSET
    if bottom < FRAME:
        frame[bottom, left:right] = EOS_ID
    if right < FRAME:
        frame[top:bottom, right] = EOS_ID


def identifier_name(task: str, transform: int, colors: np.ndarray) -> str:
    """Return an augmentation's name in TRM's format `task|||t3|||0251346789` (symmetry and new colors)."""
    return f"{task}|||t{transform}|||{''.join(str(color) for color in colors)}"


def parse_identifier(name: str) -> tuple[str, int, np.ndarray]:
    """Split a TRM or HRM identifier (`task_t3_0251346789`) into task, symmetry and color map.

    The color map, uint8 [10], maps old to new colors. A task name alone means the unchanged task. Raise
    ValueError if the identifier is malformed, or its digits are not a permutation of 0..9.
    """
    match = TRM_IDENTIFIER.fullmatch(name) or HRM_IDENTIFIER.fullmatch(name)
    if match is None:
        if "|||" in name:
            raise ValueError(f"identifier {name!r} is malformed; expected task|||t<0-7>|||<10 digits>")
        return name, 0, IDENTITY_COLORS
    task, transform, digits = match.groups()
    if sorted(digits) != list("0123456789"):
        raise ValueError(f"identifier {name!r}: colors {digits} must be a permutation of 0123456789")
    return task, int(transform), np.frombuffer(digits.encode(), dtype=np.uint8) - ord("0")


def apply_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """Apply the augmentation named `name` to a grid."""
    _, transform, colors = parse_identifier(name)
    return dihedral(colors[grid], transform)


def undo_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """Undo the augmentation named `name`."""
    _, transform, colors = parse_identifier(name)
    return np.argsort(colors).astype(np.uint8)[inverse_dihedral(grid, transform)]
