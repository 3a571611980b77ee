"""Measure the training memory of puzzle models: weights, gradients, optimizer, and activations per sequence.

    python -m benchmarks.puzzles.memory [--quick] [--out benchmarks/results]

All values are counted, not estimated. Weights, gradients and optimizer state are the bytes of their tensors.
Activations are the bytes that autograd saves between forward and backward, with each storage counted once, divided by
the batch size; cycles without gradients save nothing. Process and GPU allocator overhead is excluded.
"""

import torch

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.trainer.optim import AdamATan2
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


MEDIUM = {"hidden_size": 64, "puzzle_emb_ndim": 64, "num_attention_heads": 2, "H_layers": 2, "L_layers": 2}
MODELS = {
    "HRM ultra-small (hidden 16)": (HrmPuzzleForSolving, HrmPuzzleConfig.from_preset("hrm-ultra-small")),
    "HRM small (hidden 32)": (HrmPuzzleForSolving, HrmPuzzleConfig.from_preset("hrm-small")),
    "HRM medium (hidden 64, 2+2 layers)": (HrmPuzzleForSolving, HrmPuzzleConfig(**MEDIUM)),
    "HRM 27M": (HrmPuzzleForSolving, HrmPuzzleConfig()),
    "HRM 27M, ARC or maze (900 cells)": (HrmPuzzleForSolving, HrmPuzzleConfig(seq_len=900, vocab_size=12)),
    "TRM 7M": (TrmPuzzleForSolving, TrmPuzzleConfig()),
    "TRM 5M, mlp_t": (TrmPuzzleForSolving, TrmPuzzleConfig.from_preset("trm-5m-mlp")),
}


def main() -> None:
    parser = make_parser(__doc__, quick="only hidden sizes 16 and 32")
    args = parser.parse_args()
    rows = {}
    for name, (model_class, config) in list(MODELS.items())[: 2 if args.quick else None]:
        rows[name] = row = measure(model_class, config)
        megabytes = {key: f"{value / 2**20:,.2f}" for key, value in row.items() if key.endswith("bytes")}
        print(f"{name:36} {row['parameters']:>12,} parameters  MiB: {megabytes}")
    write_report(args, "puzzle_memory", {"float32": rows, "versions": library_versions()})


def measure(model_class, config, batch_size: int = 2) -> dict[str, int]:
    """Return the number of parameters, and the bytes of weights, gradients, optimizer state and activations."""
    torch.manual_seed(0)
    model = model_class(config).train()
    shape = (batch_size, config.seq_len)
    batch = {
        "input_ids": torch.randint(1, config.vocab_size, shape),
        "labels": torch.randint(1, config.vocab_size, shape),
    }
    kept: dict[int, int] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(**batch)
    outputs.loss.backward()
    optimizer = AdamATan2(model.parameters())
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "parameters": model.num_parameters(include_puzzle_table=True),
        "weights_bytes": size([*model.parameters(), *model.buffers()]),
        "gradients_bytes": size(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_bytes": size(moments),
        "activations_per_sequence_bytes": sum(kept.values()) // batch_size,
    }


def size(tensors) -> int:
    """Return the total number of bytes in the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()
