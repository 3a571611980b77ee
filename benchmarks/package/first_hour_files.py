"""Small stand-ins for files that users of the original projects already have, which the guides' commands read."""

import json
import shutil
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "text"))

import test_hrm_lm_convert
import test_rlm_mhc_convert
import torch

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving
from hrm_hf.puzzles.convert import convert_to_original
from hrm_hf.text.byte_tokenizer import byte_tokenizer


FUNCTION = "package sum\n\nfunc Add{0}(a, b int) int {{\n\treturn a + {1}\n}}\n"


def bring(page: str, folder: Path, text: Path) -> None:
    """Create in `folder` the files that a documentation page assumes its readers already have."""
    if page.endswith(("rlm_mhc.md", "hrm_lm_distributed.md")):
        shutil.copy(text, folder / "input.txt")
    if page.endswith("go_coder.md"):
        pull_requests(folder / "train.jsonl")
    if page.endswith("rlm_mhc.md"):
        test_rlm_mhc_convert.write_original(folder / "checkpoints" / "checkpoint-1000")
    if page.endswith("hrm_lm_distributed.md"):
        hrm_text1(folder / "hrm-small-50m" / "final_model")
        lines = [json.dumps({"text": part}) + "\n" for part in text.read_text()[:200_000].split("\n\n")]
        (folder / "corpus.jsonl").write_text("".join(lines))
    if page.endswith("hrm_perlmutter.md"):
        hrm_act_v1(folder / "checkpoints" / "My-run", step=26040)


def pull_requests(path: Path) -> None:
    """Write 40 merged pull requests as records in the format of the original guide."""
    with path.open("w") as file:
        for number in range(40):
            record = {
                "repo": {"full_name": f"ann/sum{number}", "license_key": "mit"},
                "pull_request": {
                    "number": number,
                    "title": f"Fix the sum of Add{number}",
                    "body": "",
                    "author": "ann",
                },
                "files": [
                    {
                        "filename": "sum.go",
                        "content_before": FUNCTION.format(number, number),
                        "content_after": FUNCTION.format(number, f"b + {number}"),
                    }
                ],
            }
            file.write(json.dumps(record) + "\n")


def hrm_text1(folder: Path) -> None:
    """Write tiny weights in the format of the original language model, with a tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    test_hrm_lm_convert.VOCAB = len(tokenizer)
    torch.save(test_hrm_lm_convert.original_state(), folder / "pytorch_model.bin")
    fields = {"vocab_size": len(tokenizer), "block_size": 256, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(test_hrm_lm_convert.CONFIG | fields))


def hrm_act_v1(folder: Path, step: int) -> None:
    """Write a checkpoint for 9x9 boards in the original HRM's format, with the guide's small architecture."""
    config = HrmPuzzleConfig(
        hidden_size=32, num_attention_heads=1, H_layers=1, L_layers=1, expansion=2, task="sudoku", grid_shape=[9, 9],
        box_shape=[3, 3],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as ours:
        HrmPuzzleForSolving(config).save_pretrained(ours)
        convert_to_original(ours, folder, step)
