"""Generate mazes, validate paths, and build data sets from a generator or a source.

A maze is a grid of walls `#`, open cells (spaces), a start `S` and a goal `G`; its solution marks a shortest path with
`o`. Tokens are those of the original HRM: PAD is 0, and the characters of `CHARSET` start at 1. The length of a path
is its number of steps from S to G, so a path of length n has n - 1 `o`. Generated mazes have exactly one shortest
path, so answers can be scored cell by cell.
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
MAX_TRIES = 200  # attempts per maze before its path length is considered unreachable
STARTS_PER_MAZE = 4
DEFAULT_OPENINGS = 0.05

# Independent random streams derived from one seed.
_TEST_STREAM, _TRAIN_STREAM = range(2)

Maze = str | Sequence | np.ndarray


def encode(maze: Maze, grid_shape: tuple[int, int] | None = None) -> np.ndarray:
    """Encode a maze given as a string, rows of characters or tokens, or flat tokens.

    Args:
        maze: Cells as characters of `CHARSET` or as tokens.
        grid_shape: Rows and columns; required for non-square mazes given as a single line or flat tokens.

    Returns:
        Tokens, int8 [rows, columns]. Raise ValueError if the number of cells, a character or a token is invalid.
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
        raise ValueError(f"a maze of {tokens.size} cells does not fit {'{} x {}'.format(*grid_shape)}; set grid_shape")
    return tokens.astype(np.int8).reshape(grid_shape)


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Decode tokens to one string of characters, row by row without line breaks, with `?` for PAD."""
    flat = np.asarray(tokens).reshape(-1)
    for position in np.flatnonzero((flat < PAD) | (flat >= VOCAB_SIZE))[:1]:
        raise ValueError(f"token {flat[position]} at position {position + 1}; expected 0 to {VOCAB_SIZE - 1}")
    return "".join(("?" + CHARSET)[token] for token in flat.tolist())


def distances(open_cells: np.ndarray, start: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute distances and count shortest paths from `start` by breadth-first search.

    Args:
        open_cells: Cells that a path may use, bool [rows, columns].
        start: Row and column of the first cell, which counts as open.

    Returns:
        The number of horizontal and vertical steps to each cell, int32 [rows, columns], -1 if unreachable; and the
        number of shortest paths to it, int32 [rows, columns], capped at 2.
    """
    rows, columns = open_cells.shape
    width = columns + 2  # a border of walls makes bounds checks unnecessary
    framed = np.zeros((rows + 2, width), dtype=bool)
    framed[1:-1, 1:-1] = open_cells
    walkable = framed.reshape(-1).tolist()
    steps, paths = [-1] * len(walkable), [0] * len(walkable)
    first = (start[0] + 1) * width + start[1] + 1
    steps[first], paths[first] = 0, 1
    queue = [first]
    for cell in queue:  # the loop appends to this list
        for neighbor in (cell - width, cell - 1, cell + 1, cell + width):
            if not walkable[neighbor]:
                continue
            if steps[neighbor] < 0:
                steps[neighbor] = steps[cell] + 1
                queue.append(neighbor)
            if steps[neighbor] == steps[cell] + 1:
                paths[neighbor] = min(2, paths[neighbor] + paths[cell])
    both = np.array([steps, paths], dtype=np.int32).reshape(2, rows + 2, width)[:, 1:-1, 1:-1]
    return both[0], both[1]


def mark_shortest_path(maze: np.ndarray) -> np.ndarray | None:
    """Mark a shortest path from S to G in tokens [rows, columns], or return None if there is no path.

    Ties are broken while tracing the path back from G: the cell above is preferred, then left, right and below.
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
    """List the rules that `solution` to `puzzle` violates (both in any form that `encode` accepts).

    With `shortest`, the path must be a shortest path, and no other cell may be marked. Raise ValueError if `encode`
    does, or if the puzzle does not have exactly one S and one G.
    """
    maze, answer = encode(puzzle, grid_shape), encode(solution, grid_shape)
    if maze.shape != answer.shape:
        raise ValueError("the puzzle is {} x {}, but the solution is {} x {}".format(*maze.shape, *answer.shape))
    start, goal = endpoints(maze)
    changed = (maze != answer) & ~((maze == OPEN) & (answer == PATH))
    problems = [
        f"row {row + 1}, column {column + 1}: {decode(maze[row, column])!r} became {decode(answer[row, column])!r}"
        for row, column in np.argwhere(changed)
    ]
    # The path may use only the puzzle's open cells, so an answer cannot remove walls and go through them.
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
    """Return the (row, column) of S and of G, or raise ValueError if there is not exactly one of each."""
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
    """Yield mazes with a unique shortest path as (puzzle, solution), each as tokens, int8 [height, width].

    A random depth-first walk connects rooms on every second row and column to a tree. Then some of the remaining walls
    between rooms are opened, so that several paths lead to the goal. Start and goal are drawn from pairs of open cells
    with a unique shortest path of sufficient length. No maze is a symmetric copy of another. The same arguments give
    the same mazes on every machine.

    Args:
        height, width: Rows and columns, at least 3.
        seed: Seed of a Philox generator, or a sequence of seeds.
        min_path_length: Minimum number of steps from S to G; 110 in 30x30 mazes resembles the Hub's hard mazes.
        openings: Fraction of the remaining walls between adjacent rooms to open, from 0 (a perfect maze) to 1.
        exclude: Keys (`symmetry_key`) of mazes to avoid; the keys of new mazes are added to this set.

    Raises:
        RuntimeError: If no new maze with a sufficiently long unique path is found.
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
                f"found only {number} of {num_mazes} mazes of {height} x {width} with paths of {min_path_length} or "
                f"more steps ({MAX_TRIES} attempts failed in a row); lower min_path_length or openings"
            )
        seen.add(key)
        yield puzzle, solution


