"""Cell and exact accuracy of puzzles as a module of the `evaluate` library.

Load it by the path of this folder, which needs no network: evaluate.load(".../hrm_hf/metrics/exact_accuracy").
"""

# One import per line: the scanner of `evaluate` reads imports line by line.
import datasets
import evaluate
import numpy as np

from hrm_hf.puzzles.evaluation import accuracies, correct_cells


_DESCRIPTION = "Share of right cells, and share of puzzles with all cells right. Labels of -100 are ignored."

_KWARGS_DESCRIPTION = """
Args:
    predictions: token ids, one list per puzzle.
    references: right token ids, as long as the predictions; -100 where nothing is to be predicted.

Returns:
    cell_accuracy: mean over puzzles of the share of right cells.
    exact_accuracy: share of puzzles with all cells right.
    count: puzzles that have labels.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class ExactAccuracy(evaluate.Metric):
    """See the module's text."""

    def _info(self):
        cells = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": cells, "references": cells}),
        )

    def _compute(self, predictions, references):
        if not predictions:
            raise ValueError("predictions=[]: there is no puzzle to score")
        for i, (predicted, right) in enumerate(zip(predictions, references)):
            if len(predicted) != len(right):
                raise ValueError(
                    f"puzzle {i}: {len(predicted)} predicted cells, {len(right)} labels; expected as many"
                )
        pairs = zip(predictions, references)
        counts = [correct_cells(np.asarray(predicted), np.asarray(right)) for predicted, right in pairs]
        return accuracies(*zip(*counts))
