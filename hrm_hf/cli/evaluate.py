"""`hrm-hf eval`: what a trained model is worth on a test set. One command per kind of task."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .data import report
from .evaluate_checks import RESULTS_FILE, check_arguments, check_data, chosen_device, model_config
from .evaluate_cosmo import cosmo, cosmo_baseline
from .evaluate_go import go
from .evaluate_lm import lm
from .solve import Halt


app = typer.Typer(no_args_is_help=True, help="Evaluate a trained model.")
app.command("go")(go)
app.command("lm")(lm)
app.command("cosmo")(cosmo)
app.command("cosmo-baseline")(cosmo_baseline)

VOTING_PASS_AT = (1, 2, 5, 10, 100, 1000)
# These are in results.json and in the plot.
NOT_ON_SCREEN = ("exact_accuracy_per_step", "steps_histogram", "reliability")


@app.callback()
def _group() -> None:
    """Evaluate a trained model."""


@app.command()
def puzzles(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    data: Annotated[str, typer.Argument(help="Puzzle data set: folder, or a data set on the Hub.")],
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    max_steps: Annotated[int | None, typer.Option(min=1, help="Most ACT steps; the config's by default.")] = None,
    min_steps: Annotated[int, typer.Option(min=1, help="Fewest ACT steps.")] = 1,
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Least confidence at which to stop; the model's own choice by default.")
    ] = 0.0,
    halt: Annotated[Halt, typer.Option(help="q: adaptive; fixed: all steps, as the original evaluates.")] = Halt.q,
    batch_size: Annotated[int, typer.Option(min=1, help="Puzzles at a time.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the split.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and evaluation.png.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; the best there is by default.")] = None,
    update_card: Annotated[
        bool, typer.Option("--update-card", help="Write the results into MODEL/README.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Accuracy per ACT step, halting, calibration and obedience to the rules; pass@K by voting for ARC.

    Example: hrm-hf eval puzzles runs/sudoku_demo data/sudoku --halt fixed --out runs/sudoku_demo/eval
    """
    check_arguments(model, out, update_card)
    check_data(data, "puzzle data set")
    device = chosen_device(device)
    from ..puzzles.evaluation import evaluate_puzzles
    from ..trainer.recipes import library_versions

    info = _load_info(data)
    _check_fit(model_config(model), info, model, data)
    rows = _load_rows(data, split, limit)
    network = _load_model(model, device)
    voting = _voting(data, info, network)
    metrics = evaluate_puzzles(
        network,
        rows["input_ids"],
        rows["labels"],
        rows["puzzle_identifiers"],
        batch_size=batch_size,
        max_steps=max_steps,
        min_steps=min_steps,
        min_confidence=min_confidence,
        halt=halt.value,
        progress=None,
        on_batch=_vote(voting) if voting else None,
    )
    if voting:
        metrics |= voting.result(VOTING_PASS_AT)
    result = {
        "task": info.task,
        "model": model,
        "dataset": data,
        "split": split,
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    written = _write(result, out, Path(model).name) if out else {}
    if update_card:
        from ..hub.cards import record_evaluation

        more = {"limit": limit} if limit else {}
        written["card"] = str(record_evaluation(model, metrics, data, split, result["parameters"], **more))
    if as_json:
        report({**result, **written}, True)
    else:
        report({**{name: value for name, value in metrics.items() if name not in NOT_ON_SCREEN}, **written}, False)


def _load_model(name: str, device: str):
    from .. import AutoModelForPuzzleSolving

    return AutoModelForPuzzleSolving.from_pretrained(name).to(device).eval()


def _load_info(data: str):
    from ..puzzles.dataset import load_puzzle_info

    return load_puzzle_info(data)


def _check_fit(config, info, model: str, data: str) -> None:
    """A model for puzzles meets only data of its own shape and table."""
    if not config.model_type.endswith("_puzzle"):
        raise ValueError(
            f"{model} is a model of type {config.model_type}; expected hrm_puzzle or trm_puzzle (for others there are "
            "hrm-hf eval lm, go and cosmo)"
        )
    wanted, names = info.config_fields(), ["seq_len", "vocab_size"]
    names += ["task"] if config.task != "generic" else []
    names += ["num_puzzle_identifiers"] if config.puzzle_emb_ndim else []
    wrong = [
        f"{name}: {getattr(config, name)} and {wanted[name]}"
        for name in names
        if getattr(config, name) != wanted[name]
    ]
    if wrong:
        raise ValueError(f"{model} was not made for {data}; model and data differ in {'; '.join(wrong)}")


def _load_rows(data: str, split: str, limit: int | None) -> dict[str, Any]:
    """Columns of the split as numpy arrays; int8 for tokens, so that a large ARC split fits."""
    from ..puzzles.dataset import load_puzzle_dataset

    dataset = load_puzzle_dataset(data, split)
    dataset = dataset.select(range(min(limit, len(dataset)))) if limit else dataset
    names = ["input_ids", "labels", "puzzle_identifiers"]
    if missing := [name for name in names if name not in dataset.column_names]:
        raise ValueError(
            f"{data}, split {split!r}: no column {', '.join(missing)}, it has {', '.join(dataset.column_names)}; "
            "build the data set anew with hrm-hf data"
        )
    if not len(dataset):
        raise ValueError(f"{data}: split {split!r} holds no puzzle")
    return dataset.select_columns(names).with_format("numpy")[:]


def _voting(data: str, info, network):
    """Votes are possible for ARC with `test_puzzles.json` beside the data."""
    from ..puzzles.arc_voting import TEST_PUZZLES_FILE, ArcVoting, load_test_puzzles

    if info.task != "arc" or not Path(data, TEST_PUZZLES_FILE).exists():
        return None
    return ArcVoting(load_test_puzzles(data), info.identifiers)


def _vote(voting):
    def add(input_ids, puzzle_identifiers, solution) -> None:
        predictions, q_halt = solution.predictions.cpu().numpy(), solution.q_halt.float().cpu().numpy()
        voting.update(input_ids.numpy(), puzzle_identifiers.numpy(), predictions, q_halt)

    return add


def _write(result: dict[str, Any], out: Path, name: str) -> dict[str, str]:
    from ..trainer.plots import plot_evaluation

    out.mkdir(parents=True, exist_ok=True)
    file = out / RESULTS_FILE
    file.write_text(json.dumps(result, indent=1))
    plot = plot_evaluation(
        result["metrics"], out / "evaluation.png", f"{name}, {result['dataset']} ({result['split']})"
    )
    return {"results": str(file), "plot": str(plot)}
