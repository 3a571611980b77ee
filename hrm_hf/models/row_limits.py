"""Batches in which every row has a limit of its own, and rows that have ended leave; with any causal language model.

transformers' `generate` has one number of new tokens for all rows, and goes on with all of them until the last has
ended. Here a row that is done is padded at once (`RowLimits`), and whenever half of the rows are done the others go on
without them, with their part of the cache (`generate_rows`). What a row's tokens are does not depend on who else is in
the batch, so that nothing changes but the time; samples are drawn in another order, which is as good.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache


# Settings that say nothing about where a prompt ends or how long it has been: with these alone generation may be
# interrupted and gone on with.
INTERRUPTIBLE = {
    "assistant_confidence_threshold", "bad_words_ids", "bos_token_id", "do_sample", "eos_token_id", "max_new_tokens",
    "min_p", "no_repeat_ngram_size", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_logits", "output_scores", "pad_token_id", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "transformers_version", "typical_p", "use_cache",
}  # fmt: skip


class RowLimits(StoppingCriteria):
    """Ends each row at a length of its own.

    Args:
        lengths: of each row in columns, prompt and padding included. Beams of a row stand together.
    """

    def __init__(self, lengths: Sequence[int]):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        lengths = self.lengths.to(input_ids.device).repeat_interleave(len(input_ids) // len(self.lengths))
        return input_ids.shape[1] >= lengths


class _HalfDone(StoppingCriteria):
    """Interrupts when at most half of the rows are still to go on; `going` [B] says which."""

    def __init__(self, ends: Sequence[int], limits: RowLimits):
        self.ends, self.limits = torch.tensor(ends), limits
        self.going: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        done = torch.isin(input_ids[:, -1], self.ends.to(input_ids.device)) | self.limits(input_ids, scores)
        self.going = ~done if self.going is None else self.going & ~done
        return torch.full_like(done, 2 * int(self.going.sum()) <= len(done))


def is_interruptible(settings, kwargs: dict[str, Any]) -> bool:
    """Whether generation with these settings and arguments of `generate` gives the same when it is interrupted.

    Whoever looks at a whole run (streamers, criteria and processors of a caller, beams, assistants, scores that are
    returned) wants it in one piece.
    """
    if (settings.num_beams or 1) > 1 or settings.return_dict_in_generate or settings.use_cache is False:
        return False
    named = {name: value for name, value in settings.to_diff_dict().items() if not name.startswith("_")}
    set_by_hand = {name for name, value in named.items() if value not in (None, False)}
    return set_by_hand <= INTERRUPTIBLE and all(value is None for value in kwargs.values())


def generate_rows(
    generate: Callable[..., Any],
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor,
    limits: Sequence[int],
    ends: Sequence[int],
    pad: int,
    interrupts: bool = True,
    **kwargs: Any,
) -> torch.LongTensor:
    """Continues each row as `generate` does, until it has ended and leaves the batch.

    Args:
        generate: transformers', of a model with a dynamic cache; takes max_new_tokens.
        input_ids, attention_mask: [B, W], padded on the left.
        limits: most new tokens of each row, 1 at least.
        ends: tokens that end a row.
        pad: follows an end.
        interrupts: whether rows leave; without, they are only limited, in one call of `generate`.
        kwargs: handed on.

    Returns:
        [B, W + N], N being the most new tokens of any row.
    """
    width, device = input_ids.shape[1], input_ids.device
    rows, lengths = torch.arange(len(input_ids), device=device), width + torch.tensor(limits, device=device)
    written = input_ids.new_full((len(input_ids), int(lengths.max())), pad)
    cache: Cache | None = None
    while True:
        limit = RowLimits(lengths[rows].tolist())
        half = _HalfDone(ends, limit)
        output = generate(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            max_new_tokens=int(lengths[rows].max()) - input_ids.shape[1],
            stopping_criteria=StoppingCriteriaList([limit, half] if interrupts else [limit]),
            return_dict_in_generate=True,
            **kwargs,
        )
        ids, cache = output.sequences, output.past_key_values
        written[rows, : ids.shape[1]] = ids
        going = half.going.nonzero()[:, 0] if interrupts else rows[:0]
        if not len(going):
            return written[:, : max(width, int((written != pad).any(dim=0).nonzero().max()) + 1)]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, ids.shape[1] - attention_mask.shape[1]), value=1)
        rows, input_ids, attention_mask = rows[going], ids[going], attention_mask[going]
        if cache is not None:
            cache.batch_select_indices(going)
