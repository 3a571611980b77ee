"""Stand-in for the exporter tests: `torch.export` only. ONNX and ExecuTorch are not covered."""

import copy

import torch
from transformers import set_seed
from transformers.testing_utils import torch_device


class ExportTesterMixin:
    def exportable(self):
        """Yield an eval model of each class, with unpadded inputs, so that no mask depends on the data."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            set_seed(0)
            model = model_class(copy.deepcopy(config)).to(torch_device).eval()
            yield model, {"input_ids": inputs["input_ids"][:2], "use_cache": False}

    def check_export(self, dynamic_shapes):
        for model, inputs in self.exportable():
            with self.subTest(type(model).__name__), torch.no_grad():
                shapes = {name: dynamic_shapes if name == "input_ids" else None for name in inputs}
                exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
                length = inputs["input_ids"].shape[1] + (3 if dynamic_shapes else 0)
                other = torch.randint(3, 90, (3 if dynamic_shapes else 2, length), device=torch_device)
                expected, actual = (run(**inputs | {"input_ids": other})[0] for run in (model, exported))
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)

    def test_torch_export_equals_eager(self):
        self.check_export(None)

    def test_torch_export_with_dynamic_batch_and_length_equals_eager(self):
        self.check_export({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC})
