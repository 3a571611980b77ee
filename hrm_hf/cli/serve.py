"""`hrm-hf serve`: transformers' own OpenAI-compatible server, with the causal LMs of this package.

`transformers serve` looks a model's class up in the library's namespace, where no other package's class is, whatever
`--trust-remote-code` says. All options are the library's. `transformers chat URL` is a client that needs no help.
"""

from pathlib import Path

import typer

from .solve import check_model


CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context):
    """Serve causal LMs over HTTP, as `transformers serve` does (completions, chat, streaming).

    Example: hrm-hf serve runs/hrm_lm_50m --port 8000
    """
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.cli.transformers import app

    from ..registration import ARCHITECTURES

    if context.args and not context.args[0].startswith("-"):
        _check_language_model(context.args[0])
    for heads in ARCHITECTURES.values():
        if AutoModelForCausalLM in heads:
            model_class = heads[AutoModelForCausalLM]
            setattr(transformers, model_class.__name__, model_class)
    app(["serve", *context.args], prog_name="hrm-hf")


def _check_language_model(name: str) -> None:
    """Refuses a path that is no folder, and one with another kind of model; names of the Hub are the library's."""
    from transformers import AutoModelForCausalLM

    from ..convert.checkpoint import load_config
    from ..registration import ARCHITECTURES

    if ":" not in name:  # FOLDER:FILE.gguf
        check_model(name)
    if not Path(name).is_dir():
        return
    config = load_config(name)
    if AutoModelForCausalLM not in ARCHITECTURES.get(type(config), (AutoModelForCausalLM,)):
        raise ValueError(
            f"{name} is a model of type {config.model_type}, no causal language model; show it with hrm-hf app"
        )
