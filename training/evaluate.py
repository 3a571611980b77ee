"""Accept the original HRM's evaluation command unchanged and run `hrm-hf eval puzzles`.

    python training/evaluate.py checkpoint="checkpoints/Sudoku-extreme-small ACT-torch/RUN"
    python training/evaluate.py checkpoint=HRM/checkpoints/PROJECT/RUN/step_26040 --out runs/evaluation

The checkpoint is the folder of one of our runs, or a step_N file from the original code. The script first converts
such a file to a folder next to it. It prints the equivalent `hrm-hf` command; you can add that command's flags.
"""

from hrm_hf_start import start_program


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_program()

import os
import shlex
import sys

from hrm_hf import cli
from hrm_hf.io.usage import one_line_errors
from hrm_hf.puzzles.pretrain_options import evaluation_arguments


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    if os.environ.get("RANK", "0") != "0":
        return  # only rank 0 evaluates
    arguments = evaluation_arguments(sys.argv[1:])
    print(shlex.join(["hrm-hf", *arguments]) + "\n", flush=True)
    sys.argv = ["hrm-hf", *arguments]
    cli.main()


if __name__ == "__main__":
    with one_line_errors():
        main()
