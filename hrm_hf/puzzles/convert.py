"""Checkpoints of the original HRM and TRM code, converted to ours and back without changing a value.

    result = convert_original("HRM/checkpoints/Sudoku/run", "hrm-sudoku", architecture="hrm")
    convert_to_original("hrm-sudoku", "back")

An original checkpoint is a folder with

    step_N               torch.save of the state_dict of loss head > ACT wrapper > inner model, possibly compiled
    all_config.yaml      the run's configuration; the architecture under `arch`
    identifiers.json     names of the puzzle identifiers (from the data folder; without it the table has no meaning)

Pickled code is never run: files are read with `weights_only=True`. Problems are collected and raised before anything
is written. What all_config.yaml does not say (positions, vocabulary, number of puzzles) is read from the shapes of the
weights, from the data folder it names, or from the vocabularies of the known tasks, in that order.

Left out: variants of TRM with other states (single z, six z_L), URM, optimizer states (the originals save none).
"""

import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError

from ..io.bounded_files import load_json, load_yaml
from ..io.state_dicts import read_state_dict
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..models.configuration_trm_puzzle import TrmPuzzleConfig
from ..models.modeling_hrm_puzzle import HrmPuzzleForSolving
from ..models.modeling_trm_puzzle import TrmPuzzleForSolving
from .dataset import IDENTIFIERS_FILE
from .npy_layout import guess_task


logger = logging.getLogger(__name__)


class Architecture(NamedTuple):
    """Our classes, the name the original gives its model (`arch.name` is `module@class`), and its `pos_encodings`."""

    config: type[HrmPuzzleConfig]
    model: type[torch.nn.Module]
    original_name: str
    original_loss: str
    positions: tuple[str, ...]


ARCHITECTURES = {
    "hrm": Architecture(
        HrmPuzzleConfig,
        HrmPuzzleForSolving,
        "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1",
        "losses@ACTLossHead",
        ("rope", "learned"),
    ),
    "trm": Architecture(
        TrmPuzzleConfig,
        TrmPuzzleForSolving,
        "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1",
        "losses@ACTLossHead",
        ("rope", "learned", "none"),
    ),
}
CONFIG_FILE = "all_config.yaml"

# Fields of `arch` with our name and type; the second table has the defaults of the original code, the first none.
REQUIRED_FIELDS = {
    "H_cycles": ("H_cycles", int),
    "L_cycles": ("L_cycles", int),
    "H_layers": ("H_layers", int),
    "L_layers": ("L_layers", int),
    "hidden_size": ("hidden_size", int),
    "num_heads": ("num_attention_heads", int),
    "expansion": ("expansion", float),
    "pos_encodings": ("pos_encodings", str),
    "halt_max_steps": ("halt_max_steps", int),
    "halt_exploration_prob": ("halt_exploration_prob", float),
}
OPTIONAL_FIELDS = {
    "puzzle_emb_ndim": ("puzzle_emb_ndim", int, 0),
    "rms_norm_eps": ("rms_norm_eps", float, 1e-5),
    "forward_dtype": ("forward_dtype", str, "bfloat16"),
}
TRM_FIELDS = {"puzzle_emb_len": ("puzzle_emb_len", int, 16), "mlp_t": ("mlp_t", bool, False)}
READ_APART = {"name", "loss", "rope_theta", "no_ACT_continue"}
LOSS_SUFFIX = "_cross_entropy"

# Positions of a puzzle by vocabulary, for the tasks that the originals publish: Sudoku, mazes, ARC.
SEQ_LEN_OF_VOCAB = {11: 81, 6: 900, 12: 900}

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


# Names of tensors

WRAPPERS = re.compile(r"^(?:_orig_mod\.|model\.|inner\.)*")  # torch.compile, the loss head, the ACT wrapper
ORIGINAL_PREFIX = "model.inner."
OUR_NAMES = {
    "embed_tokens.embedding_weight": "model.embed.tokens.weight",
    "embed_pos.embedding_weight": "model.embed.positions.weight",
    "puzzle_emb.weights": "model.puzzle_emb.weight",
}
ORIGINAL_NAMES = {ours: original for original, ours in OUR_NAMES.items()}
HEADS = ("lm_head.", "q_head.")


def our_name(original: str) -> str:
    """Our name of a tensor of the original, whose wrappers' prefixes may be present or not."""
    unwrapped = WRAPPERS.sub("", original)
    return OUR_NAMES.get(unwrapped, unwrapped if unwrapped.startswith(HEADS) else f"model.{unwrapped}")


