"""Preemption: on a signal, a run saves a complete checkpoint and exits with status 85.

Slurm announces the end of a job with SIGUSR1 (`#SBATCH --signal=USR1@N`), other systems with SIGTERM. There are three
parts:

- Each training script blocks both signals in its first lines, so a signal that arrives during imports or data loading
  stops the run after its first step.
- `HrmTrainer` has a `PreemptionCallback`. After every optimizer step, all processes check whether one of them has
  received a signal; if so, all save and stop. This costs one all-reduce of a number per step.
- `exit_if_preempted(trainer)` after `train()` ends the script.

A running evaluation or save finishes first, so the signal must leave enough time for an evaluation, a save and a step.
Further signals have no effect.

Ctrl-C (SIGINT) saves in the same way, and then `train()` raises KeyboardInterrupt, which names the checkpoint. A
second Ctrl-C stops immediately. Such a run is not requeued.

SIGTERM ends forked children as usual. Data loader workers obey it only if their own parent sends it, because torchrun
and Slurm send it to workers too. SIGUSR1 stays blocked in child processes, because Slurm sends it to all of them.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ..hub.manifests import find_corruption


PREEMPTED_EXIT_CODE = 85
# Environment variable with the path of a file to create on preemption, because launchers hide the exit code.
PREEMPTION_FILE = "HRM_PREEMPTION_FILE"
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAME_PRESS_SECONDS = 1.0  # a launcher may repeat the terminal's Ctrl-C within this time


class PreemptionCallback(TrainerCallback):
    """Callback that saves and stops after a step if a process got a signal or reached `max_minutes`.

    Attributes:
        preempted: whether a signal has stopped training; the same on all processes.
        received: the last signal; None for Ctrl-C.
        interrupted: message about the saved checkpoint after Ctrl-C has stopped training.
    """

    def __init__(self):
        self.preempted, self.received, self.interrupted = False, None, None
        self.pressed: float | None = None  # time of the first Ctrl-C

    def note(self, number: int, frame: Any) -> None:
        """Remember a signal until the current step ends."""
        self.received = number

    def note_interrupt(self, number: int, frame: Any) -> None:
        """Remember the first Ctrl-C, and raise KeyboardInterrupt on the second."""
        now = time.monotonic()
        if self.pressed is not None and now - self.pressed > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
        self.pressed = self.pressed or now

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals during a `with` block, then restore the handlers and the signal mask.

        A signal that arrives after the last step is raised again after the block.
        """
        self.preempted, self.received, self.interrupted, self.pressed = False, None, None, None
        if threading.current_thread() is not threading.main_thread():
            text = "train() runs outside the main thread, where Python cannot handle signals: SIGUSR1 and SIGTERM"
            warnings.warn(f"{text} will not save a checkpoint", stacklevel=3)
            yield
            return
        handlers = {number: signal.signal(number, self.note) for number in STOP_SIGNALS}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # with nohup, SIGINT stays ignored
            handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self.note_interrupt)
        # SIGUSR1 is blocked below, but also needs a handler: a thread of another library may receive it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            if self.preempted:
                while signal.sigtimedwait(STOP_SIGNALS, 0):
                    pass
            for number, handler in handlers.items():
                if handler is not None:  # None: the handler was not installed from Python
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self.received and not self.preempted:
            signal.raise_signal(self.received)
        if self.pressed is not None and not self.preempted:
            raise KeyboardInterrupt(self.interrupted or "training is complete")

    def on_step_end(self, args, state, control, **kwargs):
        if args.save_strategy == SaveStrategy.BEST and control.should_evaluate:
            # After this evaluation, Trainer saves only a new best model, even if we request a save. Stop a step later.
            return
        reason = 2 * bool(self.pressed) or int(time.monotonic() > getattr(args, "deadline", math.inf))
        if self.received is not None or signal.SIGUSR1 in signal.sigpending():
            reason = 3
        if args.world_size > 1:
            agreed = torch.tensor(reason, device=args.device)
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
            reason = int(agreed.item())
        if reason:
            self.preempted = reason == 3
            if reason == 1 and state.is_world_process_zero:
                print(f"max_minutes={args.max_minutes:g}: stopped after step {state.global_step} of {state.max_steps}")
            if reason == 2:
                self.pressed = self.pressed or time.monotonic()
                folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
                text = f"stopped after step {state.global_step} of {state.max_steps}, saved in {folder}"
                self.interrupted = f"{text}; --resume_from_checkpoint last continues"
            control.should_log = control.should_save = control.should_training_stop = True


def exit_if_preempted(trainer: Any) -> None:
    """Exit the process if a signal has stopped training. Scripts call this right after `train()`.

    The exit status is `PREEMPTED_EXIT_CODE`, and the file named by `HRM_PREEMPTION_FILE` is created first. A run that
    has completed training continues with its final evaluation. A signal during that time exits in the same way if the
    last step has a checkpoint; otherwise SIGUSR1 stays blocked, and SIGTERM ends the process as usual.
    """
    state = trainer.state
    folder = Path(trainer.args.output_dir, f"checkpoint-{state.global_step}")

    def leave(*_: Any) -> None:
        _ignore_signals()
        if os.environ.get(PREEMPTION_FILE):  # each process creates the file, so it exists when the first process exits
            Path(os.environ[PREEMPTION_FILE]).touch()
        if trainer.is_world_process_zero():
            text = f"stopped by a signal after step {state.global_step} of {state.max_steps}, saved in {folder}"
            print(f"{text}; continue with --resume_from_checkpoint last-complete", flush=True)
        sys.exit(PREEMPTED_EXIT_CODE)

    if trainer.preemption.preempted:
        _ignore_signals()
        trainer.accelerator.wait_for_everyone()  # exit together, because a launcher kills all processes when one exits
        leave()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()).issuperset(STOP_SIGNALS)
    if blocked and not find_corruption(folder, with_checksums=False):
        for number in STOP_SIGNALS:
            signal.signal(number, leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# ---- child processes ----


def keep_workers(loader: Any) -> None:
    """Make a data loader's workers ignore SIGTERM unless their own parent sends it.

    torchrun forwards SIGTERM to entire process groups, so training would lose its workers before it could save.
    """
    loader = loader.base_dataloader
    loader.worker_init_fn = partial(_keep_worker, loader.worker_init_fn)


def _keep_worker(init: Callable[[int], None] | None, worker: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if init is not None:
        init(worker)


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass  # if the parent has exited, torch's watchdog ends the worker
    os._exit(0)


def _free_child() -> None:
    """Make a forked child exit on SIGTERM (otherwise pools wait for it forever) and ignore SIGUSR1."""
    if getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == __name__:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if getattr(signal.getsignal(signal.SIGINT), "__module__", None) == __name__:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(after_in_child=_free_child)
