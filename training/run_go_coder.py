"""Trains the Go coder on records of Go tasks, or any other causal language model on the same token streams.

    hrm-hf data go-tokenizer ... && hrm-hf data go ...
    python training/run_go_coder.py --recipe training/recipes/go_nano_cpu.yaml --train_data train.jsonl \\
        --eval_data validation.jsonl --tokenizer_name tokenizer
    accelerate launch training/run_go_coder.py --recipe training/recipes/go_base.yaml --train_data train.jsonl.gz
    python training/run_go_coder.py --recipe training/recipes/llama_26m_baseline.yaml --train_data train.jsonl

A killed run continues with `--resume_from_checkpoint last`. `run_clm.py` pre-trains the same model on raw Go text;
`--model_name_or_path` continues from there.
"""

import os
import signal


if __name__ == "__main__" and os.name == "posix":  # imports take seconds: signals to stop wait until training listens
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import inspect
import time
from pathlib import Path

import hrm_hf  # noqa: F401  (registers our architectures)
from hrm_hf.golang.arguments import GoDataArguments, GoTrainingArguments
from hrm_hf.golang.callbacks import GoValidationCallback
from hrm_hf.golang.data.collator import GoCoderCollator, GoStreamBuilder, load_go_streams
from hrm_hf.golang.trainer import GoCoderTrainer
from hrm_hf.hub.cards import record_evaluation
from hrm_hf.registry import ARCHITECTURES
from hrm_hf.text.causal_lm import load_causal_lm, load_tokenizer
from hrm_hf.trainer.adapters import TuningArguments, quantization_config, save_trained, settle_base, with_adapters
from hrm_hf.trainer.plots import plot_lm_training
from hrm_hf.trainer.preemption import exit_if_preempted
from hrm_hf.trainer.recipes import ModelArguments, hardware_of, parse_recipe, save_recipe, write_results
from hrm_hf.trainer.run_folder import claim_run_folder


def main() -> None:
    model_args, data_args, args, tuning_args = parse_recipe(
        (ModelArguments, GoDataArguments, GoTrainingArguments, TuningArguments), description=__doc__
    )
    claim_run_folder(args)
    settle_base(model_args, tuning_args)
    tokenizer = load_tokenizer(data_args.tokenizer_name, model_args.model_name_or_path)
    builder = GoStreamBuilder(tokenizer, **data_args.budgets())
    with args.main_process_first(desc="reading records and writing them as tokens"):
        train, validation = _load(data_args, args, builder)
    quantised = quantization_config(tuning_args, model_args.model_name_or_path, args.bf16)
    model = load_causal_lm(model_args, tokenizer, data_args.max_length, args.seed, quantised)
    if hasattr(model.config, "context_budget"):
        model.config.update(data_args.budgets(positions=False))  # prompts are cut as they were in training
    parameters = model.num_parameters()  # before it may be sharded
    model = with_adapters(model, tuning_args)
    out = Path(args.output_dir)
    if args.should_save:
        print(f"train: {train.describe()}")
        print(f"validation: {validation.describe()}" if validation else "validation: none")
        save_recipe(out / "recipe.yaml", model_args, data_args, args, tuning_args)

    takes_decisions = "decision_positions" in inspect.signature(model.forward).parameters
    trainer = GoCoderTrainer(
        model=model,
        args=args,
        train_dataset=train.rows,
        eval_dataset=validation.rows if validation else None,
        data_collator=GoCoderCollator(tokenizer.pad_token_id, takes_decisions, args.refinement_warmup),
        processing_class=tokenizer,
    )
    _add_validation(trainer, builder, train, validation)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    exit_if_preempted(trainer)
    seconds = time.perf_counter() - started

    whole = save_trained(trainer, tuning_args)
    metrics = trainer.evaluate() if validation else {}
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    write_results(
        out,
        "go-coder",
        {name.removeprefix("eval_"): value for name, value in metrics.items()},
        train_seconds=round(seconds, 1),
        hardware=hardware_of(args),
        steps=trainer.state.global_step,
        epochs=trainer.state.epoch,
        parameters=parameters,
        data={"train": train.counts, "validation": validation.counts if validation else None},
    )
    plot_lm_training(trainer.state.log_history, out / "training.png")
    if metrics and whole and type(model.config) in ARCHITECTURES:
        record_evaluation(out, metrics, data_args.eval_data[0], "validation", parameters)
    trainer.push_results()
    print(f"model, tokenizer, results and plot: {out}")


def _load(data_args: GoDataArguments, args: GoTrainingArguments, builder: GoStreamBuilder):
    """Training and evaluation rows; the latter are None without --eval_data."""
    if not data_args.train_data:
        raise ValueError("no records: give --train_data with files that `hrm-hf data go` writes")
    options = {
        "on_bad_line": data_args.on_bad_line,
        "num_workers": data_args.preprocessing_num_workers,
        "cache_dir": data_args.data_cache_dir,
    }
    train = load_go_streams(
        data_args.train_data, builder, training=True, plain=args.refinement_warmup > 0,
        max_records=data_args.max_train_records, **options,
    )  # fmt: skip
    if not data_args.eval_data:
        return train, None
    return train, load_go_streams(
        data_args.eval_data, builder, training=False, max_records=data_args.max_eval_records, **options
    )


def _add_validation(trainer: GoCoderTrainer, builder: GoStreamBuilder, train, validation) -> None:
    args = trainer.args
    if not args.validation_frequency:
        return
    if validation is None:
        raise ValueError(f"validation_frequency={args.validation_frequency} needs held-out records: give --eval_data")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            f"validation_frequency={args.validation_frequency}: the weights are sharded, and one process alone cannot "
            "write code; train with DDP, or set it to 0"
        )
    from hrm_hf.golang import best_validator

    validator = best_validator(args.validator)
    trainer.add_callback(GoValidationCallback(trainer, builder, validation.records, validator, train.records))


if __name__ == "__main__":
    main()
