"""Models with a few thousand weights for tests of behavior."""

import torch

from hrm_hf import (
    HrmPuzzleConfig,
    HrmPuzzleForSolving,
    SeRrmPuzzleConfig,
    SeRrmPuzzleForSolving,
    TrmPuzzleConfig,
    TrmPuzzleForSolving,
)


CLASSES = {
    "hrm": (HrmPuzzleConfig, HrmPuzzleForSolving),
    "trm": (TrmPuzzleConfig, TrmPuzzleForSolving),
    "trm-mlp": (TrmPuzzleConfig, TrmPuzzleForSolving),
}
ARCHITECTURES = list(CLASSES)
SEQ_LEN, VOCAB_SIZE, PUZZLES = 16, 6, 5
MLP = {"mlp_t": True, "pos_encodings": "none"}  # TRM without attention


def config(architecture: str, **overrides):
    fields = {
        "hidden_size": 32, "num_attention_heads": 2, "L_layers": 1, "H_cycles": 2, "L_cycles": 2, "expansion": 1,
        "puzzle_emb_ndim": 32, "puzzle_emb_len": 2 if architecture.startswith("trm") else 0, "seq_len": SEQ_LEN,
        "vocab_size": VOCAB_SIZE, "num_puzzle_identifiers": PUZZLES, "halt_max_steps": 16, "grid_shape": [4, 4],
    }  # fmt: skip
    if architecture == "hrm":
        fields["H_layers"] = 1
    if architecture == "trm-mlp":
        fields |= MLP
    return CLASSES[architecture][0](**{**fields, **overrides})


def model(architecture: str, seed: int = 0, undecided: bool = True, **overrides):
    """Return a seeded model in eval mode; with `undecided`, Q values vary around the halting threshold."""
    torch.manual_seed(seed)
    built = CLASSES[architecture][1](config(architecture, **overrides)).eval()
    with torch.no_grad():
        if built.model.puzzle_emb is not None:
            built.model.puzzle_emb.weight.normal_()
        if undecided:
            built.q_head.weight.normal_()
            built.q_head.bias.copy_(torch.tensor([-4.0, 0.0]))
    return built


# SE-RRM that mixes symbols by their mean.
MEANS = {"box_shape": [2, 2], "two_states": True, "add_tokens": 0, "pos_encodings": "none", "intermediate_size": 48}


def se_rrm(seed: int = 0, **overrides) -> SeRrmPuzzleForSolving:
    """Return a seeded SE-RRM in eval mode."""
    torch.manual_seed(seed)
    fields = {
        "hidden_size": 32, "num_attention_heads": 2, "symbol_num_heads": 2, "symbol_head_dim": 8, "L_layers": 1,
        "H_cycles": 2, "L_cycles": 2, "expansion": 1, "seq_len": SEQ_LEN, "vocab_size": VOCAB_SIZE,
        "puzzle_emb_ndim": 32 + VOCAB_SIZE, "num_puzzle_identifiers": PUZZLES, "halt_max_steps": 16,
        "grid_shape": [4, 4], "add_tokens": 2, "halt_confidence": 0.5,
    }  # fmt: skip
    built = SeRrmPuzzleForSolving(SeRrmPuzzleConfig(**{**fields, **overrides})).eval()
    with torch.no_grad():
        built.lm_head.weight.mul_(20)  # so that rows become confident at different steps
        if built.model.puzzle_emb is not None:
            built.model.puzzle_emb.weight.normal_()
    return built


def batch(rows: int = 8, seed: int = 1, settings=None) -> dict[str, torch.Tensor]:
    """Return random boards, labels and puzzle identifiers for a config, as arguments of the forward."""
    settings = settings or config("hrm")
    generator, shape = torch.Generator().manual_seed(seed), (rows, settings.seq_len)
    input_ids, labels = (torch.randint(1, settings.vocab_size, shape, generator=generator) for _ in range(2))
    last = settings.num_puzzle_identifiers
    puzzles = torch.randint(0, last, (rows,), generator=generator, dtype=torch.int32)
    return {"input_ids": input_ids, "puzzle_identifiers": puzzles, "labels": labels}
