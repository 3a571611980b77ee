"""`pipeline(..., trust_remote_code=True)` where the package cannot be imported: puzzles, maps of the sky, texts.

Referee: the package's pipeline on the same checkpoint. If the package is installed, its own pipelines are used.
"""

import json

import clean_process
import every
import numpy as np
import pytest
import tiny
import torch
from transformers import AutoConfig, pipeline

from hrm_hf import CosmologyRegressionPipeline, MassMappingPipeline, PuzzleSolvingPipeline


SUDOKU, MAZE = "1..4..3..2..3..1", "S # \n #  \n  # \n#  G"
ROWS = [[1, 0, 0, 4], [0, 0, 3, 0], [0, 2, 0, 0], [3, 0, 0, 1]]
TOKENS = [1, 2, 3, 4] * 4
# Checkpoint -> architecture, config fields, and puzzles in every format of its task.
PUZZLES = {
    **{name: (name, {"task": "sudoku"}, [SUDOKU, ROWS, {"puzzle": SUDOKU, "puzzle_identifier": 3}])
       for name in every.PUZZLES},
    "maze": ("trm_puzzle", {"task": "maze"}, [MAZE, MAZE.split("\n"), MAZE.replace("\n", "")]),
    "tokens": ("hrm_puzzle", {"task": "generic"}, [TOKENS, {"question": TOKENS, "puzzle_identifier": 1}]),
    "restarts": ("trm_puzzle", {"task": "sudoku"}, [SUDOKU]),
}  # fmt: skip
SETTINGS = {"restarts": {"restarts": 3, "noise": 0.5, "seed": 7, "choose": "residual"}}
SAID = ("grid", "text", "steps", "confidence", "sure")

# Runs where `import hrm_hf` fails; argv: a folder of checkpoints, each with asked.json; answers go beside it.
SCRIPT = """
import builtins, json, sys
from pathlib import Path
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

questions = []
builtins.input = lambda question: questions.append(question) or "n"

def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)

home = Path(sys.argv[1])
for folder in sorted(home.glob("puzzles/*")):
    asked, answers = json.loads((folder / "asked.json").read_text()), []
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(folder / "by the model")
    for source in (folder, folder / "by the model", folder / "by the pipeline"):
        solve = pipeline(model=str(source), trust_remote_code=True)
        assert type(solve).__module__.startswith("transformers_modules"), type(solve)
        one_by_one = [solve(puzzle, **asked["settings"]) for puzzle in asked["puzzles"]]
        at_once = [] if asked["settings"] else solve(asked["puzzles"], batch_size=2)
        answers.append([one_by_one, at_once])
        solve.save_pretrained(folder / "by the pipeline")
    (folder / "answers.json").write_text(json.dumps(answers))
errors = [raised(solve, *puzzle, **options) for puzzle, options in (
    (["1234"], {}), (["1..4..3..2..3..x"], {}), ([[9] * 16], {}), ([asked["puzzles"][0]], {"votes": 3}),
    ([{"puzzle": asked["puzzles"][0], "puzzle_identifier": 5}], {}),
)]
refused = raised(pipeline, "puzzle-solving", model=str(folder))
questions.clear()
for folder in sorted(home.glob("maps/*")):
    infer = pipeline(model=str(folder), trust_remote_code=True)
    found = infer(torch.load(folder / "maps.pt"))
    (folder / "answers.json").write_text(json.dumps(found, default=lambda array: array.tolist()))
for folder in sorted(home.glob("texts/*")):
    assert not questions, questions
    AutoTokenizer.from_pretrained(folder)
    assert "custom code" in questions.pop() and not questions
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    texts = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    (folder / "answers.json").write_text(json.dumps(texts("a tale", max_new_tokens=4, do_sample=False)))
assert not questions, questions
(home / "errors.json").write_text(json.dumps([*errors, refused]))
"""


