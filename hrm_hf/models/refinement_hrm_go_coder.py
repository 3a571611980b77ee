"""The Go coder's loop of attempts: plan, write, validate, decide, repair.

`generate_with_refinement` begins as `generate` does. A validator checks each attempt, then the refinement head (or, in
a unified model, the decision token) decides. Attempt and verdict stay in the stream of the next attempt, while there
is room. CONTINUE is followed by new code for the same plan, REFINE by a new plan and code for it.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from .generation_hrm_go_coder import (
    CODE,
    END_CODE,
    LEAST_CODE,
    CodeStreamer,
    Task,
    for_ids_alone,
    until,
)
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
    """One attempt of `generate_with_refinement`.

    Attributes:
        code: the code, its given beginning included.
        plan: its plan, as `parse_plan` returns it.
        feedback: verdict of the validator; None without one.
        decision, done_probability: one of DECISIONS, and the probability of DONE.
        new_tokens: tokens written for its code, </CODE> included.
    """

    code: str
    plan: dict[str, Any]
    feedback: Feedback | None
    decision: str
    done_probability: float
    new_tokens: int


@dataclass
class RefinementOutput:
    """Result of `generate_with_refinement`, with a list entry for each prompt.

    Attributes:
        codes: code of the last attempt whose feedback has no failure, else of the last attempt.
        plans: text of the plan of each attempt.
        attempts: all attempts in order.
        iterations: number of attempts.
        stopped: "done" (by the model's decision), "iterations" or "context" (a limit was reached).
    """

    codes: list[str]
    plans: list[list[str]]
    attempts: list[list[Attempt]]
    iterations: list[int]
    stopped: list[str]


@dataclass
class _Row(Task):
    """A task and its attempts so far."""

    attempts: list[Attempt] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    needs_plan: bool = True
    stopped: str | None = None


@dataclass
class RefinementSettings:
    """Settings of `generate_with_refinement`: of its loop, and of each stage as for `generate`."""

    iterations: int
    threshold: float
    tokenizer: Any
    validator: Callable[[Sequence[str]], list[Feedback]] | None
    generation: Any
    kwargs: dict[str, Any]
    budget: int  # new tokens of an attempt
    streamer: BaseStreamer | None = None  # of the first attempt, token by token

    def __post_init__(self):
        if not 1 <= self.iterations <= 5:
            raise ValueError(f"max_refinement_iterations={self.iterations}: must be in 1..5")


class GoCoderRefinementMixin:
    """`generate_with_refinement` of `HrmGoCoderForCausalLM`, which also needs `GoCoderGenerationMixin`."""

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
        """Plan, write, validate, decide and repair, until done or out of budget.

        P(DONE) >= `refinement_threshold` ends the attempts, unless the validator found a failure. Otherwise the
        likelier of CONTINUE (new code for the same plan) and REFINE (a new plan and code for it) follows.

        Args:
            prompts: descriptions of the code.
            tokenizer: tokenizer of the model.
            validator: returns a `Feedback` for each new code sample of a round; None leaves all to the model.
            max_refinement_iterations: most attempts, 1 to 5; the config's by default.
            refinement_threshold: the config's by default.
            code_prefixes: beginning of each code sample (a signature), part of every attempt; empty by default.
            contexts: (path, text) of each prompt. The end of a problem and the middle of a context are truncated to
                the config's budgets.
            streamer: gets the first attempt of a single prompt while it is written, then its end. If another attempt
                is chosen, it follows as a text of its own. With beams it gets the chosen attempt alone.
            generate_kwargs: as for `generate`, for each stage; `max_new_tokens` is the budget of an attempt. Logits
                processors, stopping criteria and the like apply to code, not to plans.

        Raises:
            ValueError: prefixes or contexts that are not one for each prompt; a streamer with several prompts; a model
                without tags.
        """
        rows = self._refinement_rows(prompts, tokenizer, code_prefixes, contexts)
        if streamer is not None and len(rows) != 1:
            raise ValueError(f"streamer: shows one prompt, not {len(rows)}; leave it out")
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
            given = tokenizer.decode(rows[0].prefix)  # a part of its own, which a streamer may skip
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
            raise ValueError("tagged=False: refinement needs a model with tags in its config")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for name, values in (("code_prefixes", prefixes), ("contexts", contexts)):
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"{name}: {len(values)} given for {len(prompts)} prompts; give one for each")
        budgets = self.config.problem_budget, self.config.context_budget
        rows = []
        for index, prompt in enumerate(prompts):
            context = context_segment(tokenizer, *contexts[index]) if contexts is not None else []
            prefix = encode_text(tokenizer, prefixes[index]) if prefixes is not None else []
            rows.append(_Row(fit_task(problem_segment(tokenizer, prompt), context, *budgets), prefix))
        return rows

    def _drop_old_attempts(self, rows: list[_Row]) -> None:
        """Forget old attempts of a stream that is too long for another one; stop rows that are still too long."""
        for row in rows:
            room = self.config.max_position_embeddings - len(row.prefix) - LEAST_CODE
            if row.attempts and len(row.stream()) > room:
                # The next attempt mostly needs the last plan, attempt and verdict.
                row.history = [row.plan, *row.history[-2:]]
                row.stopped = "context" if len(row.stream()) > room else None

    # ---- one attempt ----

    def _attempt(self, rows: list[_Row], settings: RefinementSettings) -> None:
        """Write, validate and decide on one attempt of each row."""
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
        """Write code for each row: as text, as a segment, and the number of new tokens."""
        streamer = None
        if settings.streamer is not None and not rows[0].attempts:
            streamer = CodeStreamer(settings.streamer, torch.tensor(rows[0].prefix, dtype=torch.long))
        prompts = [[*row.stream(), CODE, *row.prefix] for row in rows]
        # </CODE> needs a position too, also after truncated code.
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
        """Record the attempt that ends the row's stream, and prepare the row for the model's decision."""
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
        """Return the probabilities of CONTINUE, REFINE and DONE after the attempt that ends the row's stream."""
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
        raise ValueError(f"validator: gave {len(feedback)} verdicts for {len(texts)} codes; return one for each")
    return feedback
