"""transformers' common tests on `hrm_go_coder` with two stacks and with one.

Without tags: the tests draw random ids, and a tag among them would start a phase.
"""

import unittest

import pytest


pytest.importorskip("transformers_tests", reason="transformers' tests are not here: make test-upstream fetches them")

from transformers_tests.generation.test_utils import NEW_TOKENS, PROMPT_LENGTH
from upstream_tester import CausalLMTester, CausalLMTests

from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM, HrmGoCoderModel


pytestmark = pytest.mark.slow


class HrmGoCoderTester(CausalLMTester):
    base_model_class, causal_lm_class = HrmGoCoderModel, HrmGoCoderForCausalLM
    fields = {"tagged": False, "planner_layers": 1, "generator_layers": 1}

    def __init__(self):
        """`num_hidden_layers` counts cache slots, including cross-attention's; two layers return states."""
        super().__init__()
        self.num_hidden_layers, self.expected_num_hidden_layers = 2, 3


class UnifiedGoCoderTester(CausalLMTester):
    base_model_class, causal_lm_class = HrmGoCoderModel, HrmGoCoderForCausalLM
    fields = {"tagged": False, "planner_layers": 2, "generator_layers": 0, "unified": True}


class GoCoderTests(CausalLMTests):
    def test_model_outputs_equivalence(self):
        """Overridden: upstream subtracts outputs, but the base model's `phases` are booleans."""
        self.all_model_classes = self.all_model_classes[1:]
        super().test_model_outputs_equivalence()


class HrmGoCoderUpstreamTest(GoCoderTests, unittest.TestCase):
    tester_class = HrmGoCoderTester

    def test_hidden_states_and_attentions_come_with_each_token(self):
        """Overridden: two layers return states, but num_hidden_layers also counts cross-attention's cache slot."""
        for model, prompts in self.generative_models():
            model.set_attn_implementation("eager")
            out = self.scored(model, prompts, output_hidden_states=True, output_attentions=True)
            for step, (states, attentions) in enumerate(zip(out.hidden_states, out.attentions)):
                queries, keys = (PROMPT_LENGTH, PROMPT_LENGTH) if step == 0 else (1, PROMPT_LENGTH + step)
                self.assertEqual(
                    [tuple(state.shape) for state in states], [(3, queries, model.config.hidden_size)] * 3
                )
                weights = (3, model.config.num_attention_heads, queries, keys)
                self.assertEqual([tuple(weight.shape) for weight in attentions], [weights] * 2)

    def test_the_cache_has_one_slot_of_known_shape_for_each_layer_visit(self):
        """Overridden: besides layer visits, the cache has cross-attention's memory and phases of width 1."""
        for model, prompts in self.generative_models():
            cache, config = self.scored(model, prompts).past_key_values, model.config
            length = PROMPT_LENGTH + NEW_TOKENS - 1
            shapes = [(3, config.num_key_value_heads, length, config.head_dim)] * 3 + [(3, 1, length, 1)]
            self.assertEqual([tuple(layer.keys.shape) for layer in cache.layers], shapes)
            self.assertEqual([tuple(layer.values.shape) for layer in cache.layers], shapes)


class UnifiedGoCoderUpstreamTest(GoCoderTests, unittest.TestCase):
    tester_class = UnifiedGoCoderTester
