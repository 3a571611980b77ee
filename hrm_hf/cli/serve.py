"""`hrm-hf serve`: transformers' own OpenAI-compatible server, with the causal LMs of this package.

`transformers serve` looks a model's class up in the library's namespace, where no other package's class is, whatever
`--trust-remote-code` says. All options are the library's. `transformers chat URL` is a client that needs no help.
"""

import typer


CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context):
    """Serve causal LMs over HTTP, as `transformers serve` does (completions, chat, streaming).

    Example: hrm-hf serve runs/hrm_lm_50m --port 8000
    """
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.cli.transformers import app

    from ..registration import ARCHITECTURES

    for heads in ARCHITECTURES.values():
        if AutoModelForCausalLM in heads:
            model_class = heads[AutoModelForCausalLM]
            setattr(transformers, model_class.__name__, model_class)
    app(["serve", *context.args], prog_name="hrm-hf")
