"""`make bench`: every benchmark in its quick form, one line a figure."""

import subprocess
import sys
from pathlib import Path


HELPERS = {
    "citizens_generation.py",
    "comparisons.py",
    "floor_plan.py",
    "report.py",
    "run_all.py",
    "plain_puzzle.py",
    "lm_models.py",
    "quantisation_quick.py",
    "subjects.py",
}
# A trained model or a data set.
NEED_INPUT = {"cosmology_mass_networks.py", "cosmology_two_steps.py", "go_repairs.py", "go_rewards.py"}


def main() -> None:
    for script in sorted(Path(__file__).parent.glob("*.py")):
        if script.name in NEED_INPUT:
            print(f"{script.name}: left out, it takes a trained model or a data set; see --help")
        elif script.name not in HELPERS:
            subprocess.run([sys.executable, str(script), "--quick"], check=True)


if __name__ == "__main__":
    main()
