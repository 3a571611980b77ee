"""`python -m hrm_hf.cli` is `hrm-hf`."""

from . import main


main()
