"""Bad input ends in a message on the page, in the words of the pipeline, never in a traceback."""

import functools
import html
import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr


EXPECTED = (ValueError, OSError, RuntimeError, ImportError)
# Options of every event that asks a model something: one at a time, whichever tab it comes from.
MODEL_EVENT: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "models"}
# Options of the other events: those that only serve the page are no part of its API.
PAGE_EVENT: dict[str, Any] = {"api_visibility": "private"}


def with_messages(handler: Callable) -> Callable:
    """The same event handler, whose expected errors are shown as warnings and leave the page as it is."""
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def streamed(*args: Any):
            try:
                yield from handler(*args)
            except EXPECTED as error:
                warn(error)
                yield gr.skip()

        return streamed

    @functools.wraps(handler)
    def called(*args: Any):
        try:
            return handler(*args)
        except EXPECTED as error:
            warn(error)
            return gr.skip()

    return called


def warn(error: Exception) -> None:
    """Shows an error's message; it may quote what somebody typed, and messages are HTML."""
    gr.Warning(html.escape(str(error)), title="Not possible")
