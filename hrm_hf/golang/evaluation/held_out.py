"""Evaluate a Go coder, or a baseline trained on the same stream, by what it writes for held-out records.

    greedy       greedy plan, then greedy code: plan metrics, exact and subtree match, parse and type-check rate
    repair       the model repairs a given failed attempt; the baseline is samples that saw neither it nor its verdict
    refinement   the Go coder's own loop of attempts; the baseline is as many independent samples

Types count only for records whose reference type-checks, as in the training data: a function that uses other names of
its package cannot type-check alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
from ..data.streams import GoStreamBuilder, TooLongError
from .metrics import answers, iteration_scores, mean, paired_difference, plan_scores, rate_with_interval
from .options import EvaluateGo
from .similarity import exact_matches, subtree_f1
from .writer import Writer


Validator = Callable[[Sequence[str]], list[Feedback]]
Record = dict[str, Any]


def code_body(record: Record) -> str:
    """Return the solution without the beginning that is given."""
    return record["solution"]["code"].removeprefix(record["code_prefix"])


def problem_text(record: Record) -> str:
    """Return title and body as they stand in the stream."""
    return "\n\n".join(part for part in (record["problem"]["title"], record["problem"]["body"]) if part)


def plan_ids_of(writer: Writer, plan: dict[str, Any]) -> list[int]:
    """Encode a plan as it follows <PLAN>, </PLAN> included."""
    steps = [step["text"] for step in plan["steps"]]
    return plan_segment(writer.tokenizer, plan["intent"], plan["targets"], steps)[1:]


def evaluate_greedy(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], validator: Validator
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score the greedy plan and the greedy code for each problem.

    Returns:
        metrics, and for each record {"id", "plan", "code", "exact", "subtree_f1", "syntax_ok", "types_ok", "message"}.
        The type-check rate is None if the validator does not check types.
    """
    prompts, prefixes = [builder.prompt_ids(record) for record in records], [r["code_prefix"] for r in records]
    plan_ids, codes = writer.planned_codes(prompts, prefixes)
    plans = [parse_plan(writer.tokenizer, ids) for ids in plan_ids]
    references = [record["solution"]["code"] for record in records]
    exact, how = exact_matches(codes, references)
    alike = [subtree_f1(code, right) for code, right in zip(codes, references)]
    verdicts, of_references = validator(codes), validator(references)
    typed = [verdict for verdict, right in zip(verdicts, of_references) if right.types_ok]
    metrics = {
        "records": len(records),
        **plan_scores(plans, [record["plan"] for record in records]),
        **rate_with_interval("code_exact", exact),
        "code_exact_after": how,
        "code_ast": mean(alike),
        **rate_with_interval("parse_rate", [bool(verdict.syntax_ok) for verdict in verdicts]),
        **rate_with_interval("type_check_rate", [bool(verdict.types_ok) for verdict in typed]),
        "type_check_records": len(typed),
        "reference_parse_rate": mean([bool(verdict.syntax_ok) for verdict in of_references]),
    }
    rows = zip(records, plans, codes, exact, alike, verdicts)
    return metrics, [
        {
            "id": record["id"], "plan": plan, "code": code, "exact": same, "subtree_f1": likeness,
            "syntax_ok": verdict.syntax_ok, "types_ok": verdict.types_ok, "message": verdict.message,
        }
        for record, plan, code, same, likeness, verdict in rows
    ]  # fmt: skip


# ---- repair ----


