"""Recursive reasoning models in the Hugging Face ecosystem. Importing this package registers every architecture."""

from ._version import __version__
from .models.act import ActCarry
from .models.configuration_cosmo_cnn import CosmoCnnConfig
from .models.configuration_hrm_cosmo import HrmCosmoConfig
from .models.configuration_hrm_go_coder import HrmGoCoderConfig
from .models.configuration_hrm_lm import HrmLmConfig
from .models.configuration_hrm_puzzle import HrmPuzzleConfig
from .models.configuration_rlm_mhc import RlmMhcConfig
from .models.configuration_trm_puzzle import TrmPuzzleConfig
from .models.hyper_connections import mHCLayer
from .models.modeling_cosmo_cnn import CosmoCnnForRegression, CosmoCnnModel
from .models.modeling_hrm_cosmo import HrmCosmoForRegression, HrmCosmoModel
from .models.modeling_hrm_go_coder import HrmGoCoderForCausalLM, HrmGoCoderModel
from .models.modeling_hrm_lm import HrmLmForCausalLM, HrmLmModel
from .models.modeling_hrm_puzzle import HrmPuzzleForSolving, HrmPuzzleModel
from .models.modeling_puzzle import PuzzleSolution, PuzzleSolvingOutput
from .models.modeling_rlm_mhc import RlmMhcForCausalLM, RlmMhcModel
from .models.modeling_trm_puzzle import TrmPuzzleForSolving, TrmPuzzleModel
from .pipelines import CosmologyRegressionPipeline, PuzzleSolvingPipeline, RlmPipeline, RlmResult, register_pipelines
from .registry import AutoModelForPuzzleSolving, register


def _complete_push(folder: str, repo_id: str) -> None:
    from .hub import complete_push  # only who pushes waits for it

    complete_push(folder, repo_id)


register(_complete_push)
register_pipelines()

__all__ = [
    "ActCarry",
    "AutoModelForPuzzleSolving",
    "CosmoCnnConfig",
    "CosmoCnnForRegression",
    "CosmoCnnModel",
    "CosmologyRegressionPipeline",
    "HrmCosmoConfig",
    "HrmCosmoForRegression",
    "HrmCosmoModel",
    "HrmGoCoderConfig",
    "HrmGoCoderForCausalLM",
    "HrmGoCoderModel",
    "HrmLmConfig",
    "HrmLmForCausalLM",
    "HrmLmModel",
    "HrmPuzzleConfig",
    "HrmPuzzleForSolving",
    "HrmPuzzleModel",
    "PuzzleSolution",
    "PuzzleSolvingOutput",
    "PuzzleSolvingPipeline",
    "RlmMhcConfig",
    "RlmMhcForCausalLM",
    "RlmMhcModel",
    "RlmPipeline",
    "RlmResult",
    "TrmPuzzleConfig",
    "TrmPuzzleForSolving",
    "TrmPuzzleModel",
    "__version__",
    "mHCLayer",
]