def maps_of(architecture: str) -> list:
    """Return two maps as pipeline inputs, with masks for a model that uses them."""
    maps = every.inputs(architecture)["pixel_values"]
    if not every.processor(architecture).mask_channel:
        return list(maps)
    return [{"map": each[:-1], "mask": each[-1]} for each in maps]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Checkpoints for puzzles, maps and texts, with the answers of a process without the package."""
    home = tmp_path_factory.mktemp("home")
    for name, (architecture, fields, puzzles) in PUZZLES.items():
        every.model(architecture, **fields).save_pretrained(home / "puzzles" / name)
        asked = {"puzzles": puzzles, "settings": SETTINGS.get(name, {})}
        (home / "puzzles" / name / "asked.json").write_text(json.dumps(asked))
    for architecture in every.OF_MAPS:
        every.save(architecture, home / "maps" / architecture)
        torch.save(maps_of(architecture), home / "maps" / architecture / "maps.pt")
    for architecture in every.CAUSAL_LMS:
        every.save(architecture, home / "texts" / architecture)
    finished = clean_process.run(SCRIPT, home, cwd=home, home=home / "hf_home")
    assert finished.returncode == 0, finished.stderr[-3000:]
    return home


@pytest.mark.parametrize("name", PUZZLES)
def test_puzzles_are_solved_as_by_the_package_even_after_saving_again(name, home):
    folder = home / "puzzles" / name
    asked, solve = json.loads((folder / "asked.json").read_text()), pipeline("puzzle-solving", model=str(folder))
    assert type(solve) is PuzzleSolvingPipeline
    expected = [solve(puzzle, **asked["settings"]) for puzzle in asked["puzzles"]]
    expected = [{key: answer[key] for key in SAID} for answer in expected]
    for one_by_one, at_once in json.loads((folder / "answers.json").read_text()):
        for found in (one_by_one, at_once or one_by_one):
            assert [answer.pop("confidence") for answer in map(dict, found)] == pytest.approx(
                [answer["confidence"] for answer in expected], rel=1e-4
            )
            assert [answer | {"confidence": None} for answer in found] == [
                answer | {"confidence": None} for answer in expected
            ]


@pytest.mark.parametrize("architecture", every.OF_MAPS)
def test_maps_give_the_packages_posteriors_and_maps(architecture, home):
    folder = home / "maps" / architecture
    expected = pipeline(every.ROWS[architecture].pipeline, model=str(folder))(torch.load(folder / "maps.pt"))
    found = json.loads((folder / "answers.json").read_text())
    assert len(found) == 2
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and one["steps"] == other["steps"]
        for name in one.keys() & {"kappa", "kappa_std"}:
            torch.testing.assert_close(torch.tensor(one.pop(name)), torch.from_numpy(other[name]))
        for name in one.keys() - {"steps"}:
            assert [one[name]["mean"], *one[name]["interval_68"]] == pytest.approx(
                [other[name]["mean"], *other[name]["interval_68"]], rel=1e-4
            )


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_trusted_tokenizer_and_model_generate_as_with_the_package(architecture, home):
    folder = home / "texts" / architecture
    expected = pipeline("text-generation", model=str(folder))("a tale", max_new_tokens=4, do_sample=False)
    assert json.loads((folder / "answers.json").read_text()) == expected


def test_portable_pipeline_rejects_unknown_input_by_name(home):
    size, cell, digit, votes, row, untrusted = json.loads((home / "errors.json").read_text())
    assert "4 cells; expected 16" in size and "cell 16 is 'x'" in cell and "cell 1 is 9" in digit
    assert votes.count("votes: ") == 1 and "hrm_hf" in votes
    assert "puzzle_identifier=5" in row and "[0, 4]" in row
    assert "trust_remote_code=True" in untrusted


@pytest.mark.parametrize("architecture", (*every.PUZZLES, *every.OF_MAPS))
def test_only_saved_heads_name_their_pipeline(architecture, tmp_path):
    model, row = every.model(architecture), every.ROWS[architecture]
    model.save_pretrained(tmp_path / "head")
    model.base_model.save_pretrained(tmp_path / "base")
    said = json.loads((tmp_path / "head" / "config.json").read_text())["custom_pipelines"]
    assert said.keys() == {row.pipeline} and said[row.pipeline]["pt"] == [every.AUTO_CLASSES[architecture]]
    module, name = said[row.pipeline]["impl"].split(".")
    assert f"class {name}(" in (tmp_path / "head" / f"{module}.py").read_text()
    assert "custom_pipelines" not in json.loads((tmp_path / "base" / "config.json").read_text())
    for config in (model.config, AutoConfig.from_pretrained(tmp_path / "head")):
        assert not hasattr(config, "custom_pipelines")  # else `pipeline` would always require trust


@pytest.mark.parametrize("kind", [PuzzleSolvingPipeline, CosmologyRegressionPipeline, MassMappingPipeline])
def test_the_packages_pipeline_is_saved_and_loaded(kind, tmp_path):
    if kind is PuzzleSolvingPipeline:
        task, made, asked = "puzzle-solving", kind(tiny.model("trm", task="sudoku"), device="cpu"), SUDOKU
    else:
        name = "cosmo_cnn" if kind is CosmologyRegressionPipeline else "cosmo_unet"
        task, beside = every.ROWS[name].pipeline, every.processor(name)
        made, asked = kind(every.model(name), feature_extractor=beside, device="cpu"), maps_of(name)[0]
    made.save_pretrained(tmp_path)
    again = pipeline(task, model=str(tmp_path))
    assert type(again) is kind
    assert_near(again(asked), made(asked))


def assert_near(found, expected) -> None:
    """Assert equality up to rounding: loaded weights are aligned differently, which changes the order of sums."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(found[name], value)
    elif np.asarray(expected).dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    else:
        assert np.array_equal(found, expected)
