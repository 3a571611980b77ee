"""`pipeline("mass-mapping", model=...)`: shear maps in, convergence maps and parameters out.

infer = pipeline("mass-mapping", model="runs/mass_64")
infer({"map": shear, "mask": mask})["kappa"]  # float32 [size, size]
"""

from typing import Any

import torch

from .pipeline_cosmo import POSTERIOR, CosmologyRegressionPipeline


MAPS = ("kappa", "kappa_std", "segment_maps")  # model outputs to read


class MassMappingPipeline(CosmologyRegressionPipeline):
    """Pipeline that reconstructs mass maps with any of the package's mass-mapping models.

    Inputs and parameters are those of `CosmologyRegressionPipeline`; a map is shear [2P, H, W], g1 and g2 of each
    plane in turn, with its mask.

    Additional parameters of the constructor and of every call:
        return_segments (`bool`, False): add "segment_maps", float32 [segments, P, H, W].

    Returns, per map, the dict of `CosmologyRegressionPipeline`, and:
        kappa: the dimensionless convergence with mean 0, float32 [P, H, W], or [H, W] for a single plane.
        kappa_std: the standard deviation of each pixel's error, in the same shape.
    """

    def _sanitize_parameters(self, return_segments: bool | None = None, **kwargs: Any) -> tuple[dict, dict, dict]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        given = {} if return_segments is None else {"return_segments": return_segments}
        return preprocess, forward, postprocess | given

    def _forward(self, input_tensors: dict[str, torch.Tensor], **forward_params: Any) -> dict[str, torch.Tensor]:
        return self._answers(self.model(**input_tensors, **forward_params), input_tensors, (*POSTERIOR, *MAPS))

    def postprocess(
        self, model_outputs: dict[str, torch.Tensor], return_segments: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the maps and posterior for one item."""
        kappa, std, segments = (model_outputs.pop(name)[0].cpu() for name in MAPS)
        planes = slice(None) if len(kappa) > 1 else 0
        maps = {"kappa": kappa[planes].numpy(), "kappa_std": std[planes].numpy()}
        maps |= {"segment_maps": segments.numpy()} if return_segments else {}
        return super().postprocess(model_outputs, **kwargs) | maps
