"""Check that every architecture behaves as transformers, accelerate and torch expect.

    python -m benchmarks.package.citizens [--quick] [--only trainer graph] [--out benchmarks/results]
    PYTHONPATH=OTHER_CHECKOUT python -m benchmarks.package.citizens     # check another version of the package

The models are the tiny ones from the tests, with a few thousand weights each. A check is a function that takes an
architecture's name, raises an error if the model breaks the claim, and may return a note. The table lists which
architectures pass each check, and why others fail. The exit status is 1 if a check fails.
`tests/common/test_citizens.py` runs the same functions.
"""

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import every
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from datasets import Dataset
from tolerances import assert_equal_but_for_rounding

from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from . import citizens_generation, citizens_training


ROWS = 4
# Models whose training step is not one graph: the part that is, and why the rest is not (docs/training.md).
PARTS_IN_A_GRAPH = {
    **dict.fromkeys(every.PUZZLES, "the ACT step: rows of the puzzle table get their gradient by a hook"),
    "hrm_lm": "the model without its loss, which selects the tokens that are still active",
    "hrm_go_coder": "the model without its loss, which selects the tokens with labels",
}


@dataclass(frozen=True)
class Check:
    """Claim about a model, and the function that checks it. Checks that compile or start processes are `slow`."""

    claim: str
    function: Callable[[str], str | None]
    architectures: tuple[str, ...]
    slow: bool


CHECKS: list[Check] = []


def check(claim: str, architectures: Iterable[str] = every.ARCHITECTURES, slow: bool = False):
    """Register the decorated function as a check."""

    def add(function: Callable[[str], str | None]):
        CHECKS.append(Check(claim, function, tuple(architectures), slow))
        return function

    return add


def main() -> None:
    parser = make_parser(__doc__, quick="compile for one architecture of each kind")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="run only checks whose claim contains one of these words"
    )
    args = parser.parse_args()
    silence()
    first = {every.PUZZLES[0], every.CAUSAL_LMS[0], every.REGRESSORS[0]}
    rows = []
    for one in CHECKS:
        if args.only and not any(word.lower() in one.claim.lower() for word in args.only):
            continue
        names = [name for name in one.architectures if not (args.quick and one.slow) or name in first]
        rows.append(run(one, names))
        print_row(rows[-1])
    failed = sum(len(row["failed"]) for row in rows)
    print(f"{sum(map(len, (row['passed'] for row in rows)))} passed, {failed} failed")
    write_report(args, "citizens", {"checks": rows, "machine": machine(), "versions": library_versions()})
    sys.exit(1 if failed else 0)


def silence() -> None:
    """Turn off warnings, logs and progress bars, so that only the table is printed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()


def run(one: Check, architectures: Iterable[str]) -> dict[str, Any]:
    """Run a check; return the architectures that passed, with notes, and those that failed, with reasons."""
    row: dict[str, Any] = {"claim": one.claim, "passed": {}, "failed": {}}
    start = time.process_time()
    for name in architectures:
        try:
            row["passed"][name] = one.function(name) or ""
        except Exception as error:  # any library error counts as a failure
            said = " ".join(str(error).split())
            row["failed"][name] = f"{type(error).__name__}: {said[:300]}"
    return row | {"cpu_seconds": round(time.process_time() - start, 1)}


def print_row(row: dict[str, Any]) -> None:
    passed, failed = row["passed"], row["failed"]
    print(f"{'FAIL' if failed else 'pass'}  {row['claim']}: {len(passed)} of {len(passed) + len(failed)}", flush=True)
    for name, reason in failed.items():
        print(f"      {name}: {reason[:150]}")
    for note in dict.fromkeys(filter(None, passed.values())):
        print(f"      {', '.join(name for name, one in passed.items() if one == note)}: {note}")


def compiled(function: Callable, backend: str = "aot_eager") -> Callable:
    """Compile a function to exactly one graph. The default backend uses AOTAutograd with eager kernels."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def labelled(architecture: str, rows: int = ROWS) -> dict[str, torch.Tensor]:
    return {**every.inputs(architecture, rows), **every.targets(architecture, rows)}


