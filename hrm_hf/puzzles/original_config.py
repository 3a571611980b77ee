"""Configurations of the original HRM, TRM, EqR and SE-RRM code as fields of ours, and the way back for HRM and TRM.

What is read: the all_config.yaml that a run saves, with the architecture under `arch`; that section alone, as in the
originals' config/arch/*.yaml; the same below one more key, or under `arch.value` as W&B writes it.
"""

import logging
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..io.bounded_files import load_yaml
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..models.configuration_se_rrm_puzzle import SeRrmPuzzleConfig
from ..models.configuration_trm_puzzle import TrmPuzzleConfig
from ..models.modeling_hrm_puzzle import HrmPuzzleForSolving
from ..models.modeling_se_rrm_puzzle import SeRrmPuzzleForSolving
from ..models.modeling_trm_puzzle import TrmPuzzleForSolving


logger = logging.getLogger(__name__)

# Fields of `arch` with our name and type; the other tables have the defaults of the original code, the first none.
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
EQR_FIELDS = {
    "lambda_": ("update_rate", float, 0.95),
    "noise_scale": ("noise_scale", float, 0.01),
    "H_init_std": ("H_init_std", float, 1.0),
    "L_init_std": ("L_init_std", float, 1.0),
}
SE_RRM_FIELDS = {
    "num_heads_t": ("symbol_num_heads", int, 2),
    "head_dim_t": ("symbol_head_dim", int, 64),
    "add_tokens": ("add_tokens", int, 0),
    "dropout": ("attention_dropout", float, 0.0),
    "equivariant_symbols": ("equivariant_symbols", bool, True),
}
# Used elsewhere, or without meaning for a model.
READ_APART = {
    "name", "short_name", "loss", "rope_theta", "no_ACT_continue", "head_dim", "board_height", "board_width",
    "seq_len", "vocab_size", "num_puzzle_identifiers", "batch_size",
}  # fmt: skip
LOSS_SUFFIX = "_cross_entropy"
DEFAULT_LOSS = "stablemax" + LOSS_SUFFIX
REFERENCE = re.compile(r"\$\{(?:\.|arch\.)?(\w+)\}")  # of one field to another, as in "${.hidden_size}"


class Architecture(NamedTuple):
    """Our classes, the name the original gives its model (`arch.name` is `module@class`), and its fields.

    Attributes:
        positions: its `pos_encodings`; another one is `other_positions` there, or an error if that is None.
        optional: fields of `arch` beside `REQUIRED_FIELDS`.
        implied: fields of ours that are the same in each of its models.
        way_back: whether ours can be written in its layout.
    """

    config: type[HrmPuzzleConfig]
    model: type[torch.nn.Module]
    original_name: str
    positions: tuple[str, ...]
    optional: dict[str, tuple]
    implied: dict[str, Any]
    other_positions: str | None = None
    way_back: bool = False


ARCHITECTURES = {
    "hrm": Architecture(
        HrmPuzzleConfig,
        HrmPuzzleForSolving,
        "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1",
        ("rope", "learned"),
        OPTIONAL_FIELDS,
        {},
        way_back=True,
    ),
    "trm": Architecture(
        TrmPuzzleConfig,
        TrmPuzzleForSolving,
        "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1",
        ("rope", "learned", "none"),
        OPTIONAL_FIELDS | TRM_FIELDS,
        {"H_layers": 0},  # one network for both states; the original ignores the field
        other_positions="none",
        way_back=True,
    ),
    "eqr": Architecture(
        TrmPuzzleConfig,
        TrmPuzzleForSolving,
        "eqr@EqRModel",
        ("rope", "rope2d", "none"),
        OPTIONAL_FIELDS | TRM_FIELDS | EQR_FIELDS,
        {"H_layers": 0, "random_initial_states": True},
    ),
    "se_rrm": Architecture(
        SeRrmPuzzleConfig,
        SeRrmPuzzleForSolving,
        "recursive_reasoning.trm_equi@SERRM",
        ("rope", "rope2d", "learned"),
        OPTIONAL_FIELDS | SE_RRM_FIELDS,
        {"H_layers": 0},
        other_positions="learned",
    ),
}
LOSS_NAME = "losses@ACTLossHead"  # of all of them


