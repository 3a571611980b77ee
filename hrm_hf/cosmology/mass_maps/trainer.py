"""`MassMapTrainer`: trains models that make mass maps of shear."""

from ..trainer import RegressionTrainer
from .arguments import MassMapTrainingArguments


class MassMapTrainer(RegressionTrainer):
    """A `RegressionTrainer` of batches that have the true convergence `kappa` beside the labels.

    `rmse_kappa` in the log is the error of a map's pixels over the standard deviation of the training maps'.
    """

    arguments_class = MassMapTrainingArguments
    pipeline = "mass-mapping"
    log_format = {
        "loss": "loss {:7.4f}",
        "map_loss": "map {:7.4f}",
        "harmonic_loss": "modes {:7.4f}",
        "rmse_kappa": "error {:.4f}",
        "nll_loss": "nll {:7.4f}",
        "learning_rate": "lr {:.2e}",
        "maps_per_second": "{:7,.1f} maps/s",
        "nonfinite_steps": "skipped {}",
        "eval_map_loss": "held-out map {:7.4f}",
        "eval_rmse_kappa": "error {:.4f}",
        "eval_nll_loss": "nll {:7.4f}",
        "eval_rmse_omega_m": "rmse Omega_m {:.4f}",
        "eval_rmse_s_8": "S_8 {:.4f}",
        "eval_z_squared": "z^2 {:.3f}",
    }
