"""Training arguments of TRL with the checks of this package."""

from dataclasses import dataclass

from trl import DPOConfig, GRPOConfig, SFTConfig

from ..trainer.recipes import CheckedArguments


@dataclass
class SftArguments(CheckedArguments, SFTConfig):
    """`SFTConfig` with the checks of this package."""


@dataclass
class DpoArguments(CheckedArguments, DPOConfig):
    """`DPOConfig` with the checks of this package."""


@dataclass
class GrpoArguments(CheckedArguments, GRPOConfig):
    """`GRPOConfig` with the checks of this package."""
