"""Complete checkpoints to the Hub and back, and Spaces: thin over huggingface_hub.

`push.py` and `pull.py` move files, `cards.py` writes model cards, `manifests.py` checks that a folder is complete,
`kinds.py` says which kind of model a name stands for. `model.push_to_hub` and `Trainer(push_to_hub=True)` are in
`models/modeling_utils.py` and `trainer/pushing.py`. Names are loaded on first use, so that reading a config.json does
not wait for what pushes.
"""

from ..io import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "options": ("PullOptions", "PushOptions"),
        "pull": (
            "PULL_RECORD", "HubAddress", "HubError", "PullResult", "hub_address", "hub_errors", "pull_address",
            "pull_checkpoint", "verify_checkpoint",
        ),
        "push": (
            "Contents", "PushResult", "checkpoint_contents", "commit_contents", "complete_push", "push_checkpoint",
            "push_space", "space_contents",
        ),
    },
)  # fmt: skip
