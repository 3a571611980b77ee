"""Bits per byte and perplexity of held-out code, and what a plan is worth to it.

Records of any length are scored: what does not fit the model's positions is scored in windows, each token once, every
window after the same problem and plan and after half a window of the code before it.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models.processing_hrm_go_coder import BOS, EOS, TOKEN_IDS, code_segment, encode_text
from ..data.streams import GoStreamBuilder
from .held_out import Record, code_body, plan_ids_of
from .metrics import bits_per_byte, mean, ratio_interval
from .writer import Writer


def evaluate_loss(
    writer: Writer, builder: GoStreamBuilder, records: Sequence[Record], seed: int = 0
) -> dict[str, Any]:
    """Score code bodies (</CODE> included) given the problem and a plan, and the code as plain text.

    The plan is the record's own, another record's (a seeded order, shifted by one), or <PLAN></PLAN>; a difference
    above 0 means that the plan helps. `plan_and_code` adds the bits of the own plan, to compare with a model that has
    none. `in_windows` counts records that are longer than the writer's `max_length` in one of the forms. Records whose
    complete code is given have nothing to score.
    """
    records = [record for record in records if code_body(record)]
    prompts = [builder.prompt_ids(record) for record in records]
    plans = [plan_ids_of(writer, record["plan"]) for record in records]
    other = _other_plans(plans, seed)
    forms = {"own": plans, "shuffled": other, "none": [[TOKEN_IDS["</PLAN>"]]] * len(records)}
    codes = [code_segment(writer.tokenizer, record["code_prefix"], code_body(record)) for record in records]
    longest = [len(a) + max(len(b), len(c)) + len(d[0]) for a, b, c, d in zip(prompts, plans, other, codes)]
    result: dict[str, Any] = {
        "records": len(records), "in_windows": sum(length > writer.max_length for length in longest)
    }  # fmt: skip
    if not records:
        return result
    sizes = [len(code_body(record).encode()) for record in records]
    opener, nats = [TOKEN_IDS["<CODE>"]], {}
    for name, chosen in forms.items():
        texts = [([*prompt, *plan], *code) for prompt, plan, code in zip(prompts, chosen, codes)]
        nats[name] = _nats(writer, texts, opener, f"code, {name} plan")
    plan_nats = _nats(writer, [(prompt, plan, 0) for prompt, plan in zip(prompts, plans)], [], "plans")
    tokens = sum(len(ids) - start for ids, start in codes)
    result |= {"code_perplexity": math.exp(sum(nats["own"]) / tokens), **_loss_metrics(nats, plan_nats, sizes, seed)}
    return result | _raw_text(writer, [record["solution"]["code"] for record in records])


def _nats(writer: Writer, texts: Sequence[tuple[list[int], list[int], int]], opener: list[int], what: str):
    """Return the nats of each text's ids from its start on; texts are (given ids, ids, start)."""
    windows = [windows_of(given, ids, start, opener, writer.max_length) for given, ids, start in texts]
    owners = [index for index, several in enumerate(windows) for _ in several]
    flat = [window for several in windows for window in several]
    sums = [0.0] * len(texts)
    for owner, value in zip(owners, writer.nats([row for row, _ in flat], [start for _, start in flat], what)):
        sums[owner] += value
    return sums


def windows_of(
    given: list[int], ids: list[int], start: int, opener: list[int], length: int
) -> list[tuple[list[int], int]]:
    """Split ids into rows of at most `length`, each with the start of its targets; ids[start:] are targets once.

    Args:
        given: what precedes `ids`; where it is longer than half a row, its first id and its last ones are kept.
        ids: of which the first `start` are no targets.
        opener: ids after `given` in all windows but the first, whose `ids` begin with them.
    """
    if len(given) + len(ids) <= length:
        return [([*given, *ids], len(given) + start)]
    most = length // 2 - start
    given = given if len(given) <= most else [given[0], *given[len(given) - max(most - 1, 0) :]]
    room = length - len(given)
    rows, at = [([*given, *ids[:room]], len(given) + start)], room
    room -= len(opener)
    while at < len(ids):
        back = at - room // 2
        rows.append(([*given, *opener, *ids[back : back + room]], len(given) + len(opener) + room // 2))
        at = back + room
    return rows


def _loss_metrics(nats: dict[str, list[float]], plan_nats: list[float], sizes: list[int], seed: int) -> dict[str, Any]:
    total = sum(sizes)
    metrics = {"code_bits_per_byte": bits_per_byte(sum(nats["own"]), total)}
    for name in ("shuffled", "none"):
        metrics[f"code_bits_per_byte_{name}_plan"] = bits_per_byte(sum(nats[name]), total)
        more = (np.asarray(nats[name]) - np.asarray(nats["own"])) / np.log(2)
        metrics[f"{name}_plan_costs"] = float(more.sum() / total)
        metrics[f"{name}_plan_costs_interval"] = list(ratio_interval(more, sizes, seed))
        metrics[f"{name}_plan_costs_records"] = mean(more > 0)
    both = bits_per_byte(sum(nats["own"]) + sum(plan_nats), total)
    return metrics | {"plan_and_code_bits_per_byte": both, "code_bytes": total}


def _raw_text(writer: Writer, codes: Sequence[str]) -> dict[str, Any]:
    """Score code as plain Go text, in windows of `max_length` that each begin with <s>."""
    room, windows = writer.max_length - 1, []
    for code in codes:
        ids = [*encode_text(writer.tokenizer, code), TOKEN_IDS[EOS]]
        windows += [[TOKEN_IDS[BOS], *ids[start : start + room]] for start in range(0, len(ids), room)]
    nats = writer.nats(windows, [1] * len(windows), "raw text")
    return {"raw_text_bits_per_byte": bits_per_byte(sum(nats), sum(len(code.encode()) for code in codes))}


def _other_plans(plans: list[list[int]], seed: int) -> list[list[int]]:
    order = list(range(len(plans)))
    random.Random(seed).shuffle(order)
    other: list[list[int]] = [[] for _ in plans]
    for index, chosen in zip(order, order[1:] + order[:1]):
        other[index] = plans[chosen]
    return other
