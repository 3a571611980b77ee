"""Prompts with three answers each for post-training, and the settings of its runs."""

import json
from pathlib import Path

from datasets import Dataset


RUN = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
    "save_strategy": "no", "activation_checkpointing": False, "per_device_train_batch_size": 4,
    "lr_scheduler_type": "constant",
}  # fmt: skip
BYTES = ("hrm_lm", "rlm_mhc")
# Prompts with three answers of equal length. Answers of the Go coder have plan and code.
CODES = ["func A() {}", "func B() {}", "func C() {}"]
PAIRS = {
    **{name: [("grass:", "green"), ("sea:", "blue!"), ("snow:", "white")] for name in BYTES},
    "hrm_go_coder": [
        (f"<PROBLEM>{name}</PROBLEM><PLAN>", f"<INTENT:ADD><STEP>{name}</PLAN><CODE>{code}</CODE>")
        for name, code in zip("abc", CODES)
    ],
}


def answers(architecture: str) -> Dataset:
    """Return prompts with correct completions."""
    return Dataset.from_list([{"prompt": prompt, "completion": said} for prompt, said in PAIRS[architecture]])


def preferences(architecture: str) -> Dataset:
    """Return prompts with the correct completion and that of the next row."""
    pairs = PAIRS[architecture]
    wrong = [pairs[(number + 1) % len(pairs)][1] for number in range(len(pairs))]
    return Dataset.from_list(
        [{"prompt": prompt, "chosen": said, "rejected": bad} for (prompt, said), bad in zip(pairs, wrong)]
    )


def prompts(architecture: str) -> Dataset:
    """Return prompts without completions."""
    return Dataset.from_list([{"prompt": prompt} for prompt, _ in PAIRS[architecture]])


def write(path: Path, rows: Dataset) -> str:
    """Save rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
