"""`HrmTrainer(push_to_hub=True)` against a loopback Hub: complete checkpoints, averaged weights, our card."""

import json
import warnings

import every
import pytest
import tiny_cosmo
import torch
from hub_here import NAME, TOKEN
from safetensors.torch import load, load_file

from hrm_hf.hub import pull_checkpoint
from hrm_hf.hub.manifests import find_corruption


CODE = {"modeling_hrm_cosmo.py", "configuration_hrm_cosmo.py", "feature_extraction_cosmo.py", "LICENSE_CODE"}


def trainer(tmp_path, **arguments):
    options = {"push_to_hub": True, "hub_model_id": NAME, "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
    return tiny_cosmo.trainer(tmp_path / "run", **{**options, **arguments})


def test_run_pushes_complete_checkpoints_and_finally_the_average(hub, tmp_path):
    run = trainer(tmp_path, ema_rate=0.9, hub_always_push=True)
    run.train()
    run.save_model()
    titles = [hub.storage.find("model", NAME).commit(sha).title for sha in hub.commits(NAME)]
    assert titles == ["Model save", "Training in progress, step 4", "Training in progress, step 2", "initial commit"]
    for sha in hub.commits(NAME)[:-1]:
        files = hub.files(NAME, sha)
        assert {*CODE, "config.json", "preprocessor_config.json", "model.safetensors", "README.md"} <= files.keys()
        assert not {"training_args.bin", "optimizer.pt", "raw_weights.safetensors"} & files.keys()
        assert f'"{NAME}"' in files["README.md"].decode()
    last, at_four = (load(hub.files(NAME, sha)["model.safetensors"]) for sha in hub.commits(NAME)[:2])
    name = next(name for name, p in run.model.named_parameters() if p.requires_grad)
    assert torch.equal(last[name], run.average.shadow[name])
    assert torch.equal(at_four[name], run.model.state_dict()[name])
    assert not torch.equal(last[name], at_four[name])

    run.push_to_hub(commit_message="again", tags="mine", license="mit")
    files = hub.files(NAME)
    assert torch.equal(load(files["model.safetensors"])[name], last[name])
    assert b"license: mit" in files["README.md"] and b"- mine" in files["README.md"]
    assert load_file(tmp_path / "run" / "raw_weights.safetensors").keys() == run.average.shadow.keys()


def test_edited_card_is_kept(hub, tmp_path):
    run = trainer(tmp_path, save_strategy="no")
    run.train()
    run.push_to_hub()
    card = tmp_path / "run" / "README.md"
    card.write_text(card.read_text() + "\nWritten by hand.\n")
    run.push_to_hub()
    assert b"Written by hand." in hub.files(NAME)["README.md"]


def test_run_resumes_from_a_checkpoint_on_the_hub(hub, tmp_path):
    run = trainer(tmp_path, hub_strategy="checkpoint", max_steps=2)
    run.train()
    files = hub.files(NAME)
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/manifest.json", "model.safetensors"} <= files.keys()
    pulled = pull_checkpoint(NAME, tmp_path / "pulled").path
    assert not find_corruption(pulled / "last-checkpoint")
    again = trainer(tmp_path / "second", push_to_hub=False, max_steps=4)
    again.train(resume_from_checkpoint=str(pulled / "last-checkpoint"))
    assert again.state.global_step == 4


def test_token_in_the_training_arguments_is_not_uploaded(hub, tmp_path):
    with pytest.raises(ValueError, match=r"hub_token with hub_strategy=checkpoint"):
        trainer(tmp_path, hub_strategy="checkpoint", hub_token=TOKEN)


def test_failed_push_does_not_stop_the_run(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    run = trainer(tmp_path, save_steps=2, max_steps=4)
    hub.cut_after("/upload/", 100, times=1000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.train()
        run._finish_current_push()
    assert run.state.global_step == 4
    assert any("push during training" in str(warning.message) for warning in said)
    hub.faults.clear()
    run.push_to_hub()
    assert json.loads(hub.files(NAME)["config.json"])["model_type"] == "hrm_cosmo"


def test_push_rejects_a_language_model_without_a_tokenizer(hub, tmp_path):
    from hrm_hf.hub import push_checkpoint

    every.model("hrm_lm").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="has no tokenizer"):
        push_checkpoint(tmp_path / "model", NAME)
    assert not hub.storage.repositories
