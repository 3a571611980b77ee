"""Convert original HRM, TRM, EqR and SE-RRM checkpoints to ours, and our HRM and TRM checkpoints back.

    convert_original("locuslab/EqR-model/sudoku-extreme/eqr.pth", "eqr-sudoku", architecture="eqr")
    convert_to_original("hrm-sudoku", "back")

A checkpoint is a local folder or a Hub repository with

    step_N            torch.save of the state_dict of loss head > ACT wrapper > inner model, possibly compiled;
                      or safetensors, or a training state with `model`, `ema` and `config` (EqR)
    all_config.yaml   the run's configuration, with the architecture under `arch`; or NAME.yaml for weights NAME.pth
    identifiers.json  names of the puzzle identifiers, from the data folder; they name the puzzle table's rows

All values are preserved, and pickled code is never run (`io/state_dicts.py`). Problems are collected and raised before
anything is written. Not supported: TRM variants with other states (single z, six z_L), URM, FPRM, optimizer states.
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
from ..io.files import is_hidden, load_json, load_yaml
from ..io.state_dicts import read_stored_model
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from . import original_config as original
from .dataset import IDENTIFIERS_FILE
from .options import WITH_WAY_BACK
from .task_registry import guess_task


logger = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d+)")
WEIGHTS = re.compile(r".+\.(?:safetensors|pt|pth|ckpt|bin)|[^.]*step_[^.]*")  # names of weight files
ORIGINAL_PREFIX = "model.inner."  # prefix that the loss head and the ACT wrapper add to tensor names
# Prefixes that the loss head, the ACT wrapper, torch.compile (of any module) and DDP add to tensor names.
WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|model\.|inner\.)*|(?<=\.)_orig_mod\.")
BATCH_COPIES = re.compile(r"puzzle_emb\.local_(?:weights|ids)")  # copies of puzzle table rows, skipped in conversion
TENSOR_NAMES = {
    "embed_tokens.embedding_weight": "model.embed.tokens.weight",
    "embed_pos.embedding_weight": "model.embed.positions.weight",
    "puzzle_emb.weights": "model.puzzle_emb.weight",
}
ORIGINAL_NAMES = {ours: original for original, ours in TENSOR_NAMES.items()}
HEADS = ("lm_head.", "q_head.")

# SE-RRM: our tables, and the original tensors that we concatenate, in this order, to form each table.
SE_RRM_TABLES = {
    "model.embed.tokens.weight": ("embed_special_tokens", "embed_symbol_tokens", "embed_symbols"),  # [1, V, 1, D]
    "model.embed.extra.weight": ("add_tokens_special", "add_tokens"),  # [1, V, add_tokens, D]
    "model.embed.positions.weight": ("pos_embedding",),  # [1, 1, S, D]
}
SE_RRM_NAMES = {"Z_init": "H_init", ".attn.": ".self_attn.", ".attn_t.": ".symbol_attn."}


def our_name(original: str) -> str:
    """Return our name for a tensor of HRM, TRM or EqR, whose `name` may have prefixes of wrappers."""
    unwrapped = WRAPPERS.sub("", original)
    return TENSOR_NAMES.get(unwrapped, unwrapped if unwrapped.startswith(HEADS) else f"model.{unwrapped}")


def original_name(ours: str) -> str:
    """Return the original name of one of our tensors (the inverse of `our_name`)."""
    return ORIGINAL_PREFIX + ORIGINAL_NAMES.get(ours, ours.removeprefix("model."))


def se_rrm_tensors(state: dict[str, torch.Tensor], num_heads: int, pos_encodings: str) -> dict[str, torch.Tensor]:
    """Convert SE-RRM's tensors, or their gradients, to our names and layout.

    With "rope2d", SE-RRM's attention over positions (`num_heads` heads) rotates the quarters of a head by row, column,
    row, column. Ours rotates them by row, row, column, column, so the query and key projections' rows are reordered.
    """
    state = {WRAPPERS.sub("", name): tensor for name, tensor in state.items()}
    ours = {}
    for table, parts in SE_RRM_TABLES.items():
        if rows := [state.pop(part) for part in parts if part in state]:
            ours[table] = torch.cat([part.flatten(0, -2) for part in rows])
    for name, tensor in state.items():
        if pos_encodings == "rope2d" and name.endswith(".attn.qkv_proj.weight"):
            quarters = tensor.unflatten(0, (3, num_heads, 4, -1))
            tensor = torch.cat((quarters[:2, :, [0, 2, 1, 3]], quarters[2:])).flatten(0, 3)
        for theirs, here in SE_RRM_NAMES.items():
            name = name.replace(theirs, here)
        ours[our_name(name)] = tensor
    return ours


# ---- from the original layout to ours ----


def convert_original(
    src: str | Path, out: str | Path, architecture: str = "hrm", seq_len: int | None = None, step: int | None = None,
    vocab_size: int | None = None, config: str | Path | None = None, revision: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Convert an original checkpoint to a folder for `from_pretrained`, and return a report.

    For the arguments see `options.ConvertCheckpoint`. From the Hub, only the files listed above are downloaded.

    Raises:
        FileNotFoundError: If the weights or the configuration are missing.
        HubError: If the Hub denies access or cannot be reached.
        ValueError: If a file is unreadable, the architecture is unknown, or the tensors do not fit it.
    """
    address = hub_address(str(src), revision)
    weights_file, commit = (find_weights(Path(src), step), None) if address is None else _fetch(address, step)
    stored = read_stored_model(weights_file, WRAPPERS)
    state = {name: tensor for name, tensor in stored.state.items() if not BATCH_COPIES.fullmatch(name)}
    run, place = _find_run(weights_file, config, stored.config, architecture)

    table = state.get("puzzle_emb.weights")
    rows, columns = table.shape if table is not None and table.dim() == 2 else (1, 0)
    fields = original.config_fields({"puzzle_emb_ndim": columns} | run["arch"], architecture, place)
    *sizes, seq_len_from = original.find_sizes(seq_len, vocab_size, state, fields, run, architecture)
    fields |= {"num_puzzle_identifiers": rows, **dict(zip(("seq_len", "vocab_size"), sizes))}
    our_config = _our_config(fields, run["arch"], architecture, place)
    model = _load(state, our_config, architecture, f"{weights_file} and {place}")
    identifiers = _find_identifiers(weights_file.parent, original.data_folders(run), our_config)
    model.save_pretrained(out)
    if architecture in WITH_WAY_BACK:
        found = STEP.fullmatch(weights_file.stem)
        run |= {"step": int(found[1])} if found else {}
        (Path(out) / original.CONFIG_FILE).write_text(yaml.safe_dump(run, sort_keys=False))
    if identifiers is not None:
        shutil.copyfile(identifiers, Path(out) / IDENTIFIERS_FILE)
    return {
        "out": str(out), "source": str(weights_file),
        **({"repository": address.repo_id, "commit": commit} if address else {}),
        "config": str(place), "architecture": our_config.model_type, "parameters": model.num_parameters(),
        "averaged_weights": stored.averaged, "puzzle_identifiers": our_config.num_puzzle_identifiers,
        "identifiers_file": str(identifiers) if identifiers else None, "vocab_size": our_config.vocab_size,
        "seq_len": our_config.seq_len, "seq_len_from": seq_len_from, "task": our_config.task,
        "forward_dtype": our_config.forward_dtype,
    }  # fmt: skip


