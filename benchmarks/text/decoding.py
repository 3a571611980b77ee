"""Compare the speed of `rlm_mhc` and `hrm_lm` with that of simpler models: decoding, prefill and training.

    python -m benchmarks.text.decoding [--quick] [--sizes 1m,10m] [--batch_sizes 1,8] [--families hrm_text,halting]
        [--paths eager,compiled,prefill,training,training_compiled,first_step]

`rlm_mhc` is compared with the same body without mHC. `hrm_lm` with one, two and four passes (segments) is compared
with a Llama of the same width and SwiGLU, with as many layers as `hrm_lm` has layer visits (and therefore more
parameters), and with transformers' HRM-Text with as many visits. The family `halting` compares four passes with a gate
that halts every token after two, and with a limit of two passes.

Tokens are decoded greedily after a cached prompt: "eager" with a growing cache, "compiled" with a static cache and one
graph per token, like `generate(cache_implementation="static")`. "prefill" reads the prompt into a new cache, and
"training" and "training_compiled" run a step of AdamW on it. "first_step" measures the CPU seconds of the first
compiled training step, without a compiler cache, of a flat loop with 6, 14 and 24 visits of four layers, and of Llamas
with as many layers. Results of earlier runs are kept in the report, unless they are measured again.

The script uses one thread. The models take turns of a few tokens, so a noisy machine slows all of them equally. A
ratio is the reference's time divided by the model's time in the same turn (1 means as fast as the reference); the
report has the median over turns with a 95 % bootstrap interval. The gain from compiling is measured in the same way.
Ratios use the thread's CPU time; wall time is also reported. Compilation is timed only in "first_step".
"""

import json
import os
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, StaticCache

from hrm_hf import HrmLmConfig
from hrm_hf.models.configuration_rlm_mhc import RlmMhcConfig
from hrm_hf.models.presets_hrm_lm import LOOP
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .models import SIZES, build, peer_config
from .speed import decoder, train_step


PROMPT, NEW = 128, 8
LLAMA = "Llama with as many layer visits"
SHARED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")


def main() -> None:
    parser = make_parser(__doc__, quick="tiny models, uncompiled, few turns")
    parser.add_argument("--sizes", default="1m,10m", help=f"model sizes, comma-separated: {', '.join(SIZES)}")
    parser.add_argument("--batch_sizes", default="1,8", help="batch sizes; compiled models use only the first")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--families", help="families to measure, comma-separated; all by default")
    parser.add_argument("--paths", default=",".join([*MAKERS, "first_step"]))
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.turns, args.paths = "tiny", 5, "eager"
    torch.set_num_threads(1)
    batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    print(f"{'size':5} {'batch':>5} {'path':9} {'side':42} {'ms/token':>9} {'wall':>7}  of the reference's speed")
    rows, paths = [], args.paths.split(",")
    for size in args.sizes.split(","):
        for family, configs in families(size).items():
            if args.families and family not in args.families.split(","):
                continue
            models = {name: build(config).eval() for name, config in configs.items()}
            for path in (path for path in paths if path in MAKERS):
                for batch_size in batch_sizes if path == "eager" else batch_sizes[:1]:
                    rows += measure(family, models, batch_size, args.turns, size=size, path=path)
        rows += first_steps(size) if "first_step" in paths else []
    report = {
        "prompt": PROMPT,
        "tokens_a_turn": NEW,
        "threads": 1,
        "rows": merged(args.out / "lm_decoding.json", rows),
    }
    write_report(args, "lm_decoding", report | {"machine": machine(), "versions": library_versions()})


def merged(path: Path, rows: list[dict]) -> list[dict]:
    """Return the rows of an earlier report that were not measured again, and the new rows."""

    def key(row: dict) -> tuple:
        return tuple(row.get(name) for name in ("family", "side", "size", "path", "batch_size", "visits"))

    new = {key(row) for row in rows}
    return [
        row for row in (json.loads(path.read_text())["rows"] if path.exists() else []) if key(row) not in new
    ] + rows


def families(size: str) -> dict[str, dict]:
    """Return configs by family and model; the first model of a family is its reference."""
    off, on, hrm = (peer_config(peer, size) for peer in ("rlm_mhc_off", "rlm_mhc_on", "hrm_lm"))
    fields = {name: getattr(hrm, name) for name in SHARED} | {"tie_word_embeddings": True}
    birkhoff = RlmMhcConfig(**{**on.to_diff_dict(), "mhc_res_mode": "birkhoff"})
    found = {"rlm_mhc": {"mHC off": off, "sinkhorn": on, "birkhoff": birkhoff}}
    for name, passes in {"one pass": 1, "two passes": 2, "four passes": 4}.items():
        looped = peer_config(f"hrm_lm+halt_max_steps={passes}+exit_criterion=fixed", size)
        llama = LlamaConfig(**fields, num_hidden_layers=passes * hrm.segment_visits)
        hrm_text = peer_config("hrm_text", size, changes={"H_cycles": passes * hrm.H_cycles})
        found |= {
            f"hrm_lm {name}": {LLAMA: llama, name: looped},
            f"hrm_text {name}": {"hrm_text": hrm_text, name: looped},
        }
    # With these values, an untrained gate halts as soon as `halt_min_steps` allows.
    gate = "+exit_criterion=q+halt_min_steps=2+initial_halt_prob=0.9"
    found["halting"] = {
        "four passes": looped,
        "halted after two": peer_config(f"hrm_lm+halt_max_steps=4{gate}", size),
        "two passes": peer_config("hrm_lm+halt_max_steps=2+exit_criterion=fixed", size),
    }
    return found


