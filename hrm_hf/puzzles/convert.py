"""Checkpoints of the original HRM, TRM, EqR and SE-RRM code as ours, and of the first two back; no value changes.

    result = convert_original("HRM/checkpoints/Sudoku/run", "hrm-sudoku", architecture="hrm")
    result = convert_original("locuslab/EqR-model/sudoku-extreme/eqr.pth", "eqr-sudoku", architecture="eqr")
    convert_to_original("hrm-sudoku", "back")

A checkpoint, a folder here or a model of the Hub, has

    step_N               torch.save of the state_dict of loss head > ACT wrapper > inner model, possibly compiled; or
                         safetensors, or a whole training state with `model`, `ema` and `config` (EqR)
    all_config.yaml      the run's configuration; the architecture under `arch`. Also STEM.yaml of the weights
    identifiers.json     names of the puzzle identifiers (from the data folder; without it the table has no meaning)

Pickled code is never run (`io/state_dicts.py`). Problems are collected and raised before anything is written. What the
configuration does not say (positions, vocabulary, number of puzzles) is read from the shapes of the weights, from the
data folder it names, or guessed from the known tasks, in that order; a guess that nothing confirms is a warning.

Left out: variants of TRM with other states (single z, six z_L), URM, FPRM, optimizer states.
"""

import logging
import re
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError

from ..hub import HubAddress, HubError, hub_address, pull_checkpoint
from ..hub.kinds import PUZZLE_SOLVER, load_config
from ..io.bounded_files import load_json
from ..io.state_dicts import read_stored_model
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..models.configuration_se_rrm_puzzle import SPECIAL_SYMBOLS
from .dataset import IDENTIFIERS_FILE
from .npy_layout import guess_task
from .original_config import (
    ARCHITECTURES,
    arch_of_preset,
    architecture_of,
    board_of,
    config_fields,
    data_folders,
    original_arch,
    presets_of,
    read_run,
    with_arch,
)
from .original_sizes import Sizes, find_sizes, validate_sizes
from .original_tensors import (
    BATCH_COPIES,
    ORIGINAL_PREFIX,
    WRAPPERS,
    original_label,
    original_name,
    our_tensors,
    se_rrm_tensors,
)


logger = logging.getLogger(__name__)

CONFIG_FILE = "all_config.yaml"
STEP = re.compile(r"step_(\d+)")
WEIGHTS = re.compile(r".+\.(?:safetensors|pt|pth|ckpt|bin)|[^.]*step_[^.]*")  # other names of weights

# What the original's evaluate.py wants to find besides `arch`: its published Sudoku recipe, to be edited for training.
ORIGINAL_RUN_FIELDS = {
    "global_batch_size": 768,
    "epochs": 20000,
    "eval_interval": 2000,
    "lr": 1e-4,
    "lr_min_ratio": 1.0,
    "lr_warmup_steps": 2000,
    "weight_decay": 1.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "puzzle_emb_lr": 1e-4,
    "puzzle_emb_weight_decay": 1.0,
    "seed": 0,
}
DATA_FOLDER = "data"


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
    """Converts a checkpoint of the original code into a folder that `from_pretrained` reads.

    Args:
        src: folder with weights and configuration, or the weights file in such a folder; or a model of the Hub, as
            OWNER/NAME, OWNER/NAME/FILE or an address there, from which only these files are fetched, into the cache.
        out: folder to write.
        architecture: "hrm", "trm", "eqr" or "se_rrm".
        seq_len, vocab_size: positions and tokens of a puzzle, where neither weights nor data tell.
        step: which `step_N` to convert; the largest N by default.
        config: configuration file, or a preset of ours for weights without any; by default the file beside them, or
            what is stored with them.
        revision: branch, tag or sha on the Hub.

    Returns:
        What was converted: file, sizes, where `seq_len` was learnt, number of parameters.

    Raises:
        FileNotFoundError: no weights, or no configuration.
        HubError: the Hub refused, or could not be reached.
        ValueError: an unreadable file, an architecture that cannot be expressed, or tensors that do not fit; the
            message lists every tensor concerned. Nothing is written then.
    """
    architecture_of(architecture)
    address = hub_address(str(src), revision)
    weights_file, commit = (find_weights(Path(src), step), None) if address is None else _fetch(address, step)
    stored = read_stored_model(weights_file, WRAPPERS)
    state = {name: tensor for name, tensor in stored.state.items() if not BATCH_COPIES.fullmatch(name)}
    run, place = _find_run(weights_file, config, stored.config, architecture)
    our_config, sizes = _our_config(state, run, place, architecture, Sizes(seq_len, vocab_size))
    tensors = _fit(state, our_config, architecture, weights_file, place)
    validate_sizes(sizes, weights_file, data_folders(run))
    identifiers = _find_identifiers(weights_file.parent, data_folders(run), our_config)

    with torch.device("meta"):
        model = architecture_of(architecture).model(our_config)
    model.load_state_dict(tensors, assign=True)
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
        "seq_len_from": sizes.seq_len_from,
        "task": our_config.task,
        "forward_dtype": our_config.forward_dtype,
    }


