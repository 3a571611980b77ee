"""Plan the training of a language model on this machine's GPUs, then start it.

    python training/launch.py --model hrm-lm-50m
    python training/launch.py --model hrm-lm-100m --gpus 4 --train_data corpus.jsonl --max_steps 20000
    python training/launch.py --model hrm-lm-100m --dry_run --gpus 8 --gpu_memory 24GB
    python training/launch.py --model hrm-lm-10m-byte --cpu --processes 2 --train_data input.txt

Equivalent to `hrm-hf launch`. Unknown flags are passed to run_clm.py.
"""

from hrm_hf_start import start_program


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_program()

import sys

import typer

from hrm_hf.cli.launch import CONTEXT, launch
from hrm_hf.io.usage import one_line_errors


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command(context_settings=CONTEXT)(launch)
    app(prog_name=f"python {sys.argv[0]}")


if __name__ == "__main__":
    with one_line_errors():
        main()
