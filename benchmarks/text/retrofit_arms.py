"""Compare ways to train a pretrained Llama further, plain or looped, at equal training FLOPs.

    python -m benchmarks.text.retrofit_arms --device cuda
    python -m benchmarks.text.retrofit_arms --quick

For each seed, a small byte-level Llama is pretrained on rows of text and rows of an iterated task, one of each. Every
arm continues from it on the same data in the same order, until it has spent the same training FLOPs:

    plain       the Llama itself
    deeper      the Llama with more layers, which start as zero-output copies: as many layers as `loop4` runs
    etd2        two passes through the middle layers in every step, without input injection or damping
    loop2       the proposed form: gated injection, damped passes, a random number of passes with mean 2 after a ramp
    loop4       the same with mean 4
    no_ramp     loop4 without the ramp
    add         loop4 with input injection "add"
    one_pass    loop4 with a single pass in a fifth of the steps
    scratch     loop4 from random weights, which also spends the FLOPs of the pretraining

The task is the composition of K = 1..12 permutations. `p3 bae.........>24130` asks for the items 01234 after three
rearrangements: a-d swap neighbors, and e moves every item to the next place.

The runs of one arm train side by side, one CUDA stream per seed, and a training step is a CUDA graph per number of
passes. Each run is saved once it is evaluated (--runs); a repeated call trains only the missing ones. With
--budget_seconds, no run goes on after that time.
"""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hrm_hf import HrmLmForCausalLM
from hrm_hf.models.segment_plan import SegmentSchedule, drawn_segments
from hrm_hf.text.trainer import segment_schedule
from hrm_hf.trainer.recipes import library_versions

from ..report import interval, machine, make_parser, write_report
from .models import BYTES, FIRST_BYTE, flops_per_token, held_out_rows, text_file
from .quality import parameter_groups, schedule


LENGTH, MOST, ITEMS = 136, 12, 5  # bytes per row, maximum steps per question, number of permuted items
QUESTIONS = (LENGTH + 1) // (MOST + ITEMS + 5)  # per row
LOOPED = {"passes": 4, "input_injection": "gated", "loop_step": "damped", "segment_sampling": "lognormal_poisson"}
# For each arm, the arguments of `from_llama`, and the options of the trainer's curriculum.
ARMS = {
    "plain": (None, {}),
    "loop4": (LOOPED, {"depth_ramp_ratio": 0.25}),
    "loop2": (LOOPED | {"passes": 2}, {"depth_ramp_ratio": 0.25}),
    "etd2": ({"passes": 2, "input_injection": "none", "loop_step": "replace"}, {}),
    "one_pass": (LOOPED, {"depth_ramp_ratio": 0.25, "keep_one_pass": 0.2}),
    "no_ramp": (LOOPED, {}),
    "deeper": (None, {}),
    "scratch": (LOOPED, {"depth_ramp_ratio": 0.25}),
    "add": (LOOPED | {"input_injection": "add"}, {"depth_ramp_ratio": 0.25}),
}
CURRICULUM = {"depth_ramp": "linear", "depth_ramp_ratio": 0.0, "depth_warmup_ratio": 0.0, "keep_one_pass": 0.0,
              "bp_warmup_ratio": 0.0, "halt_warmup_ratio": 0.0, "train_gate_only": False}  # fmt: skip
# Settings that must be the same for all runs.
SHARED = ("layers", "width", "rows", "learning_rate", "pretrain_rate", "pretrain_steps")


def main() -> None:
    args = parse()
    if args.arm:
        return train_arm(args)
    deadline = time.time() + (args.budget_seconds or 1e9)
    args.runs.mkdir(parents=True, exist_ok=True)
    run_workers(args, ["pretrained"], deadline)
    run_workers(args, args.arms.split(","), deadline)
    report = summary(args)
    write_report(args, "lm_retrofit_arms", report)
    print_table(report)