# Files


def find_weights(src: Path, step: int | None = None) -> Path:
    """The weights file: `src` itself, or in the folder `src` the one that `choose_weights` takes."""
    if src.is_file():
        return src
    if not src.is_dir():
        raise FileNotFoundError(f"{src} does not exist; expected a folder with step_N and {CONFIG_FILE}")
    return src / choose_weights([path.name for path in src.iterdir() if path.is_file()], str(src), step)


def choose_weights(names: Iterable[str], place: str, step: int | None = None) -> str:
    """Of the files of a folder, the `step_N` of the largest N, else `checkpoint`, else the only one of weights.

    Raises:
        FileNotFoundError: there is none, or there are several; the message names them.
    """
    names = sorted(names)
    steps = {int(found[1]): name for name in names if (found := STEP.fullmatch(name))}
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{place} has no step_{step}; it has {[f'step_{n}' for n in sorted(steps)]}")
    if steps:
        return steps[max(steps) if step is None else step]
    if "checkpoint" in names:
        return "checkpoint"
    others = [name for name in names if WEIGHTS.fullmatch(name)]
    if len(others) == 1:
        return others[0]
    what = f"several files of weights: name one of {others}" if others else f"no other weights; it holds {names}"
    raise FileNotFoundError(f"{place} holds no step_N and no `checkpoint`, and {what}")


def config_names(weights: str) -> list[str]:
    """Names of a configuration beside a weights file, the likeliest first."""
    stem = Path(weights).stem if WEIGHTS.fullmatch(weights) and "." in weights else weights
    return [f"{stem}.yaml", f"{stem}.yml", CONFIG_FILE, "config.yaml"]


def _fetch(address: HubAddress, step: int | None) -> tuple[Path, str]:
    """The weights file in the cache, with what belongs to it beside it, and the commit."""
    weights = None

    def choose(names: list[str]) -> list[str]:
        nonlocal weights
        weights = address.path if address.path in names else _weights_in(names, address, step)
        folder, _, name = weights.rpartition("/")
        beside = [f"{folder}/{each}".lstrip("/") for each in (*config_names(name), IDENTIFIERS_FILE)]
        return [weights, *(each for each in beside if each in names)]

    try:
        pulled = pull_checkpoint(address.repo_id, revision=address.revision, choose=choose)
    except HubError as error:
        raise HubError(f"{address} is no file or folder here, and on the Hub: {error}") from error
    return pulled.path / weights, pulled.commit


