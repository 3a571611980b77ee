"""`hrm-hf serve`: a causal LM over HTTP; the server is `hrm_hf.text.serving`."""

from pathlib import Path

from ..text.options import ServeOptions
from .options import takes
from .report import usage_errors, validate_model


@takes(ServeOptions, json=False)
def serve(options: ServeOptions):
    """Serve a causal LM over HTTP with OpenAI's API, as `transformers serve` does, with limits for each request.

    Example: hrm-hf serve runs/hrm_lm_50m --port 8000
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..io.usage import validate_extra

    validate_extra("serve", "serving needs fastapi, uvicorn and openai", "fastapi", "uvicorn", "openai")
    from ..hub.kinds import LANGUAGE_MODEL, load_config

    with usage_errors():
        if Path(options.model).is_dir():
            load_config(options.model, LANGUAGE_MODEL, adapters=True)
    from ..text.serving import make_server

    make_server(options).run()
