"""`hrm-hf slurm`: write a job script for Slurm, or submit it."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import typer

from ..io.options import option
from ..io.usage import UsageError
from ..launch.slurm import SlurmJob
from .options import takes


@dataclass(kw_only=True)
class SlurmCommand(SlurmJob):
    """A job, and where its script goes."""

    out: str | None = option("File to write; standard output by default.", None)
    submit: bool = option("Give it to sbatch, from the current folder.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.submit and self.out:
            raise UsageError("either writes a file or submits; leave out --out or --submit", "--submit")
        if self.submit and self.log_dir is None:
            self.log_dir = "logs/slurm"


@takes(SlurmCommand)
def slurm(job: SlurmCommand, as_json: bool):
    """Write an sbatch script, or submit it with --submit. docs/hpc.md is the guide.

    Example: hrm-hf slurm multi_node --nodes 4 --account m1234 --cluster perlmutter --out job.sbatch
    """
    if job.submit and not shutil.which("sbatch"):
        raise OSError("sbatch is not on the PATH: submit on a login node of the cluster, or write the file with --out")
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
        words, result = f"written: {out}; submit it from the checkout with: sbatch {out}", {"out": str(out)}
    else:
        words, result = job.text().rstrip("\n"), {"script": job.text()}
    typer.echo(json.dumps(result) if as_json else words)
