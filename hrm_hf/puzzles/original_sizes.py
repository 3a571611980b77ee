"""How many cells and tokens the puzzles of an original checkpoint have, where its configuration does not say.

From the shapes of the weights, the data folder that the run names, or the one published task that agrees with what is
known. A task that only the vocabulary tells is a guess, and said so: 12 tokens need not be ARC's 900 cells.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..io.bounded_files import load_json
from .original_config import parse_field


logger = logging.getLogger(__name__)

# Cells and tokens of the tasks that the originals publish; a data folder's name has the word in it.
TASKS = {"sudoku": (81, 11), "maze": (900, 6), "arc": (900, 12)}


class Sizes(NamedTuple):
    """Positions and tokens of a puzzle, None where unknown; where the first is known from, and what speaks against."""

    seq_len: int | None = None
    vocab_size: int | None = None
    seq_len_from: str = "--seq-len"
    doubt: str = ""


def find_sizes(
    given: Sizes,
    state: dict[str, torch.Tensor],
    fields: dict[str, Any],
    run: dict[str, Any],
    data: list[Path],
    architecture: str,
) -> Sizes:
    """The sizes as given, else of the weights, the configuration, its data folder, or the only task that agrees.

    Args:
        state: tensors by the original's names, without wrappers.
        fields: ours, as `config_fields` returns them. run: the configuration. data: the folders that it names.

    Raises:
        ValueError: sizes in the configuration that are no numbers.
    """
    arch = run["arch"]
    names = ("seq_len", "vocab_size", "board_height", "board_width")
    sizes = {name: parse_field(arch[name], int, name, "the configuration") for name in names if arch.get(name)}
    weights = _sizes_of_weights(state, fields, architecture)
    if None not in (tokens := (sizes.get("vocab_size"), weights.vocab_size)) and tokens[0] != tokens[1]:
        logger.warning(
            "the configuration has vocab_size=%d, the weights %d: it is not of these weights, and its seq_len is not "
            "used. If its cycles are not theirs either, the model answers wrongly: give the right one with --config",
            *tokens,
        )  # fmt: skip
        sizes.pop("seq_len", None)
    known = [given, weights, Sizes(sizes.get("seq_len"), sizes.get("vocab_size"), "arch.seq_len")]
    if fields["pos_encodings"] == "rope2d" and sizes.keys() >= {"board_height", "board_width"}:
        known.append(Sizes(sizes["board_height"] * sizes["board_width"], None, "arch.board_height"))
    found = _first(known)
    if found.seq_len is not None and found.vocab_size is not None:
        return found
    described = (folder / split / "dataset.json" for folder in data for split in ("train", "test"))
    if file := next((file for file in described if file.is_file()), None):
        meta = load_json(file)
        if found.vocab_size in (None, meta.get("vocab_size")):
            return _first([found, Sizes(int(meta["seq_len"]), meta.get("vocab_size"), str(file))])
        doubt = (
            f"{file} has vocab_size={meta.get('vocab_size')}, the checkpoint {found.vocab_size}: not the data it was "
            "trained on. "
        )
        logger.warning("%sIt is not used", doubt)
        found = found._replace(doubt=doubt)
    return _guessed(found, data)


def validate_sizes(sizes: Sizes, weights: Path, data: list[Path]) -> None:
    """Raises ValueError where a size is unknown."""
    folders = [str(path) for path in data]
    if sizes.vocab_size is None:
        raise ValueError(
            f"{weights}: the number of tokens is neither in the weights, which treat symbols alike, nor in a data "
            f"folder ({folders}). Pass it: --vocab-size N (padding and empty included)"
        )
    if sizes.seq_len is None:
        raise ValueError(
            f"{weights}: the number of cells of a puzzle is neither in the weights nor in a data folder ({folders}), "
            f"and vocab_size={sizes.vocab_size} is that of no known task "
            f"({sorted(tokens for _, tokens in TASKS.values())}). {sizes.doubt}Pass it: --seq-len N"
        )


def _sizes_of_weights(state: dict[str, torch.Tensor], fields: dict[str, Any], architecture: str) -> Sizes:
    """The sizes that shapes tell: not the cells where positions are rotary, and for SE-RRM not always the tokens."""
    if architecture == "se_rrm":
        columns = _size(state.get("puzzle_emb.weights"), 1)
        vocab_size = None if columns is None else columns - fields["hidden_size"]
        return Sizes(
            _size(state.get("pos_embedding"), 2), _size(state.get("embed_symbols"), 1) or vocab_size, "pos_embedding"
        )
    vocab_size = _size(state.get("embed_tokens.embedding_weight", state.get("lm_head.weight")), 0) or 1
    prefix = fields["puzzle_emb_ndim"] and (
        fields.get("puzzle_emb_len") or -(-fields["puzzle_emb_ndim"] // fields["hidden_size"])
    )
    for name, tensor in state.items():
        axis = 0 if name == "embed_pos.embedding_weight" else 1 if name.endswith("mlp_t.gate_up_proj.weight") else None
        if axis is not None and (positions := _size(tensor, axis)) is not None:
            return Sizes(positions - prefix, vocab_size, name)
    return Sizes(None, vocab_size)


def _size(tensor: torch.Tensor | None, axis: int) -> int | None:
    return None if tensor is None or tensor.dim() <= axis else tensor.shape[axis]


def _first(known: list[Sizes]) -> Sizes:
    """Of each size the first that is known."""
    cells = next((sizes for sizes in known if sizes.seq_len is not None), Sizes())
    return cells._replace(vocab_size=next((s.vocab_size for s in known if s.vocab_size is not None), None))


def _guessed(found: Sizes, data: list[Path]) -> Sizes:
    """Unknown sizes from the published task that agrees with what is known; a warning if no data folder says so."""
    known = (found.seq_len, found.vocab_size)
    fitting = [task for task, sizes in TASKS.items() if all(k in (None, size) for k, size in zip(known, sizes))]
    named = [task for task in fitting if any(task in folder.name.lower() for folder in data)]
    if len(named or fitting) != 1:
        return found
    task = (named or fitting)[0]
    cells, tokens = TASKS[task]
    if not named:
        logger.warning(
            "%s is that of %s, so seq_len=%d and vocab_size=%d are a guess that nothing confirms. If these are other "
            "puzzles, convert again with --seq-len N%s",
            f"vocab_size={tokens}" if known[1] else f"seq_len={cells}", task, cells, tokens,
            "" if known[1] else " --vocab-size N",
        )  # fmt: skip
    origin = found.seq_len_from if known[0] else f"vocab_size={tokens}" if known[1] else f"data folder of {task}"
    return Sizes(cells, tokens, origin)
