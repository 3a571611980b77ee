"""Web page for trained models: puzzles, text, Go code, mHC gains, cosmology and mass maps.

    demo = build_app(["runs/sudoku_demo", "org/hrm-lm"])
    launch(demo)

Each model gets one tab per task. The page loads nothing from other machines. Gradio is optional, so it is imported
only when an app is built. `space.py` packages the same app as a Space.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..io.usage import validate_extra


if TYPE_CHECKING:
    import gradio


def build_app(
    models: list[str], title: str = "Recursive reasoning models", device: str | None = None
) -> "gradio.Blocks":
    """Build a page with one or more tabs per model.

    Args:
        models: checkpoint folders, or names on the Hub.
        device: device to run the models on, such as "cpu" or "cuda"; None for the best available device.

    Raises:
        ImportError: gradio is not installed.
        ValueError: `models` is empty, or (as ModelError) a model is missing, is an adapter, or has no tab.
    """
    validate_gradio()
    from .build import build

    return build(models, title, device)


def launch(
    demo: "gradio.Blocks",
    share: bool = False,
    allow_hosts: Sequence[str] = (),
    max_upload_bytes: int | None = None,
    **options: Any,
) -> tuple:
    """Serve a page from `build_app` with the app's styles, and limit requests and uploads (see `limits.py`).

    Args:
        share: whether to create a public link through Gradio's servers.
        allow_hosts: additional host names of this server, or `*.NAME`; localhost, IP addresses, the public link of
            `share` and the host name of a Space are always allowed. Requests to other host names are rejected.
        max_upload_bytes: maximum size of an uploaded file; 32 MiB by default.
        options: other options of `gradio.Blocks.launch`.
    """
    from .limits import UPLOAD_BYTES, WAITING, launch_options
    from .style import CSS, THEME

    bounds = launch_options(share, allow_hosts, UPLOAD_BYTES if max_upload_bytes is None else max_upload_bytes)
    demo.queue(max_size=WAITING, api_open=False)  # an open API would bypass the queue
    # No server-side rendering, which would need Node, and no footer, because it links to other sites.
    own = {"css": CSS, "theme": THEME, "ssr_mode": False, "footer_links": [], "quiet": True}
    return demo.launch(**own | bounds | options)


def validate_gradio() -> None:
    """Raise ImportError if gradio is not installed, and disable its usage reports."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    validate_extra("app", "the app needs gradio", "gradio")


__all__ = ["build_app", "launch"]