def find_weights(src: Path, step: int | None = None) -> Path:
    """Return the weights file: `src` itself, or the file that `_choose_weights` selects in the folder `src`."""
    if src.is_file():
        return src
    return src / _choose_weights([path.name for path in src.iterdir() if path.is_file()], str(src), step)


def _choose_weights(names: list[str], place: str, step: int | None = None) -> str:
    """Select the weights: `step_N` with the largest N, else `checkpoint`, else the only weights file."""
    here = sorted(name for name in names if "/" not in name and not is_hidden(name))
    steps = {int(found[1]): name for name in here if (found := STEP.fullmatch(name))}
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{place} has no step_{step}; found {[f'step_{n}' for n in sorted(steps)]}")
    if steps:
        return steps[max(steps) if step is None else step]
    if "checkpoint" in here:
        return "checkpoint"
    others = [name for name in here if WEIGHTS.fullmatch(name)]
    if len(others) == 1:
        return others[0]
    found = [f"{place}/{name}" for name in names if WEIGHTS.fullmatch(Path(name).name)]
    raise FileNotFoundError(f"{place} has no step_N or `checkpoint`; found {found or 'none'}; pass a weights file")


def _config_names(weights: str) -> list[str]:
    """List possible names for the configuration file next to a weights file, most likely first."""
    return [f"{Path(weights).stem}.yaml", f"{Path(weights).stem}.yml", original.CONFIG_FILE, "config.yaml"]


