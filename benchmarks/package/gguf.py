"""Compare GGUF files of every layout, running in llama.cpp (xllamacpp), with the model in transformers.

    python -m benchmarks.package.gguf
    python -m benchmarks.package.gguf --quick

The weights are random and the tokenizer has one token per byte, because the question is whether llama.cpp computes the
same function. For every layout and data type, `hrm-hf export gguf --check` gives the largest difference of a
log-probability over the complete vocabulary, and the share of equal greedy tokens. `--quick` uses small models.
"""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hrm_hf import HrmGoCoderConfig, HrmGoCoderForCausalLM, HrmLmConfig, HrmLmForCausalLM
from hrm_hf.export.gguf import export_gguf
from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


DTYPES = ("f32", "f16", "bf16", "q8_0")
BYTES = {"vocab_size": 264}
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}


def main() -> None:
    parser = make_parser(__doc__, quick="small models, f32 only")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": {**library_versions(), **{name: version(name) for name in ("gguf", "xllamacpp")}},
        "layouts": {},
    }
    for name, build in SUBJECTS.items():
        torch.manual_seed(0)
        model = build(BYTES | (SMALL if args.quick else {})).eval()
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            byte_tokenizer().save_pretrained(scratch)
            found = {}
            for dtype in DTYPES[:1] if args.quick else DTYPES:
                found[dtype] = export_gguf(scratch, Path(scratch) / f"{dtype}.gguf", dtype=dtype, check=True)
                del found[dtype]["out"]
                difference, equal = found[dtype]["max_logprob_difference"], found[dtype]["argmax_agreement"]
                print(f"gguf {name:28} {dtype:5} largest logprob difference {difference:.1e}, same tokens {equal:.3f}")
        report["layouts"][name] = {"parameters": model.num_parameters(), **found}
        write_report(args, "gguf", report)


def loop(preset: str, **fields):
    """Return a function that builds an `hrm_lm` from a preset."""
    return lambda shape: HrmLmForCausalLM(HrmLmConfig.from_preset(preset, **fields, **shape))


def gpt2(shape: dict[str, int]) -> GPT2LMHeadModel:
    fields = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "n_positions": 512}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**{**fields, **shape, **ids}, initializer_range=1 / 16))


def unified(shape: dict[str, int]) -> HrmGoCoderForCausalLM:
    return HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset("unified", initializer_range=0.05, **shape))


SUBJECTS = {
    "nanbeige": loop("hrm-lm-loop-25m-served-nanbeige"),
    "hrm_text, flat loop": loop("hrm-lm-loop-25m-served-hrm-text"),
    "hrm_text, two stacks": loop("hrm-lm-25m", input_injection="none", exit_criterion="fixed"),
    "llama, unrolled": loop("hrm-lm-loop-25m", input_injection="none", exit_norms="last", attention_gate=False),
    "llama, unified Go coder": unified,
    "gpt2": gpt2,
}


if __name__ == "__main__":
    main()
