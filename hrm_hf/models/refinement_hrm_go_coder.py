"""The Go coder's loop of attempts: plan, write, have it validated, decide, repair.

`generate_with_refinement` begins as `generate` does. After an attempt a validator looks, the refinement head (or, in a
unified model, the decision token) decides, and the attempt and the verdict are in the stream when the next one is
written. REFINE is followed by a new plan and whole code. What follows CONTINUE is the repair mode's:

    rewrite   whole code for the same plan; earlier attempts stay in the stream while there is room
    edits     edits of the attempt (`edits_hrm_go_coder.py`); what they make of it takes the place of both in the
              stream, which is always task, plan, attempt and verdict
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from .edits_hrm_go_coder import AFTER, APPLIED, BEFORE, REPAIR_MODES, Edit, apply_edits, parse_edits
from .generation_hrm_go_coder import (
    CODE,
    END_CODE,
    LEAST_CODE,
    CodeStreamer,
    Task,
    for_ids_alone,
    for_no_code,
    inside,
    until,
)
from .processing_hrm_go_coder import (
    BOS,
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
    cut_end,
    cut_middle,
    encode_text,
    parse_plan,
    problem_segment,
    validation_segment,
)
from .quotations_hrm_go_coder import QuotedLines


@dataclass
class Attempt:
    """One attempt: its code with the given beginning, the plan it followed, what was said of it and decided.

    Attributes:
        done_probability: of the decision DONE.
        new_tokens: what was written for it, code or edits, with </CODE>.
        edits: the edits that a repair consists of; None for whole code, and for edits that could not be read.
        outcome: what became of them, one of OUTCOMES of `edits_hrm_go_coder.py`; None for whole code. With any but
            "applied", `code`, `feedback` and decision are those of the attempt before.
    """

    code: str
    plan: dict[str, Any]
    feedback: Feedback | None
    decision: str
    done_probability: float
    new_tokens: int
    edits: list[Edit] | None = None
    outcome: str | None = None


@dataclass
class RefinementOutput:
    """Result of `generate_with_refinement`, a list entry for each prompt.

    Attributes:
        codes: the attempt that was chosen: the last one whose feedback has no failure, else the last.
        plans: the text of each attempt's plan.
        attempts: all attempts in order.
        iterations: their number.
        stopped: "done" (the model decided so), "iterations", "tokens" or "context" (a limit was reached), "unchanged"
            (edits left the attempt as it was, and without sampling the next ones would be the same).
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
class _Draft:
    """Code as it was written, or as edits made it, and nobody has looked at it."""

    text: str
    segment: list[int]
    new_tokens: int
    edits: list[Edit] | None = None
    outcome: str | None = None

    @property
    def is_new(self) -> bool:
        return self.outcome in (None, APPLIED)


@dataclass
class _Request:
    """A call: `settings` and `kwargs` of each stage, `budget` of an attempt in tokens, `most` of a row in all."""

    tokenizer: Any
    validator: Callable[[Sequence[str]], list[Feedback]] | None
    settings: Any
    kwargs: dict[str, Any]
    budget: int
    most: int | None
    threshold: float
    edits: bool
    streamer: BaseStreamer | None = None  # of the first attempt, token by token

    def verdict(self, feedback: Feedback | None, text: str) -> list[int]:
        """A verdict in the stream; a model of edits is shown the line that is to be found."""
        return validation_segment(self.tokenizer, feedback, text if self.edits else None)


