"""A web page for trained models: puzzles step by step, text by depth, Go code, mHC gains, cosmology, mass maps.

    demo = build_app(["runs/sudoku_demo", "org/hrm-lm"])
    launch(demo)

Each model gets one tab per task. The page loads nothing from other machines. Gradio is optional, so it is imported
when an app is built. `space.py` packages the same app as a Space.
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
    """Build a page with the tabs of all models.

    Args:
        models: checkpoint folders, or names on the Hub.
        device: device of the models, such as "cpu" or "cuda"; the best available by default.

    Raises:
        ImportError: gradio is not installed.
        ValueError: no model; a ModelError for a missing model, an adapter, or a model without a tab.
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
    """Serve a page from `build_app` with its styles, and limit requests and uploads (`limits.py`).

    Args:
        share: whether to open a public link through Gradio's servers.
        allow_hosts: additional names of this server, or `*.NAME`; localhost, IP addresses, the link of `share` and the
            host of a Space are always allowed. Requests to other names are rejected.
        max_upload_bytes: largest uploaded file; 32 MiB by default.
        options: other options of `gradio.Blocks.launch`.
    """
    from .limits import UPLOAD_BYTES, WAITING, launch_options
    from .style import CSS, THEME

    bounds = launch_options(share, allow_hosts, UPLOAD_BYTES if max_upload_bytes is None else max_upload_bytes)
    demo.queue(max_size=WAITING, api_open=False)  # an open API would bypass the queue
    # Server-side rendering would need Node, and the footer links to other sites.
    own = {"css": CSS, "theme": THEME, "ssr_mode": False, "footer_links": [], "quiet": True}
    return demo.launch(**own | bounds | options)


def validate_gradio() -> None:
    """Raise ImportError if gradio is not installed, and keep it from reporting usage."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    validate_extra("app", "the app needs gradio", "gradio")


__all__ = ["build_app", "launch"]
