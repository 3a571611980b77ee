"""Train a puzzle reasoner (HRM, TRM) on Sudoku, mazes, ARC or your own grids.

    python training/run_puzzle.py --recipe training/recipes/sudoku_demo_hrm.yaml
    accelerate launch training/run_puzzle.py --recipe training/recipes/sudoku_extreme_1k.yaml --learning_rate 7e-5
    torchrun --nproc_per_node 2 training/run_puzzle.py --recipe ... --use_cpu true

Resume a killed run with `--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script()

from hrm_hf.io.usage import one_line_errors
from hrm_hf.puzzles.arguments import PuzzleDataArguments, PuzzleTrainingArguments
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((PuzzleDataArguments, PuzzleTrainingArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.puzzles.trainer import PuzzleRun
    from hrm_hf.trainer.run import run_training

    run_training(PuzzleRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
