"""Direct preference optimisation: teaches a causal language model which of two answers is the better one. By TRL.

    python training/run_dpo.py --recipe training/recipes/dpo_rlm_mhc.yaml --model_name_or_path runs/sft_rlm_mhc \\
        --train_data preferences.jsonl
    python training/run_dpo.py ... --lora_rank 8       # an adapter: the weights as they are need no second copy

Rows are prompts with a chosen and a rejected answer, see `hrm_hf/text/answers.py`. A killed run continues with
`--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # before the imports below
    start_script(extra="trl")

from hrm_hf.io.usage import one_line_errors
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.post_training import DpoArguments, DpoRun
from hrm_hf.trainer.run import run_training


def main() -> None:
    run_training(DpoRun, (AnswerDataArguments, DpoArguments), __doc__)


if __name__ == "__main__":
    with one_line_errors():
        main()
