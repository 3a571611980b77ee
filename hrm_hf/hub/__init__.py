"""Complete checkpoints to the Hub and back, and Spaces.

`push.py` and `pull.py` move files; `contents.py` decides what a checkpoint consists of, `secrets.py` and `paths.py`
what must not leave with it, `addresses.py` what names a model there, `listing.py` what of a Hub's answers is believed,
`errors.py` says what went wrong. `kinds.py` says which kind of model a name stands for, here or there.
`model.push_to_hub` and `Trainer(push_to_hub=True)` are in `models/modeling_utils.py` and `trainer/pushing.py`. Names
are loaded when they are asked for: who looks at a config.json does not wait for what pushes.
"""

from ..io.lazy_names import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "addresses": ("HubAddress", "hub_address", "pull_address", "validate_push_target"),
        "contents": ("Contents", "checkpoint_contents", "complete_push"),
        "errors": ("HubError", "hub_errors"),
        "listing": ("Limits",),
        "pull": ("PULL_RECORD", "PullResult", "pull_checkpoint", "verify_checkpoint"),
        "push": ("PushResult", "commit_contents", "push_checkpoint", "push_space", "space_contents"),
    },
)
