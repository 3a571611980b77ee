"""ARC-AGI pass@k for the `evaluate` library: fraction of test grids found within k guesses.

To load it offline, pass the path of this folder: evaluate.load(".../hrm_hf/metrics/arc_pass_at_k").
The guesses must be ranked; `hrm_hf.puzzles.arc_pipeline.ArcVoting` ranks guesses of augmented puzzles by votes.
"""

# One import per line, because `evaluate` scans imports line by line.
import datasets
import evaluate


_DESCRIPTION = "Fraction of ARC test grids found within k guesses, averaged over the tests of a task, then over tasks."

_KWARGS_DESCRIPTION = """
Args:
    predictions: guesses for each test grid, best first; a grid is a list of rows of colors 0..9.
    references: correct grid for each test.
    tasks: task name of each test; by default, each test is a separate task.
    ks: values of k, [1, 2] by default (ARC-AGI allows 2 guesses).

Returns:
    pass@k for each k: fraction of a task's tests solved within k guesses, averaged over tasks; tasks: number of tasks.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class ArcPassAtK(evaluate.Metric):
    """Metric that computes ARC-AGI pass@k."""

    def _info(self):
        grid = datasets.Sequence(datasets.Sequence(datasets.Value("int64")))
        features = datasets.Features({"predictions": datasets.Sequence(grid), "references": grid})
        return evaluate.MetricInfo(_DESCRIPTION, "", features, _KWARGS_DESCRIPTION)

    def _compute(self, predictions, references, tasks=None, ks=(1, 2)):
        tasks = list(range(len(references))) if tasks is None else list(tasks)
        if len(tasks) != len(references):
            raise ValueError(f"tasks: {len(tasks)} names for {len(references)} tests; pass one task name per test")
        if not references or not ks or min(ks) < 1:
            raise ValueError(f"ks={list(ks)}, {len(references)} tests: pass ks >= 1 and at least one test")
        scores = {}
        for k in ks:
            found = {}
            for task, guesses, right in zip(tasks, predictions, references):
                found.setdefault(task, []).append(right in guesses[:k])
            scores[f"pass@{k}"] = sum(sum(hits) / len(hits) for hits in found.values()) / len(found)
        return {**scores, "tasks": len(set(tasks))}
