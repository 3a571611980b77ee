"""What people get wrong, and what they are told: each message names the thing, its value and what was expected.

`pytest tests/cli/test_bad_input.py -s` prints every case with its message.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden
import pytest
import tiny
import torch
import yaml
from datasets import Dataset
from golden import HRM
from huggingface_hub.errors import StrictDataclassError

from hrm_hf import HrmPuzzleConfig
from hrm_hf.hub.manifests import resolve_checkpoint, write_manifest
from hrm_hf.puzzles.arguments import PuzzleDataArguments, PuzzleTrainingArguments
from hrm_hf.puzzles.build import ensure_built
from hrm_hf.puzzles.convert import convert_original
from hrm_hf.puzzles.dataloader import CarryDataLoader, PuzzleRows
from hrm_hf.puzzles.dataset import PuzzleInfo, load_puzzle_dataset, load_puzzle_info, save_puzzle_dataset
from hrm_hf.puzzles.npy_layout import read_original
from hrm_hf.puzzles.sudoku import generated_sudoku, sudoku_from_source
from hrm_hf.puzzles.trainer import PuzzleTrainer
from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD, WeightAverage
from hrm_hf.trainer.recipes import ModelArguments, build_config, parse_overrides, parse_recipe


BOARD, SOLVED = "12..34....4...21", "1234341221434321"
OTHER = SOLVED.translate(str.maketrans("12", "21"))  # obeys the rules, but not these clues
CLASSES = (ModelArguments, PuzzleDataArguments, PuzzleTrainingArguments)


@dataclass
class Place:
    """A scratch folder with what the cases need, and the way to read what bad usage prints."""

    folder: Path
    capsys: Any

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def usage(*flags: str) -> None:
    parse_recipe(CLASSES, ("--output_dir", "x", "--report_to", "none", *flags))


def rows(**columns) -> Dataset:
    values = {"input_ids": [[1] * 16] * 3, "labels": [[2] * 16] * 3, "puzzle_identifiers": [0, 1, 2], **columns}
    return Dataset.from_dict({name: value for name, value in values.items() if value is not None})


def fits(**columns) -> None:
    PuzzleRows(rows(**columns)).validate_fits(tiny.config("hrm"))


def trainer(place: Place, train=None, **arguments) -> PuzzleTrainer:
    options = {"output_dir": str(place.folder / "run"), "use_cpu": True, "report_to": "none", "max_steps": 1}
    options |= {"per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True}
    args = PuzzleTrainingArguments(**{**options, **arguments})
    return PuzzleTrainer(tiny.model("hrm"), args, train_dataset=train or rows(), eval_dataset=rows())


def checkpoint(place: Place, step: int, harm: bool = False) -> Path:
    folder = place.folder / "run" / f"checkpoint-{step}"
    place.file(f"run/checkpoint-{step}/model.safetensors", "x" * 5000)
    write_manifest(folder)
    if harm:
        (folder / "model.safetensors").write_text("x" * 4000)
    return folder


def resume_damaged(place: Place) -> None:
    checkpoint(place, 5)
    checkpoint(place, 10, harm=True)
    resolve_checkpoint(place.folder / "run", "last")


def resume_interrupted(place: Place) -> None:
    (checkpoint(place, 5) / "manifest.json").unlink()
    resolve_checkpoint(place.folder / "run", True)


def resume_other_layout(place: Place, **other) -> None:
    layout = {"slots_per_process": 2, "seed": 0}
    state = CarryDataLoader(PuzzleRows(rows()), **layout).state_dict()
    CarryDataLoader(PuzzleRows(rows()), **{**layout, **other}).load_state_dict(state)


def sudoku_csv(place: Place, *lines: str) -> None:
    sudoku_from_source(place.file("boards.csv", "\n".join(("puzzle,solution", f"{BOARD},{SOLVED}", *lines))))


def sudoku_jsonl(place: Place, line: str) -> None:
    good = json.dumps({"puzzle": BOARD, "solution": SOLVED})
    sudoku_from_source(place.file("boards.jsonl", f"{good}\n{line}\n"))


def original(place: Place, drop: tuple[str, ...] = (), config: bool = True, damage: bool = False) -> None:
    state = {n: v for n, v in golden.tensors(HRM, "state_dict/").items() if not n.endswith(drop or ("none",))}
    folder = place.folder / "original"
    folder.mkdir()
    torch.save(state, folder / "step_1")
    if damage:
        (folder / "step_1").write_bytes((folder / "step_1").read_bytes()[:3000])
    if config:
        arch = {**golden.original_arch(HRM), "name": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1"}
        place.file("original/all_config.yaml", yaml.safe_dump({"arch": arch}))
    convert_original(folder, place.folder / "ours")


def existing_set(place: Place, **options) -> Path:
    splits, info = generated_sudoku(4, num_train=4, num_test=2)
    save_puzzle_dataset(splits, info, place.folder / "boards")
    if options:
        info.options |= options
        save_puzzle_dataset(splits, info, place.folder / "boards")
    return place.folder / "boards"


def without_identifiers(place: Place) -> None:
    (existing_set(place) / "identifiers.json").unlink()
    load_puzzle_info(place.folder / "boards")


def sign_descent_on_a_dense_gradient(place: Place) -> None:
    table = torch.zeros(3, 2)
    table.grad = torch.ones(3, 2)
    SignSGD([table]).step()


def state_of_other_optimizers(place: Place) -> None:
    one = AdamATan2([torch.nn.Parameter(torch.zeros(1))])
    CompositeOptimizer([one]).load_state_dict({"optimizers": []})


def average_of_another_model(place: Place) -> None:
    WeightAverage(tiny.model("hrm"), 0.9).load({"head.weight": torch.zeros(1)})


def config(overrides: str = "", **arguments) -> None:
    build_config(
        ModelArguments(**{"model_type": "hrm_puzzle", "config_overrides": overrides or None, **arguments}), seq_len=16
    )


def model_call(**changes) -> None:
    model = tiny.model("hrm")
    model(**{**tiny.batch(4), **changes})


def wrong_batch_for_carry(place: Place) -> None:
    model = tiny.model("hrm")
    model(**tiny.batch(4), carry=model.initial_carry(**tiny.batch(8)))


CONFIG_ERROR = (StrictDataclassError, ValueError)

# (what is wrong, what is called with a `Place`, exception, what its message has to say)
CASES = [
    # model
    ("boards of another size than the model's", lambda p: model_call(input_ids=torch.ones(4, 9).long()), ValueError,
     r"input_ids has shape [(\[]4, 9[)\]]; .*expect.* \[batch, 16\]"),
    ("a batch that is not the carry's", wrong_batch_for_carry, ValueError,
     r"the carry (has|holds) \[?8.* batch (offers )?\[?4"),
    ("fine-tuning on other puzzles with the old table",
     lambda p: tiny.model("hrm").adapt_puzzle_embeddings(9, "keep"), ValueError,
     "puzzle_embeddings='keep': the model has 5 puzzle identifiers, the data 9"),
    # config
    ("an odd head size", lambda p: tiny.config("hrm", hidden_size=30, num_attention_heads=2), CONFIG_ERROR,
     "needs a head size that is a multiple of 2; hidden_size / heads = 15"),
    ("a width that the heads do not divide", lambda p: tiny.config("hrm", hidden_size=32, num_attention_heads=3),
     CONFIG_ERROR, "hidden_size=32 is not a multiple of num_attention_heads=3"),
    ("an exploration probability of 2", lambda p: tiny.config("hrm", halt_exploration_prob=2), CONFIG_ERROR,
     "halt_exploration_prob=2; expected a number from 0 to 1"),
    ("a board that is not seq_len cells", lambda p: tiny.config("hrm", grid_shape=[3, 3]), CONFIG_ERROR,
     r"grid_shape=\[3, 3\] does not have seq_len=16 cells"),
    ("an unknown preset", lambda p: HrmPuzzleConfig.from_preset("hrm-1b"), ValueError,
     r"unknown preset 'hrm-1b' for hrm_puzzle; choose one of \['hrm-27m'"),
    ("an unknown config field", lambda p: config("H_cycle=3"), ValueError,
     "unknown config field of hrm_puzzle 'H_cycle'; did you mean 'H_cycles'"),
    ("an override without a value", lambda p: config("H_cycles"), ValueError, "'H_cycles' is not of the form field=v"),
    ("an unknown model type", lambda p: config(model_type="hrm_puzzel"), ValueError,
     "unknown model_type 'hrm_puzzel'; did you mean 'hrm_puzzle'"),
    # recipes
    ("an unknown recipe key",
     lambda p: usage("--recipe", str(p.file("r.yaml", "learnin_rate: 1\n"))), ValueError,
     r"r\.yaml: unknown key 'learnin_rate'; did you mean 'learning_rate'"),
    ("an unknown flag", lambda p: usage("--puzle_emb_lr", "1"), ValueError,
     "unknown flag 'puzle_emb_lr'; did you mean 'puzzle_emb_lr'"),
    ("broken YAML in a recipe", lambda p: usage("--recipe", str(p.file("r.yaml", "a: [\n"))),
     ValueError, r"r\.yaml is not valid YAML"),
    ("a recipe that is no mapping", lambda p: usage("--recipe", str(p.file("r.yaml", "- 1\n"))),
     ValueError, r"r\.yaml must be a mapping of option: value, it is a list"),
    # data sets
    ("data of another length than the model's",
     lambda p: fits(input_ids=[[1] * 9] * 3, labels=[[1] * 9] * 3), ValueError,
     "the data have seq_len 9, the model 16"),
    ("a token above the vocabulary", lambda p: fits(input_ids=[[6] * 16] * 3), ValueError,
     r"input_ids of row 0, cell 0 is 6; the model's vocab_size is 6, so 0\.\.5"),
    ("a label above the vocabulary", lambda p: fits(labels=[[-100] * 15 + [7]] * 3), ValueError,
     r"labels of row 0, cell 15 is 7; the model's vocab_size is 6, so 0\.\.5"),
    ("a puzzle identifier above the table", lambda p: fits(puzzle_identifiers=[0, 1, 5]), ValueError,
     r"identifiers? (span 0\.\.)?5.* table .*5 rows; call model.resize_puzzle_embeddings"),
    ("a missing column", lambda p: fits(labels=None), ValueError, r"lacks the columns \['labels'\]; it has \['input"),
    ("an empty data set", lambda p: PuzzleRows(rows().select([])), ValueError, "the data set has no rows"),
    ("rows of different lengths", lambda p: fits(input_ids=[[1] * 16, [1] * 16, [1] * 15]), ValueError,
     "rows of input_ids differ in length .*; all must have the model's seq_len"),
    ("a folder that is no data set", lambda p: load_puzzle_info(p.folder), FileNotFoundError,
     "is no puzzle data set: puzzle.json is missing. Build one with `hrm-hf data sudoku"),
    ("a data set that does not exist and no way to build it", lambda p: ensure_built(str(p.folder / "no"), None),
     ValueError, "/no holds no puzzle data set; build one with `hrm-hf data ... --out"),
    ("a data set without its identifiers", without_identifiers, FileNotFoundError,
     "identifiers.json is missing; puzzle identifiers are meaningless without it"),
    ("an unknown split", lambda p: load_puzzle_dataset(existing_set(p), "validation"), ValueError,
     r"has no split 'validation'; it has \['test', 'train'\]"),
    ("another data set in the same folder", lambda p: existing_set(p, seed=7), FileExistsError,
     "already holds a puzzle data set with other options; choose another --out or delete the folder"),
    ("a folder without the original's files", lambda p: read_original(p.folder), FileNotFoundError,
     "identifiers.json is missing"),
    # sources
    ("a source that does not exist", lambda p: sudoku_from_source(p.folder / "no.csv"), FileNotFoundError,
     r"no\.csv does not exist; expected a file, a folder with train\.\* files, or hub:NAME"),
    ("a broken JSON line", lambda p: sudoku_jsonl(p, '{"puzzle": '), ValueError,
     r"boards\.jsonl, line 2: broken JSON \(Expecting value at character"),
    ("a CSV row with a field too many", lambda p: sudoku_csv(p, f"{BOARD},{SOLVED},3"), ValueError,
     r"boards\.csv, line 3: 3 fields; expected 2 as in line 1"),
    ("a board that is too short", lambda p: sudoku_csv(p, f"{BOARD[:-1]},{SOLVED}"), ValueError,
     r"boards\.csv, line 3, column 'puzzle': 15 characters '12\.\..*expected 16"),
    ("an illegal character", lambda p: sudoku_csv(p, f"x{BOARD[1:]},{SOLVED}"), ValueError,
     r"line 3, column 'puzzle': character 'x' at position 1 of .*expected one of '\.01234'"),
    ("a solution that contradicts its clues", lambda p: sudoku_csv(p, f"{BOARD},{OTHER}"), ValueError,
     rf"line 3, column 'solution': '{OTHER}' does not solve .*clue 1 was changed to"),
    ("a solution that breaks the rules", lambda p: sudoku_csv(p, f"{'.' * 16},{'1' * 16}"), ValueError,
     r"line 3, column 'solution': '1111.* does not solve '\.\.\.\.*.* 1 "),
    # training
    ("fp16", lambda p: trainer(p, fp16=True), ValueError, "fp16 is not supported.*use --bf16 or float32"),
    ("gradient accumulation", lambda p: trainer(p, gradient_accumulation_steps=4), ValueError,
     "gradient_accumulation_steps=4: one optimizer step is one ACT step.*raise per_device_train_batch_size"),
    ("a negative learning rate", lambda p: trainer(p, learning_rate=-1.0).train(), ValueError,
     r"learning_rate=-1\.0 is not a number from 0 up"),
    ("an average rate above 1", lambda p: trainer(p, ema_rate=1.5).train(), ValueError,
     r"ema_rate=1\.5 is not a number in 0\.\.1"),
    ("data for another model in training",
     lambda p: trainer(p, train=rows(input_ids=[[9] * 16] * 3)).train(), ValueError,
     r"input_ids of row 0, cell 0 is 9; the model's vocab_size is 6"),
    ("a dense gradient for sign descent", sign_descent_on_a_dense_gradient, TypeError,
     r"SignSGD needs a sparse gradient of rows; this one is dense, \(3, 2\)"),
    # checkpoints
    ("a damaged checkpoint", resume_damaged, ValueError,
     r"checkpoint-10 is corrupted: model\.safetensors has 4,000 bytes, 5,000 expected\. Nothing was loaded; resume "
     r"from the newest complete one, .*checkpoint-5, with --resume_from_checkpoint last-complete"),
    ("a checkpoint whose saving was interrupted", resume_interrupted, ValueError,
     "manifest.json is missing, so the run was stopped while it saved.*no complete checkpoint is left; start the run"),
    ("no checkpoint at all", lambda p: resolve_checkpoint(p.folder / "run", "last"), FileNotFoundError,
     "no checkpoint to resume from in .*run"),
    ("resuming with another batch size", lambda p: resume_other_layout(p, slots_per_process=4), ValueError,
     "made with slots=2, this run has 4: .*Resume with the same number of processes, batch size and seed"),
    ("resuming on another number of processes", lambda p: resume_other_layout(p, world_size=2), ValueError,
     "made with world_size=1, this run has 2: "),
    ("the state of other optimizers", state_of_other_optimizers, ValueError,
     "the saved state has 0 optimizers, this run 1"),
    ("the average of another model", average_of_another_model, ValueError,
     r"saved average does not fit: \['head\.weight', "),
    ("an original checkpoint without some tensors", lambda p: original(p, drop=("lm_head.weight",)), ValueError,
     r"does not fit(.|\n)*missing: lm_head\.weight"),
    ("an original checkpoint without its config", lambda p: original(p, config=False), FileNotFoundError,
     r"all_config\.yaml is missing; the original saves it beside step_N"),
    ("a truncated original checkpoint", lambda p: original(p, damage=True), ValueError,
     "step_1 (cannot be read, it is truncated or corrupted; fetch it again|is no plain state_dict: it is corrupted)"),
    ("a token above the vocabulary in evaluation",
     lambda p: trainer(p).evaluate(rows(input_ids=[[9] * 16] * 3)), ValueError, "input_ids hold 9"),
    ("a puzzle identifier above the table in the forward",
     lambda p: model_call(puzzle_identifiers=torch.tensor([0, 1, 2, 99])), ValueError, "99.*5"),
    ("no data set named", lambda p: ensure_built(None, None), ValueError, "data_path"),
    ("no model named", lambda p: config(model_type=None), ValueError, "give --model_type .*or --model_name_or_path"),
    ("overrides that are broken JSON", lambda p: parse_overrides('{"H_cycles": 3'), ValueError, "config_overrides"),
    ("a recipe key that is a number", lambda p: usage("--recipe", str(p.file("r.yaml", "3: 1\n"))),
     ValueError, "unknown key"),
    ("a puzzle.json with an unknown field", lambda p: load_puzzle_info(strange_info(p)), ValueError, "puzzle.json"),
    ("a puzzle.json that is broken", lambda p: load_puzzle_info(broken_info(p)), ValueError, "puzzle.json"),
    ("a resumed process without its part of the checkpoint", lambda p: without_act_state(p), ValueError,
     "number of processes"),
    ("evaluation without data", lambda p: no_eval_data(p), ValueError, "eval_dataset|data set"),
]  # fmt: skip


def strange_info(place: Place) -> Path:
    path = existing_set(place) / "puzzle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "red"}))
    return path.parent


def broken_info(place: Place) -> Path:
    path = existing_set(place) / "puzzle.json"
    path.write_text(path.read_text()[:30])
    return path.parent


def without_act_state(place: Place) -> None:
    trainer(place, save_strategy="steps", save_steps=1).train()
    folder = place.folder / "run" / "checkpoint-1"
    (folder / "act_state_0.pt").unlink()
    write_manifest(folder)
    trainer(place, max_steps=2).train("last")


def no_eval_data(place: Place) -> None:
    one = trainer(place)
    one.eval_dataset = None
    one.evaluate()


def ids(cases) -> list[str]:
    return [name.replace(" ", "-") for name, *_ in cases]


def told(name: str, call, place: Place) -> tuple[str, BaseException | None]:
    try:
        call(place)
    except Exception as error:  # whatever it is: the test judges it
        return f"{type(error).__name__}: {error}", error
    return "nothing was raised", None


def show(place: Place, name: str, message: str) -> None:
    place.capsys.readouterr()
    with place.capsys.disabled():
        if "-s" in sys.argv or "--capture=no" in sys.argv:
            print(f"\n- {name}\n    " + " ".join(message.split()).replace(str(place.folder), "..."))


@pytest.mark.parametrize(("name", "call", "exception", "message"), CASES, ids=ids(CASES))
def test_bad_input_is_named_with_its_value_and_what_was_expected(tmp_path, capsys, name, call, exception, message):
    place = Place(tmp_path, capsys)
    text, error = told(name, call, place)
    show(place, name, text)
    with pytest.raises(exception, match=message):
        raise error or AssertionError(text)


def test_there_are_enough_kinds_of_bad_input():
    assert len(CASES) >= 20 and len({name for name, *_ in CASES}) == len(CASES)
    assert PuzzleInfo("sudoku", (4, 4), 6).seq_len == 16
