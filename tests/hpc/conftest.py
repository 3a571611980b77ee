"""One Slurm cluster for all tests of this folder, and a folder that looks like a checkout to submit from."""

import os
import sys
from pathlib import Path

import pytest
import slurm_cluster
import yaml

from hrm_hf.puzzles.build import ensure_built


ROOT = Path(__file__).parents[2]
RECIPE = {
    "model_type": "trm_puzzle", "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
    "per_device_train_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 3, "max_steps": 12, "eval_split": "",
    "save_strategy": "no", "seed": 1,
    "config_overrides": {
        "hidden_size": 32, "num_attention_heads": 2, "L_layers": 1, "H_cycles": 1, "L_cycles": 2, "puzzle_emb_ndim": 0,
        "halt_max_steps": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def cluster():
    """A running Slurm whose jobs use this interpreter with one thread."""
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    with slurm_cluster.running_cluster() as running:
        running.environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
        running.environment |= {"USE_CPU": "1", "GPUS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        yield running


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A folder with our scripts, a tiny data set, and the recipe of a tiny puzzle model."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("training", "accelerate_configs", "tests"):
        os.symlink(ROOT / name, folder / name)
    ensure_built(str(folder / "boards"), "sudoku --size 4 --num-train 40 --num-test 8")
    recipe = {**RECIPE, "data_path": str(folder / "boards")}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def submit_folder(checkout, tmp_path_factory):
    """An empty folder below the checkout, without a logs folder or files of other jobs."""
    folder = checkout / tmp_path_factory.mktemp("submit").name
    folder.mkdir()
    return folder
