"""Go code metrics for the `evaluate` library: syntax rate, exact match and subtree F1.

To load it offline, pass the path of this folder: evaluate.load(".../hrm_hf/metrics/go_code"). It does
not run the code. It needs the `go` extra of hrm_hf, and uses Go's parser and gofmt if Go is installed.
"""

# One import per line, because `evaluate` scans imports line by line.
import datasets
import evaluate

from hrm_hf.golang.evaluation.similarity import exact_matches, subtree_f1
from hrm_hf.golang.validators.go_validators import best_validator


_DESCRIPTION = "Fractions of Go samples that parse and that match their reference, and mean F1 of syntax subtrees."

_KWARGS_DESCRIPTION = """
Args:
    predictions: Go code samples (functions or files).
    references: correct code for each sample.

Returns:
    syntax_rate: fraction of samples that parse; validator: the parser that was used.
    exact_match: fraction of samples that match their references; exact_by: what was compared, "gofmt" or "tokens".
    subtree_f1: F1 of the syntax subtrees of a sample and its reference, averaged over samples.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class GoCode(evaluate.Metric):
    """Metric that computes syntax rate, exact match and subtree F1 of Go code."""

    def _info(self):
        code = datasets.Value("string")
        features = datasets.Features({"predictions": code, "references": code})
        return evaluate.MetricInfo(_DESCRIPTION, "", features, _KWARGS_DESCRIPTION)

    def _compute(self, predictions, references):
        if not predictions:
            raise ValueError("predictions=[]: no code to score; pass at least one sample")
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
