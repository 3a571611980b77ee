"""Accept the original HRM's training command unchanged and run it with training/run_puzzle.py.

    python training/pretrain.py data_path=data/sudoku-extreme-small epochs=500 eval_interval=100 global_batch_size=4 \\
        lr=1e-4 puzzle_emb_lr=1e-4 weight_decay=1.0 puzzle_emb_weight_decay=1.0 \\
        arch.hidden_size=32 arch.H_layers=1 arch.L_layers=1 arch.num_heads=1 arch.expansion=2
    torchrun --nproc_per_node 2 training/pretrain.py data_path=... epochs=500 ...

The script prints the equivalent run_puzzle.py command and saves it as recipe.yaml in the run's folder: checkpoint_path
or checkpoints/PROJECT/RUN. Repeating a command uses the same folder. You can mix in flags of run_puzzle.py:
`--resume_from_checkpoint last-complete` resumes, `--report_to wandb` logs to W&B, `--max_steps 100` makes a short run,
`--save_total_limit 3` keeps only the last three checkpoints. DISABLE_COMPILE and OMP_NUM_THREADS are honored.

Keys, their defaults, and their equivalents here:
"""

import os

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script()

import runpy
import shlex
import sys

from hrm_hf.io.usage import one_line_errors
from hrm_hf.puzzles.pretrain_options import (
    SCRIPT,
    arguments,
    data_size,
    keys_help,
    machine,
    original_run,
    parse_command,
    project_name,
)
from hrm_hf.resources import typed_path


def main() -> None:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__ + keys_help())
        return
    options, flags = parse_command(words)
    recipe = original_run(options, data_size(options["data_path"]), machine(os.environ))
    words = [*arguments(recipe), *flags]
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{shlex.join(['python', typed_path(SCRIPT), *words])}\n", flush=True)
    os.environ["WANDB_PROJECT"] = os.environ.get("WANDB_PROJECT") or project_name(options)  # read by wandb
    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    with one_line_errors():
        main()
