"""On stderr, commands and training scripts print progress and messages about the user's work, nothing else.

Referee: the file that receives a process's stderr.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import every
import pytest
import script_runs
import tiny_answers
import tiny_cosmo
import tiny_go

from hrm_hf.text.byte_tokenizer import byte_tokenizer


SCRIPTS = Path(__file__).parents[2] / "training"
BOARD = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
BAR = re.compile(r"\d+%\||\[\d+:\d+, ")  # a bar with a total, and one without
WIDTHS = "hidden_size=32,intermediate_size=64,num_attention_heads=2"
STEP = "--max_steps 1 --warmup_steps 0 --per_device_train_batch_size 2 --output_dir {out}"
# Paths are relative to the folder of `inputs`. As a user would, the commands leave out `--use_cpu` on a machine
# without a GPU, except for TRL, which needs it.
COMMANDS = {
    "help": "hrm-hf --help",
    "solve": f"hrm-hf solve {BOARD}",
    "eval": "hrm-hf eval puzzles puzzle boards --out {out}",
    "go": "hrm-hf go coder Add --max-new-tokens 4 --max-iterations 1 --validator tree-sitter",
    "recommend": "hrm-hf recommend --memory 8GB",
    "launch": "launch.py --model hrm-lm-10m-byte --cpu --dry_run --train_data text.jsonl",
    "run_puzzle": f"run_puzzle.py --model_name_or_path puzzle --data_path boards --train_split train {STEP}",
    "run_clm": f"run_clm.py --model_type hrm_lm --config_overrides {WIDTHS},num_h_layers=1,num_l_layers=1,"
    f"max_position_embeddings=64 --tokenizer_name byte --train_data text.jsonl --block_size 32 {STEP}",
    "run_cosmo": f"run_cosmo.py --model_type hrm_cosmo --preset test --data_path maps {STEP}",
    "run_go_coder": "run_go_coder.py --model_name_or_path coder --train_data train.jsonl --eval_data train.jsonl "
    f"--max_length 256 --plan_budget 48 {STEP}",
}
OTHERWISE = {
    "run_puzzle_compiled": f"{COMMANDS['run_puzzle']} --torch_compile true",
    "run_puzzle_by_two": f"torchrun --standalone --nproc_per_node 2 {COMMANDS['run_puzzle']} --use_cpu true",
}
TUNED = f"--use_cpu true --model_name_or_path hrm_lm {STEP}"
BY_TRL = {
    "run_sft": f"run_sft.py --train_data answers.jsonl --max_length 128 {TUNED}",
    "run_dpo": f"run_dpo.py --train_data preferences.jsonl --max_length 128 {TUNED}",
    "run_grpo": "run_grpo.py --train_data prompts.jsonl --reward regex:^g --num_generations 2 "
    f"--max_completion_length 4 {TUNED}",
}
SLOW = COMMANDS | OTHERWISE | BY_TRL
# Runs commands one after another in one process, each with its own output files.
SERVER = """
import json, os, runpy, sys, traceback
from hrm_hf_start import start_program
start_program()
import hrm_hf.golang.generate, hrm_hf.launch.recommend, hrm_hf.puzzles.evaluation, hrm_hf.trainer.run
from hrm_hf.cli import main
codes, printed = {}, os.dup(1)
for name, words in json.loads(sys.argv[1]).items():
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv, codes[name] = words, 0
    try:
        main() if words[0] == "hrm-hf" else runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        codes[name] = end.code if isinstance(end.code, int | None) else print(end.code, file=sys.stderr) or 1
    except BaseException:
        traceback.print_exc()
        codes[name] = 1
    sys.stdout.flush()
    sys.stderr.flush()
