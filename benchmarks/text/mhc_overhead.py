"""Measure the cost of mHC in training: step time and saved activations of `rlm_mhc` with mHC on and off.

    python -m benchmarks.text.mhc_overhead [--quick] [--threads 1] [--res_modes sinkhorn,identity] [--no_compile]

Each side runs forward, backward and AdamW on the same body, compiled with `torch.compile`. The sides take turns, so a
noisy machine slows all of them equally; results are medians. Times are CPU time of the process on a CPU, and wall time
of synchronized steps on a GPU. The vocabulary is small, so embeddings and head do not hide the cost of the layers.
Activations are the bytes that autograd saves between forward and backward of the uncompiled model, counting each
storage once, with and without gradient checkpointing.
"""

import statistics
import time

import torch

from hrm_hf import RlmMhcConfig, RlmMhcForCausalLM
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


def main() -> None:
    parser = make_parser(__doc__, quick="two narrow layers, uncompiled, few turns")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--res_modes", default="sinkhorn,birkhoff,identity")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.hidden_size, args.layers, args.seq_len, args.turns, args.no_compile = 128, 2, 64, 3, True
    torch.set_num_threads(args.threads)

    sides = {"off": {"mhc_enabled": False}}
    sides |= {mode: {"mhc_res_mode": mode} for mode in args.res_modes.split(",")}
    models = {name: build(args, **fields) for name, fields in sides.items()}
    batch = torch.randint(3, 1024, (args.batch_size, args.seq_len), device=args.device)
    memory = {name: activation_bytes(model, batch) for name, model in models.items()}
    saved = {name: activation_bytes(model, batch, checkpointing=True) for name, model in models.items()}
    milliseconds = interleave(
        {name: training_step(model, batch, not args.no_compile) for name, model in models.items()}, args
    )
    ratios = {}
    for name in list(sides)[1:]:
        ratios[f"training step, {name} / off"] = milliseconds[name] / milliseconds["off"]
        ratios[f"activations, {name} / off"] = memory[name] / memory["off"]
        ratios[f"activations with checkpointing, {name} / off"] = saved[name] / saved["off"]
    report = {
        **{name: getattr(args, name) for name in ("hidden_size", "layers", "batch_size", "seq_len", "turns")},
        **{name: getattr(args, name) for name in ("device", "threads")},
        "compiled": not args.no_compile,
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "training_step_ms": milliseconds,
        "activations_bytes": memory,
        "activations_bytes_with_checkpointing": saved,
        "ratios": ratios,
        "machine": machine(),
        "versions": library_versions(),
    }
    write_report(args, "mhc_overhead", report)
    for line, value in ratios.items():
        print(f"mhc {line:45} {value:.3f}")


def build(args, **fields) -> RlmMhcForCausalLM:
    torch.manual_seed(0)
    config = RlmMhcConfig(
        vocab_size=1024, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64, intermediate_size=args.hidden_size * 11 // 4,
        max_position_embeddings=args.seq_len, **fields,
    )  # fmt: skip
    return RlmMhcForCausalLM(config).to(args.device).train()


def training_step(model, batch, compiled: bool):
    """Return a function that runs one training step on `batch`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = torch.compile(model) if compiled else model

    def step():
        run(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def activation_bytes(model, batch, checkpointing: bool = False) -> int:
    """Return the bytes that autograd saves for the backward pass, excluding weights and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    model.activation_checkpointing_disable()
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def interleave(sides: dict, args) -> dict[str, float]:
    """Run the models in turn; return each model's median time per step (ms), ignoring the first two turns."""
    times = {name: [] for name in sides}
    for turn in range(args.turns + 2):
        for name, step in sides.items():
            start = clock(args.device)
            step()
            if turn > 1:
                times[name].append((clock(args.device) - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
