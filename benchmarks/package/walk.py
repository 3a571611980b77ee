"""Follow one input through the package and list the files that it passes through, in order.

    python benchmarks/package/walk.py [ROOT] [--only solve,lm] [--out walk.json]

There are four walks, each in a fresh process: a Sudoku string through `hrm-hf solve`, one batch through
`PuzzleTrainer`, one token through `hrm_lm`, and one Go record through `training/run_go_coder.py`. A file counts if one
of its functions is called; imports do not count. An upward call is a call from a file in a lower layer to a file in a
higher layer, for example through a callback. The script works on any commit that has these commands.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


LAYERS = (
    "models",
    "io",
    "registry",
    "hub",
    "trainer",
    "export",
    "tasks",
    "launch",
    "metrics",
    "app",
    "cli",
    "training",
)
TASKS = ("puzzles", "text", "golang", "cosmology")
BOARD = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
# Runs a script; records, for each function call, the file that defines the function and the file that calls it.
PROFILER = """
import atexit, json, os, runpy, sys
root, out, script, *words = sys.argv[1:]
seen, edges = {}, {}
def place(code):
    if code.co_name == "<module>" or not code.co_filename.startswith(root):
        return None
    name = code.co_filename[len(root) + 1:]
    return name if name.startswith(("hrm_hf/", "training/")) else None
def note(frame, event, argument):
    if event != "call" or (here := place(frame.f_code)) is None:
        return
    above, caller = None, frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_code.co_filename.startswith(root + "/hrm_hf"):
            return  # an import
        above = above or place(caller.f_code)
        caller = caller.f_back
    seen.setdefault(here, len(seen))
    if above not in (None, here):
        edges.setdefault(above + " " + here, len(edges))
def save():
    sys.setprofile(None)
    with open(out, "w") as stream:
        json.dump({"files": list(seen), "calls": list(edges)}, stream)
atexit.register(save)
sys.path.insert(0, root)
sys.argv = [script, *words]
sys.setprofile(note)
if script == "hrm-hf":
    from hrm_hf.cli import main
    main()
elif script == "-c":
    exec(words[0])
else:
    runpy.run_path(script, run_name="__main__")
"""
GO_FILE = """package p

// SumLETTER adds the numbers of a slice and a letter.
func SumLETTER(numbers []int) int {
	total := len("LETTER")
	for _, each := range numbers {
		total += each
	}
	return total
}
"""
LM = """
import torch
from hrm_hf import HrmLmConfig, HrmLmForCausalLM
config = HrmLmConfig(vocab_size=32, hidden_size=32, num_attention_heads=2, halt_max_steps=2)
HrmLmForCausalLM(config).eval()(torch.tensor([[3]]))
"""


def layer_of(file: str) -> int:
    """Return the layer of a file as its index in LAYERS."""
    parts = Path(file).parts
    name = parts[0] if parts[0] == "training" else Path(parts[1]).stem
    name = "tasks" if name in TASKS else name
    return LAYERS.index(name) if name in LAYERS else LAYERS.index("registry")


def walk(root: Path, words: list[str]) -> dict[str, Any]:
    """Trace one command. Return its files, the number of caller-callee pairs, and the calls into a higher layer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "walk.json")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", PROFILER, str(root), str(out), *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)[:200]}: status {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    pairs = [call.split() for call in found["calls"]]
    climbs = [f"{caller} calls {called}" for caller, called in pairs if layer_of(called) > layer_of(caller)]
    return {"files": found["files"], "pairs": len(pairs), "climbs": climbs}


def walks(root: Path, folder: Path) -> dict[str, list[str]]:
    """Build the inputs of all walks in `folder`; return the command line of each walk."""
    program = f"import sys; sys.path.insert(0, {str(root)!r}); from hrm_hf.cli import main; main()"
    source = folder / "source"
    source.mkdir()
    for letter in "abcdefgh":
        (source / f"{letter}.go").write_text(GO_FILE.replace("LETTER", letter))
    for command in (
        f"data sudoku --size 4 --clues 8 --num-train 16 --num-test 4 --out {folder}/boards",
        f"data go {source} --out {folder}/records",
        f"data go-tokenizer --source {source} --out {folder}/tokenizer --vocab-size 310",
    ):
        subprocess.run([sys.executable, "-c", program, *command.split()], check=True, capture_output=True)
    options = (
        "--config_overrides hidden_size=32,num_attention_heads=2 --max_steps 1 --use_cpu true --report_to none "
        "--bf16 false --save_strategy no --eval_strategy no --per_device_train_batch_size 2"
    )
    puzzle = f"--model_type trm_puzzle --data_path {folder}/boards --output_dir {folder}/puzzle_run"
    coder = (
        f"--model_type hrm_go_coder --train_data {folder}/records/train.jsonl --tokenizer_name {folder}/tokenizer "
        f"--output_dir {folder}/go_run"
    )
    return {
        "solve": ["hrm-hf", "solve", BOARD],
        "puzzle": f"{root}/training/run_puzzle.py {puzzle} {options}".split(),
        "lm": ["-c", LM],
        "go": f"{root}/training/run_go_coder.py {coder} {options}".split(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2], help="a checkout")
    parser.add_argument("--only", help="walks to run, comma-separated: solve, puzzle, lm, go")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    root = args.root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        commands = walks(root, Path(folder))
        names = args.only.split(",") if args.only else list(commands)
        report = {name: walk(root, commands[name]) for name in names}
    for name, found in report.items():
        print(
            f"{name}: {len(found['files'])} files, {found['pairs']} caller-callee pairs, "
            f"{len(found['climbs'])} upward calls"
        )
        print("".join(f"  {file}\n" for file in found["files"]), end="")
        print("".join(f"  upward: {climb}\n" for climb in found["climbs"]), end="")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
