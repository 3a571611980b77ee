"""The eight symmetries of a grid, shared by mazes and ARC; and grids of ARC as tokens, under augmentations.

Tokens: 0 padding, 1 end of grid, color c is c + 2. A grid lies in a 30 x 30 frame; the row below it and the column to
its right hold end-of-grid tokens. The name of an augmentation says how to undo it.
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
    """Return a view of `grid` [..., rows, columns] under symmetry `transform`, numbered as in the original HRM.

    They are 0 identity, 1-3 rotation by 90, 180, 270 degrees counter-clockwise, 4 left-right flip, 5 up-down flip,
    6 transpose, 7 left-right flip of rotation 1 (the anti-transpose).
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
    """List the symmetries that map a box of `shape` (rows, columns) to itself: all eight if it is square."""
    return range(NUM_DIHEDRAL) if shape[0] == shape[1] else (0, 2, 4, 5)


def encode_grid(grid: np.ndarray, offset: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Encode colors [rows, columns] as tokens int8 [900], with the corner at `offset` (row, column) of the frame."""
    frame = np.zeros((FRAME, FRAME), dtype=np.int8)
    place_grid(np.asarray(grid), offset, frame)
    return frame.reshape(SEQ_LEN)


def encode_pair(
    grid: np.ndarray, answer: np.ndarray | None, offset: tuple[int, int] = (0, 0)
) -> tuple[np.ndarray, np.ndarray]:
    """Return `(input_ids, labels)`, both int8 [900]; labels are -100 on padding, or everywhere without an answer."""
    if answer is None:
        return encode_grid(grid, offset), np.full(SEQ_LEN, IGNORE_LABEL, dtype=np.int8)
    labels = encode_grid(answer, offset)
    return encode_grid(grid, offset), np.where(labels == PAD_ID, np.int8(IGNORE_LABEL), labels)


def crop_prediction(tokens: np.ndarray) -> np.ndarray:
    """Return the grid in a prediction [900], uint8 [rows, columns]; of shape [0, 0] where the first token is no color.

    It is the largest rectangle of colors at the top left corner. Of equal areas the one with fewer rows wins, as in
    the original.
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
    """Write grid and end-of-grid tokens into a zeroed frame [30, 30]; the corner of the two stays padding."""
    top, left = offset
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    frame[top:bottom, left:right] = grid
    frame[top:bottom, left:right] += COLOR_OFFSET
    if bottom < FRAME:
        frame[bottom, left:right] = EOS_ID
    if right < FRAME:
        frame[top:bottom, right] = EOS_ID


def identifier_name(task: str, transform: int, colors: np.ndarray) -> str:
    """Return TRM's name of an augmentation, `task|||t3|||0251346789`: symmetry, then the new color of each color."""
    return f"{task}|||t{transform}|||{''.join(str(color) for color in colors)}"


def parse_identifier(name: str) -> tuple[str, int, np.ndarray]:
    """Split an identifier of TRM or HRM (`task_t3_0251346789`) into task, dihedral id and color map.

    The color map is uint8 [10]: the new color of each color. A bare task name is the unchanged task. ValueError: a
    malformed identifier, or digits that are no permutation of 0..9.
    """
    match = TRM_IDENTIFIER.fullmatch(name) or HRM_IDENTIFIER.fullmatch(name)
    if match is None:
        if "|||" in name:
            raise ValueError(f"identifier {name!r} is malformed; expected task|||t<0-7>|||<10 digits>")
        return name, 0, IDENTITY_COLORS
    task, transform, digits = match.groups()
    if sorted(digits) != list("0123456789"):
        raise ValueError(f"identifier {name!r}: colors {digits} are no permutation of 0123456789")
    return task, int(transform), np.frombuffer(digits.encode(), dtype=np.uint8) - ord("0")


def apply_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """Return the grid as the puzzle named `name` shows it."""
    _, transform, colors = parse_identifier(name)
    return dihedral(colors[grid], transform)


def undo_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """Return the original of a grid that the puzzle named `name` shows."""
    _, transform, colors = parse_identifier(name)
    return np.argsort(colors).astype(np.uint8)[inverse_dihedral(grid, transform)]
