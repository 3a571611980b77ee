"""Mazes: generator, checking of paths, and the way from a source to a puzzle data set.

A maze is a grid of `#` wall, blank open cell, `S` start and `G` goal; its solution marks a shortest path with `o`.
Tokens are those of the original HRM: PAD 0, then the characters of `CHARSET` from 1. The length of a path is its
number of steps from S to G, so it has one `o` less. Generated mazes have exactly one shortest path, so that answers
can be scored cell by cell.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from .arc_grids import NUM_DIHEDRAL, dihedral
from .dataset import PuzzleInfo
from .readers import HeldOut, PuzzleRules, PuzzleTable, make_split, read_unique


if TYPE_CHECKING:
    import datasets

CHARSET = "# SGo"
PAD, WALL, OPEN, START, GOAL, PATH = range(6)
VOCAB_SIZE = 1 + len(CHARSET)
MAX_TRIES = 200  # mazes tried for one puzzle before its path length is called unreachable
STARTS_PER_MAZE = 4
DEFAULT_OPENINGS = 0.05

# Independent random streams of one seed.
_TEST_STREAM, _TRAIN_STREAM = range(2)

Maze = str | Sequence | np.ndarray


def encode(maze: Maze, grid_shape: tuple[int, int] | None = None) -> np.ndarray:
    """Read a maze from a string (lines, or all cells in one), rows of characters or tokens, or flat tokens.

    Args:
        maze: cells as characters of `CHARSET` or as tokens.
        grid_shape: rows and columns; needed for one-line strings and flat tokens that are not square.

    Returns:
        Tokens, int8 [rows, columns]; ValueError for an illegal number of cells, character or token.
    """
    if isinstance(maze, str) and "\n" in maze:
        maze = maze.strip("\n").split("\n")
    if isinstance(maze, (list, tuple)) and maze and all(isinstance(row, (str, list, tuple)) for row in maze):
        lengths = sorted({len(row) for row in maze})
        shape = (len(maze), lengths[0])
        if len(lengths) > 1 or tuple(grid_shape or shape) != shape:
            expected = "{} of {}".format(*grid_shape) if grid_shape else "lines of one length"
            raise ValueError(f"the maze has {len(maze)} lines of {lengths} cells; expected {expected}")
        grid_shape = shape
        if all(isinstance(cell, str) for row in maze for cell in row):
            maze = "".join(map("".join, maze))
    if isinstance(maze, str):
        for position, character in enumerate(maze):
            if character not in CHARSET:
                raise ValueError(f"character {character!r} at position {position + 1}; expected one of {CHARSET!r}")
        tokens = np.array([CHARSET.index(character) + 1 for character in maze], dtype=np.int8)
    else:
        tokens = np.asarray(maze)
        for value in tokens[(tokens < PAD) | (tokens >= VOCAB_SIZE)].reshape(-1)[:1]:
            raise ValueError(f"token {value}; expected 0 to {VOCAB_SIZE - 1}")
    if grid_shape is None:
        side = round(tokens.size**0.5)
        grid_shape = tokens.shape if tokens.ndim == 2 else (side, side)
    if tokens.size != grid_shape[0] * grid_shape[1]:
        raise ValueError(f"a maze of {tokens.size} cells is no {'{} x {}'.format(*grid_shape)} grid; give grid_shape")
    return tokens.astype(np.int8).reshape(grid_shape)


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Return the characters of a token array, row after row without line ends; a predicted PAD is shown as `?`."""
    flat = np.asarray(tokens).reshape(-1)
    for position in np.flatnonzero((flat < PAD) | (flat >= VOCAB_SIZE))[:1]:
        raise ValueError(f"token {flat[position]} at position {position + 1}; expected 0 to {VOCAB_SIZE - 1}")
    return "".join(("?" + CHARSET)[token] for token in flat.tolist())


