"""Compare the speed and memory of the language models with baselines of equal size and of equal compute.

    python -m benchmarks.text.speed [--quick] [--size 10m] [--models hrm_lm,llama,...] [--threads 1] [--compile]
    python -m benchmarks.text.speed --device cuda --dtype bfloat16 --size 100m [--mhc_preset small]
    python -m benchmarks.text.speed --models hrm_lm_loop,llama_equal_depth,hrm_lm,llama_equal_flops  # at equal depth

The script measures training steps (forward, backward, AdamW), decoding with a cache at batch sizes 1 and 8, decoding
with and without a cache at 512 tokens, and the cache bytes per token in every kv_layout. The models (see `models.py`)
take turns, so a noisy machine slows all of them equally; results are medians after warm-up. With --compile, the script
also reports the CPU seconds of the first step, which includes compilation. On a CPU, results include both CPU time of
the process and wall time. Peak training memory is the memory growth of a fresh process on a CPU, and the allocator's
peak on a GPU. In the decoding row `hrm_lm_m4, 2 of 4`, the gate halts every token after two segments.

Training in a 16-bit dtype uses autocast with float32 weights; decoding uses weights in that dtype.
"""

import contextlib
import multiprocessing
import resource
import statistics
import time

import torch
from transformers import DynamicCache

from hrm_hf import HrmLmConfig
from hrm_hf.registry import has_ability
from hrm_hf.text.trainer import compile_layers
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .models import PEERS, SIZES, build, count_parameters, flops_per_token, peer_config


LAYOUTS = ("per_segment", "last_segment", "last_visit")
TWO_OF_FOUR = "hrm_lm_m4, 2 of 4"
UNCACHED_LENGTHS = 8  # number of lengths at which to time forward passes without a cache


def main() -> None:
    parser = make_parser(__doc__, quick="tiny models without GPT-2, few turns")
    parser.add_argument("--size", choices=list(SIZES), default="10m")
    parser.add_argument("--models", default=",".join(name for name in PEERS if name != "rlm_mhc"))
    parser.add_argument("--mhc_preset", help="rlm_mhc preset to use for rlm_mhc_on and rlm_mhc_off")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch_size", type=int, default=4, help="number of rows per training step")
    parser.add_argument("--block_size", type=int, default=256)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile the training steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.size, args.turns, args.batch_size = "tiny", 3, 2
        args.models = args.models.replace(",gpt2", "")
    torch.set_num_threads(args.threads)
    names = args.models.split(",")
    configs = {name: peer_config(name, args.size, args.block_size, args.mhc_preset) for name in names}
    report = {
        "size": args.size, "device": device_name(args.device), "dtype": args.dtype, "threads": args.threads,
        "batch_size": args.batch_size, "block_size": args.block_size, "turns": args.turns, "compile": args.compile,
        "machine": machine(), "versions": library_versions(),
    }  # fmt: skip
    report["models"] = {name: describe(config, args.block_size) for name, config in configs.items()}
    for name, megabytes in memory(configs, args).items():
        report["models"][name]["training_peak_mib"] = megabytes
    for name, row in train_speed(configs, args).items():
        report["models"][name] |= row
    for name, row in decode_speed(configs, args).items():
        about = report["models"]["hrm_lm_m4" if name == TWO_OF_FOUR else name]
        report["models"][name] = {**about, **row}
    report["kv_bytes_per_token"] = kv_table(args.size)
    parts = ["lm", args.size, *(["cuda"] if args.device != "cpu" else []), *(["compiled"] if args.compile else [])]
    parts += ["mhc", args.mhc_preset] if args.mhc_preset else []
    write_report(args, "_".join(parts), report)
    print_tables(report)


def describe(config, block_size: int) -> dict:
    """Return the size of a model and its analytic FLOPs per token."""
    return {
        "model_type": config.model_type,
        "parameters": count_parameters(config),
        "hidden_size": config.hidden_size,
        "layer_visits": config.num_hidden_layers,
        "forward_mflops_per_token": flops_per_token(config, block_size, backward=False) / 1e6,
        "training_mflops_per_token": flops_per_token(config, block_size) / 1e6,
    }