class GoCoderRefinementMixin:
    """`generate_with_refinement` of `HrmGoCoderForCausalLM`, beside `GoCoderGenerationMixin`, with which it writes."""

    @torch.no_grad()
    def generate_with_refinement(
        self,
        prompts: Sequence[str] | None = None,
        *,
        tokenizer: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        validator: Callable[[Sequence[str]], list[Feedback]] | None = None,
        max_refinement_iterations: int | None = None,
        refinement_threshold: float | None = None,
        repair_mode: str | None = None,
        max_total_new_tokens: int | None = None,
        code_prefixes: Sequence[str] | None = None,
        contexts: Sequence[tuple[str, str]] | None = None,
        streamer: BaseStreamer | None = None,
        generation_config=None,
        **generate_kwargs: Any,
    ) -> RefinementOutput:
        """Plans, writes, has the attempt validated, decides, and repairs, until done or out of budget.

        After an attempt P(DONE) >= `refinement_threshold` ends it, unless the validator found a failure. Otherwise the
        likelier of CONTINUE (a repair for the same plan) and REFINE (a new plan, and code for it) follows. Finished
        rows leave the batch. Edits that leave the attempt as it was count as an attempt, and nobody is asked again.

        Args:
            prompts: what is to be written; or `input_ids`, as for `generate`.
            tokenizer: of the model.
            validator: gets the codes of a round that are new and returns a `Feedback` for each; None leaves all to
                the model.
            max_refinement_iterations: most attempts, 1 to 5; the config's by default.
            refinement_threshold: the config's by default.
            repair_mode: "rewrite" or "edits"; the config's by default, which is what the model was trained for.
            max_total_new_tokens: of all plans and attempts of a row; unlimited by default.
            code_prefixes: how each code begins (a signature), part of every attempt; empty by default with `prompts`.
            contexts: (path, text) that the code is written for. The end of a problem and the middle of a context are
                cut to the config's budgets.
            streamer: gets the first attempt of a single prompt while it is written, and is ended with it. If another
                one is chosen, that follows as a text of its own, ended again. Beams show nothing while they are
                searched: then it gets the chosen attempt alone.
            generation_config, generate_kwargs: of each stage, as for `generate` (`repetition_guard` among them);
                `max_new_tokens` is of an attempt. Logits processors, stopping criteria and the like are of whole codes
                alone: plans are no code, and lines that edits quote are fragments.

        Raises:
            ValueError: neither or both of prompts and input_ids; a number of prefixes that is not that of prompts; a
                streamer with several prompts; tokens that the model was not made for; an unknown repair mode.
        """
        iterations = self.config.max_refinement_iterations
        iterations = iterations if max_refinement_iterations is None else max_refinement_iterations
        if not 1 <= iterations <= 5:
            raise ValueError(f"max_refinement_iterations={iterations} is outside 1..5")
        mode = self.config.repair_mode if repair_mode is None else repair_mode
        if mode not in REPAIR_MODES:
            raise ValueError(f"repair_mode={mode!r} is not one of {', '.join(REPAIR_MODES)}")
        threshold = self.config.refinement_threshold if refinement_threshold is None else refinement_threshold
        rows = self._refinement_rows(prompts, input_ids, attention_mask, tokenizer, code_prefixes, contexts)
        if streamer is not None and len(rows) != 1:
            raise ValueError(f"a streamer shows one prompt, not {len(rows)}")
        settings = copy.deepcopy(generation_config if generation_config is not None else self.generation_config)
        kwargs = settings.update(**generate_kwargs)
        settings.max_length, budget = None, settings.max_new_tokens or self.config.code_budget
        live = streamer if (settings.num_beams or 1) == 1 else None
        request = _Request(
            tokenizer, validator, settings, kwargs, budget, max_total_new_tokens, threshold, mode == "edits", live
        )
        for _ in range(iterations):
            self._stop_at_limits([row for row in rows if row.stopped is None], max_total_new_tokens)
            active = [row for row in rows if row.stopped is None]
            if not active:
                break
            self._attempt(active, request)
        for row in rows:
            row.stopped = row.stopped or "iterations"
        chosen = [_chosen(row.attempts) for row in rows]
        if streamer is not None and (live is None or chosen[0].code != rows[0].attempts[0].code):
            # In two parts, as from `generate`: what was given, which a streamer may skip, and what was written.
            given = tokenizer.decode(rows[0].prefix)
            for part in (given, chosen[0].code[len(given) :]):
                streamer.put(torch.tensor(encode_text(tokenizer, part)))
            streamer.end()
        return RefinementOutput(
            codes=[attempt.code for attempt in chosen],
            plans=[row.plans for row in rows],
            attempts=[row.attempts for row in rows],
            iterations=[len(row.attempts) for row in rows],
            stopped=[row.stopped for row in rows],
        )

    def _refinement_rows(self, prompts, input_ids, attention_mask, tokenizer, prefixes, contexts) -> list[_Row]:
        if not self.config.tagged:
            raise ValueError("refinement needs a model with tags; this one has tagged=False in its config")
        if (prompts is None) == (input_ids is None):
            raise ValueError("give either prompts (texts) or input_ids")
        if input_ids is not None:
            tasks = self._tasks(input_ids, attention_mask)
            if tasks is None:
                raise ValueError(
                    "input_ids are tagged streams; refinement starts from a problem without plan and code"
                )
            return [_Row(task.head, task.prefix) for task in tasks]
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for name, values in (("code_prefixes", prefixes), ("contexts", contexts)):
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts; give one for each")
        rows = []
        for index, prompt in enumerate(prompts):
            problem = cut_end(problem_segment(tokenizer, prompt), self.config.problem_budget)
            context = context_segment(tokenizer, *contexts[index]) if contexts is not None else []
            context = cut_middle(context, self.config.context_budget)
            prefix = encode_text(tokenizer, prefixes[index]) if prefixes is not None else []
            rows.append(_Row([TOKEN_IDS[BOS], *problem, *context], prefix))
        return rows

    def _stop_at_limits(self, rows: list[_Row], most: int | None) -> None:
        """Forgets old attempts of a stream that is too long for another one, and stops rows without any room left."""
        for row in rows:
            room = self.config.max_position_embeddings - len(row.prefix) - LEAST_CODE
            if row.attempts and len(row.stream()) > room:
                # The last plan, attempt and verdict say most of what the next attempt needs.
                row.history = [row.plan, *row.history[-2:]]
            if row.attempts and len(row.stream()) > room:
                row.stopped = "context"
            elif most is not None and row.attempts and most - row.spent < LEAST_CODE:
                row.stopped = "tokens"

    # ---- one attempt ----

    def _attempt(self, rows: list[_Row], request: _Request) -> None:
        """One attempt of each row: written, validated, decided on."""
        unplanned = [row for row in rows if row.needs_plan]
        if unplanned:
            self._write_plans(unplanned, request.settings, request.kwargs)
        for row in unplanned:
            row.history.append(row.plan)
        whole = unplanned if request.edits else rows
        repaired = [row for row in rows if not row.needs_plan] if request.edits else []
        drafts = [*zip(whole, self._write_codes(whole, request)), *zip(repaired, self._write_edits(repaired, request))]
        texts = [draft.text for _, draft in drafts if draft.is_new]
        feedback = iter(_verdicts(request.validator, texts))
        for row, draft in drafts:
            row.spent += draft.new_tokens
            if draft.is_new:
                self._take(row, draft, next(feedback), request)
            else:
                # The stream has not changed, nor what was said and decided: only samples can differ from it.
                told = {"edits": draft.edits, "outcome": draft.outcome, "new_tokens": draft.new_tokens}
                row.attempts.append(replace(row.attempts[-1], **told))
                row.plans.append(row.plans[-1])
                row.stopped = None if request.settings.do_sample else "unchanged"

    def _write_codes(self, rows: list[_Row], request: _Request) -> list[_Draft]:
        """Whole code for each row, behind its given beginning."""
        drafts, streamer = [], None
        if request.streamer is not None and rows and not rows[0].attempts:
            streamer = CodeStreamer(request.streamer, torch.tensor(rows[0].prefix, dtype=torch.long))
        written = self._write(rows, [row.prefix for row in rows], set(), request, streamer)
        for row, (code, _) in zip(rows, written):
            text = request.tokenizer.decode([*row.prefix, *code])
            drafts.append(_Draft(text, [CODE, *row.prefix, *code, END_CODE], len(code) + 1))
        return drafts

    def _write_edits(self, rows: list[_Row], request: _Request) -> list[_Draft]:
        """Edits of the last attempt of each row, and what they make of it."""
        tokenizer, drafts = request.tokenizer, []
        settings, kwargs = for_no_code(request.settings, request.kwargs)  # lines that edits quote are fragments
        request = replace(request, settings=settings, kwargs=kwargs | {"logits_processor": [QuotedLines(tokenizer)]})
        for row, (new, closed) in zip(rows, self._write(rows, [[]] * len(rows), {BEFORE, AFTER}, request)):
            edits = parse_edits(tokenizer, [CODE, *new, *closed])
            given = tokenizer.decode(row.prefix)
            text, outcome = apply_edits(row.attempts[-1].code, edits, given)
            segment = [CODE, *row.prefix, *encode_text(tokenizer, text[len(given) :]), END_CODE]
            drafts.append(_Draft(text, segment, len(new) + len(closed), edits, outcome))
        return drafts

    def _write(
        self, rows, given, tags: set[int], request: _Request, streamer: BaseStreamer | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """New ids behind <CODE> and `given` in each row, and </CODE> if that was written too.

        Args:
            tags: special tokens that may be written, beside </CODE>.
        """
        if not rows:
            return []
        settings, most = for_ids_alone(request.settings), request.most
        prompts = [[*row.stream(), CODE, *start] for row, start in zip(rows, given)]
        # </CODE> needs a place too, also behind code that was cut.
        rooms = [min(request.budget, self.config.max_position_embeddings - len(prompt) - 1) for prompt in prompts]
        allowed = [max(1, room if most is None else min(room, most - row.spent)) for row, room in zip(rows, rooms)]
        written = self._continue(
            prompts, settings, allowed, {END_CODE}, {END_CODE, *tags}, streamer=streamer, **request.kwargs
        )
        results, ends = [], {END_CODE, TOKEN_IDS[EOS], TOKEN_IDS[PAD]}
        for new, limit in zip(written[:, max(map(len, prompts)) :].tolist(), allowed):
            body = until(new, ends)[:limit]
            results.append((body, [token for token in new[len(body) : len(body) + 1] if token == END_CODE]))
        return results

    # ---- what follows ----

    def _take(self, row: _Row, draft: _Draft, feedback: Feedback | None, request: _Request) -> None:
        """Notes new code with what was said of it, and prepares the row for what the model decides."""
        if draft.outcome == APPLIED:
            row.history = [row.plan]
        row.history.append(draft.segment)
        verdict = request.verdict(feedback, draft.text)
        probabilities = self._decision(row, feedback, verdict, draft.text)
        failed = feedback is not None and feedback.failed
        if probabilities[DONE] >= request.threshold and not failed:
            decision, row.stopped = DONE, "done"
        else:
            decision = CONTINUE if probabilities[CONTINUE] >= probabilities[REFINE] else REFINE
        row.attempts.append(
            Attempt(
                draft.text, parse_plan(request.tokenizer, row.plan), feedback, DECISIONS[decision],
                probabilities[DONE], draft.new_tokens, draft.edits, draft.outcome,
            )
        )  # fmt: skip
        row.plans.append(request.tokenizer.decode(inside(row.plan)))
        if request.edits and decision == CONTINUE:  # edits are learned behind one attempt
            row.history = [row.plan, draft.segment]
        row.history.append([*verdict, TOKEN_IDS[DECISION_TOKENS[decision]]])
        row.needs_plan = decision == REFINE

    def _decision(self, row: _Row, feedback: Feedback | None, verdict: list[int], text: str) -> list[float]:
        """Probabilities of CONTINUE, REFINE and DONE after the attempt that ends the row's stream."""
        stream = row.stream()
        if self.model.refinement_head is None:
            stream = [*stream, *verdict]
            ids = torch.tensor([stream[-self.config.max_position_embeddings :]], device=self.device)
            tokens = [TOKEN_IDS[token] for token in DECISION_TOKENS]
            logits = self(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1, tokens]
        else:
            ids = torch.tensor([stream], device=self.device)
            position = torch.tensor([[len(stream) - 1]], device=self.device)
            said = (feedback or Feedback()).token_ids(text.count("\n") + 1)
            said = torch.tensor([[said]], device=self.device)
            output = self.model(input_ids=ids, use_cache=False, decision_positions=position, feedback_ids=said)
            logits = output.refinement_logits[0, 0]
        return logits.float().softmax(dim=-1).tolist()


def _verdicts(validator, texts: list[str]) -> list[Feedback | None]:
    """A validator's word on each text; none without a validator."""
    if validator is None or not texts:
        return [None] * len(texts)
    feedback = list(validator(texts))
    if len(feedback) != len(texts):
        raise ValueError(f"the validator gave {len(feedback)} verdicts for {len(texts)} codes; it owes each one")
    return feedback


def _chosen(attempts: list[Attempt]) -> Attempt:
    good = [attempt for attempt in attempts if attempt.feedback is None or not attempt.feedback.failed]
    return (good or attempts)[-1]
