"""Cell accuracy and exact accuracy of puzzle predictions, for the `evaluate` library.

To load it offline, pass the path of this folder: evaluate.load(".../hrm_hf/metrics/exact_accuracy").
"""

# One import per line, because `evaluate` scans imports line by line.
import datasets
import evaluate
import numpy as np

from hrm_hf.puzzles.evaluation import accuracies, correct_cells


_DESCRIPTION = "Fraction of correct cells, and fraction of puzzles with all cells correct. Labels of -100 are ignored."

_KWARGS_DESCRIPTION = """
Args:
    predictions: token ids, one list per puzzle.
    references: correct token ids, with the same lengths as the predictions; -100 is ignored.

Returns:
    cell_accuracy: fraction of correct cells, averaged over puzzles.
    exact_accuracy: fraction of puzzles with all cells correct.
    count: number of puzzles with labels.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class ExactAccuracy(evaluate.Metric):
    """Metric that computes cell accuracy and exact accuracy."""

    def _info(self):
        cells = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features({"predictions": cells, "references": cells})
        return evaluate.MetricInfo(_DESCRIPTION, "", features, _KWARGS_DESCRIPTION)

    def _compute(self, predictions, references):
        if not predictions:
            raise ValueError("predictions=[]: no puzzles to score; pass at least one")
        for i, (predicted, right) in enumerate(zip(predictions, references)):
            if len(predicted) != len(right):
                raise ValueError(f"puzzle {i}: {len(predicted)} predicted cells, but {len(right)} labels; must match")
        pairs = zip(predictions, references)
        counts = [correct_cells(np.asarray(predicted), np.asarray(right)) for predicted, right in pairs]
        return accuracies(*zip(*counts))
