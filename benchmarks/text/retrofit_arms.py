"""Compare ways to train a pretrained decoder further, plain or looped, at equal training FLOPs.

    python -m benchmarks.text.retrofit_arms --device cuda
    python -m benchmarks.text.retrofit_arms --task permutations
    python -m benchmarks.text.retrofit_arms --quick

For each seed, a small byte-level decoder is pretrained on rows of text and rows of a task, one of each. Every arm
continues from it on the same data in the same order, until it has spent the same training FLOPs. The tasks, the arms
and the settings of each task are in `retrofit_tasks.py`.

The number of passes in each step is random, after an optional ramp. With `text_once`, rows of text get one pass. With
`text_weight`, the loss of each byte of text counts that many times. The arm `scratch` starts from random weights and
also spends the FLOPs of the pretraining. `deeper` is a decoder with as many layers as the loop runs; the additional
layers are copies that initially add zero.

On a GPU, the runs of one arm train side by side, one CUDA stream per seed, and a training step is a CUDA graph per
number of passes. Each run is saved once it is evaluated (--runs); a repeated call trains only the missing ones. With
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
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hrm_hf import HrmLmForCausalLM
from hrm_hf.models.segment_plan import SegmentSchedule, drawn_segments
from hrm_hf.text.trainer import segment_schedule

from ..report import make_parser, write_report
from .models import BYTES, flops_per_token, held_out_rows, text_file
from .quality import parameter_groups, schedule
from .retrofit_report import plot, print_table, summary
from .retrofit_tasks import ARMS, SETTINGS, SHARED, make_task


CURRICULUM = {"depth_ramp": "linear", "depth_ramp_ratio": 0.0, "depth_warmup_ratio": 0.0, "keep_one_pass": 0.0,
              "bp_warmup_ratio": 0.0, "halt_warmup_ratio": 0.0, "train_gate_only": False,
              "text_once": False, "text_weight": 1.0}  # fmt: skip
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def main() -> None:
    args = parse()
    if args.arm:
        return train_arm(args)
    deadline = time.time() + (args.budget_seconds or 1e9)
    args.runs.mkdir(parents=True, exist_ok=True)
    run_workers(args, ["pretrained"], deadline)
    run_workers(args, args.arms.split(","), deadline)
    report = summary(args)
    write_report(args, report_name(args), report)
    print_table(report)
    plot(report, args, report_name(args))


def report_name(args) -> str:
    return f"lm_retrofit_{'arms' if args.task == 'rearrangements' else args.task}"


def parse():
    parser = make_parser(__doc__, quick="a decoder of width 32, a few steps per arm")
    parser.add_argument("--task", choices=list(SETTINGS), default="rearrangements")
    known = parser.parse_known_args()[0]
    parser.add_argument("--arms", default=",".join(ARMS[known.task]))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--family", choices=list(FAMILIES), help="architecture of the decoder")
    parser.add_argument("--layers", help="layers before, in and after the loop")
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--rows", type=int, help="rows per step, half of them text")
    parser.add_argument("--pretrain_steps", type=int)
    parser.add_argument("--arm_steps", type=int, help="steps of `plain`")
    parser.add_argument("--learning_rate", type=float, help="peak learning rate of the arms")
    parser.add_argument("--pretrain_rate", type=float)
    parser.add_argument("--train_file", help="text (plain UTF-8 or gzip); the books in shared/data by default")
    parser.add_argument("--valid_file")
    parser.add_argument("--train_bytes", type=int, default=5_900_000, help="use only the first N bytes of the text")
    parser.add_argument(
        "--eval_rows",
        type=int,
        help="N held-out text rows, and N / 8 rows of the task (rearrangements: for each number of steps)",
    )
    parser.add_argument("--evaluations", type=int, default=6, help="number of evaluations during a run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3, help="number of arms to train at the same time")
    parser.add_argument("--budget_seconds", type=float)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs") / f"retrofit_{known.task}", help="folder with one file per run"
    )
    parser.add_argument("--arm", help="train only this arm, in the current process")
    parser.add_argument("--deadline", type=float, default=math.inf, help="with --arm: stop at this Unix time")
    parser.set_defaults(**SETTINGS[known.task])
    args = parser.parse_args()
    if args.quick:
        args.width, args.heads, args.rows, args.pretrain_steps, args.arm_steps, args.eval_rows = 32, 2, 8, 8, 8, 16
        args.seeds, args.arms, args.processes = "0", ",".join(list(ARMS[args.task])[:2]), 1
        args.runs = Path(tempfile.mkdtemp())
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


# ---- data and models ----


def training_rows(args, task, text: torch.Tensor, count: int, generator: torch.Generator):
    """Return the inputs and labels [count, rows, length] of the next `count` steps."""
    half, length = args.rows // 2, task.length
    starts = torch.randint(0, len(text) - length, (count * half,), generator=generator, device=text.device)
    rows = text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()
    parts = (rows[:, :-1], rows[:, 1:]), task.rows(count * half, generator)
    return tuple(torch.cat([part[n].view(count, -1, length) for part in parts], dim=1) for n in (0, 1))


def split(args) -> tuple[int, int, int]:
    return tuple(int(number) for number in args.layers.split(","))


def make_decoder(args, seed: str, layers: int):
    """Build a Llama or Qwen3 with random weights, for sequences of up to one row of the task."""
    torch.manual_seed(int(seed))
    config, model = FAMILIES[args.family]
    return model(
        config(vocab_size=BYTES, hidden_size=args.width, intermediate_size=16 * round(args.width * 8 / 3 / 16),
               num_hidden_layers=layers, num_attention_heads=args.heads, num_key_value_heads=args.heads,
               head_dim=args.width // args.heads, max_position_embeddings=make_task(args.task).length,
               tie_word_embeddings=True, initializer_range=args.width**-0.5)
    )  # fmt: skip


def make_model(args, arm: str, seed: str):
    """Build the model that an arm trains."""
    before, inside, after = split(args)
    decoder = make_decoder(args, seed, before + inside + after)
    if arm not in ("pretrained", "scratch"):
        decoder.load_state_dict(torch.load(args.runs / f"pretrained_seed{seed}.pt", weights_only=True))
    options, _ = ARMS[args.task].get(arm, (None, {}))
    if arm == "deeper":
        passes = max(options["passes"] for options, _ in ARMS[args.task].values() if options)
        return deepened(args, decoder, seed, (passes - 1) * inside)
    if options is None:
        return decoder
    return HrmLmForCausalLM.from_llama(
        decoder, prelude_layers=before, loop_layers=inside, coda_layers=after, **options
    )


def deepened(args, decoder, seed: str, extra: int):
    """Return a decoder with `extra` copies of its middle layers inserted after them. The copies initially add zero."""
    before, inside, after = split(args)
    model = make_decoder(args, seed, before + inside + after + extra)
    source = [*range(before + inside), *(before + n % inside for n in range(extra))]
    source += range(before + inside, before + inside + after)
    for layer, index in zip(model.model.layers, source):
        layer.load_state_dict(decoder.model.layers[index].state_dict())
    for layer in model.model.layers[before + inside : before + inside + extra]:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(last.weight)
    model.model.embed_tokens.load_state_dict(decoder.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(decoder.model.norm.state_dict())
    return model


def drawn_passes(args, arm: str, seed: str, model, flops: float) -> tuple[list[int], list[float]]:
    """Return the number of passes in each training step, 1 for a plain decoder, and the FLOPs of each step.

    There are as many steps as cost about `flops`. The trainer's own functions draw the passes; draws are limited to
    twice the mean, so that few graphs are captured.
    """
    length = model.config.max_position_embeddings
    per_step = args.rows * length
    if not isinstance(model, HrmLmForCausalLM):
        cost = per_step * flops_per_token(model.config, length)
        return [1] * max(1, round(flops / cost)), [cost] * max(1, round(flops / cost))
    config, most = model.config, model.config.halt_max_steps
    options = SimpleNamespace(**CURRICULUM, seed=int(seed))
    vars(options).update(ARMS[args.task][arm][1])
    costs = [per_step * flops_per_token(config, length, segments=n) for n in range(1, 2 * most + 1)]
    if options.text_once:
        costs = [(cost + costs[0]) / 2 for cost in costs]

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
        spent = [costs[n - 1] for n in passes]
        if abs(sum(spent) / flops - 1) < 0.002:
            break
        total = round(total * flops / sum(spent))
    return passes, spent


# ---- training ----


class Run:
    """One run of an arm: model, optimizer and, on a GPU, a stream and one graph per number of passes."""

    def __init__(self, args, arm: str, seed: str, text: torch.Tensor):
        self.args, self.text, self.seed, self.task = args, text, seed, make_task(args.task)
        self.text_once = ARMS[args.task].get(arm, (None, {}))[1].get("text_once", False)
        device = torch.device(args.device)
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        with self.context():
            self.model = make_model(args, arm, seed).to(device).train()
            self.looped = isinstance(self.model, HrmLmForCausalLM)
            if self.looped and self.model.model.q_head is not None:
                self.model.model.q_head.requires_grad_(False)  # do not train the halting gate
            self.passes, self.flops = drawn_passes(args, arm, seed, self.model, training_flops(args, arm))
            self.curve = []
            self.rate = args.pretrain_rate if arm in ("pretrained", "scratch") else args.learning_rate
            self.lr = torch.tensor(0.0, device=device)
            groups = parameter_groups(self.model, 0.1)
            self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True, capturable=self.cuda)
            self.parameters = [p for group in groups for p in group["params"]]
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            length = self.task.length
            shape = (args.rows, length)
            self.ids, self.labels = (torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2))
            self.mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
            self.weights = torch.ones(args.rows, 1, device=device)
            self.weights[: args.rows // 2] = ARMS[args.task].get(arm, (None, {}))[1].get("text_weight", 1.0)
            self.loss = torch.zeros((), device=device)
            self.generator = torch.Generator(device).manual_seed(1000 + int(seed) + 500 * (arm == "pretrained"))
            self.graphs = {}
            if self.cuda:
                self.capture()

    @property
    def trained_passes(self) -> int:
        return self.model.config.halt_max_steps if self.looped else 1

    def context(self):
        return torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()

    def logits(self, ids: torch.Tensor, passes: int) -> torch.Tensor:
        """Return the logits after `passes` passes. Passing a mask on the GPU avoids a synchronization."""
        mask = self.mask.expand(len(ids), -1, -1, -1) if self.cuda else None
        options = {"schedule": SegmentSchedule(segments=passes)} if self.looped else {}
        if self.looped and not self.model.training:
            options = {"num_segments": passes}
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits

    def compute_step(self, passes: int) -> None:
        """Train one step on `self.ids` and `self.labels`, without synchronization."""
        torch._foreach_zero_([parameter.grad for parameter in self.parameters])
        parts = (self.ids,)
        if self.text_once and passes > 1:  # the first half of the rows is text
            parts = self.ids.chunk(2)
        logits = torch.cat([self.logits(part, 1 if part is not parts[-1] else passes) for part in parts])
        losses = F.cross_entropy(logits.transpose(1, 2).float(), self.labels, ignore_index=-100, reduction="none")
        weights = self.weights * (self.labels >= 0)
        loss = (weights * losses).sum() / weights.sum()
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
            except Exception as error:  # steps with this many passes or fewer then run eagerly
                print(f"seed {self.seed}, {passes} passes: could not capture a graph: {error!r:.300}", flush=True)
                return
            self.graphs[passes] = graph

    def step(self, number: int) -> None:
        """Run training step `number`, counted from 0. Do nothing if this run has fewer steps."""
        if number >= len(self.passes):
            return
        with self.context():
            if number % 32 == 0:
                self.rows = training_rows(self.args, self.task, self.text, 32, self.generator)
            self.ids.copy_(self.rows[0][number % 32])
            self.labels.copy_(self.rows[1][number % 32])
            self.lr.fill_(self.rate * schedule(number / len(self.passes), 0.05))
            passes = self.passes[number]
            if passes in self.graphs:
                self.graphs[passes].replay()
            else:
                self.compute_step(passes)


def training_flops(args, arm: str) -> float:
    """Return the training FLOPs that an arm may use: the cost of a fixed number of steps of the plain decoder."""
    config = make_decoder(args, "0", sum(split(args))).config
    steps = {"pretrained": args.pretrain_steps, "scratch": args.pretrain_steps + args.arm_steps}
    length = config.max_position_embeddings
    return steps.get(arm, args.arm_steps) * args.rows * length * flops_per_token(config, length)


def synchronize(args) -> None:
    """Wait for all streams of the device."""
    if args.device != "cpu":
        torch.cuda.synchronize()


def train_arm(args) -> None:
    """Train one arm for all seeds that are not finished: on a GPU at the same time, otherwise one after the other."""
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    length = make_task(args.task).length
    text = torch.from_numpy(text_file(args.train_file, "train", True)[: args.train_bytes].astype("int32"))
    valid = held_out_rows(text_file(args.valid_file, "valid", True), args.eval_rows * (length + 1), length + 1)
    text, valid = text.to(args.device), valid.to(args.device)
    seeds = [seed for seed in args.seeds.split(",") if not run_path(args, args.arm, seed).is_file()]
    for group in [seeds] if args.device != "cpu" else [[seed] for seed in seeds]:
        synchronize(args)
        runs = [Run(args, args.arm, seed, text) for seed in group]
        if not train_runs(args, runs, valid):
            return


def train_runs(args, runs: list[Run], valid: torch.Tensor) -> bool:
    """Train runs of an arm at the same time, evaluate them and save the results. Return False if time ran out."""
    seconds, points = 0.0, {}
    for run in runs:
        points[run] = {round(len(run.passes) * n / args.evaluations) for n in range(args.evaluations)}
    for step in range(max(len(run.passes) for run in runs)):
        for run in runs:
            if step in points[run]:
                run.curve.append({"training_flops": sum(run.flops[:step])} | evaluate(args, run, valid[::4]))
                answers = " ".join(f"{value:.2f}" for value in run.curve[-1]["answers"])
                print(f"{args.arm} seed {run.seed}, step {step}: {answers}", flush=True)
        started = time.perf_counter()
        for run in runs:
            run.step(step)
        if step % 200 == 0 or (step % 20 == 0 and time.time() > args.deadline):
            synchronize(args)
            losses = [f"{run.loss.item():.3f}" for run in runs]
            print(f"{args.arm} step {step} of {len(runs[0].passes)}: {' '.join(losses)}  {seconds:.1f} s", flush=True)
            if time.time() > args.deadline:
                print(f"{args.arm}: stopped because --budget_seconds is spent", flush=True)
                return False
        seconds += time.perf_counter() - started
    synchronize(args)
    for run in runs:
        save(args, run, valid, seconds / len(runs))
    return True


def save(args, run: Run, valid: torch.Tensor, seconds: float) -> None:
    """Save a trained run's metrics for several numbers of passes and, for the arm `pretrained`, its weights."""
    result = {"arm": args.arm, "seed": int(run.seed), "seconds": seconds, "steps": len(run.passes)}
    result |= {"mean_passes": sum(run.passes) / len(run.passes), "graphs": len(run.graphs)}
    result |= {"training_flops": sum(run.flops), "training_loss": run.loss.item()}
    result |= {"settings": {name: getattr(args, name) for name in SHARED}}
    result["parameters"] = sum(parameter.numel() for parameter in run.model.parameters())
    trained = run.trained_passes
    numbers = sorted({1, 2, trained // 2 or 1, trained, 3 * trained // 2, 2 * trained}) if run.looped else [1]
    result["by_passes"] = [evaluate(args, run, valid, passes) for passes in numbers]
    own = result["by_passes"][numbers.index(trained)]
    result["curve"] = [*run.curve, {"training_flops": result["training_flops"]} | own]
    if args.arm == "pretrained":
        torch.save(run.model.state_dict(), args.runs / f"pretrained_seed{run.seed}.pt")
    path = run_path(args, args.arm, run.seed)
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


# ---- evaluation ----


@torch.no_grad()
def evaluate(args, run: Run, text: torch.Tensor, passes: int | None = None) -> dict:
    """Return bits per byte, accuracy for each number of reasoning steps, and the norm of the state.

    `passes` defaults to `run.trained_passes`. One forward pass predicts all items of an answer. An answer is right if
    all its items are.
    """
    run.model.eval()
    passes = passes or run.trained_passes
    generator = torch.Generator(args.device).manual_seed(7)  # the same questions for all runs
    ids, labels, steps = run.task.test_rows(max(1, args.eval_rows // 8), generator)
    norms, hook = [], None
    if run.looped:
        note = lambda *given: norms.append(given[-1].norm(dim=-1).mean().item())  # noqa: E731
        hook = run.model.model.L_module.register_forward_hook(note)
    found = {"passes": passes, "bits_per_byte": mean_loss(run, text, passes) / math.log(2)}
    found["state_norm"] = norms[-1] if norms else None
    right = torch.cat([run.logits(part, passes).argmax(-1) for part in ids.split(512)]) == labels
    found |= {"items": [], "answers": []}
    for number in range(1, run.task.most + 1):
        of_step = right[steps == number].view(-1, run.task.items).float()
        found["items"].append(of_step.mean().item())
        found["answers"].append(of_step.amin(dim=1).mean().item())
    if hook is not None:
        hook.remove()
    run.model.train()
    return found


def mean_loss(run: Run, rows: torch.Tensor, passes: int) -> float:
    """Return the mean cross entropy of rows [N, length + 1] in nats."""
    losses = []
    for part in rows.split(512):
        logits = run.logits(part[:, :-1], passes).float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return (sum(losses) / rows[:, 1:].numel()).item()


if __name__ == "__main__":
    main()
