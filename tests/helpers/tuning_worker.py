"""Training scripts that tests run in sequence, under torchrun or in a single process.

    torchrun --nproc_per_node 2 tests/helpers/tuning_worker.py FOLDER

runs what FOLDER/runs.json lists as [script, options]; each process writes what it saw to FOLDER/seen-RANK.json.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import yaml


SCRIPTS = Path(__file__).parents[2] / "training"


def run_all(folder: Path) -> list[dict]:
    """Run every script of the list, and record how each run was distributed."""
    from accelerate import PartialState

    torch.set_num_threads(1)
    seen = []
    for number, (script, options) in enumerate(json.loads((folder / "runs.json").read_text())):
        recipe = folder / f"run-{number}-{os.environ.get('RANK', '0')}.yaml"
        recipe.write_text(yaml.safe_dump(options))
        sys.argv = [script, "--recipe", str(recipe)]
        # Not as "__main__", which would block the signals of the tests.
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name=script)["main"]()
        state = PartialState()
        seen.append({"processes": state.num_processes, "distributed": state.distributed_type.value})
    return seen


if __name__ == "__main__":
    out = Path(sys.argv[1])
    seen = run_all(out)
    (out / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
