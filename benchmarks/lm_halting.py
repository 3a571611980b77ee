"""Does the learned halting of an hrm_lm earn its place? Bits per byte against average segments, for every exit.

    python benchmarks/lm_halting.py CHECKPOINT [--text_file FILE] [--bytes 131072] [--points 9]
    python benchmarks/lm_halting.py --quick        # trains a tiny model for some seconds first

Compared on the same held-out bytes, in plain forwards (the freeze rule is the same in decoding):

    fixed           M segments for every token, and num_segments = 1..M-1
    q               the learned gate, over halt_margin
    cdf             the learned gate as a distribution, over its threshold
    kl, latent_diff, entropy_diff   exits that need no training, over their thresholds
    random          tokens drawn by lot between the two whole numbers of segments around an average: the cheapest rival
    random, as q    tokens drawn by lot with the very halting histogram of each q point

A curve is read at an average it has no point for by straight lines between its neighbours; where it does not reach,
by its nearest end, and the table says so. Bits per byte of a byte model; of another, per token.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from lm_models import held_out_rows, image_folder, text_file
from report import make_parser, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrm_hf.models.early_exit import EXIT_CRITERIA
from hrm_hf.trainer.recipes import library_versions


TRAINING_FREE = {"kl": (1e-5, 3.0), "latent_diff": (1e-3, 3.0), "entropy_diff": (1e-4, 3.0)}  # range of thresholds
LEARNED = [name for name, kind in EXIT_CRITERIA.items() if kind.learned]
BUDGET = 0.6  # share of M segments that halting may use on average
ALLOWED_LOSS = 0.01  # share of bits per byte that it may cost


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    model, rows = quick_model(args) if args.quick else (load(args), read_rows(args))
    M = model.config.halt_max_steps
    if M == 1:
        raise SystemExit(f"{args.checkpoint} has halt_max_steps=1: there is nothing to halt")
    points = sweep(model, rows, args)
    report = {
        "checkpoint": None if args.quick else str(args.checkpoint), "segments": M, "tokens": rows.numel(),
        "block_size": rows.shape[1], "versions": library_versions(), "points": points, "verdict": verdict(points, M),
    }  # fmt: skip
    print_table(report)
    name = f"lm_halting{'_quick' if args.quick else ''}"
    write_report(args, "lm_halting", report)
    plot(report, image_folder(args.out) / f"{name}.png")


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--text_file", help="held-out text; the validation books by default")
    parser.add_argument("--bytes", type=int, default=131072, help="how much of the text, in tokens")
    parser.add_argument("--block_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--points", type=int, default=9, help="of each sweep")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.checkpoint is None and not args.quick:
        parser.error("give the folder of an hrm_lm checkpoint, or --quick")
    return args


def load(args):
    """The checkpoint, in eval mode."""
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint).to(args.device).eval()
    if model.config.model_type != "hrm_lm":
        raise SystemExit(f"{args.checkpoint} is a {model.config.model_type}; halting is a matter of hrm_lm")
    return model


def read_rows(args) -> torch.Tensor:
    """Ids [N, block_size]: bytes, or tokens of the checkpoint's own tokenizer if it has a larger vocabulary."""
    ids = text_file(args.text_file, "valid")
    config = json.loads((args.checkpoint / "config.json").read_text())
    if config["vocab_size"] > 264:
        text = bytes((ids[ids >= 8][: 8 * args.bytes] - 8).astype(np.uint8)).decode(errors="replace")
        ids = np.array(AutoTokenizer.from_pretrained(args.checkpoint)(text)["input_ids"])
    return held_out_rows(ids, args.bytes, args.block_size)


def quick_model(args):
    """A tiny model with four segments, trained for some seconds, and held-out rows."""
    import lm_quality

    args.points, args.block_size = 4, 64
    settings = argparse.Namespace(
        preset="tiny", block_size=64, batch_size=8, weight_decay=0.1, clip=1.0, warmup=0.05, bp_warmup=0.0,
        halt_warmup=0.5, device="cpu", dtype="float32", evaluations=1, train_tokens=None,
    )  # fmt: skip
    rows = held_out_rows(text_file(None, "valid", quick=True), 4096, 64)
    train = text_file(None, "train", quick=True)
    return lm_quality.train_one("hrm_lm_m4", settings, train, rows, 0, 2e-3, 1e11, {}).eval(), rows


