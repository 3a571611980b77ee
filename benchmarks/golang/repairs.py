"""Whether a Go coder's repairs are worth their tokens: edits, new attempts, half of each; and its decisions.

    python -m benchmarks.golang.repairs MODEL --records data/go/test.jsonl
        [--trajectories data/go/trajectories/test.jsonl]
        [--calibrate_on data/go/trajectories/validation.jsonl] [--failures 400] [--budget 512] [--validator types]
    python -m benchmarks.golang.repairs MODEL --again TRIES.jsonl [--budget 512]

The sections "equal_tokens", "policies" and "decisions" of `hrm-hf eval go` alone, without what takes longest there.
The second form counts again what `--tries` has kept, without the model.
"""

import json
from pathlib import Path

import torch

from hrm_hf.golang.data.records import read_records, spread
from hrm_hf.golang.evaluation.decisions import evaluate_decisions
from hrm_hf.golang.evaluation.equal_tokens import compare_policies, evaluate_equal_tokens, read_failures
from hrm_hf.golang.evaluation.held_out import Sampling
from hrm_hf.golang.evaluation.load import load_writer
from hrm_hf.golang.evaluation.plots import plot_go_evaluation
from hrm_hf.golang.evaluation.policies import evaluate_policies
from hrm_hf.golang.validators.go_validators import VALIDATOR_CHOICES, best_validator
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    parser = make_parser(__doc__, quick="8 failures, 16 records")
    parser.add_argument("model")
    parser.add_argument("--records", type=Path, help="held-out records")
    parser.add_argument("--again", type=Path, help="print the figures of a file of --tries, and do nothing else")
    parser.add_argument("--trajectories", type=Path)
    parser.add_argument("--calibrate_on", type=Path)
    parser.add_argument("--failures", type=int, default=400)
    parser.add_argument("--policies", type=int, default=128, help="records to compare policies on; 0 for none")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--limit", type=int, help="so many records, from all over the file")
    parser.add_argument("--max_code_tokens", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--validator", default="types", choices=VALIDATOR_CHOICES)
    parser.add_argument("--tries", type=Path, help="file for the failures and all that was tried, JSON Lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.again:
        print(json.dumps(compare_policies(read_failures(args.again), args.budget, args.seed), indent=1))
        return
    if args.records is None:
        parser.error("--records is missing: held-out records to fail on, or --again for a file of --tries")
    if args.quick:
        args.failures, args.policies, args.limit = 8, 8, 16
    torch.set_num_threads(args.threads)
    writer, builder = load_writer(args.model, "cpu", batch_size=args.batch_size, max_code_tokens=args.max_code_tokens)
    records = spread(list(read_records(args.records)), args.limit)
    sampling = Sampling(args.temperature, 3, 1, args.seed)
    metrics = {}
    with best_validator(args.validator) as judge:
        metrics["equal_tokens"] = evaluate_equal_tokens(
            writer, builder, records, judge, sampling, args.failures, args.budget, args.tries
        )
        if args.policies:
            some = spread(records, args.policies)
            metrics["policies"] = evaluate_policies(writer, builder, some, judge, sampling)
    if args.trajectories:
        rows = spread(list(read_records(args.trajectories)), args.limit)
        other = list(read_records(args.calibrate_on)) if args.calibrate_on else []
        metrics["decisions"] = evaluate_decisions(writer, builder, rows, other, args.seed)
    settings = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings["model"] = Path(args.model).name
    report = {"settings": settings, "parameters": writer.model.num_parameters(), "metrics": metrics}
    write_report(args, "go_repairs", report | {"machine": machine(), "versions": library_versions()})
    for name, section in metrics.items():
        print(name, json.dumps({key: each for key, each in section.items() if key != "by_category"}, indent=1))
    if not args.quick:
        print("plot:", plot_go_evaluation(metrics, IMAGES / "go_repairs.png"))


if __name__ == "__main__":
    main()
