"""Helpers of the ONNX and torch.export tests: models that are quick to export, and one with a wrong export."""

import every
import torch


# Config fields that reduce repetition, because the time for an export depends on the number of operators.
SHORTER = {
    "hrm_puzzle": {"H_cycles": 1, "L_cycles": 1},
    "trm_puzzle": {"L_cycles": 1},
    "se_rrm_puzzle": {"H_cycles": 1, "L_cycles": 1},
    "hrm_lm": {"H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2, "bp_steps": 2},
    "rlm_mhc": {"num_hidden_layers": 1, "mhc_sinkhorn_iters": 3},
    "hrm_cosmo": {"H_cycles": 1, "L_cycles": 1},
}


def save_with_another_head(folder) -> None:
    """Save the tiny cosmo_cnn with a modified posterior head, for which an export of the original is wrong."""
    every.save("cosmo_cnn", folder)
    model = every.model("cosmo_cnn")
    with torch.no_grad():
        model.posterior_head.out.bias.add_(1)
    model.save_pretrained(folder)
