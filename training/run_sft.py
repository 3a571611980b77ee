"""Supervised fine-tuning of a causal language model on example answers, with TRL and the model's own loss.

    python training/run_sft.py --recipe training/recipes/sft_hrm_lm.yaml \\
        --model_name_or_path runs/hrm_lm_shakespeare --train_data answers.jsonl
    python training/run_sft.py ... --lora_rank 8       # an adapter; the base weights stay frozen

Rows are prompts with completions, conversations or texts; see `hrm_hf/text/answers.py`. Resume a killed run with
`--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script(extra="trl")

from hrm_hf.io.usage import one_line_errors
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.trl_arguments import SftArguments
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((AnswerDataArguments, SftArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.text.post_training import SftRun
    from hrm_hf.trainer.run import run_training

    run_training(SftRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
