"""`GoCoderTrainer`: trains the Go coder, or another causal language model, on records of Go tasks."""

from typing import Any

from ..registry import has_ability
from ..text.callbacks import LM_LOG_FORMAT
from ..text.trainer import CausalLMTrainer
from .arguments import LOSS_WEIGHTS, GoTrainingArguments
from .callbacks import RefinementWarmupCallback


class GoCoderTrainer(CausalLMTrainer):
    """Trainer for records of Go tasks; see `CausalLMTrainer`. A loss of repairs is warmed up."""

    arguments_class = GoTrainingArguments
    log_format = LM_LOG_FORMAT | {
        "go/syntax_rate": "code that parses {:6.1%}",
        "go/type_rate": "type-checks {:6.1%}",
    }

    def __init__(self, model: Any = None, args: GoTrainingArguments | None = None, *others: Any, **kwargs: Any):
        super().__init__(model, args, *others, **kwargs)
        if has_ability(self.model, "refinement"):
            self.add_callback(RefinementWarmupCallback(args.refinement_warmup, args.refinement_ramp))

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