def original_name(ours: str) -> str:
    """The original's name, as its loss head saves it, of one of our tensors; the inverse of `our_name`."""
    return ORIGINAL_PREFIX + ORIGINAL_NAMES.get(ours, ours.removeprefix("model."))


# Original to ours


def convert_original(
    src: str | Path,
    out: str | Path,
    architecture: str = "hrm",
    seq_len: int | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Converts a checkpoint of the original code into a folder that `from_pretrained` reads.

    Args:
        src: folder with `step_N` (or `checkpoint`) and `all_config.yaml`, or the weights file in such a folder.
        out: folder to write.
        architecture: "hrm" or "trm".
        seq_len: positions of a puzzle, where neither weights nor data tell.
        step: which `step_N` to convert; the largest N by default.

    Returns:
        What was converted: file, sizes, where `seq_len` was learnt, number of parameters.

    Raises:
        FileNotFoundError: no weights, or no all_config.yaml.
        ValueError: an unreadable file, an architecture that cannot be expressed, or tensors that do not fit; the
            message lists every tensor concerned. Nothing is written then.
    """
    family = _family(architecture)
    weights_file = find_weights(Path(src), step)
    folder = weights_file.parent
    run = _read_config(folder / CONFIG_FILE)
    state = read_state_dict(weights_file, WRAPPERS)
    data = data_folders(run)

    fields = config_fields(run["arch"], architecture, folder / CONFIG_FILE)
    sizes = {
        "vocab_size": _rows(state, "lm_head.weight"),
        "num_puzzle_identifiers": _rows(state, "puzzle_emb.weights"),
    }
    sizes["vocab_size"] = _rows(state, "embed_tokens.embedding_weight", sizes["vocab_size"])
    seq_len, origin = find_seq_len(seq_len, state, fields, sizes["vocab_size"], data)
    try:  # no tensor depends on an unknown seq_len, so the comparison below is right with any
        config = family.config(**fields, **sizes, **_board(seq_len, sizes["vocab_size"]))
    except StrictDataclassError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {str(error).splitlines()[-1].strip()}") from error
    tensors = _fit(state, config, family, weights_file)
    if seq_len is None:
        raise ValueError(
            f"{weights_file}: the number of cells of a puzzle is neither in the weights nor in a data folder "
            f"({[str(path) for path in data]}), and vocab_size={config.vocab_size} is that of no known task "
            f"({sorted(SEQ_LEN_OF_VOCAB)}). Pass it: --seq-len N"
        )
    identifiers = _find_identifiers(folder, data, config)

    with torch.device("meta"):
        model = family.model(config)
    model.load_state_dict(tensors, assign=True)
    model.save_pretrained(out)
    if identifiers is not None:
        shutil.copyfile(identifiers, Path(out) / IDENTIFIERS_FILE)
    return {
        "out": str(out),
        "source": str(weights_file),
        "architecture": config.model_type,
        "parameters": model.num_parameters(),
        "puzzle_identifiers": config.num_puzzle_identifiers,
        "identifiers_file": str(identifiers) if identifiers else None,
        "vocab_size": config.vocab_size,
        "seq_len": config.seq_len,
        "seq_len_from": origin,
        "task": config.task,
        "forward_dtype": config.forward_dtype,
    }


def find_weights(src: Path, step: int | None = None) -> Path:
    """The weights file: `src` itself, or in the folder `src` the `step_N` of the largest N, or `checkpoint`."""
    if src.is_file():
        return src
    if not src.is_dir():
        raise FileNotFoundError(f"{src} does not exist; expected a folder with step_N and {CONFIG_FILE}")
    steps = {int(path.name[5:]): path for path in src.iterdir() if re.fullmatch(r"step_\d+", path.name)}
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{src} has no step_{step}; it has {[f'step_{n}' for n in sorted(steps)]}")
    if steps:
        return steps[max(steps) if step is None else step]
    if (src / "checkpoint").is_file():
        return src / "checkpoint"
    raise FileNotFoundError(
        f"{src} holds no step_N and no `checkpoint`; it holds {sorted(p.name for p in src.iterdir())}"
    )


def config_fields(arch: dict[str, Any], architecture: str, file: Path) -> dict[str, Any]:
    """Fields of our config from the original's `arch` section; `file` is named in errors.

    Raises:
        ValueError: missing or malformed fields, another architecture, or a mode the original itself cannot run.
    """
    other = {family.original_name.split("@")[1]: key for key, family in ARCHITECTURES.items() if key != architecture}
    class_name = str(arch.get("name", "")).split("@")[-1]
    if class_name in other:
        raise ValueError(f"{file}: arch.name={arch['name']!r} is {other[class_name]!r}, not {architecture!r}")
    if architecture == "trm" and not arch.get("no_ACT_continue", True):
        raise ValueError(
            f"{file}: arch.no_ACT_continue=False does not work in the original TRM (it unpacks five values from a "
            "three-tuple), so it cannot have trained this checkpoint. Our TRM halts by q_halt alone, as with True; if "
            "that is what you want, set the field to True and convert again"
        )
    optional = OPTIONAL_FIELDS | (TRM_FIELDS if architecture == "trm" else {})
    missing = sorted(REQUIRED_FIELDS.keys() - arch.keys())
    if missing:
        raise ValueError(f"{file}: arch lacks {missing}")
    ignored = sorted(arch.keys() - REQUIRED_FIELDS.keys() - optional.keys() - READ_APART)
    if ignored:
        logger.warning("%s: fields of arch that our %s does not have are ignored: %s", file, architecture, ignored)

    fields = {ours: _parse(arch[name], kind, name, file) for name, (ours, kind) in REQUIRED_FIELDS.items()}
    for name, (ours, kind, default) in optional.items():
        fields[ours] = _parse(arch.get(name, default), kind, name, file)
    if architecture == "trm":
        fields["H_layers"] = 0  # one network for both states; the original ignores the field
    rope_theta = _parse(arch.get("rope_theta", 10000.0), float, "rope_theta", file)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    loss_type = (arch.get("loss") or {}).get("loss_type", "stablemax_cross_entropy")
    fields["loss_type"] = loss_type.removesuffix(LOSS_SUFFIX)
    return fields


def find_seq_len(
    given: int | None, state: dict[str, torch.Tensor], fields: dict[str, Any], vocab_size: int, data: list[Path]
) -> tuple[int | None, str]:
    """Positions S of a puzzle and where that is known from; None if nothing tells."""
    if given is not None:
        return given, "--seq-len"
    prefix = fields["puzzle_emb_ndim"] and (
        fields.get("puzzle_emb_len") or -(-fields["puzzle_emb_ndim"] // fields["hidden_size"])
    )
    for name, tensor in state.items():
        if name == "embed_pos.embedding_weight":
            return tensor.shape[0] - prefix, name
        if name.endswith("mlp_t.gate_up_proj.weight"):
            return tensor.shape[-1] - prefix, name
    for file in (folder / split / "dataset.json" for folder in data for split in ("train", "test")):
        if file.is_file():
            meta = _read_json(file)
            if meta.get("vocab_size") != vocab_size:
                raise ValueError(
                    f"{file} has vocab_size={meta.get('vocab_size')}, the checkpoint {vocab_size}: not the data it "
                    "was trained on. Pass --seq-len N"
                )
            return int(meta["seq_len"]), str(file)
    return SEQ_LEN_OF_VOCAB.get(vocab_size), f"vocab_size={vocab_size}"


def data_folders(run: dict[str, Any]) -> list[Path]:
    """Data folders that all_config.yaml names (HRM: data_path, TRM: data_paths), relative to the working folder."""
    named = run.get("data_paths") or run.get("data_path") or []
    return [Path(path) for path in ([named] if isinstance(named, str) else named)]


def _family(architecture: str) -> Architecture:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r} is not one of {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[architecture]


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; the original saves it beside step_N, and shapes alone do not tell"
        )
    try:
        run = load_yaml(file)
    except ValueError as error:
        raise ValueError(f"{file} is not YAML of plain values: {error}") from error
    if not isinstance(run, dict) or not isinstance(run.get("arch"), dict):
        raise ValueError(f"{file} has no section `arch`; expected the all_config.yaml that the original saved")
    return run


def _read_json(file: Path) -> Any:
    return load_json(file)


def _parse(value: Any, kind: type, name: str, file: Path) -> Any:
    """YAML reads 1e-5 as text; everything else already has its type."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif type(value) is kind:
        return value
    raise ValueError(f"{file}: arch.{name}={value!r} is not of type {kind.__name__}")


def _board(seq_len: int | None, vocab_size: int) -> dict[str, Any]:
    """seq_len, and for the originals' tasks what they are."""
    task, grid_shape, box_shape = guess_task(seq_len or 1, vocab_size)
    known = {"task": task, "grid_shape": list(grid_shape), "box_shape": list(box_shape) if box_shape else None}
    return {"seq_len": seq_len or 1, **(known if task != "generic" else {})}


def _rows(state: dict[str, torch.Tensor], name: str, default: int = 1) -> int:
    return state[name].shape[0] if name in state and state[name].dim() else default


def _fit(
    state: dict[str, torch.Tensor], config: HrmPuzzleConfig, family: Architecture, file: Path
) -> dict[str, torch.Tensor]:
    """The tensors under our names, in float32. Raises one ValueError that lists all that do not fit."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in family.model(config).state_dict().items()}
    ours = {our_name(name): tensor for name, tensor in state.items()}
    problems = [f"missing: {_short_name(name)} {shapes[name]}" for name in shapes if name not in ours]
    problems += [f"unexpected: {_short_name(name)} {tuple(ours[name].shape)}" for name in ours if name not in shapes]
    problems += [
        f"wrong shape: {_short_name(name)} is {tuple(ours[name].shape)}, expected {shape}"
        for name, shape in shapes.items()
        if name in ours and tuple(ours[name].shape) != shape
    ]
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(f"{file} does not fit the architecture that its {CONFIG_FILE} describes:\n  {listing}")
    # Initial states are stored in forward_dtype: float32 holds the same values, and the forward casts them back.
    return {name: ours[name].to(torch.float32).contiguous() for name in shapes}


def _short_name(name: str) -> str:
    return original_name(name).removeprefix(ORIGINAL_PREFIX)


def _find_identifiers(folder: Path, data: list[Path], config: HrmPuzzleConfig) -> Path | None:
    """identifiers.json of the checkpoint, or of the one data folder it names; checked against the table's size."""
    candidates = [folder / IDENTIFIERS_FILE] + [data[0] / IDENTIFIERS_FILE] * (len(data) == 1)
    found = next((file for file in candidates if file.is_file()), None)
    rows = config.num_puzzle_identifiers if config.puzzle_emb_ndim else 0
    if found is None:
        if rows > 1:
            logger.warning(
                "no %s in %s: the %d rows of the puzzle table cannot be told apart, so it cannot be used for known "
                "puzzles. Copy the file from the data folder that the run was trained on, and convert again",
                IDENTIFIERS_FILE, [str(file.parent) for file in candidates], rows,
            )  # fmt: skip
        return None
    count = len(_read_json(found))
    if rows and count != rows:
        raise ValueError(
            f"{found} names {count} puzzles, the checkpoint's table has {rows} rows: not the data it was trained on. "
            f"Put the right {IDENTIFIERS_FILE} into {folder}, or remove the wrong one"
        )
    return found


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
        ValueError: not a puzzle model, another architecture, or a config that the original cannot express.
    """
    from ..registry import AutoModelForPuzzleSolving

    model = AutoModelForPuzzleSolving.from_pretrained(src)
    config = model.config
    key = next((key for key, family in ARCHITECTURES.items() if family.config is type(config)), None)
    if key is None or key != (architecture or key):
        raise ValueError(f"{src} is a {config.model_type!r}; expected {architecture or sorted(ARCHITECTURES)}")
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


def original_arch(config: HrmPuzzleConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """The original's `arch` section; the inverse of `config_fields`."""
    family = ARCHITECTURES[architecture]
    slots = -(-config.puzzle_emb_ndim // config.hidden_size)
    obstacles = []
    if config.rope_parameters.get("rope_type", "default") != "default":
        obstacles.append(f"rope_parameters={config.rope_parameters} (only the plain rotary embedding)")
    if architecture == "hrm" and config.prefix_len != slots:
        obstacles.append(f"puzzle_emb_len={config.puzzle_emb_len} (always {slots} for these sizes)")
    if config.pos_encodings not in family.positions:
        obstacles.append(f"pos_encodings={config.pos_encodings!r} ({' or '.join(family.positions)})")
    plain = {"update_rate": 1, "noise_scale": 0, "random_initial_states": False}  # else it is EqR
    obstacles += [
        f"{name}={getattr(config, name)}" for name, value in plain.items() if getattr(config, name, value) != value
    ]
    if obstacles:
        raise ValueError(f"the original {architecture} cannot express: {'; '.join(obstacles)}")
    loss = {"name": family.original_loss, "loss_type": config.loss_type + LOSS_SUFFIX}
    arch = {"name": family.original_name, "loss": loss}
    fields = REQUIRED_FIELDS | OPTIONAL_FIELDS | (TRM_FIELDS if architecture == "trm" else {})
    arch.update({name: getattr(config, entry[0]) for name, entry in fields.items()})
    arch["forward_dtype"] = str(dtype).removeprefix("torch.")
    arch["rope_theta"] = config.rope_parameters["rope_theta"]
    return arch | ({"no_ACT_continue": True} if architecture == "trm" else {})
