"""Train `hrm_lm` on a task of eight steps with a plain AdamW loop, as a user would write it.

    python -m benchmarks.text.plain_loop --arms preset,preset+lr4e-3
    python -m benchmarks.text.plain_loop --device cuda --seeds 1

A row has 20 random bits, followed by 20 blanks. The label of each blank is the bit in its place after eight steps of
the cyclic cellular automaton rule 110, so only the final answer is supervised. The loop uses none of this package's
trainers: 3,000 steps of 64 new rows, AdamW with a learning rate of 2e-3, gradient clipping at 1, and a cosine schedule
with 100 warm-up steps. The script reports the fraction of correct cells and rows on 2,048 held-out rows; always
guessing the more frequent bit gives about 0.54 of the cells.

The arm `preset` uses the preset for tasks of many steps. The arm `loop` has the defaults of the other presets with a
loop at about 100k parameters, and most other arms change one of its fields; A+B+C combines arms. On a GPU, all runs
train at the same time. Existing runs are not repeated.
"""

import json
import math
import time

import torch

from hrm_hf import HrmLmConfig, HrmLmForCausalLM

from ..report import interval, machine, make_parser, write_report


BITS, STEPS, RULE, BLANK = 20, 8, 110, 2
STEPS_OF_TRAINING, ROWS, WARMUP, TESTED = 3000, 64, 100, 2048
DEFAULT = {"prelude_layers": 1, "num_l_layers": 1, "coda_layers": 1, "halt_max_steps": 8}
WIDTHS = {
    "hidden_size": 56,
    "num_attention_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 3,
    "max_position_embeddings": 64,
}
NAME = "lm_plain_loop"
ARMS: dict[str, dict] = {
    "loop": {},
    "lr1e-3": {"lr": 1e-3},
    "lr4e-3": {"lr": 4e-3},
    "6_passes": {"halt_max_steps": 6},
    "qk_norm": {"qk_norm": True},
    "affine": {"norm_affine": True},
    "no_gate": {"attention_gate": False},
    "sandwich": {"norm_position": "sandwich"},
    "std02": {"initializer_range": 0.02},
    "step_vectors": {"step_vectors": True, "pass_gains": True},
    "4_heads": {"num_attention_heads": 4},
    "concat": {"input_injection": "concat"},
    "gated": {"input_injection": "gated"},
    "bridge": {"input_injection": "bridge"},
    "untied": {"tie_word_embeddings": False},
    "scale_1": {"embedding_scale": 1.0},
    "wide": {"hidden_size": 64, "intermediate_size": 64},
    "1_head": {"num_attention_heads": 1},
    "theta100": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "12_passes": {"halt_max_steps": 12},
    "beta95": {"betas": (0.9, 0.95)},
    "llama": {
        "tie_word_embeddings": False,
        "embedding_scale": 1.0,
        "initializer_range": 0.02,
        "attention_gate": False,
        "norm_affine": True,
    },
    "std077": {"initializer_range": 0.077},
    "std04": {"initializer_range": 0.04},
    "8_heads": {"num_attention_heads": 8, "head_dim": 8},
    "old": {
        "initializer_range": 0.077,
        "tie_word_embeddings": False,
        "num_attention_heads": 4,
        "attention_gate": False,
        "norm_affine": True,
        "halt_max_steps": 6,
    },
    "learned_state": {"initial_state": "learned"},
    "mhc": {"mhc_flows": 2},
    "preset": {"preset": "hrm-lm-loop-100k-tasks"},
    "nested": {
        **WIDTHS,
        "preset": "hrm-lm-25m",
        "num_h_layers": 1,
        "num_l_layers": 1,
        "H_cycles": 2,
        "L_cycles": 3,
        "halt_max_steps": 1,
        "bp_steps": 8,
    },
}


def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids [rows, 40] and shift_labels [rows, 40]. A label is at the position of its blank."""
    cells = torch.randint(0, 2, (rows, BITS), generator=generator)
    ids = torch.cat([cells, torch.full_like(cells, BLANK)], dim=1)
    for _ in range(STEPS):
        neighbors = 4 * cells.roll(1, 1) + 2 * cells + cells.roll(-1, 1)
        cells = RULE >> neighbors & 1
    return ids, torch.cat([torch.full_like(cells, -100), cells], dim=1)


def build(fields: dict, seed: int) -> tuple[HrmLmForCausalLM, dict]:
    """Return an arm's model and the options of its optimizer."""
    torch.manual_seed(seed)
    fields = dict(fields)
    options = {"lr": fields.pop("lr", 2e-3), "betas": fields.pop("betas", (0.9, 0.999))}
    preset = fields.pop("preset", None)
    sizes = {"vocab_size": 3} if preset else DEFAULT | WIDTHS
    config = HrmLmConfig.from_preset(preset or "hrm-lm-loop-25m", **sizes | fields)
    return HrmLmForCausalLM(config), options


def factor(n: int, steps: int) -> float:
    """Return the learning rate of step n, counted from 0, as a fraction of its maximum."""
    return min(1, (n + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * n / steps))


def generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    """Return random generators for the training rows and for the held-out rows."""
    return torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10**6 + seed)


