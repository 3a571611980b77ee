"""The part of `HrmTrainer` for regressors on maps (`config.problem_type` "regression"): means over maps, not tokens.

Data that end, finite steps, averaged weights and resuming are those of all models without a carry; here is what is
counted. A model returns a loss that is a mean over its batch, maybe `*_loss` parts and `metrics` that are too; every
figure in the log and of an evaluation is the mean over all maps of all processes, and a `mse_<name>` is shown as
`rmse_<name>`. Every override leaves other models to the next class.
"""

import math
from typing import Any

import torch
from torch.nn.functional import pad


PREDICTED = ("logits", "std")  # what `predict` returns
MSE, RMSE = "mse_", "rmse_"


class RegressionTraining:
    """Overrides of Trainer's methods for a model whose labels are numbers [B, T], not tokens."""

    has_regression: bool
    _rows_counted: int | None = None

    # ---- one step ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The model's loss; in training so that a step is the mean over its maps, whatever they were divided into."""
        if not self.has_regression:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs)
        loss, maps = outputs["loss"], len(inputs["labels"])
        if model.training:
            self.meter.add(_sums(loss, outputs, maps))
        elif self._eval_meter is not None:
            # With repeated maps alone a process adds zeros: all must have the same sums to add up.
            self._eval_meter.add(_sums(loss, outputs, 0 if self._rows_counted == 0 else maps))
        if num_items_in_batch is not None:  # DDP takes the mean over processes
            loss = loss * (maps * self.accelerator.num_processes / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        """Maps of an optimizer step, over accumulated batches and processes."""
        if not self.has_regression:
            return super()._get_num_items_in_batch(batch_samples, device)
        if not batch_samples:
            return None
        maps = torch.tensor(float(sum(len(batch["labels"]) for batch in batch_samples)), device=device)
        return self.accelerator.reduce(maps, "sum") if self.args.world_size > 1 else maps

    def floating_point_ops(self, inputs) -> int:
        """Not counted: the formula for dense transformers would be wrong."""
        return 0 if self.has_regression else super().floating_point_ops(inputs)

    # ---- logging ----

    def _training_logs(self, sums: dict[str, float], steps: int, seconds: float) -> dict[str, float]:
        """Means over the maps of all processes since the last log, and speed."""
        if not self.has_regression:
            return super()._training_logs(sums, steps, seconds)
        maps = sums.pop("maps", 0.0)
        logs = {"maps_per_second": maps / seconds}
        if maps:
            logs |= _means(sums, maps)
            del logs["loss"]  # the library logs it, as a mean over steps
        return logs

    # ---- evaluation ----

    def _evaluation_means(self, sums: dict[str, float], prefix: str) -> dict[str, float]:
        if not self.has_regression:
            return super()._evaluation_means(sums, prefix)
        maps = sums.pop("maps")
        return {f"{prefix}_{name}": value for name, value in (_means(sums, maps) | {"maps": int(maps)}).items()}

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As in the library; maps that accelerate repeats to give each process as many are not counted twice.

        `predict` gets posterior means and standard deviations.
        """
        if not self.has_regression:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        rows = len(inputs["pixel_values"])
        counting = self._rows_counted = self._rows_that_count(rows)
        kept = {name: value[:counting] for name, value in inputs.items()} if counting else inputs
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, kept, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        # Processes gather as many rows of each, and drop the repeated ones afterwards.
        predicted = tuple(pad(outputs[name], (0, 0, 0, rows - len(outputs[name]))) for name in PREDICTED)
        return loss, predicted, inputs["labels"]


def _sums(loss: torch.Tensor, outputs: Any, maps: int) -> dict[str, torch.Tensor]:
    """What a batch adds to the sums over maps, in double precision."""
    parts = {n: v for n, v in outputs.items() if n.endswith("_loss") and torch.is_tensor(v)}
    terms = {"loss": loss, **parts, **(outputs.get("metrics") or {})}
    counted = torch.tensor(maps, dtype=torch.float64, device=loss.device)
    return {name: value.detach().double() * maps for name, value in terms.items()} | {"maps": counted}


def _means(sums: dict[str, float], maps: float) -> dict[str, float]:
    """Means over maps, and roots of the mean squared errors that are named after a parameter."""
    means = {name: value / maps for name, value in sums.items()}
    squared = [name for name in means if name.startswith(MSE) and not name.endswith("_loss")]
    roots = {RMSE + name.removeprefix(MSE): math.sqrt(means.pop(name)) for name in squared}
    return means | roots