def parse():
    parser = make_parser(__doc__, quick="a Llama of width 32, a few steps per arm")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--layers", default="1,2,1", help="layers before, in and after the loop")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=48, help="rows per step, half of them text")
    parser.add_argument("--pretrain_steps", type=int, default=3000)
    parser.add_argument("--arm_steps", type=int, default=1107, help="steps of `plain`")
    parser.add_argument("--learning_rate", type=float, default=1.5e-3, help="peak learning rate of the arms")
    parser.add_argument("--pretrain_rate", type=float, default=2e-3)
    parser.add_argument("--train_file", help="text (plain UTF-8 or gzip); the books in shared/data by default")
    parser.add_argument("--valid_file")
    parser.add_argument("--train_bytes", type=int, default=5_900_000, help="use only the first N bytes of the text")
    parser.add_argument("--eval_rows", type=int, default=1024, help="held-out text rows; N / 8 questions for each K")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3, help="number of arms to train at the same time")
    parser.add_argument("--budget_seconds", type=float)
    parser.add_argument("--runs", type=Path, default=Path("runs/retrofit_arms"), help="folder with one file per run")
    parser.add_argument("--arm", help="train only this arm, in the current process")
    parser.add_argument("--deadline", type=float, default=math.inf, help="with --arm: stop at this Unix time")
    args = parser.parse_args()
    if args.quick:
        args.width, args.rows, args.pretrain_steps, args.arm_steps, args.eval_rows = 32, 8, 8, 8, 16
        args.seeds, args.arms, args.processes, args.runs = "0", "plain,loop4", 1, Path(tempfile.mkdtemp())
    return args


# ---- the runner ----


def run_path(args, arm: str, seed: str) -> Path:
    return args.runs / f"{arm}_seed{seed}.json"


def run_workers(args, arms: list[str], deadline: float) -> None:
    """Train the arms that are not finished, each in its own process, `args.processes` at a time."""
    options = [name for name in vars(args) if name not in ("quick", "arm", "deadline", "arms", "out")]
    command = [sys.executable, "-m", "benchmarks.text.retrofit_arms"]
    for name in options:
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", str(value)]
    waiting = [arm for arm in arms if not all(run_path(args, arm, seed).is_file() for seed in args.seeds.split(","))]
    running = {}
    while (waiting and time.time() < deadline) or running:
        while waiting and len(running) < args.processes and time.time() < deadline:
            arm = waiting.pop(0)
            running[arm] = subprocess.Popen([*command, "--arm", arm, "--deadline", str(deadline)])
        time.sleep(0.2)
        for arm in [arm for arm, process in running.items() if process.poll() is not None]:
            print(f"{arm}: exit status {running.pop(arm).returncode}", flush=True)


# ---- data, made on the device ----


