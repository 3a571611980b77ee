"""Entry points of hrm_hf's programs. They run before slow imports, and before libraries can print messages.

`hrm-hf` and the training scripts start here. If this module is loaded, `import hrm_hf` registers nothing, so `--help`
stays fast. `load_config` registers the architectures when the first model is loaded.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType


# transformers imports these packages if they are installed; without them, its import is ten times faster.
NOT_NEEDED_FOR_HELP = ("torch", "accelerate", "datasets", "peft", "bitsandbytes", "torchao", "kernels")
BAR_DELAY_SECONDS = "1"  # no progress bar for work that takes less than a second, such as loading a dozen tensors


def start_program() -> None:
    """Hide irrelevant library messages and short-lived progress bars in this process and its children."""
    from hrm_hf.io.messages import hide_messages

    if hide_messages():
        sys.excepthook = _show_error  # prints one line after Ctrl-C during imports
        os.environ.setdefault("TQDM_DELAY", BAR_DELAY_SECONDS)


def main() -> None:
    """Run `hrm-hf`."""
    start_program()
    from hrm_hf.cli import main

    run_and_leave(main)


def run_and_leave(program: Callable[[], None]) -> None:
    """Run a program, then exit without the interpreter's module cleanup, which takes a second.

    Functions registered with `atexit` still run, and an exception still ends the process as usual.
    """
    status: list[int] = []
    atexit.register(_leave, status)  # atexit runs the first registered function last
    try:
        program()
        status.append(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status.append(end.code or 0)
        raise


def _leave(status: list[int]) -> None:
    """Exit with the code in `status`. If `status` is empty or flushing fails, let Python exit as usual."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # raised if a stream is missing, closed or a broken pipe
        return
    if status:
        os._exit(status[0])


def start_script(extra: str | None = None) -> None:
    """Prepare a training script as `start_program` does, and block stop signals until the script handles them.

    Args:
        extra: name of a module that the script needs, and of the extra that installs it. Exits if it is missing.
    """
    if extra is not None:
        from hrm_hf.io.usage import validate_extra

        try:
            validate_extra(extra, f"this script needs {extra}", extra)
        except ImportError as error:
            sys.exit(f"{os.path.basename(sys.argv[0])}: error: {error}")
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    # Skip the final garbage collection, which takes seconds.
    atexit.register(gc.freeze)
    start_program()
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.modules.update(dict.fromkeys(NOT_NEEDED_FOR_HELP))  # a module whose entry is None cannot be imported


def _show_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, traceback)


if __name__ == "__main__":
    sys.modules["hrm_hf_start"] = sys.modules[__name__]  # tells `import hrm_hf` that this program is running
    main()
