"""Rows of the reasoning suite: questions as a causal language model reads them, and as people do."""

from collections.abc import Iterable

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


def draw_rows(task: Task, difficulties: np.ndarray, rng: np.random.Generator, taken: np.ndarray | None = None) -> Rows:
    """Rows of given difficulties, as long as the longest of them.

    Args:
        difficulties: int64 [N].
        taken: sorted fingerprints of questions that are drawn anew, up to `REDRAWS` times.

    Returns:
        input_ids [N, T]: BOS, the words, EOS, padding. labels [N, T]: at each place the answer that is read one place
        before, as models shift them; -100 elsewhere. steps [N, T]: of the labels. difficulty [N]. All int64.
    """
    parts, order = [], []
    for one in np.unique(difficulties):
        places = np.flatnonzero(difficulties == one)
        part = _rows_of(task.draw(int(one), len(places), rng))
        for _ in range(REDRAWS if taken is not None else 0):
            again = np.flatnonzero(np.isin(fingerprints(part["input_ids"]), taken))
            if not len(again):
                break
            for name, column in _rows_of(task.draw(int(one), len(again), rng)).items():
                part[name][again] = column
        parts.append(part | {"difficulty": difficulties[places]})
        order.append(places)
    widest = max(part["input_ids"].shape[1] for part in parts)
    order = np.argsort(np.concatenate(order), kind="stable")
    return {name: column[order] for name, column in below(wider(part, widest) for part in parts).items()}


def _rows_of(questions: Questions) -> Rows:
    count, length = questions.words.shape
    input_ids = np.full((count, length + 2), ID[EOS])
    input_ids[:, 0], input_ids[:, 1:-1] = ID[BOS], questions.words
    labels, steps = np.full_like(input_ids, NOT_ASKED), np.zeros_like(input_ids)
    labels[:, 2:], steps[:, 2:] = questions.answers, questions.steps
    return {"input_ids": input_ids, "labels": labels, "steps": steps}


def wider(rows: Rows, length: int) -> Rows:
    """Rows that are filled up on the right, where a causal model cannot see it."""
    more = length - rows["input_ids"].shape[1]
    filled = {name: np.pad(rows[name], ((0, 0), (0, more)), constant_values=FILLING[name]) for name in FILLING}
    return rows | filled


def below(parts: Iterable[Rows]) -> Rows:
    """Rows of one length, one below another."""
    parts = list(parts)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def fingerprints(input_ids: np.ndarray) -> np.ndarray:
    """uint64 [N]: equal for equal rows, whatever their padding."""
    factors = 2 * np.random.default_rng(0).integers(0, 2**63, input_ids.shape[1], dtype=np.uint64) + 1
    found = np.zeros(len(input_ids), np.uint64)
    for place, factor in enumerate(factors):  # a column at a time: in 64 bits a large split would not fit
        column = input_ids[:, place]
        found += np.where(column == PAD_ID, 0, column.astype(np.uint64) + 1) * factor
    return found
