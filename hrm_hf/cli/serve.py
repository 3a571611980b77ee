"""`hrm-hf app` and `hrm-hf serve`: a web page for trained models, and a server for a language model."""

import socket
from dataclasses import dataclass
from pathlib import Path

import typer

from ..io.options import Options, option
from ..text.options import ServeOptions
from .command import takes, validate_model


@dataclass(kw_only=True)
class AppOptions(Options):
    """Options of `hrm-hf app`."""

    models: list[str] = option(
        "Checkpoint folders or models on the Hub. [default: the packaged puzzle solvers]", [], argument=True
    )
    task: str | None = option("Task of a model, if hrm_hf does not ship it: FILE.py:CLASS or MODULE:CLASS.", None)
    host: str = option("Address to listen on; 0.0.0.0 for all interfaces.", "127.0.0.1")
    port: int = option("Port to listen on.", 7860, min=1, max=65535)
    share: bool = option("Also create a public link through Gradio's servers.", False)
    allow_host: list[str] = option("Additional host name to accept: NAME or *.NAME; can be repeated.", [])
    max_upload_mb: int = option("Maximum size of an uploaded file in MB.", 32, min=1)
    device: str | None = option("Device: cpu, cuda, mps, ... [default: the best available device]", None)
    open_browser: bool = option("Open the page in a browser.", False, flags=("--open",))


@takes(AppOptions, json=False)
def show(options: AppOptions):
    """Show trained models on a web page: puzzles, text, Go code, mHC gains, cosmology and mass maps.

    Example: hrm-hf app runs/sudoku_demo runs/hrm_lm --open
    """
    from ..puzzles.options import SHIPPED, import_task, shipped_model

    models = options.models or [shipped_model(task) for task in SHIPPED]
    import_task(options.task)
    for name in models:
        validate_model(name)
    from ..app import build_app, launch, validate_gradio
    from ..io.http_guards import is_known_host, validate_allowed

    validate_gradio()
    hosts = validate_allowed(options.allow_host)
    if not is_known_host(options.host, ()):
        hosts.append(options.host.lower())
    validate_port(options.host, options.port)
    demo = build_app(models, device=options.device)
    typer.echo(f"listening on http://{options.host}:{options.port} (press Ctrl-C to stop)")
    where = {"server_name": options.host, "server_port": options.port, "inbrowser": options.open_browser}
    launch(demo, share=options.share, allow_hosts=hosts, max_upload_bytes=options.max_upload_mb * 2**20, **where)


def validate_port(host: str, port: int) -> None:
    """Raise ValueError if the port is in use. Call this before loading the models, which can take a minute."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            message = f"{host}:{port}: cannot listen ({error.strerror}); choose another --port or --host"
            raise ValueError(message) from error


@takes(ServeOptions, json=False)
def serve(options: ServeOptions):
    """Serve a causal LM through an OpenAI-compatible HTTP API, like `transformers serve`, with per-request limits.

    Example: hrm-hf serve runs/hrm_lm_50m --port 8000
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..io.usage import validate_extra

    validate_extra("serve", "serving needs fastapi, uvicorn and openai", "fastapi", "uvicorn", "openai")
    from ..hub.kinds import LANGUAGE_MODEL, load_config

    if Path(options.model).is_dir():
        load_config(options.model, LANGUAGE_MODEL, adapters=True)
    from ..text.serving import make_server

    make_server(options).run()
