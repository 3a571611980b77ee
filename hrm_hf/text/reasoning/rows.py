"""Rows of the reasoning suite: questions as a causal language model reads them, and as people do."""

from collections.abc import Sequence

import numpy as np

from ..byte_tokenizer import BOS, EOS, PAD
from .tasks import ID, NOT_ASKED, WORDS, Questions, Task


Rows = dict[str, np.ndarray]
PAD_ID = ID[PAD]
REDRAWS = 20  # of rows that are taken
FILLING = {"input_ids": PAD_ID, "labels": NOT_ASKED, "steps": 0}


def readable(rows: Rows) -> list[str]:
    """Rows as text: the words, each followed by `=` and the answer where one is asked for."""
    input_ids, answers = rows["input_ids"][:, 1:], rows["labels"][:, 1:]
    answers = np.concatenate([answers[:, 1:], np.full_like(answers[:, :1], NOT_ASKED)], axis=1)
    lengths = (input_ids != PAD_ID).sum(axis=1) - 1
    return [
        " ".join(
            WORDS[word] if answer == NOT_ASKED else f"{WORDS[word]}={WORDS[answer]}"
            for word, answer in zip(line[:length].tolist(), asked[:length].tolist())
        )
        for line, asked, length in zip(input_ids, answers, lengths)
    ]


def draw_rows(task: Task, difficulties: np.ndarray, rng: np.random.Generator, taken: set[bytes] = frozenset()) -> Rows:
    """Rows of given difficulties, as long as the longest of them.

    Args:
        difficulties: int64 [N].
        taken: `row_keys` of questions that are drawn again, up to `REDRAWS` times.

    Returns:
        input_ids [N, T]: BOS, the words, EOS, padding. labels [N, T]: at each place the answer that is read one place
        before, as models shift them; -100 elsewhere. steps [N, T]: of the labels. difficulty [N]. All int64.
    """
    parts, order = [], []
    for one in np.unique(difficulties):
        places = np.flatnonzero(difficulties == one)
        part = _rows_of(task.draw(int(one), len(places), rng))
        for _ in range(REDRAWS if taken else 0):
            again = [place for place, key in enumerate(row_keys(part["input_ids"])) if key in taken]
            if not again:
                break
            for name, column in _rows_of(task.draw(int(one), len(again), rng)).items():
                part[name][again] = column
        parts.append(part | {"difficulty": difficulties[places]})
        order.append(places)
    order = np.argsort(np.concatenate(order), kind="stable")
    return {name: column[order] for name, column in below(parts).items()}


def _rows_of(questions: Questions) -> Rows:
    count, length = questions.words.shape
    input_ids = np.full((count, length + 2), ID[EOS])
    input_ids[:, 0], input_ids[:, 1:-1] = ID[BOS], questions.words
    labels, steps = np.full_like(input_ids, NOT_ASKED), np.zeros_like(input_ids)
    labels[:, 2:], steps[:, 2:] = questions.answers, questions.steps
    return {"input_ids": input_ids, "labels": labels, "steps": steps}


def below(parts: Sequence[Rows]) -> Rows:
    """Stack rows, padded on the right to the longest, where a causal model cannot see it."""
    longest = max(part["input_ids"].shape[1] for part in parts)

    def padded(column: np.ndarray, name: str) -> np.ndarray:
        if name not in FILLING:
            return column
        return np.pad(column, ((0, 0), (0, longest - column.shape[1])), constant_values=FILLING[name])

    return {name: np.concatenate([padded(part[name], name) for part in parts]) for name in parts[0]}


def row_keys(input_ids: np.ndarray) -> list[bytes]:
    """For each row of ids [N, T] its words without the padding."""
    return [row[row != PAD_ID].astype(np.int16).tobytes() for row in input_ids]