os.write(printed, json.dumps(codes).encode())
"""
ENVIRONMENT = {**script_runs.ENVIRONMENT, "PYTHONPATH": str(SCRIPTS.parent)}
for _name in ("TQDM_DELAY", "HRM_HF_DEBUG", "PYTHONWARNINGS"):
    ENVIRONMENT.pop(_name, None)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a tiny model and data of each kind."""
    folder = tmp_path_factory.mktemp("inputs")
    script_runs.puzzle_boards(folder / "boards")
    script_runs.puzzle_weights(folder / "puzzle", 0.0)
    tiny_cosmo.build(folder / "maps")
    lines = [{"text": f"Document {number}: the cat sat on the mat.\n"} for number in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiny_go.write(folder / "train.jsonl", tiny_go.records(12))
    tiny_go.writer(max_position_embeddings=256).save_pretrained(folder / "coder")
    tiny_go.tokenizer().save_pretrained(folder / "coder")
    tokenizer = byte_tokenizer()  # with the token ids of a trained model; the library warns about others
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    every.model("hrm_lm", **ids).save_pretrained(folder / "hrm_lm")
    tokenizer.save_pretrained(folder / "hrm_lm")
    for name in ("answers", "preferences", "prompts"):
        tiny_answers.write(folder / f"{name}.jsonl", getattr(tiny_answers, name)("hrm_lm"))
    return folder


def words_of(command: str, out: Path) -> list[str]:
    return [str(SCRIPTS / word) if word.endswith(".py") else word for word in command.format(out=out).split()]


def without_bars(said: str) -> str:
    return "\n".join(line for line in re.split(r"[\r\n]+|\x1b\[A", said) if line.strip() and not BAR.search(line))


@pytest.fixture(scope="module")
def said(inputs, tmp_path_factory):
    """The stderr of each command, without progress bars; "" has that of the imports."""
    out = tmp_path_factory.mktemp("out")
    commands = {name: words_of(command, out / name) for name, command in COMMANDS.items()}
    server = [sys.executable, "-c", SERVER, json.dumps(commands)]
    done = subprocess.run(server, cwd=inputs, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    texts = {name: (inputs / f"{name}.err").read_text() for name in commands}
    codes = json.loads(done.stdout.splitlines()[-1])
    assert {name: code or 0 for name, code in codes.items()} == dict.fromkeys(commands, 0), texts
    return {"": without_bars(done.stderr)} | {name: without_bars(text) for name, text in texts.items()}


@pytest.mark.parametrize("name", ["", *COMMANDS], ids=["imports", *COMMANDS])
def test_stderr_has_no_unrelated_output(said, name):
    assert said[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_stderr_of_a_separate_process_has_no_unrelated_output(inputs, name, tmp_path):
    if name in BY_TRL:
        pytest.importorskip("trl")
    words = words_of(SLOW[name], tmp_path / "out")
    modules = {"hrm-hf": "hrm_hf_start", "torchrun": "torch.distributed.run"}
    program = ["-m", modules[words[0]], *words[1:]] if words[0] in modules else words
    done = subprocess.run(
        [sys.executable, *program], cwd=inputs, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, without_bars(done.stderr)) == (0, "")


# ---- hidden and shown messages ----

SPEAKER = """
import logging, sys, warnings
from hrm_hf_start import start_program
start_program()
logging.getLogger("torchao").warning("Failed to load /a/b.so: no such file")
logging.getLogger("torchao").warning("Quantization of this model lost half of its weights")
quantized = logging.getLogger("bitsandbytes.backends.cpu.ops")
quantized.warning("Failed to load CPU gemm_4bit_forward from kernels-community: no")
quantized.warning("Values overflow")
warnings.warn("'pin_memory' argument is set as true but no accelerator is found, then it is not used")
warnings.warn("'pin_memory' took all memory")
warnings.warn("Failed to load /a/b.so: said by somebody else")
logging.getLogger("transformers").warning("Some weights were newly initialised")
from tqdm import tqdm
list(tqdm(range(3), desc="at once"))
"""


@pytest.mark.parametrize("debug", ["", "1"])
def test_only_listed_warnings_are_suppressed(debug):
    environment = {**ENVIRONMENT, "HRM_HF_DEBUG": debug}
    done = subprocess.run([sys.executable, "-c", SPEAKER], env=environment, capture_output=True, text=True, check=True)
    for real in ("lost half", "overflow", "took all memory", "said by somebody else", "newly initialised"):
        assert real in done.stderr
    for listed in ("a/b.so: no such file", "gemm_4bit_forward", "no accelerator", "at once"):
        assert (listed in done.stderr) == bool(debug)


def test_script_without_its_extra_names_the_install_command_in_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['trl'] = None")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}
    script = [sys.executable, str(SCRIPTS / "run_sft.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    said = 'run_sft.py: error: this script needs trl: pip install ".[trl]" in the source folder of hrm_hf\n'
    assert (done.returncode, done.stderr) == (1, said)
