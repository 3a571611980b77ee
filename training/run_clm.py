"""Train a causal language model: hrm_lm, rlm_mhc, or any transformers model (llama, gpt2, hrm_text, ...).

    python training/run_clm.py --recipe training/recipes/hrm_lm_shakespeare_cpu.yaml --train_data input.txt
    accelerate launch training/run_clm.py --recipe training/recipes/hrm_lm_50m.yaml --learning_rate 2e-4
    python training/run_clm.py --model_name_or_path runs/hrm_lm_50m --train_data mine.jsonl --output_dir runs/tuned
    python training/run_clm.py ... --lora_rank 8       # an adapter; the base weights stay frozen

Resume a killed run with `--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script()

from hrm_hf.io.usage import one_line_errors
from hrm_hf.text.arguments import LmDataArguments, LmTrainingArguments
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((LmDataArguments, LmTrainingArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.text.run import CausalLMRun
    from hrm_hf.trainer.run import run_training

    run_training(CausalLMRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
