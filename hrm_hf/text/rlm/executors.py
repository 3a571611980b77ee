"""Isolated REPLs that run a recursive language model's code and let it call our functions.

A custom executor needs the methods of `MontyExecutor` and `MontySession`.
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
MAX_HOST_CALLS = 10_000_000  # Monty allows only 1000 calls by default, but our caps already limit sub-calls and time


class CapReachedError(Exception):
    """Raised inside a REPL call to end the run. The message is the name of the cap that was reached."""


class MontyExecutor:
    """Executor that runs a subset of Python with `pydantic-monty`, isolated in worker processes.

    A block that exceeds a limit is stopped, and the variables are reset to their values before the block. `time.sleep`
    returns at once. The module `random` is seeded.

    Args:
        block_seconds: time limit for one block in seconds, not counting sub-calls.
        max_memory: memory limit of the worker in bytes. Variables, including `context`, may use about half of it,
            because they are copied after each block.

    Raises:
        ImportError: the package is missing.
    """

    def __init__(self, block_seconds: float = 30.0, max_memory: int = 2**30):
        need = "code that a model writes runs in an isolated interpreter, pydantic-monty"
        validate_extra("rlm", need, "pydantic_monty")
        import pydantic_monty

        self.monty = pydantic_monty
        self.block_seconds, self.max_memory = block_seconds, max_memory

    def open(self, context: Any, functions: dict[str, Callable], seed: int) -> "MontySession":
        """Open a REPL with `context`, `answer`, FINAL and `functions`, whose ValueErrors REPL code can catch."""
        return MontySession(self, context, functions, seed)


class MontySession:
    """REPL in a worker process. It keeps a dump of the variables after the last successful block."""

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
                f"the context does not fit into the REPL ({error}); it may use about half of max_memory="
                f"{executor.max_memory} bytes, and at most 256 MiB; see MontyExecutor(max_memory=...)"
            ) from error

    def run(self, code: str, write: Callable[[str], None], seconds: float) -> str | None:
        """Run a block, pass its output to `write`, and return the text of its error, or None."""
        if seconds < self._seconds:  # a worker's time limit is fixed, so a shorter limit needs a new worker
            self._restart(seconds)
        monty = self.monty
        error = self._feed(code, write, time.monotonic() + seconds)
        if not isinstance(error, monty.MontyCrashedError) and not _broke_limit(error):
            try:
                self._dump = self._session.dump()
                return error and self._text(error)
            except monty.MontyError as failure:  # dumping the session may exceed the worker's memory limit
                error = failure
        self._restart(self._seconds)  # after this error, the variables are unreliable and may fill the memory
        return f"{self._text(error)}\n(the variables are reset to those before this block)"

    def answer(self) -> Any:
        """Return the value of `answer`, or None if it was deleted or cannot be transferred from the REPL."""
        try:
            return self._session.feed_run("answer")
        except (self.monty.MontyError, ValueError, RecursionError, MemoryError):
            return None

    def close(self) -> None:
        """Stop the worker."""
        with contextlib.suppress(self.monty.MontyError):  # the worker may have ended already
            self._stack.close()

    def _feed(self, code: str, write: Callable[[str], None], deadline: float):
        """Run a block to completion, and return Monty's exception, or None."""
        try:
            step = self._session.feed_start(
                code, external_lookup=self.functions, print_callback=lambda _, text: write(text)
            )
            while not isinstance(step, self.monty.MontyComplete):
                if time.monotonic() > deadline:  # the worker's own limit does not count our functions' time
                    raise CapReachedError("max_wall_seconds")
                step = self._answer(step)
        except (self.monty.MontyError, RecursionError, OverflowError, MemoryError) as error:
            return error  # values transferred between processes can raise the last three exceptions
        if step.output is not None:
            write(_shown(step.output))
        return None

    def _answer(self, step):
        """Answer one request from the worker: call our functions and reject everything else."""
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
        """Start a new worker with the variables of the last successful block."""
        self.close()
        deadline = time.monotonic() + seconds
        try:
            self._start(seconds)
        except self.monty.MontyError as error:
            if time.monotonic() > deadline:  # loading the variables took longer than `seconds`
                raise CapReachedError("max_wall_seconds") from error
            message = f"the REPL's worker process could not be restarted: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error


def _shown(value: Any) -> str:
    """Return the text that the REPL shows for the value of a block's last line."""
    try:
        return f"{text_of(value, quoted=True)}\n"
    except ValueError as error:
        return f"(the value of the last line, a {type(value).__name__}, is not shown: {error})\n"


def _broke_limit(error) -> bool:
    """Check whether a block exceeded a limit or failed to exchange a value with one of our functions."""
    if not hasattr(error, "exception"):
        return error is not None
    return isinstance(error.exception(), (TimeoutError, MemoryError))


def _call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call a host function. Return its value, or a ValueError or wrong-arguments error for the REPL to raise."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return {"exception": error}
    try:
        return {"return_value": function(*args, **kwargs)}
    except ValueError as error:
        return {"exception": ValueError(str(error))}
