"""transformers' common tests on `rlm_mhc`."""

import unittest

import pytest


pytest.importorskip("transformers_tests", reason="transformers' tests are not here: make test-upstream fetches them")

import torch
from upstream_tester import CausalLMTester, CausalLMTests

from hrm_hf import RlmMhcForCausalLM, RlmMhcModel


pytestmark = pytest.mark.slow


class RlmMhcTester(CausalLMTester):
    base_model_class, causal_lm_class = RlmMhcModel, RlmMhcForCausalLM
    # The learned ends of the streams, so that every module named in `_keep_in_fp32_modules_strict` is there.
    fields = {"num_hidden_layers": 2, "mhc_flows": 3, "mhc_reduce": "head", "mhc_stream_init": "scaled"}


class RlmMhcUpstreamTest(CausalLMTests, unittest.TestCase):
    tester_class = RlmMhcTester

    def hidden_state_shape(self, config, batch, length):
        return batch, length, config.mhc_flows, config.hidden_size

    def test_hidden_states_output(self):
        """Overridden: hidden states between layers are streams [B, S, n, C]; upstream expects [B, S, C]."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class(config).eval()
            with torch.no_grad():
                states = model(**inputs, output_hidden_states=True).hidden_states
            shape = self.hidden_state_shape(config, *inputs["input_ids"].shape)
            self.assertEqual([tuple(state.shape) for state in states[:-1]], [shape] * config.num_hidden_layers)
            self.assertEqual(tuple(states[-1].shape), (*inputs["input_ids"].shape, config.hidden_size))
