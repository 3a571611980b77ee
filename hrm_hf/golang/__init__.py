"""Go: what validates the code that a model writes. Nothing here needs torch; Go and bubblewrap only where it is said.

A validator is called with codes (whole files, or declarations without a package clause) and returns a Feedback
(`models/processing_hrm_go_coder.py`) for each; lines are those of the code given. Left out: third-party packages.
"""

from .validators.go_tests import GoProgram, GoTestResult, GoTestRunner, GoTestValidator, run_go_tests
from .validators.go_validators import GoFormatter, GoParserValidator, GoTypesValidator, best_validator
from .validators.sandbox import Limits, SandboxError, validate_sandbox
from .validators.toolchain import Go, GoNotFoundError, find_go
from .validators.tree_sitter_validator import TreeSitterValidator


__all__ = [
    "Go",
    "GoFormatter",
    "GoNotFoundError",
    "GoParserValidator",
    "GoProgram",
    "GoTestResult",
    "GoTestRunner",
    "GoTestValidator",
    "GoTypesValidator",
    "Limits",
    "SandboxError",
    "TreeSitterValidator",
    "best_validator",
    "find_go",
    "run_go_tests",
    "validate_sandbox",
]
