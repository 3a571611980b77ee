"""The one table of architectures: config, models, Auto classes, and what a saved checkpoint says about its code."""

from collections import OrderedDict

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
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
# No Auto class is for regression from images: that for classification has regression as a problem type.
ARCHITECTURES = {
    CosmoCnnConfig: {AutoModel: CosmoCnnModel, AutoModelForImageClassification: CosmoCnnForRegression},
    HrmCosmoConfig: {AutoModel: HrmCosmoModel, AutoModelForImageClassification: HrmCosmoForRegression},
    HrmGoCoderConfig: {AutoModel: HrmGoCoderModel, AutoModelForCausalLM: HrmGoCoderForCausalLM},
    HrmLmConfig: {AutoModel: HrmLmModel, AutoModelForCausalLM: HrmLmForCausalLM},
    HrmPuzzleConfig: {
        AutoModel: HrmPuzzleModel,
        AutoModelForMaskedLM: HrmPuzzleForSolving,
        AutoModelForPuzzleSolving: HrmPuzzleForSolving,
    },
    RlmMhcConfig: {AutoModel: RlmMhcModel, AutoModelForCausalLM: RlmMhcForCausalLM},
    TrmPuzzleConfig: {
        AutoModel: TrmPuzzleModel,
        AutoModelForMaskedLM: TrmPuzzleForSolving,
        AutoModelForPuzzleSolving: TrmPuzzleForSolving,
    },
}


def register() -> None:
    """Makes every architecture known to the Auto classes, and lets checkpoints carry their code."""
    for config_class, heads in ARCHITECTURES.items():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.register_for_auto_class()
        auto_map = {"AutoConfig": _code_name(config_class)}
        for auto_class, model_class in heads.items():
            auto_class.register(config_class, model_class, exist_ok=True)
            auto_map[auto_class.__name__] = _code_name(model_class)
        for auto_class, model_class in heads.items():
            model_class._auto_map = auto_map
            model_class._complete_push = staticmethod(_complete_push)
            model_class._auto_class = auto_class.__name__  # non-empty: save_pretrained then copies the code
        if AutoModelForImageClassification in heads:
            AutoFeatureExtractor.register(config_class, CosmoMapFeatureExtractor, exist_ok=True)
    CosmoMapFeatureExtractor.register_for_auto_class("AutoFeatureExtractor")


def _complete_push(folder: str, repo_id: str) -> None:
    from .hub import complete_push

    complete_push(folder, repo_id)


def _code_name(cls: type) -> str:
    return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
