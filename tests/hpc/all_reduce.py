"""Stand-in for training in launcher tests: processes that connect over gloo and add their ranks.

    all_reduce.py --folder FOLDER [--tag NAME] [--meet FOLDER/OTHER-0.json]

Each process writes FOLDER/NAME-RANK.json. With --meet it waits for that file of another job.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tag", default="seen")
    parser.add_argument("--meet", type=Path)
    args, _ = parser.parse_known_args()  # --use_cpu etc. are for training scripts
    seen = {"ranks": 0, "processes": 1, "port": os.environ.get("PORT"), "node": os.environ.get("SLURMD_NODENAME")}
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        total = torch.tensor([rank])
        dist.all_reduce(total)
        seen |= {"ranks": int(total), "processes": dist.get_world_size(), "master": os.environ["MASTER_ADDR"]}
    (args.folder / f"{args.tag}-{rank}.json").write_text(json.dumps(seen))
    limit = time.monotonic() + 120
    while args.meet and not args.meet.exists():
        if time.monotonic() > limit:
            sys.exit(f"{args.meet} never came")
        time.sleep(0.1)
    if "RANK" in os.environ:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
