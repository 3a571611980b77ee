"""`GoCoderTrainer`: trains the Go coder, or another causal language model, on records of Go tasks."""

from typing import Any, Protocol, runtime_checkable

from transformers.trainer_utils import unwrap_peft_model

from ..text.callbacks import LM_LOG_FORMAT
from ..text.trainer import CausalLMTrainer
from .arguments import LOSS_WEIGHTS, GoTrainingArguments
from .callbacks import RefinementWarmupCallback


@runtime_checkable
class Refinement(Protocol):
    """A model that learns which attempts to repair, with a loss whose weight follows the progress of a run."""

    def set_refinement_scale(self, scale: float) -> None: ...


class GoCoderTrainer(CausalLMTrainer):
    """Trainer for records of Go tasks; see `CausalLMTrainer`. With `Refinement`, that is warmed up."""

    arguments_class = GoTrainingArguments
    log_format = LM_LOG_FORMAT | {
        "go/syntax_rate": "code that parses {:6.1%}",
        "go/type_rate": "type-checks {:6.1%}",
    }

    def __init__(self, model: Any = None, args: GoTrainingArguments | None = None, *others: Any, **kwargs: Any):
        super().__init__(model, args, *others, **kwargs)
        if isinstance(unwrap_peft_model(self.model), Refinement):
            self.add_callback(RefinementWarmupCallback(args.refinement_warmup, args.refinement_ramp))

    def prepare_model(self, model: Any, args: GoTrainingArguments) -> None:
        """Writes the loss weights of a run into the model's config. Raises ValueError if it has none."""
        for name in LOSS_WEIGHTS:
            value = getattr(args, name)
            if value is None:
                continue
            if not isinstance(unwrap_peft_model(model), Refinement):
                raise ValueError(f"{name}={value}: {type(model).__name__} has no such weight; leave the option out")
            setattr(model.config, name, value)
