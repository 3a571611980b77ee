"""Go code beside a reference as a module of the `evaluate` library: does it parse, is it the same, how alike is it?

Load it by the path of this folder, which needs no network: evaluate.load(".../hrm_hf/metrics/go_code"). Nothing is
run. It needs the extra `go` of hrm_hf, and uses Go's own parser and gofmt where Go is installed.
"""

# One import per line: the scanner of `evaluate` reads imports line by line.
import datasets
import evaluate

from hrm_hf.golang.evaluation.similarity import exact_matches, subtree_f1
from hrm_hf.golang.validators.go_validators import best_validator


_DESCRIPTION = (
    "Share of Go samples that parse, that equal their reference after gofmt, and mean F1 of syntax subtrees."
)

_KWARGS_DESCRIPTION = """
Args:
    predictions: Go code, functions or files.
    references: the right code of each.

Returns:
    syntax_rate: share that parses; validator: by which parser.
    exact_match: share that equals its reference; exact_by: after gofmt, or in tokens without comments.
    subtree_f1: mean over samples, of the syntax subtrees that a code and its reference share.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class GoCode(evaluate.Metric):
    """See the module's text."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references):
        if not predictions:
            raise ValueError("predictions=[]: there is no code to score")
        with best_validator() as validator:
            verdicts = validator(list(predictions))
            name = type(validator).__name__
        same, how = exact_matches(predictions, references)
        likeness = [subtree_f1(code, right) for code, right in zip(predictions, references)]
        return {
            "syntax_rate": sum(bool(verdict.syntax_ok) for verdict in verdicts) / len(verdicts),
            "validator": name,
            "exact_match": sum(same) / len(same),
            "exact_by": how,
            "subtree_f1": sum(likeness) / len(likeness),
        }
