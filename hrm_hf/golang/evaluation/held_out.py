"""Evaluates a trained Go coder, or a baseline trained on the same stream, on records and trajectories.

    greedy       greedy plan, then greedy code: plan metrics, exact and subtree match, parse and type-check rate
    repair       a failed attempt and its verdict are given, the model repairs; against samples that saw neither

Each section is a function of its own and a dictionary of figures. Losses are in `loss.py`, decisions in
`decisions.py`, the Go coder's own loop of attempts in `refinement.py`, repairs at equal tokens in `equal_tokens.py`,
tasks with tests in `benchmark_run.py`; reading, loading and writing files is the command's (`hrm-hf eval go`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...models.edits_hrm_go_coder import APPLIED, OUTCOMES, UNCHANGED, apply_edits, parse_edits
from ...models.generation_hrm_go_coder import GoCoderGenerationMixin
from ...models.processing_hrm_go_coder import (
    CONTINUE,
    DECISION_TOKENS,
    DECISIONS,
    DONE,
    TOKEN_IDS,
    Feedback,
    parse_plan,
    plan_segment,
)
from ...registry import architecture_of
from ..data.collator import GoStreamBuilder, TooLongError, is_written_again
from .metrics import (
    mean,
    paired_difference,
    plan_scores,
    rate,
    rate_with_interval,
)
from .similarity import exact_matches, subtree_f1
from .writer import Writer


Validator = Callable[[Sequence[str]], list[Feedback]]
Record = dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """How attempts are drawn.

    Attributes:
        temperature: of every sample, above 0: greedy samples would all be the same.
        max_iterations: attempts of the loop, and independent samples of its control.
        samples: repairs of each trajectory, and independent samples of their control; with 1 both are greedy.
        seed: of torch's generator.
    """

    temperature: float = 0.8
    max_iterations: int = 3
    samples: int = 1
    seed: int = 0

    def __post_init__(self):
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: independent samples need more than 0, such as 0.8")


def is_go_coder(model) -> bool:
    """The model has `generate_with_refinement` and decides; baselines only continue text."""
    row = architecture_of(model)
    return row is not None and issubclass(row.head, GoCoderGenerationMixin)


def code_body(record: Record) -> str:
    """The solution without the beginning that is given."""
    return record["solution"]["code"].removeprefix(record["code_prefix"])


def problem_text(record: Record) -> str:
    """Title and body as they stand in the stream."""
    return "\n\n".join(part for part in (record["problem"]["title"], record["problem"]["body"]) if part)


def plan_ids_of(writer: Writer, plan: dict[str, Any]) -> list[int]:
    """A plan after <PLAN>, </PLAN> included."""
    steps = [step["text"] for step in plan["steps"]]
    return plan_segment(writer.tokenizer, plan["intent"], plan["targets"], steps)[1:]


def evaluate_greedy(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], validator: Validator
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Greedy plan and code for each problem; the plan that is judged is the one that was written.

    A function that uses other names of its package cannot type-check alone, so the type-check rate is of the records
    whose reference does ("type_check_records"); None if the validator looks at no types.

    Returns:
        figures, and for each record {"id", "plan", "code", "exact", "subtree_f1", "syntax_ok", "types_ok", "message"}.
    """
    prompts, prefixes = [builder.prompt_ids(record) for record in records], [r["code_prefix"] for r in records]
    plan_ids, codes = writer.planned_codes(prompts, prefixes)
    plans = [parse_plan(writer.tokenizer, ids) for ids in plan_ids]
    references = [record["solution"]["code"] for record in records]
    exact, how = exact_matches(codes, references)
    alike = [subtree_f1(code, right) for code, right in zip(codes, references)]
    verdicts, of_references = validator(codes), validator(references)
    typed = [verdict for verdict, right in zip(verdicts, of_references) if right.types_ok]
    figures = {
        "records": len(records),
        **plan_scores(plans, [record["plan"] for record in records]),
        **rate_with_interval("code_exact", exact),
        "code_exact_after": how,
        "code_ast": float(np.mean(alike)) if alike else None,
        **rate_with_interval("parse_rate", [bool(verdict.syntax_ok) for verdict in verdicts]),
        **rate_with_interval("type_check_rate", [bool(verdict.types_ok) for verdict in typed]),
        "type_check_records": len(typed),
        "reference_parse_rate": rate([bool(verdict.syntax_ok) for verdict in of_references]),
    }
    rows = zip(records, plans, codes, exact, alike, verdicts)
    return figures, [
        {
            "id": record["id"], "plan": plan, "code": code, "exact": same, "subtree_f1": likeness,
            "syntax_ok": verdict.syntax_ok, "types_ok": verdict.types_ok, "message": verdict.message,
        }
        for record, plan, code, same, likeness, verdict in rows
    ]  # fmt: skip


