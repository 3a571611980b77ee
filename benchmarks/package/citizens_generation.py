"""Checks of generation, saving, probing and classification, which `citizens.py` runs.

They cover `generate` and `compute_transition_scores` for the Go coder, `pipeline(..., trust_remote_code=True)` in a
process that cannot import the package, hidden states of `rlm_mhc`, and classifiers under `Trainer`. The models are
untrained and have a few thousand weights.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hrm_hf


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": 128}
GO = {**SIZES, "vocab_size": 200, "planner_layers": 1, "generator_layers": 1, "plan_budget": 8, "code_budget": 8}
MHC = {**SIZES, "vocab_size": 80, "num_hidden_layers": 3, "num_key_value_heads": 2, "mhc_flows": 3}
TEXT = {
    "hrm_lm": {**SIZES, "vocab_size": 80, "num_h_layers": 1, "num_l_layers": 1, "halt_max_steps": 2},
    "rlm_mhc": MHC,
    "hrm_go_coder": {**GO, "unified": True, "generator_layers": 0, "planner_layers": 2},
}
PAD = 3
SUDOKU = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
WITHOUT_THE_PACKAGE = "import sys; sys.modules['hrm_hf'] = None\n"


def transition_scores(architecture: str) -> str:
    """Compare `compute_transition_scores` with the log-probabilities of the generated tokens."""
    coder, prompt = _coder(), _prompt()
    for options in ({"do_sample": False}, {"num_beams": 2, "length_penalty": 1.0, "do_sample": False}):
        out = coder.generate(prompt, max_new_tokens=6, return_dict_in_generate=True, output_scores=True, **options)
        beams, normalize = out.get("beam_indices"), "num_beams" not in options
        found = coder.compute_transition_scores(out.sequences, out.scores, beams, normalize_logits=normalize)
        assert found.shape == (1, len(out.scores)) and torch.isfinite(found).all() and (found <= 0).all(), found
        if beams is not None:
            total = found.sum() / found.shape[1]
            torch.testing.assert_close(total, out.sequences_scores[0], rtol=1e-4, atol=1e-4)
    return "greedy and beams"


def stopping_criteria(architecture: str) -> str:
    """Check that a stopping criterion sees the given prompt and its continuation."""

    class Stop(StoppingCriteria):
        seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids.clone())
            return torch.full((len(input_ids),), input_ids.shape[1] >= 15)

    coder, prompt, stop = _coder(), _prompt(), Stop()
    out = coder.generate(prompt, max_new_tokens=20, do_sample=False, stopping_criteria=[stop])
    assert out.shape[1] == 15, f"{out.shape[1]} tokens, and the criterion stops at 15"
    assert torch.equal(stop.seen[-1], out)
    return "stops at the visible length"


def embeddings(architecture: str) -> str:
    """Check that `inputs_embeds` gives a warning, because the Go coder cannot find its phase tags in embeddings."""
    coder, prompt = _coder(), _prompt()
    said = _warnings_of(
        lambda: coder.generate(inputs_embeds=coder.get_input_embeddings()(prompt), max_new_tokens=4, do_sample=False)
    )
    assert "inputs_embeds" in said, f"said: {said!r}"
    both = coder.generate(
        prompt, inputs_embeds=coder.get_input_embeddings()(prompt), max_new_tokens=4, do_sample=False
    )
    assert torch.equal(both[:, : prompt.shape[1]], prompt)
    return said[:60]


def window(architecture: str) -> str:
    """Check that a `max_new_tokens` beyond the context window gives a warning that names both."""
    coder, prompt = _coder(), _prompt()
    said = _warnings_of(lambda: coder.generate(prompt, max_new_tokens=500, do_sample=False))
    assert "500" in said and "128" in said, f"said: {said!r}"
    return said[:60]


def pipelines_without_the_package(architecture: str) -> str:
    """Compare puzzle and cosmology pipelines loaded as remote code with those of the package."""
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_attention_heads": 2, "L_layers": 1, "puzzle_emb_ndim": 0, "halt_max_steps": 2}
    puzzles = hrm_hf.TrmPuzzleForSolving(hrm_hf.TrmPuzzleConfig(**fields, task="sudoku"))
    cosmo = hrm_hf.HrmCosmoForRegression(hrm_hf.HrmCosmoConfig.from_preset("test"))
    maps = torch.randn(2, 16, 16)
    code = """
