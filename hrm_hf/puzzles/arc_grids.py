"""Grids of ARC as tokens, and the symmetries and permutations of colors under which a task is shown.

Tokens: 0 padding, 1 end of grid, color c is c + 2. A grid lies in a 30 x 30 frame; the row below it and the column to
its right hold end-of-grid tokens. The name of an augmentation says how to undo it. Only numpy is needed. Reading tasks
is in `arc_tasks`, drawing augmentations and building data sets in `arc`.
"""

import re

import numpy as np

from .augment import dihedral, inverse_dihedral
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


def encode_grid(grid: np.ndarray, offset: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Colors [rows, columns] as tokens int8 [900], the grid's corner at `offset` (row, column) of the frame."""
    frame = np.zeros((FRAME, FRAME), dtype=np.int8)
    place_grid(np.asarray(grid), offset, frame)
    return frame.reshape(SEQ_LEN)


def encode_pair(
    grid: np.ndarray, answer: np.ndarray | None, offset: tuple[int, int] = (0, 0)
) -> tuple[np.ndarray, np.ndarray]:
    """`(input_ids, labels)`, both int8 [900]; labels are -100 on padding, everywhere if `answer` is None (hidden)."""
    if answer is None:
        return encode_grid(grid, offset), np.full(SEQ_LEN, IGNORE_LABEL, dtype=np.int8)
    labels = encode_grid(answer, offset)
    return encode_grid(grid, offset), np.where(labels == PAD_ID, np.int8(IGNORE_LABEL), labels)


def crop_prediction(tokens: np.ndarray) -> np.ndarray:
    """The grid in a prediction: the largest rectangle of color tokens anchored at the top left corner.

    Args:
        tokens: integers [900] or [30, 30].

    Returns:
        Colors uint8 [rows, columns]; [0, 0] where the first token is no color. Of equal areas the one with fewer
        rows wins, as in the original.
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
    """Writes grid and end-of-grid tokens into a zeroed frame [30, 30]; the corner of the two stays padding."""
    top, left = offset
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    frame[top:bottom, left:right] = grid
    frame[top:bottom, left:right] += COLOR_OFFSET
    if bottom < FRAME:
        frame[bottom, left:right] = EOS_ID
    if right < FRAME:
        frame[top:bottom, right] = EOS_ID


def identifier_name(task: str, transform: int, colors: np.ndarray) -> str:
    """TRM's name of an augmentation, `task|||t3|||0251346789`: symmetry, then the new color of each color."""
    return f"{task}|||t{transform}|||{''.join(str(color) for color in colors)}"


def parse_identifier(name: str) -> tuple[str, int, np.ndarray]:
    """`(task, dihedral id, color map)` of an identifier of TRM, HRM (`task_t3_0251346789`), or a bare task name.

    The color map is uint8 [10]: new color of each color. A bare task name is the unchanged task.

    Raises:
        ValueError: a malformed identifier, or digits that are no permutation of 0..9.
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
    """The grid as the puzzle named `name` shows it."""
    _, transform, colors = parse_identifier(name)
    return dihedral(colors[grid], transform)


def undo_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """The original of a grid that the puzzle named `name` shows: inverse symmetry, then inverse color map."""
    _, transform, colors = parse_identifier(name)
    return np.argsort(colors).astype(np.uint8)[inverse_dihedral(grid, transform)]
