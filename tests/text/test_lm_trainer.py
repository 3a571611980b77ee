"""`CausalLMTrainer`: metrics, skipped steps, exact resuming, DDP. Referee: torch alone.

Referees: transformers' Trainer, torch's cross entropy on the whole data, and an uninterrupted run.
"""

import copy
import itertools
import json
import math
from pathlib import Path

import pytest
import tiny
import tiny_lm
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny_lm import logged, text, weights
from tolerances import assert_copied
from torch._dynamo.utils import counters
from transformers import EarlyStoppingCallback, SchedulerType, Trainer, TrainerCallback, TrainingArguments

from hrm_hf import HrmLmForCausalLM
from hrm_hf.hub.manifests import WEIGHT_AVERAGE_FILE, find_corruption, list_checkpoints, write_manifest
from hrm_hf.models.presets_hrm_lm import LOOP
from hrm_hf.puzzles.trainer import PuzzleTrainingArguments
from hrm_hf.text.arguments import LmTrainingArguments
from hrm_hf.text.trainer import CausalLMTrainer, compile_layers, segment_schedule
from hrm_hf.trainer import NonFiniteError
from hrm_hf.trainer.optim import AdamATan2


ARCHITECTURES = ["llama", "gpt2", "hrm_lm"]
DETERMINISTIC = {"halt_exploration_prob": 0.0}


@pytest.fixture
def make(tmp_path):
    """Make a trainer with the folder `tmp_path / "run"`: `make(model or architecture, **arguments)`."""

    def build(model="llama", **arguments):
        model = tiny_lm.model(model) if isinstance(model, str) else model
        return tiny_lm.trainer(tmp_path / "run", model, **arguments)

    return build


def cross_entropy(model, data: Dataset) -> float:
    """Compute the mean loss over all labelled tokens, by torch alone."""
    batch = data.with_format("torch")[:]
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).item()


def optimizer_of(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


# ---- training metrics ----


@pytest.mark.parametrize("architecture", ["llama", "hrm_lm"])
def test_log_is_the_mean_over_all_labeled_tokens_since_the_last_log(make, architecture):
    # The learning rate is 0, so the log of three steps of two micro-batches must equal one pass over the data.
    model = tiny_lm.model(architecture, **(DETERMINISTIC if architecture == "hrm_lm" else {}))
    data = text(24, ignored=True)
    steps = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 3, "halt_warmup_ratio": 0.0}
    trainer = make(model, train=data, learning_rate=0.0, **steps)
    trainer.train()
    entry = logged(trainer)[0]
    batch = data.with_format("torch")[:]
    with torch.no_grad():
        whole = model.train()(**batch)
    assert entry["lm_loss"] == pytest.approx(cross_entropy(model, data), rel=1e-5)
    assert entry["perplexity"] == pytest.approx(math.exp(entry["lm_loss"]))
    if architecture == "hrm_lm":
        parts = {n: v.item() for n, v in whole.items() if n.endswith("_loss")}
        parts |= {n: v.item() for n, v in whole.metrics.items() if n not in {*tiny_lm.NOT_OVER_TOKENS, "perplexity"}}
        assert {"lm_loss", "ponder_loss", "q_halt_loss", "deep_supervision_loss", "avg_steps"} <= parts.keys()
        assert {n: entry[n] for n in parts} == pytest.approx(parts, rel=1e-4, abs=1e-6)


