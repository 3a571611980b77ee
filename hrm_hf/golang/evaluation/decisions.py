"""Evaluate refinement decisions: whether they are right, and how well their probabilities are calibrated.

Decisions are read in two places: the refinement head, and the token after </VALIDATE> (of every model). Both are read
after each attempt of a trajectory, with attempts and verdicts given.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ...models.processing_hrm_go_coder import DECISION_TOKENS, NO_FEEDBACK, TOKEN_IDS
from ..data.streams import GoStreamBuilder, TooLongError
from .held_out import Record
from .metrics import decision_scores
from .writer import Writer, is_go_coder


BINS = 15  # of the calibration error (Guo et al. 2017, arXiv 1706.04599)


def evaluate_decisions(writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record]) -> dict[str, Any]:
    """Score the decisions after the attempts of trajectories.

    Returns:
        For "tokens" and, if the model has a refinement head, "head": `decision_scores`; "nll" in nats and
        "calibration_error" (expected, of the likeliest class, in 15 bins). `left_out` counts trajectories that do not
        fit.
    """
    labels, failed, kept, logits = _decide(writer, builder, trajectories)
    result: dict[str, Any] = {"trajectories": kept, "left_out": len(trajectories) - kept}
    for source, scores in logits.items():
        result[source] = decision_scores(scores.argmax(axis=1).tolist(), labels, failed)
        if labels:
            log_p = torch.tensor(scores).log_softmax(-1).numpy()
            result[source] |= {
                "nll": float(-log_p[np.arange(len(labels)), labels].mean()),
                "calibration_error": calibration_error(np.exp(log_p), np.array(labels)),
            }
    return result


def _decide(
    writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record]
) -> tuple[list[int], list[bool], int, dict[str, np.ndarray]]:
    """Run the model over all attempts that have a decision.

    Returns:
        of N attempts: right decisions (indices of DECISIONS), and whether the verdict names an error; the number of
        trajectories that fit; logits [N, 3] by source.
    """
    kept = []
    for record in trajectories:
        with suppress(TooLongError):
            row = builder.build(record)
            if row["decision_labels"]:
                kept.append(row)
    choices = torch.tensor([TOKEN_IDS[token] for token in DECISION_TOKENS])
    labels, failed = [], []
    has_head = is_go_coder(writer.model) and not getattr(writer.model.config, "unified", False)
    logits: dict[str, list] = {"tokens": []} | ({"head": []} if has_head else {})
    with writer.bar(len(kept), "decisions") as bar:
        for start in range(0, len(kept), writer.batch_size):
            batch = kept[start : start + writer.batch_size]
            inputs = _decision_inputs(writer, batch)
            output = writer.forward([row["input_ids"] for row in batch], **inputs)
            for place, row in enumerate(batch):
                for k, (position, label) in enumerate(zip(row["decision_positions"], row["decision_labels"])):
                    after = list(row["input_ids"]).index(TOKEN_IDS["</VALIDATE>"], position)
                    logits["tokens"].append(output.logits[place, after, choices].float().cpu())
                    if has_head:
                        logits["head"].append(output["refinement_logits"][place, k].float().cpu())
                    labels.append(label)
                    failed.append(2 in row["feedback_ids"][k][:2])
            bar.update(len(batch))
    stacked = {name: torch.stack(each).numpy() if each else np.zeros((0, 3)) for name, each in logits.items()}
    return labels, failed, len(kept), stacked


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Return the mean distance of confidence and accuracy in bins of equal width, weighted by size; 0 is calibrated.

    Args:
        probabilities: [N, C].
        labels: [N].
    """
    sure, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bin_of = np.minimum((sure * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, sure - right, minlength=bins)  # of a bin: its size times the distance
    return float(np.abs(gaps).sum() / len(labels))


def _decision_inputs(writer: Writer, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad positions and feedback for the refinement head; empty for a model without one."""
    if not is_go_coder(writer.model):
        return {}
    most = max(len(row["decision_positions"]) for row in rows)
    positions = [[*row["decision_positions"], *[0] * (most - len(row["decision_positions"]))] for row in rows]
    feedback = [[*row["feedback_ids"], *[NO_FEEDBACK] * (most - len(row["feedback_ids"]))] for row in rows]
    device = writer.model.device
    return {
        "decision_positions": torch.tensor(positions, device=device),
        "feedback_ids": torch.tensor(feedback, device=device),
    }