import json, torch
from transformers import pipeline
solve = pipeline(model="puzzle", trust_remote_code=True)
infer = pipeline(model="cosmo", trust_remote_code=True)
answer, named = solve(%r), pipeline("puzzle-solving", model="puzzle", trust_remote_code=True)(%r)
assert answer == named
solve.save_pretrained("again")
assert pipeline(model="again", trust_remote_code=True)(%r)["text"] == answer["text"]
found = infer([one for one in torch.load("maps.pt")])
print(json.dumps([answer["text"], answer["steps"], [one["omega_m"]["mean"] for one in found]]))
""" % ((SUDOKU,) * 3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        puzzles.save_pretrained(folder / "puzzle")
        cosmo.save_pretrained(folder / "cosmo")
        _extractor(cosmo).save_pretrained(folder / "cosmo")
        torch.save(maps, folder / "maps.pt")
        text, steps, means = json.loads(_elsewhere(code, folder))
        ours = pipeline("puzzle-solving", model=str(folder / "puzzle"))(SUDOKU)  # the package's own pipelines
        theirs = pipeline("cosmology-regression", model=str(folder / "cosmo"))(list(maps))
        assert (text, steps) == (ours["text"], ours["steps"])
        torch.testing.assert_close(means, [one["omega_m"]["mean"] for one in theirs])
    return f"Sudoku in {steps} steps, 2 maps"


def hidden_states(architecture: str) -> str:
    """Check that `rlm_mhc` returns a hidden state [B, T, D] for each layer and a final one, and streams on request."""
    torch.manual_seed(0)
    for fields in ({}, {"mhc_enabled": False}, {"num_loops": 2}):
        model = hrm_hf.RlmMhcForCausalLM(hrm_hf.RlmMhcConfig(**{**MHC, **fields})).eval()
        ids = torch.randint(80, (2, 7))
        states = model(ids, output_hidden_states=True).hidden_states
        layers = len(model.config.layer_order)
        assert [tuple(state.shape) for state in states] == [(2, 7, 32)] * (layers + 1), [s.shape for s in states]
        streams = model(ids, output_streams=True).streams
        shape = (2, 7, 3, 32) if model.config.mhc_enabled else (2, 7, 32)
        assert [tuple(stream.shape) for stream in streams] == [shape] * layers
    return f"{len(states)} states, {len(streams)} streams"


def float32_modules(architecture: str) -> str:
    """Check that every name in `_keep_in_fp32_modules_strict` matches a module."""
    for fields in ({}, {"mhc_reduce": "head"}, {"mhc_enabled": False}):
        model = hrm_hf.RlmMhcForCausalLM(hrm_hf.RlmMhcConfig(**{**MHC, **fields}))
        names = {part for name, _ in model.named_modules() for part in name.split(".")}
        assert set(model._keep_in_fp32_modules_strict) <= names, model._keep_in_fp32_modules_strict
    return "for all shapes"


def sequence_classification(architecture: str) -> None:
    """Train a sequence classifier, compare padded with unpadded logits, save it and load it."""
    model = _classifier(AutoModelForSequenceClassification, architecture)
    rows = [{"input_ids": list(range(10, 10 + size)), "labels": size % 3} for size in (5, 9, 7, 6)]
    _train_a_step(model, rows, DataCollatorWithPadding(_tokenizer()))
    model.eval()
    alone = [model(torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    for side in ("left", "right"):
        tokenizer = _tokenizer()
        tokenizer.padding_side = side
        batch = tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")
        torch.testing.assert_close(model(**batch).logits, torch.stack(alone), rtol=1e-4, atol=1e-5)
    _saved_and_loaded(AutoModelForSequenceClassification, model, batch)


def token_classification(architecture: str) -> None:
    """Train a token classifier, check the shape of its logits, save it and load it."""
    model = _classifier(AutoModelForTokenClassification, architecture)
    rows = [{"input_ids": list(range(10, 10 + size)), "labels": [1] * size} for size in (5, 9, 7, 6)]
    _train_a_step(model, rows, transformers.DataCollatorForTokenClassification(_tokenizer()))
    batch = {"input_ids": torch.arange(10, 18)[None]}
    assert model.eval()(**batch).logits.shape == (1, 8, 3)
    _saved_and_loaded(AutoModelForTokenClassification, model, batch)


def classifiers_without_the_package(architecture: str) -> str:
    """Load classifiers without the package, compare their logits with the package's, and save and load them again."""
    code = """
import torch, transformers
for file in sorted(__import__("pathlib").Path(".").glob("*.pt")):
    kind, logits = torch.load(file)
    for folder in (file.stem, file.stem + "-again"):
        model = getattr(transformers, kind).from_pretrained(folder, trust_remote_code=True).eval()
        torch.testing.assert_close(model(torch.arange(10, 18)[None]).logits, logits)
        model.save_pretrained(file.stem + "-again")
print("ok")
"""
    with tempfile.TemporaryDirectory() as scratch:
        for auto_class in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
            model = _classifier(auto_class, architecture).eval()
            folder = Path(scratch, auto_class.__name__)
            model.save_pretrained(folder)
            with torch.no_grad():
                logits = model(torch.arange(10, 18)[None]).logits
            torch.save((auto_class.__name__, logits), f"{folder}.pt")
        assert _elsewhere(code, Path(scratch)).strip().endswith("ok")
    return "both heads of each"


