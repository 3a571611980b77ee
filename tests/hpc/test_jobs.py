"""Submit the committed job scripts to a real two-node Slurm, and run them to the end on the CPU.

Referees: Slurm's record of a job; the losses of an uninterrupted run; two processes on one node, compared with two
nodes of one process.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.launch.slurm import SlurmJob


pytestmark = pytest.mark.external
SCRIPTS = Path(__file__).parents[2] / "training" / "slurm"
PUZZLES = {"SCRIPT": "training/run_puzzle.py", "RECIPE": "tiny.yaml"}
WORKER = "tests/hpc/all_reduce.py"
STEPS = 60


def losses(run: Path) -> dict[int, float]:
    """Return the loss of every step of a finished run, and check that each step ran once."""
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    found = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert len(found) == len(dict(found))
    return dict(found)


def seen(folder: Path, tag: str = "seen") -> list[dict]:
    """Return the results of tests/hpc/all_reduce.py by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{tag}-*.json"))]


@pytest.fixture(scope="module")
def two_nodes(cluster, checkout):
    """Folder and log of a finished run on two nodes."""
    job = cluster.submit(
        SCRIPTS / "multi_node.sbatch", cwd=checkout, **PUZZLES, OUTPUT_DIR="runs/two_nodes", MAX_STEPS=STEPS
    )
    record = cluster.finish(job)
    assert record["JobState"] == "COMPLETED" and record["NodeList"] == "n[1-2]", cluster.log(job)[-5000:]
    return checkout / "runs" / "two_nodes", cluster.log(job)


@pytest.mark.slow
def test_single_gpu_script_trains_with_every_override(cluster, checkout, submit_folder):
    keys = {"MAX_STEPS": 7, "BATCH_SIZE": 5, "LR": "2e-3", "SEED": 11, "NUM_WORKERS": 1, "TRAIN_SAMPLES": 30}
    job = cluster.submit(
        SCRIPTS / "single_gpu.sbatch", "--logging_steps", "7", cwd=submit_folder,
        **PUZZLES, **keys, OUTPUT_DIR="runs/one", EXTRA_ARGS="--weight_decay 0.5 --save_total_limit 2",
    )  # fmt: skip
    assert cluster.finish(job)["JobState"] == "COMPLETED", cluster.log(job)[-5000:]
    # Submitted from a folder below the checkout without a logs folder: the script finds the checkout.
    assert (submit_folder / f"hrm_single_gpu_{job}.out").exists()
    recipe = yaml.safe_load((checkout / "runs" / "one" / "recipe.yaml").read_text())
    expected = {
        "max_steps": 7, "per_device_train_batch_size": 5, "learning_rate": 2e-3, "seed": 11, "max_train_samples": 30,
        "dataloader_num_workers": 1, "weight_decay": 0.5, "save_total_limit": 2, "logging_steps": 7, "use_cpu": True,
    }  # fmt: skip
    assert {name: recipe[name] for name in expected} == expected
    assert list(losses(checkout / "runs" / "one")) == [7]


def test_two_nodes_train_together(two_nodes):
    run, log = two_nodes
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert "2 x 1 on n[1-2]" in log


@pytest.mark.slow
def test_two_processes_of_one_node_train_as_two_nodes_do(cluster, checkout, submit_folder, two_nodes):
    job = cluster.submit(
        SCRIPTS / "multi_gpu.sbatch", cwd=submit_folder, **PUZZLES, GPUS=2, OUTPUT_DIR="runs/two", MAX_STEPS=STEPS
    )
    record = cluster.finish(job)
    assert record["JobState"] == "COMPLETED" and record["NumNodes"] == "1", cluster.log(job)[-5000:]
    assert losses(checkout / "runs" / "two") == losses(two_nodes[0])


