"""Table of architectures, with everything that the package and the Hub need to know about each model.

Code that treats architectures differently reads a field of the row (`architecture_of`) and never compares model types.
A row is data; it references code in a higher layer as "module:function", which is loaded on use.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageToImage,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.pipelines import PIPELINE_REGISTRY

from .models.configuration_cosmo_cnn import CosmoCnnConfig
from .models.configuration_cosmo_unet import CosmoUnetConfig
from .models.configuration_hrm_cosmo import HrmCosmoConfig
from .models.configuration_hrm_go_coder import HrmGoCoderConfig
from .models.configuration_hrm_lm import HrmLmConfig
from .models.configuration_hrm_mass_mapping import HrmMassMappingConfig
from .models.configuration_hrm_puzzle import HrmPuzzleConfig
from .models.configuration_rlm_mhc import RlmMhcConfig
from .models.configuration_se_rrm_puzzle import SeRrmPuzzleConfig
from .models.configuration_trm_puzzle import TrmPuzzleConfig
from .models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from .models.modeling_cosmo_cnn import CosmoCnnForRegression, CosmoCnnModel
from .models.modeling_cosmo_unet import CosmoUnetForMassMapping, CosmoUnetModel
from .models.modeling_hrm_cosmo import HrmCosmoForRegression, HrmCosmoModel
from .models.modeling_hrm_go_coder import (
    HrmGoCoderForCausalLM,
    HrmGoCoderForSequenceClassification,
    HrmGoCoderForTokenClassification,
    HrmGoCoderModel,
)
from .models.modeling_hrm_lm import (
    HrmLmForCausalLM,
    HrmLmForSequenceClassification,
    HrmLmForTokenClassification,
    HrmLmModel,
)
from .models.modeling_hrm_mass_mapping import HrmCosmoForMassMapping, HrmMassMappingModel
from .models.modeling_hrm_puzzle import HrmPuzzleForSolving, HrmPuzzleModel
from .models.modeling_rlm_mhc import (
    RlmMhcForCausalLM,
    RlmMhcForSequenceClassification,
    RlmMhcForTokenClassification,
    RlmMhcModel,
)
from .models.modeling_se_rrm_puzzle import SeRrmPuzzleForSolving, SeRrmPuzzleModel
from .models.modeling_trm_puzzle import TrmPuzzleForSolving, TrmPuzzleModel
from .models.pipeline_cosmo import CosmologyRegressionPipeline
from .models.pipeline_mass_mapping import MassMappingPipeline


class AutoModelForPuzzleSolving(_BaseAutoModelClass):
    """Auto class that selects the puzzle model class from the config, as `transformers.AutoModel` does."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


# AutoModelForPuzzleSolving exists only where this package is installed. Elsewhere, a puzzle head loads as
# AutoModelForMaskedLM (token logits at every position) with trust_remote_code=True.
PUZZLES = {
    "head_auto_classes": (AutoModelForMaskedLM, AutoModelForPuzzleSolving),
    "pipeline": "puzzle-solving",
    "modules_to_save": ("q_head", "puzzle_emb"),
    "app_tabs": (("Puzzle", "hrm_hf.app.puzzle_tab:puzzle_tab"),),
    "exporter": "hrm_hf.export.graphs:PuzzleExporter",
    "card_context": "hrm_hf.puzzles.task_registry:card_context",
}
LANGUAGE = {
    "head_auto_classes": (AutoModelForCausalLM,),
    "pipeline": "text-generation",
    "app_tabs": (("Text", "hrm_hf.app.text_tab:text_tab"),),
    "exporter": "hrm_hf.export.graphs:LanguageModelExporter",
}
# There is no Auto class for regression from images, but image classification supports problem_type="regression".
COSMOLOGY = {
    "head_auto_classes": (AutoModelForImageClassification,),
    "pipeline": "cosmology-regression",
    "feature_extractor": CosmoMapFeatureExtractor,
    "app_tabs": (("Cosmology", "hrm_hf.app.maps_tab:cosmology_tab"),),
}
MASS_MAPS = {
    "head_auto_classes": (AutoModelForImageToImage,),
    "pipeline": "mass-mapping",
    "feature_extractor": CosmoMapFeatureExtractor,
    "app_tabs": (("Mass map", "hrm_hf.app.maps_tab:mass_map_tab"),),
}

# Auto class and pipeline for each entry in `ArchitectureSpec.classifiers`, in the same order.
CLASSIFIERS = {
    AutoModelForSequenceClassification: "text-classification",
    AutoModelForTokenClassification: "token-classification",
}

