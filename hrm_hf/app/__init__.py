"""A web page for trained models: boards over the ACT steps, text by depth, Go code, mHC gains, cosmology.

    demo = build_app(["runs/sudoku_demo", "org/hrm-lm"])
    launch(demo)

One tab for what each model does; nothing that a page shows comes from another machine. Gradio is optional, so it is
imported when an app is built. `space.py` packages the same app as a Space.
"""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import gradio


def build_app(models: list[str], title: str = "Recursive reasoning models") -> "gradio.Blocks":
    """A page with the tabs of all models.

    Args:
        models: checkpoint folders, or names on the Hub.

    Raises:
        ImportError: without gradio.
        ValueError: no model, a model that does not exist, an adapter, or a model without a tab. None is loaded then.
        OSError: a path that is no folder.
    """
    require_gradio()
    from .build import build

    return build(models, title)


def launch(demo: "gradio.Blocks", **options: Any) -> tuple:
    """Serves a page of `build_app`, with its styles; `options` are those of `gradio.Blocks.launch`."""
    from .style import CSS, THEME

    # Server-side rendering would need Node, and the footer links to other sites.
    return demo.launch(**{"css": CSS, "theme": THEME, "ssr_mode": False, "footer_links": [], "quiet": True, **options})


def require_gradio() -> None:
    """Raises ImportError with the way to install gradio where it is missing, and keeps it from reporting usage."""
    import os

    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ImportError('the app needs gradio: pip install "hrm_hf[app]"') from error


__all__ = ["build_app", "launch"]