def measure(family: str, models: dict, batch_size: int, turns: int, **labels) -> list[dict]:
    """Return one row per model: median milliseconds per token, and the speed relative to the first model."""
    torch._dynamo.reset()  # make room: torch keeps only eight graphs per function, one per model
    make = MAKERS[labels["path"]]
    training = labels["path"].startswith("training")
    with torch.set_grad_enabled(training):
        sides = {name: make(model, batch_size, PROMPT, NEW, "cpu") for name, model in models.items()}
        if make is compiled_decoder:  # also time eager mode, to report the speedup from compilation
            for name, model in models.items():
                sides[name, "eager"] = decoder(model, batch_size, PROMPT, NEW, "cpu")
        times = take_turns(sides, turns, batch_size * PROMPT if training or make is prefill else NEW)
    reference, rows = next(iter(times)), []
    for name in models:
        row = {"family": family, "side": name, "batch_size": batch_size, "turns": turns, **labels}
        row |= against(times, name, reference)
        if (name, "eager") in times:
            gains = (times[name, "eager"] / times[name])[:, 0]
            row["times_eager_speed"], row["times_eager_speed_interval"] = gains.median().item(), interval(gains)
        rows.append(row)
        print_row(row)
    return rows


def take_turns(sides: dict, turns: int, tokens: int = NEW) -> dict[Any, torch.Tensor]:
    """Run the models in turn, `tokens` at a time; return their CPU and wall milliseconds per token [turns, 2]."""
    clocks: dict[Any, list] = {name: [] for name in sides}
    for turn in range(turns + 2):
        for name, decode in sides.items():
            start = time.thread_time(), time.perf_counter()
            decode()
            if turn > 1:  # skip two warm-up turns
                clocks[name].append((time.thread_time() - start[0], time.perf_counter() - start[1]))
    return {name: 1e3 / tokens * torch.tensor(values, dtype=torch.float64) for name, values in clocks.items()}


def against(times: dict[Any, torch.Tensor], name: Any, reference: Any) -> dict[str, Any]:
    """Return a model's median times and, with a bootstrap interval, its speed relative to the reference."""
    cpu, wall = times[name].median(0).values.tolist()
    row = {"cpu_ms_per_token": cpu, "wall_ms_per_token": wall}
    if name != reference:
        ratios = times[reference] / times[name]
        row["ratio"], row["wall_ratio"] = ratios.median(0).values.tolist()
        row["interval"] = interval(ratios[:, 0])
    return row


def print_row(row: dict) -> None:
    ratio = "" if "ratio" not in row else "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["interval"])
    ratio += "  {:.2f} times as fast as eager".format(row["times_eager_speed"]) if "times_eager_speed" in row else ""
    side = f"{row['family']}, {row['side']}"
    print(
        f"{row['size']:5} {row['batch_size']:5} {row['path']:9} {side:42} {row['cpu_ms_per_token']:9.2f} "
        f"{row['wall_ms_per_token']:7.2f}  {ratio}",
        flush=True,
    )


def interval(values: torch.Tensor, draws: int = 2000) -> list[float]:
    """Return the 95 % bootstrap interval of the median."""
    picks = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(0))
    return values[picks].median(1).values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()


def compiled_decoder(model, batch_size: int, prompt: int, new: int, device: str, **options: Any):
    """Return a function that decodes greedily with a static cache and one compiled graph per token.

    The function returns the logits of the last token. `options` are passed to `torch.compile`.
    """
    ids = torch.randint(8, model.config.vocab_size, (batch_size, prompt), device=device)
    cache = StaticCache(config=model.config, max_cache_len=prompt + new)
    first = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    step = torch.compile(model.__call__, fullgraph=True, dynamic=False, **options)

    def decode() -> torch.Tensor:
        token = first
        for _ in range(new):
            logits = step(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = logits.argmax(-1)
        for layer in cache.layers:
            layer.cumulative_length.sub_(new)
        return logits

    return decode


def prefill(model, batch_size: int, prompt: int, new: int, device: str):
    """Return a function that reads a prompt into a new cache."""
    ids = torch.randint(8, model.config.vocab_size, (batch_size, prompt), device=device)
    return lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)


def trainer(model, batch_size: int, prompt: int, new: int, device: str, compiled: bool = False):
    """Return a function that runs a training step on rows of `prompt` tokens."""
    args = SimpleNamespace(batch_size=batch_size, block_size=prompt, device=device, dtype="float32")
    return train_step(deepcopy(model).train(), args, compiled)


def first_steps(size: str) -> list[dict]:
    """Return the CPU seconds of the first compiled training step by model and number of layer visits."""
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8))  # loads the compiler
    rows = []
    for visits in (6, 14, 24):
        layers = {"num_l_layers": 2, "prelude_layers": 1, "coda_layers": 1, "halt_max_steps": (visits - 2) // 2}
        loop = HrmLmConfig(**{**SIZES[size], **LOOP, **layers})
        llama = LlamaConfig(**{name: getattr(loop, name) for name in SHARED}, num_hidden_layers=visits)
        for side, config in {LLAMA: llama, "hrm_lm, flat loop": loop}.items():
            torch._dynamo.reset()
            step = trainer(build(config), 1, PROMPT, NEW, "cpu", compiled=True)
            start = sum(os.times()[:4])  # with those of compilers
            step()
            seconds = sum(os.times()[:4]) - start
            rows.append({"family": "first step", "side": side, "size": size, "path": "first_step", "visits": visits})
            rows[-1]["cpu_s"] = seconds
            print(
                f"{size:5} {visits:2} visits, {side}: {seconds:.1f} CPU seconds for the first compiled step",
                flush=True,
            )
    return rows


MAKERS = {
    "eager": decoder,
    "compiled": compiled_decoder,
    "prefill": prefill,
    "training": trainer,
    "training_compiled": partial(trainer, compiled=True),
}


if __name__ == "__main__":
    main()
