"""`hrm-hf slurm`: write a job script for Slurm, or submit it."""

import json
import shutil
import subprocess
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..launch.slurm import CLUSTERS, KINDS, LAUNCHERS, SlurmJob
from .report import AsJson


Kind = Enum("Kind", {name: name for name in KINDS}, type=str)
Cluster = Enum("Cluster", {name: name for name in CLUSTERS}, type=str)
Launcher = Enum("Launcher", {name: name for name in LAUNCHERS}, type=str)
SUBMITTED_LOGS = "logs/slurm"


def slurm(
    kind: Annotated[Kind, typer.Argument(help="What runs.")],
    cluster: Annotated[Cluster, typer.Option(help="Whose defaults.")] = Cluster.generic,
    account: Annotated[str | None, typer.Option(help="Project that is charged.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Feature of the nodes, e.g. gpu.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service, e.g. regular, interactive.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs, and so processes, of each node.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; more than one with multi_node.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="CPUs of each node, which has one task.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node, e.g. 64G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit: 02:00:00, 1-12:00:00 or 90 (minutes).")] = None,
    script: Annotated[str | None, typer.Option(help="Training script; training/run_cosmo.py by default.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe of the training script.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Name in the queue.")] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(help="Folder of the log, made now; logs/slurm with --submit, else the one sbatch is called in."),
    ] = None,
    signal_seconds: Annotated[
        int | None, typer.Option(help="Seconds before the end at which training saves and stops; 300 by default.")
    ] = None,
    launcher: Annotated[Launcher, typer.Option(help="What starts the processes of a node.")] = Launcher.torchrun,
    accelerate_config: Annotated[
        str | None, typer.Option(help="With --launcher accelerate: its file, e.g. accelerate_configs/fsdp2.yaml.")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help='Shell line that runs first, e.g. "module load python"; repeatable.')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; standard output by default.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Give it to sbatch, from the current folder.")] = False,
    as_json: AsJson = False,
):
    """Write an sbatch script, or submit it with --submit. docs/hpc.md is the guide.

    Example: hrm-hf slurm multi_node --nodes 4 --account m1234 --cluster perlmutter --out job.sbatch
    """
    if submit and out:
        raise typer.BadParameter("either writes a file or submits; leave out --out or --submit", param_hint="--submit")
    try:
        job = SlurmJob.of(
            kind.value, cluster.value, account=account, partition=partition, constraint=constraint, qos=qos, gpus=gpus,
            nodes=nodes, cpus_per_task=cpus_per_task, mem=mem, time=time, script=script, recipe=recipe,
            job_name=job_name, log_dir=log_dir or (SUBMITTED_LOGS if submit else None), signal_seconds=signal_seconds,
            launcher=launcher.value, accelerate_config=accelerate_config, setup=tuple(setup or ()),
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if submit and not shutil.which("sbatch"):
        raise OSError("sbatch is not on the PATH: submit on a login node of the cluster, or write the file with --out")
    if job.log_dir:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    if submit:
        answer = subprocess.run(["sbatch"], input=job.text(), capture_output=True, text=True)
        if answer.returncode:
            raise RuntimeError(f"sbatch refused the job: {answer.stderr.strip()}")
        result = {"sbatch": answer.stdout.strip(), "log_dir": job.log_dir}
        words = "{sbatch}; log: {log_dir}".format(**result)
    elif out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(job.text())
        words, result = f"written: {out}; submit it from the checkout with: sbatch {out}", {"out": str(out)}
    else:
        words, result = job.text().rstrip("\n"), {"script": job.text()}
    typer.echo(json.dumps(result) if as_json else words)
