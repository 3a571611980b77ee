"""`hrm-hf preflight`: whether this machine is ready for a long run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .report import AsJson


def preflight(
    processes: Annotated[int, typer.Option(min=1, help="Training processes of this machine.")] = 2,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the rendezvous; it must be free then.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder of the run.")] = Path("runs"),
    free: Annotated[str, typer.Option(help="Space that must be free there, e.g. 20GB.")] = "1GB",
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="No GPU is a failure, not a note.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until processes must have met.")] = 60.0,
    as_json: AsJson = False,
):
    """Check versions, GPUs, NCCL and gloo, port, disk, network, Slurm, compiler and threads; status 1 if any fails.

    Example: srun --ntasks-per-node 1 hrm-hf preflight --processes 4 --port 29501 --out $SCRATCH/runs --require-gpu
    """
    from ..io.usage import parse_memory

    try:
        least = parse_memory(free)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--free") from error
    from ..launch.preflight import run_checks

    checks = run_checks(processes, port, out, least, require_gpu, timeout)
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
        if check.mend:
            lines.append(f"{'':{width + 8}}-> {check.mend}")
    count = {status: sum(check.status == status for check in checks) for status in ("ok", "note", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{number} {status}" for status, number in count.items())])
