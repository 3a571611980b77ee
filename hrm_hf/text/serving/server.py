"""`hrm-hf serve`: transformers' own OpenAI-compatible server, with the causal LMs of this package, behind a front.

`transformers serve` looks a model's class up in the library's namespace, where no other package's class is, whatever
`--trust-remote-code` says; and it bounds nothing that a request asks for. All of its options are here, and those of
`Limits`, of which `front.py` takes care.
"""

import inspect
import socket
from dataclasses import fields
from typing import Annotated, Any

import transformers
import typer
from starlette.middleware.cors import CORSMiddleware
from transformers import AutoModelForCausalLM
from transformers.cli.serve import Serve

from ...io.http_hosts import HostGuard, is_known_host, validate_allowed
from ...registry import ARCHITECTURES
from .front import Front
from .generation import make_stoppable
from .prompts import Prompts
from .requests import Limits


OWN = ("self", "force_model", "non_blocking")  # arguments of transformers' command that are not passed on
GRACE = 10.0  # seconds for the last token of an answer whose time is over
BATCH = 16  # answers at once with continuous batching
HELP = {
    "max_body_bytes": "Bytes of a request's body.",
    "body_seconds": "Seconds until the last byte of a request's body.",
    "max_new_tokens": "Most tokens of an answer; by default what the model's window leaves.",
    "max_messages": "Most messages of a chat.",
    "max_stop_strings": "Most stop strings of a request.",
    "max_stop_length": "Most characters of a stop string.",
    "request_seconds": "Most seconds of an answer, from its turn on; it is stopped then.",
    "running": f"Answers of one model at once; above 1 with --continuous-batching alone, where it is {BATCH}.",
    "waiting": "Requests that wait for their turn; others get 429.",
}


class QuietServe(Serve):
    """transformers' server, made but not started."""

    def start_server(self) -> None:
        """Called at the end of the constructor, with `non_blocking`."""


def make_server(models: list[str], any_model: bool, allow_host: list[str], limits: Limits, **options: Any):
    """A `uvicorn.Server` behind a front; `options` are those of transformers' command."""
    if not models and not any_model:
        raise ValueError("no model to serve; name a folder or a model of the Hub, or give --any-model")
    if any_model and options.get("trust_remote_code"):
        raise ValueError(
            "--any-model with --trust-remote-code would run the code of any model that a request names; leave one out"
        )
    batched = options.get("continuous_batching", False)
    if limits.running > 1 and not batched:
        raise ValueError(
            f"--running {limits.running}: a model writes one answer at a time without --continuous-batching"
        )
    everybody = options.pop("enable_cors", False)
    for row in ARCHITECTURES.values():
        if AutoModelForCausalLM in row.heads:
            setattr(transformers, row.head.__name__, row.head)
    forced = models[0] if len(models) == 1 and not any_model else None
    made = QuietServe(force_model=forced, non_blocking=True, **options)
    make_stoppable(made._generation_state)
    prompts = Prompts(made._model_manager, limits, made._chat_handler.chat_template_kwargs)
    grace = 0.0 if batched else GRACE  # an answer in a batch is cancelled, not asked to end
    app = Front(made.server.config.app, prompts, models, any_model, limits, grace)
    if everybody:
        app = CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    names = validate_allowed(allow_host) + _own_names(options.get("host", "localhost"))
    made.server.config.app = HostGuard(app, names, any_origin=everybody)
    return made.server


def _own_names(host: str) -> list[str]:
    """Names of this machine under which a server that others can reach is asked."""
    if host in ("localhost", "127.0.0.1", "::1"):
        return []
    named = [] if is_known_host(host, ()) else [host.lower()]
    return [*named, socket.gethostname().lower()]


def serve_models(models: list[str] | None, any_model: bool, allow_host: list[str] | None, **options: Any) -> None:
    """Serves until it is stopped. Options: of transformers' command, and of `Limits`."""
    chosen = {field.name: options.pop(field.name) for field in fields(Limits)}
    if chosen["running"] is None:
        chosen["running"] = BATCH if options.get("continuous_batching") else 1
    make_server(models or [], any_model, allow_host or [], Limits(**chosen), **options).run()


def command() -> typer.Typer:
    """The command with all options: ours, then those of `transformers serve`."""
    own = [
        _parameter("models", list[str] | None, None, typer.Argument(
            help="Folders or models of the Hub that requests may name; one alone is loaded at once.")),
        _parameter("any_model", bool, False, typer.Option(
            "--any-model", help="Load whatever a request names, a folder of this machine or a model of the Hub.")),
        _parameter("allow_host", list[str] | None, None, typer.Option(
            help="A further name of this server, as in the Host header, or *.NAME. Several times.")),
    ]  # fmt: skip
    for field in fields(Limits):
        default = None if field.name == "running" else field.default
        least = 0 if field.name == "waiting" else 1e-3 if field.type is float else 1
        option = typer.Option(min=least, help=HELP[field.name])
        own.append(_parameter(field.name, field.type | None if default is None else field.type, default, option))
    theirs = [one for name, one in inspect.signature(Serve.__init__).parameters.items() if name not in OWN]

    def serve(**options: Any) -> None:
        serve_models(**options)

    serve.__doc__ = (
        "Serve causal LMs over HTTP, as `transformers serve` does (completions, chat, responses, streaming), with "
        "limits for what a request may ask.\n\nExample: hrm-hf serve runs/hrm_lm_50m --port 8000"
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    serve.__signature__ = inspect.Signature([one.replace(kind=keyword) for one in (*own, *theirs)])
    serve.__annotations__ = {one.name: one.annotation for one in (*own, *theirs)}
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command("serve")(serve)
    return app


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
