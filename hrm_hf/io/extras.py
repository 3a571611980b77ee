"""The optional dependencies of the package, and what to say where one is missing."""

from importlib.util import find_spec


def validate_extra(extra: str, need: str, *modules: str, instead: str = "") -> None:
    """Raises ImportError, which names the extra to install, unless all modules can be imported.

    Args:
        extra: of `options.extras_require` in setup.cfg.
        need: what needs which packages, as "ONNX export needs onnx and onnxruntime".
        modules: names of the top-level modules of these packages.
        instead: what can be done without them.
    """
    if any(find_spec(module) is None for module in modules):
        raise ImportError(f'{need}: pip install "hrm_hf[{extra}]"{instead and f", or {instead}"}')
