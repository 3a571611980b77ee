"""`hrm-hf serve`: causal LMs over HTTP; the server is `hrm_hf.text.serving.server`."""

from itertools import takewhile
from pathlib import Path

import typer

from .report import usage_errors, validate_model


# The options are partly transformers', which is imported when a server is asked for.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context):
    """Serve causal LMs over HTTP, as `transformers serve` does (completions, chat, streaming), with limits.

    Example: hrm-hf serve runs/hrm_lm_50m --port 8000
    """
    arguments = takewhile(lambda argument: not argument.startswith("-"), context.args)
    models = [argument for argument in arguments if ":" not in argument]  # FOLDER:FILE.gguf
    for model in models:
        validate_model(model, "LANGUAGE_MODEL")
    from ..io.extras import validate_extra

    validate_extra("serve", "serving needs fastapi, uvicorn and openai", "fastapi", "uvicorn", "openai")
    from ..hub.kinds import LANGUAGE_MODEL, load_config

    with usage_errors():
        # Which code a model of the Hub needs is known to the server, by --trust-remote-code.
        for folder in filter(lambda model: Path(model).is_dir(), models):
            load_config(folder, LANGUAGE_MODEL, adapters=True)
    from ..text.serving.server import command

    command()(context.args, prog_name="hrm-hf serve")
