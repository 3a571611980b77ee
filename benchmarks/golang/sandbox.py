"""Measure how long the Go sandbox takes to start, compared with plain bubblewrap and no sandbox.

    python -m benchmarks.golang.sandbox [--quick] [--runs 200] [--before CHECKOUT]

Each measurement is the wall time of `true`. With --before, the script also times the sandbox of another checkout. The
sandboxes take turns, so a busy machine slows all of them equally. Results are medians and quartiles in milliseconds.
"""

import importlib
import os
import platform
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

from hrm_hf.golang import SandboxError, validate_sandbox
from hrm_hf.golang.validators import sandbox
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


SYSTEM = [(path, path) for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(path)]


def main() -> None:
    parser = make_parser(__doc__, quick="20 runs")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--before", type=Path, help="another checkout of this repository to compare with")
    args = parser.parse_args()
    if args.quick:
        args.runs = 20
    try:
        validate_sandbox()
    except SandboxError as error:  # exit with status 0, so that `make bench` continues
        print(f"sandbox: not measured: {error}")
        return
    bwrap = ["bwrap", "--unshare-all", *(word for pair in SYSTEM for word in ("--ro-bind", *pair)), "true"]
    sides = {"none": lambda: plain(["true"]), "bubblewrap": lambda: plain(bwrap), "sandbox": lambda: inside(sandbox)}
    if args.before:
        older = module_of(args.before)
        sides["sandbox_before"] = lambda: inside(older)
    times = {name: [] for name in sides}
    for turn in range(args.runs + 3):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn >= 3:  # skip three warm-up rounds
                times[name].append((time.perf_counter() - start) * 1e3)
    report = {
        "runs": args.runs, "milliseconds": {name: summary(values) for name, values in times.items()},
        "conditions": "wall time of one `true`, one after the other, all sides in turn",
        "root": os.geteuid() == 0, "before": commit(args.before) if args.before else None,
        "bubblewrap": subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.strip(),
        "kernel": platform.release(), "load": os.getloadavg()[0],
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": library_versions(),
    }  # fmt: skip
    write_report(args, "sandbox", report)
    for name, figures in report["milliseconds"].items():
        print(f"sandbox {name:15} starts in {figures['median']:8.1f} ms")


def plain(command: list[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def inside(module: types.ModuleType) -> None:
    run = module.run_sandboxed(["/usr/bin/true"], module.Limits(), read_only=SYSTEM)
    if run.status:
        raise SystemExit(f"`true` exited with status {run.status}: {run.output}")


def module_of(checkout: Path) -> types.ModuleType:
    """Import the sandbox module of another checkout without importing the rest of its package."""
    package = types.ModuleType("before")
    folder = checkout / "hrm_hf" / "golang"
    package.__path__ = [str(folder / "validators"), str(folder)]  # the module's folder in current and in old checkouts
    sys.modules["before"] = package
    return importlib.import_module("before.sandbox")


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def summary(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 2), "quartiles": [round(low, 2), round(high, 2)], "least": round(min(values), 2)}


if __name__ == "__main__":
    main()
