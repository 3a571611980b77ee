"""Bounds of what may be sent to the page, by its own controls or past them through its API.

Gradio checks that a slider's value is in its range and a choice is one of its list, but not that a number is one (NaN
is in every range), how long a text is, or who asks.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from ..io.http_guards import BodyLimit, HostGuard
from .messages import with_messages


MAX_TEXT = 20_000  # characters of a prompt or a task
MAX_PUZZLE_TEXT = 200_000  # characters of a puzzle; ARC tasks are JSON
MAX_CELL_TEXT = 8  # characters in a cell of a board
MAX_SEED = 2**31 - 1
MAX_BODY_BYTES = 2**20  # of a request that carries no file
UPLOAD_BYTES = 32 * 2**20
UPLOAD_PIXELS = 2**23  # of an array in an uploaded map file
WAITING = 32  # events in the queue
SESSIONS = 256  # visitors whose boards are kept
CACHE_SECONDS = 3600  # after which uploaded files are deleted
SHARED = "*.gradio.live"  # where --share makes the page known


def checked(handler: Callable, inputs: Any, refused: Callable[[str], list]) -> Callable:
    """An event handler that looks at the values of its inputs first; what is wrong is a message on the page.

    `refused` is that of `with_messages`.
    """
    components = list(inputs) if isinstance(inputs, Sequence) else [inputs]

    def validate(values: Sequence[Any]) -> None:
        for component, value in zip(components, values, strict=True):
            validate_value(component, value)

    return with_messages(handler, refused, validate)


def validate_value(component: Any, value: Any) -> None:
    """Raises ValueError for a value that the component could not have given."""
    name = getattr(component, "label", None) or "the input"
    if isinstance(component, (gr.Slider, gr.Number)):
        low, high = component.minimum, component.maximum
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}: {value!r:.40} is no number; expected {_range(low, high)}")
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"{name}: {value!r:.40} is out of range; expected {_range(low, high)}")
    elif isinstance(component, gr.Textbox):
        most = component.max_length or MAX_TEXT
        if not isinstance(value, str):
            raise ValueError(f"{name}: a {type(value).__name__}; expected a text")
        if len(value) > most:
            raise ValueError(f"{name}: {len(value):,} characters; expected at most {most:,}")
    elif isinstance(component, (gr.Radio, gr.Dropdown)):
        known = [choice for _, choice in component.choices]
        if value not in known:
            raise ValueError(f"{name}: {value!r:.40} is no choice; expected one of {known}")
    elif isinstance(component, gr.Checkbox) and not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r:.40}; expected true or false")


def _range(low: float | None, high: float | None) -> str:
    return f"{'any' if low is None else f'{low:g}'} to {'any' if high is None else f'{high:g}'}"


def own_uploads(component: Any) -> Any:
    """The same component, which takes files that were sent to the page and no addresses of files elsewhere."""
    move, move_later = component.move_resource_to_block_cache, component.async_move_resource_to_block_cache

    def refuse(path: Any) -> None:
        if isinstance(path, str) and "://" in path:
            raise gr.Error("a file is sent to the page itself; nothing is fetched from an address")

    def moved(path: Any) -> Any:
        refuse(path)
        return move(path)

    async def moved_later(path: Any) -> Any:
        refuse(path)
        return await move_later(path)

    component.move_resource_to_block_cache, component.async_move_resource_to_block_cache = moved, moved_later
    return component


def launch_options(share: bool, allow_hosts: Sequence[str], max_upload_bytes: int) -> dict[str, Any]:
    """Options of `gradio.Blocks.launch` that bound what it takes, and from whom."""
    hosts = [*allow_hosts, *([SHARED] if share else []), *filter(None, [os.environ.get("SPACE_HOST")])]
    middleware = [
        Middleware(HostGuard, allowed=hosts),
        Middleware(
            BodyLimit,
            limit=(MAX_BODY_BYTES, "hrm_hf.app.limits.MAX_BODY_BYTES"),
            upload_path="/upload",
            upload_limit=(max_upload_bytes + MAX_BODY_BYTES, "--max-upload-mb"),  # the form around the file
        ),
    ]
    return {
        "app_kwargs": {"middleware": middleware},
        "max_file_size": max_upload_bytes,
        "state_session_capacity": SESSIONS,
        "share": share,
    }
