"""Train a regressor that infers cosmological parameters from maps: hrm_cosmo, or the CNN baseline cosmo_cnn.

    python training/run_cosmo.py --recipe training/recipes/cosmo_debug.yaml
    torchrun --nproc_per_node 4 training/run_cosmo.py --recipe training/recipes/cosmo_multi_gpu.yaml
    python training/run_cosmo.py --recipe training/recipes/cosmo_lognormal_64_cpu.yaml --noise_sigma 0.0124

Resume a killed run with `--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script()

from hrm_hf.cosmology.arguments import CosmoDataArguments, CosmoTrainingArguments
from hrm_hf.io.usage import one_line_errors
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((CosmoDataArguments, CosmoTrainingArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.cosmology.run import RegressionRun
    from hrm_hf.trainer.run import run_training

    run_training(RegressionRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