# ---- shared by the checks ----


def _coder(**fields):
    torch.manual_seed(5)
    coder = hrm_hf.HrmGoCoderForCausalLM(hrm_hf.HrmGoCoderConfig(**{**GO, **fields})).eval()
    for parameter in coder.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2)
    return coder


def _prompt() -> torch.Tensor:
    return torch.arange(100, 110)[None]


def _warnings_of(call: Callable) -> str:
    """Run a call, and return the warnings that it logs or issues with `warnings`."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger("transformers"), logging.getLogger("hrm_hf")]
    for one in loggers:
        one.addHandler(handler)
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        logging.disable(disabled)
        for one in loggers:
            one.removeHandler(handler)
    return " ".join([*lines, *(str(warning.message) for warning in caught)])


def _extractor(model):
    return hrm_hf.registry.architecture_of(model).feature_extractor.from_config(model.config)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, **{f"w{i}": i for i in range(80) if i != PAD}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="<pad>")


def _classifier(auto_class, name: str):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TEXT[name], num_labels=3, pad_token_id=PAD)
    return auto_class.from_config(config)


def _train_a_step(model, rows: list[dict], collator) -> None:
    before = model.score.weight.detach().clone()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to="none", learning_rate=0.1,
            save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=1,
        )  # fmt: skip
        trainer = Trainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        assert "eval_loss" in trainer.state.log_history[-2] | trainer.state.log_history[-1]
        assert trainer.predict(rows).predictions.shape[-1] == 3
    assert not torch.equal(model.score.weight, before)


def _saved_and_loaded(auto_class, model, batch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = auto_class.from_pretrained(folder).eval()
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits)


def _elsewhere(code: str, folder: Path) -> str:
    """Run code in a process that cannot import the package, and return its output."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE + code], cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, env={**os.environ, "HF_HOME": str(folder / "hf_home")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr.strip().splitlines()[-1]
    return ended.stdout


# Claim, function, architectures, and whether the check starts processes.
CHECKS = (
    ("generate: scores for compute_transition_scores", transition_scores, ("hrm_go_coder",), False),
    ("generate: criteria see prompt and code", stopping_criteria, ("hrm_go_coder",), False),
    ("generate: embeddings, said what happens", embeddings, ("hrm_go_coder",), False),
    ("generate: beyond the window, said what happens", window, ("hrm_go_coder",), False),
    ("pipeline by remote code, without the package", pipelines_without_the_package, ("trm_puzzle",), True),
    ("hidden states [B, T, D], and streams", hidden_states, ("rlm_mhc",), False),
    ("modules kept in float32 exist", float32_modules, ("rlm_mhc",), False),
    ("AutoModelForSequenceClassification", sequence_classification, tuple(TEXT), False),
    ("AutoModelForTokenClassification", token_classification, tuple(TEXT), False),
    ("classifiers by remote code, without the package", classifiers_without_the_package, tuple(TEXT), True),
)