def distances(open_cells: np.ndarray, start: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Breadth-first search over horizontal and vertical steps.

    Args:
        open_cells: bool [rows, columns], where one may walk.
        start: row and column of the first cell, which counts as open.

    Returns:
        Steps from `start`, int32 [rows, columns], -1 where unreachable; and how many shortest paths lead there,
        int32 [rows, columns], where 2 stands for several.
    """
    rows, columns = open_cells.shape
    width = columns + 2  # a frame of walls around the grid saves tests for its edges
    framed = np.zeros((rows + 2, width), dtype=bool)
    framed[1:-1, 1:-1] = open_cells
    walkable = framed.reshape(-1).tolist()
    steps, paths = [-1] * len(walkable), [0] * len(walkable)
    first = (start[0] + 1) * width + start[1] + 1
    steps[first], paths[first] = 0, 1
    queue = [first]
    for cell in queue:  # grows while it is read
        for neighbour in (cell - width, cell - 1, cell + 1, cell + width):
            if not walkable[neighbour]:
                continue
            if steps[neighbour] < 0:
                steps[neighbour] = steps[cell] + 1
                queue.append(neighbour)
            if steps[neighbour] == steps[cell] + 1:
                paths[neighbour] = min(2, paths[neighbour] + paths[cell])
    both = np.array([steps, paths], dtype=np.int32).reshape(2, rows + 2, width)[:, 1:-1, 1:-1]
    return both[0], both[1]


def mark_shortest_path(maze: np.ndarray) -> np.ndarray | None:
    """Mark a shortest path from S to G in tokens [rows, columns]; None if no path exists.

    Among several, the last step comes from above, left, right, below, in order.
    """
    (start,), (goal,) = (list(zip(*np.nonzero(maze == token))) for token in (START, GOAL))
    steps, _ = distances(maze != WALL, start)
    return None if steps[goal] < 0 else _mark(maze, steps, goal)


def _mark(maze: np.ndarray, steps: np.ndarray, goal: tuple[int, int]) -> np.ndarray:
    solution, (row, column) = maze.copy(), goal
    framed = np.pad(steps, 1, constant_values=-1)
    while steps[row, column] > 1:
        for to_row, to_column in ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)):
            if framed[to_row + 1, to_column + 1] == steps[row, column] - 1:
                row, column = to_row, to_column
                break
        solution[row, column] = PATH
    return solution


def validate_solution(
    puzzle: Maze, solution: Maze, grid_shape: tuple[int, int] | None = None, shortest: bool = True
) -> list[str]:
    """List the faults of `solution` as an answer to `puzzle`, both in any form that `encode` reads.

    With `shortest` the path must be a shortest one, and no other cell may be marked. ValueError: as `encode`, or the
    puzzle does not have one S and one G.
    """
    maze, answer = encode(puzzle, grid_shape), encode(solution, grid_shape)
    if maze.shape != answer.shape:
        raise ValueError(f"the puzzle is {maze.shape[0]} x {maze.shape[1]}, the solution {answer.shape}")
    start, goal = endpoints(maze)
    changed = (maze != answer) & ~((maze == OPEN) & (answer == PATH))
    problems = [
        f"row {row + 1}, column {column + 1}: {decode(maze[row, column])!r} became {decode(answer[row, column])!r}"
        for row, column in np.argwhere(changed)
    ]
    # Only what the puzzle allows is a path: an answer must not walk through walls that it removed.
    marked = ((answer == PATH) | (maze == START) | (maze == GOAL)) & (maze != WALL)
    length = distances(marked, start)[0][goal]
    if length < 0:
        return [*problems, "the marked path does not connect S and G"]
    if shortest:
        best = distances(maze != WALL, start)[0][goal]
        if length > best:
            problems.append(f"the path has {length} steps; the shortest has {best}")
        if surplus := int((answer == PATH).sum()) - (length - 1):
            problems.append(f"{surplus} marked cells are not on the path")
    return problems


def endpoints(maze: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return row and column of S and of G; ValueError unless there is one of each."""
    starts, goals = (np.argwhere(maze == token) for token in (START, GOAL))
    if len(starts) != 1 or len(goals) != 1:
        raise ValueError(f"the puzzle has {len(starts)} S and {len(goals)} G; expected one of each")
    return tuple(starts[0].tolist()), tuple(goals[0].tolist())


def generate(
    height: int,
    width: int,
    num_mazes: int,
    seed: int | Sequence[int] = 0,
    *,
    min_path_length: int = 1,
    openings: float = DEFAULT_OPENINGS,
    exclude: set[bytes] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield mazes with exactly one shortest path, and their solutions, tokens int8 [height, width].

    Rooms on every second row and column are joined to a tree by a random depth-first walk; then some of the remaining
    walls between rooms are opened, so that several ways lead to the goal. Start and goal are drawn among the open
    cells that have a unique shortest path of the wanted length between them. No maze is a symmetry of another. The
    same arguments give the same mazes on every machine.

    Args:
        height, width: rows and columns, at least 3.
        seed: seed of a Philox generator, or a sequence of seeds.
        min_path_length: fewest steps from S to G. For 30x30 and the default openings, 110 resembles the hard Hub set.
        openings: share of the walls left between neighboring rooms that is opened, 0 (a perfect maze) to 1.
        exclude: keys (`symmetry_key`) of mazes that must not come; keys of new mazes are added to it.

    Raises:
        RuntimeError: no maze with such a path was found.
    """
    grid_shape, seen = (height, width), set() if exclude is None else exclude
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    for number in range(num_mazes):
        for _ in range(MAX_TRIES):
            puzzle, solution = _place_endpoints(_carve(grid_shape, openings, rng), min_path_length, rng)
            if puzzle is not None and (key := symmetry_key(puzzle)) not in seen:
                break
        else:
            raise RuntimeError(
                f"no new {height} x {width} maze with a path of {min_path_length} steps or more in {MAX_TRIES} "
                f"attempts, after {number} of {num_mazes}; lower min_path_length or openings"
            )
        seen.add(key)
        yield puzzle, solution


def symmetry_key(maze: np.ndarray) -> bytes:
    """Return bytes that are equal for all eight symmetries of a maze, and for no other maze of the same size."""
    return min(dihedral(maze, transform).tobytes() for transform in range(NUM_DIHEDRAL))


def _carve(grid_shape: tuple[int, int], openings: float, rng: np.random.Generator) -> np.ndarray:
    """Return a maze without start and goal, tokens int8 [rows, columns]."""
    rooms = [(side + 1) // 2 for side in grid_shape]
    joined, walls = _join_rooms(*rooms, rng)
    opened = rng.permutation(len(walls))[: round(openings * len(walls))]
    # An even side leaves one line over; it becomes a wall before the first or after the last room.
    shift = [int(rng.integers(side - 2 * count + 2)) for side, count in zip(grid_shape, rooms)]
    maze = np.full(grid_shape, WALL, dtype=np.int8)
    maze[shift[0] :: 2, shift[1] :: 2][: rooms[0], : rooms[1]] = OPEN
    for (row, column), (to_row, to_column) in [*joined, *(walls[i] for i in opened)]:
        maze[shift[0] + row + to_row, shift[1] + column + to_column] = OPEN  # the cell between two rooms
    return maze


def _join_rooms(rows: int, columns: int, rng: np.random.Generator):
    """Span a grid of rooms by a depth-first walk; return the pairs of rooms that it joins, and the other pairs."""
    visited = np.zeros((rows, columns), dtype=bool).tolist()
    first = (int(rng.integers(rows)), int(rng.integers(columns)))
    visited[first[0]][first[1]] = True
    stack, joined = [first], []
    choices = iter(rng.random(rows * columns).tolist())  # one draw per room that is reached
    while stack:
        row, column = stack[-1]
        around = ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
        free = [(r, c) for r, c in around if 0 <= r < rows and 0 <= c < columns and not visited[r][c]]
        if not free:
            stack.pop()
            continue
        room = free[int(next(choices) * len(free))]
        visited[room[0]][room[1]] = True
        joined.append(((row, column), room))
        stack.append(room)
    tree = {tuple(sorted(pair)) for pair in joined}
    down = [((r, c), (r + 1, c)) for r in range(rows - 1) for c in range(columns)]
    right = [((r, c), (r, c + 1)) for r in range(rows) for c in range(columns - 1)]
    return joined, [pair for pair in down + right if pair not in tree]


def _place_endpoints(maze: np.ndarray, min_path_length: int, rng: np.random.Generator):
    """Return puzzle and solution with a unique shortest path that is long enough, or (None, None)."""
    cells = np.argwhere(maze == OPEN)
    for start in cells[rng.permutation(len(cells))[:STARTS_PER_MAZE]]:
        steps, paths = distances(maze == OPEN, tuple(start))
        goals = np.argwhere((steps >= min_path_length) & (paths == 1))
        if len(goals):
            goal = tuple(goals[rng.integers(len(goals))])
            puzzle = maze.copy()
            puzzle[tuple(start)], puzzle[goal] = START, GOAL
            return puzzle, _mark(puzzle, steps, goal)
    return None, None


def generated_mazes(
    height: int = 30,
    width: int = 30,
    num_train: int = 1000,
    num_test: int = 1000,
    *,
    min_path_length: int = 1,
    openings: float = DEFAULT_OPENINGS,
    aug: bool = False,
    seed: int = 0,
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Generate a data set in which no test maze is a symmetry of a training maze; see `options.BuildMaze`."""
    if aug:
        _validate_square((height, width))
    parts, seen = {}, set()
    for split, count, stream in (("test", num_test, _TEST_STREAM), ("train", num_train, _TRAIN_STREAM)):
        wanted = {"min_path_length": min_path_length, "openings": openings, "exclude": seen}
        mazes = generate(height, width, count, (seed, stream), **wanted)
        pairs = list(tqdm(mazes, f"{split} mazes", count, disable=None))
        parts[split] = np.array(pairs, dtype=np.int8).reshape(count, 2, height, width).swapaxes(0, 1)
    return _assemble(parts, (height, width), aug)


def mazes_from_source(
    source: str | Path,
    grid_shape: tuple[int, int] | None = None,
    *,
    min_path_length: int = 1,
    aug: bool = False,
    test_size: int | None = None,
    test_share: float | None = None,
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Read a data set from a file, a folder or the Hub (see `readers`); arguments as `options.BuildMaze`.

    In every row, walls, S and G must be those of the puzzle, and the marked cells must connect S and G; the path need
    not be a shortest one. `min_path_length` counts marked steps and holds for both splits.

    Raises:
        FileNotFoundError, ValueError: as `read_unique`; or an invalid row, or an option that leaves no rows.
    """

    def rules(train: PuzzleTable) -> PuzzleRules:
        nonlocal grid_shape
        grid_shape = grid_shape or _square_side(train)
        if aug:
            _validate_square(grid_shape)
        return PuzzleRules(
            lambda table: _parse(table, grid_shape).reshape(2, len(table), -1),
            lambda mazes, _: [symmetry_key(maze) for maze in mazes.reshape(-1, *grid_shape)],
        )

    splits, repeated = read_unique(source, HeldOut(test_size, test_share), rules)
    parts = {}
    for split, rows in splits.items():
        grids = np.stack([rows.questions, rows.answers]).reshape(2, -1, *grid_shape)
        long_enough = _path_lengths(rows.answers) >= min_path_length
        if not long_enough.any():
            raise ValueError(f"min_path_length {min_path_length} leaves no maze of {rows.table.name}")
        parts[split] = grids[:, long_enough]
    made, info = _assemble(parts, grid_shape, aug)
    info.repeated = repeated
    return made, info


def _validate_square(grid_shape: tuple[int, int]) -> None:
    if grid_shape[0] != grid_shape[1]:
        raise ValueError(f"aug needs a square grid, since it turns mazes; this one is {'{} x {}'.format(*grid_shape)}")


def _square_side(table: PuzzleTable) -> tuple[int, int]:
    cells = len(table.questions[0])
    side = round(cells**0.5)
    if side**2 != cells:
        text = f"{cells} characters are no square maze; give the grid's height and width"
        raise ValueError(f"{table.place(0, 0)}: {text}")
    return side, side


def _parse(table: PuzzleTable, grid_shape: tuple[int, int]) -> np.ndarray:
    """Return puzzles and solutions, tokens [2, rows, height, width], with every row checked."""
    alphabet = {character: token for token, character in enumerate(CHARSET, start=1)}
    cells = grid_shape[0] * grid_shape[1]
    grids = np.stack([table.codes(column, cells, alphabet).reshape(-1, *grid_shape) for column in (0, 1)])
    for row in tqdm(range(len(table)), "checking", disable=None):
        try:
            problems = validate_solution(grids[0, row], grids[1, row], shortest=False)
        except ValueError as error:
            raise ValueError(f"{table.place(row, 0)}: {error}") from error
        if problems:
            text = f"does not solve column {table.columns[0]!r}: {'; '.join(problems[:3])}"
            raise ValueError(f"{table.place(row, 1)}: {text}")
    return grids


def _path_lengths(solutions: np.ndarray) -> np.ndarray:
    return (solutions == PATH).sum(axis=1, dtype=np.int32) + np.int32(1)


def _assemble(parts, grid_shape, aug: bool) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    from datasets import DatasetDict

    splits = DatasetDict()
    for split in ("train", "test"):
        if split not in parts or not parts[split].shape[1]:
            continue
        copies = NUM_DIHEDRAL if aug and split == "train" else 1
        # [2, rows, copies, height, width]: the symmetries of a maze are neighbors, the original first.
        grids = np.stack([dihedral(parts[split], transform) for transform in range(copies)], axis=2)
        inputs, labels = grids.reshape(2, -1, grid_shape[0] * grid_shape[1])
        groups = np.repeat(np.arange(parts[split].shape[1]), copies)
        splits[split] = make_split(inputs, labels, groups, path_length=_path_lengths(labels))
    return splits, PuzzleInfo("maze", grid_shape, VOCAB_SIZE)
