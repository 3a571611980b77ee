"""Lessons of a round: pairs of all rounds so far, and a part of what was learned before.

New pairs are hundreds where old records are ten thousands: all of these beside them would leave a short training
without the new ones, and none of them a model that forgets to plan and to write.
"""

import random
from collections.abc import Sequence

from ..evaluation.held_out import Record
from .failures import to_be_broken


LEAST_REPLAY = 1000  # old records; a handful of new pairs alone would be learned by heart


def fixer_pairs(
    fixes: Sequence[Record], broken: Sequence[Record], old: Sequence[Record], replay: float, seed: int
) -> list[Record]:
    """Records for the model itself: its repairs, damaged solutions with theirs, and old records.

    Args:
        replay: old records for each new pair; at least LEAST_REPLAY are taken, if there are as many, and none at 0.
        seed: of the choice among old records.
    """
    new = _distinct([*fixes, *broken])
    return [*_chosen(old, replay * len(new), replay, seed), *new]


def breaker_pairs(fixes: Sequence[Record], old: Sequence[Record], replay: float, seed: int) -> list[Record]:
    """Records for the breaker, from good to bad code: the repairs backwards, and old trajectories backwards.

    The first are realistic and few, the second synthetic and many; arguments as of `fixer_pairs`.
    """
    new = _distinct(fixes)
    trajectories = [record for record in old if len(record["attempts"]) > 1]
    synthetic = _chosen(trajectories, replay * len(new), replay, seed)
    pairs = [(record, record["attempts"][-2]["code"]) for record in (*synthetic, *new)]
    return [{**to_be_broken(record, bad), "id": f"{record['id']}@back"} for record, bad in pairs]


def _chosen(old: Sequence[Record], wanted: float, replay: float, seed: int) -> Sequence[Record]:
    count = max(round(wanted), LEAST_REPLAY) if replay else 0
    return old if count >= len(old) else random.Random(seed).sample(old, count)


def _distinct(pairs: Sequence[Record]) -> list[Record]:
    """Pairs without those that a later round found again."""
    found: dict[tuple[str, str], Record] = {}
    for pair in pairs:
        found.setdefault((pair["attempts"][-2]["code"], pair["solution"]["code"]), pair)
    return list(found.values())