def symmetry_key(maze: np.ndarray) -> bytes:
    """Return a key that identifies a maze up to its eight symmetries (among mazes of the same size)."""
    return min(dihedral(maze, transform).tobytes() for transform in range(NUM_DIHEDRAL))


def _carve(grid_shape: tuple[int, int], openings: float, rng: np.random.Generator) -> np.ndarray:
    """Generate the walls and open cells of a maze as int8 tokens [rows, columns]. S and G are added later."""
    rooms = [(side + 1) // 2 for side in grid_shape]
    joined, walls = _join_rooms(*rooms, rng)
    opened = rng.permutation(len(walls))[: round(openings * len(walls))]
    # With an even side, one line is left over. It becomes a wall before the first or after the last room.
    shift = [int(rng.integers(side - 2 * count + 2)) for side, count in zip(grid_shape, rooms)]
    maze = np.full(grid_shape, WALL, dtype=np.int8)
    maze[shift[0] :: 2, shift[1] :: 2][: rooms[0], : rooms[1]] = OPEN
    for (row, column), (to_row, to_column) in [*joined, *(walls[i] for i in opened)]:
        maze[shift[0] + row + to_row, shift[1] + column + to_column] = OPEN  # the cell between two rooms
    return maze


def _join_rooms(rows: int, columns: int, rng: np.random.Generator):
    """Connect rooms into a tree by a random depth-first walk. Return neighbors in the tree, and other neighbors."""
    visited = np.zeros((rows, columns), dtype=bool).tolist()
    first = (int(rng.integers(rows)), int(rng.integers(columns)))
    visited[first[0]][first[1]] = True
    stack, joined = [first], []
    choices = iter(rng.random(rows * columns).tolist())  # one random number for each new room
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
    """Choose S and G with a long enough unique shortest path. Return puzzle and solution, or (None, None)."""
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
    """Generate a data set. No maze has a symmetric copy in another split (see `options.BuildMaze`)."""
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
    """Read a maze data set from a file, a folder or the Hub (see `readers` and `options.BuildMaze`).

    A solution must have the puzzle's walls, S and G, and its marked cells must connect S and G; the path need not be
    the shortest. `min_path_length` applies to the marked path, in both splits.

    Raises:
        FileNotFoundError, ValueError: As in `read_unique`, or if a row is invalid or an option removes all rows.
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
            raise ValueError(f"min_path_length={min_path_length}: removes all mazes of {rows.table.name}; lower it")
        parts[split] = grids[:, long_enough]
    made, info = _assemble(parts, grid_shape, aug)
    info.repeated = repeated
    return made, info


def _validate_square(grid_shape: tuple[int, int]) -> None:
    if grid_shape[0] != grid_shape[1]:
        raise ValueError(f"aug=true: needs square mazes, not {'{} x {}'.format(*grid_shape)}; use aug=false")


def _square_side(table: PuzzleTable) -> tuple[int, int]:
    cells = len(table.questions[0])
    side = round(cells**0.5)
    if side**2 != cells:
        text = f"{cells} characters do not form a square maze; set height and width"
        raise ValueError(f"{table.place(0, 0)}: {text}")
    return side, side


def _parse(table: PuzzleTable, grid_shape: tuple[int, int]) -> np.ndarray:
    """Parse and validate puzzles and solutions, and return tokens [2, rows, height, width]."""
    alphabet = {character: token for token, character in enumerate(CHARSET, start=1)}
    cells = grid_shape[0] * grid_shape[1]
    grids = np.stack([table.encode(column, cells, alphabet).reshape(-1, *grid_shape) for column in (0, 1)])
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
        # [2, rows, copies, height, width]: the symmetric copies of a maze are adjacent, the original first.
        grids = np.stack([dihedral(parts[split], transform) for transform in range(copies)], axis=2)
        inputs, labels = grids.reshape(2, -1, grid_shape[0] * grid_shape[1])
        groups = np.repeat(np.arange(parts[split].shape[1]), copies)
        splits[split] = make_split(inputs, labels, groups, path_length=_path_lengths(labels))
    return splits, PuzzleInfo("maze", grid_shape, VOCAB_SIZE)
