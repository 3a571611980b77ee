"""`python -m hrm_hf.cli` is `hrm-hf`."""

from hrm_hf_start import main


main()