class RandomExit:
    """Halts by lot: a token that still thinks after segment m = 1, 2, ... halts with probability hazards[m - 1]."""

    def __init__(self, hazards: list[float], seed: int = 0):
        self.hazards, self.seed, self.segment = hazards, seed, 0

    def check(self, state) -> torch.Tensor:
        """bool [B, T]"""
        generator = torch.Generator().manual_seed(1000 * self.seed + self.segment)
        drawn = torch.rand(state.hidden.shape[:-1], generator=generator) < self.hazards[self.segment]
        self.segment += 1
        return drawn.to(state.hidden.device)


def hazards_of(histogram: list[float]) -> list[float]:
    """The chance to halt after each segment but the last, of those that got so far, for shares that sum to 1."""
    left, hazards = 1.0, []
    for share in histogram[:-1]:
        hazards.append(min(1.0, share / left) if left > 1e-9 else 1.0)
        left -= share
    return hazards


def around(average: float, M: int) -> list[float]:
    """The histogram of 1..M segments with this average that uses only the two whole numbers around it."""
    low = min(int(average), M - 1)
    histogram = [0.0] * M
    histogram[low - 1], histogram[low] = 1 - (average - low), average - low
    return histogram


@torch.no_grad()
def measure(model, rows: torch.Tensor, batch_size: int, make_exit=None, **options) -> dict:
    """Bits per token, average segments and their histogram of one way to halt.

    `make_exit(seed)` gives a fresh exit object for each batch; `options` go to the forward.
    """
    M = model.config.halt_max_steps
    nats, count, histogram = 0.0, 0, torch.zeros(M, dtype=torch.long)
    for number, ids in enumerate(rows.split(batch_size)):
        ids = ids.to(model.device)
        if make_exit is not None:
            options["exit_criterion"] = make_exit(number)
        output = model(input_ids=ids, use_cache=False, **options)
        logits, targets = output.logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
        nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        count += targets.numel()
        histogram += torch.bincount(output.halt_steps[:, :-1].flatten() - 1, minlength=M).cpu()
    shares = (histogram.double() / count).tolist()
    average = sum(share * (m + 1) for m, share in enumerate(shares))
    return {"bits_per_byte": nats / count / math.log(2), "avg_segments": average, "histogram": shares}


def sweep(model, rows, args) -> list[dict]:
    """Every point of every curve: {"exit", "setting", "bits_per_byte", "avg_segments", "histogram"}."""
    M, own_margin, points = model.config.halt_max_steps, model.config.halt_margin, []

    def add(exit_name, setting, **options):
        point = measure(model, rows, args.batch_size, **options)
        points.append({"exit": exit_name, "setting": setting, **point})
        print(f"{exit_name:14} {setting:>12.5g}", end="  ")
        print(f"{point['avg_segments']:6.3f}  {point['bits_per_byte']:.4f}", flush=True)
        return point

    for segments in range(1, M + 1):
        add("fixed", segments, exit_criterion="fixed", num_segments=segments)
    try:
        for margin in [own_margin, *margins(model, rows, args)]:
            model.config.halt_margin = margin
            point = add("q", margin, exit_criterion="q")
            hazards = hazards_of(point["histogram"])
            add("random, as q", margin, make_exit=lambda seed, hazards=hazards: RandomExit(hazards, seed))
    finally:
        model.config.halt_margin = own_margin
    for threshold in np.linspace(0.5, 0.98, 2 * args.points).tolist():
        add("cdf", threshold, exit_criterion="cdf", exit_threshold=threshold)
    for name, (low, high) in TRAINING_FREE.items():
        for threshold in np.geomspace(low, high, args.points).tolist():
            add(name, threshold, exit_criterion=name, exit_threshold=threshold)
    for average in np.linspace(1, M, 2 * M - 1).tolist()[1:-1]:
        hazards = hazards_of(around(average, M))
        add("random", average, make_exit=lambda seed, hazards=hazards: RandomExit(hazards, seed))
    return points


