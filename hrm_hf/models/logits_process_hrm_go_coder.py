"""Logits processors against text that repeats itself without end, for any causal language model.

transformers has a penalty for every token that occurred (`repetition_penalty`) and a ban on every n-gram that did
(`no_repeat_ngram_size`). Both forbid good code: of 164 functions that people wrote, 60 have some ten tokens twice.
Here only text that follows *itself* is forbidden, where it is longer than in real code.
"""

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from .processing_hrm_go_coder import SPECIAL_TOKENS, TOKEN_IDS


STEP = TOKEN_IDS["<STEP>"]
LONGEST_CYCLE = 64  # tokens: some six lines of code
# How long a stretch may be that repeats, token by token, what stands one cycle before. Of real code, 1,748 programs,
# functions and tests with tables in three vocabularies of 1,024 to 10,374 tokens, has at most 20 equal tokens (digits
# of a number), 114 tokens of a cycle of 2 to 19, and 5.9 copies of a longer one (rows of a table).
SAME_TOKEN = 24
SHORT_CYCLES = 128
COPIES = 6


def longest_stretch(period: int) -> int:
    """How many tokens in a row may repeat themselves with a period of so many tokens, the first copy included."""
    return SAME_TOKEN if period == 1 else max(SHORT_CYCLES, COPIES * period)


def forbid(scores: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Scores [B, V] with -inf where `forbidden` [B, V] is True.

    A row in which nothing would be left stays as it is: other processors have forbidden the rest, and to sample from
    nothing is an error.
    """
    left = scores.masked_fill(forbidden, -torch.inf)
    return torch.where(left.amax(dim=-1, keepdim=True) == -torch.inf, scores, left)


class RepetitionGuard(LogitsProcessor):
    """Forbids the token with which a cycle of up to `LONGEST_CYCLE` tokens would be longer than `longest_stretch`.

    Args:
        prompt_length: tokens of each row, padding included, that were given; only what was written is looked at.
    """

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = input_ids[:, self.prompt_length :][:, -longest_stretch(LONGEST_CYCLE) :].tolist()
        found = [(row, token) for row, ids in enumerate(rows) for token in repeated_too_often(ids)]
        if not found:
            return scores
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        forbidden[tuple(zip(*found))] = True
        return forbid(scores, forbidden)


def repeated_too_often(ids: list[int]) -> set[int]:
    """The tokens behind `ids` with which a stretch would be longer than it may."""
    found = set()
    for period in range(1, LONGEST_CYCLE + 1):
        stretch = longest_stretch(period)
        if len(ids) >= stretch and ids[-1] == ids[-1 - period] and ids[-stretch:-period] == ids[period - stretch :]:
            found.add(ids[-period])
    return found


class DistinctSteps(LogitsProcessor):
    """Lets no step of a plan end with the tokens of an earlier one: it goes on as text until it says something else.

    For the stream of `processing_hrm_go_coder.py`; code has no steps, so that nothing is forbidden there.

    Args:
        prompt_length: tokens of each row, padding included, that were given, up to <PLAN>.
    """

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = input_ids[:, self.prompt_length :].tolist()
        repeats = [row for row, ids in enumerate(rows) if _ends_in_old_step(ids)]
        if not repeats:
            return scores
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        forbidden[repeats, : len(SPECIAL_TOKENS)] = True
        return forbid(scores, forbidden)


def _ends_in_old_step(ids: list[int]) -> bool:
    """Whether the last segment of a plan is a step, so far with the tokens of an earlier step."""
    if STEP not in ids:
        return False
    tags = [index for index, token in enumerate(ids) if token < len(SPECIAL_TOKENS)]
    segments = [tuple(ids[start:end]) for start, end in zip(tags, [*tags[1:], len(ids)])]
    return segments[-1][0] == STEP and segments[-1] in segments[:-1]


def repetition_guards(prompt_length: int) -> LogitsProcessorList:
    """The guards of a plan or a code in the Go coder's stream, written behind `prompt_length` given tokens."""
    return LogitsProcessorList([RepetitionGuard(prompt_length), DistinctSteps(prompt_length)])
