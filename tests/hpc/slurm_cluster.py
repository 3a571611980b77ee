"""A real Slurm of two nodes, n1 and n2, on this machine: munged, slurmctld and two slurmd, as root and on loopback.

    with running_cluster() as cluster:
        job = cluster.submit("job.sbatch", cwd=folder, EPOCHS="2")
        assert cluster.finish(job)["JobState"] == "COMPLETED"

The cluster has no real GPUs (each node declares four without devices, so that requests succeed), accounting, cgroups,
or shared disk other than this machine's.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
GPUS = ("gpu0", "gpu1", "gpu2", "gpu3")  # regular files in place of devices
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

# CPUs and memory are declared, not detected (config_overrides): the committed scripts ask for whole compute nodes.
CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=pmi2
GresTypes=gpu
ReturnToService=2
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=1000 Gres=gpu:4
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing() -> str | None:
    """Return why this machine cannot run the cluster, or None."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=SBIN)]
    if absent:
        return f"needs Slurm: no {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "needs root, to start Slurm's daemons"


class Cluster:
    """Commands for a running Slurm. `log(job)` returns a job's output so far."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Without variables that are settings of a job or belong to another cluster.
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = {**keep, "PATH": SBIN, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None, text: str | None = None, **variables: str):
        """Run a program in this cluster's environment and return its result."""
        environment = {**self.environment, **variables}
        return subprocess.run(command, cwd=cwd, env=environment, input=text, capture_output=True, text=True)

    def submit(self, *arguments: str, cwd: Path, **keys: str) -> int:
        """Run `sbatch --export=ALL,KEY=VALUE,... ARGUMENTS` in a folder; return the job ID."""
        export = ",".join(["ALL", *(f"{key}={value}" for key, value in keys.items())])
        result = self.run("sbatch", "--parsable", f"--export={export}", *map(str, arguments), cwd=cwd)
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    def show(self, job: int) -> dict[str, str]:
        """Return Slurm's record of a job."""
        text = self.run("scontrol", "show", "job", "--oneliner", str(job)).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def log(self, job: int) -> str:
        """Return the job's output so far."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def wait(self, job: int, condition, what: str, seconds: float = 180) -> None:
        """Wait for `condition()`; fail with the job's output if the job or the time ends first."""
        limit = time.monotonic() + seconds
        while not condition():
            state = self.show(job)["JobState"]
            assert state not in ENDED or condition(), f"{state} before {what}:\n{self.log(job)[-5000:]}"
            assert time.monotonic() < limit, f"{what} took more than {seconds} s ({state}):\n{self.log(job)[-5000:]}"
            time.sleep(0.2)

    def finish(self, job: int, seconds: float = 240) -> dict[str, str]:
        """Wait for the end of a job, and return its final record."""
        self.wait(job, lambda: self.show(job)["JobState"] in ENDED, "its end", seconds)
        return self.show(job)

    def start_now(self, job: int) -> None:
        """Start a requeued job without the two minutes that Slurm waits.

        Those two minutes also keep the end of its first start from being taken for that of the second; here the log
        of the node tells when the first one is over.
        """
        self.wait(job, lambda: self.show(job)["JobState"] == "PENDING", "the queue")
        starts = int(self.show(job)["Restarts"])
        logs = [self.folder / f"slurmd-{node}.log" for node in ("n1", "n2")]
        over = f"[{job}.batch] done with job"
        self.wait(
            job, lambda: sum(log.read_text().count(over) for log in logs) >= starts, "the end of the first start"
        )
        # The controller may still process the first end, and would mistake a second start for it.
        self.wait(job, lambda: "comp" not in self.run("sinfo", "--noheader", "--format=%T").stdout, "idle nodes")
        time.sleep(SETTLING_SECONDS)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")


SETTLING_SECONDS = 4  # Slurm delays a requeued job by two minutes


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start the daemons, wait until both nodes are idle, and finally end the daemons by process ID."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: sockets have at most 107 characters
    cluster, daemons = Cluster(folder), []
    try:
        daemons.append(_start_munge(folder))
        configuration = CONFIGURATION.format(host=socket.gethostname().split(".")[0], folder=folder, ports=_ports(3))
        (folder / "slurm.conf").write_text(configuration)
        for name in GPUS:
            (folder / name).touch()
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-{len(GPUS) - 1}]\n")
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            daemons.append(_start(command, cluster.environment, folder))
        _wait_until_idle(cluster, daemons)
        yield cluster
        cluster.run("scancel", "--user=root")
        limit = time.monotonic() + 120
        while cluster.run("squeue", "--noheader").stdout.strip() and time.monotonic() < limit:
            time.sleep(0.2)
    finally:
        for daemon in reversed(daemons):
            _end(daemon)
        shutil.rmtree(folder, ignore_errors=True)


def _start_munge(folder: Path) -> subprocess.Popen:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    daemon = _start(["munged", "--foreground", "--force", *options], {**os.environ, "PATH": SBIN}, folder)
    limit = time.monotonic() + 120
    while not (folder / "munge.socket").exists():
        assert daemon.poll() is None and time.monotonic() < limit, (folder / "munged.out").read_text()
        time.sleep(0.05)
    return daemon


def _start(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen:
    with open(folder / f"{command[0]}.out", "a") as output:
        program = shutil.which(command[0], path=SBIN)
        return subprocess.Popen(
            [program, *command[1:]], env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _wait_until_idle(cluster: Cluster, daemons: list[subprocess.Popen]) -> None:
    limit = time.monotonic() + 120
    while cluster.run("sinfo", "--noheader", "--format=%D %T").stdout.strip() != "2 idle":
        logs = "".join(path.read_text()[-2000:] for path in cluster.folder.glob("*.out"))
        assert all(daemon.poll() is None for daemon in daemons), f"a daemon has ended:\n{logs}"
        assert time.monotonic() < limit, f"no idle nodes:\n{cluster.run('sinfo').stdout}{logs}"
        time.sleep(0.2)


def _end(daemon: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.kill(daemon.pid, signal.SIGTERM)
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _ports(count: int) -> list[int]:
    """Return distinct free TCP ports."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
