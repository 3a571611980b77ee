"""Complete checkpoints to the Hub and back, and Spaces.

`push.py` and `pull.py` move files; `contents.py` decides what a checkpoint consists of, `secrets.py` and `paths.py`
what must not leave with it, `addresses.py` what names a model there, `listing.py` what of a Hub's answers is believed,
`errors.py` says what went wrong. `kinds.py` says which kind of model a name stands for, here or there.
`model.push_to_hub` and `Trainer(push_to_hub=True)` are in `models/modeling_utils.py` and `trainer/pushing.py`.
"""

from .addresses import HubAddress, hub_address, pull_address
from .contents import Contents, checkpoint_contents, complete_push
from .errors import HubError, hub_errors
from .listing import Limits
from .pull import PULL_RECORD, PullResult, pull_checkpoint, verify_checkpoint
from .push import PushResult, commit_contents, push_checkpoint, push_space, space_contents, validate_push_target


__all__ = [
    "PULL_RECORD",
    "Contents",
    "HubAddress",
    "HubError",
    "Limits",
    "PullResult",
    "PushResult",
    "checkpoint_contents",
    "commit_contents",
    "complete_push",
    "hub_address",
    "hub_errors",
    "pull_address",
    "pull_checkpoint",
    "push_checkpoint",
    "push_space",
    "space_contents",
    "validate_push_target",
    "verify_checkpoint",
]
