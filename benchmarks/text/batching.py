"""Compare continuous batching (`generate_batch`) with answering one request after another (`generate`).

    python -m benchmarks.text.batching [--quick] [--size 1m] [--turns 3] [--threads 1]

Each of 16 requests has its own prompt of 16 to 76 tokens and 16 new tokens, decoded greedily on the CPU. The methods
alternate, so a noisy machine slows both equally; times are medians after a warm-up, in float32 with sdpa. Weights are
random with a std of 0.3, so wrong keys and values would change tokens. Such weights also amplify rounding, which can
change a halting decision close to its threshold. Equality is therefore counted in float64 as well. A Llama with as
many layers as the flat loop has visits shows the gain without recurrence. The report is written after each model.
"""

import statistics
import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from hrm_hf import HrmLmConfig, RlmMhcConfig
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .models import SIZES


REQUESTS, NEW = 16, 16
LOOP = {"num_h_layers": 0, "prelude_layers": 1, "coda_layers": 1, "H_cycles": 1, "L_cycles": 4, "bp_steps": 4}
HALTING = {"halt_max_steps": 4, "exit_criterion": "latent_diff", "exit_threshold": 1.2}


def configs(size: str) -> dict[str, object]:
    """Map the name of each row of the report to a model config."""
    shape = {**SIZES[size], "initializer_range": 0.3}
    one, fixed = {"halt_max_steps": 1}, {"halt_max_steps": 2, "exit_criterion": "fixed"}
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "initializer_range")
    llama = {name: shape[name] for name in shared} | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    flat = HrmLmConfig(**{**shape, **LOOP, **one})
    return {
        "llama, as many layers as visits": LlamaConfig(**llama, num_hidden_layers=flat.num_hidden_layers),
        "hrm_lm, flat loop": flat,
        "hrm_lm, flat loop, halting": HrmLmConfig(**{**shape, **LOOP, **HALTING}),
        "hrm_lm, two stacks": HrmLmConfig(**{**shape, **fixed}),
        "rlm_mhc, two loops": RlmMhcConfig(**llama, num_hidden_layers=4, num_loops=2),
        "hrm_lm, two stacks, halting": HrmLmConfig(**{**shape, **HALTING}),
    }


def main() -> None:
    parser = make_parser(__doc__, quick="tiny models, one turn")
    parser.add_argument("--size", choices=list(SIZES), default="1m")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.size, args.turns = "tiny", 1
    torch.set_num_threads(args.threads)
    report = {"size": args.size, "requests": REQUESTS, "new_tokens": NEW, "turns": args.turns, "threads": args.threads}
    report |= {"machine": machine(), "versions": library_versions(), "rows": []}
    for name, config in configs(args.size).items():
        report["rows"].append({"model": name} | compare(config, args.turns))
        print(report["rows"][-1], flush=True)
        write_report(args, "lm_batching", report)


@torch.no_grad()
def compare(config, turns: int) -> dict:
    """Return tokens per second with and without batching, and how many requests get the same tokens in both."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    prompts = [torch.randint(8, config.vocab_size, (1, 16 + 4 * index)) for index in range(REQUESTS)]
    pages = ContinuousBatchingConfig(num_blocks=128, page_size=16, max_batch_tokens=256)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

    def alone() -> list[list[int]]:
        settings = GenerationConfig(**options)
        rows = [model.generate(ids, generation_config=settings)[0, ids.shape[1] :] for ids in prompts]
        return [row.tolist() for row in rows]

    def batched() -> list[list[int]]:
        settings = GenerationConfig(**options, eos_token_id=-1)
        answers = model.generate_batch([ids[0].tolist() for ids in prompts], settings, pages)
        return [answer.generated_tokens for answer in answers.values()]

    sides, seconds, tokens = {"alone": alone, "batched": batched}, {"alone": [], "batched": []}, {}
    for turn in range(turns + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            tokens[name] = run()
            if turn:  # the first turn is a warm-up
                seconds[name].append(time.perf_counter() - start)
    speed = {f"{name}_tokens_per_s": REQUESTS * NEW / statistics.median(each) for name, each in seconds.items()}
    speed["times"] = statistics.median(one / both for one, both in zip(seconds["alone"], seconds["batched"]))
    equal = {"float32": count_equal(tokens["alone"], tokens["batched"])}
    model.double()
    return {"requests_equal": equal | {"float64": count_equal(alone(), batched())}, **speed}


def count_equal(rows: list, others: list) -> int:
    """Count the positions at which both lists have the same row of tokens."""
    return sum(row == other for row, other in zip(rows, others, strict=True))


if __name__ == "__main__":
    main()
