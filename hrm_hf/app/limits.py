"""Event handlers that limit inputs from controls and the API, and show messages instead of tracebacks.

Gradio checks the range of a slider and the choices of a list. However, it accepts NaN for any range, and it checks
neither the length of a text nor the origin of a request.
"""

import functools
import html
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from ..io.http_guards import HostGuard, SizeLimit


MAX_TEXT = 20_000  # maximum number of characters in a prompt or task
MAX_PUZZLE_TEXT = 200_000  # maximum number of characters in a puzzle (ARC tasks are JSON)
MAX_CELL_TEXT = 8  # maximum number of characters in a board cell
MAX_SEED = 2**31 - 1
MAX_BODY_BYTES = 2**20  # maximum size of a request without a file
UPLOAD_BYTES = 32 * 2**20
UPLOAD_PIXELS = 2**23  # maximum number of pixels per array in an uploaded map file
WAITING = 32  # maximum number of queued events
SESSIONS = 256  # maximum number of browser sessions whose boards are kept in memory
CACHE_SECONDS = 3600  # seconds until uploaded files are deleted
SHARED = "*.gradio.live"  # host names of pages published by --share
EXPECTED = (ValueError, OSError, RuntimeError, ImportError)
TITLE = "Not possible"
# Events that run a model share one queue. A click while the example is running takes effect when the example is done.
MODEL_EVENT: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "models", "trigger_mode": "always_last"}
PAGE_EVENT: dict[str, Any] = {"api_visibility": "private"}  # events that only update the page are not part of the API


def ask(
    handler: Callable,
    inputs: Any,
    outputs: Any,
    refused: Callable[[str], list],
    start: gr.Button,
    shown: gr.State,
    api_name: str,
    examples: Sequence[tuple[gr.Button, Callable, Any]] = (),
) -> list:
    """Add and return the events that run a model: button click, first display of the tab, and examples.

    Args:
        refused: see `checked`.
        shown: state that changes when the tab is first displayed.
        examples: (button, function, inputs) each. Before the model runs, the function's return values fill the inputs.
    """
    asked = {"fn": checked(handler, inputs, refused), "inputs": inputs, "outputs": outputs, **MODEL_EVENT}
    events = [start.click(**asked, api_name=api_name), shown.change(**asked, **PAGE_EVENT)]
    for button, values, filled in examples:
        events.append(button.click(values, None, filled, **PAGE_EVENT).then(**asked, **PAGE_EVENT))
    return events


def checked(handler: Callable, inputs: Any, refused: Callable[[str], list]) -> Callable:
    """Wrap an event handler to validate its inputs and show expected errors as warnings.

    Args:
        refused: function that maps an HTML error message to output values, which replace the previous answer.
    """
    components = list(inputs) if isinstance(inputs, Sequence) else [inputs]

    def validate(values: Sequence[Any]) -> None:
        for component, value in zip(components, values, strict=True):
            validate_value(component, value)

    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def streamed(*args: Any):
            try:
                validate(args)
                yield from handler(*args)
            except EXPECTED as error:
                yield refused(_warn(error))

        return streamed

    @functools.wraps(handler)
    def called(*args: Any):
        try:
            validate(args)
            return handler(*args)
        except EXPECTED as error:
            return refused(_warn(error))

    return called


def _warn(error: Exception) -> str:
    """Show an error message as a warning and return it as HTML, escaped because it may quote user input."""
    words = html.escape(str(error))
    gr.Warning(words, title=TITLE)
    return f'<p class="hrm-refused"><b>{TITLE}:</b> {words}</p>'


def validate_value(component: Any, value: Any) -> None:
    """Raise ValueError if the component does not allow this value."""
    name = getattr(component, "label", None) or "the input"
    if isinstance(component, (gr.Slider, gr.Number)):
        low, high = component.minimum, component.maximum
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}: {value!r:.40} is not a number; use {_range(low, high)}")
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"{name}: {value!r:.40} is out of range; use {_range(low, high)}")
    elif isinstance(component, gr.Textbox):
        most = component.max_length or MAX_TEXT
        if not isinstance(value, str):
            raise ValueError(f"{name}: must be a string, not a {type(value).__name__}")
        if len(value) > most:
            raise ValueError(f"{name}: has {len(value):,} characters; the limit is {most:,}")
    elif isinstance(component, (gr.Radio, gr.Dropdown)):
        known = [choice for _, choice in component.choices]
        if value not in known:
            raise ValueError(f"{name}: {value!r:.40} is not valid; choose from {known}")
    elif isinstance(component, gr.Checkbox) and not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r:.40} is not valid; must be true or false")


def _range(low: float | None, high: float | None) -> str:
    return f"a number from {'-inf' if low is None else f'{low:g}'} to {'inf' if high is None else f'{high:g}'}"


def own_uploads(component: Any) -> Any:
    """Make an upload component reject URLs, and return the component."""
    move, move_later = component.move_resource_to_block_cache, component.async_move_resource_to_block_cache

    def refuse(path: Any) -> None:
        if isinstance(path, str) and "://" in path:
            raise gr.Error("URLs are not supported; upload the file")

    def moved(path: Any) -> Any:
        refuse(path)
        return move(path)

    async def moved_later(path: Any) -> Any:
        refuse(path)
        return await move_later(path)

    component.move_resource_to_block_cache, component.async_move_resource_to_block_cache = moved, moved_later
    return component


def launch_options(share: bool, allow_hosts: Sequence[str], max_upload_bytes: int) -> dict[str, Any]:
    """Return options for `gradio.Blocks.launch` that limit uploads and hosts."""
    hosts = [*allow_hosts, *([SHARED] if share else []), *filter(None, [os.environ.get("SPACE_HOST")])]
    limit = (MAX_BODY_BYTES, "hrm_hf.app.limits.MAX_BODY_BYTES")
    upload_limit = (max_upload_bytes + MAX_BODY_BYTES, "--max-upload-mb")  # leaves room for form fields
    size_limit = Middleware(SizeLimit, limit=limit, upload_path="/upload", upload_limit=upload_limit)
    app = {"middleware": [Middleware(HostGuard, allowed=hosts), size_limit]}
    shared = {"max_file_size": max_upload_bytes, "state_session_capacity": SESSIONS, "share": share}
    return {"app_kwargs": app, **shared}
