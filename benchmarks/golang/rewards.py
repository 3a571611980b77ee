"""Compare Go coders before and after reward training, by held-out reward and by similarity to the references.

    python -m benchmarks.golang.rewards runs/go_nano runs/grpo_go_coder --prompts held_out_prompts.jsonl

`hrm-hf data go-prompts MODEL --records data/go/test.jsonl --max-reference 60 --out held_out_prompts.jsonl` writes the
prompts. Each model samples one completion per prompt. The script reports the fraction of completions that parse, and
the fraction that earn the `go-syntax` reward (completions much shorter than the reference earn nothing). For
completions that parse, it also reports the subtree F1 with the reference, which the syntax reward does not measure.
Training curves come from each model's trainer_state.json.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrm_hf.golang import best_validator
from hrm_hf.golang.evaluation.similarity import is_shortened, subtree_f1
from hrm_hf.models.processing_hrm_go_coder import TOKEN_IDS
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


CURVES = ("step", "reward", "frac_reward_zero_std", "completions/mean_length")


def main() -> None:
    parser = make_parser(__doc__, quick="eight prompts")
    parser.add_argument("models", nargs="+", help="folders of the Go coders to compare")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--max_new_tokens", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: 8 if args.quick else None]
    report = {"prompts": len(rows), "temperature": args.temperature, "versions": library_versions(), "models": {}}
    for folder in args.models:
        report["models"][Path(folder).name] = measure(folder, rows, args) | {"curve": curve(Path(folder))}
        print(folder, {name: value for name, value in report["models"][Path(folder).name].items() if name != "curve"})
    write_report(args, "go_rewards", report)


@torch.no_grad()
def measure(folder: str, rows: list[dict], args) -> dict[str, float]:
    """Return the fractions of completions that parse and that earn the reward, and the mean subtree F1."""
    torch.manual_seed(args.seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    validator, end = best_validator(), TOKEN_IDS["</CODE>"]
    parses, rewarded, likeness = [], [], []
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        options = {"do_sample": True, "temperature": args.temperature, "plan_first": False, "eos_token_id": end}
        written = model.generate(ids, max_new_tokens=args.max_new_tokens, **options)[0, ids.shape[1] :].tolist()
        begun = row["prompt"].rpartition("<CODE>")[2]
        code = begun + tokenizer.decode(written[: written.index(end)]) if end in written else None
        parses.append(code is not None and validator([code])[0].syntax_ok)
        rewarded.append(parses[-1] and not is_shortened(code, row["reference"]))
        if parses[-1]:
            likeness.append(subtree_f1(code, row["reference"]))
    figures = {"parses": parses, "reward": rewarded, "subtree_f1_of_parsed": likeness}
    return {name: float(np.mean(values)) for name, values in figures.items()}


def curve(folder: Path) -> list[dict]:
    """Return the rewards logged while a model was trained, or an empty list if it was trained without rewards."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{name: entry[name] for name in CURVES} for entry in history if "reward" in entry]


if __name__ == "__main__":
    main()
