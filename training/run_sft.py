"""Supervised fine-tuning: teaches a causal language model to answer as given. By TRL, with the loss of the model.

    python training/run_sft.py --recipe training/recipes/sft_hrm_lm.yaml \\
        --model_name_or_path runs/hrm_lm_shakespeare --train_data answers.jsonl
    python training/run_sft.py ... --lora_rank 8       # an adapter on those weights, which stay as they are

Rows are prompts with completions, conversations or texts, see `hrm_hf/text/answers.py`. A killed run continues with
`--resume_from_checkpoint last`.
"""

import os
import signal


if __name__ == "__main__" and os.name == "posix":  # imports take seconds: signals to stop wait until training listens
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import hrm_hf  # noqa: F401  (registers our architectures)
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.post_training import SftArguments, SftTrainer, finish, prepare
from hrm_hf.trainer.adapters import TuningArguments
from hrm_hf.trainer.recipes import ModelArguments, parse_recipe


def main() -> None:
    arguments = parse_recipe((ModelArguments, AnswerDataArguments, SftArguments, TuningArguments), description=__doc__)
    run = prepare("sft", *arguments)
    finish(SftTrainer(**run.for_trainer), run)


if __name__ == "__main__":
    main()
