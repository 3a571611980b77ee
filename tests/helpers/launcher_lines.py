"""The lines of a job script that start a launcher on each node, for torchrun and accelerate."""

import re

from hrm_hf.launch.slurm import SlurmJob


def _line(launcher: str) -> str:
    text = SlurmJob(kind="multi_node", launcher=launcher).text()
    return re.search(r'^  exec ("\$PYTHON" -m (?:torch|accelerate)\..*?) "\$@"$', text, re.MULTILINE | re.DOTALL)[1]


TORCHRUN, ACCELERATE = _line("torchrun"), _line("accelerate")