def architecture_of(key: str) -> Architecture:
    """The row of `ARCHITECTURES`. Raises ValueError for another key."""
    if key not in ARCHITECTURES:
        raise ValueError(f"architecture={key!r} is not one of {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[key]


def read_run(file: Path) -> dict[str, Any]:
    """A configuration file: the fields of a run, with `arch`. ValueError if it is no YAML, or has no architecture."""
    try:
        run = load_yaml(file)
    except ValueError as error:
        raise ValueError(f"{file} is not YAML of plain values: {error}") from error
    return with_arch(run, str(file))


def with_arch(run: Any, place: str) -> dict[str, Any]:
    """A configuration with its architecture under `arch`, wherever it stood; references within it are replaced.

    Raises:
        ValueError: there is no architecture, or a reference leads to no field; names `place`.
    """
    run = run if isinstance(run, dict) else {}
    sections = [part.get("arch") for part in (run, *run.values()) if isinstance(part, dict)]
    arch = next((section for section in sections if isinstance(section, dict)), run if "H_cycles" in run else None)
    if arch is None:
        raise ValueError(
            f"{place} has no section `arch`; expected the all_config.yaml that the original saved, or that section "
            "alone, as in its config/arch"
        )
    arch = arch["value"] if isinstance(arch.get("value"), dict) else arch
    resolved = {}
    for name, value in arch.items():
        reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference and reference[1] not in arch:
            raise ValueError(f"{place}: arch.{name}={value!r} names no field of arch; it has {sorted(arch)}")
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
    family = architecture_of(architecture)
    _validate_name(arch, architecture, place)
    if architecture == "trm" and not arch.get("no_ACT_continue", True):
        raise ValueError(
            f"{place}: arch.no_ACT_continue=False does not work in the original TRM (it unpacks five values from a "
            "three-tuple), so it cannot have trained this checkpoint. Our TRM halts by q_halt alone, as with True; if "
            "that is what you want, set the field to True and convert again"
        )
    missing = sorted(REQUIRED_FIELDS.keys() - arch.keys())
    if missing:
        raise ValueError(f"{place}: arch lacks {missing}")
    ignored = sorted(arch.keys() - REQUIRED_FIELDS.keys() - family.optional.keys() - READ_APART)
    if ignored:
        logger.warning("%s: fields of arch that our %s does not have are ignored: %s", place, architecture, ignored)

    arch = {**arch, "pos_encodings": _positions(arch["pos_encodings"], family)}
    fields = {ours: parse_field(arch[name], kind, name, place) for name, (ours, kind) in REQUIRED_FIELDS.items()}
    for name, (ours, kind, default) in family.optional.items():
        fields[ours] = parse_field(arch.get(name, default), kind, name, place)
    fields |= family.implied
    head_dim = fields["hidden_size"] / max(fields["num_attention_heads"], 1)
    if arch.get("head_dim", head_dim) != head_dim:
        raise ValueError(
            f"{place}: arch.head_dim={arch['head_dim']!r} is not hidden_size / num_heads = {head_dim:g}, which our "
            f"{architecture} cannot express"
        )
    rope_theta = parse_field(arch.get("rope_theta", 10000.0), float, "rope_theta", place)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    loss = arch.get("loss")
    loss_type = loss.get("loss_type", DEFAULT_LOSS) if isinstance(loss, dict) else DEFAULT_LOSS
    fields["loss_type"] = str(loss_type).removesuffix(LOSS_SUFFIX)
    return fields


def presets_of(architecture: str) -> list[str]:
    """Names of our presets that are of an original's architecture: EqR is a TRM, and theirs stand together."""
    family = architecture_of(architecture)
    drawn = family.implied.get("random_initial_states", False)
    return [
        name
        for name in family.config.presets()
        if getattr(family.config.from_preset(name), "random_initial_states", False) == drawn
    ]


def arch_of_preset(name: str, architecture: str) -> dict[str, Any]:
    """The `arch` section of one of our presets, for weights that came without a configuration.

    Raises:
        ValueError: no preset of the architecture.
    """
    family = architecture_of(architecture)
    if name not in presets_of(architecture):
        raise ValueError(
            f"--config {name} is neither a file nor a preset of {architecture} ({', '.join(presets_of(architecture))})"
        )
    config = family.config.from_preset(name)
    fields = REQUIRED_FIELDS | family.optional
    arch = {theirs: getattr(config, entry[0]) for theirs, entry in fields.items()}
    if config.forward_dtype is None:
        del arch["forward_dtype"]  # as the originals compute
    return arch | {"seq_len": config.seq_len, "vocab_size": config.vocab_size, "loss": {"loss_type": config.loss_type}}


def board_of(arch: dict[str, Any], seq_len: int, pos_encodings: str) -> list[int] | None:
    """Rows and columns of the board: those of `arch`, or a square where positions need them; None if nothing tells."""
    named = [arch.get("board_height"), arch.get("board_width")]
    if None not in named and named[0] * named[1] == seq_len:
        return named
    side = math.isqrt(seq_len)
    return [side, side] if pos_encodings == "rope2d" and side * side == seq_len else None


def _validate_name(arch: dict[str, Any], architecture: str, place: str | Path) -> None:
    """ValueError for the name of another architecture that we know; a warning for one that we do not."""
    known = {family.original_name.split("@")[1]: key for key, family in ARCHITECTURES.items()}
    class_name = str(arch.get("name", "")).split("@")[-1]
    if known.get(class_name, architecture) != architecture:
        raise ValueError(
            f"{place}: arch.name={arch['name']!r} is {known[class_name]!r}, not {architecture!r}; "
            f"hrm-hf convert {known[class_name]}"
        )
    if class_name and class_name not in known:
        logger.warning(
            "%s: arch.name=%r is not the original's %s (%s). It is converted if all tensors fit, but if it computes "
            "otherwise, the answers are wrong: compare the accuracy (hrm-hf eval puzzles) with the published one",
            place, arch["name"], architecture, ARCHITECTURES[architecture].original_name,
        )  # fmt: skip


def _positions(value: Any, family: Architecture) -> Any:
    if value is None and "none" in family.positions:
        return "none"
    return value if value in family.positions else family.other_positions or value


def parse_field(value: Any, kind: type, name: str, place: str | Path) -> Any:
    """A value of `arch.NAME` as its type; ValueError if it is of another. YAML reads 1e-5 as text."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif type(value) is kind:
        return value
    raise ValueError(f"{place}: arch.{name}={value!r} is not of type {kind.__name__}")


# Ours to original


def original_arch(config: HrmPuzzleConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """The original's `arch` section; the inverse of `config_fields`.

    Raises:
        ValueError: fields that the original cannot express.
    """
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
    loss = {"name": LOSS_NAME, "loss_type": config.loss_type + LOSS_SUFFIX}
    arch = {"name": family.original_name, "loss": loss}
    arch.update({name: getattr(config, entry[0]) for name, entry in (REQUIRED_FIELDS | family.optional).items()})
    arch["forward_dtype"] = str(dtype).removeprefix("torch.")
    arch["rope_theta"] = config.rope_parameters["rope_theta"]
    return arch | ({"no_ACT_continue": True} if architecture == "trm" else {})
