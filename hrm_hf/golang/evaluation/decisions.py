"""Refinement decisions: right or wrong, how sure, and calibrated.

Decisions are read in two places: in the refinement head, and in the token behind </VALIDATE> (of every model). Both
are asked after each attempt of a trajectory, attempts and verdicts given. Probabilities are calibrated by one
temperature, found on other trajectories (Guo et al. 2017, arXiv 1706.04599, section 4.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...models.processing_hrm_go_coder import DECISION_TOKENS, DECISIONS, NO_FEEDBACK, TOKEN_IDS
from ..data.collator import GoStreamBuilder
from .held_out import Record, built_row, end_of_verdict, is_go_coder
from .metrics import RESAMPLES, decision_scores, f1_of
from .writer import Writer


BINS = 15  # of the calibration error, as in the paper
TEMPERATURES = np.geomspace(0.05, 20, 601)  # 1 % apart


@dataclass
class Decided:
    """Decisions after N attempts.

    Attributes:
        labels: [N] right decisions, indices of DECISIONS.
        failed: [N] the verdict names an error.
        trajectory: [N] which trajectory an attempt is of.
        logits: "tokens" and, of a model with a refinement head, "head": [N, 3] each, at temperature 1.
        left_out: trajectories that do not fit.
    """

    labels: np.ndarray
    failed: np.ndarray
    trajectory: np.ndarray
    logits: dict[str, np.ndarray]
    left_out: int


def evaluate_decisions(
    writer: Writer,
    builder: GoStreamBuilder,
    trajectories: Sequence[Record],
    calibration: Sequence[Record] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Scores of the decisions after the attempts of trajectories.

    Args:
        calibration: other trajectories, on which a temperature is found for each source.
        seed: of the bootstrap.

    Returns:
        For "tokens" and "head": `decision_scores`; "macro_f1_interval" (bootstrap over trajectories); "nll" in nats
        and "calibration_error" (expected, of the likeliest class, in 15 bins); with `calibration` also "temperature",
        "nll_calibrated" and "calibration_error_calibrated". The head's temperature is of its raw logits: what to
        write into the config as `decision_temperature`.
    """
    found = decide(writer, builder, trajectories, "decisions")
    other = decide(writer, builder, calibration, "calibration") if calibration else None
    figures: dict[str, Any] = {"trajectories": len(trajectories) - found.left_out, "left_out": found.left_out}
    return figures | decisions_by_source(found, seed, other)


def decisions_by_source(found: Decided, seed: int = 0, other: Decided | None = None) -> dict[str, Any]:
    """Scores of "tokens" and "head", as `evaluate_decisions` returns them; `other`: what calibrates them."""
    figures: dict[str, Any] = {}
    for source, logits in found.logits.items():
        scores = decision_scores(logits.argmax(axis=1).tolist(), found.labels.tolist(), found.failed.tolist())
        if len(found.labels):
            scores["macro_f1_interval"] = _macro_f1_interval(found, logits, seed)
            scores |= _sureness(logits, found.labels)
            if other is not None and len(other.labels):
                temperature = best_temperature(other.logits[source], other.labels)
                after = _sureness(logits / temperature, found.labels)
                scores |= {"temperature": temperature} | {f"{name}_calibrated": each for name, each in after.items()}
        figures[source] = scores
    return figures


def decide(writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record], what: str) -> Decided:
    """The model's decisions after all attempts that have one, in batches."""
    rows = [built_row(builder, record) for record in trajectories]
    kept = [(index, row) for index, row in enumerate(rows) if row and row["decision_labels"]]
    choices = torch.tensor([TOKEN_IDS[token] for token in DECISION_TOKENS])
    labels, failed, owners = [], [], []
    logits: dict[str, list] = {"tokens": []} | ({"head": []} if _has_head(writer) else {})
    with writer.bar(len(kept), what) as bar:
        for start in range(0, len(kept), writer.batch_size):
            batch = kept[start : start + writer.batch_size]
            inputs = _decision_inputs(writer, [row for _, row in batch])
            output = writer.forward([row["input_ids"] for _, row in batch], **inputs)
            for place, (index, row) in enumerate(batch):
                for k, (position, label) in enumerate(zip(row["decision_positions"], row["decision_labels"])):
                    after = end_of_verdict(row["input_ids"], position)
                    logits["tokens"].append(output.logits[place, after, choices].float().cpu())
                    if "head" in logits:
                        # Raw: a temperature that the checkpoint already has would be found a second time.
                        raw = output["refinement_logits"][place, k] * writer.model.config.decision_temperature
                        logits["head"].append(raw.float().cpu())
                    labels.append(label)
                    failed.append(2 in row["feedback_ids"][k][:2])
                    owners.append(index)
            bar.update(len(batch))
    stacked = {name: torch.stack(each).numpy() if each else np.zeros((0, 3)) for name, each in logits.items()}
    left_out = len(trajectories) - len(kept)
    return Decided(np.array(labels, dtype=int), np.array(failed, dtype=bool), np.array(owners), stacked, left_out)


def best_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature with the least mean negative log-likelihood, of 601 between 0.05 and 20."""
    return float(min(TEMPERATURES, key=lambda temperature: _nll(logits / temperature, labels)))


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Mean distance of confidence and accuracy in bins of equal width, weighted by their sizes; 0 is calibrated.

    Args:
        probabilities: [N, C].
        labels: [N].
    """
    sure, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bin_of = np.minimum((sure * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, sure - right, minlength=bins)  # of a bin: its size times the distance
    return float(np.abs(gaps).sum() / len(labels))


def _has_head(writer: Writer) -> bool:
    return is_go_coder(writer.model) and not getattr(writer.model.config, "unified", False)


def _decision_inputs(writer: Writer, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Positions and feedback for the refinement head, padded; nothing for a model without one."""
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


def _macro_f1_interval(found: Decided, logits: np.ndarray, seed: int) -> list[float]:
    """Percentile bootstrap of 95 % over trajectories, whose attempts are alike."""
    size = len(DECISIONS)
    owners, place = np.unique(found.trajectory, return_inverse=True)
    cells = np.zeros((len(owners), size, size))
    np.add.at(cells, (place, found.labels, logits.argmax(axis=1)), 1)
    generator = np.random.default_rng(seed)
    scores = []
    for _ in range(RESAMPLES // 10):
        confusion = cells[generator.integers(len(owners), size=len(owners))].sum(axis=0)
        scores.append(f1_of(confusion))
    return [float(value) for value in np.quantile(scores, (0.025, 0.975))]


def _sureness(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    probabilities = np.exp(_log_softmax(logits))
    return {"nll": _nll(logits, labels), "calibration_error": calibration_error(probabilities, labels)}


def _nll(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(-_log_softmax(logits)[np.arange(len(labels)), labels].mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
