"""Tasks of `retrofit_arms.py` for models that read bytes, with the arms and settings of each study.

The task `rearrangements` asks for the result after K = 1..12 steps alone. The others are those of the reasoning suite
and ask for the result of every step, all in one forward pass.

A task's `rows(count, generator, steps)` returns the inputs, the labels and the number of steps to each label, all
[count, length]. A label is at the position that predicts it, and is -100 where nothing is asked.
"""

import numpy as np
import torch
from torch.nn import functional as F

from hrm_hf.text.reasoning.build import draw_rows
from hrm_hf.text.reasoning.tasks import TASKS

from .models import FIRST_BYTE


class Rearrangements:
    """Composition of K permutations in one answer: `p3 bae.........>24130` asks for 01234 after b, a and e.

    The moves a-d swap neighbors, and e moves every item to the next position. K is `steps` or random.
    """

    most, items, length = 12, 5, 136  # steps of the hardest questions, tokens per answer, tokens per row

    def test_rows(self, count: int, generator: torch.Generator):
        """Return `count` rows for each number of steps K."""
        parts = [self.rows(count, generator, steps) for steps in range(1, self.most + 1)]
        return tuple(torch.cat(part) for part in zip(*parts))

    def rows(self, count: int, generator: torch.Generator, steps: int | None = None):
        most, items_in, device = self.most, self.items, generator.device
        total = count * ((self.length + 1) // (most + items_in + 5))
        table = torch.arange(items_in).repeat(items_in, 1)  # for each move, the previous position of each item
        for place in range(items_in - 1):
            table[place, [place, place + 1]] = torch.tensor([place + 1, place])
        table[-1] = table[-1].roll(1)
        table = table.to(device)
        drawn = torch.randint(1, most + 1, (total, 1), generator=generator, device=device)
        drawn = drawn if steps is None else torch.full_like(drawn, steps)
        chosen = torch.randint(0, items_in, (total, most), generator=generator, device=device)
        items = torch.arange(items_in, device=device).expand(total, -1)
        used = torch.arange(most, device=device) < drawn
        for step in range(most):
            items = torch.where(used[:, step, None], items.gather(1, table[chosen[:, step]]), items)
        p, zero, a, dot, space, end, newline = (FIRST_BYTE + byte for byte in b"p0a. >\n")
        fixed = [torch.full_like(drawn, byte) for byte in (p, space, end, newline)]
        parts = [
            fixed[0],
            drawn + zero,
            fixed[1],
            torch.where(used, chosen + a, dot),
            fixed[2],
            items + zero,
            fixed[3],
        ]
        asked = [(drawn if part is parts[5] else torch.zeros_like(drawn)).expand_as(part) for part in parts]
        lines, asked = (torch.cat(some, dim=1).view(count, -1) for some in (parts, asked))
        rest = self.length + 1 - lines.shape[1]
        lines, asked = F.pad(lines, (0, rest), value=newline), F.pad(asked, (0, rest))[:, 1:]
        return lines[:, :-1], torch.where(asked > 0, lines[:, 1:], -100), asked


class Suite:
    """A task of the reasoning suite with an answer after every step.

    The ids of its words are kept. In a byte-level vocabulary, they are special tokens and control characters.
    """

    def __init__(self, name: str, size: int, most: int):
        self.task, self.items, self.most = TASKS[name](size=size), size, most
        self.length = draw_rows(self.task, np.array([most]), np.random.default_rng(0))["input_ids"].shape[1]

    def test_rows(self, count: int, generator: torch.Generator):
        return self.rows(count, generator)

    def rows(self, count: int, generator: torch.Generator):
        seed = torch.randint(0, 2**31, (1,), generator=generator, device=generator.device).item()
        drawn = draw_rows(self.task, np.full(count, self.most), np.random.default_rng(seed))
        ids, labels, steps = (torch.from_numpy(drawn[name]) for name in ("input_ids", "labels", "steps"))
        labels, steps = F.pad(labels[:, 1:], (0, 1), value=-100), F.pad(steps[:, 1:], (0, 1))
        return tuple(part.to(generator.device) for part in (ids, labels, steps))


def make_task(name: str):
    sizes = {"permutations": (5, 8), "automaton": (16, 8)}
    return Suite(name, *sizes[name]) if name in sizes else Rearrangements()


# ---- arms: the arguments of `from_llama` (None for a Llama), and the options of the trainer's curriculum ----

RANDOM = {"segment_sampling": "lognormal_poisson"}
DAMPED = RANDOM | {"passes": 4, "input_injection": "gated", "loop_step": "damped"}
RAMP = {"depth_ramp_ratio": 0.25}
LAST_ANSWER = {
    "plain": (None, {}),
    "loop4": (DAMPED, RAMP),
    "loop2": (DAMPED | {"passes": 2}, RAMP),
    "etd2": ({"passes": 2, "input_injection": "none", "loop_step": "replace"}, {}),
    "one_pass": (DAMPED, RAMP | {"keep_one_pass": 0.2}),
    "no_ramp": (DAMPED, {}),
    "deeper": (None, {}),
    "scratch": (DAMPED, RAMP),
    "add": (DAMPED | {"input_injection": "add"}, RAMP),
}

# Random numbers of passes, with gradients through the last three (see docs/reasoning.md)
LOOPED = RANDOM | {"passes": 6, "input_injection": "gated", "loop_step": "rescaled", "bp_segments": 3}
FOUR = LOOPED | {"passes": 4}
EVERY_STEP = {
    "plain": (None, {}),
    "loop6": (LOOPED, {"text_once": True}),
    "loop4": (FOUR, {"text_once": True}),
    "text3": (FOUR, {"text_once": True, "text_weight": 3.0}),
    "plain_text3": (None, {"text_weight": 3.0}),
    "replace": (LOOPED | {"loop_step": "replace"}, {"text_once": True}),
    "all_passes": (LOOPED, {}),
    "ramp": (LOOPED, RAMP | {"text_once": True}),
    "one_pass": (LOOPED, {"text_once": True, "keep_one_pass": 0.2}),
    "etd2": ({"passes": 2, "input_injection": "none", "loop_step": "replace"}, {"text_once": True}),
    "lora": (FOUR | {"pass_lora_rank": 8}, {"text_once": True}),
    "bp1": (FOUR | {"bp_segments": 1}, {"text_once": True}),
    "bp2": (FOUR | {"bp_segments": 2}, {"text_once": True}),
    "scratch": (LOOPED, {"text_once": True}),
    "deeper": (None, {}),
}
ARMS = {"rearrangements": LAST_ANSWER, "permutations": EVERY_STEP, "automaton": EVERY_STEP}
SETTINGS = {
    "rearrangements": {"family": "llama", "layers": "1,2,1", "width": 128, "heads": 4, "rows": 48, "eval_rows": 1024,
                       "pretrain_steps": 3000, "arm_steps": 1107, "learning_rate": 1.5e-3, "pretrain_rate": 2e-3},
    "permutations": {"family": "qwen3", "layers": "1,1,0", "width": 64, "heads": 4, "rows": 16, "eval_rows": 512,
                     "pretrain_steps": 1500, "arm_steps": 2600, "learning_rate": 4e-3, "pretrain_rate": 4e-3},
}  # fmt: skip
SETTINGS["automaton"] = SETTINGS["permutations"]
SHARED = ("task", "family", "layers", "width", "heads", "rows", "pretrain_steps", "learning_rate", "pretrain_rate")
