"""Configurations of the original HRM, TRM, EqR and SE-RRM code as fields of ours, and the way back for HRM and TRM.

Input: the all_config.yaml that a run saves, with the architecture under `arch`; that section alone, as in the
originals' config/arch/*.yaml; the same below one more key, or under `arch.value` as W&B writes it. Sizes that it does
not tell come from the weights or the data, see `find_sizes`.
"""

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..io.files import load_json
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..models.configuration_se_rrm_puzzle import SeRrmPuzzleConfig
from ..models.configuration_trm_puzzle import TrmPuzzleConfig
from ..models.modeling_hrm_puzzle import HrmPuzzleForSolving
from ..models.modeling_se_rrm_puzzle import SeRrmPuzzleForSolving
from ..models.modeling_trm_puzzle import TrmPuzzleForSolving
from .npy_layout import META_FILE, TASKS


logger = logging.getLogger(__name__)

CONFIG_FILE = "all_config.yaml"
# Fields of `arch` with an example of their type. Those of OPTIONAL and of the families have the original's defaults.
REQUIRED = {
    "H_cycles": 2, "L_cycles": 2, "H_layers": 4, "L_layers": 4, "hidden_size": 512, "num_heads": 8, "expansion": 4.0,
    "pos_encodings": "rope", "halt_max_steps": 16, "halt_exploration_prob": 0.1,
}  # fmt: skip
OPTIONAL = {"puzzle_emb_ndim": 0, "rms_norm_eps": 1e-5, "forward_dtype": "bfloat16"}
TRM_FIELDS = {"puzzle_emb_len": 16, "mlp_t": False}
EQR_FIELDS = {"lambda_": 0.95, "noise_scale": 0.01, "H_init_std": 1.0, "L_init_std": 1.0}
SE_RRM_FIELDS = {"num_heads_t": 2, "head_dim_t": 64, "add_tokens": 0, "dropout": 0.0, "equivariant_symbols": True}
OUR_NAMES = {
    "num_heads": "num_attention_heads", "lambda_": "update_rate", "num_heads_t": "symbol_num_heads",
    "head_dim_t": "symbol_head_dim", "dropout": "attention_dropout",
}  # fmt: skip
# Read elsewhere, or without meaning for a model.
READ_APART = {
    "name", "short_name", "loss", "rope_theta", "no_ACT_continue", "head_dim", "board_height", "board_width",
    "seq_len", "vocab_size", "num_puzzle_identifiers", "batch_size",
}  # fmt: skip
LOSS_NAME = "losses@ACTLossHead"  # of all of them
LOSS_SUFFIX = "_cross_entropy"
DEFAULT_LOSS = "stablemax" + LOSS_SUFFIX
REFERENCE = re.compile(r"\$\{(?:\.|arch\.)?(\w+)\}")  # of one field to another, as in "${.hidden_size}"


class Architecture(NamedTuple):
    """Our classes, the name the original gives its model (`arch.name` is `module@class`), and its fields.

    Attributes:
        positions: its `pos_encodings`; another one is `other_positions` there, or an error if that is None.
        optional: fields of `arch` besides `REQUIRED`, with their defaults.
        implied: fields of ours that are the same in each of its models.
    """

    config: type[HrmPuzzleConfig]
    model: type[torch.nn.Module]
    original_name: str
    positions: tuple[str, ...]
    optional: dict[str, Any]
    implied: dict[str, Any]
    other_positions: str | None = None


