"""The original HRM's `python evaluate.py checkpoint=...`, said as `hrm-hf eval puzzles MODEL DATA`.

`checkpoint` is one of our run folders (or a checkpoint-N in one), or the original's `step_N` or its folder, which are
converted first. The data are those of the run: our recipe.yaml or the original's all_config.yaml names them.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..io.bounded_files import load_yaml
from .convert import CONFIG_FILE, convert_original, find_weights
from .dataset import INFO_FILE
from .original_config import data_folders
from .pretrain_options import data_size


RECIPES = ("recipe.yaml", "../recipe.yaml")


def evaluation_arguments(words: Sequence[str]) -> list[str]:
    """Arguments of `hrm-hf` for `checkpoint=... [--flags of eval puzzles]`; converts model and data where it must.

    All ACT steps are taken (`--halt fixed`), as the original does, unless the flags say otherwise.

    Raises:
        ValueError: another key, or none.
        FileNotFoundError: no such checkpoint, or its data are not where its configuration says.
    """
    start = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    given = dict(word.partition("=")[::2] for word in words[:start])
    unknown = sorted(given.keys() - {"checkpoint"})
    if unknown or not given.get("checkpoint"):
        mend = {
            "save_outputs": "; tensors are not saved, results and plots are: --out DIR",
            "data_path": "; the data are those of the run. For others: hrm-hf eval puzzles MODEL DATA",
        }
        what = f"unknown key {unknown[0]!r}{mend.get(unknown[0], '')}" if unknown else "no checkpoint"
        raise ValueError(f"{what} (expected checkpoint=FOLDER)")
    model, data = _model_and_data(Path(given["checkpoint"]))
    flags = list(words[start:])
    halt = [] if any(flag.partition("=")[0] == "--halt" for flag in flags) else ["--halt", "fixed"]
    return ["eval", "puzzles", str(model), str(data), *halt, *flags]


def _model_and_data(checkpoint: Path) -> tuple[Path, Path]:
    if not checkpoint.exists():
        raise FileNotFoundError(f"checkpoint={checkpoint} does not exist; expected a run's folder, or step_N")
    if (checkpoint / "config.json").exists():
        return checkpoint, _data_of_recipe(checkpoint)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if not (folder / CONFIG_FILE).exists():
        raise FileNotFoundError(
            f"checkpoint={checkpoint}: {folder} holds neither our config.json nor the original's {CONFIG_FILE}"
        )
    weights = find_weights(checkpoint)
    model = folder / f"hrm_hf-{weights.name}"
    convert_original(weights, model, "hrm")
    return model, _imported(data_folders(load_yaml(folder / CONFIG_FILE)), folder)


def _data_of_recipe(folder: Path) -> Path:
    for file in (folder / name for name in RECIPES):
        if file.exists():
            return Path(load_yaml(file)["data_path"])
    raise FileNotFoundError(
        f"checkpoint={folder} has no recipe.yaml that names its data; say them: hrm-hf eval puzzles "
        f"{shlex.quote(str(folder))} DATA"
    )


def _imported(named: list[Path], folder: Path) -> Path:
    """The data set that an all_config.yaml names, read into ours beside the checkpoint if it has the original's files.

    Raises:
        FileNotFoundError: it is not there; the path is relative to the working folder, as in the original.
    """
    if not named:
        raise FileNotFoundError(f"{folder / CONFIG_FILE} names no data_path; use hrm-hf eval puzzles MODEL DATA")
    size = data_size(named[0])
    if size.layout == "ours":
        return named[0]
    out = folder / f"data-{size.fingerprint}"
    if not (out / INFO_FILE).exists():
        from .dataset import save_puzzle_dataset
        from .npy_layout import read_original

        save_puzzle_dataset(*read_original(named[0]), out)
    return out