@pytest.mark.slow
def test_preempted_job_is_requeued_and_resumes_with_the_same_losses(cluster, checkout, submit_folder, two_nodes):
    job = cluster.submit(
        SCRIPTS / "multi_node.sbatch", cwd=submit_folder, **PUZZLES, OUTPUT_DIR="runs/stopped", MAX_STEPS=STEPS
    )
    cluster.wait(job, lambda: cluster.log(job).count("'loss'") > 10, "its first steps")
    cluster.run("scancel", "--signal=USR1", str(job))  # signals the step's processes, like --signal=USR1@N
    cluster.start_now(job)
    record = cluster.finish(job)
    log = cluster.log(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), log[-5000:]
    # Both starts write to one log; the second one names the checkpoint it resumes from.
    assert "requeueing" in log and "restarts 1" in log and "--resume_from_checkpoint last-complete" in log
    (stopped,) = (checkout / "runs" / "stopped").glob("checkpoint-*")
    assert 1 <= int(stopped.name.split("-")[1]) < STEPS
    assert losses(checkout / "runs" / "stopped") == losses(two_nodes[0])
    assert not list(submit_folder.glob(".preempted*"))


@pytest.mark.slow
def test_a_job_that_is_requeued_before_any_checkpoint_starts_from_the_beginning(cluster, checkout, submit_folder):
    job = cluster.submit(
        SCRIPTS / "single_gpu.sbatch", cwd=submit_folder, **PUZZLES, OUTPUT_DIR="runs/early", MAX_STEPS=3
    )
    cluster.wait(job, lambda: "arguments" in cluster.log(job), "its start")
    cluster.run("scontrol", "requeue", str(job))  # as Slurm does when a node fails
    cluster.start_now(job)
    record = cluster.finish(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), cluster.log(job)[-5000:]
    assert list(losses(checkout / "runs" / "early")) == [1, 2, 3]


@pytest.mark.slow
def test_concurrent_jobs_on_one_node_use_different_ports(cluster, checkout, submit_folder):
    jobs = []
    for tag, other in (("a", "b"), ("b", "a")):
        worker = ["--folder", submit_folder, "--tag", tag, "--meet", submit_folder / f"{other}-0.json"]
        jobs.append(
            cluster.submit(
                "--nodelist=n1", "--cpus-per-task=8", "--gpus-per-node=2", SCRIPTS / "multi_gpu.sbatch", *worker,
                cwd=submit_folder, SCRIPT=WORKER, GPUS=2,
            )
        )  # fmt: skip
    records = [cluster.finish(job) for job in jobs]
    assert [(one["JobState"], one["NodeList"]) for one in records] == [("COMPLETED", "n1")] * 2, cluster.log(jobs[0])
    a, b = (seen(submit_folder, tag) for tag in "ab")
    assert [one["processes"] for one in a + b] == [2] * 4 and [one["ranks"] for one in a + b] == [1] * 4
    assert {one["port"] for one in a}.isdisjoint(one["port"] for one in b)


@pytest.mark.slow
def test_accelerate_starts_two_nodes_of_two_processes(cluster, checkout, submit_folder):
    job = SlurmJob(kind="multi_node", launcher="accelerate", script=WORKER)
    (submit_folder / "job.sbatch").write_text(job.text())
    number = cluster.submit("job.sbatch", "--folder", submit_folder, cwd=submit_folder, GPUS=2)
    assert cluster.finish(number)["JobState"] == "COMPLETED", cluster.log(number)[-5000:]
    assert [(one["processes"], one["ranks"], one["node"]) for one in seen(submit_folder)] == [
        (4, 6, "n1"), (4, 6, "n1"), (4, 6, "n2"), (4, 6, "n2")
    ]  # fmt: skip


@pytest.mark.slow
def test_stopped_generator_resumes_and_the_default_script_trains_on_its_maps(cluster, checkout, submit_folder):
    keys = {"DATA_TYPE": "lognormal", "SIZE": 32, "TRAIN_SAMPLES": 900, "VAL_SAMPLES": 100}
    own = {"TEST_SAMPLES": 20, "NUM_WORKERS": 2}
    job = cluster.submit(SCRIPTS / "generate_data.sbatch", "--shard-size", "50", cwd=checkout, **keys, **own)
    maps = checkout / "runs" / "data" / "kappa_32"
    cluster.wait(job, lambda: any(maps.glob("train/0*.parquet")), "its first shard")
    kept = {path: path.stat().st_mtime_ns for path in maps.glob("train/0*.parquet")}
    cluster.run("scancel", "--signal=USR1", str(job))
    cluster.start_now(job)
    record = cluster.finish(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), cluster.log(job)[-5000:]
    info = json.loads((maps / "cosmology.json").read_text())
    assert info["counts"] == {"train": 1000, "test": 20}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept and len(list(maps.glob("train/*"))) == 20

    tiny = "--preset test --eval_strategy no --save_strategy no"
    job = cluster.submit(
        SCRIPTS / "single_gpu.sbatch", cwd=submit_folder, **{**keys, "TRAIN_SAMPLES": 90, "VAL_SAMPLES": 10},
        RECIPE="training/recipes/cosmo_debug.yaml", MAX_STEPS=2, OUTPUT_DIR="runs/cosmo", EXTRA_ARGS=tiny,
    )  # fmt: skip
    assert cluster.finish(job)["JobState"] == "COMPLETED", cluster.log(job)[-5000:]
    assert json.loads((checkout / "runs" / "cosmo" / "results.json").read_text())["task"] == "cosmology-regression"


