"""A run that gets a signal saves, exits with status 85, and resumes with the same losses.

Referee: the same run left alone; and the kernel, which says what a process blocks and by which signal it ended.
"""

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import preemption_worker
import psutil
import pytest
import started
from datasets import Dataset
from preemption_worker import STEPS, STOPPED_AT, Signal, logged, make
from script_runs import ENVIRONMENT, PUZZLE_RECIPE, SCRIPTS, puzzle_boards, puzzle_weights, recipe_arguments
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hrm_hf.hub.manifests import MANIFEST, find_corruption, list_checkpoints
from hrm_hf.trainer.preemption import PREEMPTED_EXIT_CODE, STOP_SIGNALS, exit_if_preempted, keep_workers
from hrm_hf.trainer.run import run_training
from hrm_hf_start import start_script


KINDS = ("puzzle", "lm", "go", "cosmo")
FIRST_LINES = """
from hrm_hf_start import start_script
if __name__ == '__main__':
    start_script(EXTRA)
"""


@pytest.fixture(autouse=True)
def signals():
    """Restore handlers and mask after each test, and return the original ones."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield before, mask
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stopped_run(kind, folder, number=signal.SIGUSR1, step=STOPPED_AT, **options):
    trainer = make(kind, folder, **options)
    trainer.add_callback(Signal(number, step))
    trainer.train("last-complete")
    return trainer


# ---- stopping and resuming ----


@pytest.mark.parametrize("kind", KINDS)
def test_signal_in_a_step_saves_after_it_and_the_resumed_losses_match(kind, tmp_path):
    alone = make(kind, tmp_path / "alone")
    alone.train()
    stopped = stopped_run(kind, tmp_path / "run")
    assert stopped.preemption.preempted and stopped.state.global_step == STOPPED_AT
    assert [folder.name for folder in list_checkpoints(tmp_path / "run")] == [f"checkpoint-{STOPPED_AT}"]
    assert find_corruption(tmp_path / "run" / f"checkpoint-{STOPPED_AT}") == []
    resumed = make(kind, tmp_path / "run")
    resumed.train("last-complete")
    assert not resumed.preemption.preempted
    assert logged(resumed) == logged(alone) and len(logged(alone)) == STEPS


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_training_restores_handlers_and_mask(number, tmp_path, signals):
    stopped_run("lm", tmp_path, number)
    assert {one: signal.getsignal(one) for one in STOP_SIGNALS} == signals[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signals[1]


def test_a_run_that_fails_leaves_no_handler_behind(tmp_path, signals):
    trainer = make("lm", tmp_path)
    trainer.training_step = None
    with pytest.raises(TypeError):
        trainer.train()
    assert {one: signal.getsignal(one) for one in STOP_SIGNALS} == signals[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signals[1]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_pending_before_training_stops_after_the_first_step(number, tmp_path):
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.raise_signal(number)  # signals this thread only, as others do not block it
    trainer = make("lm", tmp_path)
    trainer.train()
    assert trainer.preemption.preempted and trainer.state.global_step == 1
    assert not signal.sigpending()


def test_run_out_of_minutes_saves_after_its_step_and_is_not_preempted(tmp_path):
    trainer = make("lm", tmp_path, max_minutes=1e-6)
    trainer.train()
    assert not trainer.preemption.preempted and trainer.state.global_step == 1
    assert find_corruption(tmp_path / "checkpoint-1") == []


def test_repeated_signals_act_as_one(tmp_path):
    trainer = make("lm", tmp_path)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        trainer.add_callback(Signal(number))
    trainer.train()
    assert trainer.preemption.preempted and trainer.state.global_step == STOPPED_AT


def test_a_step_of_several_batches_is_finished_first(tmp_path):
    trainer = stopped_run("lm", tmp_path, gradient_accumulation_steps=2)
    assert trainer.state.global_step == STOPPED_AT and find_corruption(tmp_path / f"checkpoint-{STOPPED_AT}") == []


def test_a_signal_in_an_evaluation_stops_after_the_next_step(tmp_path):
    class InEvaluation(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGUSR1)

    trainer = make("lm", tmp_path, eval_strategy="steps", eval_steps=2)
    trainer.add_callback(InEvaluation())
    trainer.train()
    assert trainer.state.global_step == 3 and find_corruption(tmp_path / "checkpoint-3") == []
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2]


def test_run_that_saves_only_the_best_step_stops_without_evaluation(tmp_path):
    options = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": STOPPED_AT, "greater_is_better": True}
    trainer = stopped_run("lm", tmp_path, metric_for_best_model="eval_loss", **options)
    assert trainer.state.global_step == STOPPED_AT + 1
    assert find_corruption(tmp_path / f"checkpoint-{STOPPED_AT + 1}") == []


def test_losses_since_the_last_log_are_logged_before_the_run_stops(tmp_path):
    trainer = stopped_run("lm", tmp_path, logging_steps=2)
    assert [entry["step"] for entry in logged(trainer)] == [2, 3]


@pytest.mark.parametrize("kind", ["puzzle", "lm"])
def test_run_stopped_in_its_last_step_is_complete_when_resumed(kind, tmp_path):
    stopped = stopped_run(kind, tmp_path, step=STEPS)
    assert stopped.preemption.preempted
    resumed = make(kind, tmp_path)
    resumed.train("last-complete")
    assert resumed.state.global_step == STEPS and logged(resumed) == logged(stopped)
    weights = stopped.model.state_dict()
    assert all(value.equal(weights[name]) for name, value in resumed.model.state_dict().items())


def test_interrupt_saves_after_the_step_and_names_the_checkpoint(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    with pytest.raises(KeyboardInterrupt, match=f"step {STOPPED_AT} of {STEPS}, saved in {tmp_path}/checkpoint-"):
        stopped_run("lm", tmp_path, signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert find_corruption(tmp_path / f"checkpoint-{STOPPED_AT}") == []


def test_signal_after_the_last_step_goes_to_the_previous_handler(tmp_path):
    class Late(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)

    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    trainer = make("lm", tmp_path)
    trainer.add_callback(Late())
    trainer.train()
    assert not trainer.preemption.preempted and seen == [signal.SIGTERM]


def test_training_outside_the_main_thread_warns_and_continues(tmp_path):
    trainer = make("lm", tmp_path)
    with pytest.warns(UserWarning, match="main thread"):
        thread = threading.Thread(target=trainer.train)
        thread.start()
        thread.join()
    assert trainer.state.global_step == STEPS


def test_last_complete_starts_a_new_run_without_checkpoints(tmp_path, capsys):
    (tmp_path / "checkpoint-2").mkdir()  # no manifest: the run was killed during its first save
    trainer = make("lm", tmp_path, max_steps=1)
    trainer.train("last-complete")
    assert trainer.state.global_step == 1
    assert f"no complete checkpoint in {tmp_path}: the run starts from the beginning" in capsys.readouterr().out


# ---- scripts ----


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("run_*.py")), ids=lambda path: path.stem)
def test_every_script_blocks_signals_before_it_imports_and_leaves_right_after_training(script):
    tree = ast.parse(script.read_text())
    first = re.sub(r"start_script\(.*\)", "start_script(EXTRA)", "\n".join(map(ast.unparse, tree.body[1:3])))
    assert first == ast.unparse(ast.parse(FIRST_LINES))
    assert "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})" in inspect.getsource(
        start_script
    )
    main = next(part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == "main")
    assert ast.unparse(main.body[0]).startswith("options = parse_script(")
    assert ast.unparse(main.body[-1]).startswith("run_training(")
    lines = [ast.unparse(line) for line in ast.parse(inspect.getsource(run_training)).body[0].body]
    at = next(i for i, line in enumerate(lines) if line.startswith("trainer.train(resume_from_checkpoint="))
    assert lines[at + 1] == "exit_if_preempted(trainer)"


def test_a_stopped_script_names_its_checkpoint_creates_the_file_and_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HRM_PREEMPTION_FILE", str(tmp_path / "stopped"))
    trainer = stopped_run("lm", tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        exit_if_preempted(trainer)
    assert left.value.code == PREEMPTED_EXIT_CODE == 85 and (tmp_path / "stopped").exists()
    assert f"after step 3 of 6, saved in {tmp_path / 'run' / 'checkpoint-3'}" in capsys.readouterr().out


def test_complete_script_continues_and_listens_only_if_it_blocked_signals(tmp_path, signals):
    trainer = make("lm", tmp_path, save_strategy="steps", save_steps=STEPS)
    trainer.train()
    exit_if_preempted(trainer)
    assert {one: signal.getsignal(one) for one in STOP_SIGNALS} == signals[0]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    exit_if_preempted(trainer)
    with pytest.raises(SystemExit) as left:
        signal.raise_signal(signal.SIGUSR1)
    assert left.value.code == PREEMPTED_EXIT_CODE


def test_a_complete_script_without_a_checkpoint_to_return_to_finishes_first(tmp_path, signals):
    trainer = make("lm", tmp_path)
    trainer.train()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    exit_if_preempted(trainer)
    signal.raise_signal(signal.SIGUSR1)
    assert signal.sigpending() == {signal.SIGUSR1}
    signal.sigwait({signal.SIGUSR1})


# ---- child processes ----


def send(process: int, number: int) -> None:
    """Sends a signal from a process that is not the parent."""
    subprocess.run(["kill", f"-{number}", str(process)], check=True)


def test_training_keeps_the_workers_of_its_data_through_signals_to_all_processes(tmp_path):
    others = psutil.Process().children()  # started by earlier tests

    class ToAll(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            workers = [child for child in psutil.Process().children() if child not in others]
            assert workers
            for worker in [*workers, psutil.Process()] if state.global_step == 2 else ():
                for number in STOP_SIGNALS:
                    send(worker.pid, number)
                time.sleep(0.1)
            assert [worker.status() == psutil.STATUS_ZOMBIE for worker in workers] == [False] * len(workers)

    trainer = make("lm", tmp_path, dataloader_num_workers=1)
    trainer.add_callback(ToAll())
    trainer.train()
    assert trainer.preemption.preempted and trainer.state.global_step == 3


class Prepared:
    """Wrap a loader like accelerate."""

    def __init__(self, loader):
        self.base_dataloader = loader


def test_a_worker_ends_by_the_signal_of_its_parent_alone():
    loader = DataLoader(range(10**6), num_workers=1, multiprocessing_context="fork")
    keep_workers(Prepared(loader))
    rows = iter(loader)
    next(rows)
    worker = rows._workers[0]
    send(worker.pid, signal.SIGTERM)
    worker.join(timeout=0.3)
    assert worker.exitcode is None
    worker.terminate()
    worker.join(timeout=120)
    assert worker.exitcode == 0


def test_forked_children_of_a_script_end_by_sigterm():
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_pools_that_read_data_end_while_signals_are_blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    rows = Dataset.from_dict({"n": list(range(8))}).map(lambda row: {"m": row["n"] + 1}, num_proc=2)
    assert rows["m"][:] == list(range(1, 9))


# ---- real processes ----


def blocks(process: int, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what a process blocks from /proc")
def test_script_signaled_during_imports_saves_after_its_first_step(tmp_path):
    file = tmp_path / "stopped"
    arguments = recipe_arguments(
        tmp_path / "recipe.yaml", **PUZZLE_RECIPE, data_path=str(puzzle_boards(tmp_path / "boards")),
        model_name_or_path=str(puzzle_weights(tmp_path / "start", 0.5)), output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "run_puzzle.py"), *arguments, "--resume_from_checkpoint", "last-complete"],
        env={**ENVIRONMENT, "HRM_PREEMPTION_FILE": str(file)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while process.poll() is None and not blocks(process.pid, signal.SIGTERM):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == PREEMPTED_EXIT_CODE, errors[-3000:]
    assert "starts from the beginning" in printed and "stopped by a signal after step 1 of 12" in printed
    assert [folder.name for folder in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"] and file.exists()
    assert (tmp_path / "run" / "checkpoint-1" / MANIFEST).exists() and not (tmp_path / "run" / "results.json").exists()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Return the results of each of two processes."""
    out = tmp_path_factory.mktemp("two")
    result = started.run(preemption_worker.main, str(out), processes=2)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["puzzle", "lm"])
def test_signal_to_one_process_stops_both_at_the_same_step_and_they_resume(two_processes, kind):
    for one in (process[kind] for process in two_processes):
        assert one["stopped"] == [True, STOPPED_AT] and one["resumed"] == [False, STEPS]
        assert one["log"] == one["alone"]
    assert len(one["alone"]) == STEPS


def test_stopped_file_reports_the_preemption_that_the_launcher_hides(tmp_path):
    ignoring = ["sh", "-c", 'trap \'\' USR1; exec "$0" "$@"']  # as job scripts do
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--standalone"]
    result = subprocess.run(
        [*ignoring, *torchrun, started.__file__, preemption_worker.__file__, str(tmp_path)],
        env={**ENVIRONMENT, "HRM_PREEMPTION_FILE": str(tmp_path / "stopped")},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 1 and (tmp_path / "stopped").exists()
    assert "exitcode  : 85" in result.stderr
