"""transformers' common tests on `hrm_cosmo`, with either stem, and on its CNN baseline.

Assumptions that do not hold for these models are replaced by what holds instead; each override gives the reason. Not
covered: pipelines (tests/pipelines), flash attention, and tests that need an accelerator.
"""

import copy
import tempfile
import unittest
from unittest.mock import patch

import pytest


pytest.importorskip("transformers_tests", reason="transformers' tests are not here: make test-upstream fetches them")

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.testing_utils import torch_device
from transformers_tests.test_configuration_common import ConfigTester, config_common_kwargs
from transformers_tests.test_modeling_common import ModelTesterMixin, floats_tensor

from hrm_hf import CosmoCnnForRegression, CosmoCnnModel, HrmCosmoForRegression, HrmCosmoModel


pytestmark = pytest.mark.slow

BOX = [[0.1, 0.5], [0.6, 1.0]]


class RegressorTester:
    """Builds configs and inputs. `common_properties` are required config fields."""

    base_model_class = regressor_class = None
    common_properties = None
    fields = {}
    batch_size, num_channels, image_size = 13, 1, 16
    num_labels = 2
    is_training = True

    def __init__(self):
        self.config_class = self.regressor_class.config_class

    def get_config(self):
        return self.config_class.from_preset("test", prior_bounds=BOX, **self.fields)

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": floats_tensor(shape)}


class HrmCosmoTester(RegressorTester):
    """The hidden states are z_L and z_H, not one per layer, with 1 CLS, 2 summary and 4 x 4 patch tokens."""

    base_model_class, regressor_class = HrmCosmoModel, HrmCosmoForRegression
    fields = {"num_components": 2, "pos_encodings": "learned"}
    num_hidden_layers = expected_num_hidden_layers = 2
    seq_length, hidden_size, num_attention_heads = 19, 16, 2


class PatchStemTester(HrmCosmoTester):
    """The linear stem has no summaries. Maps are periodic, and the second channel is the mask."""

    fields = {"stem": "patch", "padding_mode": "circular", "num_channels": 2, "mask_channel": True}
    num_channels, seq_length = 2, 17


class CosmoCnnTester(RegressorTester):
    """The hidden states are those of the stem and two stages."""

    base_model_class, regressor_class = CosmoCnnModel, CosmoCnnForRegression
    common_properties = ["num_channels", "hidden_sizes"]


class RegressorConfigTester(ConfigTester):
    def create_and_test_config_with_num_labels(self):
        """Overridden: labels are the targets, so their number is not a separate option."""
        config = self.config_class(target_names=["omega_m", "sigma_8", "w_0"], num_labels=3)
        self.parent.assertEqual((config.num_labels, len(config.id2label), len(config.label2id)), (3, 3, 3))
        with self.parent.assertRaisesRegex(ValueError, "num_labels=5"):
            self.config_class(num_labels=5)

    def check_config_arguments_init(self):
        """Overridden: label names, which upstream sets for every config, are not an option either."""
        with patch.dict(config_common_kwargs):
            del config_common_kwargs["id2label"], config_common_kwargs["label2id"]
            super().check_config_arguments_init()


