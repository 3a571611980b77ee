"""Report of `retrofit_arms.py`: means over seeds with 95 % intervals, differences from `plain`, table and plot."""

import json
import math
from statistics import mean

from hrm_hf.trainer.plots import MUTED, new_figure, save_figure
from hrm_hf.trainer.recipes import library_versions

from ..report import interval, machine
from .models import image_folder
from .retrofit_tasks import ARMS, SHARED


def summary(args) -> dict:
    """Collect all finished runs. Compare each arm with `plain` for the same seeds."""
    paths = sorted(args.runs.glob("*_seed*.json"))
    runs = [json.loads(path.read_text(), parse_float=lambda value: float(f"{float(value):.4g}")) for path in paths]
    report = {"settings": {name: getattr(args, name) for name in (*SHARED, "arm_steps", "train_bytes")}}
    report |= {"machine": machine(), "versions": library_versions(), "arms": {}, "runs": runs}
    plain = {run["seed"]: at_depth(run) for run in runs if run["arm"] == "plain"}
    for arm in ("pretrained", *ARMS[args.task]):
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
                for prefix, found in (("", depths), ("one_pass_", once)):
                    change = [found[seed][measure] - plain[seed][measure] for seed in shared]
                    entry[f"{prefix}{measure}_minus_plain"] = interval(change)
        report["arms"][arm] = entry
    return report


def at_depth(run: dict, passes: int | None = None) -> dict[str, float]:
    """Return bits per byte, and accuracies on easy questions (at most as many steps as layers) and deeper ones."""
    found = run["curve"][-1] if passes is None else next(one for one in run["by_passes"] if one["passes"] == passes)
    layers = sum(int(number) for number in run["settings"]["layers"].split(","))
    measures = {"bits_per_byte": found["bits_per_byte"]}
    for what in ("items", "answers"):
        measures[f"{what}_easy"] = mean(found[what][:layers])
        measures[f"{what}_deep"] = mean(found[what][layers:])
        measures[f"{what}_last"] = found[what][-1]
    return measures


def print_table(report: dict) -> None:
    """Print the arms as a Markdown table, with means and 95 % intervals over the seeds."""
    measures = [name for name in report["arms"]["pretrained"] if isinstance(report["arms"]["pretrained"][name], dict)]
    measures = [name for name in measures if not name.startswith("one_pass") and "minus" not in name]
    print(f"| arm | {' | '.join(measures)} |\n{'|---' * (1 + len(measures))}|")
    for arm, entry in report["arms"].items():
        cells = [f"{entry[name]['mean']:.4g} ± {entry[name].get('half_width', math.nan):.2g}" for name in measures]
        print(f"| {arm} | {' | '.join(cells)} |")


def plot(report: dict, args, name: str) -> None:
    """Plot accuracy by training FLOPs, steps and passes: one line per arm in --arms, averaged over seeds."""
    figure, axes = new_figure(1, 3, (14, 4.2))
    training, steps, passes = axes[0]
    layers = sum(int(number) for number in args.layers.split(","))
    deep = f"right answers of steps {layers + 1} and later"
    shown = ["pretrained", *args.arms.split(",")]
    for index, arm in enumerate(arm for arm in report["arms"] if arm in shown):
        color, runs = f"C{index}", [run for run in report["runs"] if run["arm"] == arm]
        if arm != "pretrained" and arm != "scratch":
            line(training, arm, color, [run["curve"] for run in runs], "training_flops", layers)
        last = [run["curve"][-1]["answers"] for run in runs]
        means, style = [mean(some) for some in zip(*last)], {"marker": "o", "markersize": 3, "color": color}
        steps.plot(range(1, 1 + len(means)), means, label=arm, **style)
        if len(runs[0]["by_passes"]) > 1:
            line(passes, arm, color, [run["by_passes"] for run in runs], "passes", layers)
    training.set(xlabel="training FLOPs after pretraining", ylabel=deep)
    steps.set(xlabel="steps that an answer takes", ylabel="right answers, passes as in training")
    passes.set(xlabel="passes in inference", ylabel=deep)
    for panel in axes[0]:
        panel.set_ylim(0, 1.02)
        panel.grid(axis="y", color=MUTED, alpha=0.4)
        panel.legend(frameon=False, fontsize=8)
    path = image_folder(args.out) / f"{name}{'_quick' if args.quick else ''}.png"
    print(f"plot: {save_figure(figure, path, f'Arms on {args.task}')}")


def line(panel, arm: str, color: str, runs: list[list[dict]], place: str, layers: int) -> None:
    """Plot the accuracy of answers that take more than `layers` steps against `place`, averaged over runs."""
    points = list(zip(*runs))
    answers = [mean(mean(one["answers"][layers:]) for one in some) for some in points]
    places = [mean(one[place] for one in some) for some in points]
    panel.plot(places, answers, marker="o", markersize=3, color=color, label=arm)