def built_row(builder: GoStreamBuilder, record: Record) -> dict[str, Any] | None:
    """The row of a record; None if it does not fit the builder's budgets."""
    try:
        return builder.build(record)
    except TooLongError:
        return None


def end_of_verdict(ids: Sequence[int], position: int) -> int:
    """Where </VALIDATE> stands behind an attempt that ends at `position`."""
    return list(ids).index(TOKEN_IDS["</VALIDATE>"], position)


def evaluate_repair(
    writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record], validator: Validator, sampling: Sampling
) -> dict[str, Any]:
    """Repairs of the last failed attempt of each trajectory, against samples from the same problem and plan.

    Both get the trajectory's plan and its decision as given, so that they differ in the attempt and its verdict alone;
    after <REFINE> the model writes a new plan first, after <RETRY> whole code, or edits if the builder is for them.
    `samples` independent tries of each; a trajectory counts as solved if one of them is right.

    Returns:
        exact and valid rates of both ("repair", "resampling"), their paired differences, subtree F1 to the reference
        of attempt, repair and sample ("_ast") and new tokens a try ("_tokens"), a repair's new plan included; all but
        the differences also by decision. `repair_unchanged`: share of repairs that give the attempt back; of edits
        also `repair_not_applied` and `repair_outcomes`, which count edits alone.
    """
    cases = [case for case in (_repair_case(writer, builder, row) for row in trajectories) if case]
    result: dict[str, Any] = {"cases": len(cases), "left_out": len(trajectories) - len(cases)}
    if not cases:
        return result
    torch.manual_seed(sampling.seed)
    temperature = sampling.temperature if sampling.samples > 1 else 0.0
    prefixes = [case["prefix"] for case in cases]
    references = [case["reference"] for case in cases]
    syntax_alone = [verdict.types_ok is False for verdict in validator(references)]
    tries: dict[str, list[list[Try]]] = {"repair": [], "resampling": []}
    for _ in range(sampling.samples):
        tries["repair"].append(_repairs(writer, cases, temperature))
        tries["resampling"].append(whole_codes(writer, [case["control"] for case in cases], prefixes, temperature))
    solved, valid = {}, {}
    for name, rounds in tries.items():
        codes = [[one.code for one in row] for row in rounds]
        exact = [exact_matches(one, references)[0] for one in codes]
        passed = [which_pass(validator, one, syntax_alone) for one in codes]
        solved[name], valid[name] = [any(row) for row in zip(*exact)], [any(row) for row in zip(*passed)]
        result |= rate_with_interval(f"{name}_exact", solved[name]) | rate_with_interval(f"{name}_valid", valid[name])
    chosen = {"": list(range(len(cases)))}
    chosen |= {f"_{decision}": _of_decision(cases, decision) for decision in DECISIONS[:DONE]}
    alike = [subtree_f1(case["attempt"], case["reference"]) for case in cases]
    for name, rounds in tries.items():
        scores = [subtree_f1(one.code, right) for one, right in zip(rounds[0], references)]
        for ending, rows in chosen.items():
            result[f"{name}_ast{ending}"] = mean([scores[i] for i in rows])
            result[f"{name}_tokens{ending}"] = mean([row[i].tokens for row in rounds for i in rows])
    for ending, rows in chosen.items():
        result[f"attempt_ast{ending}"] = mean([alike[i] for i in rows])
        if ending:
            result[f"cases{ending}"] = len(rows)
            for name in tries:
                result[f"{name}_exact{ending}"] = rate([solved[name][i] for i in rows])
                result[f"{name}_valid{ending}"] = rate([valid[name][i] for i in rows])
    result |= _repair_outcomes(cases, tries["repair"], builder.repairs)
    result["exact_gain"] = paired_difference(solved["repair"], solved["resampling"], sampling.seed)
    result["valid_gain"] = paired_difference(valid["repair"], valid["resampling"], sampling.seed)
    return result | {"samples": sampling.samples, "temperature": temperature, "repair_mode": builder.repairs}


@dataclass(frozen=True)
class Try:
    """A code, how many new tokens it took, and of edits what became of them."""

    code: str
    tokens: int
    outcome: str | None = None


def _repairs(writer: Writer, cases: list[dict], temperature: float) -> list[Try]:
    """A repair of each case: edits, or whole code, for which a new plan comes first if it is to be refined."""
    results: list[Try] = [Try("", 0)] * len(cases)
    edited = [i for i, case in enumerate(cases) if case["edits"]]
    whole = [i for i, case in enumerate(cases) if not case["edits"]]
    given, attempts, prefixes = ([cases[i][name] for i in edited] for name in ("given", "attempt", "prefix"))
    for i, one in zip(edited, edit_tries(writer, given, attempts, prefixes, temperature)):
        results[i] = one
    replanned = _with_new_plans(writer, [cases[i] for i in whole], temperature)
    codes = whole_codes(writer, replanned, [cases[i]["prefix"] for i in whole], temperature)
    for i, given, one in zip(whole, replanned, codes):
        opened = cases[i]["replans"]  # <PLAN> behind <REFINE> is given, as <CODE> is
        results[i] = replace(one, tokens=one.tokens + len(given) - len(cases[i]["given"]) - opened)
    return results


