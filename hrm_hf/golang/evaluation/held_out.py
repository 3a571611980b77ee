"""Evaluate a Go coder, or a baseline trained on the same stream, on held-out records and trajectories.

    loss         bits per byte and perplexity of the code, given the problem and the record's plan
    greedy       greedy plan, then greedy code: plan metrics, exact and subtree match, parse and type-check rate
    decisions    accuracy and calibration of decisions, from the refinement head and from decision tokens
    repair       repairs of a given failed attempt; the baseline sees neither the attempt nor its verdict
    refinement   the Go coder's refinement loop; the baseline is the same number of independent samples

Type errors count only if the reference type-checks, as in the training data: a function that uses other names in its
package cannot type-check alone.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...models.processing_hrm_go_coder import DECISION_TOKENS, DECISIONS, DONE, TOKEN_IDS, Feedback, parse_plan
from ..data.records import problem_text
from ..data.streams import GoStreamBuilder, TooLongError, padded_decisions
from ..options import EvaluateGo
from .metrics import (
    answers,
    bits_per_byte,
    calibration_error,
    decision_scores,
    iteration_scores,
    mean,
    paired_difference,
    plan_scores,
    rate_with_interval,
)
from .similarity import exact_matches, subtree_f1
from .writer import Writer, is_go_coder


Validator = Callable[[Sequence[str]], list[Feedback]]
Record = dict[str, Any]


def evaluate_loss(writer: Writer, builder: GoStreamBuilder, records: Sequence[Record]) -> dict[str, Any]:
    """Score the code after the prefix, including </CODE>, given the problem and the record's plan.

    `left_out` counts records that do not fit in a row, and records with no code after the prefix.
    """
    builder, rows = replace(builder, plan_budget=builder.max_length, code_budget=builder.max_length), []
    for record in records:
        with suppress(TooLongError):
            rows.append(builder.build(record, refinement=False))
    rows = [row for row in rows if row["code_bytes"]]
    result: dict[str, Any] = {"records": len(rows), "left_out": len(records) - len(rows)}
    if not rows:
        return result
    ids = [row["input_ids"][: row["code_end"]] for row in rows]
    nats = sum(writer.nats(ids, [row["code_start"] for row in rows], "code"))
    size = sum(row["code_bytes"] for row in rows)
    tokens = sum(row["code_end"] - row["code_start"] for row in rows)
    return result | {
        "code_bits_per_byte": bits_per_byte(nats, size), "code_perplexity": math.exp(nats / tokens), "code_bytes": size
    }  # fmt: skip


# ---- greedy ----


def evaluate_greedy(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], validator: Validator
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score the greedy plan and the greedy code for each problem.

    Returns:
        Metrics, and {"id", "plan", "code", "exact", "subtree_f1", "syntax_ok", "types_ok", "message"} for each record.
        The type-check rate is None if the validator does not check types.
    """
    prompts, prefixes = [builder.prompt_ids(record) for record in records], [r["code_prefix"] for r in records]
    plan_ids, samples = writer.planned_code(prompts, prefixes)
    plans = [parse_plan(writer.tokenizer, ids) for ids in plan_ids]
    references = [record["solution"]["code"] for record in records]
    exact, how = exact_matches(samples, references)
    alike = [subtree_f1(code, right) for code, right in zip(samples, references)]
    verdicts, of_references = validator(samples), validator(references)
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
    rows = zip(records, plans, samples, exact, alike, verdicts)
    return metrics, [
        {
            "id": record["id"], "plan": plan, "code": code, "exact": same, "subtree_f1": likeness,
            "syntax_ok": verdict.syntax_ok, "types_ok": verdict.types_ok, "message": verdict.message,
        }
        for record, plan, code, same, likeness, verdict in rows
    ]  # fmt: skip


# ---- decisions ----


def evaluate_decisions(writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record]) -> dict[str, Any]:
    """Score the refinement decisions in trajectories, given their attempts and verdicts.

    Returns:
        `decision_scores`, "nll" in nats and "calibration_error" of the decision "tokens" after </VALIDATE> and, if
        the model has a refinement head, of the "head". `left_out` counts trajectories that do not fit.
    """
    rows = []
    for record in trajectories:
        with suppress(TooLongError):
            rows.append(builder.build(record))
    rows = [row for row in rows if row["decision_labels"]]
    result: dict[str, Any] = {"trajectories": len(rows), "left_out": len(trajectories) - len(rows)}
    labels = [label for row in rows for label in row["decision_labels"]]
    failed = [2 in ids[:2] for row in rows for ids in row["feedback_ids"]]
    for source, scores in _decision_logits(writer, rows).items():
        result[source] = decision_scores(scores.argmax(axis=1).tolist(), labels, failed)
        if labels:
            log_p = torch.tensor(scores).log_softmax(-1).numpy()
            result[source] |= {
                "nll": float(-log_p[np.arange(len(labels)), labels].mean()),
                "calibration_error": calibration_error(np.exp(log_p), np.array(labels)),
            }
    return result


