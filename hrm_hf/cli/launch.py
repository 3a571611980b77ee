"""`hrm-hf launch`, `recommend`, `preflight`, `slurm`: plan a run, and start it here or on a cluster."""

import json
import shlex
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..io.options import option
from ..io.usage import UsageError, counted
from ..launch.options import LaunchOptions, PreflightOptions, RecommendOptions
from ..launch.slurm import SlurmJob
from .command import takes


# Typer settings that let `launch` and training/launch.py pass unknown flags to run_clm.py.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
Verbose = Annotated[bool, typer.Option("--verbose", help="Show every device and every term of the memory estimate.")]


@takes(LaunchOptions, context=typer.Context, verbose=Verbose)
def launch(options: LaunchOptions, context: typer.Context, verbose: bool, as_json: bool):
    """Plan the batch size, learning rate and precision for this machine's GPUs, and run training/run_clm.py.

    Flags not listed here are passed to run_clm.py unchanged, and override the plan.

    Example: python training/launch.py --model hrm-lm-50m --gpus 4 --train_data corpus.jsonl --max_steps 20000

    Example: hrm-hf launch --model hrm-lm-100m --dry_run --gpus 8 --gpu_memory 24GB
    """
    from ..launch.planner import plan_run, start

    plan = plan_run(options, context.args)
    typer.echo(json.dumps(plan.to_dict(), indent=1) if as_json else _plan_text(plan, verbose))
    if not options.dry_run:
        start(plan)


def _plan_text(plan, verbose: bool) -> str:
    """Format a plan as text. With `verbose`, add every device and every term of the memory estimate."""
    device, count, used = plan.devices[0], len(plan.devices), sum(plan.memory.values())
    assumed = " (not all on this machine)" if plan.hypothetical else ""
    capability = f", capability {device.capability[0]}.{device.capability[1]}" if device.kind == "cuda" else ""
    lines = {
        "devices": f"{count} x {device.name}, {_gib(device.memory)}{capability}{assumed}",
        "model": plan.model + (f", {counted(plan.parameters, 'parameter')}" if plan.parameters else ""),
        "memory": f"{_gib(used)} of {_gib(plan.usable_memory)} available per device" if plan.memory else "unknown",
        "batch": f"{plan.per_device_train_batch_size} per device x {count} x {plan.gradient_accumulation_steps} "
        f"accumulated = {counted(plan.effective_batch, 'sequence')} of {counted(plan.sequence_length, 'token')}",
        "learning rate": f"{plan.learning_rate:.6g}",
        "precision": "bf16" if plan.bf16 else "float32",
        "checkpointing": "on" if plan.activation_checkpointing else "off",
        "output": plan.output_dir,
    }
    if plan.learning_rate != plan.base_learning_rate:
        lines["learning rate"] += (
            f" = {plan.base_learning_rate:.6g} for {plan.reference_batch} sequences, scaled by the square root"
        )
    if plan.memory and not plan.fits:
        lines["memory"] += " - DOES NOT FIT"
    if verbose:
        lines |= {f"  device {i}": f"{item.name}, {_gib(item.memory)}" for i, item in enumerate(plan.devices)}
        lines |= {f"  {term}": _gib(size) for term, size in plan.memory.items()}
    width = max(map(len, lines))
    return "\n".join([*(f"{name.ljust(width)}  {text}" for name, text in lines.items()), "", shlex.join(plan.command)])


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


@takes(RecommendOptions)
def recommend(options: RecommendOptions, as_json: bool):
    """Recommend settings that fit into memory, based on the original guide's table and on our measurements.

    Example: hrm-hf recommend --memory 4GB
    """
    from ..launch.recommend import recommend as advise

    advice = advise(options)
    typer.echo(json.dumps(asdict(advice), indent=1) if as_json else _advice_text(advice))


