"""transformers' common tests on `rlm_mhc`."""

import unittest

import pytest


pytest.importorskip("transformers_tests", reason="transformers' tests are not here: make test-upstream fetches them")

from upstream_tester import CausalLMTester, CausalLMTests

from hrm_hf import RlmMhcForCausalLM, RlmMhcModel


pytestmark = pytest.mark.slow


class RlmMhcTester(CausalLMTester):
    base_model_class, causal_lm_class = RlmMhcModel, RlmMhcForCausalLM
    fields = {"num_hidden_layers": 2, "mhc_flows": 3, "mhc_reduce": "head", "mhc_stream_init": "scaled"}


class RlmMhcUpstreamTest(CausalLMTests, unittest.TestCase):
    tester_class = RlmMhcTester
