"""`hrm-hf app`: a web page for trained models."""

import socket
from typing import Annotated

import typer

from .solve import check_model


def show(
    models: Annotated[list[str], typer.Argument(help="Checkpoint folders, or models on the Hub; a tab for each.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    share: Annotated[bool, typer.Option("--share", help="Also a public link through Gradio's servers.")] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
):
    """Show trained models on a web page: boards step by step, text by depth, Go code, mHC gains, cosmology.

    Example: hrm-hf app runs/sudoku_demo runs/hrm_lm --open
    """
    for name in models:
        check_model(name)
    from ..app import build_app, launch, require_gradio

    require_gradio()
    check_port(host, port)
    demo = build_app(models)
    typer.echo(f"listening on http://{host}:{port} (end with Ctrl-C)")
    launch(demo, server_name=host, server_port=port, share=share, inbrowser=open_browser)


def check_port(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen, before a model is loaded for a minute in vain."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port or --host"
            ) from error