def _advice_text(advice) -> str:
    from ..launch.memory import in_words

    lines = [
        f"memory     {in_words(advice.memory)}: {in_words(advice.usable)} for a training step, "
        f"{in_words(advice.memory - advice.usable)} reserved for context, libraries and fragmentation",
        f"measured   {advice.measured_on}",
    ]
    if advice.guide:
        size = advice.guide.size(advice.guide_batch)
        read = "" if advice.guide_batch <= advice.guide.measured_batch else ", extrapolated"
        share = f"{size / advice.usable:.1%} of the memory for a step" if size <= advice.usable else "DOES NOT FIT"
        lines.append(f"guide      {advice.guide.title}, batch {advice.guide_batch}: {in_words(size)}{read}, {share}")
    best = advice.best
    size = in_words(best.size(best.largest_batch))
    lines += [
        f"what fits  {best.title}, batch {best.largest_batch}: {size}",
        f"           largest model for batches of {advice.worth} or more; batches above {advice.tried} are untested",
        "",
    ]
    width = max(len(row.name) for row in advice.rows)
    lines.append(f"{'preset'.ljust(width)}  {'fixed':>10}  {'per example':>11}  largest batch")
    for row in advice.rows:
        sizes = f"{in_words(row.fixed):>10}  {in_words(row.per_example):>11}"
        lines.append(f"{row.name.ljust(width)}  {sizes}  {row.largest_batch or 'none':>4}  {row.title}".rstrip())
    for name, command in advice.commands.items():
        lines += ["", f"{name}:", f"  {command}"]
    return "\n".join(lines)


@takes(PreflightOptions)
def preflight(options: PreflightOptions, as_json: bool):
    """Check versions, GPUs, NCCL and gloo, port, disk, network, compiler and threads. Exit with 1 on failure.

    Example: srun --ntasks-per-node 1 hrm-hf preflight --processes 4 --port 29501 --out $SCRATCH/runs --require-gpu
    """
    from ..launch.preflight import run_checks

    checks = run_checks(options)
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        typer.echo(json.dumps({"ready": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        typer.echo(_checks_text(checks))
    if failed:
        raise typer.Exit(1)


def _checks_text(checks) -> str:
    """Format the checks as a table, with each fix below its check."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name.ljust(width)}  {check.found}")
        if check.fix:
            lines.append(f"{'':{width + 8}}-> {check.fix}")
    count = {status: sum(check.status == status for check in checks) for status in ("ok", "note", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{number} {status}" for status, number in count.items())])


@dataclass(kw_only=True)
class SlurmCommand(SlurmJob):
    """Options of `hrm-hf slurm`: a job, and whether to write or submit its script."""

    out: str | None = option("File to write. [default: stdout]", None)
    submit: bool = option("Submit the job with sbatch, from the current folder.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.submit and self.out:
            raise UsageError("cannot be combined with --out; use one of them", "--submit")
        if self.submit and self.log_dir is None:
            self.log_dir = "logs/slurm"


@takes(SlurmCommand)
def slurm(job: SlurmCommand, as_json: bool):
    """Write an sbatch script, or submit it with --submit. See docs/hpc.md for a guide.

    Example: hrm-hf slurm multi_node --nodes 4 --account m1234 --cluster perlmutter --out job.sbatch
    """
    if job.submit and not shutil.which("sbatch"):
        raise OSError("--submit: sbatch is not on the PATH; run this on a login node of the cluster, or use --out")
    if job.log_dir:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    if job.submit:
        answer = subprocess.run(["sbatch"], input=job.text(), capture_output=True, text=True)
        if answer.returncode:
            raise RuntimeError(f"sbatch rejected the job: {answer.stderr.strip()}")
        result = {"sbatch": answer.stdout.strip(), "log_dir": job.log_dir}
        words = "{sbatch}; log: {log_dir}".format(**result)
    elif job.out:
        out = Path(job.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(job.text())
        words, result = f"wrote {out}; to submit it, run this in the checkout: sbatch {out}", {"out": str(out)}
    else:
        words, result = job.text().rstrip("\n"), {"script": job.text()}
    typer.echo(json.dumps(result) if as_json else words)
