"""Train the Go coder, or any other causal language model, on token streams made from records of Go tasks.

    hrm-hf data go-tokenizer ... && hrm-hf data go ...
    python training/run_go_coder.py --recipe training/recipes/go_nano_cpu.yaml --train_data train.jsonl \\
        --eval_data validation.jsonl --tokenizer_name tokenizer
    accelerate launch training/run_go_coder.py --recipe training/recipes/go_base.yaml --train_data train.jsonl.gz
    python training/run_go_coder.py --recipe training/recipes/llama_26m_baseline.yaml --train_data train.jsonl

Resume a killed run with `--resume_from_checkpoint last`. `run_clm.py` pre-trains the same model on raw Go text;
`--model_name_or_path` continues from there.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script()

from hrm_hf.golang.arguments import GoDataArguments, GoTrainingArguments
from hrm_hf.io.usage import one_line_errors
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((GoDataArguments, GoTrainingArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.golang.run import GoCoderRun
    from hrm_hf.trainer.run import run_training

    run_training(GoCoderRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
