"""TRL's training arguments, plus the options and checks that all scripts share."""

from dataclasses import dataclass

from trl import DPOConfig, GRPOConfig, SFTConfig

from ..trainer.recipes import CheckedArguments


@dataclass
class SftArguments(CheckedArguments, SFTConfig):
    """Training arguments for SFT: `SFTConfig` plus the shared options and checks."""


@dataclass
class DpoArguments(CheckedArguments, DPOConfig):
    """Training arguments for DPO: `DPOConfig` plus the shared options and checks."""


@dataclass
class GrpoArguments(CheckedArguments, GRPOConfig):
    """Training arguments for GRPO: `GRPOConfig` plus the shared options and checks."""
