"""Test whether halting saves segments in hrm_lm: bits per byte against average segments for each exit criterion.

    python -m benchmarks.text.halting CHECKPOINT... [--text_file FILE] [--calibration_file FILE] [--exits kl,cdf]
    python -m benchmarks.text.halting --quick        # first trains a tiny model for a few seconds

Several checkpoints are treated as seeds of one model. For each exit criterion with a threshold, `calibrate_exit` uses
one text to choose the threshold that saves the most segments while bits per byte rise by at most --allowed_loss. The
savings and the loss are then measured on a different text, and compared with baselines that use equally many on
average:

    fixed           the same number of segments for every token, interpolated linearly between integers
    random          each token gets at random one of the two integers nearest to the average

A gain is positive if the exit criterion needs fewer bits than the baseline. The plot shows the first checkpoint, with
one curve per criterion over its thresholds, and one for the learned gate `q` over halt_margin. All results come from
forwards without a cache (decoding halts tokens by the same rule), in bits per byte, or per token for models with other
tokens.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrm_hf.models.early_exit import EXIT_CRITERIA
from hrm_hf.trainer.recipes import library_versions

from ..report import interval, make_parser, write_report
from .models import held_out_rows, image_folder, text_file


# Range of the thresholds in the plot. They are evenly spaced for probabilities, and logarithmically for other values.
SWEPT = {
    "cdf": (0.5, 0.98), "confidence": (0.3, 0.99), "kl": (1e-5, 3.0), "latent_diff": (1e-3, 3.0),
    "second_diff": (1e-3, 3.0), "entropy_diff": (1e-4, 3.0),
}  # fmt: skip


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    models = [quick_model(args)] if args.quick else [load(path, args.device) for path in args.checkpoints]
    calibration, rows = read_rows(args)
    M = models[0].config.halt_max_steps
    if M == 1:
        raise SystemExit("halt_max_steps=1: the model cannot halt early; pass a checkpoint with more segments")
    chosen = [calibrated(model, calibration, rows, args) for model in models]
    report = {
        "checkpoints": [path.name for path in args.checkpoints], "segments": M, "tokens": rows.numel(),
        "calibration_tokens": calibration.numel(), "block_size": rows.shape[1], "allowed_loss": args.allowed_loss,
        "versions": library_versions(), "calibrated": chosen, "summary": summary(chosen),
        "points": sweep(models[0], rows, args),
    }  # fmt: skip
    print_table(report)
    name = f"lm_halting{'_quick' if args.quick else ''}"
    write_report(args, "lm_halting", report)
    plot(report, image_folder(args.out) / f"{name}.png")


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="a tiny model, trained for a few seconds")
    parser.add_argument("checkpoints", nargs="*", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--text_file", help="held-out text; by default the validation books")
    parser.add_argument(
        "--calibration_file", help="text for choosing thresholds; by default the first half of the held-out text"
    )
    parser.add_argument("--bytes", type=int, default=131072, help="number of tokens to use from each text")
    parser.add_argument(
        "--allowed_loss", type=float, default=0.005, help="largest allowed relative increase in bits per byte"
    )
    parser.add_argument("--exits", default=",".join(SWEPT), help="exit criteria to calibrate and plot")
    parser.add_argument("--block_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--points", type=int, default=9, help="number of points per curve")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not args.checkpoints and not args.quick:
        parser.error("pass one or more folders of hrm_lm checkpoints, or --quick")
    if unknown := [name for name in args.exits.split(",") if name not in SWEPT]:
        parser.error(f"--exits: no threshold for {', '.join(unknown)}; choose from {', '.join(SWEPT)}")
    if args.quick:
        args.points, args.block_size, args.bytes = 4, 64, 8192
    return args


def load(path: Path, device: str):
    """Load an hrm_lm checkpoint in eval mode."""
    model = AutoModelForCausalLM.from_pretrained(path).to(device).eval()
    if model.config.model_type != "hrm_lm":
        raise SystemExit(f"{path} is a {model.config.model_type}; pass the folder of an hrm_lm checkpoint")
    return model


def read_rows(args) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of ids [N, block_size]: one for choosing thresholds, one for the reported results."""
    text = token_ids(args.text_file, args)
    if args.calibration_file is None:
        calibration, text = np.array_split(text, 2)
    else:
        calibration = token_ids(args.calibration_file, args)
    return tuple(held_out_rows(ids, args.bytes, args.block_size) for ids in (calibration, text))


def token_ids(path: str | None, args) -> np.ndarray:
    """Return a text's byte ids, or its token ids if the first checkpoint's vocabulary is larger than that of bytes."""
    ids = text_file(path, "valid", args.quick)
    if args.quick:
        return ids
    config = json.loads((args.checkpoints[0] / "config.json").read_text())
    if config["vocab_size"] > 264:
        text = bytes((ids[ids >= 8][: 8 * args.bytes] - 8).astype(np.uint8)).decode(errors="replace")
        ids = np.array(AutoTokenizer.from_pretrained(args.checkpoints[0])(text)["input_ids"])
    return ids


