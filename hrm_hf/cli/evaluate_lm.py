"""`hrm-hf eval lm` and `eval reasoning`: any causal language model on text, and on questions that take many steps."""

from typing import Any

from ..text.options import EvaluateLm, EvaluateReasoning
from .options import takes
from .report import WRITTEN, report, usage_errors, validate_model


SCREEN_METRICS = (
    "lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps", "plan_loss", "code_loss", "tokens",
    "tokens_per_second",
)  # fmt: skip


@takes(EvaluateLm)
def lm(options: EvaluateLm, as_json: bool):
    """Perplexity, bits per byte and average segments of a causal language model on text.

    Example: hrm-hf eval lm runs/hrm_lm --data input.txt --last-percentage 5 --num-segments 1 --out runs/hrm_lm/eval
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..text.evaluation import evaluate_checkpoint

    with usage_errors():
        result = evaluate_checkpoint(options)
    _show(result, {name: result["metrics"][name] for name in SCREEN_METRICS if name in result["metrics"]}, as_json)


@takes(EvaluateReasoning)
def reasoning(options: EvaluateReasoning, as_json: bool):
    """Share of rows with all answers right, and of right answers, by difficulty and by the number of passes.

    The table has both shares for each number of passes; in brackets are the passes of an answer where a model halts.

    Example: hrm-hf eval reasoning runs/pointers data/pointers --passes 1,2,4,8 --out runs/pointers/eval
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..text.reasoning.evaluation import evaluate_checkpoint, table

    with usage_errors():
        result = evaluate_checkpoint(options)
    metrics = {name: value for name, value in result["metrics"].items() if isinstance(value, float)}
    _show(result, {"exact / cell accuracy": "\n" + table(result["metrics"]), **metrics}, as_json)


def _show(result: dict[str, Any], shown: dict[str, Any], as_json: bool) -> None:
    """Print the result with --json, else some metrics and the files that were written."""
    shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in shown.items()}
    written = {name: result[name] for name in WRITTEN if name in result}
    report(result if as_json else shown | written, as_json)
