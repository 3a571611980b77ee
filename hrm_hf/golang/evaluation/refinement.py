"""The Go coder's own loop of attempts, against as many independent samples.

What both get, and what counts as right, is in `evaluate_refinement`. The other sections of an evaluation, and what
they share with this one, are in `go_coder`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...models.processing_hrm_go_coder import Feedback, context_segment, problem_segment
from ..data.collator import GoStreamBuilder
from .held_out import Record, Sampling, Validator, problem_text, which_pass
from .metrics import iteration_scores, paired_difference, resampling_scores
from .similarity import exact_matches
from .writer import Writer


def evaluate_refinement(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], validator: Validator, sampling: Sampling
) -> dict[str, Any]:
    """The model's own loop of attempts against independent samples with the same budget.

    Both get the same problems, temperature and most attempts. The loop's answer is the last attempt that the validator
    passed, or else the last; the control draws first attempts until one passes. "valid" is passing the validator,
    "exact" equal to the reference. Against the loop's answer stands the control with a judge who knows which of its
    samples is right ("gain_over_resampling"), the same within the new tokens that the loop used on average, as a loop
    that keeps its plan writes fewer ("gain_token_matched"), and the control's own answer ("gain_over_selected").

    Types count only for records whose reference type-checks ("type_check_records"), as in the training data. Left out
    and counted: records whose reference does not parse. `cut`: records whose problem or context is longer than its
    budget; both sides see it cut in the same way, as in training.
    """
    verdicts = validator([record["solution"]["code"] for record in records])
    pairs = [(record, right) for record, right in zip(records, verdicts) if right.syntax_ok]
    judged, syntax_alone = [record for record, _ in pairs], [right.types_ok is False for _, right in pairs]
    result: dict[str, Any] = {
        "records": len(judged),
        "type_check_records": sum(bool(right.types_ok) for _, right in pairs),
        "reference_rejected": sum(not right.syntax_ok for right in verdicts),
        "cut": sum(_prompt_length(writer, record) > len(builder.prompt_ids(record)) for record in judged),
    }
    if not judged:
        return result
    torch.manual_seed(sampling.seed)
    loop: list[list[tuple[str, int]]] = [[] for _ in judged]
    how = {"iterations": sampling.max_iterations, "temperature": sampling.temperature, "repair_mode": builder.repairs}
    for alone, judge in ((False, validator), (True, _of_syntax(validator))):
        rows = [i for i, flag in enumerate(syntax_alone) if flag == alone]
        chosen = [judged[i] for i in rows]
        written = _attempts(writer, chosen, judge, what="refinement", **how)
        for i, attempts in zip(rows, written):
            loop[i] = attempts
    torch.manual_seed(sampling.seed + 1)  # its own samples: sharing the first attempt would not be independent
    drawn = [
        _attempts(writer, judged, None, what=f"resampling {index + 1}", **how | {"iterations": 1})
        for index in range(sampling.max_iterations)
    ]
    control = [[one[row][0] for one in drawn] for row in range(len(judged))]
    budget = float(np.mean([sum(tokens for _, tokens in attempts) for attempts in loop]))
    ours = _judge(judged, loop, validator, syntax_alone)
    theirs = _judge(judged, control, validator, syntax_alone)
    result |= {"max_iterations": sampling.max_iterations, "temperature": sampling.temperature}
    result |= {"refinement_tokens": budget, "resampling_tokens": _tokens_until(control, theirs["valid"])}
    for name in ("valid", "exact"):
        refined = iteration_scores(ours[name], ours["valid"], sampling.max_iterations)
        resampled = resampling_scores(theirs[name], theirs["valid"])
        answers = _answers(ours[name], ours["valid"], last=True)
        within = [_within(row, flags, budget) for row, flags in zip(control, theirs[name])]
        against = {
            "gain_over_resampling": [any(row) for row in theirs[name]],
            "gain_token_matched": [any(row) for row in within],
            "gain_over_selected": _answers(theirs[name], theirs["valid"], last=False),
            "gain_over_first_attempt": [row[0] for row in ours[name]],
        }
        gains = {label: paired_difference(answers, flags, sampling.seed) for label, flags in against.items()}
        result[name] = {"refinement": refined, "resampling": resampled, **gains}
    return result


def _answers(success, valid, last: bool) -> list[bool]:
    """Whether the last (or first) valid attempt of each record was right; without one, the last attempt."""
    results = []
    for flags, good in zip(success, valid):
        passed = [right for right, ok in zip(flags, good) if ok] or [flags[-1]]
        results.append(passed[-1 if last else 0])
    return results


def _prompt_length(writer: Writer, record: Record) -> int:
    """Tokens of the prompt that ends in <PLAN>, nothing cut."""
    context = context_segment(writer.tokenizer, record["context"]["path"], record["context"]["before"])
    problem = problem_segment(writer.tokenizer, record["problem"]["title"], record["problem"]["body"])
    return 2 + len(problem) + len(context)


def _attempts(writer: Writer, records, validator, iterations: int, temperature: float, repair_mode: str, what: str):
    """[(code, new tokens)] of each record's attempts."""
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
                repair_mode=repair_mode,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=writer.max_code_tokens,
                repetition_guard=writer.repetition_guard,
            )
            for attempts, plans in zip(output.attempts, output.plans):
                results.append(list(zip([attempt.code for attempt in attempts], _new_tokens(writer, attempts, plans))))
            bar.update(len(batch))
    return results


def _new_tokens(writer: Writer, attempts, plans: Sequence[str]) -> list[int]:
    """Tokens written for each attempt: its code, and its plan if that is new."""
    counts = []
    for index, (attempt, plan) in enumerate(zip(attempts, plans)):
        is_new = index == 0 or attempts[index - 1].decision == "REFINE"
        counts.append(attempt.new_tokens + (len(writer.tokenizer.encode(plan, add_special_tokens=False)) + 1) * is_new)
    return counts


def _judge(records, attempts, validator: Validator, syntax_alone: Sequence[bool]) -> dict[str, list[list[bool]]]:
    """Which attempts are valid, and which equal the reference: [records][attempts] each."""
    owners = [index for index, row in enumerate(attempts) for _ in row]
    codes = [code for row in attempts for code, _ in row]
    flags = {
        "valid": which_pass(validator, codes, [syntax_alone[index] for index in owners]),
        "exact": exact_matches(codes, [records[index]["solution"]["code"] for index in owners])[0],
    }
    judged: dict[str, list[list[bool]]] = {name: [[] for _ in records] for name in flags}
    for name, values in flags.items():
        for index, value in zip(owners, values):
            judged[name][index].append(value)
    return judged


def _tokens_until(rows, valid: Sequence[Sequence[bool]]) -> float:
    """New tokens of samples up to the first valid one, on average."""
    used = [
        sum(tokens for _, tokens in row[: (list(flags).index(True) + 1 if any(flags) else len(row))])
        for row, flags in zip(rows, valid)
    ]
    return float(np.mean(used))


def _within(row, flags: Sequence[bool], budget: float) -> list[bool]:
    """The flags of the samples that a budget of new tokens pays for; the first is always paid."""
    spent = np.cumsum([tokens for _, tokens in row])
    return [flag for index, (flag, used) in enumerate(zip(flags, spent)) if not index or used <= budget]


def _of_syntax(validator: Validator) -> Validator:
    """The validator as one that looks at syntax alone."""

    def look(codes: Sequence[str]) -> list[Feedback]:
        return [verdict.of_syntax() for verdict in validator(codes)]

    return look
