"""`RegressionTrainer`: means over maps, exact resuming, and results that do not depend on how batches are divided.

Referees: a training loop written out by hand, an uninterrupted run, the model called on all maps at once.
"""

import math

import pytest
import tiny_cosmo
import torch
from safetensors.torch import load_file
from tiny_cosmo import logged, rows, trainer
from transformers import AutoFeatureExtractor, TrainerCallback

from hrm_hf.cosmology.dataset.collator import MapCollator
from hrm_hf.cosmology.trainer import CosmoTrainingArguments, RegressionTrainer
from hrm_hf.hub.manifests import RAW_WEIGHTS_FILE, find_corruption, list_checkpoints
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.puzzles.trainer import PuzzleTrainingArguments
from hrm_hf.text.arguments import LmTrainingArguments


def plain_collator(**options) -> MapCollator:
    return MapCollator(CosmoMapFeatureExtractor.from_config(tiny_cosmo.config()), augment=False, **options)


def whole(dataset, collator, step=-1) -> dict[str, torch.Tensor]:
    """All rows as one batch."""
    batch = collator(dataset.__getitems__(list(range(len(dataset)))))
    return collator.at_step(batch, step) if "training" in batch else batch


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# ---- one step ----


def test_training_steps_match_an_explicit_loop(tmp_path):
    model = tiny_cosmo.model()
    options = {"max_steps": 2, "train": 12, "per_device_train_batch_size": 12, "warmup_steps": 0, "lr_min_ratio": 1}
    one = trainer(tmp_path, model, collator=plain_collator(), **options)
    one.train()
    reference = tiny_cosmo.model().train()
    decayed = [p for p in reference.parameters() if p.ndim >= 2]
    rest = [p for p in reference.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999))
    batch = whole(rows(12, training=True), plain_collator())
    for entry in logged(one):
        optimizer.zero_grad()
        outputs = reference(**batch)
        outputs.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        assert entry["loss"] == pytest.approx(outputs.loss.item(), abs=2e-4)  # transformers rounds logged values
        assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert entry["nll_loss"] == pytest.approx(outputs.nll_loss.item(), rel=1e-4)
        assert entry["rmse_omega_m"] == pytest.approx(outputs.metrics["mse_omega_m"].sqrt().item(), rel=1e-4)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-5, msg=name)


def test_accumulated_batches_make_the_step_of_one_large_batch(tmp_path):
    # Not Adam, which takes a full step even where the gradient is only a rounding error.
    options = {"max_steps": 3, "ema_rate": 0.9, "optim": "sgd", "learning_rate": 1e-2}
    found = {}
    for batch, accumulated in ((8, 1), (2, 4), (3, 4)):  # 20 maps: the last step of an epoch is smaller
        model = tiny_cosmo.model()
        collator = MapCollator(CosmoMapFeatureExtractor.from_config(model.config), shift=True, noise_sigma=0.1)
        one = trainer(
            tmp_path, model, train=20, collator=collator, per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated, **options,
        )  # fmt: skip
        one.train()
        found[batch, accumulated] = logged(one), weights(model)
    for name, value in found[8, 1][1].items():
        torch.testing.assert_close(found[2, 4][1][name], value, rtol=0, atol=1e-5, msg=name)
    for mine, expected in zip(found[2, 4][0], found[8, 1][0], strict=True):
        assert mine == pytest.approx(expected, rel=1e-3, abs=1e-4)
    # 12 maps, then 8 in micro-batches of 3, 3 and 2: the mean is over maps, not over micro-batches.
    large = trainer(
        tmp_path, tiny_cosmo.model(), train=20, per_device_train_batch_size=12, **{**options, "max_steps": 2},
        collator=MapCollator(CosmoMapFeatureExtractor.from_config(tiny_cosmo.config()), shift=True, noise_sigma=0.1),
    )  # fmt: skip
    large.train()
    for mine, expected in zip(found[3, 4][0], logged(large)):
        assert mine["nll_loss"] == pytest.approx(expected["nll_loss"], rel=1e-4)


def test_training_reduces_loss_and_error(tmp_path):
    one = trainer(tmp_path, train=96, max_steps=40, per_device_train_batch_size=16, learning_rate=5e-3)
    before = one.evaluate()
    one.train()
    after = one.evaluate()
    assert after["eval_nll_loss"] < before["eval_nll_loss"] - 0.3
    assert after["eval_rmse_omega_m"] < 0.7 * before["eval_rmse_omega_m"]


# ---- the learning rate ----


@pytest.mark.parametrize("options", [{}, {"adam_atan2": True}])
def test_linear_scaling_acts_on_every_step(tmp_path, options):
    options |= {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "base_batch_size": 4}
    rates = []
    for scale in (False, True):
        one = trainer(tmp_path, scale_learning_rate=scale, max_steps=4, **options)
        one.train()
        rates.append([entry["learning_rate"] for entry in logged(one)])
    assert max(rates[0]) > 0
    assert rates[1] == pytest.approx([3 * rate for rate in rates[0]])
    assert one.args.describe_learning_rate() == (
        "learning rate 0.003 at 12 maps per step: 0.001 * 12 / 4 (scale_learning_rate)"
    )


