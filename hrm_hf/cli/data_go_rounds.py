"""`hrm-hf data go-failures`, `go-fixes` and `go-rounds`: repairs learned from a model's own failures."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .report import AsJson, Device, GoValidator, run, validate_model


RECORDS_HELP = "Records of hrm-hf data go (JSON Lines); repeat for more."
LIMIT_HELP = "So many records, from all over the files."
Model = Annotated[
    str, typer.Argument(help="A Go coder that repairs by edits: checkpoint folder, or a model on the Hub.")
]
Temperature = Annotated[float, typer.Option(min=0.01, help="Of everything that is sampled.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences at a time.")]
MaxCodeTokens = Annotated[int, typer.Option(min=1, help="Most new tokens of a code.")]
ShardSize = Annotated[
    int, typer.Option(min=1, help="Records of a shard; a run that was stopped goes on behind the last.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of all chance.")]
Validator = Annotated[GoValidator, typer.Option(help="auto: parser where Go is installed, else tree-sitter.")]
MaxChange = Annotated[
    float, typer.Option(min=0, max=1, help="Largest share of the tokens that a repair may change to be kept.")
]
SAMPLING = ("samples", "temperature", "validator", "batch_size", "max_code_tokens", "shard_size", "seed", "device")


def go_failures(
    model: Model,
    records: Annotated[list[Path], typer.Option(help=RECORDS_HELP)],
    out: Annotated[Path, typer.Option(help="Folder of the shards, and of report.json.")],
    breaker: Annotated[
        bool, typer.Option("--breaker", help="MODEL breaks good code: it damages the records' solutions.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help=LIMIT_HELP)] = None,
    samples: Annotated[int, typer.Option(min=1, help="Codes of each record.")] = 1,
    temperature: Temperature = 0.8,
    validator: Validator = "auto",
    batch_size: BatchSize = 8,
    max_code_tokens: MaxCodeTokens = 256,
    shard_size: ShardSize = 64,
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
):
    """Write code for problems with a model, and keep what does not pass, with the validator's verdict.

    Example: hrm-hf data go-failures runs/go_nano --records data/go/train.jsonl --limit 2000 --out data/failures
    """
    options = _with_sampling(locals())
    validate_model(model, "LANGUAGE_MODEL")
    from ..golang.rounds.run import collect_failures

    run(collect_failures, options)


def go_fixes(
    model: Model,
    failures: Annotated[Path, typer.Option(help="Folder of go-failures, or a file of trajectories.")],
    out: Annotated[Path, typer.Option(help="Folder of the shards, and of report.json.")],
    max_change: MaxChange = 0.3,
    samples: Annotated[int, typer.Option(min=1, help="Repairs tried for each failure, the first of them greedy.")] = 4,
    temperature: Temperature = 0.8,
    validator: Validator = "auto",
    batch_size: BatchSize = 8,
    max_code_tokens: MaxCodeTokens = 256,
    shard_size: ShardSize = 64,
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
):
    """Repair failures with a model, and keep the repairs that pass, change little and drop nothing.

    Example: hrm-hf data go-fixes runs/go_nano --failures data/failures --out data/fixes
    """
    options = _with_sampling(locals())
    validate_model(model, "LANGUAGE_MODEL")
    from ..golang.rounds.run import collect_fixes

    run(collect_fixes, options)


def go_rounds(
    model: Model,
    records: Annotated[list[Path], typer.Option(help=RECORDS_HELP)],
    held_out: Annotated[list[Path], typer.Option(help="Held-out records, to judge on; repeat for more.")],
    out: Annotated[Path, typer.Option(help="Folder of everything; a run that was stopped goes on in it.")],
    train_data: Annotated[
        list[Path] | None,
        typer.Option(help="More files to train on, such as what MODEL has learned; repeat for more."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Of training the model in a round.")] = 200,
    breaker_steps: Annotated[int, typer.Option(min=1, help="Of training the breaker in a round.")] = 100,
    limit: Annotated[int | None, typer.Option(min=1, help=LIMIT_HELP)] = None,
    held_out_limit: Annotated[int | None, typer.Option(min=1, help="So many held-out records.")] = None,
    fix_samples: Annotated[int, typer.Option(min=1, help="Repairs tried for each failure.")] = 4,
    max_change: MaxChange = 0.3,
    replay: Annotated[
        float, typer.Option(min=0, help="Records of --train-data for each new pair; 1,000 at least, 0 for none.")
    ] = 1.0,
    recipe: Annotated[Path | None, typer.Option(help="Of training/run_go_coder.py; go_nano_cpu by default.")] = None,
    extra: Annotated[str, typer.Option(help='More flags of run_go_coder.py, such as "--bf16 true".')] = "",
    samples: Annotated[int, typer.Option(min=1, help="Codes of each record.")] = 1,
    temperature: Temperature = 0.8,
    validator: Validator = "auto",
    batch_size: BatchSize = 8,
    max_code_tokens: MaxCodeTokens = 256,
    shard_size: ShardSize = 64,
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
):
    """Fail, fix, break and train in rounds (break-it-fix-it); prints what is mended of the same held-out failures.

    Example: hrm-hf data go-rounds runs/go_nano --records data/go/train.jsonl --held-out data/go/test.jsonl
    --train-data data/go/trajectories/train.jsonl --limit 2000 --rounds 2 --out runs/go_rounds
    """
    options = _with_sampling(locals())
    options |= {"data": options.pop("train_data") or [], "said": sys.stderr if as_json else None}
    validate_model(model, "LANGUAGE_MODEL")
    from ..golang.rounds.run import Rounds

    run(lambda **fields: Rounds(**fields).run(), options, _mended)


def _with_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """A command's options, those of sampling as one."""
    from ..golang.rounds.run import Sampling

    others = {name: value for name, value in options.items() if name not in SAMPLING}
    return others | {"sampling": Sampling(**{name: options[name] for name in SAMPLING})}


def _mended(result: dict[str, Any]) -> dict[str, str]:
    from ..golang.rounds.scores import described

    lines = {f"round {score['round']}": described(score) for score in result["scores"]}
    return lines | {"model": result["model"]}
