"""Adapts our causal language models to transformers' common tests: tiny config, inputs, and test class.

The pipeline mixin is left out: it needs checkpoints of the Hub and test modules that are not distributed. The
stand-in for the generation tests runs the text-generation pipeline instead.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.testing_utils import torch_device
from transformers_tests import test_fsdp_mixin, test_tensor_parallel_mixin
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin


class CausalLMTester:
    """Builds configs and inputs. A subclass sets the classes, and in `fields` the config fields that Llama lacks.

    `num_hidden_layers` and `expected_num_hidden_layers` are the counts of attentions and hidden states that a forward
    returns; they follow the config, which for a recurrent model counts layer visits.
    """

    base_model_class = causal_lm_class = None
    fields = {}
    batch_size, seq_length, vocab_size = 13, 7, 99
    hidden_size, num_attention_heads = 32, 2
    is_training = True
    common_fields = {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 64, "max_position_embeddings": 512,
        "num_attention_heads": num_attention_heads, "num_key_value_heads": 2, "head_dim": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip

    def __init__(self):
        self.config_class = self.causal_lm_class.config_class
        self.num_hidden_layers = self.get_config().num_hidden_layers
        self.expected_num_hidden_layers = self.num_hidden_layers + 1

    def get_config(self):
        return self.config_class(**self.common_fields | self.fields)

    def prepare_config_and_inputs_for_common(self):
        """Row i of the batch is padded on the right after i + 1 tokens."""
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.ones_like(input_ids).tril()
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask.to(torch_device)}


class CausalLMTests(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    test_tensor_parallel_mixin.TensorParallelTesterMixin,
    test_fsdp_mixin.FSDPTesterMixin,
):
    """Mixin for a `unittest.TestCase` in a module that sets `tester_class`."""

    tester_class = None
    model_tester = None
    test_can_init_all_missing_weights_before_2023 = True  # our files have no copyright line with the year

    def setUp(self):
        self.model_tester = tester = self.tester_class()
        self.all_model_classes = (tester.base_model_class, tester.causal_lm_class)
        self.config_tester = ConfigTester(self, config_class=tester.config_class)
        model_type = tester.config_class.model_type
        # The tests use these tables to find base models, and classes with one label per token.
        tables = (MODEL_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        for names, model_class in zip(tables, self.all_model_classes):
            self.during_test(patch.dict(names, {model_type: model_class.__name__}))
        # Upstream runs these for a list of its own architectures; None means every architecture.
        self.during_test(patch.object(test_tensor_parallel_mixin, "TP_DISTRIBUTED_TEST_MODEL_TYPES", None))
        self.during_test(patch.object(test_fsdp_mixin, "FSDP_DISTRIBUTED_TEST_MODEL_TYPES", None))

    def during_test(self, patcher):
        patcher.start()
        self.addCleanup(patcher.stop)

    def test_config(self):
        self.config_tester.run_common_tests()

    @contextmanager
    def eager_attention(self):
        """With sdpa and output_attentions, the library warns and returns none, while our models raise."""
        get_config = self.model_tester.get_config

        def eager():
            config = get_config()
            config._attn_implementation = "eager"
            return config

        with patch.object(self.model_tester, "get_config", eager):
            yield

    def test_model_outputs_equivalence(self):
        """Overridden: with eager attention."""
        with self.eager_attention():
            super().test_model_outputs_equivalence()

    def test_capture_outputs_decorator(self):
        """Overridden: with eager attention."""
        with self.eager_attention():
            super().test_capture_outputs_decorator()

    def test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions(self):
        self.skipTest("output_attentions raises under sdpa")

    def test_the_base_model_returns_one_state_a_token(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        states = self.model_tester.base_model_class(config).to(torch_device).eval()(**inputs).last_hidden_state
        self.assertEqual(tuple(states.shape), (*inputs["input_ids"].shape, config.hidden_size))
