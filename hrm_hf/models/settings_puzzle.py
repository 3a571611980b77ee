"""Settings of `model.solve` for puzzles. Imports no torch: the command line reads its options from here."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin


DEFAULT_NOISE = 0.2  # of restarts; the initial latent states themselves have a std of 1


def _setting(help: str, default: Any, min: float | None = None, max: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "min": min, "max": max})


@dataclass(kw_only=True)
class SolveSettings:
    """How a puzzle model solves a batch of boards; each field's metadata has its help and its inclusive bounds.

    Notes:
        min_confidence: a model prefers to halt when the answer is more likely right than not; a higher bar trades
            steps for accuracy.
        halt: with "fixed", all boards take `max_steps`, as in the original's evaluation.
        noise: the default is 0.2 with restarts, unless the model itself draws random numbers.
        restarts: a board whose answer no further run can change gets no further run.
        choose: see `AnswerPool`. With "rules", a run ends at the first step whose answer the rules accept.
        exit_when_still: compared with `PuzzleSolution.residual`, with halt="fixed" too. With noise at every step, no
            state is stiller than the noise.
    """

    max_steps: int | None = _setting(
        "Most steps, halt_max_steps of the config by default; more than trained may help.", None, 1
    )
    min_steps: int = _setting("Fewest steps.", 1, 1)
    min_confidence: float = _setting("Lowest confidence, sigmoid(q_halt), at which to stop.", 0.0, 0, 1)
    halt: Literal["q", "fixed"] = _setting("q: stop when the model prefers to; fixed: use all steps.", "q")
    restarts: int = _setting("Runs of each puzzle; all but the first have noise.", 1, 1)
    noise: float | None = _setting("Std of the noise. [default: 0.2, where it is needed]", None, 0)
    noise_at: Literal["start", "every_step"] = _setting(
        "Add the noise to the initial states, or before every step.", "start"
    )
    choose: Literal["q", "residual", "vote", "rules"] = _setting(
        "Run to keep: the most confident, the stillest, the most frequent answer, or the first that obeys the rules.",
        "q",
    )
    exit_when_still: float | None = _setting(
        "Also stop when the last steps move the state by less than this share of its norm, such as 0.001.", None, 0, 1
    )

    def __post_init__(self) -> None:
        """Raise ValueError for the first value outside of its bounds or choices."""
        for each in fields(SolveSettings):
            value, low, high = getattr(self, each.name), each.metadata["min"], each.metadata["max"]
            if get_origin(each.type) is Literal:
                valid, expected = value in get_args(each.type), f"one of {get_args(each.type)}"
            else:
                valid = value is None or low <= value <= (math.inf if high is None else high)
                expected = f"at least {low}" if high is None else f"in [{low}, {high}]"
            if not valid:
                raise ValueError(f"{each.name}={value!r}: must be {expected}")

    def resolved(self, config: Any) -> "SolveSettings":
        """Return a copy with the config's values where none are given.

        Raises:
            ValueError: more steps are required than allowed, or all restarts would give the same answer.
        """
        max_steps = config.halt_max_steps if self.max_steps is None else self.max_steps
        if self.min_steps > max_steps:
            raise ValueError(f"min_steps={self.min_steps}: must be at most max_steps={max_steps}")
        needs_noise = self.restarts > 1 and not config.draws_random_numbers
        noise = (DEFAULT_NOISE if needs_noise else 0.0) if self.noise is None else self.noise
        if needs_noise and not noise:
            raise ValueError(f"noise={noise}: all restarts={self.restarts} would give the same answer; use noise > 0")
        min_confidence = max(self.min_confidence, config.halt_confidence)
        return replace(self, max_steps=max_steps, noise=noise, min_confidence=min_confidence)
