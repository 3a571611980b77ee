"""Where the code of a recursive language model runs: an isolated REPL that holds `context` and can call back.

Another executor is a class with the methods of `MontyExecutor` and `MontySession`.
"""

import contextlib
import inspect
import time
from collections.abc import Callable
from typing import Any

from ...io.usage import validate_extra
from .prompts import text_of


PREAMBLE = '''
answer = {"content": "", "ready": False}

def FINAL(value):
    """Finish with this value, even if `answer` is no dict any more."""
    global answer
    answer = {"content": value, "ready": True}
'''
MAX_HOST_CALLS = 10_000_000  # Monty's own cap ends blocks at 1000; sub-calls and time have caps of their own


class CapReachedError(Exception):
    """A cap that ends the run from inside a call of the REPL; the text is its name."""


class MontyExecutor:
    """REPLs of `pydantic-monty`: a subset of Python, interpreted in worker processes that touch nothing of the host.

    A block that breaks a limit is ended, and the REPL goes back to the variables before it. `time.sleep` returns at
    once. The module `random` is seeded.

    Args:
        block_seconds: most seconds that one block may compute; waiting for sub-calls is not counted.
        max_memory: bytes of the worker. Variables, `context` included, may take about half: they are copied after
            each block.

    Raises:
        ImportError: the package is missing.
    """

    def __init__(self, block_seconds: float = 30.0, max_memory: int = 2**30):
        need = "code that a model writes needs an isolated interpreter, pydantic-monty"
        validate_extra("rlm", need, "pydantic_monty")
        import pydantic_monty

        self.monty = pydantic_monty
        self.block_seconds, self.max_memory = block_seconds, max_memory

    def open(self, context: Any, functions: dict[str, Callable], seed: int) -> "MontySession":
        """Open a REPL with `context`, `answer`, FINAL and the functions, whose ValueErrors its code may catch."""
        return MontySession(self, context, functions, seed)


class MontySession:
    """A worker process, and a dump of its variables after the last good block."""

    def __init__(self, executor: MontyExecutor, context: Any, functions: dict[str, Callable], seed: int):
        self.executor, self.monty, self.functions, self.seed = executor, executor.monty, functions, seed
        self._dump: bytes | None = None
        self._start(executor.block_seconds)
        try:
            self._session.feed_run(PREAMBLE, inputs={"context": context})
            self._dump = self._session.dump()
        except (self.monty.MontyError, RecursionError, OverflowError) as error:
            self.close()
            raise ValueError(
                f"the REPL cannot take the context ({error}); it may be up to about half of max_memory="
                f"{executor.max_memory} bytes, see MontyExecutor(max_memory=...), and at most 256 MiB"
            ) from error

    def run(self, code: str, write: Callable[[str], None], seconds: float) -> str | None:
        """Run a block and pass what it prints to `write`; return the text of its error, or None."""
        if seconds < self._seconds:  # limits are those of a worker: a shorter one takes a new worker
            self._restart(seconds)
        monty = self.monty
        error = self._feed(code, write, time.monotonic() + seconds)
        if not isinstance(error, monty.MontyCrashedError) and not _broke_limit(error):
            try:
                self._dump = self._session.dump()
                return error and self._text(error)
            except monty.MontyError as failure:  # a dump counts as memory of the worker
                error = failure
        self._restart(self._seconds)  # what such a block leaves behind is not to be relied on, and may fill memory
        return f"{self._text(error)}\n(the variables are again those before this block)"

    def answer(self) -> Any:
        """Return the variable `answer`, None if it is gone or cannot leave the REPL."""
        try:
            return self._session.feed_run("answer")
        except (self.monty.MontyError, ValueError, RecursionError, MemoryError):
            return None

    def close(self) -> None:
        """End the worker."""
        with contextlib.suppress(self.monty.MontyError):  # a worker that is gone is closed
            self._stack.close()

    def _feed(self, code: str, write: Callable[[str], None], deadline: float):
        """Run a block to its end; return Monty's exception, or None."""
        try:
            step = self._session.feed_start(
                code, external_lookup=self.functions, print_callback=lambda _, text: write(text)
            )
            while not isinstance(step, self.monty.MontyComplete):
                if time.monotonic() > deadline:  # the worker's clock stands still while it waits for us
                    raise CapReachedError("max_wall_seconds")
                step = self._answer(step)
        except (self.monty.MontyError, RecursionError, OverflowError, MemoryError) as error:
            return error  # the latter three are of a value on its way between the processes
        if step.output is not None:
            write(_shown(step.output))
        return None

    def _answer(self, step):
        """Answer one request of the worker: call our functions and reject everything else."""
        if isinstance(step, self.monty.FunctionSnapshot):
            function = self.functions.get(step.function_name)
            if step.is_os_function:
                return step.resume_not_handled()
            if function is not None and step.object_id is None:
                return step.resume(_call(function, step.args, step.kwargs))
        return step.resume_auto()

    def _text(self, error) -> str:
        if isinstance(error, (self.monty.MontyRuntimeError, self.monty.MontySyntaxError)):
            return error.display("traceback")
        timed_out = isinstance(error, self.monty.MontyCrashedError) and error.timed_out
        return "TimeoutError: the block took too long" if timed_out else f"{type(error).__name__}: {error}"

    def _start(self, seconds: float) -> None:
        self._seconds = seconds
        limits = {"max_feed_duration_secs": seconds, "max_memory": self.executor.max_memory}
        limits |= {"max_suspensions": MAX_HOST_CALLS}
        policy = {"sleep": "zero", "random_start": {"seed": self.seed}}
        self._stack = contextlib.ExitStack()
        pool = self._stack.enter_context(self.monty.Monty(max_processes=1, request_timeout=seconds + 1))
        self._session = self._stack.enter_context(pool.checkout(limits=limits, os_policy=policy))
        if self._dump is not None:
            self._session.load_session(self._dump)

    def _restart(self, seconds: float) -> None:
        """Start a new worker with the variables of the last good block."""
        self.close()
        deadline = time.monotonic() + seconds
        try:
            self._start(seconds)
        except self.monty.MontyError as error:
            if time.monotonic() > deadline:  # loading the variables took all that was left of the run
                raise CapReachedError("max_wall_seconds") from error
            message = f"the worker of the REPL does not start again: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error


def _shown(value: Any) -> str:
    """Return the text that a REPL shows for the value of the last line."""
    try:
        return f"{text_of(value, quoted=True)}\n"
    except ValueError as error:
        return f"(the value of the last line, a {type(value).__name__}, is not shown: {error})\n"


def _broke_limit(error) -> bool:
    """Whether a block broke a limit, or ended while the worker waited for us."""
    if not hasattr(error, "exception"):
        return error is not None
    return isinstance(error.exception(), (TimeoutError, MemoryError))


def _call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call a host function; its ValueErrors and wrong arguments are raised in the REPL, other errors here."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return {"exception": error}
    try:
        return {"return_value": function(*args, **kwargs)}
    except ValueError as error:
        return {"exception": ValueError(str(error))}
