"""Where the code that a recursive language model writes is run: a REPL that holds `context` and can call back.

`MontyExecutor`, the default, is isolated. `InProcessExecutor` runs the code with all rights of this process. Another
executor is a class with the methods of `InProcessExecutor` and its session.
"""

import ast
import contextlib
import inspect
import io
import keyword
import random
import time
import traceback
from collections.abc import Callable
from typing import Any

from ...io.usage import validate_extra
from .prompts import UnfitValueError, text_of


# Runs first in every REPL. FINAL_VAR also takes the value itself, which models often pass instead of the name.
PREAMBLE = '''
answer = {"content": "", "ready": False}

def FINAL(value):
    """Finishes with this value, whatever has become of the dict."""
    global answer
    answer = {"content": value, "ready": True}

def FINAL_VAR(name):
    """Finishes with the value of the variable of that name."""
    if isinstance(name, str) and name.isidentifier():
        try:
            name = eval(name)
        except NameError:
            pass
    FINAL(name)
'''
MAX_VALUE_CHARS = 1_000_000  # characters of the value that a block's last line has
MAX_HOST_CALLS = 10_000_000  # Monty's own cap ends blocks at 1000; sub-calls and time have caps of their own


class CallError(ValueError):
    """A wrong call of a function that the REPL offers; raised inside the REPL, where code may catch it."""


class RunStopped(BaseException):
    """Ends the run from inside a call of the REPL, whose code must not catch it as an ordinary exception.

    `reason` names the cap; `error` is set if something failed.
    """

    def __init__(self, reason: str, error: Exception | None = None):
        super().__init__(reason)
        self.reason, self.error = reason, error


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
        validate_extra(
            "rlm",
            "code that a model writes needs an isolated interpreter, pydantic-monty",
            "pydantic_monty",
            instead="use InProcessExecutor(unsafe=True), which is not isolated",
        )
        import pydantic_monty

        self.monty = pydantic_monty
        self.block_seconds, self.max_memory = block_seconds, max_memory

    def open(self, context: Any, functions: dict[str, Callable], seed: int) -> "MontySession":
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

    def variable(self, name: str) -> Any:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise KeyError(name)
        try:
            return self._session.feed_run(name)
        except (self.monty.MontyError, ValueError, RecursionError, MemoryError) as error:  # or it cannot be converted
            raise KeyError(name) from error

    def close(self) -> None:
        with contextlib.suppress(self.monty.MontyError):  # a worker that is gone is closed
            self._stack.close()

    def _feed(self, code: str, write: Callable[[str], None], deadline: float):
        """Runs a block to its end; returns Monty's exception, or None."""
        try:
            step = self._session.feed_start(
                code, external_lookup=self.functions, print_callback=lambda _, text: write(text)
            )
            while not isinstance(step, self.monty.MontyComplete):
                if time.monotonic() > deadline:  # the worker's clock stands still while it waits for us
                    raise RunStopped("max_wall_seconds")
                step = self._answer(step)
        except (self.monty.MontyError, RecursionError, OverflowError, MemoryError) as error:
            return error  # the latter three are of a value on its way between the processes
        if step.output is not None:
            write(_as_output(step.output))
        return None

    def _answer(self, step):
        """Answers one request of the worker: calls of our functions; everything else is refused."""
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
        """A new worker with the variables of the last good block."""
        self.close()
        deadline = time.monotonic() + seconds
        try:
            self._start(seconds)
        except self.monty.MontyError as error:
            if time.monotonic() > deadline:  # loading the variables took all that was left of the run
                raise RunStopped("max_wall_seconds") from error
            failure = RuntimeError(f"the worker of the REPL does not start again: {type(error).__name__}: {error}")
            raise RunStopped("executor failed", failure) from error


class InProcessExecutor:
    """Runs the model's code in this process: it may delete files, use the network and never end."""

    def __init__(self, unsafe: bool = False):
        if unsafe is not True:
            raise ValueError(
                f"unsafe={unsafe}: the code has all rights of this process; say unsafe=True to allow that"
            )

    def open(self, context: Any, functions: dict[str, Callable], seed: int) -> "InProcessSession":
        """Open a REPL with `context`, `answer`, FINAL, FINAL_VAR and the functions."""
        return InProcessSession(context, functions, seed)


class InProcessSession:
    """One REPL: a namespace for `exec`. Its variables stay from block to block."""

    def __init__(self, context: Any, functions: dict[str, Callable], seed: int):
        random.seed(seed)
        self._names: dict[str, Any] = {"__name__": "repl", "context": context, **functions}
        exec(PREAMBLE, self._names)

    def run(self, code: str, write: Callable[[str], None], seconds: float) -> str | None:
        """Run a block and pass what it prints to `write`. Return the error's text, or None.

        Raises RunStopped where a function of the REPL did. Time is not limited here.
        """
        try:
            tree = ast.parse(code, "repl.py")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            stream = io.TextIOBase()
            stream.write = write
            with contextlib.redirect_stdout(stream):
                exec(compile(tree, "repl.py", "exec"), self._names)
                value = eval(compile(ast.Expression(last.value), "repl.py", "eval"), self._names) if last else None
            if value is not None:
                write(_as_output(value))
        except (RunStopped, KeyboardInterrupt):  # a cap, and the person at the keyboard
            raise
        except BaseException as error:  # code may raise whatever it likes
            return "".join(traceback.format_exception_only(error)).strip()
        return None

    def variable(self, name: str) -> Any:
        """Return the value of a variable. Raise KeyError if there is none, or if it cannot leave the REPL."""
        return self._names[name]

    def close(self) -> None:
        self._names.clear()


def _as_output(value: Any) -> str:
    """Return the text that a REPL shows for the value of the last line."""
    try:
        return f"{text_of(value, MAX_VALUE_CHARS, quoted=True)}\n"
    except UnfitValueError as error:
        return f"(the value of the last line, a {type(value).__name__}, is not shown: {error})\n"


def _broke_limit(error) -> bool:
    """Whether the worker is not to be relied on any more."""
    if not hasattr(error, "exception"):  # none, or one of ours while it waited for us in the middle of a block
        return error is not None
    return isinstance(error.exception(), (TimeoutError, MemoryError))


def _call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Calls a host function; only what the code in the REPL did wrong is raised there."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return {"exception": error}
    try:
        return {"return_value": function(*args, **kwargs)}
    except CallError as error:
        return {"exception": ValueError(str(error))}