# Optional abilities of a head, and the methods that the head must have for each ability.
ABILITIES = {
    "recurrent_depth": ("plan",),  # forward takes a `SegmentSchedule`, which changes during training
    "parameter_groups": ("parameter_group",),  # parts of the model can have different learning rates
    "refinement": ("generate_with_refinement",),  # generates code, validates it, and repairs it
    "hyper_connections": ("get_detailed_mhc_metrics",),  # reports how much the residual streams amplify signals
    "statistics": ("fit_statistics",),  # reads summary statistics of maps, with whitening fitted to training maps
}


@dataclass(frozen=True)
class ArchitectureSpec:
    """Registry row for one architecture. A feature is unavailable if its field is None or empty.

    Functions and classes in higher layers are given as "module:function" or "module:class".

    Attributes:
        config: the configuration class, which also defines the model type.
        base: the model without a head, for `AutoModel`.
        head: the model with the head for its main task.
        head_auto_classes: the Auto classes that load `head`.
        pipeline: name of the pipeline that runs the model, which is also the task on its model card.
        classifiers: models with the same body that classify texts or tokens, for the Auto classes in `CLASSIFIERS`.
        feature_extractor: the class that `AutoFeatureExtractor` loads.
        modules_to_save: names of small modules that an adapter trains and saves in full: heads that read the states
            of the body, the puzzle table, batch norms with their running statistics.
        abilities: names in `ABILITIES`.
        quantizable: False for convolutional models, which bitsandbytes does not quantize.
        app_tabs: title and builder function of each tab of the app. The function takes a pipeline, or a causal
            language model and its tokenizer, and the state that changes when the tab is first shown.
        exporter: the `hrm_hf.export.graphs.Exporter` class for ONNX and torch.export.
        gguf_layouts: function that maps a config, a name and a number of passes to `hrm_hf.export.gguf.Layout`s.
        memory_shape: function that maps a config to fields of `hrm_hf.launch.memory.ModelShape`.
        card_context: function that maps a config and a checkpoint folder to values for the model card's template.
    """

    config: type[PreTrainedConfig]
    base: type[PreTrainedModel]
    head: type[PreTrainedModel]
    head_auto_classes: tuple[type, ...]
    pipeline: str
    classifiers: tuple[type[PreTrainedModel], ...] = ()
    feature_extractor: type | None = None
    modules_to_save: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ()
    quantizable: bool = True
    app_tabs: tuple[tuple[str, str], ...] = ()
    exporter: str | None = None
    gguf_layouts: str | None = None
    memory_shape: str | None = None
    card_context: str | None = None

    @property
    def model_type(self) -> str:
        """The `model_type` in config.json."""
        return self.config.model_type

    @property
    def heads(self) -> dict[type, type[PreTrainedModel]]:
        """The model class for each Auto class."""
        own = {AutoModel: self.base, **dict.fromkeys(self.head_auto_classes, self.head)}
        return own | dict(zip(CLASSIFIERS, self.classifiers))

    def task_of(self, config: PreTrainedConfig) -> str:
        """Return the pipeline's name for a checkpoint with this config. Classifiers have their own pipelines."""
        tasks = {head.__name__: task for head, task in zip(self.classifiers, CLASSIFIERS.values())}
        return next((tasks[name] for name in config.architectures or () if name in tasks), self.pipeline)

    @property
    def halts(self) -> bool:
        """Whether the model can halt at a different step for each input, up to `config.halt_max_steps`."""
        return "halt_max_steps" in {field.name for field in fields(self.config)}