def plain_trainer(architecture: str, folder: str, **options) -> transformers.Trainer:
    """Return a transformers Trainer whose data set has the model's inputs and labels as columns."""
    torch.manual_seed(0)
    data = Dataset.from_dict({name: value.tolist() for name, value in labelled(architecture).items()})
    data.set_format("torch")
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=2,
        per_device_eval_batch_size=2, learning_rate=1e-3, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(every.model(architecture), arguments, train_dataset=data, eval_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# ---- Trainer ----


@check("Trainer: eval_loss chooses the best checkpoint")
def best_checkpoint(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain_trainer(
            architecture, folder, max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
        )  # fmt: skip
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(losses) == 2 and trainer.state.best_metric == min(losses), losses


@check("Trainer: predict gives the logits first, and nothing but a row for each example")
def predictions(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain_trainer(architecture, folder)
        found = trainer.predict(trainer.eval_dataset)
    given = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    assert all(len(one) == ROWS for one in given), [one.shape for one in given]
    assert len(found.label_ids) == ROWS
    with torch.no_grad():
        expected = every.model(architecture)(**labelled(architecture)).logits
    assert_equal_but_for_rounding(torch.from_numpy(given[0]), expected)


@check("Trainer: true maps alone have an eval_loss, as `labels`, or as `kappa` with label_names", every.MASS_MAPPERS)
def maps_alone(architecture: str) -> None:
    for name in ("labels", "kappa"):
        given = {**every.inputs(architecture, ROWS), name: every.targets(architecture, ROWS)["kappa"]}
        rows = [{key: value[row] for key, value in given.items()} for row in range(ROWS)]
        with tempfile.TemporaryDirectory() as folder:
            found = plain_trainer(architecture, folder, label_names=[name]).evaluate(rows)["eval_loss"]
        with torch.no_grad():
            losses = [
                every.model(architecture)(**transformers.default_data_collator(rows[i : i + 2])).loss
                for i in range(0, ROWS, 2)
            ]
        torch.testing.assert_close(torch.tensor(found), torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


@check("Trainer: the loss of accumulated batches is divided once")
def accumulation(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain_trainer(architecture, folder)
    model, given = every.model(architecture), labelled(architecture)
    if not trainer.model_accepts_loss_kwargs:
        return  # Trainer divides
    count = (given["labels"][:, 1:] != -100).sum()
    loss, doubled = model(**given).loss, model(**given, num_items_in_batch=2 * count).loss
    assert_equal_but_for_rounding(doubled, loss / 2, msg="Trainer leaves the division to the model, which divides not")


# ---- weights elsewhere ----


@torch.no_grad()
def used(architecture: str, model: torch.nn.Module) -> list[torch.Tensor]:
    """Return what users get from a model: logits, plus generated text or solved boards."""
    found = [model(**labelled(architecture)).logits]
    if architecture in every.CAUSAL_LMS:
        texts = {name: value[:2] for name, value in every.padded(architecture).items()}
        found.append(model.generate(**texts, max_new_tokens=3, do_sample=False))
        # Any prompt must work, even for the Go coder, which has to write a plan before the code.
        prompt = {"input_ids": every.inputs(architecture, 1)["input_ids"][:, :5]}
        found.append(model.generate(**prompt, max_new_tokens=3, do_sample=False))
    if architecture in every.PUZZLES:
        found.append(model.solve(every.inputs(architecture)["input_ids"]).predictions)
    return found


def assert_used_alike(architecture: str, model: torch.nn.Module) -> None:
    for found, expected in zip(used(architecture, model), used(architecture, every.model(architecture)), strict=True):
        assert_equal_but_for_rounding(found.float(), expected.float())


@check("accelerate: cpu_offload and disk_offload change nothing")
def offloaded(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for offload, buffers_too in ((cpu_offload, False), (partial(disk_offload, offload_dir=folder), True)):
            model = every.model(architecture)
            offload(model, offload_buffers=buffers_too)
            assert all(parameter.is_meta for parameter in model.parameters())
            assert_used_alike(architecture, model)
            assert not buffers_too or all(weight.is_meta for weight in model.state_dict().values())


@check("from_pretrained: device_map with all weights on disk, and with as many as fit into memory")
def divided(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = every.model(architecture)
        model.save_pretrained(folder)
        size = sum(parameter.nbytes for parameter in model.parameters())
        places = set()
        everything = {"device_map": {"": "disk"}, "offload_buffers": True}
        some = {"device_map": "auto", "max_memory": {"cpu": int(0.8 * size)}}
        for options in (everything, some):
            loaded = type(model).from_pretrained(folder, offload_folder=f"{folder}/away", **options).eval()
            places.add(frozenset(map(str, loaded.hf_device_map.values())))
            assert_used_alike(architecture, loaded)
        assert frozenset({"disk"}) in places


@check("accelerate: a module given to an offloaded base model stays where it is", ("hrm_lm",))
def module_among_the_arguments(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = every.model(architecture, exit_criterion="kl")
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, device_map={"": "disk"}, offload_folder=f"{folder}/away").eval()
        given = every.inputs(architecture)
        with torch.no_grad():
            expected = model.model(**given, logits_fn=model.lm_head).halt_steps
            assert torch.equal(loaded.model(**given, logits_fn=loaded.lm_head).halt_steps, expected)


# ---- graphs ----


@check("torch.compile: a forward is one graph", slow=True)
def one_graph(architecture: str) -> None:
    model, given = every.model(architecture), every.inputs(architecture)
    with torch.no_grad():
        expected = model(**given).logits
        assert_equal_but_for_rounding(compiled(model, backend="eager")(**given).logits, expected)


@check("torch.export: a forward", slow=True)
def exported(architecture: str) -> None:
    model, given = every.model(architecture), every.inputs(architecture)
    if architecture in every.CAUSAL_LMS:
        given["use_cache"] = False
    program = torch.export.export(model, (), given)
    with torch.no_grad():
        assert_equal_but_for_rounding(program.module()(**given).logits, model(**given).logits)


@check("torch.compile: a training step is one graph, or the part that the docs name", slow=True)
def training_graph(architecture: str) -> str | None:
    losses = []
    for compiling in (False, True):
        model, given = every.model(architecture).train(), labelled(architecture)
        if compiling and architecture in every.PUZZLES:
            model.act_step = compiled(model.act_step)
        elif compiling and architecture in PARTS_IN_A_GRAPH:
            model.model.forward = compiled(model.model.forward)
        elif compiling:
            model.forward = compiled(model.forward)
        torch.manual_seed(0)
        losses.append(model(**given).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)
    return PARTS_IN_A_GRAPH.get(architecture)


# ---- calls ----


@check("a misspelled argument of the head or the base model raises TypeError")
def misspelled(architecture: str) -> None:
    model, given = every.model(architecture), every.inputs(architecture)
    for one in (model, model.base_model):
        try:
            one(**given, lables=every.labels(architecture))
        except TypeError as error:
            assert "lables" in str(error), error
        else:
            raise AssertionError(f"{type(one).__name__} silently accepted the misspelled argument lables=")


@check("output_attentions gives weights or raises")
def attention_weights(architecture: str) -> str | None:
    given, note = every.inputs(architecture), None
    for attention in ("eager", "sdpa"):
        model = every.model(architecture)
        if attention == "eager" or model._supports_sdpa:
            model.set_attn_implementation(attention)
        for one in (model, model.base_model):
            try:
                found = one(**given, output_attentions=True)
            except ValueError as error:
                assert "output_attentions" in str(error), error
                note = note or f"raises with {attention}"
            else:
                weights = found.get("attentions")
                assert weights and all(torch.is_tensor(weight) for weight in weights), f"{attention}: {weights}"
    return note


@check("logits are of the shape of the labels, and id2label names them", every.OF_MAPS)
def named_columns(architecture: str) -> None:
    model, given = every.model(architecture), labelled(architecture)
    assert list(model.config.id2label.values()) == model.config.target_names, model.config.id2label
    assert model.config.label2id == {name: index for index, name in model.config.id2label.items()}
    output = model(**given)
    assert output.logits.shape == output.std.shape == given["labels"].shape, output.logits.shape
    s_8 = output.s_8 / (output.logits[:, 1] * (output.logits[:, 0] / 0.3).sqrt())
    # s_8 is nonlinear, so its predicted mean only approximates s_8 of the predicted means
    assert output.s_8_std.shape == (ROWS,) and ((s_8 > 0.8) & (s_8 < 1.2)).all()


# ---- the checks in citizens_generation.py and citizens_training.py ----

for claim, function, architectures, slow in (*citizens_generation.CHECKS, *citizens_training.CHECKS):
    check(claim, architectures, slow)(function)


if __name__ == "__main__":
    main()
