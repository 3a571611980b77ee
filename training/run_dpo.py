"""Direct preference optimization: teach a causal language model which of two answers is better. Uses TRL.

    python training/run_dpo.py --recipe training/recipes/dpo_rlm_mhc.yaml --model_name_or_path runs/sft_rlm_mhc \\
        --train_data preferences.jsonl
    python training/run_dpo.py ... --lora_rank 8       # an adapter; needs no second copy of the model

Rows are prompts with a chosen and a rejected answer; see `hrm_hf/text/answers.py`. Resume a killed run with
`--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script(extra="trl")

from hrm_hf.io.usage import one_line_errors
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.trl_arguments import DpoArguments
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((AnswerDataArguments, DpoArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.text.post_training import DpoRun
    from hrm_hf.trainer.run import run_training

    run_training(DpoRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
