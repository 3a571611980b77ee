"""Measure how much longer writing and verifying a checkpoint takes with checksums than with file sizes only.

    python -m benchmarks.package.checkpoints [--quick] [--turns 7] [--folder /scratch] [--out benchmarks/results]

A checkpoint contains what training writes: the weights of a Llama as safetensors, the two moments of AdamW saved with
torch.save, and the manifest. The two variants take turns, each writing to a new folder on the file system of
`--folder`. Results are medians of wall time and of CPU time; CPU time depends less on other load. Hashing reads files
that are still in the page cache; a checkpoint larger than free memory would have to be read from disk. As in training,
`fsync` is not called.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hrm_hf.hub.manifests import MANIFEST, checksums, find_corruption, write_manifest
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


SIZES = {"1M": (128, 4), "30M": (512, 9), "100M": (768, 13)}  # hidden size, number of layers


def main() -> None:
    parser = make_parser(__doc__, quick="the smallest model, three turns")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder for the checkpoints; by default, a temporary one"
    )
    args = parser.parse_args()
    sizes = dict(list(SIZES.items())[:1]) if args.quick else SIZES
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        for name, (width, layers) in sizes.items():
            rows.append(one_size(name, width, layers, Path(scratch), 3 if args.quick else args.turns))
            print(" ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
    report = {"checkpoints": rows, "machine": machine(), "versions": library_versions()}
    write_report(args, "checkpoints", report)


def one_size(name: str, width: int, layers: int, scratch: Path, turns: int) -> dict:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096 if width > 128 else 512, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=width // 64, intermediate_size=width * 8 // 3, tie_word_embeddings=True,
        )
    )  # fmt: skip
    moments = {key: [torch.randn_like(p) for p in model.parameters()] for key in ("exp_avg", "exp_avg_sq")}
    ways = {"sizes": write_sizes, "checksums": write_manifest}
    kinds = ("write", "check", "write, of the processor,")
    seconds: dict[str, list[float]] = {f"{what} {way}": [] for what in kinds for way in ways}
    for turn in range(turns + 1):  # the first repetition is a warm-up
        for way, finish in ways.items():
            folder = scratch / way
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()  # flush earlier writes, so they are not timed here
            started, worked = time.perf_counter(), time.process_time()
            model.save_pretrained(folder)
            torch.save(moments, folder / "optimizer.pt")
            finish(folder)
            written, worked = time.perf_counter(), time.process_time() - worked
            assert find_corruption(folder) == []
            if turn:
                seconds[f"write {way}"].append(written - started)
                seconds[f"check {way}"].append(time.perf_counter() - written)
                seconds[f"write, of the processor, {way}"].append(worked)
    files = [file for file in (scratch / "checksums").iterdir() if file.name != MANIFEST]
    worked = time.process_time()
    checksums(files)
    hashing = time.process_time() - worked
    total = sum(file.stat().st_size for file in files)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "model": name,
        "parameters": model.num_parameters(),
        "megabytes": round(total / 1e6, 1),
        **{f"seconds to {key}": round(value, 4) for key, value in median.items()},
        "writing with checksums / without": round(median["write checksums"] / median["write sizes"], 3),
        "the same, of the processor": round(
            median["write, of the processor, checksums"] / median["write, of the processor, sizes"], 3
        ),
        "gigabytes hashed per second and core": round(total / hashing / 1e9, 2),
    }


def write_sizes(folder: Path) -> None:
    """Write a manifest with file sizes but no checksums."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / MANIFEST).write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
