"""Gains of hyper-connections: how much a signal can grow on its way through the streams.

The forward gain of H_res (target stream first) is its largest absolute row sum, the backward gain its largest absolute
column sum; both are 1 for a doubly stochastic map. Composite gains are those of the product of all maps up to a site.
Maps of a model are averaged over tokens before sums are taken.

Source: arXiv 2512.24880, "Amax Gain Magnitude"; the smallest column sum is ours, since a gain hides what fades.
"""

import torch

from .hyper_connections import HyperConnection


SITES = ("attention", "feed_forward")  # of hyper-connections in a layer, in the order they run


def forward_gain(matrix: torch.Tensor) -> torch.Tensor:
    """Largest absolute row sum of [..., n, n]: the largest factor on a value going forward."""
    return matrix.sum(-1).abs().amax(-1)


def backward_gain(matrix: torch.Tensor) -> torch.Tensor:
    """Largest absolute column sum of [..., n, n]: the largest factor on a gradient going backward."""
    return matrix.sum(-2).abs().amax(-1)


def min_column_sum(matrix: torch.Tensor) -> torch.Tensor:
    """Smallest column sum of [..., n, n]: below 1, a stream that fades backward."""
    return matrix.sum(-2).amin(-1)


def composite_maps(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Running products H_l ... H_1, newest on the left, of maps [..., n, n] in the order they ran."""
    products = [matrices[0]]
    for matrix in matrices[1:]:
        products.append(matrix @ products[-1])
    return products


class MhcMetricsMixin:
    """Gains of a model whose layers have `attn_hc` and `ffn_hc`."""

    def get_mhc_metrics(self, input_ids: torch.Tensor | None = None, **inputs) -> list[tuple[float, float]]:
        """(gain of the attention's map, gain of the feed-forward's map) of each layer in the order they run.

        Args:
            input_ids: tokens [B, S] whose maps are averaged; without any, the static part of the maps.
            inputs: further arguments of the forward; padding by `attention_mask` is left out of the average.

        Returns:
            [] without mHC. 1.0 is ideal, above 2.0 the training guide speaks of possible instability.
        """
        sites = self.get_detailed_mhc_metrics(input_ids, **inputs)
        gains = [max(site["forward"], site["backward"]) for site in sites]
        return list(zip(gains[::2], gains[1::2]))

    def get_detailed_mhc_metrics(self, input_ids: torch.Tensor | None = None, **inputs) -> list[dict]:
        """One dict for each site in the order they run, arguments as in `get_mhc_metrics`.

        Keys: `layer`, `site` ("attention" or "feed_forward"); `forward`, `backward` (gains), `min_column` (smallest
        column sum) and `largest_entry` of its own map; `composite_forward`, `composite_backward` and
        `composite_min_column` of the product of all maps up to this one.
        """
        pairs = self._maps(input_ids, inputs)
        if not pairs:
            return []
        products = composite_maps([matrix for matrix, _ in pairs])
        sites = []
        for index, ((matrix, weights), product) in enumerate(zip(pairs, products)):
            own, composite = self._mean_over_tokens(matrix, weights), self._mean_over_tokens(product, weights)
            sites.append(
                {
                    "layer": self.config.layer_order[index // 2],
                    "site": SITES[index % 2],
                    "forward": forward_gain(own).item(),
                    "backward": backward_gain(own).item(),
                    "min_column": min_column_sum(own).item(),
                    "largest_entry": own.abs().amax().item(),
                    "composite_forward": forward_gain(composite).item(),
                    "composite_backward": backward_gain(composite).item(),
                    "composite_min_column": min_column_sum(composite).item(),
                }
            )
        return sites

    @torch.no_grad()
    def _maps(self, input_ids, inputs) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """H_res of each site that runs, with the weights [B, S] of its tokens (None for static maps)."""
        base = self.base_model
        if not self.config.mhc_enabled:
            return []
        if input_ids is None and not inputs:
            layers = [base.layers[layer] for layer in self.config.layer_order]
            connections: list[HyperConnection] = [hc for layer in layers for hc in (layer.attn_hc, layer.ffn_hc)]
            return [(connection.get_connection_matrix(), None) for connection in connections]
        training = base.training
        base.eval()  # no dropout, and no checkpointing, under which hooks see the maps twice
        try:
            matrices = base(input_ids, **inputs, use_cache=False, output_mhc_matrices=True).mhc_matrices
        finally:
            base.train(training)
        mask = inputs.get("attention_mask")
        weights = torch.ones(matrices[0].shape[:2], device=matrices[0].device) if mask is None else mask
        return [(matrix, (weights / weights.sum()).to(matrix)) for matrix in matrices]

    @staticmethod
    def _mean_over_tokens(matrix: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        return matrix if weights is None else torch.einsum("bsij,bs->ij", matrix, weights)