def evaluate_repair(
    writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record], validator: Validator, seed: int = 0
) -> dict[str, Any]:
    """Score a greedy repair of the last failed attempt of each trajectory, with new code for its plan as the baseline.

    Both get the trajectory's plan, and the repair also its decision, so that they differ in the attempt and its
    verdict alone; after <REFINE> the model writes a new plan first, after <RETRY> code.

    Returns:
        exact and valid rates of both ("repair", "resampling") with their paired differences, subtree F1 to the
        reference of attempt, repair and sample ("_ast") and new tokens ("_tokens"), all but the differences also by
        decision. `repair_unchanged` is the share of repairs that equal the attempt.
    """
    cases = [case for case in (_repair_case(writer, builder, row) for row in trajectories) if case]
    result: dict[str, Any] = {"cases": len(cases), "left_out": len(trajectories) - len(cases)}
    if not cases:
        return result
    prefixes, references, controls = ([case[name] for case in cases] for name in ("prefix", "reference", "control"))
    syntax_alone = [verdict.types_ok is False for verdict in validator(references)]
    tries = {"repair": _repairs(writer, cases), "resampling": _codes(writer, controls, prefixes)}
    columns = {"attempt_ast": [subtree_f1(case["attempt"], case["reference"]) for case in cases]}
    for name, row in tries.items():
        codes = [code for code, _ in row]
        columns |= {
            f"{name}_exact": exact_matches(codes, references)[0],
            f"{name}_valid": which_pass(validator, codes, syntax_alone),
            f"{name}_ast": [subtree_f1(code, right) for code, right in zip(codes, references)],
            f"{name}_tokens": [tokens for _, tokens in row],
        }
    result |= {name: mean(values) for name, values in columns.items()}
    for decision in DECISIONS[:DONE]:
        rows = [i for i, case in enumerate(cases) if case["decision"] == decision]
        result[f"cases_{decision}"] = len(rows)
        result |= {f"{name}_{decision}": mean([values[i] for i in rows]) for name, values in columns.items()}
    for name in ("exact", "valid"):
        ours, theirs = columns[f"repair_{name}"], columns[f"resampling_{name}"]
        result |= rate_with_interval(f"repair_{name}", ours) | rate_with_interval(f"resampling_{name}", theirs)
        result[f"{name}_gain"] = paired_difference(ours, theirs, seed)
    result["repair_unchanged"] = mean([code == case["attempt"] for case, (code, _) in zip(cases, tries["repair"])])
    return result


def _repair_case(writer: Writer, builder: GoStreamBuilder, record: Record) -> dict[str, Any] | None:
    """Return what one repair needs, such as its ids up to the decision; None if there is none or it is too long."""
    try:
        built = builder.build(record)
    except TooLongError:
        return None
    if len(built["decision_labels"]) < 2:
        return None
    ids, decision = list(built["input_ids"]), built["decision_labels"][-2]
    end = ids.index(TOKEN_IDS["</VALIDATE>"], built["decision_positions"][-2])
    return {
        "given": [*ids[: end + 1], TOKEN_IDS[DECISION_TOKENS[decision]]],
        "replans": decision != CONTINUE,
        "decision": DECISIONS[decision],
        "control": [*builder.prompt_ids(record), *plan_ids_of(writer, record["plan"])],
        "prefix": record["code_prefix"],
        "attempt": record["attempts"][-2]["code"],
        "reference": record["solution"]["code"],
    }


def _repairs(writer: Writer, cases: list[dict]) -> list[tuple[str, int]]:
    """Repair each case, after a new plan if it is to be refined: code and its number of new tokens, plan included."""
    replanned = _with_new_plans(writer, cases)
    codes = _codes(writer, replanned, [case["prefix"] for case in cases])
    return [
        (code, tokens + len(given) - len(case["given"]) - case["replans"])  # <PLAN> is given, as <CODE> is
        for case, given, (code, tokens) in zip(cases, replanned, codes)
    ]


def _codes(writer: Writer, prompts: list[list[int]], prefixes: list[str]) -> list[tuple[str, int]]:
    """Write code, and count its new tokens, for prompts after which <CODE> comes."""
    written = writer.code_ids(prompts, prefixes)
    return [(writer.code_of(prefix, ids), len(ids)) for prefix, ids in zip(prefixes, written)]


def _with_new_plans(writer: Writer, cases: list[dict]) -> list[list[int]]:
    """Return the ids before <CODE> of each repair; a new plan of the model follows <REFINE>."""
    opened = [[*case["given"], TOKEN_IDS["<PLAN>"]] for case in cases if case["replans"]]
    plans, close = iter(writer.plans(opened)), TOKEN_IDS["</PLAN>"]
    return [
        [*case["given"], TOKEN_IDS["<PLAN>"], *next(plans), close] if case["replans"] else case["given"]
        for case in cases
    ]


# ---- refinement ----