def train(fields: dict, seed: int, steps: int) -> dict:
    """Train one model; return its learning curve, number of parameters and training time in seconds."""
    model, options = build(fields, seed)
    rows, held_out = generators(seed)
    tested = draw(TESTED, held_out)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor(n, steps))
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


class GraphedRun:
    """Training run on a GPU. Its steps replay a CUDA graph on its own stream, so that many runs share the GPU.

    The rows, their order and the optimizer are those of `train`; the losses differ by rounding.
    """

    def __init__(self, fields: dict, seed: int, steps: int):
        self.model, options = build(fields, seed)
        self.model.to("cuda").train()
        rows, held_out = generators(seed)
        drawn = [draw(ROWS, rows) for _ in range(steps)]
        self.ids, self.labels = (torch.stack(some).to("cuda") for some in zip(*drawn))
        self.tested = [some.to("cuda") for some in draw(TESTED, held_out)]
        self.rates = options["lr"] * torch.tensor([factor(n, steps) for n in range(steps)], device="cuda")
        self.lr, self.step = torch.zeros((), device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options | {"lr": self.lr}, capturable=True)
        self.curve, self.stream, self.graph = {}, torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self.capture()

    def train_step(self) -> None:
        """Run one optimizer step.

        The loss is computed here, because `model(labels=...)` selects the labeled tokens by indexing, which a CUDA
        graph cannot record.
        """
        ids, labels = self.ids[self.step].squeeze(0), self.labels[self.step].squeeze(0)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, BITS:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, BITS:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.lr.copy_(self.rates[self.step].squeeze(0))
        self.optimizer.step()
        self.step.add_(1)

    def capture(self) -> None:
        """Record a training step as a CUDA graph, which needs warm-up steps. Then restore the initial state."""
        initial = [weight.detach().clone() for weight in self.model.parameters()]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.train_step()
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.train_step()
        with torch.no_grad():
            for weight, start in zip(self.model.parameters(), initial):
                weight.copy_(start)
                for value in self.optimizer.state[weight].values():
                    value.zero_()
            self.step.zero_()
        torch.cuda.synchronize()

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def train_together(arms: dict[str, dict], seeds: list[int], steps: int, save) -> None:
    """Train all arms and seeds at the same time on one GPU, and call `save(key, run)` after each evaluation."""
    started, runs = time.perf_counter(), {}
    for name in arms:
        for seed in seeds:
            runs[f"{name} seed {seed}"] = GraphedRun(arms[name], seed, steps)
    print(f"{len(runs)} runs captured as CUDA graphs after {time.perf_counter() - started:.0f} s", flush=True)
    for step in range(1, steps + 1):
        for run in runs.values():
            run.replay()
        if step % 500 and step != steps:
            continue
        torch.cuda.synchronize()
        seconds = round(time.perf_counter() - started)
        for key, run in runs.items():
            run.curve[step] = score(run.model, *run.tested)
            fields = arms[key.partition(" seed ")[0]]
            save(key, {"fields": fields, "curve": run.curve, "parameters": run.model.num_parameters(),
                       "seconds_of_all": seconds})  # fmt: skip
        best = sorted(((run.curve[step], key) for key, run in runs.items()), reverse=True)
        print(f"step {step}, {seconds} s:", *(f"{key} {found[0]:.3f}" for found, key in best), sep="\n  ", flush=True)


@torch.no_grad()
def score(model: HrmLmForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the fractions of correct cells and of correct rows."""
    model.eval()
    correct = (model(input_ids=ids).logits.argmax(-1) == labels)[:, BITS:].float()
    model.train()
    return round(correct.mean().item(), 4), round(correct.amin(1).mean().item(), 4)


def main() -> None:
    parser = make_parser(__doc__, quick="three steps of one arm")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms to train, comma-separated; A+B combines two arms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS_OF_TRAINING, help="training steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda trains all runs at once")
    parser.add_argument("--name", default=NAME, help="name of the report")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.out / f"{args.name}{'_quick' if args.quick else ''}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() and not args.quick else {}
    arms = {name: arm_fields(name) for name in args.arms.split(",")[: 1 if args.quick else None]}

    def save(key: str, run: dict) -> None:
        runs[key] = run
        by_arm: dict[str, list[float]] = {}
        for name, found in runs.items():
            by_arm.setdefault(name.partition(" seed ")[0], []).append(list(found["curve"].values())[-1][0])
        cells = {name: interval(values) for name, values in by_arm.items()}
        write_report(args, args.name, {"cells": cells, "runs": runs, "machine": machine()})

    steps = 3 if args.quick else args.steps
    if args.device == "cuda":
        train_together(arms, args.seeds, steps, save)
        return
    for seed in args.seeds:
        for name, fields in arms.items():
            key = f"{name} seed {seed}"
            if key not in runs:
                print(key, fields, flush=True)
                save(key, {"fields": fields, **train(fields, seed, steps)})


def arm_fields(name: str) -> dict:
    """Return the fields of an arm named NAME or NAME+FIELD=VALUE+..., with values in JSON."""
    arm, *changes = name.split("+")
    found = dict(ARMS[arm])
    for change in changes:
        found |= ARMS[change] if change in ARMS else {change.partition("=")[0]: json.loads(change.partition("=")[2])}
    return found


if __name__ == "__main__":
    main()
