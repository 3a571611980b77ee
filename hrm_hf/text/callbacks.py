"""The log line of language-model training, and a callback that logs the gains of hyper-connections."""

from itertools import islice

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import Trainer, TrainerCallback


LM_LOG_FORMAT = {
    "loss": "loss {:7.4f}",
    "perplexity": "perplexity {:9.2f}",
    "plan_loss": "plan {:7.4f}",
    "code_loss": "code {:7.4f}",
    "refinement_loss": "refinement {:6.4f}",
    "avg_steps": "segments {:4.2f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:9,.0f} tokens/s",
    "nonfinite_steps": "skipped {}",
    "eval_lm_loss": "held-out loss {:7.4f}",
    "eval_perplexity": "perplexity {:9.2f}",
    "eval_bits_per_byte": "bits per byte {:.4f}",
    "eval_avg_steps": "segments {:4.2f}",
    "eval_plan_loss": "plan {:7.4f}",
    "eval_code_loss": "code {:7.4f}",
    "eval_refinement_loss": "refinement {:6.4f}",
    "eval_refinement_accuracy": "decisions {:6.1%}",
}


class MhcMonitorCallback(TrainerCallback):
    """Logs the gains of a model's hyper-connections on a held batch whenever the trainer logs.

    `mhc/amax_pre` and `mhc/amax_post` are the largest gains of an attention's and of a feed-forward's map,
    `mhc/amax_composite` is the gain of the product of all maps. 1 is ideal; above 2 signals grow with depth. Without
    mHC nothing is logged.

        trainer.add_callback(MhcMonitorCallback(trainer))

    Args:
        trainer: whose log the values go to; a callback has no other way to every reporter.
        batch: arguments of the model's forward, such as `input_ids` [B, S]; None takes the first rows of the training
            data, read apart from the training loop so that its order of rows stays as it is.
        rows: how many rows to take then.
    """

    def __init__(self, trainer: Trainer, batch: dict[str, torch.Tensor] | None = None, rows: int = 4):
        self.trainer = trainer
        self.batch = batch
        self.rows = rows

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if self.batch is None:
            rows = list(islice(iter(train_dataloader.dataset), self.rows))
            self.batch = dict(train_dataloader.collate_fn(rows))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not control.should_log:
            return
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        inputs = {
            name: value.to(model.device)
            for name, value in self.batch.items()
            if name in ("input_ids", "attention_mask", "position_ids")
        }
        sites = model.get_detailed_mhc_metrics(**inputs)
        if not sites:
            return
        gains = [max(site["forward"], site["backward"]) for site in sites]
        composite = max(sites[-1]["composite_forward"], sites[-1]["composite_backward"])
        self.trainer.log(
            {
                "mhc/amax_pre": max(gains[::2]),
                "mhc/amax_post": max(gains[1::2]),
                "mhc/amax_composite": composite,
            }
        )
        control.should_log = True  # logging switched it off, but the trainer's own line is still to come
