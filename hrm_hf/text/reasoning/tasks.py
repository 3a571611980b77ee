"""The tasks of the reasoning suite: seeded questions whose answers take as many steps as their difficulty says.

An answer is read at a blank, in one forward pass, and none is fed back. With `answers="all"` the result of every step
is asked for, in a layout in which each step looks like the one before; with "last" only that of the last step.

Every draw depends on the options, the difficulty, the count and the generator alone: integers, and nothing but
`Generator.integers` and stable sorting, which are the same on every platform.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ..byte_tokenizer import SPECIAL_TOKENS, UNK, fast_tokenizer


NOT_ASKED = -100
MOST_ATTEMPTS = 2**14
MOST_STEPS = 256

# ---- words: one vocabulary for all tasks; ids 0..7 are the special tokens of the byte tokenizer ----

MAX_NODES, MAX_ITEMS = 16, 10

BLANK = "_"  # where an answer is read
STEP = "|"  # written once for each step that is asked for
DIGITS = tuple("0123456789")
# An arrow is one word, and a node has a word as a start and another one as an answer: with two words an arrow, or one
# for both ends, small models take many times the steps to find that the answer stands beside the question.
ARROWS = tuple(f"{node}>{to}" for node in range(MAX_NODES) for to in range(MAX_NODES))
STARTS = tuple(f"from{node}" for node in range(MAX_NODES))
NODES = tuple(f"at{node}" for node in range(MAX_NODES))
SWAPS = tuple(f"x{place}" for place in range(MAX_ITEMS - 1))  # exchanges the items at two neighbouring places
TURN = "turn"  # moves every item one place on
OPENING, CLOSING = tuple("([{"), tuple(")]}")
PLUS, NOTHING, WALL, START, GOAL, PATH = "+", ".", "#", "S", "G", "o"

WORDS = (
    *SPECIAL_TOKENS, BLANK, STEP, *DIGITS, PLUS, NOTHING, *OPENING, *CLOSING, WALL, START, GOAL, PATH, TURN, *SWAPS,
    *STARTS, *NODES, *ARROWS,
)  # fmt: skip
ID = {word: number for number, word in enumerate(WORDS)}


def ids(words: tuple[str, ...]) -> np.ndarray:
    """Ids (int64) of words, to be indexed by number."""
    return np.array([ID[word] for word in words])


def reasoning_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the suite: one token for each word between spaces, `UNK` for what is no word of it."""
    backend = Tokenizer(WordLevel(ID, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast_tokenizer(backend)


@dataclass
class Questions:
    """Questions of one difficulty, each T words long.

    Attributes:
        words: int64 [N, T], ids of what a model reads.
        answers: int64 [N, T], ids of what it should say after each word; -100 where nothing is asked.
        steps: int64 [N, T], steps that the answer at a place takes; 0 where nothing is asked.
    """

    words: np.ndarray
    answers: np.ndarray
    steps: np.ndarray

    @classmethod
    def join(cls, *parts: "Questions", axis: int = 1) -> "Questions":
        """The parts one after another, or (axis 0) one below another."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts], axis) for name in vars(parts[0])))

    def where(self, rows: np.ndarray | slice) -> "Questions":
        """Some of the questions."""
        return Questions(self.words[rows], self.answers[rows], self.steps[rows])


def given(words: np.ndarray) -> Questions:
    """Words [N, T] at which nothing is asked."""
    return Questions(words, np.full_like(words, NOT_ASKED), np.zeros_like(words))


def asked(answers: np.ndarray, steps: int | np.ndarray, only_last: bool = False) -> Questions:
    """Answers [N, T] that take so many steps, read at blanks; only the last ones of them if wanted."""
    steps = np.broadcast_to(steps, answers.shape).copy()
    if only_last:
        answers[:, :-1], steps[:, :-1] = NOT_ASKED, 0
    return Questions(np.full_like(answers, ID[BLANK]), answers, steps)


def shuffled(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """int64 [count, size]: random orders of 0..size-1."""
    return np.argsort(rng.integers(0, 2**62, (count, size)), axis=1, kind="stable")


@dataclass(frozen=True)
class Task:
    """A task; its options are its fields."""

    title: ClassVar[str]
    size_is: ClassVar[str]  # what `size` counts
    sizes: ClassVar[tuple[int, int]]  # smallest and largest
    difficulty_is: ClassVar[str]  # what difficulty counts
    trained: ClassVar[tuple[int, int]]  # difficulties, unless told otherwise
    asks: ClassVar[tuple[str, ...]] = ("all", "last")  # values of `answers`, the usual one first

    size: int
    answers: str = "all"

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        """Draw `count` questions of a difficulty, from 1 to `most`: those that an `attempt` has, of many.

        Raises:
            ValueError: hardly any attempt has one.
        """
        found, tried, kept = [], 0, 0
        while kept < count:
            found.append(self.attempt(difficulty, 256, rng))
            tried, kept = tried + 256, kept + len(found[-1].words)
            if tried >= MOST_ATTEMPTS and kept < tried / MOST_ATTEMPTS:
                raise ValueError(
                    f"difficulty={difficulty}: none in {tried:,} random questions; ask for less, or a larger size"
                )
        return Questions.join(*found, axis=0).where(slice(count))

    def attempt(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        """Those of `count` random questions that have the difficulty."""
        raise NotImplementedError

    @property
    def most(self) -> int:
        """The greatest difficulty for this size."""
        return MOST_STEPS


@dataclass(frozen=True)
class Automaton(Task):
    """The rows of a cyclic cellular automaton with rule 110, after K steps from random cells.

    all: `0 1 1 0  _ _ _ _  _ _ _ _`, the row after each step. last: `| | 0 1 1 0 _ _ _ _`, that after as many steps as
    there are marks.
    """

    title = "Cellular automaton, rule 110"
    size_is, sizes = "cells of the ring", (3, 64)
    difficulty_is, trained = "steps", (1, 8)
    RULE = 110

    size: int = 16

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        words = ids(DIGITS)
        cells = rng.integers(0, 2, (count, self.size))
        parts = [given(words[cells])]
        if self.answers == "last":
            parts.insert(0, given(np.full((count, difficulty), ID[STEP])))
        for step in range(1, difficulty + 1):
            left, right = np.roll(cells, 1, axis=1), np.roll(cells, -1, axis=1)
            cells = self.RULE >> (4 * left + 2 * cells + right) & 1
            if self.answers == "all" or step == difficulty:
                parts.append(asked(words[cells], step))
        return Questions.join(*parts)


@dataclass(frozen=True)
class Pointers(Task):
    """Where one is after each of p hops along arrows between nodes.

    The arrows, one word each and in random order, make one ring of all nodes, so that fewer hops than nodes never come
    back. All nodes follow as starts, in random order: `2>1 0>2 1>0  from2 _ _  from0 _ _  from1 _ _`. The first hop is
    read at the start, each blank asks for one hop more; with "last" only the last of them does.
    """

    title = "Pointer chasing"
    size_is, sizes = "nodes", (2, MAX_NODES)
    difficulty_is, trained = "hops", (1, 4)

    size: int = 8

    @property
    def most(self) -> int:
        """More hops would come back to the start."""
        return self.size - 1

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        arrows, starts, nodes = ids(ARROWS), ids(STARTS), ids(NODES)
        ring = shuffled(rng, count, self.size)
        follower = np.empty_like(ring)
        np.put_along_axis(follower, ring, np.roll(ring, -1, axis=1), axis=1)
        listed = shuffled(rng, count, self.size)
        parts = [given(arrows[MAX_NODES * listed + np.take_along_axis(follower, listed, axis=1)])]
        for start in shuffled(rng, count, self.size).T:
            node, visited = start, []
            for _ in range(difficulty):
                node = follower[np.arange(count), node]
                visited.append(nodes[node])
            chain = asked(np.stack(visited, axis=1), np.arange(1, difficulty + 1), self.answers == "last")
            chain.words[:, 0] = starts[start]
            parts.append(chain)
        return Questions.join(*parts)


@dataclass(frozen=True)
class Permutations(Task):
    """Products of k generators of a symmetric group, S5 by default, applied to an arrangement of items.

    `x2` exchanges the items at places 2 and 3, `turn` moves every item one place on and the last to the front. all:
    `2 0 1  turn _ _ _  x0 _ _ _`, the arrangement after each generator. last: `2 0 1  turn x0  _ _ _`.
    """

    title = "Composition of permutations"
    size_is, sizes = "items that are permuted", (3, MAX_ITEMS)
    difficulty_is, trained = "generators", (1, 8)

    size: int = 5

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        items, names = ids(DIGITS), ids((*SWAPS[: self.size - 1], TURN))
        table = self.generators()
        arrangement = shuffled(rng, count, self.size)
        word = rng.integers(0, len(table), (count, difficulty))
        parts = [given(items[arrangement])]
        for step in range(1, difficulty + 1):
            generator = word[:, step - 1]
            arrangement = np.take_along_axis(arrangement, table[generator], axis=1)
            parts.append(given(names[generator][:, None]))
            if self.answers == "all" or step == difficulty:
                parts.append(asked(items[arrangement], step))
        return Questions.join(*parts)

    def generators(self) -> np.ndarray:
        """int64 [size, size]: for each generator, the place that the item at each place comes from."""
        table = np.tile(np.arange(self.size), (self.size, 1))
        for place in range(self.size - 1):
            table[place, [place, place + 1]] = place + 1, place
        table[-1] = np.roll(table[-1], 1)
        return table


@dataclass(frozen=True)
class Addition(Task):
    """The sum of m numbers of d digits, of which the last d digits count, so that more numbers look like fewer.

    Digits stand from the lowest to the highest, as they are added. all: `+ 7 1 _ _ + 5 2 _ _`, the sum after each
    number. last: `+ 7 1 + 5 2 _ _`.
    """

    title = "Addition of many numbers"
    size_is, sizes = "digits of a number", (1, 9)
    difficulty_is, trained = "numbers", (2, 8)

    size: int = 3

    def draw(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        plus = np.full((count, 1), ID[PLUS])
        numbers = rng.integers(0, 10**self.size, (count, difficulty))
        sums = np.cumsum(numbers, axis=1) % 10**self.size
        parts = []
        for step in range(1, difficulty + 1):
            parts += [given(plus), given(self.digits(numbers[:, step - 1]))]
            if self.answers == "all" or step == difficulty:
                parts.append(asked(self.digits(sums[:, step - 1]), step))
        return Questions.join(*parts)

    def digits(self, numbers: np.ndarray) -> np.ndarray:
        """Words [N, size] of numbers [N], the lowest digit first."""
        return ids(DIGITS)[numbers[:, None] // 10 ** np.arange(self.size) % 10]


@dataclass(frozen=True)
class Brackets(Task):
    """Which bracket has to be closed next, in nested brackets of several kinds that are D deep at the deepest.

    Asked at each bracket, or ("last") at the last one: `( [ ] ( [` has the answers `) ] ) ) ]`, and `.` where none is
    open. A row has six brackets for each level of its depth.
    """

    title = "Nested brackets"
    size_is, sizes = "kinds of brackets", (1, len(OPENING))
    difficulty_is, trained = "depth", (1, 4)
    LENGTH = 6

    size: int = 3

    def attempt(self, difficulty: int, count: int, rng: np.random.Generator) -> Questions:
        depth, length = difficulty, self.LENGTH * difficulty
        opening, closing = ids(OPENING), ids((*CLOSING, NOTHING))
        nothing = len(CLOSING)
        luck, kinds = rng.integers(0, 6, (count, length)), rng.integers(0, self.size, (count, length))
        words, answers, steps = (np.empty((count, length), np.int64) for _ in range(3))
        stack = np.full((count, depth + 1), nothing)  # kinds of what is open, above a bottom that is none
        height, deepest, rows = np.zeros(count, np.int64), np.zeros(count, np.int64), np.arange(count)
        for place in range(length):
            # Upwards until the depth is reached, then as often up as down; never below the ground or too high.
            up = luck[:, place] < np.where(deepest < depth, 4, 3)
            up = (up | (height == 0)) & (height < depth)
            words[:, place] = np.where(up, opening[kinds[:, place]], closing[stack[rows, height]])
            height += np.where(up, 1, -1)
            stack[rows[up], height[up]] = kinds[up, place]
            deepest = np.maximum(deepest, height)
            answers[:, place], steps[:, place] = closing[stack[rows, height]], np.maximum(height, 1)
        questions = asked(answers, steps, self.answers == "last")
        questions.words = words
        return questions.where(deepest == depth)


@dataclass(frozen=True)
class Maze(Task):
    """The cells on the shortest ways through a square maze of random walls, from S to G.

    `S . # . . # # . G  _ _ _ _ _ _ _ _ _`: row after row, then a blank for each cell, whose answer is `o` on a
    shortest way, S and G included, and `.` elsewhere.
    """

    title = "Mazes"
    size_is, sizes = "cells a side", (3, 16)
    difficulty_is, trained = "steps from S to G", (1, 6)
    asks = ("last",)
    WALLS = 0.3

    size: int = 6
    answers: str = "last"

    @property
    def most(self) -> int:
        """Longer ways are too rare among random walls."""
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
        return Questions.join(given(words), asked(answers, length)).where((from_start == length).any(axis=1))

    def _choose(self, allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """int64 [N]: one of the cells that are `allowed` [N, cells]."""
        return np.argmax(np.where(allowed, rng.integers(1, 2**62, allowed.shape), 0), axis=1)

    def _distances(self, free: np.ndarray, start: np.ndarray, most: int) -> np.ndarray:
        """int64 [N, cells]: steps from the start over free cells, `2 * most + 1` for more than `most`."""
        shape = (len(free), self.size, self.size)
        far = 2 * most + 1
        found = np.full((shape[0], self.size + 2, self.size + 2), far)  # with a rim that is no way
        inner = found[:, 1:-1, 1:-1]
        row, column = np.divmod(start, self.size)
        inner[np.arange(shape[0]), row, column] = 0
        for step in range(1, most + 1):
            before = (found[:, :-2, 1:-1], found[:, 2:, 1:-1], found[:, 1:-1, :-2], found[:, 1:-1, 2:])
            near = np.minimum.reduce(before) < step
            inner[near & free.reshape(shape) & (inner == far)] = step
        return inner.reshape(free.shape)


TASKS = {kind.__name__.lower(): kind for kind in (Automaton, Pointers, Permutations, Addition, Brackets, Maze)}
