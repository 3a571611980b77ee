"""transformers' common tests on `hrm_lm`."""

import unittest
from unittest.mock import patch

import pytest


pytest.importorskip("transformers_tests", reason="transformers' tests are not here: make test-upstream fetches them")

import torch
from transformers_tests.test_modeling_common import seeded_weight_init
from upstream_tester import CausalLMTester, CausalLMTests

from hrm_hf import HrmLmForCausalLM, HrmLmModel


pytestmark = pytest.mark.slow


class HrmLmTester(CausalLMTester):
    base_model_class, causal_lm_class = HrmLmModel, HrmLmForCausalLM
    fields = {"num_h_layers": 1, "num_l_layers": 1, "H_cycles": 2, "L_cycles": 2, "bp_steps": 4, "halt_max_steps": 2}


class HrmLmUpstreamTest(CausalLMTests, unittest.TestCase):
    tester_class = HrmLmTester

    def test_num_layers_is_small(self):
        """Overridden: num_hidden_layers counts layer visits; a segment of two blocks has six."""
        config = self.model_tester.get_config()
        self.assertEqual((config.num_h_layers + config.num_l_layers, config.num_hidden_layers), (2, 12))

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self):
        """Overridden: every visit to a layer carries gradients, unlike the default."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config.bp_steps, config.detach_between_segments = config.stack_passes, False
        return config, inputs

    def check_training_gradient_checkpointing(self, gradient_checkpointing_kwargs=None):
        """Overridden: one segment. Upstream's mock recomputes every visit to a layer with the arguments of its last
        visit, which keep keys from other segments. `test_hrm_lm_gradients.py` tests several segments."""
        with patch.dict(self.model_tester.fields, {"halt_max_steps": 1}):
            super().check_training_gradient_checkpointing(gradient_checkpointing_kwargs)

    def _get_tiny_config(self):
        """Overridden: no halting exploration, which draws different numbers in one process and in two."""
        with patch.dict(self.model_tester.fields, {"halt_exploration_prob": 0.0}):
            return super()._get_tiny_config()

    def test_init_weights_can_init_buffers(self):
        """Overridden: z_L_init is a random buffer, so both initializations use the same seed."""
        for model_class in self.all_model_classes:
            with torch.device("meta"):
                from_meta = model_class(self.model_tester.get_config())
            from_meta.to_empty(device="cpu")
            with seeded_weight_init():
                from_meta.init_weights()
                direct = model_class(self.model_tester.get_config())
            self.assertIn("z_L_init", {name.rsplit(".", 1)[-1] for name, _ in direct.named_buffers()})
            torch.testing.assert_close(dict(from_meta.named_buffers()), dict(direct.named_buffers()), rtol=0, atol=0)
