"""The choices in an option's help equal the library's, which the help does not import."""

from typing import get_args

import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang.options import GoValidator
from hrm_hf.golang.validators.go_validators import VALIDATORS
from hrm_hf.io.usage import UsageError
from hrm_hf.models.early_exit import EXIT_CRITERIA
from hrm_hf.text.options import Exit, ReasoningTask, ThinkingOptions
from hrm_hf.text.reasoning.tasks import TASKS


@pytest.mark.parametrize("flag", ["--log_dir", "--log-dir"])
def test_flags_may_have_underscores_or_hyphens(flag, tmp_path):
    assert f"{tmp_path}/%x_%j.out" in CliRunner().invoke(app, ["slurm", "single_gpu", flag, str(tmp_path)]).output


@pytest.mark.parametrize(
    "choices, known", [(Exit, EXIT_CRITERIA), (GoValidator, ("auto", *VALIDATORS)), (ReasoningTask, TASKS)]
)
def test_option_choices_equal_the_librarys(choices, known):
    assert get_args(choices) == tuple(known)


def test_exit_threshold_bounds_depend_on_the_criterion():
    for name, kind in EXIT_CRITERIA.items():
        for threshold in (0.5, 1.5):
            allowed = kind.default_threshold is not None and threshold <= kind.highest_threshold
            if allowed:
                assert ThinkingOptions(exit_criterion=name, exit_threshold=threshold).halting
            else:
                with pytest.raises(UsageError, match=f"exit_threshold={threshold}"):
                    ThinkingOptions(exit_criterion=name, exit_threshold=threshold)
