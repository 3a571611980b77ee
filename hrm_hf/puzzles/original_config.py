"""Convert original HRM, TRM, EqR and SE-RRM configurations to ours, and ours back for HRM and TRM.

Accepted inputs: the all_config.yaml that a run saves, with the architecture under `arch`; only that section, as in
config/arch/*.yaml of the original repositories; either of them nested under another key, or under `arch.value` (W&B).
"""

import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..io.files import load_json, load_yaml
from ..models.bounds import COUNT, SOME, number
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..models.configuration_se_rrm_puzzle import SeRrmPuzzleConfig
from ..models.configuration_trm_puzzle import TrmPuzzleConfig
from ..models.modeling_hrm_puzzle import HrmPuzzleForSolving
from ..models.modeling_se_rrm_puzzle import SeRrmPuzzleForSolving
from ..models.modeling_trm_puzzle import TrmPuzzleForSolving
from .npy_layout import FOLDERS, META_FILE
from .task_registry import original_boards


logger = logging.getLogger(__name__)

State = dict[str, torch.Tensor]
CONFIG_FILE = "all_config.yaml"
# Fields of `arch`: required fields with example values, optional fields with the original defaults.
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
# Fields of `arch` that are converted elsewhere, or that our models do not need.
READ_ELSEWHERE = {
    "name", "short_name", "loss", "rope_theta", "no_ACT_continue", "head_dim", "board_height", "board_width",
    "seq_len", "vocab_size", "num_puzzle_identifiers", "batch_size",
}  # fmt: skip
# Bounds of numeric fields that our config lacks or validates only after we use them. NULLABLE fields may be null.
NULLABLE = ("head_dim", "board_height", "board_width", "seq_len", "vocab_size")
BOUNDS = dict.fromkeys(("hidden_size", "num_heads", *NULLABLE), COUNT)
BOUNDS |= {"puzzle_emb_ndim": SOME, "puzzle_emb_len": SOME, "rope_theta": number(1e-6)}
LOSS_NAME = "losses@ACTLossHead"  # loss class of all four original repositories
LOSS_SUFFIX = "_cross_entropy"
DEFAULT_LOSS = "stablemax" + LOSS_SUFFIX
REFERENCE = re.compile(r"\$\{(?:\.|arch\.)?(\w+)\}")  # reference to another field, such as "${.hidden_size}"
NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?e[+-]?\d+", re.I)  # YAML 1.1 reads 1e-5 as text

# Top-level config keys of the original code except `arch`, each with its default and the option of run_puzzle.py that
# takes the value, or a note on how the value is used.
RUN_KEYS = {
    "data_path": ("data/arc-aug-1000", "--data_path, after `hrm-hf data import` if necessary"),
    "global_batch_size": (768, "global_batch_size"),
    "epochs": (100_000, "--max_steps"),
    "eval_interval": (10_000, "--eval_steps, --save_steps"),
    "checkpoint_every_eval": (True, "--save_strategy steps or no"),
    "lr": (1e-4, "learning_rate"),
    "lr_min_ratio": (1.0, "lr_min_ratio"),
    "lr_warmup_steps": (2000, "warmup_steps"),
    "beta1": (0.9, "adam_beta1"),
    "beta2": (0.95, "adam_beta2"),
    "weight_decay": (0.1, "weight_decay"),
    "puzzle_emb_lr": (1e-2, "puzzle_emb_lr"),
    "puzzle_emb_weight_decay": (0.1, "puzzle_emb_weight_decay"),
    "seed": (0, "seed"),
    "project_name": (None, "WANDB_PROJECT, and a folder of checkpoints/"),
    "run_name": (None, "--run_name, and a folder in the project's folder"),
    "checkpoint_path": (None, "--output_dir"),
    "eval_save_outputs": ("[]", "hrm-hf eval puzzles --out"),
}


