"""Helpers shared by all benchmarks: the options --quick and --out, machine details, intervals, and report files."""

import argparse
import json
import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parent / "results"
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def make_parser(description: str, quick: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options --quick, whose help text is `quick`, and --out, the folder for results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def write_report(args: argparse.Namespace, name: str, report: dict[str, Any]) -> None:
    """Write the report to NAME.json in --out, or to NAME_quick.json with --quick."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}{'_quick' if args.quick else ''}.json").write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine that runs the benchmark."""
    import torch  # imported here because worker processes of `cosmology/generation.py` do not need it

    found = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    return found | ({"accelerator": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def interval(values: list[float]) -> dict:
    """Return the mean over seeds and, for two or more seeds, the half-width of its 95 % interval (Student's t)."""
    found = {"mean": statistics.mean(values), "seeds": len(values)}
    if len(values) > 1:
        t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 1.96
        found["half_width"] = t * statistics.stdev(values) / math.sqrt(len(values))
    return found