def evaluate_refinement(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], validator: Validator, options: EvaluateGo
) -> dict[str, Any]:
    """Score the model's own loop of attempts against as many independent samples of the same temperature.

    The loop's answer is the last attempt that the validator passed, or else the last. `gain_over_resampling` compares
    it with a judge who knows which of the samples is right, and "resampling" is the success of that judge after one,
    two, ... samples. "valid" means that the validator passes the code, "exact" that it equals the reference. Records
    whose reference does not parse are left out ("reference_rejected").
    """
    verdicts = validator([record["solution"]["code"] for record in records])
    pairs = [(record, right) for record, right in zip(records, verdicts) if right.syntax_ok]
    judged, syntax_alone = [record for record, _ in pairs], [right.types_ok is False for _, right in pairs]
    result: dict[str, Any] = {
        "records": len(judged),
        "type_check_records": sum(bool(right.types_ok) for _, right in pairs),
        "reference_rejected": len(records) - len(judged),
    }
    if not judged:
        return result
    torch.manual_seed(options.seed)
    loop: list[list[str]] = [[] for _ in judged]
    for alone, judge in ((False, validator), (True, _of_syntax(validator))):
        rows = [i for i, flag in enumerate(syntax_alone) if flag == alone]
        written = _attempts(
            writer, [judged[i] for i in rows], judge, options.max_iterations, "refinement", options.temperature
        )
        for i, attempts in zip(rows, written):
            loop[i] = attempts
    torch.manual_seed(options.seed + 1)  # the samples are independent: they do not share the loop's first attempt
    drawn = [
        _attempts(writer, judged, None, 1, f"resampling {index + 1}", options.temperature)
        for index in range(options.max_iterations)
    ]
    control = [[one[row][0] for one in drawn] for row in range(len(judged))]
    ours, theirs = (_judge(judged, attempts, validator, syntax_alone) for attempts in (loop, control))
    result |= {"max_iterations": options.max_iterations, "temperature": options.temperature}
    for name in ("valid", "exact"):
        result[name] = {
            "refinement": iteration_scores(ours[name], ours["valid"], options.max_iterations),
            "resampling": [mean([any(row[: i + 1]) for row in theirs[name]]) for i in range(options.max_iterations)],
            "gain_over_resampling": paired_difference(
                answers(ours[name], ours["valid"]), [any(row) for row in theirs[name]], options.seed
            ),
        }
    return result


def _attempts(writer: Writer, records, validator, iterations: int, what: str, temperature: float) -> list[list[str]]:
    """Return the code of each record's attempts."""
    results = []
    with writer.bar(len(records), what) as bar:
        for start in range(0, len(records), writer.batch_size):
            batch = records[start : start + writer.batch_size]
            output = writer.model.generate_with_refinement(
                [problem_text(record) for record in batch],
                tokenizer=writer.tokenizer,
                code_prefixes=[record["code_prefix"] for record in batch],
                contexts=[(record["context"]["path"], record["context"]["before"]) for record in batch],
                validator=validator,
                max_refinement_iterations=iterations,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=writer.max_code_tokens,
                repetition_guard=writer.repetition_guard,
            )
            results += [[attempt.code for attempt in attempts] for attempts in output.attempts]
            bar.update(len(batch))
    return results


def _judge(records, attempts: list[list[str]], validator: Validator, syntax_alone) -> dict[str, list[list[bool]]]:
    """Return which attempts are valid, and which equal the reference: [records][attempts] each."""
    owners = [index for index, row in enumerate(attempts) for _ in row]
    codes = [code for row in attempts for code in row]
    flags = {
        "valid": iter(which_pass(validator, codes, [syntax_alone[index] for index in owners])),
        "exact": iter(exact_matches(codes, [records[index]["solution"]["code"] for index in owners])[0]),
    }
    return {name: [[next(values) for _ in row] for row in attempts] for name, values in flags.items()}


def which_pass(validator: Validator, codes: Sequence[str], syntax_alone: Sequence[bool]) -> list[bool]:
    """Return which code samples the validator passes; where `syntax_alone`, which of them parse."""
    verdicts = validator(codes)
    return [
        bool(verdict.syntax_ok) and (alone or not verdict.failed) for verdict, alone in zip(verdicts, syntax_alone)
    ]


def _of_syntax(validator: Validator) -> Validator:
    """Wrap a validator so that it reports on syntax alone."""
    return lambda codes: [verdict.of_syntax() for verdict in validator(codes)]
