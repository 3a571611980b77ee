"""Put transformers' own tests on the path if fetched (`make test-upstream`), followed by our stand-ins."""

import sys
from pathlib import Path

import fetch


MARKS = """accelerate_tests flash_attn_test flash_attn_3_test flash_attn_4_test is_fsdp_test
    is_tensor_parallel_test is_training_test order torch_compile_test""".split()

collect_ignore = ["stand_ins"]  # mixins with transformers' file names, not tests

if fetch.is_fetched():
    sys.path += [str(fetch.cache_folder()), str(Path(__file__).parent / "stand_ins")]


def pytest_configure(config):
    for name in MARKS:
        config.addinivalue_line("markers", f"{name}: set by transformers' own tests")
