"""Find tasks by name: shipped tasks, imported ones, and those of installed packages."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ..io.files import load_json
from .dataset import IDENTIFIERS_FILE
from .tasks import REGISTERED, SHIPPED_TASKS, PuzzleTask


ENTRY_POINTS = "hrm_hf.puzzle_tasks"  # entry points of installed packages: NAME = MODULE:CLASS


def task_class(name: str) -> type[PuzzleTask]:
    """Find a task by its name, or import it from `FILE.py:Class` or `module:Class`.

    A name is that of a shipped task, of a task whose module has been imported, or of an entry point in the group
    "hrm_hf.puzzle_tasks".

    Raises:
        ValueError: If there is no such task.
    """
    if ":" in name:
        return _import_task(name)
    if name not in REGISTERED and name in SHIPPED_TASKS:
        importlib.import_module(f".{SHIPPED_TASKS[name]}", __package__)
    for found in entry_points(group=ENTRY_POINTS, name=name) if name not in REGISTERED else ():
        REGISTERED[name] = found.load()
    if name not in REGISTERED:
        raise ValueError(
            f"task={name!r}: must be one of {sorted({*REGISTERED, *SHIPPED_TASKS})}; import the module that defines "
            "the task, pass --task FILE.py:CLASS, or correct the config"
        )
    return REGISTERED[name]


def _import_task(place: str) -> type[PuzzleTask]:
    file, _, name = place.rpartition(":")
    if file.endswith(".py"):
        stem = Path(file).stem
        specification = importlib.util.spec_from_file_location(stem, file)
        if not Path(file).is_file():
            raise ValueError(f"task={place!r}: {file} does not exist; expected FILE.py:CLASS, MODULE:CLASS or a name")
        module = sys.modules[stem] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    else:
        module = importlib.import_module(file)
    task = getattr(module, name, None)
    if not (isinstance(task, type) and issubclass(task, PuzzleTask)):
        raise ValueError(f"task={place!r}: {file} has no subclass {name!r} of hrm_hf.puzzles.tasks.PuzzleTask")
    return task


def puzzle_task(config, identifiers: Sequence[str] | None = None) -> PuzzleTask:
    """Create the task named in a config. `identifiers` are the names of the puzzle table's rows, for ARC.

    A config may come from an untrusted author, so it can only name a task, not a module to import.

    Raises:
        ValueError: If the task is unknown, or the config's sizes do not fit the task.
    """
    if ":" in config.task:
        raise ValueError(f"task={config.task!r}: a config must name a task, not the file or module that defines it")
    return task_class(config.task)(config, identifiers)


def original_boards() -> dict[str, tuple]:
    """Return the `original_board` of each shipped task, keyed by task name."""
    boards = {name: task_class(name).original_board for name in SHIPPED_TASKS}
    return {name: board for name, board in boards.items() if board}


def guess_task(seq_len: int, vocab_size: int) -> tuple[str, tuple[int, int], tuple[int, int] | None]:
    """Guess the task, grid shape and box shape. A "generic" board is square if possible, else 1 x seq_len."""
    side = math.isqrt(seq_len)
    shape = (side, side) if side * side == seq_len else (1, seq_len)
    for name, (cells, tokens, box_shape) in original_boards().items():
        if (seq_len, vocab_size) == (cells, tokens):
            return name, shape, box_shape
    return PuzzleTask.name, shape, None


def card_context(config, folder: Path) -> dict[str, str]:
    """Return values for a model card. If the task is not installed, the card shows the symbols in the config."""
    file = folder / IDENTIFIERS_FILE
    try:
        task = puzzle_task(config, load_json(file) if file.exists() else None)
    except ValueError:
        task = PuzzleTask(config)
    return {"kind": task.plural, **task.card()}