@torch.no_grad()
def margins(model, rows, args) -> list[float]:
    """Margins at quantiles of q_halt - q_continue, so that they spread over the gate's own range."""
    ids = rows[: args.batch_size].to(model.device)
    q = model(input_ids=ids, use_cache=False, exit_criterion="fixed").q_logits[:, :, :-1].float()
    quantiles = torch.linspace(0.02, 0.98, args.points, device=q.device)
    return torch.quantile((q[..., 0] - q[..., 1]).flatten()[: 2**23], quantiles).tolist()


def verdict(points: list[dict], M: int) -> dict:
    """The best point of the learned gate within BUDGET, against always-M and every other exit at the same average."""
    always = next(p for p in points if p["exit"] == "fixed" and p["setting"] == M)
    result = {"always_M_bits_per_byte": always["bits_per_byte"]}
    within = [p for p in points if p["exit"] in LEARNED and p["avg_segments"] <= BUDGET * M]
    if not within:
        return result
    best = min(within, key=lambda p: p["bits_per_byte"])
    loss = best["bits_per_byte"] / always["bits_per_byte"] - 1
    result |= {
        "exit": best["exit"],
        "setting": best["setting"],
        "avg_segments": best["avg_segments"],
        "share_of_M": best["avg_segments"] / M,
        "bits_per_byte": best["bits_per_byte"],
        "loss": loss,
        "within_allowed_loss": loss <= ALLOWED_LOSS,
        "at_the_same_average": {},
    }
    for name in dict.fromkeys(p["exit"] for p in points):
        if name != best["exit"]:
            curve = [p for p in points if p["exit"] in (name, *(["fixed"] if name == "random" else []))]
            result["at_the_same_average"][name] = read_curve(curve, best["avg_segments"])
    return result


def read_curve(curve: list[dict], average: float) -> dict:
    """Bits per byte of a curve at an average; `reached` is False beyond its ends."""
    curve = sorted(curve, key=lambda p: p["avg_segments"])
    x, y = ([p[name] for p in curve] for name in ("avg_segments", "bits_per_byte"))
    return {"bits_per_byte": float(np.interp(average, x, y)), "reached": x[0] <= average <= x[-1]}


def print_table(report: dict) -> None:
    """The verdict in words."""
    result, M = report["verdict"], report["segments"]
    print(f"\nalways {M} segments: {result['always_M_bits_per_byte']:.4f} bits per byte")
    if "exit" not in result:
        print(f"no setting of the learned gate uses {BUDGET:.0%} of the segments or fewer")
        return
    print(
        f"{result['exit']} at {result['setting']:.4g}: {result['avg_segments']:.3f} segments "
        f"({result['share_of_M']:.1%} of M), {result['bits_per_byte']:.4f} ({result['loss']:+.2%})"
    )
    for name, row in result["at_the_same_average"].items():
        reached = "" if row["reached"] else "  (its nearest end; it does not reach this average)"
        change = row["bits_per_byte"] / result["bits_per_byte"] - 1
        print(f"    {name:14} {row['bits_per_byte']:.4f} ({change:+.2%} against the gate){reached}")


def plot(report: dict, path: Path) -> None:
    """Bits per byte against average segments, a line for each exit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in dict.fromkeys(p["exit"] for p in report["points"]):
        curve = sorted((p for p in report["points"] if p["exit"] == name), key=lambda p: p["avg_segments"])
        style = {"linestyle": "--", "color": "0.4"} if name == "fixed" else {"linestyle": "-"}
        x, y = ([p[axis] for p in curve] for axis in ("avg_segments", "bits_per_byte"))
        axes.plot(x, y, marker="o", markersize=3, label=name, **style)
    axes.axhline(report["verdict"]["always_M_bits_per_byte"] * (1 + ALLOWED_LOSS), color="0.7", linewidth=0.8)
    axes.set(xlabel="average segments", ylabel="bits per byte, held-out text")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