def quick_model(args):
    """Train a tiny model with four segments for a few seconds."""
    from .quality import train_one

    settings = argparse.Namespace(
        preset="tiny", block_size=64, batch_size=8, weight_decay=0.1, clip=1.0, warmup=0.05, bp_warmup=0.0,
        halt_warmup=0.5, device="cpu", dtype="float32", evaluations=1, train_tokens=None,
    )  # fmt: skip
    rows = held_out_rows(text_file(None, "valid", quick=True), 4096, 64)
    train = text_file(None, "train", quick=True)
    return train_one("hrm_lm_m4", settings, train, rows, 0, 2e-3, 1e11, {}).eval()


class RandomExit:
    """Random exit criterion: a token still active after segment m halts with probability hazards[m - 1]."""

    def __init__(self, hazards: list[float], seed: int = 0):
        self.hazards, self.seed, self.segment = hazards, seed, 0

    def check(self, state) -> torch.Tensor:
        """Return a bool tensor [B, T] that is True for tokens that halt."""
        generator = torch.Generator().manual_seed(1000 * self.seed + self.segment)
        drawn = torch.rand(state.hidden.shape[:-1], generator=generator) < self.hazards[self.segment]
        self.segment += 1
        return drawn.to(state.hidden.device)


def hazards_of(histogram: list[float]) -> list[float]:
    """Return the halting probabilities after segments 1 to M - 1 that yield this histogram of segments (sum 1)."""
    left, hazards = 1.0, []
    for share in histogram[:-1]:
        hazards.append(min(1.0, share / left) if left > 1e-9 else 1.0)
        left -= share
    return hazards


def around(average: float, M: int) -> list[float]:
    """Return a histogram over 1..M segments that has this average and uses only the two integers nearest to it."""
    low = min(int(average), M - 1)
    histogram = [0.0] * M
    histogram[low - 1], histogram[low] = 1 - (average - low), average - low
    return histogram


@torch.no_grad()
def measure(model, rows: torch.Tensor, batch_size: int, make_exit=None, **options) -> dict:
    """Measure one exit criterion; return bits per token, average segments and the histogram of segments.

    `make_exit(seed)` returns a new exit object for each batch; `options` are passed to the forward.
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


def calibrated(model, calibration: torch.Tensor, rows: torch.Tensor, args) -> dict[str, dict]:
    """Choose each exit criterion's threshold on `calibration`; return the results on `rows`.

    "saved": fraction of the M segments saved. "loss": relative increase in bits per byte, compared with M segments for
    every token. "gain_over_fixed", "gain_over_random": bits per byte of the baseline over those of the criterion,
    minus 1.
    """
    M = model.config.halt_max_steps
    fixed = [measure(model, rows, args.batch_size, **fixed_segments(segments)) for segments in range(1, M + 1)]
    always, found = fixed[-1]["bits_per_byte"], {}
    always_when_calibrating = measure(model, calibration, args.batch_size, **fixed_segments(M))
    for name in args.exits.split(","):

        def at(threshold: float | None, name=name):
            point = always_when_calibrating
            if threshold is not None:
                point = measure(model, calibration, args.batch_size, exit_criterion=name, exit_threshold=threshold)
            return {"lm_loss": point["bits_per_byte"], "average_steps": point["avg_segments"]}

        threshold = calibrate_exit(at, name, args.allowed_loss)["exit_threshold"]
        point = measure(model, rows, args.batch_size, exit_criterion=name, exit_threshold=threshold)
        hazards = hazards_of(around(point["avg_segments"], M))
        drawn = measure(model, rows, args.batch_size, lambda seed, hazards=hazards: RandomExit(hazards, seed))
        found[name] = {
            "threshold": threshold,
            **point,
            "saved": 1 - point["avg_segments"] / M,
            "loss": point["bits_per_byte"] / always - 1,
            "gain_over_fixed": read_curve(fixed, point["avg_segments"]) / point["bits_per_byte"] - 1,
            "gain_over_random": drawn["bits_per_byte"] / point["bits_per_byte"] - 1,
        }
        print(f"{name:14} {formatted(found[name])}", flush=True)
    return found


def fixed_segments(segments: int) -> dict:
    """Return the forward arguments that fix the number of segments for every token."""
    return {"exit_criterion": "fixed", "num_segments": segments}


def summary(chosen: list[dict[str, dict]]) -> dict[str, dict]:
    """Return the mean of each metric over the checkpoints, and its confidence interval."""
    figures = ("saved", "loss", "gain_over_fixed", "gain_over_random", "avg_segments", "bits_per_byte")
    return {
        name: {figure: interval([one[name][figure] for one in chosen]) for figure in figures} for name in chosen[0]
    }


def sweep(model, rows, args) -> list[dict]:
    """Return every point of every curve: {"exit", "setting", "bits_per_byte", "avg_segments", "histogram"}."""
    M, own_margin, points = model.config.halt_max_steps, model.config.halt_margin, []

    def add(exit_name, setting, **options):
        point = measure(model, rows, args.batch_size, **options)
        points.append({"exit": exit_name, "setting": setting, **point})

    for segments in range(1, M + 1):
        add("fixed", segments, **fixed_segments(segments))
    exits = args.exits.split(",")
    try:
        for margin in [own_margin, *margins(model, rows, args)] if "cdf" in exits else []:
            model.config.halt_margin = margin
            add("q", margin, exit_criterion="q")
    finally:
        model.config.halt_margin = own_margin
    for name, (low, high) in ((name, SWEPT[name]) for name in exits):
        spread = np.geomspace if math.isinf(EXIT_CRITERIA[name].highest_threshold) else np.linspace
        for threshold in spread(low, high, args.points).tolist():
            add(name, threshold, exit_criterion=name, exit_threshold=threshold)
    for average in np.linspace(1, M, 2 * M - 1).tolist()[1:-1]:
        hazards = hazards_of(around(average, M))
        add("random", average, make_exit=lambda seed, hazards=hazards: RandomExit(hazards, seed))
    return points


@torch.no_grad()
def margins(model, rows, args) -> list[float]:
    """Return exit margins that cover the gate's range: quantiles of its q_halt - q_continue."""
    ids = rows[: args.batch_size].to(model.device)
    q = model(input_ids=ids, use_cache=False, exit_criterion="fixed").q_logits[:, :, :-1].float()
    quantiles = torch.linspace(0.02, 0.98, args.points, device=q.device)
    return torch.quantile((q[..., 0] - q[..., 1]).flatten()[: 2**23], quantiles).tolist()


