"""Checkpoints of the original HRM, TRM, EqR and SE-RRM code as ours, and of the first two back; no value changes.

    result = convert_original("HRM/checkpoints/Sudoku/run", "hrm-sudoku", architecture="hrm")
    result = convert_original("locuslab/EqR-model/sudoku-extreme/eqr.pth", "eqr-sudoku", architecture="eqr")
    convert_to_original("hrm-sudoku", "back")

A checkpoint, a folder here or a model of the Hub, has

    step_N               torch.save of the state_dict of loss head > ACT wrapper > inner model, possibly compiled; or
                         safetensors, or a training state with `model`, `ema` and `config` (EqR)
    all_config.yaml      the run's configuration; the architecture under `arch`. Also STEM.yaml of the weights
    identifiers.json     names of the puzzle identifiers (from the data folder; without it the table has no meaning)

Pickled code is never run (`io/state_dicts.py`). Problems are collected and raised before anything is written. Left
out: variants of TRM with other states (single z, six z_L), URM, FPRM, optimizer states.
"""

import logging
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError

from ..hub import HubAddress, HubError, hub_address, pull_checkpoint
from ..hub.kinds import PUZZLE_SOLVER, load_config
from ..io.files import load_json, load_yaml
from ..io.state_dicts import read_stored_model
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from .data_options import WITH_WAY_BACK
from .dataset import IDENTIFIERS_FILE
from .npy_layout import guess_task
from .original_config import (
    ARCHITECTURES,
    CONFIG_FILE,
    arch_of_preset,
    config_fields,
    data_folders,
    find_sizes,
    original_arch,
    presets_of,
    with_arch,
)
from .original_tensors import (
    BATCH_COPIES,
    ORIGINAL_PREFIX,
    WRAPPERS,
    original_name,
    our_tensors,
    se_rrm_tensors,
)


logger = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d+)")
WEIGHTS = re.compile(r".+\.(?:safetensors|pt|pth|ckpt|bin)|[^.]*step_[^.]*")  # other names of weights
# What the original's evaluate.py wants to find besides `arch`: its published Sudoku recipe, to be edited for training.
ORIGINAL_RUN_FIELDS = {
    "global_batch_size": 768, "epochs": 20000, "eval_interval": 2000, "lr": 1e-4, "lr_min_ratio": 1.0,
    "lr_warmup_steps": 2000, "weight_decay": 1.0, "beta1": 0.9, "beta2": 0.95, "puzzle_emb_lr": 1e-4,
    "puzzle_emb_weight_decay": 1.0, "seed": 0,
}  # fmt: skip


# Original to ours


