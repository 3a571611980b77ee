"""`hrm-hf preflight`: whether this machine is ready for a long run."""

import json
from dataclasses import asdict

import typer

from ..launch.options import PreflightOptions
from .options import takes


@takes(PreflightOptions)
def preflight(options: PreflightOptions, as_json: bool):
    """Check versions, GPUs, NCCL and gloo, port, disk, network, Slurm, compiler and threads; status 1 if any fails.

    Example: srun --ntasks-per-node 1 hrm-hf preflight --processes 4 --port 29501 --out $SCRATCH/runs --require-gpu
    """
    from ..launch.preflight import run_checks

    checks = run_checks(options)
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        typer.echo(json.dumps({"ready": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        typer.echo(describe(checks))
    if failed:
        raise typer.Exit(1)


def describe(checks) -> str:
    """The table; what to do about a line is below it."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name.ljust(width)}  {check.found}")
        if check.fix:
            lines.append(f"{'':{width + 8}}-> {check.fix}")
    count = {status: sum(check.status == status for check in checks) for status in ("ok", "note", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{number} {status}" for status, number in count.items())])