def _weights_in(names: list[str], address: HubAddress, step: int | None) -> str:
    """As `choose_weights`, of the folder of a repository that `address` names."""
    prefix = f"{address.path}/" if address.path else ""
    below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    try:
        return prefix + choose_weights([name for name in below if "/" not in name], str(address), step)
    except FileNotFoundError as error:
        deeper = [f"{address}/{name}" for name in below if "/" in name and WEIGHTS.fullmatch(Path(name).name)]
        if not deeper:
            raise
        raise FileNotFoundError(f"{error}; or of those in its folders: {deeper}") from error


def _find_run(
    weights: Path, config: str | Path | None, stored: dict[str, Any] | None, architecture: str
) -> tuple[dict[str, Any], str | Path]:
    """The run's configuration, and where it stands: as told, beside the weights, or stored with them."""
    if config is not None:
        if Path(config).is_file():
            return read_run(Path(config)), config
        return {"arch": arch_of_preset(str(config), architecture)}, f"preset {config}"
    beside = [weights.with_name(name) for name in config_names(weights.name)]
    if found := next((file for file in beside if file.is_file()), None):
        return read_run(found), found
    if stored is not None:
        place = f"the configuration in {weights}"
        return with_arch(stored, place), place
    raise FileNotFoundError(
        f"{weights.with_name(CONFIG_FILE)} is missing; the original saves it beside step_N, and shapes alone do not "
        f"tell. Name the file with --config FILE, or say which of our presets it is: "
        f"{', '.join(presets_of(architecture))} (--config PRESET)"
    )


# Model


def _our_config(
    state: dict[str, torch.Tensor], run: dict[str, Any], place: str | Path, architecture: str, given: Sizes
) -> tuple[HrmPuzzleConfig, Sizes]:
    """Our configuration, in which unknown sizes are small (no tensor depends on them), and the sizes."""
    table = state.get("puzzle_emb.weights")
    rows, columns = table.shape if table is not None and table.dim() == 2 else (1, 0)
    fields = config_fields({"puzzle_emb_ndim": columns} | run["arch"], architecture, place)
    sizes = find_sizes(given, state, fields, run, data_folders(run), architecture)
    seq_len, vocab_size = sizes.seq_len or 1, sizes.vocab_size or SPECIAL_SYMBOLS + 1
    if architecture == "se_rrm" and fields["puzzle_emb_ndim"]:  # there it only says that there is a table
        fields["puzzle_emb_ndim"] = fields["hidden_size"] + vocab_size
    task, grid_shape, box_shape = guess_task(seq_len, vocab_size)
    if task == "generic":
        board = {"grid_shape": board_of(run["arch"], seq_len, fields["pos_encodings"])}
    else:
        board = {"task": task, "grid_shape": list(grid_shape), "box_shape": list(box_shape) if box_shape else None}
    known = {"seq_len": seq_len, "vocab_size": vocab_size, "num_puzzle_identifiers": rows}
    try:
        return architecture_of(architecture).config(**fields, **board, **known), sizes
    except StrictDataclassError as error:
        raise ValueError(f"{place}: {str(error).splitlines()[-1].strip()}") from error


def _fit(
    state: dict[str, torch.Tensor],
    config: HrmPuzzleConfig,
    architecture: str,
    file: Path,
    place: str | Path,
) -> dict[str, torch.Tensor]:
    """The tensors under our names, in float32. Raises one ValueError that lists all that do not fit."""
    with torch.device("meta"):
        model = architecture_of(architecture).model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    try:
        ours = (
            se_rrm_tensors(state, config.num_attention_heads, config.pos_encodings)
            if architecture == "se_rrm"
            else our_tensors(state)
        )
    except (RuntimeError, IndexError) as error:  # of a product of shapes
        raise ValueError(
            f"{file}: its tensors have not the shapes of {architecture} with the fields of {place} ({error})"
        ) from error
    label = partial(original_label, architecture=architecture)
    problems = [f"missing: {label(name)} {shapes[name]}" for name in shapes if name not in ours]
    problems += [f"unexpected: {label(name)} {tuple(ours[name].shape)}" for name in ours if name not in shapes]
    problems += [
        f"wrong shape: {label(name)} is {tuple(ours[name].shape)}, expected {shape}"
        for name, shape in shapes.items()
        if name in ours and tuple(ours[name].shape) != shape
    ]
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(f"{file} does not fit the architecture that {place} describes:\n  {listing}")
    # Initial states are stored in forward_dtype: float32 holds the same values, and the forward casts them back.
    return {name: ours[name].to(torch.float32).contiguous() for name in shapes}


