"""The build: what is beside the package in the repository goes into the wheel, as `hrm_hf/_resources`.

`hrm_hf/resources.py` finds it there. Everything else is declared in setup.cfg, and MANIFEST.in says what a source
distribution holds.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


HERE = Path(__file__).parent
RESOURCES = (
    "model_cards/*.md",
    "pretrained/*/*",
    "training/*.py",
    "training/recipes/*.yaml",
    "training/recipes/data/*",
    "training/slurm/*.sbatch",
    "accelerate_configs/*.yaml",
    "benchmarks/results/puzzle_presets.json",
)


class BuildWithResources(build_py):
    """Copies the resources too, except in an editable install, whose package finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for pattern in RESOURCES:
            files = sorted(HERE.glob(pattern))
            if not files:
                raise FileNotFoundError(f"{HERE / pattern} matches nothing, and the package needs it")
            for file in files:
                target = Path(self.build_lib, "hrm_hf", "_resources", file.relative_to(HERE))
                self.mkpath(str(target.parent))
                self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": BuildWithResources})
