"""Bad input ends in a message in place of the old answer, in the words of the pipeline, never in a traceback."""

import functools
import html
import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr


EXPECTED = (ValueError, OSError, RuntimeError, ImportError)
TITLE = "Not possible"
# Options of every event that asks a model something: one at a time, whichever tab it comes from. What is asked while
# an earlier answer is still to come, as that of the example, is answered next, and not forgotten.
MODEL_EVENT: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "models", "trigger_mode": "always_last"}
# Options of the other events: those that only serve the page are no part of its API.
PAGE_EVENT: dict[str, Any] = {"api_visibility": "private"}


def with_messages(
    handler: Callable, refused: Callable[[str], list], validate: Callable[[tuple], None] = lambda values: None
) -> Callable:
    """The same event handler, whose expected errors are warnings and clear its outputs.

    An answer to an earlier question must not stand next to a question that has none.

    Args:
        refused: values of the outputs without an answer; its argument is HTML that says why.
        validate: raises ValueError for wrong arguments of the handler.
    """
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def streamed(*args: Any):
            try:
                validate(args)
                yield from handler(*args)
            except EXPECTED as error:
                yield refused(warn(error))

        return streamed

    @functools.wraps(handler)
    def called(*args: Any):
        try:
            validate(args)
            return handler(*args)
        except EXPECTED as error:
            return refused(warn(error))

    return called


def warn(error: Exception) -> str:
    """Shows an error's message, and returns it as HTML; it may quote what somebody typed."""
    words = html.escape(str(error))
    gr.Warning(words, title=TITLE)
    return f'<p class="hrm-refused"><b>{TITLE}:</b> {words}</p>'
