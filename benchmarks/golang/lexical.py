"""The cost of the Go coder's logits processors, beside a plain step of the nano preset with its cache.

    python -m benchmarks.golang.lexical [--quick] [--threads 1] [--vocab-size 16384 50000] [--rows 1 8]

The processors read Go code that grows by a token a step, `golang/validators/checker/main.go` from other lines in each
row, so that they pass through strings, comments and brackets; the model is one of random weights with as many tokens.
All times are of the process on the CPU, so that others on the machine count for nothing.

The vocabulary is a byte-level BPE of the Python files of torch and transformers, which are on every machine. "first"
is the processor's own making, the bytes of all tokens, and what the masks add that the first pass over the text makes.
"""

import random
import statistics
import time
from pathlib import Path

import torch
import transformers

from hrm_hf import HrmGoCoderConfig, HrmGoCoderForCausalLM
from hrm_hf.golang.data.tokenizer import train_on_texts
from hrm_hf.golang.lexer import automaton, first_fault
from hrm_hf.golang.lexical import GoLexicalLogitsProcessor
from hrm_hf.models.logits_process_hrm_go_coder import repetition_guards
from hrm_hf.models.processing_hrm_go_coder import TOKEN_IDS, encode_text
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


PROMPT = 8  # tokens of code that are given


def main() -> None:
    parser = make_parser(__doc__, quick="a small vocabulary, few steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[16384, 50000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if args.quick:
        args.vocab_size, args.steps, args.rows = [2048], 20, [2]
    torch.set_num_threads(args.threads)
    started = time.process_time()
    automaton()
    once = time.process_time() - started
    code = (Path(__file__).parents[2] / "hrm_hf/golang/validators/checker/main.go").read_text()
    assert first_fault(code) is None
    found = []
    for vocab_size in args.vocab_size:
        tokenizer = make_tokenizer(vocab_size)
        for rows in args.rows:
            found.append({"vocab_size": vocab_size, "rows": rows, **measure(tokenizer, code, rows, args.steps)})
            print({name: round(value, 4) for name, value in found[-1].items()})
    report = {"automaton_ms": 1e3 * once, "threads": args.threads, "steps": args.steps, "results": found}
    write_report(args, "go_lexical", report | {"machine": machine(), "versions": library_versions()})


def make_tokenizer(vocab_size: int):
    """Byte-level BPE of Python sources, some 400 bytes for each token wanted."""
    files = sorted(file for library in (torch, transformers) for file in Path(library.__file__).parent.rglob("*.py"))
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for file in files:
        texts.append(file.read_text(encoding="utf-8"))
        size += len(texts[-1])
        if size > 400 * vocab_size:
            break
    return train_on_texts(iter(texts), vocab_size)


def measure(tokenizer, code: str, rows: int, steps: int) -> dict[str, float]:
    """CPU milliseconds a step: of the model, of each processor, and the processors' share."""
    lines = code.split("\n")
    functions = [index for index, line in enumerate(lines) if line.startswith("func ")]
    texts = ["\n".join(lines[functions[row % len(functions)] :]) for row in range(rows)]
    ids = torch.tensor([[TOKEN_IDS["<CODE>"], *encode_text(tokenizer, text * 4)][: PROMPT + steps] for text in texts])
    scores = torch.randn(rows, len(tokenizer))
    started = time.process_time()
    lexical = GoLexicalLogitsProcessor(tokenizer, balanced=True)
    made = time.process_time() - started
    first = per_step(lexical, ids, scores)
    again = per_step(lexical, ids, scores)
    guard = per_step(repetition_guards(PROMPT), ids, scores)
    model = HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset("nano", vocab_size=len(tokenizer))).eval()
    plain = model_step(model, ids)
    return {
        "model_ms": plain, "lexical_ms": again, "lexical_share": again / plain, "guard_ms": guard,
        "guard_share": guard / plain, "first_ms": 1e3 * made + (first - again) * steps,
    }  # fmt: skip


def per_step(processor, ids: torch.Tensor, scores: torch.Tensor) -> float:
    """Mean milliseconds of a call over a text that grows."""
    started = time.process_time()
    for length in range(PROMPT, ids.shape[1]):
        processor(ids[:, :length], scores)
    return 1e3 * (time.process_time() - started) / (ids.shape[1] - PROMPT)


@torch.no_grad()
def model_step(model, ids: torch.Tensor) -> float:
    """Median milliseconds of a forward of one token a row with the cache: no sampling, no bookkeeping."""
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    times = []
    for position in range(PROMPT, ids.shape[1]):
        started = time.process_time()
        cache = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True).past_key_values
        times.append(time.process_time() - started)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
