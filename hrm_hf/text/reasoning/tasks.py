"""Tasks of the reasoning suite. A question's difficulty is the number of steps to its answer.

Models predict answers at blanks, in one forward pass; no answer is fed back. With `answers="all"` a question asks for
the result of every step, and all steps have the same layout; with "last" it asks only for the result of the last step.

Questions depend only on the options, the difficulty, the count and the generator. They use only integers,
`Generator.integers` and stable sorting, which give the same results on every platform.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ..byte_tokenizer import SPECIAL_TOKENS, UNK, fast_tokenizer


NO_LABEL = -100
MAX_ATTEMPTS = 2**14
MAX_STEPS = 256

# ---- words: one vocabulary for all tasks; ids 0..7 are the special tokens of the byte tokenizer ----

MAX_NODES, MAX_ITEMS = 16, 10

BLANK = "_"  # position at which the model predicts an answer
STEP = "|"  # token before each step of a question that asks only for the last result
DIGITS = tuple("0123456789")
# Each arrow is a single word, and each node has one word as a start and another as an answer. Otherwise small models
# need many times as many training steps to learn to follow the arrows.
ARROWS = tuple(f"{node}>{to}" for node in range(MAX_NODES) for to in range(MAX_NODES))
STARTS = tuple(f"from{node}" for node in range(MAX_NODES))
NODES = tuple(f"at{node}" for node in range(MAX_NODES))
SWAPS = tuple(f"x{place}" for place in range(MAX_ITEMS - 1))  # x2 swaps the items at positions 2 and 3
TURN = "turn"  # moves every item to the next position
OPENING, CLOSING = tuple("([{"), tuple(")]}")
PLUS, NOTHING, WALL, START, GOAL, PATH = "+", ".", "#", "S", "G", "o"

WORDS = (
    *SPECIAL_TOKENS, BLANK, STEP, *DIGITS, PLUS, NOTHING, *OPENING, *CLOSING, WALL, START, GOAL, PATH, TURN, *SWAPS,
    *STARTS, *NODES, *ARROWS,
)  # fmt: skip
ID = {word: number for number, word in enumerate(WORDS)}


def ids(words: tuple[str, ...]) -> np.ndarray:
    """Return the ids of words as an int64 array."""
    return np.array([ID[word] for word in words])


def reasoning_tokenizer() -> PreTrainedTokenizerFast:
    """Create the suite's tokenizer: one token per space-separated word, `UNK` for unknown words."""
    backend = Tokenizer(WordLevel(ID, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast_tokenizer(backend)


@dataclass
class Questions:
    """Batch of N questions of the same difficulty, each T words long.

    Attributes:
        words: int64 [N, T], ids of the words that a model reads.
        answers: int64 [N, T], id of the answer to predict at each word; -100 without an answer.
        steps: int64 [N, T], number of steps that each answer takes; 0 without an answer.
    """

    words: np.ndarray
    answers: np.ndarray
    steps: np.ndarray

    @classmethod
    def join(cls, *parts: "Questions", axis: int = 1) -> "Questions":
        """Concatenate parts of the same questions (axis 1) or of different questions (axis 0)."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis) for name in vars(parts[0])))

    def where(self, rows: np.ndarray | slice) -> "Questions":
        """Return the selected questions."""
        return Questions(self.words[rows], self.answers[rows], self.steps[rows])


def question_part(words: np.ndarray) -> Questions:
    """Create the part of N questions that the model only reads: word ids [N, T], without answers."""
    return Questions(words, np.full_like(words, NO_LABEL), np.zeros_like(words))


def answer_part(answers: np.ndarray, steps: int | np.ndarray, only_last: bool = False) -> Questions:
    """Create the part of N questions with a blank for each of `answers` [N, T]. `steps` counts the steps to each."""
    steps = np.broadcast_to(steps, answers.shape).copy()
    if only_last:
        answers[:, :-1], steps[:, :-1] = NO_LABEL, 0
    return Questions(np.full_like(answers, ID[BLANK]), answers, steps)


def shuffled(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Draw random permutations of 0..size-1 as int64 [count, size]."""
    return np.argsort(rng.integers(0, 2**62, (count, size)), axis=1, kind="stable")


@dataclass(frozen=True)
class Task:
    """Base class of the tasks. Its fields are a task's options."""

    title: ClassVar[str]
    size_unit: ClassVar[str]  # unit of `size`, such as "cells"
    sizes: ClassVar[tuple[int, int]]  # smallest and largest size
    difficulty_unit: ClassVar[str]  # unit of the difficulty, such as "steps"
    trained: ClassVar[tuple[int, int]]  # default range of the training difficulties
    answer_kinds: ClassVar[tuple[str, ...]] = ("all", "last")  # allowed values of `answers`, default first

    size: int
    answers: str = "all"

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        """Draw `count` questions of a difficulty, calling `attempt` until there are enough.

        Raises:
            ValueError: questions of this difficulty are too rare.
        """
        found, tried, kept = [], 0, 0
        while kept < count:
            found.append(self.attempt(difficulty, 256, rng))
            tried, kept = tried + 256, kept + len(found[-1].words)
            if tried >= MAX_ATTEMPTS and kept < tried / MAX_ATTEMPTS:
                raise ValueError(
                    f"difficulty={difficulty}: too rare among {tried:,} random questions; lower it or increase size"
                )
        return Questions.join(*found, axis=0).where(slice(count))

    def attempt(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        """Draw `count` random questions and return those that have this difficulty."""
        raise NotImplementedError

    @property
    def max_difficulty(self) -> int:
        """Largest difficulty for this size."""
        return MAX_STEPS


@dataclass(frozen=True)
class Automaton(Task):
    """Task that asks for the states of the cellular automaton rule 110 on a ring, K steps after a random start.

    all: `0 1 1 0  _ _ _ _  _ _ _ _` asks for the state after each step. last: `| | 0 1 1 0 _ _ _ _` asks for the state
    after one step for each `|`.
    """

    title = "Cellular automaton, rule 110"
    size_unit, sizes = "cells in the ring", (3, 64)
    difficulty_unit, trained = "steps", (1, 8)
    RULE = 110

    size: int = 16

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        words = ids(DIGITS)
        cells = rng.integers(0, 2, (count, self.size))
        parts = [question_part(words[cells])]
        if self.answers == "last":
            parts.insert(0, question_part(np.full((count, difficulty), ID[STEP])))
        for step in range(1, difficulty + 1):
            left, right = np.roll(cells, 1, axis=1), np.roll(cells, -1, axis=1)
            cells = self.RULE >> (4 * left + 2 * cells + right) & 1
            if self.answers == "all" or step == difficulty:
                parts.append(answer_part(words[cells], step))
        return Questions.join(*parts)


@dataclass(frozen=True)
class Pointers(Task):
    """Task that asks for the node reached after each of p hops along arrows between nodes.

    The arrows, one word each and in random order, form a single ring of all nodes, so a path with fewer hops than
    nodes never returns. Every node then follows as a start: `2>1 0>2 1>0  from2 _ _  from0 _ _  from1 _ _`.
    A start asks for the first hop, and each blank asks for one more hop; with "last" only the last blank does.
    """

    title = "Pointer chasing"
    size_unit, sizes = "nodes", (2, MAX_NODES)
    difficulty_unit, trained = "hops", (1, 4)

    size: int = 8

    @property
    def max_difficulty(self) -> int:
        """Maximum number of hops before a path returns to its start."""
        return self.size - 1

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        arrows, starts, nodes = ids(ARROWS), ids(STARTS), ids(NODES)
        ring = shuffled(rng, count, self.size)
        follower = np.empty_like(ring)
        np.put_along_axis(follower, ring, np.roll(ring, -1, axis=1), axis=1)
        listed = shuffled(rng, count, self.size)
        parts = [question_part(arrows[MAX_NODES * listed + np.take_along_axis(follower, listed, axis=1)])]
        for start in shuffled(rng, count, self.size).T:
            node, visited = start, []
            for _ in range(difficulty):
                node = follower[np.arange(count), node]
                visited.append(nodes[node])
            chain = answer_part(np.stack(visited, axis=1), np.arange(1, difficulty + 1), self.answers == "last")
            chain.words[:, 0] = starts[start]
            parts.append(chain)
        return Questions.join(*parts)


@dataclass(frozen=True)
class Permutations(Task):
    """Task that asks for the arrangement of items after applying k generators of a symmetric group, S5 by default.

    `x2` swaps the items at positions 2 and 3; `turn` moves every item to the next position, and the last to the front.
    all: `2 0 1  turn _ _ _  x0 _ _ _` asks for the arrangement after each generator. last: `2 0 1  turn x0  _ _ _`.
    """

    title = "Composition of permutations"
    size_unit, sizes = "permuted items", (3, MAX_ITEMS)
    difficulty_unit, trained = "generators", (1, 8)

    size: int = 5

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        items, names = ids(DIGITS), ids((*SWAPS[: self.size - 1], TURN))
        table = self.generators()
        arrangement = shuffled(rng, count, self.size)
        word = rng.integers(0, len(table), (count, difficulty))
        parts = [question_part(items[arrangement])]
        for step in range(1, difficulty + 1):
            generator = word[:, step - 1]
            arrangement = np.take_along_axis(arrangement, table[generator], axis=1)
            parts.append(question_part(names[generator][:, None]))
            if self.answers == "all" or step == difficulty:
                parts.append(answer_part(items[arrangement], step))
        return Questions.join(*parts)

    def generators(self) -> np.ndarray:
        """Return int64 [size, size]: for each generator, the previous position of each item."""
        table = np.tile(np.arange(self.size), (self.size, 1))
        for place in range(self.size - 1):
            table[place, [place, place + 1]] = place + 1, place
        table[-1] = np.roll(table[-1], 1)
        return table


@dataclass(frozen=True)
class Addition(Task):
    """Task that asks for the sum of m d-digit numbers modulo 10^d, which has d digits for any m.

    Digits are written from the lowest to the highest, in the order of addition. all: `+ 7 1 _ _ + 5 2 _ _` asks for
    the sum after each number. last: `+ 7 1 + 5 2 _ _`.
    """

    title = "Addition of many numbers"
    size_unit, sizes = "digits per number", (1, 9)
    difficulty_unit, trained = "numbers", (2, 8)

    size: int = 3

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        plus = np.full((count, 1), ID[PLUS])
        numbers = rng.integers(0, 10**self.size, (count, difficulty))
        sums = np.cumsum(numbers, axis=1) % 10**self.size
        parts = []
        for step in range(1, difficulty + 1):
            parts += [question_part(plus), question_part(self.digits(numbers[:, step - 1]))]
            if self.answers == "all" or step == difficulty:
                parts.append(answer_part(self.digits(sums[:, step - 1]), step))
        return Questions.join(*parts)

    def digits(self, numbers: np.ndarray) -> np.ndarray:
        """Return the digits of numbers [N] as word ids [N, size], lowest digit first."""
        return ids(DIGITS)[numbers[:, None] // 10 ** np.arange(self.size) % 10]


@dataclass(frozen=True)
class Brackets(Task):
    """Task that asks for the next closing bracket in nested brackets of several kinds with maximum depth D.

    A question asks at each bracket, or ("last") only at the last one: `( [ ] ( [` has the answers `) ] ) ) ]`.
    The answer is `.` if no bracket is open. A row has 6 D brackets.
    """

    title = "Nested brackets"
    size_unit, sizes = "kinds of brackets", (1, len(OPENING))
    difficulty_unit, trained = "depth", (1, 4)
    LENGTH = 6

    size: int = 3

    def attempt(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        depth, length = difficulty, self.LENGTH * difficulty
        opening, closing = ids(OPENING), ids((*CLOSING, NOTHING))
        nothing = len(CLOSING)
        luck, kinds = rng.integers(0, 6, (count, length)), rng.integers(0, self.size, (count, length))
        words, answers, steps = (np.empty((count, length), np.int64) for _ in range(3))
        stack = np.full((count, depth + 1), nothing)  # kind of each open bracket; the lowest entry stays `nothing`
        height, deepest, rows = np.zeros(count, np.int64), np.zeros(count, np.int64), np.arange(count)
        for place in range(length):
            # Open a bracket with probability 2/3 until `depth` is reached once, then 1/2. The height is in [0, depth].
            up = luck[:, place] < np.where(deepest < depth, 4, 3)
            up = (up | (height == 0)) & (height < depth)
            words[:, place] = np.where(up, opening[kinds[:, place]], closing[stack[rows, height]])
            height += np.where(up, 1, -1)
            stack[rows[up], height[up]] = kinds[up, place]
            deepest = np.maximum(deepest, height)
            answers[:, place], steps[:, place] = closing[stack[rows, height]], np.maximum(height, 1)
        questions = answer_part(answers, steps, self.answers == "last")
        questions.words = words
        return questions.where(deepest == depth)


@dataclass(frozen=True)
class Maze(Task):
    """Task that asks for the cells on the shortest paths from S to G through a square maze with random walls.

    `S . # . . # # . G  _ _ _ _ _ _ _ _ _`: the rows of the maze, then a blank for each cell, with the answer `o` for
    cells on a shortest path, including S and G, and `.` for other cells.
    """

    title = "Mazes"
    size_unit, sizes = "cells per side", (3, 16)
    difficulty_unit, trained = "steps from S to G", (1, 6)
    answer_kinds = ("last",)
    WALLS = 0.3

    size: int = 6
    answers: str = "last"

    @property
    def max_difficulty(self) -> int:
        """Maximum path length. Longer paths are too rare among random walls."""
        return 2 * self.size - 2

    def attempt(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        length, cells, rows = difficulty, self.size**2, np.arange(count)
        free = rng.integers(0, 2**32, (count, cells)) >= int(self.WALLS * 2**32)
        start = self._choose(free, rng)
        from_start = self._distances(free, start, length)
        goal = self._choose(from_start == length, rng)
        to_goal = self._distances(free, goal, length)
        words = np.where(free, ID[NOTHING], ID[WALL])
        words[rows, start], words[rows, goal] = ID[START], ID[GOAL]
        answers = np.where(from_start + to_goal == length, ID[PATH], ID[NOTHING])
        questions = Questions.join(question_part(words), answer_part(answers, length))
        return questions.where((from_start == length).any(axis=1))

    def _choose(self, allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Choose one cell per row from those marked in `allowed` [N, cells]. Return their indices, int64 [N]."""
        return np.argmax(np.where(allowed, rng.integers(1, 2**62, allowed.shape), 0), axis=1)

    def _distances(self, free: np.ndarray, start: np.ndarray, most: int) -> np.ndarray:
        """Return path lengths from the start, int64 [N, cells]. Cells not reached in `most` steps get 2 * most + 1."""
        shape = (len(free), self.size, self.size)
        far = 2 * most + 1
        found = np.full((shape[0], self.size + 2, self.size + 2), far)  # + 2 for a border of walls
        inner = found[:, 1:-1, 1:-1]
        row, column = np.divmod(start, self.size)
        inner[np.arange(shape[0]), row, column] = 0
        for step in range(1, most + 1):
            before = (found[:, :-2, 1:-1], found[:, 2:, 1:-1], found[:, 1:-1, :-2], found[:, 1:-1, 2:])
            near = np.minimum.reduce(before) < step
            inner[near & free.reshape(shape) & (inner == far)] = step
        return inner.reshape(free.shape)


TASKS = {kind.__name__.lower(): kind for kind in (Automaton, Pointers, Permutations, Addition, Brackets, Maze)}
