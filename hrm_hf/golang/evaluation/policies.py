"""Whether decisions are worth their tokens: valid code per token under the model's own and three simple rules.

Every policy starts from the same sampled attempts and goes on until it accepts or has no attempt left:

    model       DONE accepts, unless the verdict names an error; CONTINUE repairs by edits, REFINE writes anew
    fix         accepts what passes, repairs the rest
    resample    accepts what passes, writes the rest anew
    verdict     accepts what passes, repairs what does not parse, writes anew what does not type-check

Writing anew is a new plan and code for it. Repairs that cannot be asked for (the prompt is too long, or the plan that
was written is none) are new attempts, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...models.processing_hrm_go_coder import CONTINUE, DONE, REFINE, TOKEN_IDS, Feedback, parse_plan
from ..data.collator import GoStreamBuilder
from ..data.trajectories import failed_record
from .decisions import decide
from .failures import fits, is_record, usable_records
from .held_out import Record, Sampling, Validator, edit_tries
from .metrics import mean, rate_with_interval, ratio_interval
from .writer import Writer


@dataclass
class _State:
    """A record, its last attempt, and the tokens that were spent on it."""

    record: Record
    syntax_alone: bool
    plan: list[int]
    code: str
    verdict: Feedback
    tokens: int
    done: bool = False

    def trajectory(self, writer: Writer) -> Record:
        plan = parse_plan(writer.tokenizer, self.plan)
        return failed_record(self.record, self.code, self.verdict, plan=plan)


Decide = Callable[[Sequence[_State]], list[int]]


def evaluate_policies(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], validator: Validator, sampling: Sampling
) -> dict[str, Any]:
    """Valid answers and new tokens of each policy, with at most `sampling.max_iterations` attempts.

    Returns:
        "records"; for each policy "valid" (Wilson interval), "tokens" a record, "attempts" a record, and
        "valid_per_1000_tokens" with a bootstrap interval over records; {"records": 0} where no reference parses.
    """
    usable = usable_records(records, validator)
    result: dict[str, Any] = {"records": len(usable), "max_iterations": sampling.max_iterations}
    if not usable:
        return result
    torch.manual_seed(sampling.seed)
    begun = _written(writer, builder, usable, validator, sampling.temperature)
    policies: dict[str, Decide] = {
        "model": lambda states: _decisions(writer, builder, states),
        "fix": lambda states: [CONTINUE if state.verdict.failed else DONE for state in states],
        "resample": lambda states: [REFINE if state.verdict.failed else DONE for state in states],
        "verdict": lambda states: [_by_verdict(state.verdict) for state in states],
    }
    for name, policy in policies.items():
        torch.manual_seed(sampling.seed + 1)
        states, attempts = [replace(state) for state in begun], len(begun)
        for _ in range(sampling.max_iterations - 1):
            attempts += _go_on(writer, builder, states, policy, validator, sampling.temperature)
        valid = [not state.verdict.failed for state in states]
        tokens = [state.tokens for state in states]
        worth = [1000 * value for value in ratio_interval(valid, tokens, sampling.seed)]
        result[name] = {
            **rate_with_interval("valid", valid),
            "tokens": mean(tokens),
            "attempts": attempts / len(states),
            "valid_per_1000_tokens": 1000 * sum(valid) / sum(tokens),
            "valid_per_1000_tokens_interval": worth,
        }
    return result


def _written(writer: Writer, builder: GoStreamBuilder, usable, validator: Validator, temperature: float):
    """A sampled attempt of each (record, types say nothing)."""
    prompts = [builder.prompt_ids(record) for record, _ in usable]
    prefixes = [record["code_prefix"] or "" for record, _ in usable]
    plans = writer.plans(prompts, temperature)
    close = TOKEN_IDS["</PLAN>"]
    ids = writer.code_ids([[*a, *b, close] for a, b in zip(prompts, plans)], prefixes, temperature)
    codes = [writer.code_of(prefix, written) for prefix, written in zip(prefixes, ids)]
    return [
        _State(record, alone, plan, code, said.of_syntax() if alone else said, len(plan) + 1 + len(written))
        for (record, alone), plan, code, written, said in zip(usable, plans, codes, ids, validator(codes))
    ]


def _go_on(
    writer: Writer,
    builder: GoStreamBuilder,
    states: list[_State],
    policy: Decide,
    validator: Validator,
    temperature: float,
) -> int:
    """One more attempt of every state that its policy does not accept; returns how many there were."""
    open_states = [state for state in states if not state.done]
    if not open_states:
        return 0
    fixed, renewed = [], []
    for state, decision in zip(open_states, policy(open_states)):
        if decision == DONE and not state.verdict.failed:
            state.done = True
        elif decision != REFINE and _is_askable(writer, builder, state):
            fixed.append(state)
        else:
            renewed.append(state)
    if fixed:
        given = [builder.edit_prompt_ids(state.trajectory(writer)) for state in fixed]
        prefixes = [state.record["code_prefix"] or "" for state in fixed]
        tries = edit_tries(writer, given, [state.code for state in fixed], prefixes, temperature)
        for state, one, said in zip(fixed, tries, validator([one.code for one in tries])):
            state.code, state.tokens = one.code, state.tokens + one.tokens
            state.verdict = said.of_syntax() if state.syntax_alone else said
    if renewed:
        usable = [(state.record, state.syntax_alone) for state in renewed]
        for state, new in zip(renewed, _written(writer, builder, usable, validator, temperature)):
            state.plan, state.code, state.verdict = new.plan, new.code, new.verdict
            state.tokens += new.tokens
    return len(fixed) + len(renewed)


def _is_askable(writer: Writer, builder: GoStreamBuilder, state: _State) -> bool:
    record = state.trajectory(writer)
    return is_record(record) and fits(builder, record)


def _by_verdict(verdict: Feedback) -> int:
    if not verdict.failed:
        return DONE
    return CONTINUE if verdict.syntax_ok is False else REFINE


def _decisions(writer: Writer, builder: GoStreamBuilder, states: Sequence[_State]) -> list[int]:
    """The model's decisions: of the head where it has one, else of the tokens; REFINE where it cannot be asked."""
    rows = [state.trajectory(writer) for state in states]
    known = [index for index, row in enumerate(rows) if is_record(row)]
    asked = [rows[index] | {"attempts": rows[index]["attempts"][:1]} for index in known]
    found = decide(writer, builder, asked, "decisions")
    logits = found.logits.get("head", found.logits["tokens"])
    decisions = np.full(len(states), REFINE)
    for owner, scores in zip(found.trajectory, logits):
        decisions[known[owner]] = int(scores.argmax())
    return decisions.tolist()