def test_a_script_runs_inside_an_allocation_too(cluster, checkout, submit_folder):
    script = [str(SCRIPTS / "single_gpu.sbatch"), "--folder", str(submit_folder)]
    result = cluster.run("salloc", "--gpus-per-node=1", "bash", *script, cwd=submit_folder, SCRIPT=WORKER)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [one["processes"] for one in seen(submit_folder)] == [1]


def test_submit_creates_the_log_folder(cluster, submit_folder, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(submit_folder)
    monkeypatch.setenv("EXTRA_ARGS", f"--folder {submit_folder}")
    result = CliRunner().invoke(app, ["slurm", "single_gpu", "--script", WORKER, "--submit"])
    assert result.exit_code == 0, result.output
    job = int(result.output.split("batch job ")[1].split(";")[0])
    assert cluster.finish(job)["JobState"] == "COMPLETED", cluster.log(job)
    assert (submit_folder / "logs" / "slurm" / f"hrm_single_gpu_{job}.out").exists()
    assert [one["processes"] for one in seen(submit_folder)] == [1]


# ---- messages of jobs that cannot run ----


CANNOT_RUN = {  # arguments after the script, keys, and part of the message
    "--export after the script": (["--export=EPOCHS=200"], {}, "sbatch --export=ALL,EPOCHS=200 FILE"),
    "--export in two words": (["--export", "ALL,LR=1"], {}, "sbatch --export=ALL, FILE"),
    "--time after the script": (["--time=1"], {}, "sbatch --time=1 FILE"),
    "no such script": ([], {"SCRIPT": "training/run_nothing.py"}, "training/run_nothing.py is not in"),
    "no such checkout": ([], {"PROJECT": "/nowhere"}, "PROJECT=/path/to/checkout"),
    "no such interpreter": ([], {"PYTHON": "/no/python"}, "has no /no/python"),
    "no GPU": ([], {"USE_CPU": "0"}, "nvidia-smi shows 0 GPUs, but GPUS=1"),
    "a key of another script": ([], {"DATA_TYPE": "des"}, "DATA_TYPE=des has no meaning"),
    "a batch that a recipe has for all": (
        [], {"RECIPE": "training/recipes/sudoku_extreme_1k.yaml", "BATCH_SIZE": "8"}, "--global_batch_size 8",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(cluster, checkout, tmp_path_factory):
    """The job of each case. All are submitted first, because Slurm takes seconds to start each."""
    folder = checkout / tmp_path_factory.mktemp("refused").name
    folder.mkdir()
    return {
        name: cluster.submit(SCRIPTS / "single_gpu.sbatch", *arguments, cwd=folder, **{**PUZZLES, **keys})
        for name, (arguments, keys, _) in CANNOT_RUN.items()
    }


@pytest.mark.parametrize("case", CANNOT_RUN)
def test_job_that_cannot_run_logs_the_reason(cluster, refused, case):
    job, (*_, message) = refused[case], CANNOT_RUN[case]
    assert cluster.finish(job)["JobState"] == "FAILED"
    assert message in cluster.log(job)
    assert "Traceback" not in cluster.log(job)


def test_job_with_its_log_in_a_missing_folder_fails(cluster, checkout, submit_folder):
    job = cluster.submit("--output=missing/%j.out", SCRIPTS / "single_gpu.sbatch", cwd=submit_folder, **PUZZLES)
    assert cluster.finish(job)["ExitCode"] == "0:53"
    assert not os.listdir(submit_folder)
