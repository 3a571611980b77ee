"""First steps of the programs of hrm_hf, before they import libraries that take seconds and print messages.

`hrm-hf` and the training scripts begin here. Because this module is loaded, `import hrm_hf` then registers nothing:
`load_config` does so for the first model, and `--help` stays fast. MESSAGES is the one place for what is not shown:
each is named by its source and its first words, so that other messages of the same library appear. HRM_HF_DEBUG=1
shows all.
"""

import logging
import os
import re
import signal
import sys
import warnings
from typing import NamedTuple


class Message(NamedTuple):
    """A message that is not about the user's work.

    Attributes:
        source: name of the logger, or the category of the warning.
        words: regular expression that its text begins with.
    """

    source: str | type[Warning]
    words: str


MESSAGES = (
    # transformers imports torchao and bitsandbytes wherever they are installed, asked for or not. Compiled parts for
    # other machines than this one cannot be loaded, and slower code does the same.
    Message("torchao", r"Failed to load .*\.so: "),
    Message("torch.utils._pytree", r"<enum 'KernelPreference'> is an Enum subclass"),  # a class of torchao
    Message("torch.utils._pytree", r"<enum 'ScaleCalculationMode'> is an Enum subclass"),
    Message("bitsandbytes.backends.cpu.ops", r"Failed to load CPU gemm_4bit_forward from kernels-community"),
    # transformers asks for pinned memory by default; where there is no GPU, there is nothing to be faster with it.
    Message(UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
    # accelerate's own call of DDP.
    Message(FutureWarning, r"`broadcast_buffers` is deprecated"),
    # TRL and PEFT ask for activation checkpointing by its former name, which does the same.
    Message(FutureWarning, r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated"),
    # Compiled steps are faster on a CPU, too.
    Message("transformers.training_args", r"The speedups for torchdynamo mostly come with GPU Ampere or higher"),
)
# Bars of work that takes less than a second, such as loading a dozen tensors, are no progress to wait for.
BAR_DELAY_SECONDS = "1"


def start_program() -> None:
    """Keeps MESSAGES, and progress bars of what is done at once, from this process and those that it starts."""
    if os.environ.get("HRM_HF_DEBUG"):
        return
    os.environ.setdefault("TQDM_DELAY", BAR_DELAY_SECONDS)
    for source, words in MESSAGES:
        if isinstance(source, str):
            logging.getLogger(source).addFilter(_Without(words))
        else:
            warnings.filterwarnings("ignore", words, source)


def main() -> None:
    """Run `hrm-hf`."""
    from hrm_hf.cli import main

    start_program()
    main()


def start_script(extra: str | None = None) -> None:
    """`start_program` of a training script: signals to stop, too, wait until training listens for them.

    Args:
        extra: without which the script can do nothing, and the module that it is for; it exits where that is missing.
    """
    if extra is not None:
        from hrm_hf.io.usage import validate_extra

        try:
            validate_extra(extra, f"this script needs {extra}", extra)
        except ImportError as error:
            sys.exit(f"{os.path.basename(sys.argv[0])}: error: {error}")
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    start_program()


class _Without:
    """A filter of a logger, for all but one message."""

    def __init__(self, words: str):
        self.words = re.compile(words)

    def __call__(self, record: logging.LogRecord) -> bool:
        return not self.words.match(record.getMessage())


if __name__ == "__main__":
    sys.modules["hrm_hf_start"] = sys.modules[__name__]  # `import hrm_hf` looks for this name
    main()