def edit_tries(
    writer: Writer, prompts: list[list[int]], attempts: list[str], prefixes: list[str], temperature: float
) -> list[Try]:
    """Edits of each attempt, applied, for prompts that end in the decision to fix it."""
    tries = []
    for ids, attempt, prefix in zip(writer.edit_ids(prompts, temperature), attempts, prefixes):
        edits = parse_edits(writer.tokenizer, [TOKEN_IDS["<CODE>"], *ids])
        code, outcome = apply_edits(attempt, edits, prefix)
        tries.append(Try(code, len(ids), outcome))
    return tries


def whole_codes(writer: Writer, prompts: list[list[int]], prefixes: list[str], temperature: float) -> list[Try]:
    """A whole new code for each prompt, which ends in </PLAN>."""
    written = writer.code_ids(prompts, prefixes, temperature)
    return [Try(writer.code_of(prefix, ids), len(ids)) for prefix, ids in zip(prefixes, written)]


def _repair_outcomes(cases: list[dict], rounds: list[list[Try]], mode: str) -> dict[str, Any]:
    """How many repairs gave the attempt back, and how many edits could not be applied."""
    pairs = [(case, one) for row in rounds for case, one in zip(cases, row)]
    if mode == "rewrite":
        return {"repair_unchanged": rate([one.code == case["attempt"] for case, one in pairs])}
    outcomes = [one.outcome for case, one in pairs if case["edits"]]
    return {
        "repair_unchanged": rate([outcome == UNCHANGED for outcome in outcomes]),
        "repair_not_applied": rate([outcome not in (APPLIED, UNCHANGED) for outcome in outcomes]),
        "repair_outcomes": {name: outcomes.count(name) for name in OUTCOMES},
    }


def _of_decision(cases: list[dict], decision: str) -> list[int]:
    return [i for i, case in enumerate(cases) if case["decision"] == decision]


def _repair_case(writer: Writer, builder: GoStreamBuilder, record: Record) -> dict[str, Any] | None:
    """Returns a repair, its ids up to the decision after the last failed attempt; None if absent or too long."""
    edits = builder.repairs == "edits" and is_written_again(record["attempts"])
    try:
        given, decision = (builder.edit_prompt_ids(record), CONTINUE) if edits else _rewrite_prompt(builder, record)
    except TooLongError:
        return None
    if given is None:
        return None
    return {
        "given": given,
        "edits": edits,
        "replans": decision != CONTINUE,
        "decision": DECISIONS[decision],
        "control": [*builder.prompt_ids(record), *plan_ids_of(writer, record["plan"])],
        "prefix": record["code_prefix"],
        "attempt": record["attempts"][-2]["code"],
        "reference": record["solution"]["code"],
    }


def _rewrite_prompt(builder: GoStreamBuilder, record: Record) -> tuple[list[int] | None, int]:
    """Ids up to the decision after the last failed attempt, and that decision; no ids if there is no such attempt.

    Raises:
        TooLongError: the record does not fit the builder's budgets, which leaves out failed attempts that do not.
    """
    built = builder.build(record)
    if len(built["decision_labels"]) < 2:
        return None, CONTINUE
    ids, decision = list(built["input_ids"]), built["decision_labels"][-2]
    end = end_of_verdict(ids, built["decision_positions"][-2])
    return [*ids[: end + 1], TOKEN_IDS[DECISION_TOKENS[decision]]], decision


def _with_new_plans(writer: Writer, cases: list[dict], temperature: float) -> list[list[int]]:
    """Returns the ids before <CODE> of each repair; <REFINE> is followed by a new plan of the model."""
    replanning = [case for case in cases if case["replans"]]
    opened = [[*case["given"], TOKEN_IDS["<PLAN>"]] for case in replanning]
    plans = iter(writer.plans(opened, temperature))
    close = TOKEN_IDS["</PLAN>"]
    return [
        [*case["given"], TOKEN_IDS["<PLAN>"], *next(plans), close] if case["replans"] else case["given"]
        for case in cases
    ]


def which_pass(validator: Validator, codes: Sequence[str], syntax_alone: Sequence[bool]) -> list[bool]:
    """Which codes the validator passes; where `syntax_alone`, which parse.

    As in the training data a verdict on types counts only where the reference type-checks: the others need names of
    their package, which a validator does not see.
    """
    verdicts = validator(codes)
    return [
        bool(verdict.syntax_ok) and (alone or not verdict.failed) for verdict, alone in zip(verdicts, syntax_alone)
    ]
