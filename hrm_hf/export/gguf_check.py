"""Compare a GGUF file, run by llama.cpp, with the original model in transformers.

Two Python packages contain llama.cpp. `xllamacpp` is used if it is installed: its wheels need no compiler, and its
server returns the complete next-token distribution. Otherwise, `llama-cpp-python` is used.
"""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


# Rounding changes the argmax only at near ties; with a wrong layout, few argmaxes agree.
MIN_AGREEMENT = 0.5
# Maximum difference between log-probabilities for an f32 file. For gpt2, llama.cpp reads GELU from an f16 table.
MAX_DIFFERENCE, MAX_DIFFERENCE_GELU = 1e-3, 5e-2
STEPS = 8  # number of greedily chosen tokens after each prompt
CONTEXT = 512  # maximum number of tokens in a prompt with its continuation
# Texts on which tokenizers tend to differ: tabs, other alphabets, numbers, repeated spaces, tags of the Go coder.
CHECK_TEXTS = (
    "func readFile(path string) ([]byte, error) {\n\tf, err := os.Open(path)\n\tif err != nil {\n\t\treturn nil, err\n"
    "\t}\n\tdefer f.Close()\n\treturn io.ReadAll(f)\n}\n",
    'package main\n\nimport "fmt"\n\n// Grüße, 世界 — it\'s 3.14159e-10 , 0x1F600 😀\nvar s = `raw "text"   \n\n\t\t '
    "x`\n\nfunc main() { fmt.Printf(\"%08.3f %q\\n\", 1234567.89, '\\u00e9') }\n",
    "<PROBLEM>Sum of a slice</PROBLEM><PLAN><INTENT:ADD><TARGET:func>Sum<STEP>loop</PLAN><CODE>func Sum(",
    "  \t \n\n   x  +=  1 // they'll say we've done IT'S \r\n",
)


# Program that serves a GGUF file with xllamacpp until it is killed, and prints its address. Keys and values are f32,
# and attention is plain, so that differences come from the file, not from the runtime.
SERVER = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = int(sys.argv[2]), 1, False, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class Runtime(NamedTuple):
    """A GGUF file loaded in llama.cpp.

    Attributes:
        tokenize: function that maps a text, and whether tags in it are tokens, to ids.
        logprobs: function that maps ids to the log-probabilities [V] of the next token.
    """

    tokenize: Callable[[str, bool], list[int]]
    logprobs: Callable[[list[int]], torch.Tensor]


def validate_runtime() -> None:
    """Raise ImportError if no package with llama.cpp is installed."""
    if find_spec("xllamacpp") is None and find_spec("llama_cpp") is None:
        raise ImportError(
            "check=True: needs llama.cpp; run pip install xllamacpp (or llama-cpp-python), or set check=False"
        )


@torch.no_grad()
def compare_with_llama_cpp(
    path: str | Path, network: PreTrainedModel, tokenizer: Any, tolerance: float | None = None, **forward: Any
) -> dict[str, Any]:
    """Load a GGUF file in llama.cpp, and compare token ids and greedy continuations of CHECK_TEXTS with transformers.

    Args:
        tolerance: largest difference of a log-probability, or None for quantized files.
        forward: more arguments of the network's forward.

    Raises:
        ValueError: the token ids differ, the likeliest token agrees at less than half of the positions, or a
            log-probability differs by more than `tolerance`.
    """
    limit = min(network.config.max_position_embeddings, CONTEXT)
    load = _xllamacpp if find_spec("xllamacpp") else _llama_cpp
    network = network.float().eval()
    differences, agreements, largest, continuations = [], [], 0.0, []
    with load(str(path), limit, tokenizer, network.config.vocab_size) as runtime:
        for prompt in _prompts(runtime, tokenizer, limit):
            ids, theirs = list(prompt), []
            while len(theirs) < STEPS and len(ids) < limit:
                theirs.append(runtime.logprobs(ids))
                ids.append(theirs[-1].argmax().item())
            continuations.append((prompt, ids, theirs))
    for prompt, ids, theirs in continuations:
        logits = network(torch.tensor([ids[:-1]]), use_cache=False, **forward).logits[0, len(prompt) - 1 :]
        ours, theirs = logits.log_softmax(-1), torch.stack(theirs)
        differences.append((ours - theirs).abs().max().item())
        agreements.append(ours.argmax(-1) == theirs.argmax(-1))
        largest = max(largest, logits.abs().max().item())
    agreed, difference = torch.cat(agreements).float(), torch.tensor(differences).max().item()
    if agreed.mean() < MIN_AGREEMENT or not difference <= (tolerance or float("inf")):
        raise ValueError(
            f"llama.cpp produces different outputs: the likeliest token agrees at {agreed.mean():.1%} of "
            f"{len(agreed)} positions, and log-probabilities differ by up to {difference:.3g}. Nothing was written"
        )
    return {
        "compared_tokens": len(agreed),
        "argmax_agreement": agreed.mean().item(),
        "max_logprob_difference": difference,
        "max_logit": largest,
    }


