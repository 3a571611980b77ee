"""Every architecture meets the expectations of transformers, accelerate and torch without our helpers.

The checks come from `benchmarks/package/citizens.py`. They compare results of plain library functions with the model
itself.
"""

import re

import every
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tolerances import assert_equal_but_for_rounding
from transformers import Trainer, TrainingArguments, pipeline

from benchmarks.package import citizens


CASES = [
    pytest.param(one.function, name, id=f"{one.claim}-{name}", marks=pytest.mark.slow if one.slow else ())
    for one in citizens.CHECKS
    for name in one.architectures
]


@pytest.mark.parametrize(("check", "architecture"), CASES)
def test_model_meets_the_librarys_expectations(check, architecture):
    check(architecture)


def test_failed_check_is_reported_with_its_reason_and_others_continue():
    def fails_for_one(architecture):
        if architecture == "hrm_lm":
            raise ValueError("because of\nthis")

    row = citizens.run(citizens.Check("claim", fails_for_one, (), False), ("hrm_lm", "rlm_mhc"))
    assert row["failed"] == {"hrm_lm": "ValueError: because of this"} and row["passed"] == {"rlm_mhc": ""}


# ---- weights elsewhere ----


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("architecture", every.PUZZLES)
def test_offloaded_position_embeddings_are_fetched_on_use(architecture, place, tmp_path):
    """Learned positions are used without calling their module, so no hook loads them. Referee: the model in memory."""

    def use(model):
        return model.solve(every.inputs(architecture)["input_ids"], max_steps=2).logits

    fields = {"pos_encodings": "learned"}
    model = every.model(architecture, **fields)
    cpu_offload(model) if place == "memory" else disk_offload(model, str(tmp_path))
    assert_equal_but_for_rounding(use(model), use(every.model(architecture, **fields)))


@every.with_variants(every.ARCHITECTURES)
def test_modules_kept_in_float32_exist(architecture, fields):
    """The names of modules that keep their precision exist in the head and in its base model."""
    head = every.model(architecture, **fields)
    for model in (head, head.base_model):
        weights = list(model.state_dict())
        named = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        assert [name for name in named if not any(re.search(name, weight) for weight in weights)] == []


def test_device_of_an_offloaded_model_is_that_of_its_inputs():
    model = every.model("hrm_go_coder")
    cpu_offload(model)
    assert model.device == model.base_model.device == torch.device("cpu")
    assert every.model("rlm_mhc").to("meta").device == torch.device("meta")  # no hooks


# ---- the Go coder's decisions ----


def test_training_rejects_decision_positions_without_labels():
    model, given = every.model("hrm_go_coder"), citizens.labelled("hrm_go_coder")
    given["decision_positions"] = torch.zeros(citizens.ROWS, 1, dtype=torch.long)
    assert model(**given).loss.isfinite()
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        model.train()(**given)


def test_a_plain_trainer_learns_decisions_and_evaluates_them(tmp_path):
    """Referee: the model's own loss for the same batch."""
    given = citizens.labelled("hrm_go_coder")
    given["decision_positions"] = torch.full((citizens.ROWS, 1), 20)
    given["decision_labels"] = torch.arange(citizens.ROWS).unsqueeze(1) % 3
    rows = [{name: value[row] for name, value in given.items()} for row in range(citizens.ROWS)]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        per_device_eval_batch_size=citizens.ROWS,
    )  # fmt: skip
    trainer = Trainer(every.model("hrm_go_coder"), arguments, eval_dataset=rows)
    expected = every.model("hrm_go_coder")(**given)
    assert expected.refinement_loss > 0
    found = trainer.predict(rows)
    assert found.metrics["test_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    logits, decisions = found.predictions
    assert logits.shape == expected.logits.shape and decisions.shape == expected.refinement_logits.shape


# ---- arguments ----


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_misspelled_argument_suggests_the_right_one(architecture):
    model, given = every.model(architecture), every.inputs(architecture)
    with pytest.raises(TypeError, match=r"lables.*labels"):
        model(**given, lables=given["input_ids"])
    with pytest.raises(TypeError, match=r"pozition_ids.*position_ids"):
        model.base_model(**given, pozition_ids=None)
    model(**given, token_type_ids=torch.zeros_like(given["input_ids"]))  # as some tokenizers return


@pytest.mark.parametrize("architecture", (*every.CAUSAL_LMS, *every.PUZZLES))
def test_mismatched_labels_and_tokens_are_named(architecture):
    model, given = every.model(architecture), every.inputs(architecture)
    for wrong in (given["input_ids"][:, :-1], given["input_ids"][:1]):
        with pytest.raises(ValueError, match=re.escape(f"labels has shape {list(wrong.shape)}")):
            model(**given, labels=wrong)
    for token in (-1, 10**6):
        with pytest.raises(ValueError, match=f"labels={token}: .*vocab_size"):
            model(**every.inputs(architecture), labels=torch.full_like(given["input_ids"], token))
        given["input_ids"][0, 3] = token
        for call in (model.solve, model) if architecture in every.PUZZLES else (model,):
            with pytest.raises(ValueError, match=f"input_ids={token}: .*vocab_size"):
                call(**given)
    if architecture in every.CAUSAL_LMS:
        with pytest.raises(ValueError, match=r"input_ids has \d+ tokens.*max_position_embeddings"):
            model.generate(torch.full((1, model.config.max_position_embeddings + 1), 5))


def test_pipeline_without_a_model_says_to_name_one():
    for task in ("mass-mapping", "cosmology-regression", "recursive-text-generation"):
        with pytest.raises(ValueError, match=f'model=None: .*{task}", model='):
            pipeline(task)


# ---- graphs ----


@pytest.mark.slow
@pytest.mark.parametrize("architecture", every.PUZZLES)
def test_a_board_without_a_table_trains_as_one_graph(architecture):
    """The docs name the table as the only reason for graph breaks. Referee: the uncompiled step."""
    losses = []
    for compiling in (False, True):
        model = every.model(architecture, puzzle_emb_ndim=0, puzzle_emb_len=0).train()
        forward = citizens.compiled(model) if compiling else model
        torch.manual_seed(0)
        losses.append(forward(**citizens.labelled(architecture)).loss)
    torch.testing.assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", citizens.PARTS_IN_A_GRAPH)
def test_documented_graph_breaks_exist(architecture):
    """The docs and this list must change with the model."""
    model = every.model(architecture).train()
    # The compiler wraps an error about data-dependent sizes as a user error, or raises it unchanged.
    by_data = torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode
    with pytest.raises((torch._dynamo.exc.TorchDynamoException, by_data)):
        citizens.compiled(model, backend="eager")(**citizens.labelled(architecture))
