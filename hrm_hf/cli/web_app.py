"""`hrm-hf app`: a web page for trained models."""

import socket
from typing import Annotated

import typer

from .report import Device, usage_errors, validate_model


def show(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Checkpoint folders, or models on the Hub; a tab for each. By default the puzzle solvers that come "
            "with hrm_hf."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    share: Annotated[bool, typer.Option("--share", help="Also a public link through Gradio's servers.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A further name of this server, as in the Host header, or *.NAME. Several times."),
    ] = None,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="Most megabytes of an uploaded file.")] = 32,
    device: Device = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
):
    """Show trained models on a web page: boards step by step, text by depth, Go code, mHC gains, cosmology.

    Example: hrm-hf app runs/sudoku_demo runs/hrm_lm --open
    """
    from ..puzzles.options import SHIPPED, shipped_model

    models = models or [shipped_model(task) for task in SHIPPED]
    for name in models:
        validate_model(name)
    from ..app import build_app, launch, validate_gradio
    from ..io.http_guards import is_known_host, validate_allowed

    validate_gradio()
    hosts = validate_allowed(allow_host or [])
    if not is_known_host(host, ()):
        hosts.append(host.lower())
    validate_port(host, port)
    with usage_errors():
        demo = build_app(models, device=device)
    typer.echo(f"listening on http://{host}:{port} (end with Ctrl-C)")
    launch(
        demo,
        share=share,
        allow_hosts=hosts,
        max_upload_bytes=max_upload_mb * 2**20,
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
    )


def validate_port(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen, before a model is loaded for a minute in vain."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port or --host"
            ) from error
