"""`hrm-hf serve`: causal LMs over HTTP; the server is `hrm_hf.text.serving.server`."""

from pathlib import Path

import typer

from .report import validate_model


# The options are partly transformers', which is imported when a server is asked for.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context):
    """Serve causal LMs over HTTP, as `transformers serve` does (completions, chat, streaming), with limits.

    Example: hrm-hf serve runs/hrm_lm_50m --port 8000
    """
    for argument in context.args:
        if argument.startswith("-"):
            break
        if ":" not in argument:  # FOLDER:FILE.gguf
            # Which code a model of the Hub needs is known to the server, by --trust-remote-code.
            validate_model(argument, "LANGUAGE_MODEL" if Path(argument).is_dir() else None)
    from ..io.extras import validate_extra

    validate_extra("serve", "serving needs fastapi, uvicorn and openai", "fastapi", "uvicorn", "openai")
    from ..text.serving.server import command

    command()(context.args, prog_name="hrm-hf serve")