class RegressorTests(ModelTesterMixin):
    """Mixin for a `unittest.TestCase` that sets `builder_class`."""

    builder_class = None
    test_resize_embeddings = False  # no vocabulary
    has_attentions = False  # not supported: a level runs many times per segment, so requesting attentions raises
    test_can_init_all_missing_weights_before_2023 = True  # our files have no copyright line with the year

    def setUp(self):
        self.model_tester = tester = self.builder_class()
        self.all_model_classes = (tester.base_model_class, tester.regressor_class)
        self.config_tester = RegressorConfigTester(
            self, tester.config_class, has_text_modality=False, common_properties=tester.common_properties
        )
        model_type = tester.config_class.model_type
        # The tests use these tables to find base models, and classes with one label per image.
        tables = (MODEL_MAPPING_NAMES, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
        for names, model_class in zip(tables, self.all_model_classes, strict=True):
            patcher = patch.dict(names, {model_type: model_class.__name__})
            patcher.start()
            self.addCleanup(patcher.stop)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        """Overridden: labels are cosmological parameters within the prior, not classes."""
        inputs = copy.deepcopy(inputs_dict)
        if return_labels and model_class is self.model_tester.regressor_class:
            inputs["labels"] = torch.tensor([0.3, 0.8], device=torch_device).expand(self.model_tester.batch_size, 2)
        return inputs

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model_get_set_embeddings(self):
        """Overridden: the stem embeds maps; there is no token table."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            base = getattr(model, model.base_model_prefix, model)
            self.assertIs(model.get_input_embeddings(), base.stem)
            other = nn.Identity()
            model.set_input_embeddings(other)
            self.assertIs(base.stem, other)
            self.assertIsNone(model.get_output_embeddings())

    def test_problem_types(self):
        """Overridden: only regression is supported, with any number of targets; others are rejected."""
        _, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for targets in (1, 3):
            config = self.config_with_targets(targets)
            model = self.model_tester.regressor_class(config).to(torch_device).train()
            labels = torch.full((self.model_tester.batch_size, targets), 0.5, device=torch_device)
            model(**inputs, labels=labels).loss.backward()
        for problem_type in ("multi_label_classification", "single_label_classification"):
            with self.assertRaisesRegex(StrictDataclassError, "problem_type"):
                self.model_tester.config_class.from_preset("test", problem_type=problem_type)

    def config_with_targets(self, count):
        names = [f"target_{index}" for index in range(count)]
        fields = {**self.model_tester.fields, "target_names": names, "derived_s8": False}
        return self.model_tester.config_class.from_preset("test", **fields)

    def test_can_load_ignoring_mismatched_shapes(self):
        """Overridden: upstream sets every field named *_std, also lists, and requires labels without targets."""
        model_class = self.model_tester.regressor_class
        model, config = model_class(self.config_with_targets(3)), self.config_with_targets(5)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            with self.assertRaises(RuntimeError):
                model_class.from_pretrained(folder, config=config)
            with self.assertLogs("transformers", "WARNING") as logs:
                loaded = model_class.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
        self.assertIn("size mismatch", "".join(logs.output))
        old = model.state_dict()
        kept = {name for name, value in loaded.state_dict().items() if torch.equal(value, old[name])}
        self.assertEqual(old.keys() - kept, {"posterior_head.out.weight", "posterior_head.out.bias"})

    def check_export(self, dynamic_shapes):
        """Overridden: inputs are maps instead of tokens, and only the batch size is dynamic."""
        batch_is_dynamic = dynamic_shapes is not None
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        maps = inputs["pixel_values"]
        shapes = {"pixel_values": {0: torch.export.Dim.DYNAMIC} if batch_is_dynamic else None}
        for model_class in self.all_model_classes:
            with self.subTest(model_class.__name__), torch.no_grad():
                set_seed(0)
                model = model_class(copy.deepcopy(config)).to(torch_device).eval()
                example = {"pixel_values": maps[:2]}
                exported = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
                other = maps[3:6] if batch_is_dynamic else maps[3:5]
                expected, actual = (run(pixel_values=other)[0] for run in (model, exported))
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


class HrmCosmoUpstreamTest(RegressorTests, unittest.TestCase):
    builder_class = HrmCosmoTester


class PatchStemUpstreamTest(RegressorTests, unittest.TestCase):
    builder_class = PatchStemTester


class CosmoCnnUpstreamTest(RegressorTests, unittest.TestCase):
    builder_class = CosmoCnnTester

    def test_hidden_states_output(self):
        """Overridden: hidden states are feature maps [B, channels, side, side]."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            states = model_class(config).eval()(**inputs, output_hidden_states=True).hidden_states
            self.assertEqual([tuple(state.shape[1:]) for state in states], [(4, 16, 16), (8, 8, 8), (16, 4, 4)])
