"""Classifiers and reward models on our language models, with transformers' generic heads and Auto classes.

Referees: the base model's states times the head's weights, each text alone, and the process that saved.
"""

import clean_process
import every
import pytest
import torch
from datasets import Dataset
from tolerances import assert_copied, assert_equal_but_for_rounding
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hrm_hf.registry import CLASSIFIERS


FIELDS = {"hrm_go_coder": {"unified": True, "planner_layers": 2, "generator_layers": 0}}
NAMES = [name for name, row in every.ROWS.items() if row.classifiers]
each_name = pytest.mark.parametrize("name", NAMES)
each_head = pytest.mark.parametrize("auto_class", CLASSIFIERS, ids=["sequence", "token"])
COLLATORS = {
    AutoModelForSequenceClassification: DataCollatorWithPadding,
    AutoModelForTokenClassification: DataCollatorForTokenClassification,
}
LENGTHS = (5, 24, 9, 17)


def classifier(name: str, auto_class, labels: int = 3):
    """Return a seeded classifier whose weights all affect the output."""
    config = every.model(name, **FIELDS.get(name, {})).config
    config.num_labels, config.pad_token_id = labels, every.processor(name).pad_token_id
    return every.wake(auto_class.from_config(config)).eval()


def texts(name: str) -> list[list[int]]:
    ids = every.inputs(name, rows=len(LENGTHS))["input_ids"].tolist()
    return [row[:length] for row, length in zip(ids, LENGTHS)]


def test_every_language_model_has_classifiers():
    assert set(NAMES) == set(every.CAUSAL_LMS)


@each_name
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_classification_by_the_last_token(name, side):
    model, tokenizer = classifier(name, AutoModelForSequenceClassification), every.processor(name)
    tokenizer.padding_side = side
    batch = tokenizer.pad({"input_ids": texts(name)}, return_tensors="pt")
    with torch.no_grad():
        states = [model.model(torch.tensor([text])).last_hidden_state[0, -1] for text in texts(name)]
        expected = torch.stack(states) @ model.score.weight.T
        assert_equal_but_for_rounding(model(**batch).logits, expected)


@each_name
def test_token_classifier_uses_the_state_of_each_token(name):
    model = classifier(name, AutoModelForTokenClassification)
    with torch.no_grad():
        ids = every.inputs(name)["input_ids"]
        expected = model.model(ids).last_hidden_state @ model.score.weight.T + model.score.bias
        assert_equal_but_for_rounding(model(ids).logits, expected)


@each_head
@each_name
def test_plain_trainer_trains_a_classifier_and_predicts(name, auto_class, tmp_path):
    of_tokens = auto_class is AutoModelForTokenClassification
    model, rows = classifier(name, auto_class), texts(name)
    data = [{"input_ids": row, "labels": [token % 3 for token in row] if of_tokens else row[-1] % 3} for row in rows]
    arguments = TrainingArguments(
        tmp_path, num_train_epochs=3, per_device_train_batch_size=4, learning_rate=0.02, use_cpu=True,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, COLLATORS[auto_class](every.processor(name)), data, data)
    before = trainer.evaluate()["eval_loss"]
    body = {name: weight.clone() for name, weight in model.model.named_parameters()}
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert any(not torch.equal(weight, body[name]) for name, weight in model.model.named_parameters())
    found = trainer.predict(data).predictions  # only logits: no cache, no states
    assert found.shape == ((4, max(LENGTHS), 3) if of_tokens else (4, 3))


@each_head
@each_name
def test_base_model_weights_survive_adding_a_head_and_saving(name, auto_class, tmp_path):
    written = every.model(name, **FIELDS.get(name, {}))
    written.save_pretrained(tmp_path / "lm")
    model, report = auto_class.from_pretrained(tmp_path / "lm", num_labels=3, output_loading_info=True)
    assert {missing.split(".")[0] for missing in report["missing_keys"]} == {"score"}
    assert_copied(model.model.state_dict(), written.model.state_dict())

    model.config.id2label = {0: "noun", 1: "verb", 2: "other"}
    model.save_pretrained(tmp_path / "labels")
    again = auto_class.from_pretrained(tmp_path / "labels")
    assert type(again) is type(model) and again.config.id2label[1] == "verb"
    assert_copied(again.state_dict(), model.state_dict())
    assert_copied(AutoModel.from_pretrained(tmp_path / "labels").state_dict(), written.model.state_dict())


