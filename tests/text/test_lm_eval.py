"""lm-evaluation-harness with our causal LMs (`hf` backend). Referee: log-likelihoods from one forward pass."""

import json
from pathlib import Path

import every
import pytest
import torch


TASKS = Path(__file__).parents[1] / "fixtures" / "lm_eval"


def most_likely(model, tokenizer, question: str, choices: list[str]) -> int:
    """Return the choice with the highest sum of log-probabilities after the question."""
    scores = []
    for choice in choices:
        start, ids = len(tokenizer(question).input_ids), tokenizer(question + choice).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        scores.append(sum(logits[i - 1, ids[i]].item() for i in range(start, len(ids))))
    return max(range(len(choices)), key=scores.__getitem__)


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_the_harness_scores_choices_by_the_likelihood_of_the_model(architecture, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(TASKS)  # the task has a path relative to this folder
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, tokenizer = every.model(architecture), every.processor(architecture)
    backend = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu")
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = lm_eval.simple_evaluate(model=backend, tasks=["letters"], task_manager=tasks, bootstrap_iters=0)
    rows = [json.loads(line) for line in (TASKS / "letters.jsonl").read_text().splitlines()]
    chosen = [most_likely(model, tokenizer, row["question"], row["choices"]) for row in rows]
    expected = sum(choice == row["answer"] for choice, row in zip(chosen, rows)) / len(rows)
    assert results["results"]["letters"]["acc,none"] == pytest.approx(expected)
    assert [sample["arguments"][0][0] for sample in results["samples"]["letters"]] == [row["question"] for row in rows]
