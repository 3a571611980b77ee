"""Run every benchmark with --quick and print one line per value: `make bench`."""

import subprocess
import sys
from pathlib import Path


HERE = Path(__file__).parent
# Not run: modules that other benchmarks use, and `package.size`, which measures source code.
HELPERS = {
    "package.citizens_generation",
    "package.comparisons",
    "package.quantization_quick",
    "package.size",
    "package.subjects",
    "puzzles.plain",
    "text.models",
}
# Not run: scripts that need a trained model or a data set.
NEED_INPUT = {"cosmology.mass_networks", "cosmology.two_steps", "golang.rewards", "text.pretrained_loop"}


def main() -> None:
    for script in sorted(HERE.glob("*/*.py")):
        name = f"{script.parent.name}.{script.stem}"
        if name in NEED_INPUT:
            print(f"{name}: skipped; it needs a trained model or a data set, see --help")
        elif name not in HELPERS:
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--quick"], check=True, cwd=HERE.parent)


if __name__ == "__main__":
    main()
