"""Tensors of the original HRM, TRM, EqR and SE-RRM code under our names and in our layout, and the names back.

HRM, TRM and EqR have our tensors under other names. SE-RRM has some of them in parts, and its attention over positions
turns the quarters of a head by row, column, row, column where ours turns them by row, row, column, column: rows of the
projections of queries and keys change places, and no number changes.
"""

import re

import torch


ORIGINAL_PREFIX = "model.inner."  # the loss head and the ACT wrapper
# What wraps the model: these two, torch.compile (which may also have wrapped a part of it) and DDP.
WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|model\.|inner\.)*|(?<=\.)_orig_mod\.")
BATCH_COPIES = re.compile(r"puzzle_emb\.local_(?:weights|ids)")  # of a training batch, which some runs saved
OUR_NAMES = {
    "embed_tokens.embedding_weight": "model.embed.tokens.weight",
    "embed_pos.embedding_weight": "model.embed.positions.weight",
    "puzzle_emb.weights": "model.puzzle_emb.weight",
}
ORIGINAL_NAMES = {ours: original for original, ours in OUR_NAMES.items()}
HEADS = ("lm_head.", "q_head.")

# SE-RRM: our tables, and the original's tensors that are their rows in this order.
SE_RRM_TABLES = {
    "model.embed.tokens.weight": ("embed_special_tokens", "embed_symbol_tokens", "embed_symbols"),  # [1, V, 1, D]
    "model.embed.extra.weight": ("add_tokens_special", "add_tokens"),  # [1, V, add_tokens, D]
    "model.embed.positions.weight": ("pos_embedding",),  # [1, 1, S, D]
}
SE_RRM_NAMES = {"Z_init": "H_init", ".attn.": ".self_attn.", ".attn_t.": ".symbol_attn."}


def our_name(original: str) -> str:
    """Our name of a tensor of HRM, TRM or EqR, whose wrappers' prefixes may be present or not."""
    unwrapped = WRAPPERS.sub("", original)
    return OUR_NAMES.get(unwrapped, unwrapped if unwrapped.startswith(HEADS) else f"model.{unwrapped}")


def original_name(ours: str) -> str:
    """The original's name, as its loss head saves it, of one of our tensors; the inverse of `our_name`."""
    return ORIGINAL_PREFIX + ORIGINAL_NAMES.get(ours, ours.removeprefix("model."))


def our_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of HRM, TRM or EqR under our names."""
    return {our_name(name): tensor for name, tensor in state.items()}


def se_rrm_tensors(state: dict[str, torch.Tensor], num_heads: int, pos_encodings: str) -> dict[str, torch.Tensor]:
    """Tensors of SE-RRM, or their gradients, under our names and in our layout; what is missing stays so.

    Args:
        num_heads: of the attention over positions.
        pos_encodings: the original's; "rope2d" has rows that change places.
    """
    state = {WRAPPERS.sub("", name): tensor for name, tensor in state.items()}
    ours = {}
    for table, parts in SE_RRM_TABLES.items():
        if rows := [state.pop(part) for part in parts if part in state]:
            ours[table] = torch.cat([part.flatten(0, -2) for part in rows])
    for name, tensor in state.items():
        if pos_encodings == "rope2d" and name.endswith(".attn.qkv_proj.weight"):
            tensor = halves_side_by_side(tensor, num_heads)
        for theirs, here in SE_RRM_NAMES.items():
            name = name.replace(theirs, here)
        ours[our_name(name)] = tensor
    return ours


def halves_side_by_side(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [3 * heads * head_dim, D] whose heads turn as row, column, row, column, as row, row, column, column."""
    quarters = weight.unflatten(0, (3, num_heads, 4, -1))
    turned = quarters[:2][:, :, [0, 2, 1, 3]]  # v does not turn
    return torch.cat((turned, quarters[2:])).flatten(0, 3)