def _prompts(runtime: Runtime, tokenizer: Any, limit: int) -> set[tuple[int, ...]]:
    """Return prompts of several lengths. Raise ValueError if llama.cpp tokenizes a text differently."""
    prompts = set()
    for text in CHECK_TEXTS:
        for tags in (True, False):
            ids, theirs = tokenizer.encode(text, split_special_tokens=not tags), runtime.tokenize(text, tags)
            if ids != theirs:
                raise ValueError(
                    f"llama.cpp produces different ids for {text!r} ({'with' if tags else 'without'} tags): "
                    f"{theirs[:20]} ...; expected {ids[:20]} .... Nothing was written"
                )
            for length in (len(ids) // 3, len(ids)):
                prompts.add(tuple(ids[: max(1, min(length, limit - STEPS))]))
    return prompts


@contextlib.contextmanager
def _xllamacpp(path: str, limit: int, tokenizer: Any, vocab_size: int) -> Iterator[Runtime]:
    """Serve a file with xllamacpp until the end of a `with` block.

    The server runs in its own process, because xllamacpp cannot be imported next to packages that another version of
    Cython compiled, such as astropy.
    """
    command = [sys.executable, "-c", SERVER, path, str(limit), str(torch.get_num_threads())]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    # The server drops the distribution of a token that ends within a UTF-8 character. The bias makes it choose a
    # letter instead, and does not change the reported probabilities.
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    request = {
        "n_predict": 1, "max_tokens": 1, "temperature": 0, "n_probs": vocab_size, "ignore_eos": True,
        "logit_bias": [[letter, 1e4]],
    }  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        address = next((line.strip() for line in server.stdout if line.startswith("http")), None)
        if address is None:
            raise ValueError(f"llama.cpp cannot load the file (exit status {server.wait()}). Nothing was written")

        def post(route: str, body: dict[str, Any]) -> dict[str, Any]:
            headers = {"Content-Type": "application/json"}
            with opener.open(urllib.request.Request(address + route, json.dumps(body).encode(), headers)) as answer:
                return json.load(answer)

        def tokenize(text: str, tags: bool) -> list[int]:
            return post("/tokenize", {"content": text, "add_special": True, "parse_special": tags})["tokens"]

        def logprobs(ids: list[int]) -> torch.Tensor:
            answer = post("/v1/completions", {"prompt": ids, **request})
            found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            values = torch.full((vocab_size,), float("nan"))
            values[[each["id"] for each in found]] = torch.tensor([each["logprob"] for each in found])
            return values

        try:
            yield Runtime(tokenize, logprobs)
        finally:
            server.kill()


@contextlib.contextmanager
def _llama_cpp(path: str, limit: int, tokenizer: Any, vocab_size: int) -> Iterator[Runtime]:
    """Load a file in llama-cpp-python."""
    import llama_cpp

    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(
        path, n_ctx=limit, n_batch=limit, logits_all=True, verbose=False, n_threads=threads, n_threads_batch=threads,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip

    def logprobs(ids: list[int]) -> torch.Tensor:
        llama.reset()
        llama.eval(ids)
        return torch.from_numpy(llama.scores[len(ids) - 1].copy()).log_softmax(-1)

    yield Runtime(lambda text, tags: llama.tokenize(text.encode(), add_bos=True, special=tags), logprobs)
