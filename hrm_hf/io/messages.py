"""Messages of libraries that are not about the user's work, and how they are hidden.

MESSAGES is the one place for what is not shown: each is named by its source and its first words, so that other
messages of the same library appear. HRM_HF_DEBUG=1 shows all.
"""

import logging
import os
import re
import warnings
from typing import NamedTuple


class Message(NamedTuple):
    """A logger's name, or the category of a warning, and a regular expression that the message begins with."""

    source: str | type[Warning]
    words: str


# transformers imports torchao and bitsandbytes wherever they are installed, asked for or not. Compiled parts for other
# machines than this one cannot be loaded, and slower code does the same. `import hrm_hf` hides these.
OF_IMPORTS = (
    Message("torchao", r"Failed to load .*\.so: "),
    Message("torch.utils._pytree", r"<enum 'KernelPreference'> is an Enum subclass"),  # a class of torchao
    Message("torch.utils._pytree", r"<enum 'ScaleCalculationMode'> is an Enum subclass"),
    Message("bitsandbytes.backends.cpu.ops", r"Failed to load CPU gemm_4bit_forward from kernels-community"),
)
# Our programs also hide these.
MESSAGES = (
    *OF_IMPORTS,
    # `--help` of a training script does without torch.
    Message("transformers", r"PyTorch was not found"),
    # transformers asks for pinned memory by default; where there is no GPU, there is nothing to be faster with it.
    Message(UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
    # accelerate's own call of DDP.
    Message(FutureWarning, r"`broadcast_buffers` is deprecated"),
    # TRL and PEFT ask for activation checkpointing by its former name, which does the same.
    Message(FutureWarning, r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated"),
    # Compiled steps are faster on a CPU, too.
    Message("transformers.training_args", r"The speedups for torchdynamo mostly come with GPU Ampere or higher"),
)


def hide_messages(messages: tuple[Message, ...] = MESSAGES) -> bool:
    """Keep messages from being shown by this process, and return True; with HRM_HF_DEBUG do nothing."""
    if os.environ.get("HRM_HF_DEBUG"):
        return False
    for source, words in messages:
        if isinstance(source, str):
            pattern = re.compile(words)
            logging.getLogger(source).addFilter(lambda record, hidden=pattern: not hidden.match(record.getMessage()))
        else:
            warnings.filterwarnings("ignore", words, source)
    return True