def _decision_logits(writer: Writer, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return decision logits [N, 3] of the next token ("tokens") and of the refinement head ("head"), if any."""
    choices = torch.tensor([TOKEN_IDS[token] for token in DECISION_TOKENS])
    coder = is_go_coder(writer.model)
    has_head = coder and not getattr(writer.model.config, "unified", False)
    logits: dict[str, list] = {"tokens": []} | ({"head": []} if has_head else {})
    for batch in writer.batches(rows, "decisions"):
        padded, taken = padded_decisions(batch), ("decision_positions", "feedback_ids") if coder else ()
        inputs = {name: torch.tensor(padded[name], device=writer.model.device) for name in taken}
        output = writer.forward([row["input_ids"] for row in batch], **inputs)
        for place, row in enumerate(batch):
            for k, position in enumerate(row["decision_positions"]):
                after = list(row["input_ids"]).index(TOKEN_IDS["</VALIDATE>"], position)
                logits["tokens"].append(output.logits[place, after, choices].float().cpu())
                if has_head:
                    logits["head"].append(output["refinement_logits"][place, k].float().cpu())
    return {name: torch.stack(each).numpy() if each else np.zeros((0, 3)) for name, each in logits.items()}


# ---- repair ----


def evaluate_repair(
    writer: Writer, builder: GoStreamBuilder, trajectories: Sequence[Record], validator: Validator, seed: int = 0
) -> dict[str, Any]:
    """Compare greedy repairs of each trajectory's last failed attempt with new code for the same plan.

    Both start from the trajectory's plan. The repair also gets the attempt, its verdict and its decision (after
    <REFINE>, the model writes a new plan before the code).

    Returns:
        Exact and valid rates of "repair" and "resampling" (new code) with their paired differences, subtree F1
        with the reference ("_ast") of the attempt, the repair and the new code, and numbers of new tokens ("_tokens").
        All but the differences are also split by decision. `repair_unchanged`: rate of repairs equal to the attempt.
    """
    cases = [case for case in (_repair_case(builder, row) for row in trajectories) if case]
    result: dict[str, Any] = {"cases": len(cases), "left_out": len(trajectories) - len(cases)}
    if not cases:
        return result
    given, controls, prefixes, attempts, references = (
        [case[name] for case in cases] for name in ("given", "control", "prefix", "attempt", "reference")
    )
    syntax_only = [verdict.types_ok is False for verdict in validator(references)]
    columns = {"attempt_ast": list(map(subtree_f1, attempts, references))}
    replanned = writer.replanned(given)
    for name, prompts in {"repair": replanned, "resampling": controls}.items():
        ids = writer.code_ids(prompts, prefixes)
        samples = list(map(writer.code_of, prefixes, ids))
        columns |= {
            f"{name}_exact": exact_matches(samples, references)[0],
            f"{name}_valid": _which_pass(validator, samples, syntax_only),
            f"{name}_ast": list(map(subtree_f1, samples, references)),
            f"{name}_tokens": list(map(len, ids)),
        }
        if name == "repair":
            result["repair_unchanged"] = mean([code == attempt for code, attempt in zip(samples, attempts)])
    for row, (before, after) in enumerate(zip(given, replanned)):  # subtract 1 for <PLAN>, which is not generated
        columns["repair_tokens"][row] += max(0, len(after) - len(before) - 1)
    result |= {name: mean(values) for name, values in columns.items()}
    for decision in DECISIONS[:DONE]:
        rows = [i for i, case in enumerate(cases) if case["decision"] == decision]
        result[f"cases_{decision}"] = len(rows)
        result |= {f"{name}_{decision}": mean([values[i] for i in rows]) for name, values in columns.items()}
    for name in ("exact", "valid"):
        ours, theirs = columns[f"repair_{name}"], columns[f"resampling_{name}"]
        result |= rate_with_interval(f"repair_{name}", ours) | rate_with_interval(f"resampling_{name}", theirs)
        result[f"{name}_gain"] = paired_difference(ours, theirs, seed)
    return result


def _repair_case(builder: GoStreamBuilder, record: Record) -> dict[str, Any] | None:
    """Return the inputs for one repair, or None if the record has no failed attempt or is too long."""
    try:
        built = builder.build(record)
    except TooLongError:
        return None
    if len(built["decision_labels"]) < 2:
        return None
    end = list(built["input_ids"]).index(TOKEN_IDS["</VALIDATE>"], built["decision_positions"][-2])
    return {
        "given": built["input_ids"][: end + 2],
        "decision": DECISIONS[built["decision_labels"][-2]],
        "control": builder.planned_ids(record),
        "prefix": record["code_prefix"],
        "attempt": record["attempts"][-2]["code"],
        "reference": record["solution"]["code"],
    }


# ---- refinement ----


def evaluate_refinement(
    writer: Writer, records: Sequence[Record], validator: Validator, options: EvaluateGo
) -> dict[str, Any]:
    """Compare the refinement loop with the same number of independent samples, at the same temperature.

    The loop's answer is the last attempt that passes the validator, or else the last attempt. The baseline is an
    oracle that finds a correct sample if there is one: "resampling" is its success rate after one, two, ... samples,
    and `gain_over_resampling` compares the loop with it. Code is "valid" if it passes the validator, and "exact" if it
    equals the reference. Records are skipped if their reference does not parse ("reference_rejected").
    """
    verdicts = validator([record["solution"]["code"] for record in records])
    pairs = [(record, right) for record, right in zip(records, verdicts) if right.syntax_ok]
    # Move records whose reference has type errors to the end, because only their syntax is validated.
    pairs.sort(key=lambda pair: pair[1].types_ok is False)
    judged, syntax_only = [record for record, _ in pairs], [right.types_ok is False for _, right in pairs]
    result: dict[str, Any] = {
        "records": len(judged),
        "type_check_records": sum(bool(right.types_ok) for _, right in pairs),
        "reference_rejected": len(records) - len(judged),
    }
    if not judged:
        return result
    most, typed = options.max_iterations, len(judged) - sum(syntax_only)
    torch.manual_seed(options.seed)
    loop = _attempts(writer, judged[:typed], validator, most, "refinement", options.temperature)
    of_syntax = lambda samples: [verdict.of_syntax() for verdict in validator(samples)]  # noqa: E731
    loop += _attempts(writer, judged[typed:], of_syntax, most, "refinement", options.temperature)
    torch.manual_seed(options.seed + 1)  # another seed, so no sample repeats the loop's first attempt
    drawn = [_attempts(writer, judged, None, 1, f"resampling {i + 1}", options.temperature) for i in range(most)]
    control = [[one[row][0] for one in drawn] for row in range(len(judged))]
    ours, theirs = (_judge(judged, attempts, validator, syntax_only) for attempts in (loop, control))
    result |= {"max_iterations": most, "temperature": options.temperature}
    for name in ("valid", "exact"):
        result[name] = {
            "refinement": iteration_scores(ours[name], ours["valid"], most),
            "resampling": [mean([any(row[: i + 1]) for row in theirs[name]]) for i in range(most)],
            "gain_over_resampling": paired_difference(
                answers(ours[name], ours["valid"]), [any(row) for row in theirs[name]], options.seed
            ),
        }
    return result


def _attempts(writer: Writer, records, validator, iterations: int, what: str, temperature: float) -> list[list[str]]:
    """Run the refinement loop, and return the code of each record's attempts."""
    results = []
    for batch in writer.batches(records, what):
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
    return results


def _judge(records, attempts: list[list[str]], validator: Validator, syntax_only) -> dict[str, list[list[bool]]]:
    """Return flags [records][attempts]: whether each attempt is "valid", and whether it is an "exact" match."""
    owners = [index for index, row in enumerate(attempts) for _ in row]
    samples = [code for row in attempts for code in row]
    flags = {
        "valid": iter(_which_pass(validator, samples, [syntax_only[index] for index in owners])),
        "exact": iter(exact_matches(samples, [records[index]["solution"]["code"] for index in owners])[0]),
    }
    return {name: [[next(values) for _ in row] for row in attempts] for name, values in flags.items()}


def _which_pass(validator: Validator, samples: Sequence[str], syntax_only: Sequence[bool]) -> list[bool]:
    """Check whether each sample passes the validator or, where `syntax_only` is true, whether it parses."""
    verdicts = validator(samples)
    return [bool(verdict.syntax_ok) and (alone or not verdict.failed) for verdict, alone in zip(verdicts, syntax_only)]