# ---- evaluation ----


def test_an_evaluation_is_the_mean_over_all_maps(tmp_path):
    one = trainer(tmp_path, collator=plain_collator(noise_sigma=0.5))
    found = one.evaluate()  # 10 maps in batches of 4
    with torch.no_grad():
        outputs = one.model.eval()(**whole(rows(10, seed=1), plain_collator(noise_sigma=0.5)))
    assert found["eval_maps"] == 10
    assert found["eval_loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert found["eval_nll_loss"] == pytest.approx(outputs.nll_loss.item(), rel=1e-5)
    for name in ("omega_m", "sigma_8", "s_8"):
        assert found[f"eval_rmse_{name}"] == pytest.approx(math.sqrt(outputs.metrics[f"mse_{name}"]), rel=1e-5)
    predicted = one.predict(one.eval_dataset)
    for found, name in zip(predicted.predictions, ("logits", "std", "s_8", "s_8_std"), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), outputs[name])


def test_repeated_maps_are_not_counted(tmp_path):
    one = trainer(tmp_path, collator=plain_collator())
    batch = whole(rows(10, seed=1), plain_collator())
    for counting in (10, 6, 0):
        one._rows_that_count = lambda _, counting=counting: counting  # as on a process that repeats its last rows
        one._eval_metrics = type(one.train_metrics)()
        _, predicted, _ = one.prediction_step(one.model.eval(), batch, False)
        assert [len(values) for values in predicted] == [10] * 4  # equal on all processes, for gathering
        one._eval_metrics.keep()
        sums, _, _ = one._eval_metrics.drain(one.accelerator, 0)
        # The names are present even without maps, because processes add up sums of the same names.
        assert sums["maps"] == counting and {"loss", "nll_loss", "mse_s_8"} <= set(sums)
        if counting:
            with torch.no_grad():
                outputs = one.model(**{name: value[:counting] for name, value in batch.items()})
            assert sums["nll_loss"] / counting == pytest.approx(outputs.nll_loss.item(), rel=1e-5)


def test_early_stopping_uses_the_likelihood(tmp_path):
    one = trainer(
        tmp_path, max_steps=20, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        learning_rate=0.0, early_stopping_patience=2,
    )  # fmt: skip
    one.train()
    assert one.args.metric_for_best_model == "eval_nll_loss"
    assert one.state.global_step == 6  # two evaluations without improvement after the first


# ---- resuming ----


@pytest.mark.parametrize("stop", [3, 6])  # in the middle of an epoch of 6 steps, and at its end
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, stop):
    options = {
        "ema_rate": 0.9, "save_strategy": "steps", "save_steps": stop, "max_steps": 10, "eval_strategy": "steps",
        "eval_steps": 4,
    }  # fmt: skip

    def make(folder):
        model = tiny_cosmo.model()
        extractor = CosmoMapFeatureExtractor.from_config(model.config)
        return trainer(folder, model, collator=MapCollator(extractor, shift=True, noise_sigma=0.2), **options)

    alone = make(tmp_path / "alone")
    alone.train()
    alone.save_model()
    killed = make(tmp_path / "killed")

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True

    killed.add_callback(Stop())
    killed.train()
    assert killed.state.global_step == stop and not find_corruption(tmp_path / "killed" / f"checkpoint-{stop}")
    resumed = make(tmp_path / "killed")
    resumed.train(resume_from_checkpoint="last-complete")
    resumed.save_model()
    assert logged(resumed) == logged(alone)
    for name in ("model.safetensors", RAW_WEIGHTS_FILE):
        expected, found = load_file(tmp_path / "alone" / name), load_file(tmp_path / "killed" / name)
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    extractor = AutoFeatureExtractor.from_pretrained(list_checkpoints(tmp_path / "killed")[-1])
    assert extractor.pixel_std == [2.0]


# ---- options and rejected arguments ----


def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    calls, found = {}, {}
    for on in (False, True):
        model = tiny_cosmo.model()
        one = trainer(tmp_path, model, max_steps=2, activation_checkpointing=on)
        count = [0]
        inner = next(module for module in model.model.stem.stages[0].modules() if isinstance(module, torch.nn.Conv2d))
        inner.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        one.train()
        calls[on], found[on] = count[0], (logged(one), weights(model))
    assert found[True][0] == found[False][0]
    for name, value in found[False][1].items():
        torch.testing.assert_close(found[True][1][name], value, rtol=0, atol=1e-6, msg=name)
    assert calls == {False: 2, True: 4}  # each backward pass recomputes the forward


@pytest.mark.parametrize("arguments", [LmTrainingArguments, PuzzleTrainingArguments])
def test_arguments_of_other_models_are_rejected(tmp_path, arguments):
    with pytest.raises(TypeError, match=f"{arguments.__name__}.*CosmoTrainingArguments"):
        RegressionTrainer(tiny_cosmo.model(), arguments(output_dir=str(tmp_path), use_cpu=True))


def test_options_without_effect_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        trainer(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="base_batch_size=0"):
        CosmoTrainingArguments(output_dir=str(tmp_path), use_cpu=True, base_batch_size=0)