# Runs where `import hrm_hf` fails; argv: a folder of classifiers, each with expected.pt.
SCRIPT = """
import sys
from pathlib import Path
import torch, transformers

for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected, source = torch.load(folder / "expected.pt", weights_only=True), folder
    auto_class = getattr(transformers, expected["auto_class"])
    for target in (folder / "again", folder / "and again"):
        model = auto_class.from_pretrained(source, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        with torch.no_grad():
            torch.testing.assert_close(model(expected["input_ids"]).logits, expected["logits"], rtol=1e-4, atol=1e-4)
        model.save_pretrained(target)
        source = target
    model.model.save_pretrained(folder / "body")
    body = transformers.AutoModel.from_pretrained(folder / "body", trust_remote_code=True)
    assert all(map(torch.equal, body.state_dict().values(), model.model.state_dict().values()))
    print("same", folder.name)
"""


@pytest.mark.slow
def test_a_process_without_the_package_classifies_the_same_and_saves_it_again(tmp_path):
    home = tmp_path / "classifiers"
    for name in NAMES:
        for auto_class in CLASSIFIERS:
            model, ids = classifier(name, auto_class), every.inputs(name)["input_ids"]
            model.save_pretrained(home / f"{name}-{auto_class.__name__}")
            with torch.no_grad():
                logits = model(ids).logits
            known = {"auto_class": auto_class.__name__, "input_ids": ids, "logits": logits}
            torch.save(known, home / f"{name}-{auto_class.__name__}" / "expected.pt")
    finished = clean_process.run(SCRIPT, home, cwd=tmp_path, home=tmp_path / "hf_home")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("same") == len(NAMES) * len(CLASSIFIERS)


def test_the_pipeline_names_the_label_of_a_text(tmp_path):
    model = classifier("rlm_mhc", AutoModelForSequenceClassification)
    model.config.id2label = {0: "prose", 1: "verse", 2: "code"}
    model.save_pretrained(tmp_path)
    every.processor("rlm_mhc").save_pretrained(tmp_path)
    found = pipeline("text-classification", model=str(tmp_path))(["a tale", "x = 1"])
    for text, answer in zip(["a tale", "x = 1"], found):
        best = model(**every.processor("rlm_mhc")(text, return_tensors="pt")).logits.argmax().item()
        assert answer["label"] == model.config.id2label[best]


def test_batched_classification_needs_a_padding_token():
    model = classifier("hrm_lm", AutoModelForSequenceClassification)
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="padding token"):
        model(**every.inputs("hrm_lm"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl 1.16 sets it
@each_name
def test_trl_reward_trainer_learns_the_chosen_answers(name, tmp_path):
    trl = pytest.importorskip("trl")
    pairs = {"chosen": ["a good tale", "a good end"] * 8, "rejected": ["a bad tale", "a bad end"] * 8}
    arguments = trl.RewardConfig(
        tmp_path, max_steps=10, learning_rate=5e-3, use_cpu=True, bf16=False, logging_steps=5, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.RewardTrainer(
        classifier(name, AutoModelForSequenceClassification, labels=1), arguments,
        train_dataset=Dataset.from_dict(pairs), processing_class=every.processor(name),
    )  # fmt: skip
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.1 < losses[0]


@each_head
def test_two_stack_go_coder_has_no_classifier(auto_class):
    config = AutoConfig.for_model("hrm_go_coder", planner_layers=1, generator_layers=1)
    with pytest.raises(ValueError, match="unified=False"):
        auto_class.from_config(config)