def _find_identifiers(folder: Path, data: list[Path], config: HrmPuzzleConfig) -> Path | None:
    """identifiers.json of the checkpoint, or of the one data folder it names; checked against the table's size."""
    rows = config.num_puzzle_identifiers if config.puzzle_emb_ndim else 0
    beside, in_data = folder / IDENTIFIERS_FILE, [path / IDENTIFIERS_FILE for path in data][:1] * (len(data) == 1)
    for file in (beside, *in_data):
        if not file.is_file():
            continue
        count = len(load_json(file))
        if not rows or count == rows:
            return file
        wrong = f"{file} names {count} puzzles, the checkpoint's table has {rows} rows: not the data it was trained on"
        if file == beside:
            raise ValueError(f"{wrong}. Put the right {IDENTIFIERS_FILE} into {folder}, or remove the wrong one")
        logger.warning("%s. It is not used", wrong)  # another data set may lie at the place that the run names
    if rows > 1:
        logger.warning(
            "no %s in %s: the %d rows of the puzzle table cannot be told apart, so it cannot be used for known "
            "puzzles. Copy the file from the data folder that the run was trained on, and convert again",
            IDENTIFIERS_FILE, [str(folder), *(str(file.parent) for file in in_data)], rows,
        )  # fmt: skip
    return None


# Ours to original


def convert_to_original(
    src: str | Path, out: str | Path, step: int = 0, architecture: str | None = None
) -> dict[str, Any]:
    """Writes one of our checkpoints as the original's `step_N`, `all_config.yaml` and `identifiers.json`.

    Weights are float32 and the initial states in the forward's dtype, as the original saves them. all_config.yaml has
    the published training fields beside `arch`, because the original's evaluate.py asks for them; edit the data path.

    Args:
        src: folder of a puzzle head. out: folder to write. step: N of `step_N`.
        architecture: "hrm" or "trm" to insist on one; None takes what the checkpoint is.

    Raises:
        ModelError: no puzzle model.
        ValueError: another architecture, or a config that the original cannot express.
    """
    from ..registry import AutoModelForPuzzleSolving

    families = {key: family for key, family in ARCHITECTURES.items() if family.way_back}
    if architecture not in (None, *families):
        raise ValueError(f"there is no way back to {architecture!r}, only to {' and '.join(families)}")
    load_config(str(src), PUZZLE_SOLVER)
    model = AutoModelForPuzzleSolving.from_pretrained(src)
    config = model.config
    key = next((key for key, family in families.items() if family.config is type(config)), None)
    if key is None or key != (architecture or key):
        raise ValueError(f"{src} is a {config.model_type!r}; expected {architecture or sorted(families)}")
    arch = original_arch(config, key, model.compute_dtype)

    state = {original_name(name): tensor.to(torch.float32) for name, tensor in model.state_dict().items()}
    for name in ("H_init", "L_init"):
        state[ORIGINAL_PREFIX + name] = state[ORIGINAL_PREFIX + name].to(model.compute_dtype)
    data = {"data_path": DATA_FOLDER} if key == "hrm" else {"data_paths": [DATA_FOLDER], "data_paths_test": []}
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(state, out / f"step_{step}")
    (out / CONFIG_FILE).write_text(yaml.safe_dump({"arch": arch, **data, **ORIGINAL_RUN_FIELDS}, sort_keys=False))
    identifiers = Path(src) / IDENTIFIERS_FILE
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
