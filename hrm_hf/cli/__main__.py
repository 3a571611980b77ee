"""Entry point of `python -m hrm_hf.cli`, which runs `hrm-hf`."""

from hrm_hf_start import main


main()
