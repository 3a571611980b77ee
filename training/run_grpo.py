"""Group relative policy optimisation: a causal language model learns from rewards of what it writes itself. By TRL.

    python training/run_grpo.py --recipe training/recipes/grpo_go_coder.yaml --model_name_or_path runs/go_nano \\
        --train_data problems.jsonl
    python training/run_grpo.py --model_name_or_path runs/sft --train_data prompts.jsonl --reward "regex:^yes" \\
        --output_dir runs/grpo

Rows are prompts, see `hrm_hf/text/answers.py`; rewards are described in `hrm_hf/golang/rewards.py`. A killed run
continues with `--resume_from_checkpoint last`.
"""

import os
import signal


if __name__ == "__main__" and os.name == "posix":  # imports take seconds: signals to stop wait until training listens
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import hrm_hf  # noqa: F401  (registers our architectures)
from hrm_hf.golang.rewards import RewardArguments, reward_functions
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.post_training import GrpoArguments, GrpoTrainer, finish, prepare
from hrm_hf.trainer.adapters import TuningArguments
from hrm_hf.trainer.recipes import ModelArguments, parse_recipe


def main() -> None:
    *arguments, rewards = parse_recipe(
        (ModelArguments, AnswerDataArguments, GrpoArguments, TuningArguments, RewardArguments), description=__doc__
    )
    run = prepare("grpo", *arguments, rewards)
    trainer = GrpoTrainer(reward_funcs=reward_functions(rewards.reward, run.tokenizer), **run.for_trainer)
    finish(trainer, run)


if __name__ == "__main__":
    main()
