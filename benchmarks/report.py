"""What every benchmark shares: the options --quick and --out, the machine, and the file of results."""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parent / "results"


def make_parser(description: str, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with --quick (`quick` says what it measures) and --out, the folder of results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def write_report(args: argparse.Namespace, name: str, report: dict[str, Any]) -> None:
    """Writes NAME.json, or NAME_quick.json, in --out."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}{'_quick' if args.quick else ''}.json").write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Describes the machine of the measurements."""
    import torch  # not above: worker processes of `cosmology_generation.py` need none

    found = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    return found | ({"accelerator": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})
