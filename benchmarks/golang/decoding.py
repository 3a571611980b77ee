"""Compare the decoding speed of the Go coder, for plans and code, with that of a Llama of about equal size.

    python -m benchmarks.golang.decoding [--quick] [--sizes nano,base] [--batch_sizes 1,8] [--no_compile]

The Llama has the width, heads, feed-forward size and vocabulary of the Go coder, and the number of layers that brings
its parameter count closest to the Go coder's. A "code" step runs planner and generator; a "plan" step runs only the
planner. Turns, ratios, intervals and clocks work as in `text/decoding.py`; a ratio of 1 means as fast as the Llama.
"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from hrm_hf.models.configuration_hrm_go_coder import HrmGoCoderConfig
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM
from hrm_hf.models.processing_hrm_go_coder import SPECIAL_TOKENS, TOKEN_IDS
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from ..text.decoding import NEW, PROMPT, against, print_row, take_turns


PHASES = {"code": ("<CODE>", {}), "plan": ("<PLAN>", {"planner_only": True})}


def main() -> None:
    parser = make_parser(__doc__, quick="the tiny preset, uncompiled, few turns")
    parser.add_argument("--sizes", default="nano,base", help="Go coder presets, comma-separated")
    parser.add_argument("--batch_sizes", default="1,8", help="batch sizes; compiled models use only the first")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--no_compile", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.turns, args.no_compile = "test", 5, True
    torch.set_num_threads(1)
    batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    print(f"{'size':5} {'batch':>5} {'path':9} {'side':42} {'ms/token':>9} {'wall':>7}  of the Llama's speed")
    rows, parameters = [], {}
    with torch.no_grad():
        for size in args.sizes.split(","):
            coder, llama = pair(size)
            parameters[size] = {"go_coder": coder.num_parameters(), "llama": llama.num_parameters()}
            for batch_size in batch_sizes:
                rows += measure(coder, llama, batch_size, args.turns, size=size, path="eager")
            if not args.no_compile:
                rows += measure(coder, llama, batch_sizes[0], args.turns, size=size, path="compiled")
    report = {"turns": args.turns, "prompt": PROMPT, "tokens_a_turn": NEW, "threads": 1, "parameters": parameters}
    report |= {"rows": rows, "machine": machine(), "versions": library_versions()}
    write_report(args, "go_decoding", report)


def pair(size: str) -> tuple[HrmGoCoderForCausalLM, LlamaForCausalLM]:
    """Return a Go coder with seeded weights, and a Llama with about as many parameters."""
    config = HrmGoCoderConfig.from_preset(size)
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    torch.manual_seed(0)
    coder = HrmGoCoderForCausalLM(config).eval()
    fields = {name: getattr(config, name) for name in shared}
    llamas = [
        LlamaForCausalLM(LlamaConfig(**fields, num_hidden_layers=layers, tie_word_embeddings=True))
        for layers in range(config.planner_layers, config.planner_layers + 2 * config.generator_layers + 1)
    ]
    return coder, min(llamas, key=lambda llama: abs(llama.num_parameters() - coder.num_parameters())).eval()


def measure(coder, llama, batch_size: int, turns: int, **labels) -> list[dict]:
    """Return one row per model: median milliseconds per token, and the speed relative to the Llama."""
    torch._dynamo.reset()
    compiled = labels["path"] == "compiled"
    sides = {"llama": decoder(llama, "<CODE>", {}, batch_size, compiled)}
    sides |= {name: decoder(coder, *how, batch_size, compiled) for name, how in PHASES.items()}
    times, rows = take_turns(sides, turns), []
    for name in times:
        row = {"family": "go_coder", "side": name, "batch_size": batch_size, **labels, **against(times, name, "llama")}
        rows.append(row)
        print_row(row)
    return rows


def decoder(model, opener: str, arguments: dict, batch_size: int, compiled: bool):
    """Return a function that repeatedly decodes NEW tokens after a cached prompt ending in `opener`."""
    ids = torch.randint(len(SPECIAL_TOKENS), model.config.vocab_size, (batch_size, PROMPT))
    ids[:, 0], ids[:, 1], ids[:, -1] = TOKEN_IDS["<s>"], TOKEN_IDS["<PROBLEM>"], TOKEN_IDS[opener]
    if compiled:
        cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
        step = torch.compile(model.__call__, fullgraph=True, dynamic=False)
    else:
        cache, step = DynamicCache(config=model.config), model
    first = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **arguments).logits

    def decode() -> None:
        logits = first
        for _ in range(NEW):
            # the argmax excludes special tokens, which would start a different phase
            token = logits[..., len(SPECIAL_TOKENS) :].argmax(-1) + len(SPECIAL_TOKENS)
            logits = step(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1, **arguments).logits
        if not compiled:
            cache.crop(-NEW)
            return
        for layer in cache.layers:
            layer.cumulative_length.sub_(NEW)

    return decode


if __name__ == "__main__":
    main()
