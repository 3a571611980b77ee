"""The description of a model on its tab: size, data, card, and whether it is trained."""

import json
import re
from pathlib import Path

import every
import pytest
import torch

from hrm_hf.app.build import card_html, is_untrained, model_html, training_html
from hrm_hf.puzzles.options import SHIPPED, shipped_model
from hrm_hf.registry import AutoModelForPuzzleSolving


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_freshly_initialized_model_is_untrained_for_any_seed(architecture):
    """Referee: the architecture's own initialization with another seed."""
    torch.manual_seed(7)
    assert is_untrained(type(every.model(architecture))(every.model(architecture).config))


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_model_counts_as_trained_after_a_few_optimizer_steps(architecture):
    """A few steps of 0.03 per weight stand in for the smaller steps of a short run."""
    model = type(every.model(architecture))(every.model(architecture).config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for _ in range(8):
        model(**every.inputs(architecture), **every.targets(architecture)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not is_untrained(model.eval())


@pytest.mark.parametrize("task", SHIPPED)
def test_packaged_models_are_trained_and_name_their_data(task):
    folder = shipped_model(task)
    model = AutoModelForPuzzleSolving.from_pretrained(folder)
    assert not is_untrained(model)
    page = model_html(folder, "shipped", model)
    words = re.sub("<[^>]*>", "", page)
    assert f"shipped: se_rrm_puzzle, {model.num_parameters():,} parameters. Trained on hrm-hf data {task} " in words
    assert "/" not in words.split(".")[0]
    assert "untrained" not in page and "<summary>Model card</summary>" in page
    assert (Path(folder) / "README.md").read_text(encoding="utf-8").split("# ")[1].split("\n")[0] in words


def test_saved_untrained_model_is_labeled_untrained_without_card(tmp_path):
    model = every.model("cosmo_cnn")
    model.save_pretrained(tmp_path)
    page = model_html(str(tmp_path), "<new>", model)
    assert ">untrained</span>" in page and "It has no model card." in page
    assert "&lt;new&gt;" in page and "<new>" not in page


def test_training_summary_hides_local_folders(tmp_path):
    model = every.model("hrm_lm")  # `every.model` changes the initial weights, so it counts as trained
    model.save_pretrained(tmp_path)
    assert training_html(str(tmp_path), model) == "How it was trained is not recorded."
    recipe = {"train_data": ["/home/me/books.txt.gz", "hub:org/data"], "model_name_or_path": "/home/me/runs/first"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (tmp_path / "results.json").write_text('{"steps": 1200}')
    words = re.sub("<[^>]*>", "", training_html(str(tmp_path), model))
    assert words == "Trained on books.txt.gz and hub:org/data, 1,200 steps, from the weights of first."


def test_a_card_is_shown_without_its_metadata_markup_and_pictures(tmp_path):
    assert card_html(str(tmp_path)) == ""
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\n---\n# Title\n\n<!-- a marker -->\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "![a curve](https://elsewhere.example/curve.png) and [a link](https://elsewhere.example)\n",
        encoding="utf-8",
    )
    page = card_html(str(tmp_path))
    assert page.startswith("<h1>Title</h1>") and "<td>1</td>" in page
    assert "license" not in page and "marker" not in page and "<img" not in page and "curve.png" not in page
    assert "(picture: a curve)" in page
    assert '<a href="https://elsewhere.example" target="_blank" rel="noopener noreferrer">a link</a>' in page
