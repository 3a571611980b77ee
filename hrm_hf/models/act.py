"""Adaptive computation time (ACT) with a persistent carry: state, halting rules and losses.

Each slot of a batch works on one example over several calls of the model. When the example has halted, the slot takes
a new one at the next call. B is the number of slots, S the positions, V the vocabulary size, T the positions of
the latent states, and D their width.

Source: Wang et al. 2025, "Hierarchical Reasoning Model", arXiv 2506.21734, section 2 (ACT, Q-learning head);
Prieto et al. 2025, arXiv 2501.04697 (stablemax).
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


IGNORE_INDEX = -100


@dataclass
class ActCarry:
    """State that persists between ACT steps.

    Attributes:
        z_H, z_L: latent states [B, T, D], detached.
        steps: int32 [B], ACT steps spent on the current example.
        halted: bool [B]; a halted slot restarts on new data at the next call.
        current_data: the example each slot works on: `input_ids` [B, S], `puzzle_identifiers` [B] and, if given,
            `labels` [B, S].
    """

    z_H: torch.Tensor
    z_L: torch.Tensor
    steps: torch.Tensor
    halted: torch.Tensor
    current_data: dict[str, torch.Tensor] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return the carry as a flat dict of tensors, which safetensors can store."""
        tensors = {name: getattr(self, name) for name in ("z_H", "z_L", "steps", "halted")}
        tensors.update({f"current_data.{name}": value for name, value in self.current_data.items()})
        return {name: value.detach().contiguous() for name, value in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> "ActCarry":
        """Invert `to_tensors`."""
        prefix = "current_data."
        data = {name[len(prefix) :]: value.to(device) for name, value in tensors.items() if name.startswith(prefix)}
        return cls(*(tensors[name].to(device) for name in ("z_H", "z_L", "steps", "halted")), current_data=data)

    def split(self, size: int) -> list["ActCarry"]:
        """Split the slots into carries of `size` slots."""
        device = self.steps.device
        parts = {name: value.split(size) for name, value in self.to_tensors().items()}
        return [self.from_tensors(dict(zip(parts, values)), device) for values in zip(*parts.values())]

    @classmethod
    def join(cls, carries: list["ActCarry"]) -> "ActCarry":
        """Invert `split`."""
        parts = [carry.to_tensors() for carry in carries]
        device = carries[0].steps.device
        return cls.from_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, device)


# torch.export only supports registered containers as inputs and outputs.
torch.export.register_dataclass(ActCarry, serialized_type_name=f"{ActCarry.__module__}.{ActCarry.__name__}")


def replace_rows(rows: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return `old` [B, ...] with the rows marked in `rows`, bool [B], replaced with those of `new`."""
    return torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old)


def refill(carry: ActCarry, incoming: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Load a new example into each halted slot and reset the slot's step count to 0.

    Rows of `incoming` at busy slots are ignored; the caller passes them again later.

    Returns:
        The step counts, int32 [B], and the data of all slots.
    """
    halted = carry.halted
    data = {name: replace_rows(halted, incoming[name].to(old.dtype), old) for name, old in carry.current_data.items()}
    return carry.steps.masked_fill(halted, 0), data


def exploration_min_steps(steps: torch.Tensor, halt_max_steps: int, exploration_prob: float) -> torch.Tensor:
    """Draw each slot's minimum number of ACT steps, int32 [B].

    With probability `exploration_prob`, the minimum is uniform in 2..halt_max_steps, otherwise 0. As in the original
    code, a new minimum is drawn at every step: first the Bernoulli variable, then the integer.
    """
    explore = torch.rand(steps.shape, device=steps.device) < exploration_prob
    return explore * torch.randint_like(steps, low=2, high=halt_max_steps + 1)


def wants_to_halt(q_halt: torch.Tensor, q_continue: torch.Tensor | None) -> torch.Tensor:
    """Return a mask of the rows that prefer to halt. HRM compares both Q values, and TRM checks q_halt > 0."""
    return q_halt > 0 if q_continue is None else q_halt > q_continue


def continue_target(next_q_halt: torch.Tensor, next_q_continue: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the target [B] for q_continue, bootstrapped from the next step's Q values (HRM paper, eq. 8)."""
    return torch.sigmoid(torch.where(last, next_q_halt, torch.maximum(next_q_halt, next_q_continue)))


def stablemax_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the stablemax cross entropy [...] of logits x [..., V] and labels [...].

    The loss is -log(s(x_label) / sum s(x)), with s(x) = x + 1 for x >= 0, else 1 / (1 - x); ignored labels give 0.
    The dtype is float64, or float32 on MPS, which lacks float64.
    """
    logits = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
    s = torch.where(logits < 0, 1 / (1 - logits + 1e-30), logits + 1)
    mask = labels != IGNORE_INDEX
    s_label = s.gather(-1, labels.where(mask, 0).long().unsqueeze(-1)).squeeze(-1)
    return torch.where(mask, -torch.log(s_label / s.sum(dim=-1)), 0)


def softmax_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy [...] of logits [..., V] in float32. Ignored labels give 0."""
    flat = F.cross_entropy(
        logits.float().flatten(0, -2), labels.long().flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat.view(labels.shape)


LOSSES = {"stablemax": stablemax_cross_entropy, "softmax": softmax_cross_entropy}


def sequence_correctness(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count correct and labeled positions per row, [B] each. Both are 0 for a row without labels."""
    mask = labels != IGNORE_INDEX
    return (mask & (logits.argmax(dim=-1) == labels)).sum(-1), mask.sum(-1)


def row_mean_loss(loss: torch.Tensor, num_labels: torch.Tensor) -> torch.Tensor:
    """Average a loss [B, S] over the labeled positions in each row (num_labels [B]), then sum over rows."""
    return (loss / num_labels.clamp_min(1).unsqueeze(-1)).sum()


def halting_loss(q_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the binary cross entropy between logits and targets [B], summed over all slots."""
    return F.binary_cross_entropy_with_logits(q_logits, target.to(q_logits.dtype), reduction="sum")


def halted_metrics(
    halted: torch.Tensor,
    steps: torch.Tensor,
    num_correct: torch.Tensor,
    num_labels: torch.Tensor,
    q_halt: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Sum metrics over the halted slots [B] with labels. Dividing the sums by `count` gives means."""
    valid = halted & (num_labels > 0)
    exact = num_correct == num_labels
    return {
        "count": valid.sum(),
        "accuracy": torch.where(valid, num_correct.float() / num_labels.clamp_min(1), 0.0).sum(),
        "exact_accuracy": (valid & exact).sum(),
        "q_halt_accuracy": (valid & ((q_halt >= 0) == exact)).sum(),
        "steps": torch.where(valid, steps, 0).sum(),
    }
