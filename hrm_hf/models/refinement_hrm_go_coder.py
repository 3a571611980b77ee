"""The Go coder's refinement loop: plan, write, validate, decide, repair.

`generate_with_refinement` begins like `generate`. A validator checks each attempt, then the refinement head (in a
unified model, the decision token) decides how to continue. Attempts and feedback stay in the stream while there is
space for another attempt. CONTINUE leads to new code for the same plan, REFINE to a new plan and code for it.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from .generation_hrm_go_coder import CODE, END_CODE, LEAST_CODE, CodeStreamer, Task, for_ids_alone, until
from .processing_hrm_go_coder import (
    CONTINUE,
    DECISION_TOKENS,
    DECISIONS,
    DONE,
    EOS,
    PAD,
    REFINE,
    TOKEN_IDS,
    Feedback,
    context_segment,
    decision_segment,
    encode_text,
    fit_task,
    parse_plan,
    problem_segment,
    validation_segment,
)


@dataclass
class Attempt:
    """One attempt in `generate_with_refinement`.

    Attributes:
        code: the code, including the given beginning.
        plan: the plan for the code, as returned by `parse_plan`.
        feedback: the validator's feedback; None without a validator.
        decision, done_probability: one of DECISIONS, and the probability of DONE.
        new_tokens: number of tokens generated for the code, including </CODE>.
    """

    code: str
    plan: dict[str, Any]
    feedback: Feedback | None
    decision: str
    done_probability: float
    new_tokens: int


@dataclass
class RefinementOutput:
    """Result of `generate_with_refinement`. Every field is a list with one entry per prompt.

    Attributes:
        codes: code of the last attempt that did not fail validation, or of the last attempt if all failed.
        plans: text of each attempt's plan.
        attempts: all attempts in order.
        iterations: number of attempts.
        stopped: "done" (the model's decision), or the limit that was reached: "iterations" or "context".
    """

    codes: list[str]
    plans: list[list[str]]
    attempts: list[list[Attempt]]
    iterations: list[int]
    stopped: list[str]


@dataclass
class _Row(Task):
    """A task and the attempts made so far."""

    attempts: list[Attempt] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    needs_plan: bool = True
    stopped: str | None = None


@dataclass
class RefinementSettings:
    """Settings of `generate_with_refinement`, for the loop and for each call of `generate`."""

    iterations: int
    threshold: float
    tokenizer: Any
    validator: Callable[[Sequence[str]], list[Feedback]] | None
    generation: Any
    kwargs: dict[str, Any]
    budget: int  # maximum number of new tokens per attempt
    streamer: BaseStreamer | None = None  # receives the first attempt token by token

    def __post_init__(self):
        if not 1 <= self.iterations <= 5:
            raise ValueError(f"max_refinement_iterations={self.iterations}: must be in [1, 5]")


class GoCoderRefinementMixin:
    """Mixin that adds `generate_with_refinement` to models with `GoCoderGenerationMixin`."""

    @torch.no_grad()
    def generate_with_refinement(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any,
        validator: Callable[[Sequence[str]], list[Feedback]] | None = None,
        max_refinement_iterations: int | None = None,
        refinement_threshold: float | None = None,
        code_prefixes: Sequence[str] | None = None,
        contexts: Sequence[tuple[str, str]] | None = None,
        streamer: BaseStreamer | None = None,
        **generate_kwargs: Any,
    ) -> RefinementOutput:
        """Plan, write, validate, decide and repair until the model decides it is done or reaches a limit.

        The loop ends when P(DONE) >= `refinement_threshold`, unless validation failed. Otherwise, it takes the more
        likely of CONTINUE (new code for the same plan) and REFINE (a new plan and code for it).

        Args:
            prompts: descriptions of the code.
            tokenizer: the model's tokenizer.
            validator: function that returns a `Feedback` for each code sample of a round; None for no validation.
            max_refinement_iterations: maximum number of attempts, 1 to 5; the config's by default.
            refinement_threshold: minimum P(DONE) to stop; the config's by default.
            code_prefixes: beginning of the code for each prompt, e.g. a signature. All attempts start with it.
            contexts: (path, text) for each prompt. The end of a problem and the middle of a context are truncated to
                the config's budgets.
            streamer: receives the first attempt during generation; only for a single prompt. If a later attempt is
                chosen, that attempt is streamed afterwards. With beam search, only the chosen attempt is streamed.
            generate_kwargs: arguments for each call of `generate`; `max_new_tokens` is the budget of an attempt.
                Logits processors, stopping criteria etc. apply to code, not to plans.

        Raises:
            ValueError: the number of prefixes or contexts differs from that of prompts, a streamer is given with
                several prompts, or the model has no tags.
        """
        rows = self._refinement_rows(prompts, tokenizer, code_prefixes, contexts)
        if streamer is not None and len(rows) != 1:
            raise ValueError(f"streamer: only works with one prompt, got {len(rows)}; remove it")
        generation = copy.deepcopy(generate_kwargs.pop("generation_config", None) or self.generation_config)
        kwargs = generation.update(**generate_kwargs)
        budget, generation.max_length = generation.max_new_tokens or self.config.code_budget, None
        config, live = self.config, streamer if (generation.num_beams or 1) == 1 else None
        settings = RefinementSettings(
            config.max_refinement_iterations if max_refinement_iterations is None else max_refinement_iterations,
            config.refinement_threshold if refinement_threshold is None else refinement_threshold,
            tokenizer, validator, generation, kwargs, budget, live,
        )  # fmt: skip
        for _ in range(settings.iterations):
            self._drop_old_attempts([row for row in rows if row.stopped is None])
            if active := [row for row in rows if row.stopped is None]:
                self._attempt(active, settings)
        passed = [[each for each in row.attempts if not (each.feedback and each.feedback.failed)] for row in rows]
        chosen = [(good or row.attempts)[-1] for good, row in zip(passed, rows)]
        if streamer is not None and (live is None or chosen[0].code != rows[0].attempts[0].code):
            given = tokenizer.decode(rows[0].prefix)  # streamers with skip_prompt drop the first `put`
            for part in (given, chosen[0].code[len(given) :]):
                streamer.put(torch.tensor(encode_text(tokenizer, part)))
            streamer.end()
        return RefinementOutput(
            codes=[attempt.code for attempt in chosen],
            plans=[row.plans for row in rows],
            attempts=[row.attempts for row in rows],
            iterations=[len(row.attempts) for row in rows],
            stopped=[row.stopped or "iterations" for row in rows],
        )

    def _refinement_rows(self, prompts, tokenizer, prefixes, contexts) -> list[_Row]:
        if not self.config.tagged:
            raise ValueError("tagged=False: refinement requires a model with tagged=True")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for name, values in (("code_prefixes", prefixes), ("contexts", contexts)):
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"{name}: {len(values)} values for {len(prompts)} prompts; pass one per prompt")
        budgets = self.config.problem_budget, self.config.context_budget
        rows = []
        for index, prompt in enumerate(prompts):
            context = context_segment(tokenizer, *contexts[index]) if contexts is not None else []
            prefix = encode_text(tokenizer, prefixes[index]) if prefixes is not None else []
            rows.append(_Row(fit_task(problem_segment(tokenizer, prompt), context, *budgets), prefix))
        return rows

    def _drop_old_attempts(self, rows: list[_Row]) -> None:
        """Drop old attempts from streams too long for another attempt. Stop rows that remain too long."""
        for row in rows:
            room = self.config.max_position_embeddings - len(row.prefix) - LEAST_CODE
            if row.attempts and len(row.stream()) > room:
                # Keep the last plan, attempt and feedback, which matter most for the next attempt.
                row.history = [row.plan, *row.history[-2:]]
                row.stopped = "context" if len(row.stream()) > room else None

    # ---- one attempt ----

    def _attempt(self, rows: list[_Row], settings: RefinementSettings) -> None:
        """Write and validate one attempt per row, and decide how to continue."""
        unplanned = [row for row in rows if row.needs_plan]
        if unplanned:
            self._write_plans(unplanned, settings.generation, settings.kwargs)
        for row in unplanned:
            row.history.append(row.plan)
        written = self._write_code(rows, settings)
        feedback = _verdicts(settings.validator, [text for text, _, _ in written])
        for row, (text, segment, new_tokens), found in zip(rows, written, feedback):
            row.history.append(segment)
            self._decide(row, text, new_tokens, found, settings)

    def _write_code(self, rows: list[_Row], settings: RefinementSettings) -> list[tuple[str, list[int], int]]:
        """Write code for each row. Return its text, its ids with the enclosing tags, and the number of new tokens."""
        streamer = None
        if settings.streamer is not None and not rows[0].attempts:
            streamer = CodeStreamer(settings.streamer, torch.tensor(rows[0].prefix, dtype=torch.long))
        prompts = [[*row.stream(), CODE, *row.prefix] for row in rows]
        # Reserve a position for </CODE>, even after truncated code.
        rooms = [min(settings.budget, self.config.max_position_embeddings - len(prompt) - 1) for prompt in prompts]
        allowed = [max(1, room) for room in rooms]
        written = self._continue(
            prompts, for_ids_alone(settings.generation), allowed, {END_CODE}, {END_CODE}, streamer=streamer,
            **settings.kwargs,
        )  # fmt: skip
        results, ends = [], {END_CODE, TOKEN_IDS[EOS], TOKEN_IDS[PAD]}
        for row, new, limit in zip(rows, written[:, max(map(len, prompts)) :].tolist(), allowed):
            code = [*row.prefix, *until(new, ends)[:limit]]
            new_tokens = len(code) - len(row.prefix) + 1
            results.append((settings.tokenizer.decode(code), [CODE, *code, END_CODE], new_tokens))
        return results

    # ---- what follows ----

    def _decide(
        self, row: _Row, text: str, new_tokens: int, feedback: Feedback | None, settings: RefinementSettings
    ) -> None:
        """Decide how to continue after the row's last attempt, record the attempt, and prepare the next step."""
        probabilities = self._decision(row, feedback, text, settings.tokenizer)
        decision = CONTINUE if probabilities[CONTINUE] >= probabilities[REFINE] else REFINE
        if probabilities[DONE] >= settings.threshold and not (feedback is not None and feedback.failed):
            decision, row.stopped = DONE, "done"
        plan = parse_plan(settings.tokenizer, row.plan)
        row.attempts.append(Attempt(text, plan, feedback, DECISIONS[decision], probabilities[DONE], new_tokens))
        row.plans.append(settings.tokenizer.decode(row.plan[1:-1]))
        row.history.append(decision_segment(settings.tokenizer, feedback, decision))
        row.needs_plan = decision == REFINE

    def _decision(self, row: _Row, feedback: Feedback | None, text: str, tokenizer: Any) -> list[float]:
        """Return P(CONTINUE), P(REFINE) and P(DONE) after the attempt at the end of the stream."""
        stream = row.stream()
        if self.model.refinement_head is None:
            stream += validation_segment(tokenizer, feedback)
            ids = torch.tensor([stream[-self.config.max_position_embeddings :]], device=self.device)
            tokens = [TOKEN_IDS[token] for token in DECISION_TOKENS]
            logits = self(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1, tokens]
        else:
            ids = torch.tensor([stream], device=self.device)
            position = torch.tensor([[len(stream) - 1]], device=self.device)
            feedback_ids = (feedback or Feedback()).token_ids(text.count("\n") + 1)
            feedback_ids = torch.tensor([[feedback_ids]], device=self.device)
            output = self.model(input_ids=ids, use_cache=False, decision_positions=position, feedback_ids=feedback_ids)
            logits = output.refinement_logits[0, 0]
        return logits.float().softmax(dim=-1).tolist()


def _verdicts(validator, texts: list[str]) -> list[Feedback | None]:
    if validator is None:
        return [None] * len(texts)
    feedback = list(validator(texts))
    if len(feedback) != len(texts):
        raise ValueError(
            f"validator: returned {len(feedback)} results for {len(texts)} code samples; return one for each"
        )
    return feedback
