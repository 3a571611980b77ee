"""Hide library messages that do not matter to users.

MESSAGES lists every hidden message by its source and first words, so other messages from the library still appear.
HRM_HF_DEBUG=1 shows all messages.
"""

import logging
import os
import re
import warnings
from typing import NamedTuple


class Message(NamedTuple):
    """Message to hide: the logger or warning category it comes from, and a regular expression for its beginning."""

    source: str | type[Warning]
    words: str


# transformers imports torchao and bitsandbytes if they are installed. If their compiled parts fail to load, they log
# messages and fall back to slower code. `import hrm_hf` hides these messages.
IMPORT_MESSAGES = (
    Message("torchao", r"Failed to load .*\.so: "),
    Message("torch.utils._pytree", r"<enum 'KernelPreference'> is an Enum subclass"),  # from torchao
    Message("torch.utils._pytree", r"<enum 'ScaleCalculationMode'> is an Enum subclass"),
    Message("bitsandbytes.backends.cpu.ops", r"Failed to load CPU gemm_4bit_forward from kernels-community"),
    # A pipeline without a model uses the packaged solver on purpose, so the user needs no warning.
    Message("transformers.pipelines", r"No model was supplied, defaulted to .*sudoku-9x9 and revision main\."),
)
# TRL and PEFT still use deprecated names for activation checkpointing.
PEFT_MESSAGE = Message(FutureWarning, r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated")
# Messages that our commands and scripts hide. Importing the package hides only IMPORT_MESSAGES.
MESSAGES = (
    *IMPORT_MESSAGES,
    PEFT_MESSAGE,
    # Training scripts print `--help` without loading torch, so transformers does not find it.
    Message("transformers", r"PyTorch was not found"),
    # transformers pins memory by default, which has no effect without a GPU.
    Message(UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
    # Recipes may request more workers than this machine has CPUs.
    Message(UserWarning, r"This DataLoader will create \d+ worker processes in total"),
    # accelerate still passes the deprecated `broadcast_buffers` to DDP.
    Message(FutureWarning, r"`broadcast_buffers` is deprecated"),
    # The message is misleading: torch.compile makes training on CPUs and older GPUs faster, too.
    Message("transformers.training_args", r"The speedups for torchdynamo mostly come with GPU Ampere or higher"),
)


def hide_messages(messages: tuple[Message, ...] = MESSAGES) -> bool:
    """Hide messages in this process and return True. If HRM_HF_DEBUG is set, hide none and return False."""
    if os.environ.get("HRM_HF_DEBUG"):
        return False
    for source, words in messages:
        if isinstance(source, str):
            pattern = re.compile(words)
            logging.getLogger(source).addFilter(lambda record, hidden=pattern: not hidden.match(record.getMessage()))
        else:
            warnings.filterwarnings("ignore", words, source)
    return True
