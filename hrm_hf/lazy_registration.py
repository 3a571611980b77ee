"""Registers the architectures and the pipelines with transformers at the moment when one of them can be asked for.

`import hrm_hf` must make `AutoConfig`, the Auto classes of models and `transformers.pipeline` know our types; loading
every model for it would cost each process a third of a second, and the command line, which prints help without
transformers, several seconds. So the registry is loaded when transformers meets a model type that it does not know, or
when a model of ours, `AutoFeatureExtractor` or the pipelines are imported.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec


CONFIGS = "transformers.models.auto.configuration_auto"
# Pipelines that travel with checkpoints, by module: the class, its task, and the Auto class of its models.
TRAVELLING = {
    "hrm_hf.models.pipeline_cosmo": (
        "CosmologyRegressionPipeline", "cosmology-regression", "AutoModelForImageClassification"
    ),
    "hrm_hf.models.pipeline_mass_mapping": ("MassMappingPipeline", "mass-mapping", "AutoModelForImageToImage"),
}  # fmt: skip
PIPELINES = (*TRAVELLING, "hrm_hf.puzzles.pipeline", "hrm_hf.text.rlm.pipeline")


def register_when_needed() -> None:
    """Prepares what is loaded already, and waits for what is not."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, prepare in AFTER_IMPORT.items():
        if name in sys.modules:
            prepare()


def _load_registry() -> None:
    import_module("hrm_hf.registry")


def _register() -> None:
    from .registry import register

    register(_complete_push)


def _complete_push(folder: str, repo_id: str) -> None:
    from .hub import complete_push  # only who pushes waits for it

    complete_push(folder, repo_id)


def _load_pipelines() -> None:
    """Each registers itself when it is loaded, but for those which travel with checkpoints.

    While one of these is being loaded, which may be what made transformers load its own, another that needs its class
    would not find it: `_register_travelling` then loads the rest.
    """
    begun = (sys.modules.get(module) for module in TRAVELLING)
    if any(module is not None and not hasattr(module, TRAVELLING[module.__name__][0]) for module in begun):
        return
    for name in PIPELINES:
        import_module(name)


def _register_travelling(module: str) -> None:
    import transformers
    from transformers.pipelines import PIPELINE_REGISTRY

    class_name, task, auto_class = TRAVELLING[module]
    PIPELINE_REGISTRY.register_pipeline(
        task, getattr(sys.modules[module], class_name), pt_model=(getattr(transformers, auto_class),), type="image"
    )
    _load_pipelines()


def _load_registry_on_unknown_types() -> None:
    mapping = sys.modules[CONFIGS].CONFIG_MAPPING
    if "hrm_hf.registry" not in sys.modules:
        mapping._extra_content = _UnknownTypes(mapping._extra_content)


class _UnknownTypes(dict):
    """Configurations registered beside transformers' own; the first unknown type that is looked for loads ours."""

    def __contains__(self, model_type: object) -> bool:
        mapping = sys.modules[CONFIGS].CONFIG_MAPPING
        if not super().__contains__(model_type) and model_type not in mapping._mapping:
            mapping._extra_content = known = dict(self)
            _load_registry()
            return model_type in known
        return super().__contains__(model_type)


AFTER_IMPORT: dict[str, Callable[[], None]] = {
    CONFIGS: _load_registry_on_unknown_types,
    "transformers.models.auto.feature_extraction_auto": _load_registry,
    "transformers.pipelines": _load_pipelines,
    "hrm_hf.models": _load_registry,
    "hrm_hf.registry": _register,
    **{module: partial(_register_travelling, module) for module in TRAVELLING},
}


class _AfterImport:
    """Calls what AFTER_IMPORT has for a module as soon as the module is loaded."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in AFTER_IMPORT:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                AFTER_IMPORT[name]()

            spec.loader.exec_module = exec_module
        return spec
