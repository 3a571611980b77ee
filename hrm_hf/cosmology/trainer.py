"""Trainers for cosmological parameter regression and mass mapping.

A model returns a loss that is a mean over its batch, and optionally `*_loss` parts and `metrics` that are also means.
Every logged value is a mean over the maps (not tokens) of all processes; `mse_<name>` is logged as `rmse_<name>`.
"""

import math
from typing import Any

import torch
from torch.nn.functional import pad

from ..trainer.base import HrmTrainer
from .arguments import CosmoTrainingArguments, MassMapTrainingArguments


PREDICTED = ("logits", "std", "s_8", "s_8_std")  # model outputs that `predict` returns, if present
MSE, RMSE = "mse_", "rmse_"


class RegressionTrainer(HrmTrainer):
    """Trainer for regression models (`config.problem_type` "regression") with labels [B, T]."""

    arguments_class = CosmoTrainingArguments
    pipeline = "cosmology-regression"
    log_format = {
        "loss": "loss {:7.4f}",
        "nll_loss": "nll {:7.4f}",
        "rmse_omega_m": "rmse Omega_m {:.4f}",
        "rmse_s_8": "S_8 {:.4f}",
        "learning_rate": "lr {:.2e}",
        "maps_per_second": "{:7,.1f} maps/s",
        "nonfinite_steps": "skipped {}",
        "eval_nll_loss": "held-out nll {:7.4f}",
        "eval_rmse_omega_m": "rmse Omega_m {:.4f}",
        "eval_rmse_sigma_8": "sigma_8 {:.4f}",
        "eval_rmse_s_8": "S_8 {:.4f}",
        "eval_z_squared": "z^2 {:.3f}",
    }
    _rows_counted: int | None = None

    def validate_arguments(self) -> None:
        """Reject label smoothing, which is meaningless for regression."""
        super().validate_arguments()
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor}: must be 0; regression has no classes"
            )
        # `compute_loss` already divides by the number of maps in the step, so Trainer must not scale the loss again.
        self.model_accepts_loss_kwargs, self.loss_is_scaled_for_ga = False, True

    # ---- one step ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the model's loss, scaled during training so that the loss of a step is the mean over its maps."""
        outputs = model(**inputs)
        loss, maps = outputs["loss"], len(inputs["labels"])
        if model.training:
            self.train_metrics.add(_sums(loss, outputs, maps))
        elif self._eval_metrics is not None:
            # A process with only repeated maps adds zeros, because all processes must have sums with the same keys.
            self._eval_metrics.add(_sums(loss, outputs, 0 if self._rows_counted == 0 else maps))
        if num_items_in_batch is not None:  # DDP averages the gradients over processes
            loss = loss * (maps * self.accelerator.num_processes / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        if not batch_samples:
            return None
        maps = torch.tensor(float(sum(len(batch["labels"]) for batch in batch_samples)), device=device)
        return self.accelerator.reduce(maps, "sum") if self.args.world_size > 1 else maps

    def floating_point_ops(self, inputs) -> int:
        """Return 0 FLOPs, because transformers' formula for dense models does not apply."""
        return 0

    # ---- logging ----

    def _training_logs(self, sums: dict[str, float], steps: int, seconds: float) -> dict[str, float]:
        maps = sums.pop("maps", 0.0)
        logs = {"maps_per_second": maps / seconds}
        if maps:
            logs |= _means(sums, maps)
            del logs["loss"]  # Trainer already logs the loss, as a mean over steps
        return logs

    # ---- evaluation ----

    def _evaluation_means(self, sums: dict[str, float], prefix: str) -> dict[str, float]:
        maps = sums.pop("maps")
        return {f"{prefix}_{name}": value for name, value in (_means(sums, maps) | {"maps": int(maps)}).items()}

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Evaluate a batch as `Trainer` does, but exclude maps that accelerate repeats to fill the last batch.

        `predict` receives posterior means and standard deviations of the targets [N, T] and of s_8 [N].
        """
        inputs = self._prepare_inputs(inputs)
        rows = len(inputs["pixel_values"])
        counting = self._rows_counted = self._rows_that_count(rows)
        kept = {name: value[:counting] for name, value in inputs.items()} if counting else inputs
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, kept, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        # Pad to the same number of rows in every process; the repeated rows are dropped after gathering.
        found = [outputs[name] for name in PREDICTED if name in outputs]
        predicted = tuple(pad(value, (0, 0) * (value.dim() - 1) + (0, rows - len(value))) for value in found)
        return loss, predicted, inputs["labels"]


class MassMapTrainer(RegressionTrainer):
    """Trainer for mass mappers, whose batches also contain the true convergence.

    `rmse_kappa` in the log is the pixel RMSE of the maps divided by the standard deviation of the training maps.
    """

    arguments_class = MassMapTrainingArguments
    pipeline = "mass-mapping"
    log_format = {
        "loss": "loss {:7.4f}",
        "map_loss": "map {:7.4f}",
        "harmonic_loss": "modes {:7.4f}",
        "rmse_kappa": "error {:.4f}",
        **RegressionTrainer.log_format,
        "eval_map_loss": "held-out map {:7.4f}",
        "eval_rmse_kappa": "error {:.4f}",
    }


def _sums(loss: torch.Tensor, outputs: Any, maps: int) -> dict[str, torch.Tensor]:
    """Return the contribution of a batch to the sums over maps, in double precision."""
    parts = {n: v for n, v in outputs.items() if n.endswith("_loss") and torch.is_tensor(v)}
    terms = {"loss": loss, **parts, **(outputs.get("metrics") or {})}
    counted = torch.tensor(maps, dtype=torch.float64, device=loss.device)
    return {name: value.detach().double() * maps for name, value in terms.items()} | {"maps": counted}


def _means(sums: dict[str, float], maps: float) -> dict[str, float]:
    """Compute means over maps, and replace each `mse_<name>` that is not a loss with its root, `rmse_<name>`."""
    means = {name: value / maps for name, value in sums.items()}
    squared = [name for name in means if name.startswith(MSE) and not name.endswith("_loss")]
    roots = {RMSE + name.removeprefix(MSE): math.sqrt(means.pop(name)) for name in squared}
    return means | roots
