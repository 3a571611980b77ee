"""What the tests of ONNX and of torch.export share: models that are quick to export, and an export that lies."""

import copy
import dataclasses

import torch

from hrm_hf.export.torch_export import export_graph


# Fewer repetitions of the same: what takes long in an export is the number of operators.
SHORTER = {
    "hrm_puzzle": {"H_cycles": 1},
    "trm_puzzle": {"L_cycles": 1},
    "hrm_lm": {"H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2, "bp_steps": 2},
    "rlm_mhc": {"num_hidden_layers": 1, "mhc_sinkhorn_iters": 3},
    "hrm_cosmo": {"H_cycles": 1, "L_cycles": 1},
}


def export_of_another_head(graph):
    """Stands in for `export_graph`: the program is of a regressor whose posterior head was changed."""
    other = copy.deepcopy(graph.module)
    with torch.no_grad():
        other.model.posterior_head.out.bias.add_(1)
    return export_graph(dataclasses.replace(graph, module=other))
