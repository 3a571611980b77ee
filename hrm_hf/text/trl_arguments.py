"""Options of a run by TRL: its own, checked like those of the other scripts."""

from dataclasses import dataclass

from trl import DPOConfig, GRPOConfig, SFTConfig

from ..trainer.recipes import CheckedArguments


@dataclass
class SftArguments(CheckedArguments, SFTConfig):
    """Those of TRL, checked."""


@dataclass
class DpoArguments(CheckedArguments, DPOConfig):
    """Those of TRL, checked."""


@dataclass
class GrpoArguments(CheckedArguments, GRPOConfig):
    """Those of TRL, checked."""
