"""Settings of `model.solve` for puzzles. The module avoids importing torch, to keep the command line fast."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin


DEFAULT_NOISE = 0.2  # default std of the noise for restarts; initial latent states have a std of 1


def _setting(help: str, default: Any, min: float | None = None, max: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "min": min, "max": max})


@dataclass(kw_only=True)
class SolveSettings:
    """Settings for solving a batch of boards. Each field has help text and inclusive bounds.

    Notes:
        min_confidence: a model prefers to halt once its answer is probably correct; a higher threshold costs more
            steps and makes answers more accurate.
        halt: with "fixed", all boards take `max_steps`, as in the evaluation of the original code.
        noise: defaults to 0.2 with restarts, unless the model itself draws random numbers, and otherwise to 0.
        restarts: a board is not run again if no further run could change its answer.
        choose: see `AnswerPool`. With "rules", a run ends at the first step whose answer the rules accept.
        exit_when_still: threshold for `PuzzleSolution.residual`, also with halt="fixed". With noise at every step,
            the residual never falls below the noise.
    """

    max_steps: int | None = _setting(
        "Maximum number of steps. [default: the config's halt_max_steps; more steps can help]", None, 1
    )
    min_steps: int = _setting("Minimum number of steps.", 1, 1)
    min_confidence: float = _setting("Minimum confidence, sigmoid(q_halt), at which to stop.", 0.0, 0, 1)
    halt: Literal["q", "fixed"] = _setting("q: stop when the model prefers to halt; fixed: use all steps.", "q")
    restarts: int = _setting("Runs per puzzle; all runs but the first add noise.", 1, 1)
    noise: float | None = _setting("Std of the noise. [default: 0.2 if restarts need it, else 0]", None, 0)
    noise_at: Literal["start", "every_step"] = _setting(
        "start: add noise to the initial states; every_step: add it before every step.", "start"
    )
    choose: Literal["q", "residual", "vote", "rules"] = _setting(
        "Answer to keep: highest q, smallest residual, most votes, or the first that obeys the rules.", "q"
    )
    exit_when_still: float | None = _setting(
        "Also stop when the last steps change the state by less than this fraction of its norm, e.g. 0.001.",
        None,
        0,
        1,
    )

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that is out of bounds or an invalid choice."""
        for each in fields(SolveSettings):
            value, low, high = getattr(self, each.name), each.metadata["min"], each.metadata["max"]
            if get_origin(each.type) is Literal:
                valid, expected = value in get_args(each.type), f"one of {get_args(each.type)}"
            else:
                valid = value is None or low <= value <= (math.inf if high is None else high)
                expected = f">= {low}" if high is None else f"in [{low}, {high}]"
            if not valid:
                raise ValueError(f"{each.name}={value!r}: must be {expected}")

    def resolved(self, config: Any) -> "SolveSettings":
        """Return a copy with missing values filled in from the config.

        Raises:
            ValueError: min_steps exceeds max_steps, or all restarts would give the same answer.
        """
        max_steps = config.halt_max_steps if self.max_steps is None else self.max_steps
        if self.min_steps > max_steps:
            raise ValueError(f"min_steps={self.min_steps}: must be <= max_steps={max_steps}")
        needs_noise = self.restarts > 1 and not config.draws_random_numbers
        noise = (DEFAULT_NOISE if needs_noise else 0.0) if self.noise is None else self.noise
        if needs_noise and not noise:
            raise ValueError(f"noise={noise}, restarts={self.restarts}: all runs would be identical; use noise > 0")
        min_confidence = max(self.min_confidence, config.halt_confidence)
        return replace(self, max_steps=max_steps, noise=noise, min_confidence=min_confidence)
