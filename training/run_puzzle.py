"""Trains a puzzle reasoner (HRM, TRM) on Sudoku, mazes, ARC or your own grids.

    python training/run_puzzle.py --recipe training/recipes/sudoku_demo.yaml
    accelerate launch training/run_puzzle.py --recipe training/recipes/sudoku_extreme_1k.yaml --learning_rate 7e-5
    torchrun --nproc_per_node 2 training/run_puzzle.py --recipe ... --use_cpu true

A killed run continues with `--resume_from_checkpoint last`.
"""

import os
import signal


if __name__ == "__main__" and os.name == "posix":  # imports take seconds: signals to stop wait until training listens
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import time
from pathlib import Path

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.cli.data import ensure_built
from hrm_hf.hub.cards import record_evaluation
from hrm_hf.puzzles.arguments import PuzzleDataArguments, PuzzleTrainingArguments
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.dataset import IDENTIFIERS_FILE, load_puzzle_dataset, load_puzzle_info
from hrm_hf.puzzles.trainer import PuzzleTrainer
from hrm_hf.trainer.adapters import TuningArguments, quantization_config, save_trained, settle_base, with_adapters
from hrm_hf.trainer.plots import plot_evaluation, plot_training
from hrm_hf.trainer.preemption import exit_if_preempted
from hrm_hf.trainer.recipes import ModelArguments, build_config, hardware_of, parse_recipe, save_recipe, write_results
from hrm_hf.trainer.run_folder import claim_run_folder


def main() -> None:
    model_args, data_args, args, tuning_args = parse_recipe(
        (ModelArguments, PuzzleDataArguments, PuzzleTrainingArguments, TuningArguments), description=__doc__
    )
    claim_run_folder(args)
    settle_base(model_args, tuning_args)
    with args.main_process_first(desc="building the data set"):
        ensure_built(data_args.data_path, data_args.build_data)
    info = load_puzzle_info(data_args.data_path)
    train = _rows(data_args, data_args.train_split, data_args.max_train_rows)
    held_out = _rows(data_args, data_args.eval_split, data_args.max_eval_rows)

    out = Path(args.output_dir)
    if args.should_save:  # before the trainer, which turns some options into what the model means by them
        save_recipe(out / "recipe.yaml", model_args, data_args, args, tuning_args)
        (out / IDENTIFIERS_FILE).write_text(info.identifiers_json())
    model = _model(model_args, data_args, args, tuning_args, info)
    sizes = model.num_parameters(include_puzzle_table=True), model.num_parameters()
    model = with_adapters(model, tuning_args)
    trainer = PuzzleTrainer(model=model, args=args, train_dataset=train, eval_dataset=held_out)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    exit_if_preempted(trainer)
    seconds = time.perf_counter() - started
    puzzles = trainer.puzzles_begun()

    whole = save_trained(trainer, tuning_args)
    metrics = {}
    if held_out is not None:
        trainer.evaluate()
        metrics = trainer.last_evaluation
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    write_results(
        out,
        info.task,
        metrics,
        train_seconds=round(seconds, 1),
        hardware=hardware_of(args),
        steps=trainer.state.global_step,
        puzzles=puzzles,
        parameters=sizes[0],
        parameters_without_puzzle_table=sizes[1],
    )
    plot_training(trainer.state.log_history, out / "training.png")
    if metrics:
        plot_evaluation(metrics, out / "evaluation.png", title=f"{info.task}, {metrics['count']} held-out puzzles")
    if metrics and whole:
        record_evaluation(out, metrics, data_args.data_path, data_args.eval_split, sizes[1])
    trainer.push_results()
    print(f"model, results and plots: {out}")


def _rows(data_args: PuzzleDataArguments, split: str | None, limit: int | None) -> PuzzleRows | None:
    if not split:
        return None
    dataset = load_puzzle_dataset(data_args.data_path, split)
    return PuzzleRows(dataset if limit is None else dataset.select(range(min(limit, len(dataset)))))


def _model(model_args: ModelArguments, data_args: PuzzleDataArguments, args, tuning_args: TuningArguments, info):
    from transformers import set_seed

    set_seed(args.seed)
    if model_args.model_name_or_path is None:
        config = build_config(model_args, **info.config_fields())
        model = AutoModelForPuzzleSolving.from_config(config, attn_implementation=model_args.attn_implementation)
    else:
        model = AutoModelForPuzzleSolving.from_pretrained(
            model_args.model_name_or_path,
            attn_implementation=model_args.attn_implementation,
            quantization_config=quantization_config(tuning_args, model_args.model_name_or_path, args.bf16),
        )
        if tuning_args.saves_adapter and info.num_puzzle_identifiers != model.config.num_puzzle_identifiers:
            raise ValueError(
                f"the data have {info.num_puzzle_identifiers} puzzle identifiers, the base has "
                f"{model.config.num_puzzle_identifiers}, and no adapter fits a base with another table: give "
                "--merge_adapter true, or change the base's table before (--freeze_weights true)"
            )
        model.adapt_puzzle_embeddings(info.num_puzzle_identifiers, data_args.puzzle_embeddings)
    if data_args.freeze_weights:
        if tuning_args.adapts:
            raise ValueError("freeze_weights trains the puzzle table alone, lora_rank adapters too: leave out one")
        model.requires_grad_(False)
    return model


if __name__ == "__main__":
    main()