def test_loss_and_weights_match_transformers(make, tmp_path):
    options = {"max_steps": 5, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "linear"}
    mine = make("gpt2", **options, weight_decay=0.1)
    mine.train()
    model = tiny_lm.model("gpt2")
    decayed = {p for p in model.parameters() if p.ndim >= 2}
    groups = [{"params": list(decayed)}, {"params": [p for p in model.parameters() if p not in decayed]}]
    groups[1]["weight_decay"] = 0.0
    args = TrainingArguments(
        output_dir=str(tmp_path / "library"), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-2, warmup_steps=2, save_strategy="no", **options,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    library = Trainer(model, args, train_dataset=text(24), optimizers=(optimizer, None))
    library.train()
    for name in ("loss", "grad_norm", "learning_rate"):
        expected = [entry[name] for entry in library.state.log_history if "loss" in entry]
        assert [entry[name] for entry in logged(mine)] == pytest.approx(expected, rel=1e-5)
    for name, value in weights(library.model).items():
        torch.testing.assert_close(weights(mine.model)[name], value, rtol=0, atol=1e-5, msg=name)


def test_speed_counts_the_labeled_tokens_after_the_shift(make, monkeypatch):
    data, found = text(24, ignored=True), []
    trainer = make(train=data, max_steps=6)
    monkeypatch.setattr(
        trainer, "_training_logs", lambda sums, steps, seconds: found.append((sums["tokens"], steps)) or {}
    )
    trainer.train()
    expected = sum(label != -100 for row in data["labels"] for label in row[1:])
    assert sum(tokens for tokens, _ in found) == expected
    assert [steps for _, steps in found] == [1] * 6


def test_label_smoothing_hides_training_perplexity_but_not_evaluation_perplexity(make):
    trainer = make(max_steps=2, label_smoothing_factor=0.1)
    trainer.train()
    assert "perplexity" not in logged(trainer)[0]
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(cross_entropy(trainer.model, trainer.eval_dataset), rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert trainer.label_smoother is not None


def test_library_label_smoothing_is_rejected_where_it_would_not_shift_labels(make):
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*HrmLmForCausalLM.*label_smoothing="):
        make("hrm_lm", label_smoothing_factor=0.1)


# ---- evaluation ----


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_evaluation_is_the_mean_over_all_labeled_tokens(make, architecture):
    trainer = make(architecture, bytes_per_token=4.0)  # 10 rows in batches of 4, labels of other lengths
    metrics = trainer.evaluate()
    expected = cross_entropy(trainer.model, trainer.eval_dataset)
    assert metrics["eval_lm_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert metrics["eval_bits_per_byte"] == pytest.approx(expected / math.log(2) / 4.0, rel=1e-5)
    assert metrics["eval_tokens"] == sum(x != -100 for row in trainer.eval_dataset["labels"] for x in row[1:])
    if architecture == "hrm_lm":
        batch = trainer.eval_dataset.with_format("torch")[:]
        with torch.no_grad():
            whole = trainer.model(**batch)
        for name in ("avg_steps", "convergence_rate", "token_accuracy"):
            assert metrics[f"eval_{name}"] == pytest.approx(whole.metrics[name].item(), rel=1e-4)
        for name in ("ponder_loss", "q_halt_loss", "deep_supervision_loss", "loss"):
            assert metrics[f"eval_{name}"] == pytest.approx(whole[name].item(), rel=1e-4)


def test_evaluation_without_labeled_tokens_is_rejected(make):
    data = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[-100] * 3]})
    with pytest.raises(ValueError, match=r"evaluation.*-100"):
        make(evaluation=data).evaluate()


def test_evaluation_uses_averaged_weights_and_restores_the_raw_ones(make):
    trainer = make(ema_rate=0.9)
    trainer.train()
    raw = weights(trainer.model)
    found = trainer.evaluate()["eval_lm_loss"]
    assert_copied(weights(trainer.model), raw)
    of_raw = cross_entropy(trainer.model, trainer.eval_dataset)
    with trainer.averaged_weights():
        of_average = cross_entropy(trainer.model, trainer.eval_dataset)
    assert found == pytest.approx(of_average, rel=1e-5) != pytest.approx(of_raw, rel=1e-5)


# ---- non-finite steps ----