class Architecture(NamedTuple):
    """An original architecture: our classes for it, its `arch.name` (`module@class`), and its fields.

    Attributes:
        positions: Valid `pos_encodings`; others are treated as `other_positions`, or rejected if that is None.
        optional: Fields of `arch` other than `REQUIRED`, with their defaults.
        implied: Fields of our config with the same value for all models of this architecture.
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
    "trm": Architecture(  # H_layers is 0, because one network updates both states; the original TRM ignores it
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
    """Move a configuration's architecture section to `arch`, resolve references, and parse numbers stored as text.

    Raises:
        ValueError: If there is no architecture, or a referenced field is missing; the message names `place`.
    """
    run = run if isinstance(run, dict) else {}
    sections = [part.get("arch") for part in (run, *run.values()) if isinstance(part, dict)]
    arch = next((section for section in sections if isinstance(section, dict)), run if "H_cycles" in run else None)
    if arch is None:
        raise ValueError(f"{place}: section `arch` is missing; use the {CONFIG_FILE} that the run saved")
    arch = arch["value"] if isinstance(arch.get("value"), dict) else arch
    resolved = dict(arch)
    for name, value in arch.items():
        if isinstance(value, str) and (reference := REFERENCE.fullmatch(value)):
            if reference[1] not in arch:
                raise ValueError(f"{place}: arch.{name}={value!r}: refers to a missing field; arch has {sorted(arch)}")
            resolved[name] = arch[reference[1]]
        elif isinstance(value, str) and NUMBER.fullmatch(value):
            resolved[name] = float(value)
    return {**run, "arch": resolved}


def data_folders(run: dict[str, Any]) -> list[Path]:
    """Return the data folders named in a configuration: `data_path`, `data_paths` or (EqR) `dataset.data_path`."""
    dataset = run["dataset"] if isinstance(run.get("dataset"), dict) else {}
    named = run.get("data_paths") or run.get("data_path") or dataset.get("data_path") or []
    return [Path(str(path)) for path in (named if isinstance(named, (list, tuple)) else [named])]


def config_fields(arch: dict[str, Any], architecture: str, place: str | Path) -> dict[str, Any]:
    """Convert an original `arch` section to fields of our config.

    `puzzle_emb_ndim` is copied; for SE-RRM it only indicates whether there is a puzzle table. Errors name `place`.

    Raises:
        ValueError: If fields are missing or malformed, or the architecture or mode is not supported.
    """
    family = ARCHITECTURES[architecture]
    _validate_name(arch, architecture, place)
    if architecture == "trm" and not arch.get("no_ACT_continue", True):
        raise ValueError(f"{place}: arch.no_ACT_continue=False: does not run in the original TRM; set it to true")
    if missing := sorted(REQUIRED.keys() - arch.keys()):
        raise ValueError(f"{place}: arch lacks the fields {missing}; add them")
    _validate_numbers(arch, place)
    if ignored := sorted(arch.keys() - _fields_of(architecture).keys() - READ_ELSEWHERE):
        logger.warning("%s: ignoring fields of arch that our %s does not have: %s", place, architecture, ignored)
    arch = {**family.optional, **arch, "pos_encodings": arch["pos_encodings"] or "none"}
    if arch["pos_encodings"] not in family.positions and family.other_positions:
        arch["pos_encodings"] = family.other_positions
    fields = {OUR_NAMES.get(name, name): arch[name] for name in _fields_of(architecture)} | family.implied
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": arch.get("rope_theta", 10000.0)}
    loss = arch["loss"] if isinstance(arch.get("loss"), dict) else {}
    return fields | {"loss_type": str(loss.get("loss_type", DEFAULT_LOSS)).removesuffix(LOSS_SUFFIX)}


def presets_of(architecture: str) -> list[str]:
    """List our presets for an original architecture (TRM and EqR share a config class, but not presets)."""
    config, implied = ARCHITECTURES[architecture].config, ARCHITECTURES[architecture].implied
    drawn = {name: getattr(config.from_preset(name), "random_initial_states", False) for name in config.presets()}
    return [name for name in drawn if drawn[name] == implied.get("random_initial_states", False)]


def arch_of_preset(name: str, architecture: str) -> dict[str, Any]:
    """Return the `arch` section for one of our presets, used if weights have no configuration."""
    if name not in presets_of(architecture):
        raise ValueError(f"config={name}: must be a file or a preset ({', '.join(presets_of(architecture))})")
    config = ARCHITECTURES[architecture].config.from_preset(name)
    arch = {each: getattr(config, OUR_NAMES.get(each, each)) for each in _fields_of(architecture)}
    arch |= {"seq_len": config.seq_len, "vocab_size": config.vocab_size, "loss": {"loss_type": config.loss_type}}
    return {each: value for each, value in arch.items() if value is not None}  # None: use the original default


def _fields_of(architecture: str) -> dict[str, Any]:
    return REQUIRED | ARCHITECTURES[architecture].optional


def _validate_name(arch: dict[str, Any], architecture: str, place: str | Path) -> None:
    """Raise ValueError if `arch.name` is the name of another architecture. Warn if the name is unknown."""
    known = {family.original_name.split("@")[1]: key for key, family in ARCHITECTURES.items()}
    class_name = str(arch.get("name", "")).split("@")[-1]
    key = known.get(class_name)
    if key not in (None, architecture):
        raise ValueError(f"{place}: arch.name={arch['name']!r}: names architecture {key!r}; use hrm-hf convert {key}")
    if class_name and key is None:
        text = "%s: arch.name=%r is unknown, so results may differ; compare the accuracy with the published value"
        logger.warning(text, place, arch["name"])


def _validate_numbers(arch: dict[str, Any], place: str | Path) -> None:
    """Raise ValueError if a number is out of bounds, or head_dim is not hidden_size / num_heads."""
    for name, bound in BOUNDS.items():
        if name not in NULLABLE and arch.get(name, 0) is None:
            raise ValueError(f"{place}: arch.{name}=None: must be a number")
        replace(bound, name=f"{place}: arch.{name}")(arch.get(name))
    head_dim = arch["hidden_size"] / arch["num_heads"]
    if arch.get("head_dim") not in (None, head_dim):
        raise ValueError(f"{place}: arch.head_dim={arch['head_dim']}: must be hidden_size / num_heads = {head_dim:g}")


# Sizes


def find_sizes(
    seq_len: int | None, vocab_size: int | None, state: State, fields: dict[str, Any], run: dict[str, Any],
    architecture: str,
) -> tuple[int, int, str]:  # fmt: skip
    """Return seq_len, vocab_size, and a description of where seq_len came from.

    The sizes come from the arguments, else the weights, the configuration, its data folder, or the only task that
    matches. A task inferred from the vocabulary alone is a guess and gives a warning: 12 tokens do not imply ARC's 900
    cells. `state` has the original names without wrappers, and `fields` comes from `config_fields`.

    Raises:
        ValueError: If a size is unknown.
    """
    arch, data = run["arch"], data_folders(run)
    of_weights, tokens, tensor = _sizes_of_weights(state, fields, architecture)
    cells = [("--seq-len", seq_len), (tensor, of_weights)]
    configured = arch.get("vocab_size") or tokens
    if tokens in (None, configured):
        cells.append(("arch.seq_len", arch.get("seq_len")))
    else:
        found = f"vocab_size is {configured} in the config but {tokens} in the weights"
        logger.warning("%s, so the config is for other boards; ignoring its arch.seq_len", found)
    vocab_size = vocab_size or tokens or configured
    if fields["pos_encodings"] == "rope2d" and arch.get("board_height") and arch.get("board_width"):
        cells.append(("arch.board_height", arch["board_height"] * arch["board_width"]))
    described = (folder / split / META_FILE for folder in data for split in FOLDERS)
    if file := next((file for file in described if file.is_file()), None):
        meta = load_json(file)
        if vocab_size in (None, meta["vocab_size"]):
            vocab_size = meta["vocab_size"]
            cells.append((str(file), meta["seq_len"]))
        else:
            text = "%s has vocab_size=%s, but the checkpoint has %d; ignoring the file"
            logger.warning(text, file, meta["vocab_size"], vocab_size)
    place, seq_len = next((each for each in cells if each[1]), ("", None))
    if seq_len and vocab_size:
        return seq_len, vocab_size, place
    known = original_boards()
    fitting = [task for task, (s, v, _) in known.items() if seq_len in (None, s) and vocab_size in (None, v)]
    named = [task for task in fitting if any(task in folder.name.lower() for folder in data)]
    if len(named or fitting) != 1:
        raise ValueError(
            f"seq_len={seq_len}, vocab_size={vocab_size}: not found in weights, configuration or data; pass "
            f"{'--seq-len N' if vocab_size else '--vocab-size N (including padding and empty)'}"
        )
    task = (named or fitting)[0]
    cells, tokens, _ = known[task]
    if not named:
        text = "vocab_size=%s matches %s, so seq_len=%d is a guess; for other puzzles convert with --seq-len N"
        logger.warning(text, tokens, task, cells)
    return cells, tokens, place or f"data folder or vocabulary of {task}"


def _sizes_of_weights(state: State, fields: dict[str, Any], architecture: str) -> tuple[int | None, int | None, str]:
    """Return seq_len, vocab_size (None if no tensor reveals it) and the name of the tensor that determines seq_len."""

    def size(name: str, axis: int) -> int | None:
        return state[name].shape[axis] if name in state else None

    if architecture == "se_rrm":
        columns = size("puzzle_emb.weights", 1)
        tokens = size("embed_symbols", 1) or (columns and columns - fields["hidden_size"])
        return size("pos_embedding", 2), tokens, "pos_embedding"
    ndim, mixing = fields["puzzle_emb_ndim"], "mlp_t.gate_up_proj.weight"
    prefix = ndim and (fields.get("puzzle_emb_len") or -(-ndim // fields["hidden_size"]))
    name = next((name for name in state if name.endswith(mixing)), "embed_pos.embedding_weight")
    positions = size(name, 0 if name.startswith("embed_pos") else 1)
    return positions and positions - prefix, size("embed_tokens.embedding_weight", 0), name


# ---- from our configs to the original ones ----


def original_arch(config: HrmPuzzleConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the original `arch` section for one of our configs (inverse of `config_fields`).

    Raises:
        ValueError: If the original code cannot express a field.
    """
    family = ARCHITECTURES[architecture]
    plain = {"update_rate": 1, "noise_scale": 0, "random_initial_states": False}  # values in the original HRM and TRM
    obstacles = [name for name, value in plain.items() if getattr(config, name, value) != value]
    if config.rope_parameters.get("rope_type", "default") != "default":
        obstacles.append("rope_parameters")
    if architecture == "hrm" and config.prefix_len != -(-config.puzzle_emb_ndim // config.hidden_size):
        obstacles.append("puzzle_emb_len")
    if config.pos_encodings not in family.positions:
        obstacles.append("pos_encodings")
    if obstacles:
        found = "; ".join(f"{name}={getattr(config, name)!r}" for name in obstacles)
        raise ValueError(f"the original {architecture} does not support: {found}")
    arch = {"name": family.original_name, "loss": {"name": LOSS_NAME, "loss_type": config.loss_type + LOSS_SUFFIX}}
    arch |= {name: getattr(config, OUR_NAMES.get(name, name)) for name in _fields_of(architecture)}
    arch |= {"forward_dtype": str(dtype)[len("torch.") :], "rope_theta": config.rope_parameters["rope_theta"]}
    return arch | ({"no_ACT_continue": True} if architecture == "trm" else {})


def saved_run(src: Path) -> dict[str, Any]:
    """Return the settings of the run that saved `src`, under the original keys, plus `step` but without `arch`."""
    state_file, run_file = src / "trainer_state.json", src / CONFIG_FILE
    state = load_json(state_file) if state_file.is_file() else {}
    for file in (src / "recipe.yaml", *([src.parent / "recipe.yaml"] if state else [])):
        if file.is_file():
            return _run_of_recipe(load_yaml(file), state)
    run = with_arch(load_yaml(run_file), str(run_file)) if run_file.is_file() else {}
    return {name: value for name, value in run.items() if name != "arch"}


def _run_of_recipe(recipe: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Translate a run_puzzle.py recipe, and the epoch counts in the trainer state, to the original keys."""
    rows = recipe.get("per_device_train_batch_size", 8) * recipe.get("gradient_accumulation_steps", 1)
    run = {"global_batch_size": rows, "run_name": recipe.get("run_name"), "checkpoint_path": recipe.get("output_dir")}
    run |= {name: recipe[ours] for name, (_, ours) in RUN_KEYS.items() if recipe.get(ours) is not None}
    words = shlex.split(recipe.get("build_data") or "")
    run["data_path"] = words[1] if words[:1] == ["import"] else recipe.get("data_path", "data")
    run["checkpoint_every_eval"] = recipe.get("save_strategy") == "steps"
    steps, warmup, run["step"] = state.get("max_steps", 0), run.get("lr_warmup_steps", 0), state.get("global_step", 0)
    run["lr_warmup_steps"] = int(warmup if warmup >= 1 else warmup * steps)  # a value below 1 is a fraction of the run
    if steps > 0 and run["step"] > 0:
        between = recipe.get("eval_steps") if recipe.get("eval_strategy") == "steps" else None
        evaluations = max(1, round(steps / between)) if between and between >= 1 else 1
        run["eval_interval"] = max(1, round(steps / run["step"] * state["epoch"] / evaluations))  # divides epochs
        run["epochs"] = run["eval_interval"] * evaluations
    return run