ARCHITECTURES: dict[type[PreTrainedConfig], ArchitectureSpec] = {
    row.config: row
    for row in (
        ArchitectureSpec(
            CosmoCnnConfig,
            CosmoCnnModel,
            CosmoCnnForRegression,
            **COSMOLOGY,
            modules_to_save=("posterior_head", "normalization"),
            quantizable=False,
            exporter="hrm_hf.export.graphs:RegressionExporter",
        ),
        ArchitectureSpec(
            CosmoUnetConfig,
            CosmoUnetModel,
            CosmoUnetForMassMapping,
            **MASS_MAPS,
            modules_to_save=("posterior_head", "errors", "maps"),
            quantizable=False,
        ),
        ArchitectureSpec(
            HrmCosmoConfig,
            HrmCosmoModel,
            HrmCosmoForRegression,
            **COSMOLOGY,
            modules_to_save=("posterior_head", "halt_head"),
            abilities=("statistics",),
            exporter="hrm_hf.export.graphs:RecurrentRegressionExporter",
        ),
        ArchitectureSpec(
            HrmGoCoderConfig,
            HrmGoCoderModel,
            HrmGoCoderForCausalLM,
            **LANGUAGE | {"app_tabs": (("Go coder", "hrm_hf.app.go_tab:go_tab"),)},
            classifiers=(HrmGoCoderForSequenceClassification, HrmGoCoderForTokenClassification),
            modules_to_save=("refinement_head", "feedback_encoder"),
            abilities=("parameter_groups", "refinement"),
            gguf_layouts="hrm_hf.export.gguf:go_coder_layouts",
        ),
        ArchitectureSpec(
            HrmLmConfig,
            HrmLmModel,
            HrmLmForCausalLM,
            **LANGUAGE,
            classifiers=(HrmLmForSequenceClassification, HrmLmForTokenClassification),
            modules_to_save=("q_head",),
            abilities=("recurrent_depth",),
            gguf_layouts="hrm_hf.export.gguf_loops:hrm_lm_layouts",
            memory_shape="hrm_hf.launch.memory:segments_shape",
        ),
        ArchitectureSpec(
            HrmMassMappingConfig,
            HrmMassMappingModel,
            HrmCosmoForMassMapping,
            **MASS_MAPS,
            modules_to_save=("posterior_head", "halt_head", "readout"),
            abilities=("statistics",),
        ),
        ArchitectureSpec(HrmPuzzleConfig, HrmPuzzleModel, HrmPuzzleForSolving, **PUZZLES),
        ArchitectureSpec(
            RlmMhcConfig,
            RlmMhcModel,
            RlmMhcForCausalLM,
            **LANGUAGE | {"app_tabs": (*LANGUAGE["app_tabs"], ("mHC", "hrm_hf.app.text_tab:mhc_tab"))},
            classifiers=(RlmMhcForSequenceClassification, RlmMhcForTokenClassification),
            abilities=("hyper_connections",),
            memory_shape="hrm_hf.launch.memory:streams_shape",
        ),
        ArchitectureSpec(
            SeRrmPuzzleConfig,
            SeRrmPuzzleModel,
            SeRrmPuzzleForSolving,
            **PUZZLES | {"modules_to_save": ("puzzle_emb",)},
        ),
        ArchitectureSpec(TrmPuzzleConfig, TrmPuzzleModel, TrmPuzzleForSolving, **PUZZLES),
    )
}


def architecture_of(thing: Any) -> ArchitectureSpec | None:
    """Return the registry row for a config, model or model type, or None if it is not from this package."""
    config = getattr(thing, "config", thing)
    model_type = config if isinstance(config, str) else getattr(config, "model_type", None)
    return next((row for row in ARCHITECTURES.values() if row.model_type == model_type), None)


def has_ability(model: Any, ability: str) -> bool:
    """Check whether a model, with or without an adapter, has one of the `ABILITIES`."""
    row = architecture_of(model)
    return row is not None and ability in row.abilities


def load_function(name: str) -> Callable[..., Any]:
    """Load the function or class that a row names as "module:function"."""
    module, function = name.split(":")
    return getattr(import_module(module), function)


class NoDefaultModel:
    """Placeholder for a default model that raises ValueError when transformers unpacks it."""

    def __init__(self, task: str):
        self.task = task

    def __iter__(self):
        call = f'pipeline("{self.task}", model=FOLDER)'
        raise ValueError(f"model=None: {self.task} has no default model; pass a model, as in {call}")


def _complete_push(folder: str, repo_id: str) -> None:
    load_function("hrm_hf.hub:complete_push")(folder, repo_id)  # import hrm_hf.hub only for a push


def _register() -> None:
    """Register every architecture with the Auto classes, and make checkpoints include their code."""
    for row in ARCHITECTURES.values():
        AutoConfig.register(row.model_type, row.config, exist_ok=True)
        row.config.register_for_auto_class()
        row.config._has_pipelines = True
        for auto_class, model_class in row.heads.items():
            auto_class.register(row.config, model_class, exist_ok=True)
            model_class._complete_push = staticmethod(_complete_push)
            model_class._auto_class = auto_class.__name__  # if this is set, save_pretrained copies the code
            model_class._auto_map = {"AutoConfig": _code_name(row.config)} | {
                auto.__name__: _code_name(head) for auto, head in row.heads.items()
            }
        if row.feature_extractor:
            AutoFeatureExtractor.register(row.config, row.feature_extractor, exist_ok=True)
            row.feature_extractor.register_for_auto_class("AutoFeatureExtractor")
    # Registered here, because the modules of these pipelines ship with checkpoints and cannot import this package.
    for maps, pipeline in ((COSMOLOGY, CosmologyRegressionPipeline), (MASS_MAPS, MassMappingPipeline)):
        task, default = maps["pipeline"], {"model": NoDefaultModel(maps["pipeline"])}
        PIPELINE_REGISTRY.register_pipeline(task, pipeline, maps["head_auto_classes"], default, "image")


def _code_name(cls: type) -> str:
    return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"


_register()
