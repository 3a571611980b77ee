"""Trains a regressor of cosmological parameters on maps: hrm_cosmo, or the CNN baseline cosmo_cnn.

    python training/run_cosmo.py --recipe training/recipes/cosmo_debug.yaml
    torchrun --nproc_per_node 4 training/run_cosmo.py --recipe training/recipes/cosmo_multi_gpu.yaml
    python training/run_cosmo.py --recipe training/recipes/cosmo_lognormal_64_cpu.yaml --noise_sigma 0.0124

A killed run continues with `--resume_from_checkpoint last`.
"""

import os
import signal


if __name__ == "__main__" and os.name == "posix":  # imports take seconds: signals to stop wait until training listens
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import time
from pathlib import Path

import torch
from transformers.integrations import is_wandb_available

import hrm_hf  # noqa: F401  (registers our architectures)
from hrm_hf.cosmology.arguments import CosmoDataArguments, CosmoTrainingArguments
from hrm_hf.cosmology.regression import (
    card_figures,
    ensure_maps,
    evaluate_on_test,
    fit_posterior_scale,
    fit_statistics,
    load_maps,
    load_regressor,
    load_test_maps,
    map_collator,
)
from hrm_hf.cosmology.trainer import RegressionTrainer
from hrm_hf.hub.cards import record_evaluation
from hrm_hf.trainer.adapters import TuningArguments, quantization_config, save_trained, settle_base, with_adapters
from hrm_hf.trainer.plots import plot_cosmo_training
from hrm_hf.trainer.preemption import exit_if_preempted
from hrm_hf.trainer.recipes import ModelArguments, hardware_of, parse_recipe, save_recipe, write_results
from hrm_hf.trainer.run_folder import claim_run_folder


def main() -> None:
    model_args, data_args, args, tuning_args = parse_recipe(
        (ModelArguments, CosmoDataArguments, CosmoTrainingArguments, TuningArguments), description=__doc__
    )
    claim_run_folder(args)
    settle_base(model_args, tuning_args)
    if "wandb" in args.report_to and not is_wandb_available():  # the library notices it when the maps are drawn
        raise RuntimeError("report_to=wandb, and wandb is not installed: pip install wandb, or --report_to none")
    with args.main_process_first(desc="building the data set"):
        wanted = (data_args.train_samples or 0) + (data_args.val_samples or 0)
        ensure_maps(data_args.data_path, data_args.build_data, wanted)
    maps = load_maps(data_args)
    quantised = quantization_config(tuning_args, model_args.model_name_or_path, args.bf16)
    model, extractor = load_regressor(model_args, data_args, maps.info, args.seed, quantised)
    parameters = model.num_parameters()  # before it may be sharded
    model = with_adapters(model, tuning_args)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    out = Path(args.output_dir)
    if args.should_save:
        print(maps.describe())
        print(args.describe_learning_rate())
        save_recipe(out / "recipe.yaml", model_args, data_args, args, tuning_args)

    collator = map_collator(extractor, model, data_args, args.seed)
    if model_args.model_name_or_path is None:
        fit_statistics(model, maps.train, collator)
    trainer = RegressionTrainer(
        model=model,
        args=args,
        train_dataset=maps.train,
        eval_dataset=maps.validation,
        data_collator=collator,
        processing_class=extractor,
    )
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    exit_if_preempted(trainer)
    seconds = time.perf_counter() - started

    # The scale is a field of the config: sharded weights cannot run in one process, and an adapter has no config.
    no_scale = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or tuning_args.saves_adapter
    if args.fit_posterior_scale and maps.validation and not no_scale:
        with trainer.averaged_weights():
            fit_posterior_scale(model, maps.validation, trainer.data_collator, args.per_device_eval_batch_size)
    whole = save_trained(trainer, tuning_args)
    validation = trainer.evaluate() if maps.validation else {}
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    metrics = _test(trainer, extractor, maps.info, data_args)
    write_results(
        out,
        "cosmology-regression",
        metrics,
        validation={name.removeprefix("eval_"): value for name, value in validation.items()},
        train_seconds=round(seconds, 1),
        hardware=hardware_of(args),
        steps=trainer.state.global_step,
        epochs=trainer.state.epoch,
        parameters=parameters,
        posterior_scale=model.config.posterior_scale,
        peak_learning_rate=args.peak_learning_rate,
        data={"kind": maps.info.kind, "train_maps": len(maps.train), "noise_sigma": data_args.noise_sigma},
    )
    plot_cosmo_training(trainer.state.log_history, out / "training.png")
    if metrics and whole:
        settings = {"noise_sigma": data_args.noise_sigma} if data_args.noise_sigma else {}
        record_evaluation(out, card_figures(metrics), data_args.data_path, "test", parameters, **settings)
    trainer.push_results()
    print(f"model, feature extractor, results and plots: {out}")


def _test(trainer: RegressionTrainer, extractor, info, data_args: CosmoDataArguments) -> dict:
    rows = load_test_maps(data_args, trainer.args.seed)
    if rows is None:
        return {}
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        print("no test: the weights are sharded, and one process alone cannot run the model; see `hrm-hf eval cosmo`")
        return {}
    with trainer.averaged_weights():
        folder = Path(trainer.args.output_dir)
        return evaluate_on_test(trainer.model, extractor, rows, info, folder, trainer.args.per_device_eval_batch_size)


if __name__ == "__main__":
    main()
