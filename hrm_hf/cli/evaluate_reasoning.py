"""`hrm-hf eval reasoning`: accuracy of any causal language model by difficulty and by the number of passes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .evaluate_lm import ExitCriterion, ExitThreshold
from .report import AsJson, Device, UpdateCard, run, validate_model


def reasoning(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub; ours or transformers' own.")],
    data: Annotated[str, typer.Argument(help="Folder of `hrm-hf data reasoning`, or such a data set on the Hub.")],
    splits: Annotated[
        str, typer.Option(help="Splits to evaluate, with commas; test, and beyond where there is one, by default.")
    ] = "",
    passes: Annotated[
        str | None,
        typer.Option(
            "--passes", "--num-segments", "--num_segments",
            help="Numbers of passes, as 1,2,4,8, beside what the model does by itself (hrm_lm: segments).",
        ),
    ] = None,
    exit_criterion: ExitCriterion = None,
    exit_threshold: ExitThreshold = None,
    max_eval_samples: Annotated[
        int | None,
        typer.Option("--max-eval-samples", "--max_eval_samples", min=1, help="Only the first rows of a difficulty."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and reasoning.png.")] = None,
    device: Device = None,
    update_card: UpdateCard = False,
    as_json: AsJson = False,
):  # fmt: skip
    """Share of rows with all answers right, and of right answers, by difficulty and by the number of passes.

    The table has both shares for each number of passes; in brackets are the passes of an answer where a model halts.

    Example: hrm-hf eval reasoning runs/pointers data/pointers --passes 1,2,4,8 --out runs/pointers/eval
    """
    options = dict(locals())
    validate_model(model, "LANGUAGE_MODEL")
    from ..text.reasoning.evaluation import evaluate_checkpoint

    run(evaluate_checkpoint, options, _on_screen)


def _on_screen(result: dict[str, Any]) -> dict[str, Any]:
    from ..text.reasoning.evaluation import table

    shown = {name: f"{value:.5g}" for name, value in result["metrics"].items() if isinstance(value, float)}
    return {"exact / cell accuracy": "\n" + table(result["metrics"]), **shown}
