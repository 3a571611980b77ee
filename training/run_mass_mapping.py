"""Train a model to reconstruct mass maps from noisy, masked shear: hrm_mass_mapping, or the U-Net cosmo_unet.

    python training/run_mass_mapping.py --recipe training/recipes/mass_lognormal_64_cpu.yaml
    python training/run_mass_mapping.py --recipe training/recipes/mass_lognormal_64_cpu.yaml --model_type cosmo_unet

Resume a killed run with `--resume_from_checkpoint last`.
"""

from hrm_hf_start import start_script


if __name__ == "__main__":  # runs before the imports below, to hide their messages
    start_script()

from hrm_hf.cosmology.arguments import MassMapDataArguments, MassMapTrainingArguments
from hrm_hf.io.usage import one_line_errors
from hrm_hf.trainer.recipes import parse_script


def main() -> None:
    options = parse_script((MassMapDataArguments, MassMapTrainingArguments), __doc__)
    # Imported here because --help and usage errors do not need these modules.
    from hrm_hf.cosmology.run import MassMapRun
    from hrm_hf.trainer.run import run_training

    run_training(MassMapRun(*options))


if __name__ == "__main__":
    with one_line_errors():
        main()