def train_step(model, args, compiled: bool = False):
    """Return a function that runs one training step on random tokens and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = model
    if compiled and has_ability(model, "recurrent_depth"):
        compile_layers(model)  # as --torch_compile does
    elif compiled:
        forward = torch.compile(model)
    shape = (args.batch_size, args.block_size)
    ids = torch.randint(8, model.config.vocab_size, shape, device=args.device)
    autocast = args.dtype == "bfloat16"

    def step():
        with torch.autocast(args.device, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def memory(configs: dict, args, make_step=train_step) -> dict[str, float]:
    """Return the peak MiB of training: weights, gradients, AdamW's moments and activations.

    `make_step(model, args)` returns the step; other processes must be able to import it.
    """
    if args.device != "cpu":
        return {name: cuda_peak(config, args, make_step) for name, config in configs.items()}
    context = multiprocessing.get_context("forkserver")  # the fork server imports torch once, then forks
    context.set_forkserver_preload(["torch", "transformers", "hrm_hf"])
    peaks = {}
    for name, config in configs.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=resident_peak, args=(config, args, make_step, sender))
        process.start()
        sender.close()
        peaks[name] = receiver.recv()
        process.join()
    return peaks


def resident_peak(config, args, make_step, sender) -> None:
    """Build a model, train it for three steps, and send the increase in peak resident memory in MiB."""
    torch.set_num_threads(args.threads)
    count_parameters(config)  # import the model's code first, so that its memory is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = make_step(build(config), args)
    for _ in range(3):
        step()
    sender.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)  # Linux reports KiB


def cuda_peak(config, args, make_step) -> float:
    """Return the peak MiB that three training steps allocate on the GPU."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make_step(build(config).to(args.device), args)
    for _ in range(3):
        step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del step
    torch.cuda.empty_cache()
    return peak


def train_speed(configs: dict, args) -> dict[str, dict]:
    """Return the training tokens per second and, with --compile, the CPU seconds of the first step."""
    sides = {name: train_step(build(config).to(args.device), args, args.compile) for name, config in configs.items()}
    tokens = args.batch_size * args.block_size
    rows, warm_up = {name: {} for name in sides}, 3 if args.device != "cpu" or args.compile else 1
    if args.compile:
        for name, step in sides.items():
            start = time.process_time()
            step()
            rows[name]["first_step_cpu_s"] = time.process_time() - start
    for name, (wall, cpu) in interleaved(sides, args, warm_up).items():
        rows[name]["train_tokens_per_s"] = tokens / wall
        if args.device == "cpu":
            rows[name]["train_tokens_per_cpu_s"] = tokens / cpu
    return rows


def decode_speed(configs: dict, args) -> dict[str, dict]:
    """Return the tokens decoded per second, summed over the batch, and the gain from the cache at 512 tokens."""
    dtype, new = getattr(torch, args.dtype), 8 if args.quick else 32
    models = {name: build(config).to(args.device, dtype).eval() for name, config in configs.items()}
    if "hrm_lm_m4" in models:
        fields = {**configs["hrm_lm_m4"].to_dict(), "halt_min_steps": 2}
        models[TWO_OF_FOUR] = build(HrmLmConfig(**fields)).to(args.device, dtype).eval()
        with torch.no_grad():
            models[TWO_OF_FOUR].model.q_head.bias.copy_(torch.tensor([1.0, -1.0]))
    rows = {name: {} for name in models}
    with torch.no_grad():
        for batch_size in (1, 8):
            sides = {name: decoder(model, batch_size, 128, new, args.device) for name, model in models.items()}
            for name, (wall, _) in interleaved(sides, args).items():
                rows[name][f"decode_tokens_per_s_batch_{batch_size}"] = batch_size * new / wall
        for name, model in models.items():
            rows[name] |= cache_gain(model, args, new)
    return rows


def decoder(model, batch_size: int, prompt: int, new: int, device: str):
    """Return a function that decodes `new` tokens greedily after a cached prompt."""
    ids = torch.randint(8, model.config.vocab_size, (batch_size, prompt), device=device)
    cache = DynamicCache(config=model.config)
    first = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def decode():
        token = first
        for _ in range(new):
            output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = output.logits.argmax(-1)
        cache.crop(-new)

    return decode