def convert_original(
    src: str | Path,
    out: str | Path,
    architecture: str = "hrm",
    seq_len: int | None = None,
    step: int | None = None,
    vocab_size: int | None = None,
    config: str | Path | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint of the original code into a folder that `from_pretrained` reads.

    Arguments as `data_options.ConvertCheckpoint`. Of a model of the Hub only the files above are fetched, into the
    cache.

    Returns:
        What was converted: file, sizes, where `seq_len` is from, number of parameters.

    Raises:
        FileNotFoundError: no weights, or no configuration.
        HubError: the Hub refused, or could not be reached.
        ValueError: an unreadable file, an architecture that cannot be expressed, or tensors that do not fit, all of
            which are named. Nothing is written then.
    """
    address = hub_address(str(src), revision)
    weights_file, commit = (find_weights(Path(src), step), None) if address is None else _fetch(address, step)
    stored = read_stored_model(weights_file, WRAPPERS)
    state = {name: tensor for name, tensor in stored.state.items() if not BATCH_COPIES.fullmatch(name)}
    run, place = _find_run(weights_file, config, stored.config, architecture)

    table = state.get("puzzle_emb.weights")
    rows, columns = table.shape if table is not None and table.dim() == 2 else (1, 0)
    fields = config_fields({"puzzle_emb_ndim": columns} | run["arch"], architecture, place)
    *sizes, seq_len_from = find_sizes(seq_len, vocab_size, state, fields, run, architecture)
    our_config = _our_config(run["arch"], fields, sizes, rows, architecture, place)
    model = _load(state, our_config, architecture, f"{weights_file} and {place}")
    identifiers = _find_identifiers(weights_file.parent, data_folders(run), our_config)
    model.save_pretrained(out)
    if identifiers is not None:
        shutil.copyfile(identifiers, Path(out) / IDENTIFIERS_FILE)
    return {
        "out": str(out),
        "source": str(weights_file),
        **({"repository": address.repo_id, "commit": commit} if address else {}),
        "config": str(place),
        "architecture": our_config.model_type,
        "parameters": model.num_parameters(),
        "averaged_weights": stored.averaged,
        "puzzle_identifiers": our_config.num_puzzle_identifiers,
        "identifiers_file": str(identifiers) if identifiers else None,
        "vocab_size": our_config.vocab_size,
        "seq_len": our_config.seq_len,
        "seq_len_from": seq_len_from,
        "task": our_config.task,
        "forward_dtype": our_config.forward_dtype,
    }


# Files


def find_weights(src: Path, step: int | None = None) -> Path:
    """The weights file: `src` itself, or in the folder `src` the one that `_choose_weights` takes."""
    if src.is_file():
        return src
    return src / _choose_weights([path.name for path in src.iterdir() if path.is_file()], str(src), step)


def _choose_weights(names: list[str], place: str, step: int | None = None) -> str:
    """Of files below a folder, its `step_N` of the largest N, else `checkpoint`, else the only one of weights.

    Raises:
        FileNotFoundError: there is none, or there are several; the message names them.
    """
    here = sorted(name for name in names if "/" not in name)
    steps = {int(found[1]): name for name in here if (found := STEP.fullmatch(name))}
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{place} has no step_{step}; it has {[f'step_{n}' for n in sorted(steps)]}")
    if steps:
        return steps[max(steps) if step is None else step]
    if "checkpoint" in here:
        return "checkpoint"
    others = [name for name in here if WEIGHTS.fullmatch(name)]
    if len(others) == 1:
        return others[0]
    found = [f"{place}/{name}" for name in names if WEIGHTS.fullmatch(Path(name).name)]
    raise FileNotFoundError(f"{place} holds no step_N and no `checkpoint`; name one of its weights: {found or 'none'}")


def _config_names(weights: str) -> list[str]:
    """Names of a configuration beside a weights file, the likeliest first."""
    stem = Path(weights).stem
    return [f"{stem}.yaml", f"{stem}.yml", CONFIG_FILE, "config.yaml"]


def _fetch(address: HubAddress, step: int | None) -> tuple[Path, str]:
    """The weights file in the cache, with what belongs to it beside it, and the commit."""
    weights = None

    def choose(names: list[str]) -> list[str]:
        nonlocal weights
        prefix = f"{address.path}/" if address.path else ""
        below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        weights = address.path if address.path in names else prefix + _choose_weights(below, str(address), step)
        folder, _, name = weights.rpartition("/")
        beside = [f"{folder}/{each}".lstrip("/") for each in (*_config_names(name), IDENTIFIERS_FILE)]
        return [weights, *(each for each in beside if each in names)]

    try:
        pulled = pull_checkpoint(address.repo_id, revision=address.revision, choose=choose)
    except HubError as error:
        raise HubError(f"{address} is no file or folder here, and on the Hub: {error}") from error
    return pulled.path / weights, pulled.commit


def _find_run(
    weights: Path, config: str | Path | None, stored: dict[str, Any] | None, architecture: str
) -> tuple[dict[str, Any], str | Path]:
    """The run's configuration, and where it stands: as told, beside the weights, or stored with them."""
    if config is not None and not Path(config).is_file():
        return {"arch": arch_of_preset(str(config), architecture)}, f"preset {config}"
    beside = [weights.with_name(name) for name in _config_names(weights.name)] if config is None else [Path(config)]
    if found := next((file for file in beside if file.is_file()), None):
        return with_arch(load_yaml(found), str(found)), found
    if stored is not None:
        place = f"the configuration in {weights}"
        return with_arch(stored, place), place
    raise FileNotFoundError(
        f"{weights.with_name(CONFIG_FILE)} is missing, and shapes alone do not tell the cycles; pass --config FILE or "
        f"one of our presets: {', '.join(presets_of(architecture))}"
    )


def _find_identifiers(folder: Path, data: list[Path], config: HrmPuzzleConfig) -> Path | None:
    """identifiers.json of the checkpoint, or of the one data folder it names; checked against the table's size."""
    rows = config.num_puzzle_identifiers if config.puzzle_emb_ndim else 0
    for file in (place / IDENTIFIERS_FILE for place in (folder, *(data if len(data) == 1 else []))):
        if not file.is_file():
            continue
        count = len(load_json(file))
        if not rows or count == rows:
            return file
        wrong = f"{file} names {count} puzzles, the checkpoint's table has {rows} rows: not the data it was trained on"
        if file.parent == folder:
            raise ValueError(f"{wrong}; replace or remove the file")
        logger.warning("%s. It is not used", wrong)  # another data set may lie at the place that the run names
    if rows > 1:
        logger.warning(
            "no %s in %s: the %d rows of the puzzle table cannot be told apart. Copy the file from the data folder "
            "that the run was trained on, and convert again", IDENTIFIERS_FILE, folder, rows,
        )  # fmt: skip
    return None


# Model


def _our_config(
    arch: dict[str, Any], fields: dict[str, Any], sizes: list[int], rows: int, architecture: str, place: str | Path
) -> HrmPuzzleConfig:
    seq_len, vocab_size = sizes
    if architecture == "se_rrm" and fields["puzzle_emb_ndim"]:  # there it only says that there is a table
        fields["puzzle_emb_ndim"] = fields["hidden_size"] + vocab_size
    task, grid_shape, box_shape = guess_task(seq_len, vocab_size)
    if task == "generic":
        grid = [arch.get("board_height"), arch.get("board_width")]
        if None in grid or math.prod(grid) != seq_len:
            square = fields["pos_encodings"] == "rope2d" and grid_shape[0] > 1
            grid = list(grid_shape) if square else None
        board = {"grid_shape": grid}
    else:
        board = {"task": task, "grid_shape": list(grid_shape), "box_shape": box_shape and list(box_shape)}
    known = {"seq_len": seq_len, "vocab_size": vocab_size, "num_puzzle_identifiers": rows}
    try:
        return ARCHITECTURES[architecture].config(**fields, **board, **known)
    except StrictDataclassError as error:
        raise ValueError(f"{place}: {str(error).splitlines()[-1].strip()}") from error


def _load(state: dict[str, torch.Tensor], config: HrmPuzzleConfig, architecture: str, files: str) -> torch.nn.Module:
    """The model with these tensors in float32. Raises one ValueError that lists all that do not fit."""
    with torch.device("meta"):
        model = ARCHITECTURES[architecture].model(config)
    try:
        if architecture == "se_rrm":
            ours = se_rrm_tensors(state, config.num_attention_heads, config.pos_encodings)
        else:
            ours = our_tensors(state)
        # Initial states are stored in forward_dtype: float32 holds the same values, and the forward casts them back.
        model.load_state_dict({name: value.float().contiguous() for name, value in ours.items()}, assign=True)
    except (RuntimeError, IndexError) as error:  # IndexError: of a product of shapes
        raise ValueError(f"{files} do not fit each other: {error}") from error
    return model


# Ours to original


def convert_to_original(
    src: str | Path, out: str | Path, step: int = 0, architecture: str | None = None
) -> dict[str, Any]:
    """Write one of our checkpoints as the original's `step_N`, `all_config.yaml` and `identifiers.json`.

    Weights are float32 and the initial states in the forward's dtype, as the original saves them. all_config.yaml has
    the published training fields besides `arch`, because the original's evaluate.py asks for them; edit the data path.

    Args:
        src: folder of a puzzle head. out: folder to write. step: N of `step_N`.
        architecture: "hrm" or "trm" to insist on one; None takes what the checkpoint is.

    Raises:
        ModelError: no puzzle model.
        ValueError: another architecture, or a config that the original cannot express.
    """
    from ..registry import AutoModelForPuzzleSolving

    load_config(str(src), PUZZLE_SOLVER)
    model = AutoModelForPuzzleSolving.from_pretrained(src)
    config = model.config
    key = next((key for key in WITH_WAY_BACK if ARCHITECTURES[key].config is type(config)), None)
    if key is None or key != (architecture or key):
        expected = architecture or "hrm or trm"
        raise ValueError(f"{src} is a {config.model_type!r}; expected {expected}, there is no way back to others")
    arch = original_arch(config, key, model.compute_dtype)

    state = {original_name(name): tensor.to(torch.float32) for name, tensor in model.state_dict().items()}
    for name in ("H_init", "L_init"):
        state[ORIGINAL_PREFIX + name] = state[ORIGINAL_PREFIX + name].to(model.compute_dtype)
    data = {"data_path": "data"} if key == "hrm" else {"data_paths": ["data"], "data_paths_test": []}
    out, identifiers = Path(out), Path(src) / IDENTIFIERS_FILE
    out.mkdir(parents=True, exist_ok=True)
    torch.save(state, out / f"step_{step}")
    (out / CONFIG_FILE).write_text(yaml.safe_dump({"arch": arch, **data, **ORIGINAL_RUN_FIELDS}, sort_keys=False))
    if identifiers.is_file():
        shutil.copyfile(identifiers, out / IDENTIFIERS_FILE)
    return {
        "out": str(out),
        "source": str(src),
        "architecture": key,
        "weights": f"step_{step}",
        "parameters": model.num_parameters(),
        "identifiers_file": str(identifiers) if identifiers.is_file() else None,
    }
