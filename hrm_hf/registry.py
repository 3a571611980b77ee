"""The one table of architectures: a row says what the rest of the package and the Hub must know of a model.

Whoever needs to treat architectures differently asks for a field of the row (`architecture_of`), never for the name of
a model type. A row is data; where code of a higher room is meant, it is named as "module:function" and loaded when it
is needed.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .models.configuration_cosmo_cnn import CosmoCnnConfig
from .models.configuration_hrm_cosmo import HrmCosmoConfig
from .models.configuration_hrm_go_coder import HrmGoCoderConfig
from .models.configuration_hrm_lm import HrmLmConfig
from .models.configuration_hrm_puzzle import HrmPuzzleConfig
from .models.configuration_rlm_mhc import RlmMhcConfig
from .models.configuration_trm_puzzle import TrmPuzzleConfig
from .models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from .models.modeling_cosmo_cnn import CosmoCnnForRegression, CosmoCnnModel
from .models.modeling_hrm_cosmo import HrmCosmoForRegression, HrmCosmoModel
from .models.modeling_hrm_go_coder import HrmGoCoderForCausalLM, HrmGoCoderModel
from .models.modeling_hrm_lm import HrmLmForCausalLM, HrmLmModel
from .models.modeling_hrm_puzzle import HrmPuzzleForSolving, HrmPuzzleModel
from .models.modeling_rlm_mhc import RlmMhcForCausalLM, RlmMhcModel
from .models.modeling_trm_puzzle import TrmPuzzleForSolving, TrmPuzzleModel


class AutoModelForPuzzleSolving(_BaseAutoModelClass):
    """Loads any puzzle-solving model by its config, as `transformers.AutoModel` does for its own families."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


# A process that cannot import this package knows no AutoModelForPuzzleSolving: there a puzzle head loads as
# AutoModelForMaskedLM (token logits at every position) with trust_remote_code=True.
PUZZLE_HEADS = (AutoModelForMaskedLM, AutoModelForPuzzleSolving)
# No Auto class is for regression from images: that for classification has regression as a problem type.
REGRESSION_HEADS = (AutoModelForImageClassification,)
LM_HEADS = (AutoModelForCausalLM,)


@dataclass(frozen=True)
class ArchitectureSpec:
    """One architecture.

    Attributes:
        config: its configuration class; the model type is the class's.
        base: the model without a head, for `AutoModel`.
        head: the model that is trained and used.
        head_auto_classes: the Auto classes that load `head`.
        pipeline: name of the pipeline that serves it, which is also the task on its card.
        feature_extractor: what `AutoFeatureExtractor` loads for it.
        card_context: function of a config and a checkpoint folder that returns values for the template of its card.
    """

    config: type[PreTrainedConfig]
    base: type[PreTrainedModel]
    head: type[PreTrainedModel]
    head_auto_classes: tuple[type, ...]
    pipeline: str
    feature_extractor: type | None = None
    card_context: str | None = None

    @property
    def model_type(self) -> str:
        """The name in config.json."""
        return self.config.model_type

    @property
    def heads(self) -> dict[type, type[PreTrainedModel]]:
        """Model class of each Auto class."""
        return {AutoModel: self.base, **dict.fromkeys(self.head_auto_classes, self.head)}


ARCHITECTURES: dict[type[PreTrainedConfig], ArchitectureSpec] = {
    row.config: row
    for row in (
        ArchitectureSpec(
            CosmoCnnConfig,
            CosmoCnnModel,
            CosmoCnnForRegression,
            REGRESSION_HEADS,
            pipeline="cosmology-regression",
            feature_extractor=CosmoMapFeatureExtractor,
        ),
        ArchitectureSpec(
            HrmCosmoConfig,
            HrmCosmoModel,
            HrmCosmoForRegression,
            REGRESSION_HEADS,
            pipeline="cosmology-regression",
            feature_extractor=CosmoMapFeatureExtractor,
        ),
        ArchitectureSpec(
            HrmGoCoderConfig,
            HrmGoCoderModel,
            HrmGoCoderForCausalLM,
            LM_HEADS,
            pipeline="text-generation",
        ),
        ArchitectureSpec(
            HrmLmConfig,
            HrmLmModel,
            HrmLmForCausalLM,
            LM_HEADS,
            pipeline="text-generation",
        ),
        ArchitectureSpec(
            HrmPuzzleConfig,
            HrmPuzzleModel,
            HrmPuzzleForSolving,
            PUZZLE_HEADS,
            pipeline="puzzle-solving",
            card_context="hrm_hf.puzzles.arc:card_context",
        ),
        ArchitectureSpec(
            RlmMhcConfig,
            RlmMhcModel,
            RlmMhcForCausalLM,
            LM_HEADS,
            pipeline="text-generation",
        ),
        ArchitectureSpec(
            TrmPuzzleConfig,
            TrmPuzzleModel,
            TrmPuzzleForSolving,
            PUZZLE_HEADS,
            pipeline="puzzle-solving",
            card_context="hrm_hf.puzzles.arc:card_context",
        ),
    )
}


def architecture_of(thing: Any) -> ArchitectureSpec | None:
    """The row of a config, of a model or of a model type; None for what is not of this package."""
    config = getattr(thing, "config", thing)
    model_type = config if isinstance(config, str) else getattr(config, "model_type", None)
    return next((row for row in ARCHITECTURES.values() if row.model_type == model_type), None)


def load_function(name: str) -> Callable[..., Any]:
    """What a row names as "module:function"."""
    module, function = name.split(":")
    return getattr(import_module(module), function)


def register(complete_push: Callable[[str, str], None] | None = None) -> None:
    """Makes every architecture known to the Auto classes, and lets checkpoints carry their code.

    Args:
        complete_push: adds a model card and the code's license to a folder (argument 1) that goes to a repository (2).
    """
    for row in ARCHITECTURES.values():
        AutoConfig.register(row.model_type, row.config, exist_ok=True)
        row.config.register_for_auto_class()
        auto_map = {"AutoConfig": _code_name(row.config)}
        for auto_class, model_class in row.heads.items():
            auto_class.register(row.config, model_class, exist_ok=True)
            auto_map[auto_class.__name__] = _code_name(model_class)
        for auto_class, model_class in row.heads.items():
            model_class._auto_map = auto_map
            model_class._complete_push = staticmethod(complete_push) if complete_push else None
            model_class._auto_class = auto_class.__name__  # non-empty: save_pretrained then copies the code
        if row.feature_extractor:
            AutoFeatureExtractor.register(row.config, row.feature_extractor, exist_ok=True)
            row.feature_extractor.register_for_auto_class("AutoFeatureExtractor")


def _code_name(cls: type) -> str:
    return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
