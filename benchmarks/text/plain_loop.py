"""Train `hrm_lm` on a task of eight steps with a plain AdamW loop, as a user would write it.

    python -m benchmarks.text.plain_loop [--arms default,nested,...] [--seeds 1 2 3] [--quick] [--out DIR]

A row has 20 random bits, followed by 20 blanks. The label of each blank is the bit in its place after eight steps of
the cyclic cellular automaton rule 110, so only the final answer is supervised. The loop uses none of this package's
trainers: 3,000 steps of 64 new rows, AdamW with gradient clipping at 1, and a cosine schedule with 100 warm-up steps.
Each arm changes fields of the default arm and has about 100k parameters. The script reports the fraction of correct
cells and rows on 2,048 held-out rows, after 500, 1,500 and 3,000 steps; chance is about 0.54 of the cells.

Runs are saved one by one, and existing runs are not repeated.
"""

import json
import math
import time

import torch

from hrm_hf import HrmLmConfig, HrmLmForCausalLM

from ..report import interval, machine, make_parser, write_report


BITS, STEPS, RULE, BLANK = 20, 8, 110, 2
STEPS_OF_TRAINING, ROWS, WARMUP, TESTED = 3000, 64, 100, 2048
WIDTHS = {"hidden_size": 56, "num_attention_heads": 2, "intermediate_size": 112, "vocab_size": 3}
NAME = "lm_plain_loop"
ARMS: dict[str, dict] = {
    "loop_1_1x8_1": {},
    "loop_lr1e-3": {"lr": 1e-3},
    "loop_lr4e-3": {"lr": 4e-3},
    "loop_6_passes": {"halt_max_steps": 6},
    "loop_qk_norm": {"qk_norm": True},
    "loop_affine": {"norm_affine": True},
    "loop_no_gate": {"attention_gate": False},
    "loop_sandwich": {"norm_position": "sandwich"},
    "loop_std02": {"initializer_range": 0.02},
    "loop_step_vectors": {"step_vectors": True, "pass_gains": True},
    "loop_4_heads": {"num_attention_heads": 4},
    "loop_concat": {"input_injection": "concat"},
    "loop_gated": {"input_injection": "gated"},
    "loop_bridge": {"input_injection": "bridge"},
    "loop_untied": {"tie_word_embeddings": False},
    "loop_scale_1": {"embedding_scale": 1.0},
    "loop_wide": {"hidden_size": 64, "intermediate_size": 64},
    "loop_1_head": {"num_attention_heads": 1},
    "loop_theta100": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "loop_12_passes": {"halt_max_steps": 12},
    "loop_beta95": {"betas": (0.9, 0.95)},
}


def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids [rows, 40] and shift_labels [rows, 40]. A label is at the position of its blank."""
    cells = torch.randint(0, 2, (rows, BITS), generator=generator)
    ids = torch.cat([cells, torch.full_like(cells, BLANK)], dim=1)
    for _ in range(STEPS):
        neighbors = 4 * cells.roll(1, 1) + 2 * cells + cells.roll(-1, 1)
        cells = RULE >> neighbors & 1
    return ids, torch.cat([torch.full_like(cells, -100), cells], dim=1)


def train(fields: dict, seed: int, steps: int) -> dict:
    """Train one model and return its curve, parameters and seconds."""
    torch.manual_seed(seed)
    fields = dict(fields)
    lr, betas = fields.pop("lr", 2e-3), fields.pop("betas", (0.9, 0.999))
    preset = fields.pop("preset", "hrm-lm-loop-25m")
    loop = {"prelude_layers": 1, "num_l_layers": 1, "coda_layers": 1, "halt_max_steps": 8} if "loop" in preset else {}
    config = HrmLmConfig.from_preset(preset, **{**WIDTHS, "max_position_embeddings": 64, **loop, **fields})
    model = HrmLmForCausalLM(config)
    rows, held_out = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10**6 + seed)
    tested = draw(TESTED, held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * n / steps))
    )
    curve, started = {}, time.perf_counter()
    for step in range(1, steps + 1):
        ids, labels = draw(ROWS, rows)
        model(input_ids=ids, shift_labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 250 == 0 or step == steps:
            curve[step] = score(model, *tested)
            print(f"  {step}: cells {curve[step][0]:.3f}, rows {curve[step][1]:.3f}", flush=True)
    return {
        "curve": curve,
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - started),
    }


@torch.no_grad()
def score(model: HrmLmForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the fractions of correct cells and of correct rows."""
    model.eval()
    correct = (model(input_ids=ids).logits.argmax(-1) == labels)[:, BITS:].float()
    model.train()
    return round(correct.mean().item(), 4), round(correct.amin(1).mean().item(), 4)


def main() -> None:
    parser = make_parser(__doc__, quick="three steps of one arm")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS_OF_TRAINING, help="training steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.out / f"{NAME}{'_quick' if args.quick else ''}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    for seed in args.seeds:
        for arm in args.arms.split(",")[: 1 if args.quick else None]:
            key = f"{arm} seed {seed}"
            if key in runs and not args.quick:
                continue
            print(key, ARMS[arm], flush=True)
            runs[key] = {"fields": ARMS[arm], **train(ARMS[arm], seed, 3 if args.quick else args.steps)}
            by_arm: dict[str, list[float]] = {}
            for name, run in runs.items():
                by_arm.setdefault(name.partition(" seed ")[0], []).append(list(run["curve"].values())[-1][0])
            cells = {name: interval(values) for name, values in by_arm.items()}
            write_report(args, NAME, {"cells": cells, "runs": runs, "machine": machine()})


if __name__ == "__main__":
    main()
