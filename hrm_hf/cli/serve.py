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
        _validate_language_model(argument)
    from ..io.extras import validate_extra

    validate_extra("serve", "serving needs fastapi, uvicorn and openai", "fastapi", "uvicorn", "openai")
    from ..text.serving.server import command

    command()(context.args, prog_name="hrm-hf serve")


def _validate_language_model(name: str) -> None:
    """Refuses a path that is no folder, and one with another kind of model; names of the Hub are the library's."""
    from transformers import AutoModelForCausalLM

    from ..export.checkpoint import load_config
    from ..registry import ARCHITECTURES

    if ":" not in name:  # FOLDER:FILE.gguf
        validate_model(name)
    if not Path(name).is_dir():
        return
    config = load_config(name)
    row = ARCHITECTURES.get(type(config))
    if row and AutoModelForCausalLM not in row.heads:
        raise ValueError(
            f"{name} is a model of type {config.model_type}, no causal language model; show it with hrm-hf app"
        )
