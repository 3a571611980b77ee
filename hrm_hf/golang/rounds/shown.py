"""A repair that works, to be looked at: a failure of the model's own, what it made of it, and both verdicts."""

import random
from pathlib import Path
from typing import Any

import torch

from ...hub.kinds import GO_CODER, load_config
from ...io.evaluation import validate_files
from ..data.records import read_records
from ..evaluation.failures import own_failures, usable_records
from ..evaluation.held_out import problem_text
from ..validators.go_validators import best_validator
from .fixes import collected_fixes
from .run import Sampling, open_writer


def working_repair(model: str, records: Path, sampling: Sampling, most: int = 64) -> dict[str, Any]:
    """Writes code for held-out problems until a failure is found that the model repairs.

    A repair works if the validator passes it, it changes at most 30 % of the tokens and drops nothing.

    Args:
        records: file of problems, taken in a seeded order.
        sampling: `samples` repairs are tried of each failure.
        most: failures to try.

    Returns:
        "written" codes, "failures" and, None if none was repaired, "repair": {"id", "problem", "attempt", "verdict",
        "code"}, the verdict as `Feedback` has it.

    Raises:
        UsageError: no such file, or a model that repairs by rewriting.
        ModelError: a model that is nowhere, or no Go coder.
    """
    validate_files([records], "--records")
    load_config(model, GO_CODER)
    writer, builder = open_writer(model, sampling)
    torch.manual_seed(sampling.seed)
    rows, counts = list(read_records(records)), {"written": 0, "failures": 0}
    random.Random(sampling.seed).shuffle(rows)
    with best_validator(sampling.validator) as judge:
        for start in range(0, len(rows), sampling.batch_size):
            usable = usable_records(rows[start : start + sampling.batch_size], judge)
            if not usable:
                continue
            found, said = own_failures(writer, builder, usable, judge, sampling.temperature, set())
            counts["written"] += said["attempts"]
            counts["failures"] += len(found)
            failed = [one.record for one in found]
            how = {"samples": sampling.samples, "temperature": sampling.temperature}
            if fixes := collected_fixes(writer, builder, failed, judge, **how)[0]:
                return counts | {"repair": _parts(fixes[0])}
            if counts["failures"] >= most:
                break
    return counts | {"repair": None}


def _parts(fix: dict[str, Any]) -> dict[str, Any]:
    failed, right = fix["attempts"]
    return {
        "id": fix["id"],
        "problem": problem_text(fix),
        "attempt": failed["code"],
        "verdict": failed["feedback"],
        "code": right["code"],
    }
