"""Pipelines: what a model is asked by people rather than by a trainer."""

from transformers import AutoModelForCausalLM, AutoModelForImageClassification
from transformers.pipelines import PIPELINE_REGISTRY

from .cosmology.pipeline import CosmologyRegressionPipeline
from .puzzles.pipeline import PuzzleSolvingPipeline
from .registry import AutoModelForPuzzleSolving
from .text.rlm.pipeline import RlmPipeline, RlmResult


def register_pipelines() -> None:
    """Makes `transformers.pipeline("puzzle-solving", model=...)`, "recursive-text-generation" and others work.

    Importing `hrm_hf` calls this.
    """
    if "puzzle-solving" not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            "puzzle-solving", PuzzleSolvingPipeline, pt_model=(AutoModelForPuzzleSolving,), type="text"
        )
    if "recursive-text-generation" not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            "recursive-text-generation", RlmPipeline, pt_model=(AutoModelForCausalLM,), type="text"
        )
    if "cosmology-regression" not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            "cosmology-regression",
            CosmologyRegressionPipeline,
            pt_model=(AutoModelForImageClassification,),
            type="image",
        )


__all__ = [
    "CosmologyRegressionPipeline",
    "PuzzleSolvingPipeline",
    "RlmPipeline",
    "RlmResult",
    "register_pipelines",
]
