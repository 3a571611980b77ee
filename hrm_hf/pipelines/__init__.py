"""Pipelines: what a model is asked by people rather than by a trainer."""

from transformers.pipelines import PIPELINE_REGISTRY

from ..registration import AutoModelForPuzzleSolving
from .puzzle_solving import PuzzleSolvingPipeline


def register_pipelines() -> None:
    """Makes `transformers.pipeline("puzzle-solving", model=...)` work; importing `hrm_hf` calls this."""
    if "puzzle-solving" not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            "puzzle-solving", PuzzleSolvingPipeline, pt_model=(AutoModelForPuzzleSolving,), type="text"
        )


__all__ = ["PuzzleSolvingPipeline", "register_pipelines"]
