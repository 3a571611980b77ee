"""Trains a causal language model: hrm_lm, rlm_mhc, or any model of transformers (llama, gpt2, hrm_text, ...).

    python training/run_clm.py --recipe training/recipes/hrm_lm_shakespeare_cpu.yaml --train_data input.txt
    accelerate launch training/run_clm.py --recipe training/recipes/hrm_lm_50m.yaml --learning_rate 2e-4
    python training/run_clm.py --model_name_or_path runs/hrm_lm_50m --train_data mine.jsonl --output_dir runs/tuned
    python training/run_clm.py ... --lora_rank 8       # an adapter on those weights, which stay as they are

A killed run continues with `--resume_from_checkpoint last`.
"""

import os
import signal


if __name__ == "__main__" and os.name == "posix":  # imports take seconds: signals to stop wait until training listens
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import inspect
import time
from pathlib import Path

from transformers import default_data_collator

import hrm_hf  # noqa: F401  (registers our architectures)
from hrm_hf.hub.cards import record_evaluation
from hrm_hf.registry import ARCHITECTURES
from hrm_hf.text.arguments import LmDataArguments, LmTrainingArguments
from hrm_hf.text.callbacks import MhcMonitorCallback
from hrm_hf.text.causal_lm import continue_text, load_causal_lm, load_tokenizer
from hrm_hf.text.corpus import load_text_corpus
from hrm_hf.text.trainer import CausalLMTrainer
from hrm_hf.trainer.adapters import TuningArguments, quantization_config, save_trained, settle_base, with_adapters
from hrm_hf.trainer.plots import plot_lm_training
from hrm_hf.trainer.preemption import exit_if_preempted
from hrm_hf.trainer.recipes import ModelArguments, hardware_of, parse_recipe, save_recipe, write_results
from hrm_hf.trainer.run_folder import claim_run_folder


def main() -> None:
    model_args, data_args, args, tuning_args = parse_recipe(
        (ModelArguments, LmDataArguments, LmTrainingArguments, TuningArguments), description=__doc__
    )
    claim_run_folder(args)
    settle_base(model_args, tuning_args)
    tokenizer = load_tokenizer(data_args.tokenizer_name, model_args.model_name_or_path)
    with args.main_process_first(desc="reading and packing text"):
        corpus = load_text_corpus(data_args, tokenizer, args.seed)
    quantised = quantization_config(tuning_args, model_args.model_name_or_path, args.bf16)
    model = load_causal_lm(model_args, tokenizer, data_args.block_size, args.seed, quantised)
    parameters = model.num_parameters()  # before it may be sharded
    _require_position_ids(model, data_args)
    model = with_adapters(model, tuning_args)
    out = Path(args.output_dir)
    if args.should_save:
        print(corpus.describe())
        save_recipe(out / "recipe.yaml", model_args, data_args, args, tuning_args)

    trainer = CausalLMTrainer(
        model=model,
        args=args,
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        eval_bytes_per_token=corpus.eval_bytes_per_token,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    if hasattr(model, "get_mhc_metrics"):
        trainer.add_callback(MhcMonitorCallback(trainer))
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    exit_if_preempted(trainer)
    seconds = time.perf_counter() - started

    whole = save_trained(trainer, tuning_args)
    metrics = trainer.evaluate() if corpus.validation is not None else {}
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    sample = _continue_prompt(trainer, tokenizer, data_args)
    write_results(
        out,
        "causal-lm",
        {name.removeprefix("eval_"): value for name, value in metrics.items()},
        train_seconds=round(seconds, 1),
        hardware=hardware_of(args),
        steps=trainer.state.global_step,
        tokens=_tokens_seen(trainer, data_args),
        parameters=parameters,
        # The processes that load a stream count for themselves.
        bad_lines=None if data_args.streaming and args.dataloader_num_workers else corpus.bad_lines,
        data=corpus.report(),
        sample=sample,
    )
    plot_lm_training(trainer.state.log_history, out / "training.png")
    if metrics and whole and type(model.config) in ARCHITECTURES:
        source, split = (data_args.eval_data or data_args.train_data)[0], data_args.eval_split
        split = split if data_args.eval_data else f"last {data_args.validation_split_percentage:g} %"
        record_evaluation(out, metrics, source, split, parameters)
    trainer.push_results()
    print(f"model, tokenizer, results and plot: {out}")


def _require_position_ids(model, data_args: LmDataArguments) -> None:
    if data_args.document_mask and "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"--document_mask: {type(model).__name__} takes no position_ids; leave the flag out")


def _continue_prompt(trainer: CausalLMTrainer, tokenizer, data_args: LmDataArguments) -> str | None:
    if not data_args.prompt:
        return None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        print("no continuation of --prompt: the weights are sharded, and one process alone cannot run the model")
        return None
    with trainer.averaged_weights():
        text = continue_text(
            trainer.model, tokenizer, data_args.prompt, data_args.prompt_new_tokens, trainer.args.seed
        )
    print(text)
    return text


def _tokens_seen(trainer: CausalLMTrainer, data_args: LmDataArguments) -> int:
    """Tokens of all steps, padding and context included; the last step of an epoch may be a little smaller."""
    args = trainer.args
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return trainer.state.global_step * rows * data_args.block_size


if __name__ == "__main__":
    main()