def _fetch(address: HubAddress, step: int | None) -> tuple[Path, str]:
    """Download weights, configuration and identifiers, and return the weights file and the commit hash."""
    weights = None

    def choose(names: list[str]) -> list[str]:
        nonlocal weights
        prefix = f"{address.path}/" if address.path else ""
        below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        weights = address.path if address.path in names else prefix + _choose_weights(below, str(address), step)
        folder, _, name = weights.rpartition("/")
        sidecars = [f"{folder}/{each}".lstrip("/") for each in (*_config_names(name), IDENTIFIERS_FILE)]
        return [weights, *(each for each in sidecars if each in names)]

    try:
        pulled = pull_checkpoint(address.repo_id, revision=address.revision, choose=choose)
    except HubError as error:
        raise HubError(f"{address} is neither a local file or folder nor available on the Hub: {error}") from error
    return pulled.path / weights, pulled.commit


def _find_run(
    weights: Path, config: str | Path | None, stored: dict[str, Any] | None, architecture: str
) -> tuple[dict[str, Any], str | Path]:
    """Return the run's configuration and where it came from: a file, a preset or the weights file."""
    if config is not None and not Path(config).is_file():
        return {"arch": original.arch_of_preset(str(config), architecture)}, f"preset {config}"
    files = [weights.with_name(name) for name in _config_names(weights.name)] if config is None else [Path(config)]
    if found := next((file for file in files if file.is_file()), None):
        return original.with_arch(load_yaml(found), str(found)), found
    if stored is not None:
        place = f"the configuration in {weights}"
        return original.with_arch(stored, place), place
    raise FileNotFoundError(
        f"{weights.with_name(original.CONFIG_FILE)} is missing, and the number of cycles is not in the weights; pass "
        f"--config FILE or one of our presets: {', '.join(original.presets_of(architecture))}"
    )


def _find_identifiers(folder: Path, data: list[Path], config: HrmPuzzleConfig) -> Path | None:
    """Find an identifiers.json with one name per table row in `folder`, or in `data` if that is a single folder."""
    rows = config.num_puzzle_identifiers if config.puzzle_emb_ndim else 0
    for file in (place / IDENTIFIERS_FILE for place in (folder, *(data if len(data) == 1 else []))):
        if not file.is_file():
            continue
        count = len(load_json(file))
        if not rows or count == rows:
            return file
        wrong = f"{file} names {count} puzzles, but the puzzle table of the checkpoint has {rows} rows"
        if file.parent == folder:
            raise ValueError(f"{wrong}; replace or remove the file")
        logger.warning("%s; ignoring the file", wrong)  # not an error, because the data may have been rebuilt since
    if rows > 1:
        logger.warning(
            "%s is missing from %s, so the %d rows of the puzzle table have no names; copy the file from the run's "
            "data folder and convert again", IDENTIFIERS_FILE, folder, rows,
        )  # fmt: skip
    return None


