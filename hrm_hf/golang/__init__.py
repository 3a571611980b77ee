"""Validators and a test runner for Go code. Each class documents whether it needs Go or bubblewrap.

A validator is called with code samples (files, or declarations without a package clause) and returns a Feedback
(`models/processing_hrm_go_coder.py`) for each; line numbers refer to the sample. Third-party packages are unsupported.
"""

from ..io import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "validators.go_tests": ("GoProgram", "GoTestResult", "GoTestRunner"),
        "validators.go_validators": (
            "GoFormatter",
            "GoParserValidator",
            "GoTypesValidator",
            "TreeSitterValidator",
            "best_validator",
        ),
        "validators.sandbox": ("Limits", "SandboxError", "validate_sandbox"),
        "validators.toolchain": ("Go", "GoNotFoundError", "find_go"),
    },
)
