"""`import hrm_hf` registers every architecture and pipeline, before and after transformers."""

import os
import subprocess
import sys

import pytest


# Importing the library does not affect other libraries' progress bars or messages, except a few at import.
BEFORE = """
import logging, os
import hrm_hf
assert "TQDM_DELAY" not in os.environ
record = lambda words: logging.makeLogRecord({"msg": words})
assert not logging.getLogger("torchao").filter(record("Failed to load /a/b.so: no such file"))
assert logging.getLogger("torchao").filter(record("Values overflow"))
said = [record(f"No model was supplied, defaulted to {name} and revision main.") for name in ("/a/sudoku-9x9", "vit")]
assert [bool(logging.getLogger("transformers.pipelines").filter(one)) for one in said] == [False, True]
assert not logging.getLogger("transformers").filters
"""
AFTER = """
import transformers.pipelines
from transformers import AutoFeatureExtractor, AutoModelForCausalLM, LlamaForCausalLM
import hrm_hf
"""
KNOWN = """
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert "llama" in CONFIG_MAPPING and "no_such_type" not in CONFIG_MAPPING
config = AutoConfig.for_model("hrm_lm", hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
assert type(config) is hrm_hf.HrmLmConfig
assert type(AutoModelForCausalLM.from_config(config)) is hrm_hf.HrmLmForCausalLM
assert hrm_hf.HrmLmForCausalLM._auto_map["AutoConfig"] == "configuration_hrm_lm.HrmLmConfig"
from transformers.models.auto.feature_extraction_auto import feature_extractor_class_from_name
assert feature_extractor_class_from_name("CosmoMapFeatureExtractor")
from transformers.pipelines import PIPELINE_REGISTRY
known = PIPELINE_REGISTRY.get_supported_tasks()
ours = {"puzzle-solving", "cosmology-regression", "mass-mapping", "recursive-text-generation"}
assert ours <= set(known), known
"""


# Shortens the start and the end of a process, without an import that the test could notice.
WITHOUT_COLLECTION = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)"


@pytest.mark.parametrize("first", [BEFORE, AFTER], ids=["before", "after"])
def test_architectures_and_pipelines_are_registered(first):
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DELAY"}  # set by our programs
    command = [sys.executable, "-c", WITHOUT_COLLECTION + first + KNOWN]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert first == AFTER or result.stderr == ""  # no messages of torchao, bitsandbytes and kernels


def test_the_package_has_the_names_of_every_architecture():
    import hrm_hf
    from hrm_hf.registry import ARCHITECTURES

    for row in ARCHITECTURES.values():
        for each in (row.config, *row.heads.values()):
            assert getattr(hrm_hf, each.__name__) is each and each.__name__ in hrm_hf.__all__
    assert set(hrm_hf.__all__) <= set(dir(hrm_hf))
    assert all(hasattr(hrm_hf, name) for name in hrm_hf.__all__)


def test_subpackages_are_attributes_of_the_package(monkeypatch):
    import hrm_hf

    for name in ("export", "hub", "registry", "text"):
        monkeypatch.delattr(hrm_hf, name, raising=False)  # as if not imported yet
        assert getattr(hrm_hf, name).__name__ == f"hrm_hf.{name}"


def test_the_case_of_a_class_name_does_not_matter(monkeypatch):
    import hrm_hf

    monkeypatch.setattr(hrm_hf, "_classes", lambda: {"mNewConfig": dict})
    assert hrm_hf.mNewConfig is dict


@pytest.mark.parametrize("name", ["HrmNothing", "nothing", "__nothing__", "export.nothing", ""])
def test_unknown_package_attribute_raises_attribute_error(name):
    import hrm_hf

    with pytest.raises(AttributeError, match=f"'hrm_hf'.*'{name}'"):
        getattr(hrm_hf, name)