def _our_config(fields: dict[str, Any], arch: dict[str, Any], architecture: str, place: Any) -> HrmPuzzleConfig:
    seq_len, vocab_size = fields["seq_len"], fields["vocab_size"]
    if architecture == "se_rrm" and fields["puzzle_emb_ndim"]:  # the original code only checks whether this field is 0
        fields["puzzle_emb_ndim"] = fields["hidden_size"] + vocab_size
    task, grid_shape, box_shape = guess_task(seq_len, vocab_size)
    board = (arch.get("board_height"), arch.get("board_width"))
    if task == "generic" and None not in board and math.prod(board) == seq_len:
        grid_shape = board
    fields |= {"task": task, "grid_shape": list(grid_shape), "box_shape": box_shape and list(box_shape)}
    try:
        return original.ARCHITECTURES[architecture].config(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"{place}: {str(error).splitlines()[-1].strip()}") from error


def _load(state: dict[str, torch.Tensor], config: HrmPuzzleConfig, architecture: str, files: str) -> torch.nn.Module:
    """Load the tensors into a float32 model, or raise a ValueError that lists all tensors that do not fit."""
    with torch.device("meta"):
        model = original.ARCHITECTURES[architecture].model(config)
    try:
        if architecture == "se_rrm":
            ours = se_rrm_tensors(state, config.num_attention_heads, config.pos_encodings)
        else:
            ours = {our_name(name): tensor for name, tensor in state.items()}
        # Initial states are stored in forward_dtype. float32 holds them exactly, and the forward pass casts them back.
        model.load_state_dict({name: value.float().contiguous() for name, value in ours.items()}, assign=True)
    except (RuntimeError, IndexError) as error:  # IndexError: a tensor has too few dimensions
        raise ValueError(f"{files} do not fit together: {error}") from error
    return model


# Conversion of our checkpoints to the original format


def convert_to_original(src: str | Path, out: str | Path, step: int | None = None, architecture: str | None = None):
    """Convert one of our checkpoints to the three original files (see the module docstring), and return a report.

    As in the original code, weights are float32 and initial states have the dtype of the forward pass. all_config.yaml
    has the settings of the run that produced `src`, by our code or the original code. The rest are defaults.

    Args:
        src: Folder of a puzzle model. out: Folder to write. step: N of `step_N`; by default the run's last step.
        architecture: "hrm" or "trm" to accept only this architecture.

    Raises:
        ModelError: If `src` is not a puzzle model.
        ValueError: If the model has a different architecture, or the original code cannot express its config.
    """
    from ..registry import AutoModelForPuzzleSolving

    load_config(str(src), PUZZLE_SOLVER)
    model = AutoModelForPuzzleSolving.from_pretrained(src)
    config, keys = model.config, (architecture,) if architecture else WITH_WAY_BACK
    key = next((key for key in keys if original.ARCHITECTURES[key].config is type(config)), None)
    if key not in WITH_WAY_BACK:
        expected = " or ".join(keys)
        raise ValueError(f"{src}: model_type={config.model_type!r}: only {expected} can be converted back")
    arch = original.original_arch(config, key, model.compute_dtype)

    state = {original_name(name): tensor.to(torch.float32) for name, tensor in model.state_dict().items()}
    for name in ("H_init", "L_init"):
        state[ORIGINAL_PREFIX + name] = state[ORIGINAL_PREFIX + name].to(model.compute_dtype)
    run = {name: default for name, (default, _) in original.RUN_KEYS.items() if type(default) in (int, float)}
    run = {"arch": arch, "step": 0, "data_path": "data"} | run | original.saved_run(Path(src))
    if key == "trm":
        run = {"data_paths": [run["data_path"]], "data_paths_test": []} | run
    last = run.pop("step")
    weights = f"step_{last if step is None else step}"
    out, identifiers = Path(out), Path(src) / IDENTIFIERS_FILE
    out.mkdir(parents=True, exist_ok=True)
    torch.save(state, out / weights)
    (out / original.CONFIG_FILE).write_text(yaml.safe_dump(run, sort_keys=False))
    if identifiers.is_file():
        shutil.copyfile(identifiers, out / IDENTIFIERS_FILE)
    return {
        "out": str(out), "source": str(src), "architecture": key, "weights": weights,
        "parameters": model.num_parameters(),
        "identifiers_file": str(identifiers) if identifiers.is_file() else None,
    }  # fmt: skip
