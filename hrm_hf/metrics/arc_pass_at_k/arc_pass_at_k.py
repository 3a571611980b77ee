"""pass@k of ARC-AGI as a module of the `evaluate` library: is the right grid among the first k guesses?

Load it by the path of this folder, which needs no network: evaluate.load(".../hrm_hf/metrics/arc_pass_at_k").
The guesses come ranked; `hrm_hf.puzzles.arc_pipeline.ArcVoting` ranks those of augmented puzzles by votes.
"""

# One import per line: the scanner of `evaluate` reads imports line by line.
import datasets
import evaluate


_DESCRIPTION = "Share of ARC test grids found within k guesses; of a task with several tests, the mean over them."

_KWARGS_DESCRIPTION = """
Args:
    predictions: guesses for each test grid, best first; a grid is a list of rows of colors 0..9.
    references: the right grid of each test.
    tasks: name of each test's task; without, every test is a task of its own.
    ks: numbers of guesses, [1, 2] by default (2 are allowed by ARC-AGI).

Returns:
    pass@k for each k: mean over tasks of the share of their tests that are found; tasks: how many.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class ArcPassAtK(evaluate.Metric):
    """See the module's text."""

    def _info(self):
        grid = datasets.Sequence(datasets.Sequence(datasets.Value("int64")))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Sequence(grid), "references": grid}),
        )

    def _compute(self, predictions, references, tasks=None, ks=(1, 2)):
        tasks = list(range(len(references))) if tasks is None else list(tasks)
        if len(tasks) != len(references):
            raise ValueError(f"{len(tasks)} tasks for {len(references)} tests; expected one name for each test")
        if not references or not ks or min(ks) < 1:
            raise ValueError(f"{len(references)} tests and ks={list(ks)}; expected tests, and ks of 1 or more")
        scores = {}
        for k in ks:
            found = {}
            for task, guesses, right in zip(tasks, predictions, references):
                found.setdefault(task, []).append(right in guesses[:k])
            scores[f"pass@{k}"] = sum(sum(hits) / len(hits) for hits in found.values()) / len(found)
        return {**scores, "tasks": len(set(tasks))}
