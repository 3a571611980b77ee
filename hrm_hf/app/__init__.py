"""A web page for trained models: boards over the ACT steps, text by depth, Go code, mHC gains, cosmology, mass maps.

    demo = build_app(["runs/sudoku_demo", "org/hrm-lm"])
    launch(demo)

One tab for what each model does; nothing that a page shows comes from another machine. Gradio is optional, so it is
imported when an app is built. `space.py` packages the same app as a Space.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..io.usage import validate_extra


if TYPE_CHECKING:
    import gradio


def build_app(
    models: list[str], title: str = "Recursive reasoning models", device: str | None = None
) -> "gradio.Blocks":
    """A page with the tabs of all models.

    Args:
        models: checkpoint folders, or names on the Hub.
        device: where the models run, as "cpu" or "cuda"; the best there is by default.

    Raises:
        ImportError: without gradio.
        ValueError: no model; a ModelError for one that is nowhere, an adapter, or without a tab. None is loaded then.
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
    """Serves a page of `build_app`, with its styles, and bounds what is sent to it (`limits.py`).

    Args:
        share: also a public link through Gradio's servers.
        allow_hosts: names of this server beside localhost, addresses in digits, the link of `share` and, on a Space,
            its own name; `*.NAME` for all below one. Requests to other names are refused.
        max_upload_bytes: of an uploaded file; 32 MiB by default.
        options: others of `gradio.Blocks.launch`.
    """
    from .limits import UPLOAD_BYTES, WAITING, launch_options
    from .style import CSS, THEME

    bounds = launch_options(share, allow_hosts, UPLOAD_BYTES if max_upload_bytes is None else max_upload_bytes)
    demo.queue(max_size=WAITING, api_open=False)  # an open API would pass by the queue
    # Server-side rendering would need Node, and the footer links to other sites.
    own = {"css": CSS, "theme": THEME, "ssr_mode": False, "footer_links": [], "quiet": True}
    return demo.launch(**own | bounds | options)


def validate_gradio() -> None:
    """Raises ImportError with the way to install gradio where it is missing, and keeps it from reporting usage."""
    import os

    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    validate_extra("app", "the app needs gradio", "gradio")


__all__ = ["build_app", "launch"]
