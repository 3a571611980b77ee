"""`hrm-hf eval lm`: perplexity and bits per byte of any causal language model on text."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..io.evaluation import validate_evaluation
from .report import AsJson, BadLines, Device, UpdateCard, run, usage_errors, validate_model


SCREEN_METRICS = (
    "lm_loss", "always_lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps", "plan_loss",
    "code_loss", "tokens", "tokens_per_second",
)  # fmt: skip


# When a token stops thinking; the names of `hrm_hf.models.early_exit.EXIT_CRITERIA`.
Exit = Literal["q", "cdf", "kl", "latent_diff", "second_diff", "entropy_diff", "confidence", "fixed"]
ExitCriterion = Annotated[
    Exit | None, typer.Option(help="What ends a token's thinking (hrm_lm); the config's by default.")
]
ExitThreshold = Annotated[
    float | None, typer.Option(help="Of a criterion that has one (not q, fixed); its default otherwise.")
]


def lm(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub; ours or transformers' own.")],
    data: Annotated[
        list[str], typer.Option(help="Text: .txt, .jsonl, .parquet, .gz, a folder, or OWNER/NAME; repeat for more.")
    ],
    split: Annotated[str, typer.Option(help="Split of data sets of the Hub, or a name for files.")] = "test",
    last_percentage: Annotated[
        float | None,
        typer.Option(min=0.01, max=99.99, help="Only the end of each source, as run_clm.py holds it out."),
    ] = None,
    text_column: Annotated[
        str, typer.Option("--text-column", "--text_column", help="JSON key or column that holds the text.")
    ] = "text",
    document_separator: Annotated[
        str | None, typer.Option(help="Line that separates the documents of a plain text.")
    ] = None,
    on_bad_line: BadLines = "stop",
    tokenizer: Annotated[str | None, typer.Option(help="Another tokenizer than that beside the weights.")] = None,
    block_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row; the model's positions, at most 1024, by default.")
    ] = None,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens that a row repeats from the last, as context.")] = 0,
    num_segments: Annotated[
        int | None, typer.Option(min=1, help="Most segments of a token (hrm_lm); the config's by default.")
    ] = None,
    exit_criterion: ExitCriterion = None,
    exit_threshold: ExitThreshold = None,
    calibrate_on: Annotated[
        list[str] | None,
        typer.Option(help="Another text, on which the threshold of --exit-criterion is chosen; repeat for more."),
    ] = None,
    allowed_loss: Annotated[
        float, typer.Option(min=0, max=1, help="Of --calibrate-on: share by which halting early may raise the loss.")
    ] = 0.005,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first rows; bits per byte then take the whole text's bytes per token."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json.")] = None,
    device: Device = None,
    update_card: UpdateCard = False,
    as_json: AsJson = False,
):
    """Perplexity, bits per byte and average segments of a causal language model on text.

    Examples: hrm-hf eval lm runs/hrm_lm --data input.txt --last-percentage 5 --num-segments 1 --out runs/hrm_lm/eval

    hrm-hf eval lm runs/hrm_lm --data other.txt --exit-criterion kl --calibrate-on input.txt
    """
    options = dict(locals())
    validate_model(model, "LANGUAGE_MODEL")
    with usage_errors():
        validate_evaluation(model, out, update_card)
    if exit_threshold is not None and exit_criterion is None:
        raise typer.BadParameter(
            "a threshold is of a criterion; give --exit-criterion with it", param_hint="--exit-threshold"
        )
    from ..text.evaluation import evaluate_checkpoint

    run(evaluate_checkpoint, options, _on_screen)


def _on_screen(result: dict[str, Any]) -> dict[str, Any]:
    shown = {name: result["metrics"][name] for name in SCREEN_METRICS if name in result["metrics"]}
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in shown.items()}
