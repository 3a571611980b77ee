"""`hrm-hf data reasoning`: questions that take many steps to answer, for any causal language model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .report import AsJson, run


# The keys of `hrm_hf.text.reasoning.tasks.TASKS`, without loading it.
ReasoningTask = Literal["automaton", "pointers", "permutations", "addition", "brackets", "maze"]


def reasoning(
    task: Annotated[ReasoningTask, typer.Argument(help="What is asked.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    size: Annotated[
        int | None,
        typer.Option(
            help="Cells (automaton), nodes (pointers), items (permutations), digits (addition), kinds (brackets), "
            "cells a side (maze)."
        ),
    ] = None,
    difficulty: Annotated[
        str | None, typer.Option(help="Of the training data, as 8 or 1-8: steps, hops, generators, numbers, depth.")
    ] = None,
    beyond: Annotated[
        str | None, typer.Option(help="Of the split beyond it, or none; up to twice the greatest one by default.")
    ] = None,
    answers: Annotated[
        Literal["all", "last"] | None,
        typer.Option(help="Ask for the result of every step, or of the last; all where there are steps to ask for."),
    ] = None,
    queries: Annotated[
        int | None, typer.Option(help="pointers: starts in a row; as many as there are nodes by default.")
    ] = None,
    num_train: Annotated[int, typer.Option(help="Training rows.")] = 100_000,
    num_validation: Annotated[int, typer.Option(help="Rows of the split validation.")] = 1000,
    num_test: Annotated[int, typer.Option(help="Rows of each difficulty in the splits test and beyond.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the whole set.")] = 0,
    as_json: AsJson = False,
):
    """Build a data set of questions that take as many steps as their difficulty says, read in one forward pass.

    The rows hang on the options and the seed alone. A tokenizer lies beside them, which AutoTokenizer reads.

    Example: hrm-hf data reasoning pointers --out data/pointers

    Example: hrm-hf data reasoning automaton --size 20 --difficulty 8 --answers last --out data/rule110
    """
    options = dict(locals())
    from ..text.reasoning.build import build_reasoning

    run(build_reasoning, options)
