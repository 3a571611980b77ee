"""Group relative policy optimization: train a causal language model on rewards for its own completions. Uses TRL.

    python training/run_grpo.py --recipe training/recipes/grpo_go_coder.yaml --model_name_or_path runs/go_nano \\
        --train_data problems.jsonl
    python training/run_grpo.py --model_name_or_path runs/sft --train_data prompts.jsonl --reward "regex:^yes" \\
        --output_dir runs/grpo

Rows are prompts; see `hrm_hf/text/answers.py` for rows and `hrm_hf/golang/rewards.py` for rewards. Resume a
killed run with `--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script(extra="trl")

from hrm_hf.golang.rewards import RewardArguments, reward_functions
from hrm_hf.io.usage import one_line_errors
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.trl_arguments import GrpoArguments
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((AnswerDataArguments, GrpoArguments, RewardArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.text.post_training import GrpoRun
    from hrm_hf.trainer.run import run_training

    run_training(GrpoRun(reward_functions, *options))


if __name__ == "__main__":
    with one_line_errors():
        main()
