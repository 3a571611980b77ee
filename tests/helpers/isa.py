"""`make test-isa`: run the numeric tests with the kernels of other processors, and one or two threads.

python tests/helpers/isa.py [-n 2] [--only mkl] [--threads 1] [--out FILE] [-- ARGUMENTS OF PYTEST]

Torch, oneDNN and MKL choose kernels by processor. A variable of each overrides the choice:

- ATEN_CPU_CAPABILITY: the vector code of torch's own kernels (plain, AVX2, AVX-512);
- ONEDNN_MAX_CPU_ISA: oneDNN's convolutions and products, here as on a processor without AVX-512 and AMX;
- MKL_CBWR=COMPATIBLE: MKL's products as on processors that are not its maker's. With it an Intel failed in the same
  five tests as an AMD EPYC without it.

Tests run with one thread and with two, because splitting a sum changes its rounding. Kernels that this processor
cannot run are skipped and named. The exit status is 1 if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch


ROOT = Path(__file__).parents[2]
# Tests that compare tensors of models, losses and map generators, and one trainer. The others use the same kernels and
# would only take longer; name them after -- to run them too.
NUMERIC = (
    "text/test_hrm_lm_convert.py", "puzzles/test_puzzle_convert.py", "text/test_rlm_mhc_convert.py",
    "cosmology/test_cosmology_collator.py", "cosmology/test_cosmology_fields.py", "cosmology/test_cosmology_lpt.py",
    "cosmology/test_cosmology_physics.py", "models/test_act.py", "models/test_cosmo_cnn.py",
    "models/test_cosmo_conventions.py", "models/test_early_exit.py", "models/test_hrm_cosmo.py",
    "models/test_hrm_go_coder.py", "models/test_hrm_lm.py", "models/test_hrm_lm_causality.py",
    "models/test_hrm_lm_gradients.py", "models/test_hyper_connections.py", "models/test_linear_cross_entropy.py",
    "models/test_posterior_head.py", "models/test_puzzle_golden.py", "models/test_puzzle_models.py",
    "models/test_rlm_mhc.py", "models/test_recurrent_cache.py", "models/test_token_halting.py",
    "puzzles/test_puzzle_solving.py", "text/test_causal_lm.py", "common/test_numerics.py", "trainer/test_optim.py",
    "puzzles/test_puzzle_trainer.py", "trainer/test_adapters.py",
)  # fmt: skip
ORDER = ("default", "avx2", "avx512")  # ATen's capabilities; a processor has its own and all before it
# If ATen is limited to less than AVX-512, oneDNN must be, too. Otherwise, torch's bfloat16 attention finds AVX-512 in
# oneDNN, but not its kernels in ATen. Real processors have both or neither.
SETTINGS = {
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2": "plain vector code",
    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2": "AVX2",
    "ATEN_CPU_CAPABILITY=avx512": "AVX-512",
    "ONEDNN_MAX_CPU_ISA=AVX2": "oneDNN with AVX2",
    "MKL_CBWR=COMPATIBLE": "MKL as on processors that are not its maker's",
}
THREADS = (1, 2)
HEAD = "| setting | kernels | threads | passed | failed | skipped |\n|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--jobs", type=int, default=2, help="test files side by side (default: 2)")
    parser.add_argument("--only", default="", help="only settings whose name contains this, e.g. mkl")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, help="numbers of threads (default: 1 2)")
    parser.add_argument("--out", type=Path, help="also write the table as JSON to this file")
    parser.add_argument("pytest", nargs="*", help="after --: files or options for pytest instead of the numeric tests")
    arguments = parser.parse_args()
    rows = []
    print(HEAD, flush=True)
    for setting, meaning in SETTINGS.items():
        if arguments.only.lower() not in setting.lower():
            continue
        for threads in arguments.threads:
            # Threads that wait for a busy core make tests ten times slower.
            jobs = max(1, arguments.jobs // threads)
            found = run(setting, threads, jobs, arguments.pytest) if can_run(setting) else None
            rows.append({"setting": setting, "threads": threads, **(found or {"left_out": "not on this processor"})})
            print(line(rows[-1], meaning), flush=True)
    for name in sorted({name for row in rows for name in row.get("failures", [])}):
        print(f"FAILED {name}")
    if arguments.out:
        machine = {"processor": processor(), "torch": torch.__version__}
        arguments.out.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    return int(any(row.get("failed") or row.get("exit") not in (0, None) for row in rows))


def variables(setting: str) -> dict[str, str]:
    """Return the environment variables of a setting."""
    return dict(part.split("=") for part in setting.split())


def can_run(setting: str) -> bool:
    """Check that this processor has the instructions, since ATen does not and would crash."""
    value = variables(setting).get("ATEN_CPU_CAPABILITY", "default")
    if value == "default":
        return True
    has = torch.backends.cpu.get_cpu_capability().lower()
    return has in ORDER and ORDER.index(value) <= ORDER.index(has)


def run(setting: str, threads: int, jobs: int, options: list[str]) -> dict:
    """Run pytest, and return the counts of passed, failed and skipped tests and the names of failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "loadfile",
            f"--junitxml={report}", *(options or [str(ROOT / "tests" / file) for file in NUMERIC]),
        ]  # fmt: skip
        environment = {**os.environ, **variables(setting), "HRM_HF_TEST_THREADS": str(threads)}
        finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not report.exists():
            sys.exit(
                f"pytest ended with status {finished.returncode} and without a report:\n{finished.stdout[-4000:]}"
            )
        suite = ElementTree.parse(report).getroot().find("testsuite")
    failures = [
        f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"],
        "failures": failures, "exit": finished.returncode,
    }  # fmt: skip


def line(row: dict, meaning: str) -> str:
    """Return a row of the Markdown table."""
    counts = [row.get(key, row.get("left_out")) for key in ("passed", "failed", "skipped")]
    return f"| `{row['setting']}` | {meaning} | {row['threads']} | " + " | ".join(map(str, counts)) + " |"


def processor() -> str:
    """Return the processor's name from Linux."""
    file = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in file.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown"


if __name__ == "__main__":
    sys.exit(main())
