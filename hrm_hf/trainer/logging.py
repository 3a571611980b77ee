"""What trackers see: names that the originals' dashboards know, and the memory of GPUs.

The library's callbacks put every logged value under `train/` or `eval/`: `train/lm_loss`, `eval/exact_accuracy`. What
the originals call otherwise is repeated here under their names: `train/lr`, and values with a group of their own, such
as `mhc/amax_pre` or `go/syntax_rate`. Which trackers there are is the library's business (`--report_to`).
"""

import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback


GIB = 2**30
STEP = "train/global_step"  # what the library's callbacks give the trackers as the axis


class OriginalNamesCallback(TrainerCallback):
    """Repeats logged values under the originals' names in TensorBoard, Trackio and W&B.

    Args:
        trainer: whose trackers are meant; a callback has no other way to them.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_log(self, args, state, control, logs=None, **kwargs):
        figures = original_names(logs or {})
        if not state.is_world_process_zero or not figures:
            return
        for tracker in self.trainer.callback_handler.callbacks:
            if isinstance(tracker, TensorBoardCallback) and tracker.tb_writer is not None:
                for name, value in figures.items():
                    tracker.tb_writer.add_scalar(name, value, state.global_step)
            elif isinstance(tracker, WandbCallback):
                tracker._wandb.log({**figures, STEP: state.global_step})
            elif isinstance(tracker, TrackioCallback):
                tracker._trackio.log({**figures, STEP: state.global_step})


def original_names(logs: dict[str, float]) -> dict[str, float]:
    """What is to be repeated: the learning rate, and values whose names have a group."""
    figures = {name: value for name, value in logs.items() if "/" in name}
    if "learning_rate" in logs:
        figures["train/lr"] = logs["learning_rate"]
    return figures


def gpu_memory(accelerator: Accelerator) -> dict[str, float]:
    """Peak memory in GiB since the start, of the process that needed most: used by tensors, and held by the allocator.

    Empty where there is no GPU. A collective call.
    """
    device = accelerator.device
    if device.type != "cuda":
        return {}
    peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    used, reserved = accelerator.gather(torch.tensor([peaks], device=device)).amax(0).tolist()
    return {"peak_memory_gib": used / GIB, "reserved_memory_gib": reserved / GIB}
