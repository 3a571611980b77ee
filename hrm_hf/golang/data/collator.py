"""Pads rows of the Go coder's token stream to batches, for the Go coder and for other causal language models."""

from collections.abc import Sequence
from typing import Any

import torch

from ...models.processing_hrm_go_coder import NO_FEEDBACK
from .streams import IGNORED, PLAIN


class GoCoderCollator:
    """Pads rows of `GoStreamBuilder` on the right to a batch of tensors.

    A batch has `input_ids`, `attention_mask`, `labels` [B, S] and, for models that take them, `decision_positions`,
    `decision_labels` [B, K] and `feedback_ids` [B, K, 4] (a row with fewer decisions has position 0, label -100). Rows
    with a stream without attempts put a second batch of them under "plain": `at_step` chooses. Rows with
    `code_start` put `scored_labels` [B, S] (the labels of the code alone) and `scored_bytes` [B] beside: bits per byte
    come from them.

    Args:
        pad_token_id: the id that pads.
        decisions: the model takes decisions; False for ordinary causal models.
        plain_steps: steps of a run in which batches are those without attempts.
        pad_to_multiple_of: S is a multiple of it; 8 suits tensor cores.
    """

    def __init__(
        self, pad_token_id: int, decisions: bool = True, plain_steps: int = 0, pad_to_multiple_of: int | None = 8
    ):
        self.pad_token_id = pad_token_id
        self.decisions = decisions
        self.plain_steps = plain_steps
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self._pad(rows)
        if "code_start" in rows[0]:
            batch |= self._scored(rows, batch["labels"])
        if f"{PLAIN}input_ids" in rows[0]:
            batch["plain"] = self._pad([_plain(row) for row in rows])
        return batch

    def at_step(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """The batch that is trained on after `step` optimizer steps: a function of the step alone."""
        plain = batch.pop("plain", None)
        return plain if plain is not None and step < self.plain_steps else batch

    def _pad(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple) * self.multiple
        ids = [[*row["input_ids"], *[self.pad_token_id] * (width - len(row["input_ids"]))] for row in rows]
        labels = [[*row["labels"], *[IGNORED] * (width - len(row["labels"]))] for row in rows]
        mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.decisions:
            batch |= _padded_decisions(rows)
        return {name: torch.tensor(values, dtype=torch.long) for name, values in batch.items()}

    @staticmethod
    def _scored(rows: Sequence[dict[str, Any]], labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scored = torch.full_like(labels, IGNORED)
        for index, row in enumerate(rows):
            span = slice(row["code_start"], row["code_end"])
            scored[index, span] = labels[index, span]
        return {"scored_labels": scored, "scored_bytes": torch.tensor([row["code_bytes"] for row in rows])}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    if not row[f"{PLAIN}input_ids"]:  # the record has no attempts: its stream is plain
        return row
    ids, labels = row[f"{PLAIN}input_ids"], row[f"{PLAIN}labels"]
    return {"input_ids": ids, "labels": labels, "decision_positions": [], "decision_labels": [], "feedback_ids": []}


def _padded_decisions(rows: Sequence[dict[str, Any]]) -> dict[str, list]:
    count = max(1, *(len(row["decision_labels"]) for row in rows))
    padding = {"decision_positions": 0, "decision_labels": IGNORED, "feedback_ids": NO_FEEDBACK}
    return {
        name: [[*row[name], *[value] * (count - len(row[name]))] for row in rows] for name, value in padding.items()
    }