def task_rows(count: int, generator: torch.Generator, steps: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [count, LENGTH] of questions with `steps` steps (None: random) and labels (-100 outside answers)."""
    device = generator.device
    table = torch.arange(ITEMS).repeat(ITEMS, 1)  # for each rearrangement, the previous position of each item
    for place in range(ITEMS - 1):
        table[place, [place, place + 1]] = torch.tensor([place + 1, place])
    table[-1] = table[-1].roll(1)
    table = table.to(device)
    drawn = torch.randint(1, MOST + 1, (count * QUESTIONS, 1), generator=generator, device=device)
    drawn = drawn if steps is None else torch.full_like(drawn, steps)
    chosen = torch.randint(0, ITEMS, (count * QUESTIONS, MOST), generator=generator, device=device)
    items = torch.arange(ITEMS, device=device).expand(count * QUESTIONS, -1)
    used = torch.arange(MOST, device=device) < drawn
    for step in range(MOST):
        items = torch.where(used[:, step, None], items.gather(1, table[chosen[:, step]]), items)
    p, zero, a, dot, space, end, newline = (FIRST_BYTE + byte for byte in b"p0a. >\n")
    fixed = [torch.full_like(drawn, byte) for byte in (p, space, end, newline)]
    parts = [fixed[0], drawn + zero, fixed[1], torch.where(used, chosen + a, dot), fixed[2], items + zero, fixed[3]]
    mask = torch.cat([torch.full_like(part, part is parts[5]) for part in parts], dim=1).bool().view(count, -1)
    lines = torch.cat(parts, dim=1).view(count, -1)
    rest = LENGTH + 1 - lines.shape[1]
    lines = F.pad(lines, (0, rest), value=newline)
    return lines[:, :-1], torch.where(F.pad(mask, (0, rest)), lines, -100)[:, 1:]


def training_rows(args, text: torch.Tensor, count: int, generator: torch.Generator):
    """Return the inputs and labels [count, rows, LENGTH] of the next `count` steps."""
    half = args.rows // 2
    starts = torch.randint(0, len(text) - LENGTH, (count * half,), generator=generator, device=text.device)
    rows = text[starts[:, None] + torch.arange(LENGTH + 1, device=text.device)].long()
    parts = (rows[:, :-1], rows[:, 1:]), task_rows(count * half, generator)
    return tuple(torch.cat([part[n].view(count, -1, LENGTH) for part in parts], dim=1) for n in (0, 1))


# ---- models ----


def split(args) -> tuple[int, int, int]:
    return tuple(int(number) for number in args.layers.split(","))


def make_llama(args, seed: str, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(int(seed))
    heads = max(1, args.width // 32)
    inner = 16 * round(args.width * 8 / 3 / 16)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=BYTES, hidden_size=args.width, intermediate_size=inner, num_hidden_layers=layers,
                    num_attention_heads=heads, max_position_embeddings=LENGTH, tie_word_embeddings=True,
                    initializer_range=args.width**-0.5)
    )  # fmt: skip


def make_model(args, arm: str, seed: str):
    """Build the model that an arm trains."""
    before, inside, after = split(args)
    llama = make_llama(args, seed, before + inside + after)
    if arm not in ("pretrained", "scratch"):
        llama.load_state_dict(torch.load(args.runs / f"pretrained_seed{seed}.pt", weights_only=True))
    options = ARMS[arm][0] if arm in ARMS else None
    if arm == "deeper":
        return deepened(args, llama, seed, (LOOPED["passes"] - 1) * inside)
    if options is None:
        return llama
    return HrmLmForCausalLM.from_llama(llama, prelude_layers=before, loop_layers=inside, coda_layers=after, **options)


def deepened(args, llama: LlamaForCausalLM, seed: str, extra: int) -> LlamaForCausalLM:
    """Return a Llama with `extra` copies of its middle layers inserted after them. The copies initially add zero."""
    before, inside, after = split(args)
    model = make_llama(args, seed, before + inside + after + extra)
    source = [*range(before + inside), *(before + n % inside for n in range(extra))]
    source += range(before + inside, before + inside + after)
    for layer, index in zip(model.model.layers, source):
        layer.load_state_dict(llama.model.layers[index].state_dict())
    for layer in model.model.layers[before + inside : before + inside + extra]:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(last.weight)
    model.model.embed_tokens.load_state_dict(llama.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(llama.model.norm.state_dict())
    return model


def drawn_passes(args, arm: str, seed: str, model, flops: float) -> tuple[list[int], float]:
    """Return the number of passes in each training step, 1 for a plain Llama, and the FLOPs of all steps.

    There are as many steps as cost about `flops`. The trainer's own functions draw the passes; draws are limited to
    twice the mean, so that few graphs are captured.
    """
    per_step = args.rows * LENGTH
    if not isinstance(model, HrmLmForCausalLM):
        cost = per_step * flops_per_token(model.config, LENGTH)
        return [1] * max(1, round(flops / cost)), cost * max(1, round(flops / cost))
    config, most = model.config, model.config.halt_max_steps
    costs = [per_step * flops_per_token(config, LENGTH, segments=n) for n in range(1, 2 * most + 1)]
    options = SimpleNamespace(**CURRICULUM, seed=int(seed))
    vars(options).update(ARMS[arm][1])

    def draw(total: int) -> list[int]:
        torch.manual_seed(int(seed))
        found = []
        for step in range(total):
            plan = segment_schedule(options, config, step, total)
            drawn = drawn_segments(config, torch.ones(1, 1), plan.mean_segments)
            found.append(plan.segments or (most if drawn is None else min(int(drawn), 2 * most)))
        return found

    total = int(flops / costs[most - 1])
    for _ in range(8):  # iterate, because the number of steps changes the ramp of passes and thus the cost
        passes = draw(max(1, total))
        spent = sum(costs[n - 1] for n in passes)
        if abs(spent / flops - 1) < 0.002:
            break
        total = round(total * flops / spent)
    return passes, spent


# ---- training ----


class Run:
    """One run of an arm: model, optimizer and, on a GPU, a stream and one graph per number of passes."""

    def __init__(self, args, arm: str, seed: str, text: torch.Tensor):
        self.args, self.text, self.seed = args, text, seed
        device = torch.device(args.device)
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        with self.context():
            self.model = make_model(args, arm, seed).to(device).train()
            self.looped = isinstance(self.model, HrmLmForCausalLM)
            if self.looped and self.model.model.q_head is not None:
                self.model.model.q_head.requires_grad_(False)  # do not train the halting gate
            self.passes, self.flops = drawn_passes(args, arm, seed, self.model, training_flops(args, arm))
            self.rate = args.pretrain_rate if arm in ("pretrained", "scratch") else args.learning_rate
            self.lr = torch.tensor(0.0, device=device)
            groups = parameter_groups(self.model, 0.1)
            self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True, capturable=self.cuda)
            self.parameters = [p for group in groups for p in group["params"]]
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            shape = (args.rows, LENGTH)
            self.ids, self.labels = (torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2))
            self.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).tril()[None, None]
            self.loss = torch.zeros((), device=device)
            self.generator = torch.Generator(device).manual_seed(1000 + int(seed) + 500 * (arm == "pretrained"))
            self.graphs = {}
            if self.cuda:
                self.capture()

    def context(self):
        return torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()

    def logits(self, ids: torch.Tensor, passes: int) -> torch.Tensor:
        """Return the logits after `passes` passes. The prepared mask avoids waiting for the GPU."""
        mask = self.mask.expand(len(ids), -1, -1, -1)
        options = {"schedule": SegmentSchedule(segments=passes)} if self.looped else {}
        if self.looped and not self.model.training:
            options = {"num_segments": passes}
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits

    def compute_step(self, passes: int) -> None:
        """Train one step on `self.ids` and `self.labels`, without synchronization."""
        torch._foreach_zero_([parameter.grad for parameter in self.parameters])
        logits = self.logits(self.ids, passes)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def capture(self) -> None:
        """Capture one graph per number of passes; steps without a graph run eagerly."""
        numbers = sorted(set(self.passes), reverse=True)
        for passes in {numbers[0], numbers[-1]}:  # at learning rate 0, a step only creates the optimizer's state
            self.compute_step(passes)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        for passes in numbers:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                    self.compute_step(passes)
            except Exception as error:  # without a graph, these steps run eagerly
                print(f"seed {self.seed}, {passes} passes: no graph: {error!r:.300}", flush=True)
                return
            self.graphs[passes] = graph

    def step(self, number: int) -> None:
        """Train step `number`, counted from 0. Do nothing if this run has fewer steps."""
        if number >= len(self.passes):
            return
        with self.context():
            if number % 32 == 0:
                self.rows = training_rows(self.args, self.text, 32, self.generator)
            self.ids.copy_(self.rows[0][number % 32])
            self.labels.copy_(self.rows[1][number % 32])
            self.lr.fill_(self.rate * schedule(number / len(self.passes), 0.05))
            passes = self.passes[number]
            if passes in self.graphs:
                self.graphs[passes].replay()
            else:
                self.compute_step(passes)


def training_flops(args, arm: str) -> float:
    """Return the training FLOPs that an arm may use: the cost of a fixed number of steps of the plain Llama."""
    config = make_llama(args, "0", sum(split(args))).config
    steps = {"pretrained": args.pretrain_steps, "scratch": args.pretrain_steps + args.arm_steps}
    return steps.get(arm, args.arm_steps) * args.rows * LENGTH * flops_per_token(config, LENGTH)


def synchronize(args) -> None:
    """Wait for all streams of the device."""
    if args.device != "cpu":
        torch.cuda.synchronize()


def train_arm(args) -> None:
    """Train one arm for all seeds that are not finished, evaluate the models and save the results."""
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    text = torch.from_numpy(text_file(args.train_file, "train", True)[: args.train_bytes].astype("int32"))
    valid = held_out_rows(text_file(args.valid_file, "valid", True), args.eval_rows * (LENGTH + 1), LENGTH + 1)
    text, valid = text.to(args.device), valid.to(args.device)
    seeds = [seed for seed in args.seeds.split(",") if not run_path(args, args.arm, seed).is_file()]
    synchronize(args)
    runs = [Run(args, args.arm, seed, text) for seed in seeds]
    started = time.perf_counter()
    print(f"{args.arm}: {len(runs)} runs of {len(runs[0].passes)} steps, {started - began:.1f} s to start", flush=True)
    for step in range(max(len(run.passes) for run in runs)):
        for run in runs:
            run.step(step)
        if step % 200 == 0:
            synchronize(args)
            losses = [f"{run.loss.item():.3f}" for run in runs]
            print(f"{args.arm} step {step}: {' '.join(losses)}  {time.perf_counter() - started:.1f} s", flush=True)
            if time.time() > args.deadline:
                print(f"{args.arm}: stopped because --budget_seconds is spent", flush=True)
                return
    synchronize(args)
    seconds = (time.perf_counter() - started) / len(runs)
    for run in runs:
        result = {"arm": args.arm, "seed": int(run.seed), "seconds": seconds, "steps": len(run.passes)}
        result |= {"mean_passes": sum(run.passes) / len(run.passes), "graphs": len(run.graphs)}
        result |= {"training_flops": run.flops, "training_loss": run.loss.item()}
        result |= {"settings": {name: getattr(args, name) for name in SHARED}}
        result["parameters"] = sum(parameter.numel() for parameter in run.model.parameters())
        result["by_passes"] = evaluate(args, run, valid)
        if args.arm == "pretrained":
            torch.save(run.model.state_dict(), args.runs / f"pretrained_seed{run.seed}.pt")
        path = run_path(args, args.arm, run.seed)
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)


# ---- evaluation and the report ----


@torch.no_grad()
def evaluate(args, run: Run, valid: torch.Tensor) -> list[dict]:
    """Return bits per byte, accuracy by K and the state's norm, for every depth up to twice the mean number of passes.

    Answers are read in one forward pass with the right earlier items. An answer is right if all its items are: then
    greedy decoding finds it too.
    """
    run.model.eval()
    generator = torch.Generator(args.device).manual_seed(7)  # the same questions for all runs
    count = max(1, args.eval_rows // 8)
    by_steps = [task_rows(count, generator, steps) for steps in range(1, MOST + 1)]
    ids, labels = (torch.cat(parts) for parts in zip(*by_steps))
    found, norms = [], []
    if run.looped:  # the coda reads the state after the last pass
        run.model.model.coda.register_forward_pre_hook(lambda _, given: norms.append(given[0].norm(dim=-1).mean()))
    for passes in range(1, 1 + (2 * run.model.config.halt_max_steps if run.looped else 1)):
        nats = mean_loss(run, valid, passes)
        result = {
            "passes": passes,
            "bits_per_byte": nats / math.log(2),
            "state_norm": norms[-1].item() if norms else None,
        }
        result |= accuracy(run, ids, labels, passes)
        found.append(result)
    return found


def mean_loss(run: Run, rows: torch.Tensor, passes: int) -> float:
    """Return the mean cross entropy of rows [N, LENGTH + 1] in nats."""
    losses = []
    for part in rows.split(512):
        logits = run.logits(part[:, :-1], passes).float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return (sum(losses) / rows[:, 1:].numel()).item()


def accuracy(run: Run, ids: torch.Tensor, labels: torch.Tensor, passes: int) -> dict[str, list[float]]:
    """Return, for each K, the fractions of correct items and of completely correct answers."""
    right = torch.cat([run.logits(part, passes).argmax(-1) for part in ids.split(512)]) == labels
    right = right[labels != -100].view(MOST, -1, ITEMS).float()
    return {"items": right.mean(dim=(1, 2)).tolist(), "answers": right.amin(dim=2).mean(dim=1).tolist()}


def summary(args) -> dict:
    """Collect all finished runs. Compare each arm with `plain` for the same seeds."""
    paths = sorted(args.runs.glob("*_seed*.json"))
    runs = [json.loads(path.read_text(), parse_float=lambda value: round(float(value), 4)) for path in paths]
    report = {"settings": {name: getattr(args, name) for name in (*SHARED, "arm_steps", "train_bytes")}}
    report |= {"machine": machine(), "versions": library_versions(), "arms": {}, "runs": runs}
    plain = {run["seed"]: at_depth(run) for run in runs if run["arm"] == "plain"}
    for arm in ("pretrained", *ARMS):
        of_arm = {run["seed"]: run for run in runs if run["arm"] == arm}
        if not of_arm:
            continue
        first = next(iter(of_arm.values()))
        entry = {"parameters": first["parameters"]}
        for name in ("training_flops", "steps", "seconds", "mean_passes"):
            entry[name] = interval([run[name] for run in of_arm.values()])
        depths = {seed: at_depth(run) for seed, run in of_arm.items()}
        once = {seed: at_depth(run, 1) for seed, run in of_arm.items()}
        shared = [seed for seed in depths if seed in plain]
        for measure in next(iter(depths.values())):
            entry[measure] = interval([one[measure] for one in depths.values()])
            entry[f"one_pass_{measure}"] = interval([one[measure] for one in once.values()])
            if arm != "plain" and shared:
                change = [depths[seed][measure] - plain[seed][measure] for seed in shared]
                entry[f"{measure}_minus_plain"] = interval(change)
        report["arms"][arm] = entry
    return report


def at_depth(run: dict, passes: int | None = None) -> dict[str, float]:
    """Return bits per byte, and accuracies on easy questions (at most as many steps as layers) and deeper ones."""
    found = run["by_passes"][(passes or max(1, len(run["by_passes"]) // 2)) - 1]
    layers = sum(int(number) for number in run["settings"]["layers"].split(","))
    measures = {"bits_per_byte": found["bits_per_byte"]}
    for what in ("items", "answers"):
        measures[f"{what}_easy"] = sum(found[what][:layers]) / layers
        measures[f"{what}_deep"] = sum(found[what][layers:]) / (MOST - layers)
    return measures


def print_table(report: dict) -> None:
    """Print the arms as a Markdown table, with means and 95 % intervals over the seeds."""
    measures = [name for name in report["arms"]["pretrained"] if isinstance(report["arms"]["pretrained"][name], dict)]
    measures = [name for name in measures if not name.startswith("one_pass") and "minus" not in name]
    print(f"| arm | {' | '.join(measures)} |\n{'|---' * (1 + len(measures))}|")
    for arm, entry in report["arms"].items():
        cells = [f"{entry[name]['mean']:.4g} +- {entry[name].get('half_width', math.nan):.2g}" for name in measures]
        print(f"| {arm} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
