"""Stopping for a signal: a run that is told to stop saves a complete checkpoint and ends with status 85.

Slurm announces the end of a job by SIGUSR1 (`#SBATCH --signal=USR1@N`), everything else by SIGTERM. The three parts:

- each training script blocks both in its first lines, so a signal that arrives during imports or while data are read
  stops the run after its first step;
- `HrmTrainer` owns a `PreemptionCallback`. After every optimizer step all processes agree whether one of them was
  told to stop; if so, all save after this step and stop. The price is one all-reduce of a number per step;
- `exit_if_preempted(trainer)` after `train()` ends the script.

A running evaluation or save is finished first, so the notice must be longer than those two and a step take together.
Further signals have no effect.

Ctrl-C (SIGINT) saves in the same way, and then `train()` raises KeyboardInterrupt, which names the checkpoint. A
second one stops at once. Such a run is not requeued.

Forked children end by SIGTERM as always, but the workers of training's data loaders only by their own parent's:
torchrun and Slurm send it to them too. SIGUSR1 stays blocked in them and in programs that are started: it would kill
those, and Slurm sends it to every process of a step.
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
PREEMPTION_FILE = "HRM_PREEMPTION_FILE"  # variable that names a file to create; launchers hide the exit status
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAME_PRESS_SECONDS = 1.0  # in which a launcher passes Ctrl-C on to processes that have had it from the terminal


class PreemptionCallback(TrainerCallback):
    """Saves and stops after the step in which a process was told to, or ran out of `max_minutes`.

    Attributes:
        preempted: whether training was stopped so; the same on all processes.
        received: the last signal; None for Ctrl-C.
        interrupted: what Ctrl-C has left, once it has stopped training.
    """

    def __init__(self):
        self.preempted, self.received, self.interrupted = False, None, None
        self.pressed: float | None = None  # when Ctrl-C came

    def note(self, number: int, frame: Any) -> None:
        """Remember a signal, as its handler."""
        self.received = number

    def note_interrupt(self, number: int, frame: Any) -> None:
        """Remember Ctrl-C, as its handler; the second one raises KeyboardInterrupt."""
        now = time.monotonic()
        if self.pressed is not None and now - self.pressed > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
        self.pressed = self.pressed or now

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Notes signals inside the block, and restores handlers and mask.

        A signal that came too late for the last step is passed on to whoever listens after the block.
        """
        self.preempted, self.received, self.interrupted, self.pressed = False, None, None, None
        if threading.current_thread() is not threading.main_thread():
            text = "train() runs outside the main thread, where Python allows no signal handlers: SIGUSR1 and SIGTERM"
            warnings.warn(f"{text} will save no checkpoint", stacklevel=3)
            yield
            return
        handlers = {number: signal.signal(number, self.note) for number in STOP_SIGNALS}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as by nohup
            handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self.note_interrupt)
        # In threads that others have started it may be unblocked, so it needs the handler too.
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
                if handler is not None:  # as for one that was not installed from Python
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self.received and not self.preempted:
            signal.raise_signal(self.received)
        if self.pressed is not None and not self.preempted:
            raise KeyboardInterrupt(self.interrupted or "training is complete")

    def on_step_end(self, args, state, control, **kwargs):
        if args.save_strategy == SaveStrategy.BEST and control.should_evaluate:
            return  # the library would save this step only if it is the best; the next one will do
        told = 2 * bool(self.pressed) or int(time.monotonic() > getattr(args, "deadline", math.inf))
        if self.received is not None or signal.SIGUSR1 in signal.sigpending():
            told = 3
        if args.world_size > 1:
            agreed = torch.tensor(told, device=args.device)
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
            told = int(agreed.item())
        if told:
            self.preempted = told == 3
            if told == 1 and state.is_world_process_zero:
                print(f"max_minutes={args.max_minutes:g}: stopped after step {state.global_step} of {state.max_steps}")
            if told == 2:
                self.pressed = self.pressed or time.monotonic()
                folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
                text = f"stopped after step {state.global_step} of {state.max_steps}, saved in {folder}"
                self.interrupted = f"{text}; --resume_from_checkpoint last continues"
            control.should_log = control.should_save = control.should_training_stop = True


def exit_if_preempted(trainer: Any) -> None:
    """For training scripts, right after `train()`: ends the process if that was stopped for a signal.

    The exit status is `PREEMPTED_EXIT_CODE`, and the file that `HRM_PREEMPTION_FILE` names exists by then. A complete
    run goes on to its last evaluation, and a signal then ends the process in the same way if the last step has a
    checkpoint to return to; if not, SIGUSR1 stays blocked and SIGTERM ends it as any program.
    """
    state = trainer.state
    folder = Path(trainer.args.output_dir, f"checkpoint-{state.global_step}")

    def leave(*_: Any) -> None:
        _ignore_signals()
        if os.environ.get(PREEMPTION_FILE):  # by every process: the first to go must not go without
            Path(os.environ[PREEMPTION_FILE]).touch()
        if trainer.is_world_process_zero():
            text = f"stopped for a signal after step {state.global_step} of {state.max_steps}, saved in {folder}"
            print(f"{text}; --resume_from_checkpoint last-complete continues", flush=True)
        sys.exit(PREEMPTED_EXIT_CODE)

    if trainer.preemption.preempted:
        _ignore_signals()
        trainer.accelerator.wait_for_everyone()  # a launcher ends the others when the first has gone
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
    """Makes the workers of a data loader that accelerate has prepared end by their parent's SIGTERM alone.

    torchrun passes SIGTERM on to complete process groups; training would lose its data before it has saved.
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
        pass  # once the parent is gone, torch's own watch ends the worker
    os._exit(0)


def _free_child() -> None:
    """In a forked child, SIGTERM ends it (pools wait for ever for one that does not), and SIGUSR1 does nothing."""
    if getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == __name__:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if getattr(signal.getsignal(signal.SIGINT), "__module__", None) == __name__:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(after_in_child=_free_child)