ARCHITECTURES = {
    "hrm": Architecture(
        HrmPuzzleConfig, HrmPuzzleForSolving, "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1",
        ("rope", "learned"), OPTIONAL, {},
    ),
    "trm": Architecture(  # one network for both states; the original ignores H_layers
        TrmPuzzleConfig, TrmPuzzleForSolving, "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1",
        ("rope", "learned", "none"), OPTIONAL | TRM_FIELDS, {"H_layers": 0}, other_positions="none",
    ),
    "eqr": Architecture(
        TrmPuzzleConfig, TrmPuzzleForSolving, "eqr@EqRModel",
        ("rope", "rope2d", "none"), OPTIONAL | TRM_FIELDS | EQR_FIELDS, {"H_layers": 0, "random_initial_states": True},
    ),
    "se_rrm": Architecture(
        SeRrmPuzzleConfig, SeRrmPuzzleForSolving, "recursive_reasoning.trm_equi@SERRM",
        ("rope", "rope2d", "learned"), OPTIONAL | SE_RRM_FIELDS, {"H_layers": 0}, other_positions="learned",
    ),
}  # fmt: skip


def with_arch(run: Any, place: str) -> dict[str, Any]:
    """A configuration with its architecture under `arch`, wherever it stood; references within it are replaced.

    Raises:
        ValueError: there is no architecture, or a reference leads to no field; names `place`.
    """
    run = run if isinstance(run, dict) else {}
    sections = [part.get("arch") for part in (run, *run.values()) if isinstance(part, dict)]
    arch = next((section for section in sections if isinstance(section, dict)), run if "H_cycles" in run else None)
    if arch is None:
        raise ValueError(f"{place}: there is no section `arch`; use the {CONFIG_FILE} that the original saved")
    arch = arch["value"] if isinstance(arch.get("value"), dict) else arch
    resolved = {}
    for name, value in arch.items():
        reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference and reference[1] not in arch:
            raise ValueError(f"{place}: arch.{name}={value!r}: there is no such field of arch; it has {sorted(arch)}")
        resolved[name] = arch[reference[1]] if reference else value
    return {**run, "arch": resolved}


def data_folders(run: dict[str, Any]) -> list[Path]:
    """Data folders that a configuration names, relative to the working folder.

    HRM: data_path, TRM and SE-RRM: data_paths, EqR: dataset.data_path.
    """
    dataset = run.get("dataset")
    named = run.get("data_paths") or run.get("data_path")
    named = named or (dataset.get("data_path") if isinstance(dataset, dict) else None) or []
    return [Path(path) for path in ([named] if isinstance(named, str) else named)]


def config_fields(arch: dict[str, Any], architecture: str, place: str | Path) -> dict[str, Any]:
    """Fields of our config from the original's `arch` section; `place` is named in errors.

    `puzzle_emb_ndim` is the original's: for SE-RRM only whether there is a table.

    Raises:
        ValueError: missing or malformed fields, another architecture, or a mode the original itself cannot run.
    """
    family = ARCHITECTURES[architecture]
    _validate_name(arch, architecture, place)
    if architecture == "trm" and not arch.get("no_ACT_continue", True):
        raise ValueError(
            f"{place}: arch.no_ACT_continue=False: the original TRM cannot run it; set True (halts by q_halt alone)"
        )
    if missing := sorted(REQUIRED.keys() - arch.keys()):
        raise ValueError(f"{place}: arch lacks {missing}")
    if ignored := sorted(arch.keys() - _fields_of(architecture).keys() - READ_APART):
        logger.warning("%s: fields of arch that our %s does not have are ignored: %s", place, architecture, ignored)
    positions = arch["pos_encodings"]
    if positions is None and "none" in family.positions:
        positions = "none"
    elif positions not in family.positions:
        positions = family.other_positions or positions
    arch = {**family.optional, **arch, "pos_encodings": positions}
    fields = {
        OUR_NAMES.get(name, name): parse_field(arch[name], type(example), name, place)
        for name, example in _fields_of(architecture).items()
    } | family.implied
    rope_theta = parse_field(arch.get("rope_theta", 10000.0), float, "rope_theta", place)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    loss = arch.get("loss")
    loss_type = loss.get("loss_type", DEFAULT_LOSS) if isinstance(loss, dict) else DEFAULT_LOSS
    fields["loss_type"] = str(loss_type).removesuffix(LOSS_SUFFIX)
    return fields