def cache_gain(model, args, new: int, length: int = 512) -> dict:
    """Return the milliseconds per token with and without a cache at `length` tokens, and the cache's speedups."""
    ids = torch.randint(8, model.config.vocab_size, (1, length), device=args.device)
    lengths = [length * (part + 1) // UNCACHED_LENGTHS for part in range(UNCACHED_LENGTHS)]
    forwards = {
        size: (lambda size=size: model(input_ids=ids[:, :size], use_cache=False, logits_to_keep=1)) for size in lengths
    }
    sides = forwards | {"cached": decoder(model, 1, length - new, new, args.device)}
    sides["cached, short"] = decoder(model, 1, new, new, args.device)
    times = {name: wall * 1e3 for name, (wall, _) in interleaved(sides, args).items()}
    at_512, short = times["cached"] / new, times["cached, short"] / new
    uncached = statistics.mean(times[size] for size in lengths)
    return {
        "cached_ms_at_512": at_512,
        "uncached_ms_at_512": times[length],
        "cache_gain_at_512": times[length] / at_512,
        "cache_gain_over_512": uncached / statistics.mean((at_512, short)),
    }


def kv_table(size: str) -> list[dict]:
    """Return the float32 bytes per token of a real cache for every layout, and their ratio to hrm_text's."""
    reference = cache_bytes(peer_config("hrm_text", size))
    base = SIZES[size]
    heads = base.get("num_attention_heads", 8)
    rows = [{"model": "hrm_text", "bytes": reference}]
    rows += [{"model": name, "bytes": cache_bytes(peer_config(name, size))} for name in ("llama", "llama_equal_flops")]
    for key_heads in (heads, heads // 2):
        for segments in (1, 4):
            for layout in LAYOUTS:
                config = HrmLmConfig(
                    **{**base, "halt_max_steps": segments, "kv_layout": layout, "num_key_value_heads": key_heads}
                )
                grouped = "" if key_heads == heads else f", {key_heads} key heads of {heads}"
                rows.append({"model": f"hrm_lm M={segments} {layout}{grouped}", "bytes": cache_bytes(config)})
    return [row | {"share": row["bytes"] / reference} for row in rows]


@torch.no_grad()
def cache_bytes(config) -> float:
    """Return the bytes of keys and values that one more token adds to a cache."""
    model = build(config).eval()
    cache = DynamicCache(config=config)
    ids = torch.randint(8, config.vocab_size, (1, 16))
    sizes = []
    for _ in range(2):
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        tensors = [tensor for layer in cache.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return (sizes[1] - sizes[0]) / ids.shape[1]


def interleaved(sides: dict, args, warm_up: int = 1) -> dict[str, tuple[float, float]]:
    """Run the models in turn; return each model's median wall and CPU time per call in seconds."""
    times = {name: [] for name in sides}
    for turn in range(warm_up + args.turns):
        for name, function in sides.items():
            synchronize(args.device)
            start = time.perf_counter(), time.process_time()
            function()
            synchronize(args.device)
            if turn >= warm_up:
                times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return {name: tuple(statistics.median(clock) for clock in zip(*values)) for name, values in times.items()}


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its queued work."""
    if device != "cpu":
        torch.cuda.synchronize()


def device_name(device: str) -> str:
    """Return the name of the GPU, or "cpu"."""
    return device if device == "cpu" else torch.cuda.get_device_name(device)


def print_tables(report: dict) -> None:
    """Print the results as two tables, then the ratios of rlm_mhc_on to rlm_mhc_off if both were measured."""
    threads = f", {report['threads']} thread(s)" if report["device"] == "cpu" else ""
    print(f"lm, size {report['size']}, {report['device']}{threads}, {report['dtype']}")
    print(f"{'':18} {'':>11} {'MFLOP':>9} {'train':>8} {'peak':>8} {'decode, tokens/s':>17} {'cache':>7}")
    heads = f"{'forward':>9} {'tokens/s':>8} {'MiB':>8} {'batch 1':>8} {'batch 8':>8} {'gain':>7}"
    print(f"{'':18} {'parameters':>11} {heads}")
    for name, row in report["models"].items():
        print(
            f"{name:18} {row['parameters']:11,} {row['forward_mflops_per_token']:9.2f} "
            f"{row['train_tokens_per_s']:8.0f} {row['training_peak_mib']:8.1f} "
            f"{row['decode_tokens_per_s_batch_1']:8.1f} {row['decode_tokens_per_s_batch_8']:8.1f} "
            f"{row['cache_gain_at_512']:7.1f}"
        )
    print(f"\n{'keys and values a token':50} {'bytes':>9} {'of hrm_text':>11}")
    for row in report["kv_bytes_per_token"]:
        print(f"{row['model']:50} {row['bytes']:9,.0f} {row['share']:11.3f}")
    models = report["models"]
    if {"rlm_mhc_on", "rlm_mhc_off"} <= set(models):
        on, off = models["rlm_mhc_on"], models["rlm_mhc_off"]
        clock = "train_tokens_per_cpu_s" if report["device"] == "cpu" else "train_tokens_per_s"
        print(f"\nmHC on / off: training time {off[clock] / on[clock]:.3f}, ", end="")
        print(f"peak memory {on['training_peak_mib'] / off['training_peak_mib']:.3f}")


if __name__ == "__main__":
    main()
