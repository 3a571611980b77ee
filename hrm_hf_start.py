"""First steps of the programs of hrm_hf, before they import libraries that take seconds and print messages.

`hrm-hf` and the training scripts begin here. Because this module is loaded, `import hrm_hf` then registers nothing:
`load_config` does so for the first model, and `--help` stays fast.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType


# transformers imports these where they are installed; as if they were not, it takes a tenth of the time.
NOT_NEEDED_FOR_HELP = ("torch", "accelerate", "datasets", "peft", "bitsandbytes", "torchao", "kernels")
# Bars of work that takes less than a second, such as loading a dozen tensors, are no progress to wait for.
BAR_DELAY_SECONDS = "1"


def start_program() -> None:
    """Keep messages that are not about the user's work, and bars of short work, from this process and its children."""
    from hrm_hf.io.messages import hide_messages

    if hide_messages():
        sys.excepthook = _show_error  # Ctrl-C during imports
        os.environ.setdefault("TQDM_DELAY", BAR_DELAY_SECONDS)


def main() -> None:
    """Run `hrm-hf`."""
    start_program()
    from hrm_hf.cli import main

    run_and_leave(main)


def run_and_leave(program: Callable[[], None]) -> None:
    """Run a program, then end the process without taking its modules apart, which takes a second.

    Functions registered with `atexit` run as usual, and an exception ends the process as usual.
    """
    status: list[int] = []
    atexit.register(_leave, status)  # the first to be registered runs last
    try:
        program()
        status.append(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status.append(end.code or 0)
        raise


def _leave(status: list[int]) -> None:
    """End the process with `status`, unless it is empty or a stream cannot be flushed: then Python reports it."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # no such stream, closed, or nobody reads it
        return
    if status:
        os._exit(status[0])


def start_script(extra: str | None = None) -> None:
    """`start_program` of a training script: signals to stop, too, wait until training listens for them.

    Args:
        extra: without which the script can do nothing, and the module that it is for; it exits where that is missing.
    """
    if extra is not None:
        from hrm_hf.io.usage import validate_extra

        try:
            validate_extra(extra, f"this script needs {extra}", extra)
        except ImportError as error:
            sys.exit(f"{os.path.basename(sys.argv[0])}: error: {error}")
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    start_program()
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.modules.update(dict.fromkeys(NOT_NEEDED_FOR_HELP))  # None: as if not installed


def _show_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, traceback)


if __name__ == "__main__":
    sys.modules["hrm_hf_start"] = sys.modules[__name__]  # `import hrm_hf` looks for this name
    main()