def presets_of(architecture: str) -> list[str]:
    """Names of our presets that are of an original's architecture: EqR is a TRM, and theirs stand together."""
    family = ARCHITECTURES[architecture]
    drawn = family.implied.get("random_initial_states", False)
    presets = {name: family.config.from_preset(name) for name in family.config.presets()}
    return [name for name, config in presets.items() if getattr(config, "random_initial_states", False) == drawn]


def arch_of_preset(name: str, architecture: str) -> dict[str, Any]:
    """The `arch` section of one of our presets, for weights that came without a configuration."""
    if name not in presets_of(architecture):
        raise ValueError(f"config={name}: must be a file or a preset ({', '.join(presets_of(architecture))})")
    config = ARCHITECTURES[architecture].config.from_preset(name)
    arch = {each: getattr(config, OUR_NAMES.get(each, each)) for each in _fields_of(architecture)}
    if config.forward_dtype is None:
        del arch["forward_dtype"]  # as the originals compute
    return arch | {"seq_len": config.seq_len, "vocab_size": config.vocab_size, "loss": {"loss_type": config.loss_type}}


def _fields_of(architecture: str) -> dict[str, Any]:
    return REQUIRED | ARCHITECTURES[architecture].optional


def _validate_name(arch: dict[str, Any], architecture: str, place: str | Path) -> None:
    """ValueError for the name of another architecture that we know; a warning for one that we do not."""
    known = {family.original_name.split("@")[1]: key for key, family in ARCHITECTURES.items()}
    class_name = str(arch.get("name", "")).split("@")[-1]
    key = known.get(class_name)
    if key not in (None, architecture):
        raise ValueError(f"{place}: arch.name={arch['name']!r}: is {key!r}; use hrm-hf convert {key}")
    if class_name and key is None:
        logger.warning(
            "%s: arch.name=%r is not the original's %s. It is converted if all tensors fit, but it may compute "
            "otherwise: compare the accuracy (hrm-hf eval puzzles) with the published one",
            place, arch["name"], ARCHITECTURES[architecture].original_name,
        )  # fmt: skip


