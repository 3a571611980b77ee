"""`GoCoderTrainer`: trains the Go coder, or another causal language model, on records of Go tasks."""

from typing import Any

from ..registry import has_ability
from ..text.callbacks import LM_LOG_FORMAT
from ..text.trainer import CausalLMTrainer
from .arguments import LOSS_WEIGHTS, GoTrainingArguments


class GoCoderTrainer(CausalLMTrainer):
    """Trainer for records of Go tasks; see `CausalLMTrainer`. It warms up the refinement loss of a Go coder."""

    arguments_class = GoTrainingArguments
    log_format = LM_LOG_FORMAT | {
        "go/syntax_rate": "code that parses {:6.1%}",
        "go/type_rate": "type-checks {:6.1%}",
    }

    def prepare_model(self, model: Any, args: GoTrainingArguments) -> None:
        """Writes the loss weights of a run into the model's config. Raises ValueError if it has none."""
        super().prepare_model(model, args)
        for name in LOSS_WEIGHTS:
            value = getattr(args, name)
            if value is None:
                continue
            if not has_ability(model, "refinement"):
                raise ValueError(f"{name}={value}: {type(model).__name__} has no such weight; leave the option out")
            setattr(model.config, name, value)

    def compute_loss(self, model, inputs, *args: Any, **kwargs: Any):
        """As in the base; in training the refinement loss has the scale of its step."""
        if model.training and has_ability(self.model, "refinement"):
            scale = refinement_scale(self.state.global_step, self.args.refinement_warmup, self.args.refinement_ramp)
            inputs = {**inputs, "refinement_scale": scale}
        return super().compute_loss(model, inputs, *args, **kwargs)


def refinement_scale(step: int, warmup: int, ramp: int) -> float:
    """Factor of the refinement loss in the step after `step` steps: 0 for `warmup` steps, then linear to 1 in `ramp`."""
    if step < warmup:
        return 0.0
    return min(1.0, (step + 1 - warmup) / ramp) if ramp else 1.0