@pytest.mark.parametrize("part", ["loss", "gradient"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_nonfinite_step_changes_neither_weights_nor_moments(make, part, max_grad_norm):
    model = tiny_lm.model("llama")
    tiny_lm.break_at(model, {3, 6}, part)  # the first micro-batch of step 2, the second of step 3
    before, states = [], []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            before.append(weights(model))
            moments = getattr(optimizer, "optimizer", optimizer).state.values()
            states.append([value.clone() for state in moments for value in state.values()])

    trainer = make(model, gradient_accumulation_steps=2, max_steps=5, max_grad_norm=max_grad_norm, callbacks=[Watch()])
    result = trainer.train()
    moved = [any((a[n] != b[n]).any() for n in a) for a, b in itertools.pairwise(before)]
    assert moved == [True, False, False, True]
    for earlier in states[2:4]:
        assert all(torch.equal(a, b) for a, b in zip(states[1], earlier, strict=True))
    entries = logged(trainer)
    assert [entry.get("nonfinite_steps") for entry in entries] == [None, 1, 2, 2, 2]
    assert [entry["loss"] for entry in entries[1:3]] == [0.0, 0.0]
    assert all(math.isfinite(entry[name]) for entry in entries[3:] for name in ("loss", "lm_loss", "grad_norm"))
    assert math.isfinite(result.training_loss)
    assert all(value.isfinite().all() for value in weights(model).values())


def test_too_many_nonfinite_steps_in_a_row_stop_the_run(make):
    model = tiny_lm.model("llama")
    tiny_lm.break_at(model, set(range(3, 100)))
    trainer = make(model, max_steps=20, max_nonfinite_steps=3)
    with pytest.raises(NonFiniteError, match=r" 3 steps.*step 5 .*good step"):
        trainer.train()


def test_a_resumed_run_remembers_the_skipped_steps(make):
    model = tiny_lm.model("llama")
    tiny_lm.break_at(model, {3, 4})
    make(model, max_steps=4, save_strategy="steps", save_steps=4).train()
    resumed = make(max_steps=5)
    resumed.train("last")
    assert (resumed.nonfinite_steps, resumed.nonfinite_in_a_row) == (2, 0)


# ---- optimizer and schedule ----


def test_weight_decay_skips_vectors_and_scalars(make):
    model = tiny_lm.model("llama")
    model.model.gate = torch.nn.Parameter(torch.ones(3))  # transformers would decay this name
    model.model.temperature = torch.nn.Parameter(torch.ones(()))
    trainer = make(model)
    assert {"model.gate", "model.temperature"} <= set(Trainer.get_decay_parameter_names(trainer, model))
    names = set(trainer.get_decay_parameter_names(model))
    assert names == {n for n, p in model.named_parameters() if p.ndim >= 2}


@pytest.mark.parametrize("architecture", ["gpt2", "hrm_lm"])
def test_adam_atan2_trains_a_language_model_with_decay_on_matrices_alone(make, architecture):
    trainer = make(architecture, adam_atan2=True, weight_decay=0.3, learning_rate=1e-3)
    before = weights(trainer.model)
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert isinstance(optimizer, AdamATan2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    matrices, vectors = ({p.ndim for p in group["params"]} for group in optimizer.param_groups)
    assert min(matrices) >= 2 and vectors == {1}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)
    still = [name for name, value in weights(trainer.model).items() if torch.equal(value, before[name])]
    assert still == []


def test_cosine_ends_at_its_floor_and_other_schedules_match_transformers(make):
    trainer = make(max_steps=6, learning_rate=1.0, lr_min_ratio=0.1, max_grad_norm=0.0)
    trainer.create_optimizer_and_scheduler(6)
    rates = [trainer.lr_scheduler.lr_lambdas[0](step) for step in range(6)]
    assert rates[0] == 0.5 and rates[1] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    other = make(max_steps=6, learning_rate=1.0, lr_scheduler_type="constant_with_warmup")
    other.create_optimizer_and_scheduler(6)
    assert [other.lr_scheduler.lr_lambdas[0](step) for step in range(6)] == [0, 0.5, 1, 1, 1, 1]


# ---- backpropagation warm-up, progress, arguments ----


def schedules(trainer, checkpoint=None) -> dict:
    """Train, and return the schedule of each step."""
    seen = {}

    def note(module, args, kwargs):
        if module.training:
            seen[trainer.state.global_step] = kwargs["schedule"]

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    return seen


def test_schedules_follow_the_step(make):
    given = {"bp_warmup_ratio": 0.6, "halt_warmup_ratio": 0.5, "depth_warmup_ratio": 0.2}
    trainer = make("hrm_lm", max_steps=10, **given)
    seen = schedules(trainer)
    assert [seen[step].bp_steps for step in range(10)] == [2, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert [seen[step].halting for step in range(10)] == [False] * 5 + [True] * 5
    assert [seen[step].segments for step in range(10)] == [1, 1] + [None] * 8
    assert trainer.model.config.bp_steps == 4


@pytest.mark.parametrize(("shape", "means"), [("linear", [1, 1, 2, 3, 4, 4]), ("1-sqrt", [1, 1, 2, 2, 3, 4])])
def test_the_mean_depth_grows_after_the_warmup(make, shape, means):
    """Means by the formula: ceil(1 + 3 f(t)) for t = 0, 1/4, 1/2, 3/4, and 4 after the ramp."""
    ramp = {"depth_warmup_ratio": 1 / 6, "depth_ramp_ratio": 4 / 6, "depth_ramp": shape}
    trainer = make(tiny_lm.model("hrm_lm", halt_max_steps=4), max_steps=6, logging_steps=1, **ramp)
    seen = schedules(trainer)
    assert [seen[step].mean_segments for step in range(6)] == means
    logged = [entry["mean_segments"] for entry in trainer.state.log_history if "mean_segments" in entry]
    assert logged == pytest.approx(means)
    assert trainer.state.log_history[0]["avg_steps"] == 1


def test_the_same_steps_of_a_run_keep_one_pass(make):
    args, config = make(keep_one_pass=0.25, model="hrm_lm").args, tiny_lm.model("hrm_lm").config
    kept = [segment_schedule(args, config, step, 1000).segments for step in range(1000)]
    assert 200 < kept.count(1) < 300 and set(kept) == {1, None}
    assert [segment_schedule(args, config, step, 2000).segments for step in range(1000)] == kept


def test_resume_continues_the_schedule(make):
    options = {"max_steps": 10, "bp_warmup_ratio": 0.6, "save_strategy": "steps", "save_steps": 4}
    make("hrm_lm", **options).train()
    resumed = make("hrm_lm", **options)
    seen = schedules(resumed, resumed.args.output_dir + "/checkpoint-4")
    assert {step: each.bp_steps for step, each in seen.items()} == {4: 3, 5: 3, 6: 4, 7: 4, 8: 4, 9: 4}


@pytest.mark.parametrize(
    "changed",
    [{"num_train_epochs": 9}, {"learning_rate": 3e-3, "adam_atan2": True}, {"warmup_steps": 5, "adam_beta1": 0.8},
     {"lr_scheduler_type": "constant", "learning_rate": 1.0}, {"weight_decay": 0.2}, {"max_grad_norm": 0.5}],
)  # fmt: skip
def test_a_resumed_run_follows_the_options_that_it_is_given(make, changed, capsys):
    kept = {"adam_atan2": changed.get("adam_atan2", False), "save_strategy": "steps", "save_steps": 3}
    make(**kept).train()
    resumed, fresh = make(**kept | changed), make(**changed)
    resumed.train(resume_from_checkpoint=resumed.args.output_dir + "/checkpoint-3")
    fresh.args.output_dir += "-fresh"
    fresh.train()
    for one, other in zip(optimizer_of(resumed).param_groups, optimizer_of(fresh).param_groups, strict=True):
        assert {**one, "params": None} == {**other, "params": None}
    rates = [[entry["learning_rate"] for entry in logged(trainer)[3:]] for trainer in (resumed, fresh)]
    assert rates[0] == rates[1] and ("changed options" in capsys.readouterr().out) != ("num_train_epochs" in changed)


def test_options_that_a_checkpoint_cannot_follow_are_rejected(make):
    kept = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    make(**kept).train()
    with pytest.raises(ValueError, match=r"^optim=.*AdamATan2: .*AdamW"):
        make(**kept, adam_atan2=True).train("last")
    with pytest.raises(ValueError, match=r"^lr_scheduler_type=reduce_lr_on_plateau: .*cosine"):
        make(**kept, lr_scheduler_type="reduce_lr_on_plateau").train("last")


def test_checkpoints_keep_the_cache_that_training_switches_off(make):
    trainer = make("llama", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    for folder in (Path(trainer.args.output_dir), Path(trainer.args.output_dir, "checkpoint-1")):
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True


def test_the_gate_can_be_trained_alone(make):
    """All other weights must stay bit-identical."""
    trainer = make("hrm_lm", max_steps=2, train_gate_only=True, learning_rate=1e-2)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    changed = {n for n, value in trainer.model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"model.q_head.weight", "model.q_head.bias"}
    assert trainer.state.log_history[-2]["avg_steps"] == trainer.model.config.halt_max_steps


def test_the_adapters_of_a_loop_can_be_trained_alone(make):
    """All other weights must stay bit-identical, so one pass still equals the decoder."""
    model = HrmLmForCausalLM.from_llama(tiny_lm.model("llama", num_hidden_layers=2), passes=3, pass_lora_rank=2)
    trainer = make(model, max_steps=3, train_adapters_only=True, learning_rate=1e-2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    changed = {n.rpartition(".")[2] for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"gated", "damping", "lora_A", "lora_B"}
    with pytest.raises(ValueError, match="train_adapters_only"):
        make("hrm_lm", train_adapters_only=True)


@pytest.mark.parametrize(
    "given",
    [
        {"depth_warmup_ratio": 0.5},
        {"depth_ramp_ratio": 0.5},
        {"keep_one_pass": 0.1},
        {"train_gate_only": True},
        {"train_adapters_only": True},
    ],
)
def test_segment_options_are_rejected_for_other_models(make, given):
    with pytest.raises(ValueError, match=next(iter(given))):
        make("llama", **given)


def test_backprop_depth_reaches_its_maximum_within_the_warmup(make):
    config = tiny_lm.model("hrm_lm", L_cycles=5, bp_steps=12).config
    args = make().args
    depths = [segment_schedule(args, config, step, 1000).bp_steps for step in range(1000)]
    assert depths == sorted(depths) and depths[0] == 2 and set(depths[200:]) == {12}
    assert set(depths) == set(range(2, 13))


def test_the_global_batch_is_shared_by_accumulated_batches(tmp_path):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "gradient_accumulation_steps": 4}
    assert LmTrainingArguments(**options, global_batch_size=24).per_device_train_batch_size == 6
    with pytest.raises(ValueError, match=r"global_batch_size=10: .* 1 process.* 4 "):
        LmTrainingArguments(**options, global_batch_size=10)


def test_defaults_are_those_of_language_models(tmp_path):
    args = LmTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert (args.weight_decay, args.adam_beta1, args.adam_beta2, args.max_grad_norm) == (0.1, 0.9, 0.95, 1.0)
    assert (args.warmup_steps, args.lr_min_ratio, args.adam_atan2) == (1000, 0.1, False)
    assert args.lr_scheduler_type == SchedulerType.COSINE and args.ddp_find_unused_parameters is False


@pytest.mark.parametrize(
    ("model", "args_class", "message"),
    [
        ("llama", PuzzleTrainingArguments, " PuzzleTrainingArguments.*CausalLMTrainer.*LmTrainingArg"),
        ("llama", TrainingArguments, " TrainingArguments.*CausalLMTrainer.*LmTrainingArguments"),
        ("trm", LmTrainingArguments, "TrmPuzzleForSolving.*puzzle-solving.*CausalLMTrainer.*text-generation"),
    ],
)
def test_arguments_and_models_of_another_task_are_rejected(tmp_path, model, args_class, message):
    model = tiny.model(model) if model == "trm" else tiny_lm.model(model)
    with pytest.raises(TypeError, match=message):
        CausalLMTrainer(model, args_class(output_dir=str(tmp_path), use_cpu=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bp_warmup_ratio": 20.0}, "bp_warmup_ratio=20.0"),
        ({"halt_warmup_ratio": -1.0}, "halt_warmup_ratio=-1.0"),
        ({"early_stopping_patience": 0}, "early_stopping_patience=0"),
        ({"early_stopping_patience": 2}, "early_stopping_patience=2.*--eval_strategy"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        LmTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)


# ---- precision, memory, compilation ----


def test_bf16_is_autocast_over_float32_weights(make):
    model, seen = tiny_lm.model("hrm_lm"), []
    model.model.H_module.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer = make(model, bf16=True, max_steps=2)
    trainer.train()
    assert seen and all(seen)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_checkpointing_changes_no_loss(make, architecture):
    plain = make(architecture, max_steps=3)
    plain.train()
    saving = make(architecture, max_steps=3, activation_checkpointing=True)
    saving.train()
    assert saving.model.is_activation_checkpointing
    expected = [entry["loss"] for entry in logged(plain)]
    assert [entry["loss"] for entry in logged(saving)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "hrm_lm"])
def test_compiled_run_has_the_losses_of_an_eager_run(make, architecture):
    # Compiled random numbers differ, and each unrolled cycle takes long to compile. bp_steps grows from 2 to 3.
    short = {**DETERMINISTIC, "H_cycles": 1, "L_cycles": 2, "halt_max_steps": 2, "bp_steps": 3}
    overrides = short if architecture == "hrm_lm" else {}
    losses = []
    for on in (False, True):
        trainer = make(tiny_lm.model(architecture, **overrides), max_steps=4, torch_compile=on)
        trainer.train()
        losses.append([entry["loss"] for entry in logged(trainer)])
    plain, compiled = losses
    assert compiled == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("saving", [False, True])
def test_a_recurrent_model_needs_two_graphs_for_any_number_of_segments(make, monkeypatch, saving):
    monkeypatch.setattr("hrm_hf.trainer.base.validate_compiler", lambda device: None)  # "eager" needs no compiler
    looped = {**LOOP, "prelude_layers": 1, "segment_sampling": "lognormal_poisson"}
    losses = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager", "activation_checkpointing": saving}):
        torch._dynamo.reset()
        counters.clear()
        trainer = make(tiny_lm.model("hrm_lm", **looped), max_steps=6, **options)
        trainer.train()
        losses.append([entry["loss"] for entry in logged(trainer)])
    plain, compiled = losses
    assert compiled == pytest.approx(plain, abs=1e-5)
    assert counters["stats"]["unique_graphs"] == 2  # a layer whose input needs no gradient, and any other


def test_visits_share_compiled_layers_when_tokens_halt():
    torch._dynamo.reset()
    sizes = {"H_cycles": 2, "L_cycles": 1, "num_l_layers": 2, "num_h_layers": 1, "halt_max_steps": 3, "bp_steps": 3}
    model, graphs = tiny_lm.model("hrm_lm", **sizes).train(), []
    torch.nn.init.normal_(model.model.q_head.weight)
    compile_layers(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    ids = text(2).with_format("torch")["input_ids"][:]
    model(ids, labels=ids).loss.backward()
    # With and without gradients, for three kinds of kept keys: none, those of segment 1, and those of later segments.
    assert len(graphs) <= 6


def test_low_rank_updates_of_twelve_passes_need_two_graphs():
    torch._dynamo.reset()
    model, graphs = tiny_lm.model("hrm_lm", **{**LOOP, "halt_max_steps": 12, "pass_lora_rank": 2}).train(), []
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = text(2).with_format("torch")["input_ids"][:]
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.model.L_module.parameters())])
        compile_layers(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    torch.testing.assert_close(*found)
    assert len(graphs) == 2  # the first pass, and any other


def test_a_copy_of_a_compiled_model_runs_its_own_weights():
    model = tiny_lm.model("hrm_lm", **LOOP).train()
    compile_layers(model, backend="eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.model.L_module.parameters():
            parameter.zero_()
    ids = text(2).with_format("torch")["input_ids"][:]
    twin(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in twin.model.L_module.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- resuming ----

RESUMABLE = {
    "max_steps": 10, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 20, "ema_rate": 0.9,
    "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the trainer of a finished run, cached by name: `uninterrupted(name, architecture, **arguments)`."""
    found = {}

    def train(name, architecture, **arguments):
        if name not in found:
            found[name] = tiny_lm.trainer(tmp_path_factory.mktemp(name), tiny_lm.model(architecture), **arguments)
            found[name].train()
        return found[name]

    return train


@pytest.mark.parametrize("architecture", ["gpt2", "hrm_lm"])
@pytest.mark.parametrize("step", [2, 3, 5])  # in the middle of an epoch, at its end, in the next
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(make, uninterrupted, architecture, step):
    data = text(20, ignored=True)  # 5 batches per epoch: the third step of each epoch has one batch
    whole = uninterrupted(architecture, architecture, train=data, **RESUMABLE)
    resumed = make(tiny_lm.model(architecture, seed=3), train=data, **RESUMABLE)
    resumed.train(f"{whole.args.output_dir}/checkpoint-{step}")
    assert len(logged(whole)) == 10
    assert logged(resumed) == logged(whole)
    assert_copied(weights(resumed.model), weights(whole.model))
    assert_copied(resumed.average.shadow, whole.average.shadow)


@pytest.mark.parametrize("step", [4, 5, 8])  # within the first epoch, at its end, in the second
def test_data_without_a_length_resume_at_their_position(make, uninterrupted, step):
    def stream():
        return text(22, ignored=True).to_iterable_dataset().shuffle(seed=4, buffer_size=8)  # 5.5 steps per epoch

    options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 20}
    whole = uninterrupted("stream", "gpt2", train=stream(), **options)
    resumed = make(tiny_lm.model("gpt2", seed=3), train=stream(), **options)
    resumed.train(f"{whole.args.output_dir}/checkpoint-{step}")
    assert logged(resumed) == logged(whole)
    assert_copied(weights(resumed.model), weights(whole.model))


def test_incomplete_last_step_is_dropped(make):
    # 5 batches in steps of two: the library would add the fifth batch's gradients to the next epoch's first step.
    trainer = make(train=text(20).to_iterable_dataset(), gradient_accumulation_steps=2, max_steps=5)
    sizes, close = [], trainer._close_step
    trainer._close_step = lambda loss: sizes.append(float(trainer.train_metrics.pending["tokens"])) or close(loss)
    trainer.train()
    assert sizes == [2 * 4 * (tiny_lm.BLOCK - 1)] * 5


def test_run_without_a_weight_average_cannot_be_resumed_with_one(make):
    make(max_steps=2, save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match=r"ema_rate=0.9.*checkpoint-2"):
        make(max_steps=4, ema_rate=0.9).train("last")


def test_dropped_weight_average_is_reported(make):
    make(max_steps=2, save_strategy="steps", save_steps=2, ema_rate=0.9).train()
    with pytest.warns(UserWarning, match=r"checkpoint-2.*average.*ema_rate"):
        make(max_steps=4).train("last")


def test_weights_only_checkpoint_cannot_be_resumed(make):
    make(max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True).train()
    with pytest.raises(ValueError, match=r"checkpoint-2.*save_only_model"):
        make(max_steps=4).train("last")


def test_a_checkpoint_of_other_processes_continues_with_a_warning(make, tmp_path):
    make(max_steps=2, save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "run" / "checkpoint-2"
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    (folder / "rng_state_1.pth").write_bytes(b"")
    write_manifest(folder)
    with pytest.warns(UserWarning, match=r"checkpoint-2.* 2 processes.* 1:"):
        make(max_steps=4).train("last")


def test_average_of_sharded_weights_is_rejected(make):
    trainer = make(ema_rate=0.9)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"ema_rate=0\.9.*sharded"):
        trainer.validate_arguments()


def test_corrupted_checkpoint_is_rejected_and_the_last_complete_one_resumes(make, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = make(**options)
    whole.train()
    assert [find_corruption(folder) for folder in list_checkpoints(tmp_path / "run")] == [[], [], []]
    (tmp_path / "run" / "checkpoint-6" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing.*checkpoint-4"):
        make(**options).train("last")
    resumed = make(**options)
    resumed.train("last-complete")
    assert logged(resumed) == logged(whole)


# ---- early stopping and the best model ----


def worsening(trainer, losses) -> None:
    """Make evaluations return these losses for any model."""
    scores = iter(losses)

    def evaluation_loop(*args, metric_key_prefix="eval", **kwargs):
        output = type(trainer).evaluation_loop(trainer, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics["eval_lm_loss"] = next(scores)
        return output

    trainer.evaluation_loop = evaluation_loop


STOPPING = {
    "max_steps": 20, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
    "early_stopping_patience": 3, "save_total_limit": 9, "ema_rate": 0.9,
}  # fmt: skip


def test_a_run_that_no_longer_improves_stops_and_keeps_the_best_weights(make, tmp_path, monkeypatch):
    warned: list[str] = []  # tied weights are saved under only one name
    monkeypatch.setattr("transformers.trainer.logger.warning", lambda text, *rest: warned.append(text))
    trainer = make("gpt2", **STOPPING)
    assert trainer.args.metric_for_best_model == "eval_lm_loss" and trainer.args.load_best_model_at_end
    worsening(trainer, [3.0, 2.0, 2.5, 2.4, 2.3])
    trainer.train()
    assert trainer.state.global_step == 10
    best = tmp_path / "run" / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best) and not [text for text in warned if "missing" in text]
    assert_copied(trainer.average.shadow, load_file(best / WEIGHT_AVERAGE_FILE))


def test_a_resumed_run_stops_where_the_uninterrupted_one_does(make, tmp_path):
    whole = make(**STOPPING)
    worsening(whole, [3.0, 2.0, 2.5, 2.4, 2.3])
    whole.train()
    resumed = make(**STOPPING)
    worsening(resumed, [2.4, 2.3])
    resumed.train(str(tmp_path / "run" / "checkpoint-6"))
    assert resumed.state.global_step == 10
    counters = [
        one.early_stopping_patience_counter
        for one in resumed.callback_handler.callbacks
        if isinstance(one, EarlyStoppingCallback)
    ]
    assert counters == [3]
