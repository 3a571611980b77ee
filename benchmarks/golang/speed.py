"""Compare the Go coder with GPT-2 125M in training speed, peak memory and cached generation.

    python -m benchmarks.golang.speed [--quick] [--threads 2] [--rows 2] [--length 512]
    python -m benchmarks.golang.speed --device cuda --dtype bfloat16 --rows 8 --length 1024
    python -m benchmarks.golang.speed --size nano --rows 8 --length 384    # against a Llama and a GPT-2 of 10M

All models use the tokenizer's vocabulary of 50,000 tokens and train on the same batches. Each stream is one third
problem and context, one sixth plan and one half code, with labels on plan and code. The comparison includes a Llama of
the coder's size, because beating a model five times larger would not show what the planner contributes. The models
take turns, and times and memory are measured as in `text/speed.py`.
"""

import contextlib

import torch
from transformers import GPT2Config, LlamaConfig

from hrm_hf import HrmGoCoderConfig
from hrm_hf.models.processing_hrm_go_coder import BOS, EOS, SPECIAL_TOKENS, TOKEN_IDS
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from ..text.models import build, count_parameters
from ..text.speed import decoder, device_name, interleaved, memory


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def main() -> None:
    parser = make_parser(__doc__, quick="tiny models, few turns")
    parser.add_argument(
        "--size", choices=["base", "nano"], default="base", help="model size; nano compares models with 10M parameters"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, default=2, help="number of streams per training step")
    parser.add_argument("--length", type=int, default=512, help="number of tokens per stream")
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.length, args.turns, args.new_tokens = 128, 2, 4
    torch.set_num_threads(args.threads)
    configs = quick_configs() if args.quick else SIZES[args.size]()
    models = {name: {"parameters": count_parameters(config)} for name, config in configs.items()}
    for name, megabytes in memory(configs, args, train_step).items():
        models[name]["training_peak_mib"] = megabytes
    for name, row in train_speed(configs, args).items():
        models[name] |= row
    for name, row in decode_speed(configs, args).items():
        models[name] |= row
    report = {
        "device": device_name(args.device), "dtype": args.dtype, "threads": args.threads, "rows": args.rows,
        "length": args.length, "turns": args.turns, "machine": machine(), "versions": library_versions(),
        "models": models, "against_gpt2": ratios(models),
    }  # fmt: skip
    name = "go_coder" if args.size == "base" else f"go_coder_{args.size}"
    write_report(args, f"{name}_cuda" if args.device != "cpu" else name, report)
    print_table(report)


def full_configs() -> dict:
    """Return the configs of the default Go coder, the original guide's GPT-2, and a Llama of the coder's size."""
    coder = HrmGoCoderConfig.from_preset("base")
    llama = LlamaConfig(
        vocab_size=coder.vocab_size, hidden_size=320, intermediate_size=864, num_hidden_layers=8,
        num_attention_heads=8, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=coder.vocab_size, pad_token_id=None, **NO_DROPOUT)
    return {"hrm_go_coder": coder, "gpt2": gpt2, "llama": llama}


def nano_configs() -> dict:
    """Return the configs of the nano Go coder, and of a Llama and a GPT-2 with its width and size."""
    coder = HrmGoCoderConfig.from_preset("nano")
    llama = LlamaConfig(
        vocab_size=coder.vocab_size, hidden_size=256, intermediate_size=704, num_hidden_layers=7,
        num_attention_heads=8, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=coder.vocab_size, n_embd=256, n_layer=7, n_head=8, pad_token_id=None, **NO_DROPOUT
    )  # fmt: skip
    return {"hrm_go_coder": coder, "gpt2": gpt2, "llama": llama}


def quick_configs() -> dict:
    """Return tiny configs of the three models."""
    coder = HrmGoCoderConfig.from_preset("test")
    llama = LlamaConfig(
        vocab_size=coder.vocab_size, hidden_size=64, intermediate_size=176, num_hidden_layers=4,
        num_attention_heads=4, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=coder.vocab_size, n_embd=192, n_layer=4, n_head=4, pad_token_id=None, **NO_DROPOUT
    )  # fmt: skip
    return {"hrm_go_coder": coder, "gpt2": gpt2, "llama": llama}


SIZES = {"base": full_configs, "nano": nano_configs}


def stream_batch(vocab_size: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of random training streams. Only plan and code have labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(SPECIAL_TOKENS), vocab_size, (rows, length), generator=generator)
    plan, code = length // 3, length // 2
    tags = {0: BOS, 1: "<PROBLEM>", plan - 1: "</PROBLEM>", plan: "<PLAN>", code - 1: "</PLAN>", code: "<CODE>"}
    tags |= {length - 2: "</CODE>", length - 1: EOS}
    for position, tag in tags.items():
        ids[:, position] = TOKEN_IDS[tag]
    labels = ids.clone()
    labels[:, : plan + 1] = -100
    return {"input_ids": ids, "labels": labels}


def train_step(model, args):
    """Return a function that runs one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = stream_batch(model.config.vocab_size, args.rows, args.length)
    batch = {name: value.to(args.device) for name, value in batch.items()}
    model.train()
    autocast = args.dtype == "bfloat16"

    def step():
        with torch.autocast(args.device, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_speed(configs: dict, args) -> dict[str, dict]:
    """Return each model's training tokens per second, prompt tokens included."""
    sides = {name: train_step(build(config).to(args.device), args) for name, config in configs.items()}
    tokens = args.rows * args.length
    rows = {}
    for name, (wall, cpu) in interleaved(sides, args).items():
        rows[name] = {"train_tokens_per_s": tokens / wall}
        if args.device == "cpu":
            rows[name]["train_tokens_per_cpu_s"] = tokens / cpu
    return rows


@torch.no_grad()
def decode_speed(configs: dict, args) -> dict[str, dict]:
    """Return the tokens per second of cached greedy decoding after a prompt of 128 tokens, summed over the batch."""
    models = {
        name: build(config).to(args.device, getattr(torch, args.dtype)).eval() for name, config in configs.items()
    }
    rows = {name: {} for name in models}
    for batch_size in (1, 8):
        sides = {name: decoder(model, batch_size, 128, args.new_tokens, args.device) for name, model in models.items()}
        for name, (wall, _) in interleaved(sides, args).items():
            rows[name][f"decode_tokens_per_s_batch_{batch_size}"] = batch_size * args.new_tokens / wall
    return rows


def ratios(models: dict) -> dict[str, float]:
    """Return each measurement of the coder divided by GPT-2's."""
    ours, theirs = models["hrm_go_coder"], models["gpt2"]
    return {name: ours[name] / theirs[name] for name in ours}


def print_table(report: dict) -> None:
    threads = f", {report['threads']} thread(s)" if report["device"] == "cpu" else ""
    size = f"{report['rows']} x {report['length']} tokens a step"
    print(f"go coder, {report['device']}{threads}, {report['dtype']}, {size}")
    names = list(next(iter(report["models"].values())))
    print(f"{'':28}" + "".join(f"{name:>15}" for name in [*report["models"], "coder / gpt2"]))
    for name in names:
        values = [row[name] for row in report["models"].values()]
        print(f"{name:28}" + "".join(f"{value:15,.1f}" for value in values) + f"{report['against_gpt2'][name]:15.3f}")


if __name__ == "__main__":
    main()