def read_curve(curve: list[dict], average: float) -> float:
    """Interpolate a curve linearly; return the bits per byte at an average number of segments."""
    curve = sorted(curve, key=lambda p: p["avg_segments"])
    x, y = ([p[name] for p in curve] for name in ("avg_segments", "bits_per_byte"))
    return float(np.interp(average, x, y))


def formatted(found: dict) -> str:
    """Format a criterion's saved segments, relative rise in bits per byte, and gains over fixed and random exits."""

    def share(name: str) -> str:
        value = found[name]
        if not isinstance(value, dict):
            return f"{value:+.2%}"
        return f"{value['mean']:+.2%}" + (f" +- {value['half_width']:.2%}" if "half_width" in value else "")

    return (
        f"saves {share('saved')} of the segments, bits {share('loss')}; "
        f"against fixed {share('gain_over_fixed')}, random {share('gain_over_random')}"
    )


def print_table(report: dict) -> None:
    """Print the results of each exit criterion, averaged over checkpoints."""
    print(
        f"\n{len(report['calibrated'])} checkpoint(s), {report['segments']} segments, thresholds chosen on other text"
    )
    for name, found in report["summary"].items():
        print(f"{name:14} {formatted(found)}")


def plot(report: dict, path: Path) -> None:
    """Plot bits per byte against average segments, one line per criterion."""
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
    always = next(p for p in report["points"] if p["exit"] == "fixed" and p["setting"] == report["segments"])
    axes.axhline(always["bits_per_byte"] * (1 + report["allowed_loss"]), color="0.7", linewidth=0.8)
    axes.set(xlabel="average segments", ylabel="bits per byte, held-out text")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    print(f"plot: {path}")


CALIBRATION_STEPS = 8  # bisection steps, which narrow the range by a factor of 256
LEAST, MOST = 1e-6, 10.0  # range searched for thresholds on changes of the state; for probabilities, [0, 1]


def calibrate_exit(
    measure: Callable[[float | None], dict[str, Any]], criterion: str, allowed_loss: float
) -> dict[str, Any]:
    """Return the threshold that saves the most segments while the loss rises by at most `allowed_loss`.

    Args:
        measure: function that returns `lm_loss` and `average_steps` on the calibration text for a threshold; None runs
            all segments.
        criterion: a name in `EXIT_CRITERIA` that has a threshold.
        allowed_loss: allowed relative increase of the loss, such as 0.005.

    Returns:
        Dict: exit_criterion, exit_threshold, lm_loss, average_steps, always_lm_loss (all segments), allowed_loss.

    Raises:
        ValueError: the criterion has no threshold.
    """
    kind = EXIT_CRITERIA[criterion]
    if kind.default_threshold is None:
        raise ValueError(f"exit_criterion={criterion!r}: has no threshold; choose from {', '.join(SWEPT)}")
    is_probability = not math.isinf(kind.highest_threshold)

    def at(place: float) -> float:
        """Return the threshold at a position between 0 (never halt) and 1 (always halt after the first segment)."""
        return 1 - place if is_probability else LEAST * (MOST / LEAST) ** place

    always = measure(None)
    most = always["lm_loss"] * (1 + allowed_loss)
    late, early, best = 0.0, 1.0, {"exit_threshold": at(0.0), **always}
    for _ in range(CALIBRATION_STEPS):
        middle = (late + early) / 2
        found = measure(at(middle))
        if found["lm_loss"] <= most:
            late, best = middle, {"exit_threshold": at(middle), **found}
        else:
            early = middle
    figures = {name: best[name] for name in ("exit_threshold", "lm_loss", "average_steps")}
    chosen = {"exit_criterion": criterion, "always_lm_loss": always["lm_loss"], "allowed_loss": allowed_loss}
    return chosen | figures


if __name__ == "__main__":
    main()