def parse_field(value: Any, kind: type, name: str, place: str | Path) -> Any:
    """A value of `arch.NAME` as its type; ValueError if it is of another. YAML reads 1e-5 as text."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif type(value) is kind:
        return value
    raise ValueError(f"{place}: arch.{name}={value!r}: must be of type {kind.__name__}")


# Sizes


def find_sizes(
    seq_len: int | None,
    vocab_size: int | None,
    state: dict[str, torch.Tensor],
    fields: dict[str, Any],
    run: dict[str, Any],
    architecture: str,
) -> tuple[int, int, str]:
    """Cells and tokens of a puzzle, and where the cells are from.

    As given, else of the weights, the configuration, its data folder, or the only task that agrees.

    A task that only the vocabulary tells is a guess, and a warning: 12 tokens need not be ARC's 900 cells.

    Args:
        seq_len, vocab_size: as given.
        state: tensors by the original's names, without wrappers.
        fields: ours, as `config_fields` returns them. run: the configuration.

    Raises:
        ValueError: a size is unknown.
    """
    arch, data = run["arch"], data_folders(run)
    of_weights, tokens, tensor = _sizes_of_weights(state, fields, architecture)
    cells = [("--seq-len", seq_len), (tensor, of_weights), ("arch.seq_len", arch.get("seq_len"))]
    told = arch.get("vocab_size") or tokens
    if tokens and told != tokens:
        logger.warning(
            "the configuration has vocab_size=%d, the weights %d: it is not of these weights, and its seq_len is not "
            "used. Give the right one with --config", told, tokens,
        )  # fmt: skip
        cells.pop()
    vocab_size = vocab_size or tokens or told
    if fields["pos_encodings"] == "rope2d" and arch.get("board_height"):
        cells.append(("arch.board_height", arch["board_height"] * arch["board_width"]))
    described = (folder / split / META_FILE for folder in data for split in ("train", "test"))
    if file := next((file for file in described if file.is_file()), None):
        meta = load_json(file)
        if vocab_size in (None, meta["vocab_size"]):
            vocab_size = meta["vocab_size"]
            cells.append((str(file), meta["seq_len"]))
        else:
            logger.warning("%s has vocab_size=%s, the checkpoint %d: it is not used", file, meta["vocab_size"],
                           vocab_size)  # fmt: skip
    place, seq_len = next(((place, count) for place, count in cells if count), ("", None))
    if seq_len and vocab_size:
        return seq_len, vocab_size, place
    known = (seq_len, vocab_size)
    fitting = [task for task, sizes in TASKS.items() if all(k in (None, size) for k, size in zip(known, sizes))]
    named = [task for task in fitting if any(task in folder.name.lower() for folder in data)]
    if len(named or fitting) != 1:
        raise ValueError(
            f"seq_len={seq_len}, vocab_size={vocab_size}: neither weights nor configuration nor data tell both; pass "
            f"{'--seq-len' if vocab_size else '--vocab-size'} N (tokens count padding and empty)"
        )
    task = (named or fitting)[0]
    cells, tokens = TASKS[task]
    if not named:
        logger.warning(
            "vocab_size=%s is that of %s, so seq_len=%d and vocab_size=%d are a guess. If these are other puzzles, "
            "convert again with --seq-len N", vocab_size, task, cells, tokens,
        )  # fmt: skip
    return cells, tokens, place or f"data folder or vocabulary of {task}"


def _sizes_of_weights(
    state: dict[str, torch.Tensor], fields: dict[str, Any], architecture: str
) -> tuple[int | None, int | None, str]:
    """Cells, tokens and the tensor with the cells: not the cells where positions are rotary, nor tokens of SE-RRM."""

    def size(name: str, axis: int) -> int | None:
        return state[name].shape[axis] if name in state else None

    if architecture == "se_rrm":
        columns = size("puzzle_emb.weights", 1)
        tokens = size("embed_symbols", 1) or (columns and columns - fields["hidden_size"])
        return size("pos_embedding", 2), tokens, "pos_embedding"
    prefix = fields["puzzle_emb_ndim"] and (
        fields.get("puzzle_emb_len") or -(-fields["puzzle_emb_ndim"] // fields["hidden_size"])
    )
    name = next((name for name in state if name.endswith("mlp_t.gate_up_proj.weight")), "embed_pos.embedding_weight")
    positions = size(name, 0 if name.startswith("embed_pos") else 1)
    return positions and positions - prefix, size("embed_tokens.embedding_weight", 0), name


# Ours to original


def original_arch(config: HrmPuzzleConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """The original's `arch` section; the inverse of `config_fields`.

    Raises:
        ValueError: fields that the original cannot express.
    """
    family = ARCHITECTURES[architecture]
    plain = {"update_rate": 1, "noise_scale": 0, "random_initial_states": False}  # else it is EqR
    obstacles = [name for name, value in plain.items() if getattr(config, name, value) != value]
    if config.rope_parameters.get("rope_type", "default") != "default":
        obstacles.append("rope_parameters")
    if architecture == "hrm" and config.prefix_len != -(-config.puzzle_emb_ndim // config.hidden_size):
        obstacles.append("puzzle_emb_len")
    if config.pos_encodings not in family.positions:
        obstacles.append("pos_encodings")
    if obstacles:
        found = "; ".join(f"{name}={getattr(config, name)!r}" for name in obstacles)
        raise ValueError(f"the original {architecture} cannot express: {found}")
    arch = {"name": family.original_name, "loss": {"name": LOSS_NAME, "loss_type": config.loss_type + LOSS_SUFFIX}}
    arch |= {name: getattr(config, OUR_NAMES.get(name, name)) for name in _fields_of(architecture)}
    arch["forward_dtype"] = str(dtype).removeprefix("torch.")
    arch["rope_theta"] = config.rope_parameters["rope_theta"]
    return arch | ({"no_ACT_continue": True} if architecture == "trm" else {})
