"""SFT, DPO and GRPO by TRL: models learn, and training computes the same likelihoods as generation.

Referees: TRL's own metrics and likelihoods, transformers' generation, and the forward of each model.
"""

import json
import math
import runpy
import sys
from pathlib import Path

import every
import pytest
import tiny_go
import torch
import yaml
from datasets import Dataset
from tiny_answers import BYTES, CODES, PAIRS, RUN, answers, preferences, prompts, write
from transformers import AutoModelForCausalLM, AutoTokenizer


pytest.importorskip("trl")
from trl import DPOConfig, GRPOConfig, SFTConfig

from hrm_hf.golang.rewards import length_reward, regex_reward
from hrm_hf.io.usage import UsageError
from hrm_hf.models.processing_hrm_go_coder import TOKEN_IDS
from hrm_hf.text.arguments import AnswerDataArguments
from hrm_hf.text.post_training import DpoTrainer, GrpoTrainer, SftTrainer
from hrm_hf.trainer.adapters import TuningArguments, with_adapters
from hrm_hf.trainer.recipes import ModelArguments, load_recipe, parse_recipe


ROOT = Path(__file__).parents[2]


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def sft(architecture: str, out: Path, model=None, rows: Dataset | None = None, **options) -> SftTrainer:
    config = SFTConfig(str(out), **{**RUN, "max_length": 64, "learning_rate": 1e-2, **options})
    return SftTrainer(
        model if model is not None else every.model(architecture),
        config,
        train_dataset=rows if rows is not None else answers(architecture),
        processing_class=every.processor(architecture),
    )


# ---- supervised fine-tuning ----


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_fine_tuning_teaches_the_answers(architecture, tmp_path):
    trainer = sft(architecture, tmp_path, max_steps=60)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < 0.2 * losses[0]
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    assert model.config.use_cache is False  # TRL turns it off for training; the saved config, tested below, has it on
    for number, (prompt, said) in enumerate(PAIRS[architecture]):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        # The Go coder generates a hidden plan, and ends its code with EOS.
        expected = CODES[number] if architecture == "hrm_go_coder" else said
        assert tokenizer.decode(written[0, ids.shape[1] :]) == expected + tokenizer.eos_token
    trainer.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True


def test_fine_tuning_learns_by_the_loss_of_the_model(tmp_path):
    model = every.model("hrm_lm", halt_exploration_prob=0.0)
    gate = model.model.q_head.weight.detach().clone()
    trainer = sft("hrm_lm", tmp_path, model, max_steps=1)
    batch = trainer.data_collator(list(trainer.train_dataset))
    expected = model.train()(**batch)
    trainer.train()
    for name in ("loss", "lm_loss", "deep_supervision_loss", "q_halt_loss", "q_continue_loss", "ponder_loss"):
        assert logged(trainer, name)[0] == pytest.approx(expected[name].item(), rel=1e-4)
    assert not torch.equal(model.model.q_head.weight, gate)


@pytest.mark.parametrize("architecture", BYTES)
def test_accumulated_batches_are_one_batch(architecture, tmp_path):
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9}
    pairs = [*PAIRS[architecture], ("the sky at night: ", "a long and rather dark answer")]
    rows = Dataset.from_list([{"prompt": prompt, "completion": said} for prompt, said in pairs])
    overrides = {"halt_exploration_prob": 0.0} if architecture == "hrm_lm" else {}
    runs = []
    for batch, accumulated in ((4, 1), (2, 2)):
        trainer = sft(
            architecture, tmp_path, every.model(architecture, **overrides), rows, per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated, **options,
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    whole, parts = runs
    names = {name for name in whole.state.log_history[0] if name.endswith("loss")} | {"grad_norm"}
    assert (architecture == "rlm_mhc") == (names == {"loss", "grad_norm"})
    for name in names:
        assert logged(parts, name)[0] == pytest.approx(logged(whole, name)[0], rel=1e-4)
    for one, other in zip(whole.model.parameters(), parts.model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_an_adapter_of_four_bit_weights_learns_and_keeps_its_precision(tmp_path):
    pytest.importorskip("bitsandbytes")
    from hrm_hf.trainer.adapters import quantization_config

    every.save("hrm_lm", tmp_path / "base")
    arguments = TuningArguments(lora_rank=4, load_in="4bit")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=quantization_config(arguments, tmp_path / "base")
    )
    trainer = sft("hrm_lm", tmp_path / "out", with_adapters(model, arguments), max_steps=8)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert trained and {parameter.dtype for parameter in trained} == {torch.float32}
    trainer.train()
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


# ---- preferences ----


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_preferences_raise_the_margin(architecture, tmp_path):
    model, reference = every.model(architecture), every.model(architecture)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = DpoTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(str(tmp_path), **{**RUN, "max_length": 64, "learning_rate": 1e-3, "max_steps": 8}),
        train_dataset=preferences(architecture),
        processing_class=every.processor(architecture),
    )
    trainer.train()
    # Both likelihoods are equal at first, although hrm_lm explores depths in training.
    assert logged(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    margins = logged(trainer, "rewards/margins")
    assert margins[-1] > 0.1 > abs(margins[0]) and logged(trainer, "rewards/accuracies")[-1] == 1
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and not [name for name in changed if "q_head" in name or "refinement_head" in name]
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())


# ---- rewards ----


def grpo(architecture: str, out: Path, rewards, model=None, trainer_class=GrpoTrainer, rows=None, **options):
    defaults = {"num_generations": 4, "max_completion_length": 12, "max_steps": 1, "beta": 0.0}
    return trainer_class(
        model if model is not None else every.model(architecture),
        reward_funcs=rewards,
        args=GRPOConfig(str(out), **{**RUN, **defaults, **options}),
        train_dataset=prompts(architecture) if rows is None else rows,
        processing_class=every.processor(architecture),
    )


class Recording(GrpoTrainer):
    """Record the likelihoods of a step's completions by their ids."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        labels = ids.masked_fill(mask == 0, -100)
        assert model.training
        with torch.no_grad():
            values = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        width = inputs["completion_ids"].shape[1]
        self.weighed = {
            tuple(row[keep.bool()].tolist()): value[-width:][keep.bool()]
            for row, keep, value in zip(inputs["completion_ids"], inputs["completion_mask"], values)
        }
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("architecture", [*every.CAUSAL_LMS, "unified Go coder"])
def test_training_log_probabilities_match_those_of_generation(architecture, tmp_path):
    name = "hrm_go_coder" if "Go" in architecture else architecture
    model = tiny_go.model(3, awake=True, **tiny_go.VARIANTS["unified"]) if "Go" in architecture else every.model(name)
    # In training some tokens draw a random minimum of segments, which differs in every forward pass.
    model.config.halt_exploration_prob = 0.0
    trainer = grpo(
        name, tmp_path, length_reward(6), model, Recording, num_generations=8, per_device_train_batch_size=8
    )
    written, generate = {}, type(model).generate

    def recorded(self, input_ids, *args, generation_config, **kwargs):
        generation_config.return_dict_in_generate = generation_config.output_logits = True
        output = generate(self, input_ids, *args, generation_config=generation_config, **kwargs)
        said = output.sequences[:, input_ids.shape[1] :]
        values = torch.stack(output.logits, dim=1).log_softmax(-1).gather(-1, said.unsqueeze(-1)).squeeze(-1)
        written.update(zip(map(tuple, said.tolist()), values))
        return output.sequences

    type(model).generate = recorded
    try:
        trainer.train()
    finally:
        type(model).generate = generate
    assert len(trainer.weighed) == 8
    for ids, values in trainer.weighed.items():
        sampled = next(value for said, value in written.items() if said[: len(ids)] == ids)
        torch.testing.assert_close(values, sampled[: len(ids)], rtol=0, atol=1e-4)


class Compared(GrpoTrainer):
    """Record the likelihoods that a step compares with the reference."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.compared = dict(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def early_bytes(completion_ids, **_) -> list[float]:
    """Return a different reward for each completion."""
    return [-sum(ids) / len(ids) / 256 for ids in completion_ids]


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_rewards_are_learned_against_the_model_at_the_start(lora_rank, tmp_path):
    base = every.save("hrm_lm", tmp_path / "base")
    start = AutoModelForCausalLM.from_pretrained(base)
    model = with_adapters(AutoModelForCausalLM.from_pretrained(base), TuningArguments(lora_rank=lora_rank))
    options = {"max_steps": 2, "beta": 0.1, "learning_rate": 1e-2}
    trainer = grpo("hrm_lm", tmp_path / "out", early_bytes, model, Compared, **options)
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[-1] > 1e-4
    seen = trainer.compared
    ids = torch.cat([seen["prompt_ids"], seen["completion_ids"]], dim=1)
    mask = torch.cat([seen["prompt_mask"], seen["completion_mask"]], dim=1)
    with torch.no_grad():
        weighed = start(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    weighed = weighed.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -seen["completion_ids"].shape[1] :]
    kept = seen["completion_mask"].bool()
    torch.testing.assert_close(seen["ref_per_token_logps"][kept], weighed[kept], rtol=0, atol=1e-4)


def test_go_coder_samples_plan_and_code_and_stops_after_its_code(tmp_path):
    seen = []

    def reward(completion_ids, **_):
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    model = sft("hrm_go_coder", tmp_path, max_steps=40)
    model.train()
    model = model.model
    trainer = grpo("hrm_go_coder", tmp_path, reward, model, max_completion_length=24, temperature=0.1)
    trainer.train()
    assert model.generation_config.eos_token_id == TOKEN_IDS["</s>"] and "generate" not in vars(model)
    good = [ids for ids in seen if TOKEN_IDS["</PLAN>"] in ids and ids[-1] == TOKEN_IDS["</CODE>"]]
    assert len(good) >= 3 and all(ids.count(TOKEN_IDS["<CODE>"]) == 1 for ids in good)


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_rewarded_answer_is_learned(architecture, tmp_path):
    prompt, said = PAIRS[architecture][0][0], [completion for _, completion in PAIRS[architecture]]
    rows = Dataset.from_list([{"prompt": prompt, "completion": completion} for completion in said])
    taught = sft(architecture, tmp_path, rows=rows, max_steps=40)
    taught.train()
    trainer = grpo(
        architecture, tmp_path, regex_reward("func A|green"), taught.model, max_completion_length=24, max_steps=10,
        num_generations=16, per_device_train_batch_size=16, learning_rate=3e-3, rows=rows.select([0]),
    )  # fmt: skip
    trainer.train()
    rewards = logged(trainer, "reward")
    assert rewards[0] < 0.5 and sum(rewards[-3:]) / 3 > 0.7


# ---- the scripts ----


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Run a script in this process: `script("run_sft", "folder", "recipe", option=value, ...)`."""

    def start(name, folder, recipe, **options):
        path, out = tmp_path / f"{folder}.yaml", tmp_path / folder
        values = yaml.safe_load((ROOT / "training" / "recipes" / f"{recipe}.yaml").read_text())
        values |= {"output_dir": str(out), "disable_tqdm": True, "max_steps": 2, "logging_steps": 1, **options}
        path.write_text(yaml.safe_dump(values))
        monkeypatch.setattr(sys, "argv", [name, "--recipe", str(path)])
        # Not as "__main__", which would block the signals of the tests.
        runpy.run_path(str(ROOT / "training" / f"{name}.py"), run_name=name)["main"]()
        return out

    return start


def test_an_adapter_is_fine_tuned_by_the_script(script, tmp_path):
    base = every.save("hrm_lm", tmp_path / "base")
    rows = write(tmp_path / "rows.jsonl", answers("hrm_lm"))
    out = script("run_sft", "sft", "sft_hrm_lm", model_name_or_path=str(base), train_data=rows, lora_rank=4)
    names = {file.name for file in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "recipe.yaml", "results.json"} <= names
    assert "model.safetensors" not in names
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > every.model("hrm_lm").num_parameters()
    results = json.loads((out / "results.json").read_text())
    assert (results["task"], results["steps"], results["rows"]) == ("sft", 2, 3)
    assert results["last_steps"]["q_halt_loss"] > 0


def test_conversations_are_learned_to_their_end(script, tmp_path):
    base = every.save("rlm_mhc", tmp_path / "base")
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]]
    rows = write(tmp_path / "rows.jsonl", [{"messages": one} for one in turns])
    options = {"model_name_or_path": str(base), "train_data": rows, "max_steps": 60, "learning_rate": 1e-2}
    with pytest.raises(ValueError, match=r"<\|im_end\|>.*--eos_token"):
        script("run_sft", "refused", "sft_hrm_lm", **options)
    out = script("run_sft", "chat", "sft_hrm_lm", eos_token="<|im_end|>", **options)
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    asked = tokenizer.apply_chat_template(turns[0][:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    written = model.generate(asked, max_new_tokens=8, do_sample=False)[0, asked.shape[1] :]
    assert tokenizer.decode(written) == "ho<|im_end|>"


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_preferences_through_the_script_end_in_a_checkpoint_with_its_card(script, tmp_path, lora_rank):
    base = every.save("rlm_mhc", tmp_path / "base")
    rows = write(tmp_path / "rows.jsonl", preferences("rlm_mhc"))
    options = {
        "model_name_or_path": str(base), "train_data": rows, "eval_data": rows, "lora_rank": lora_rank,
        "merge_adapter": bool(lora_rank), "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2,
    }  # fmt: skip
    out = script("run_dpo", "dpo", "dpo_rlm_mhc", **options)
    names = {path.name for path in out.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "recipe.yaml", "results.json", "README.md"} <= names
    assert not {"ref", "adapter_config.json"} & names
    card = (out / "README.md").read_text()
    assert "rewards/margins" in card and "generated_from_trainer" not in card
    results = json.loads((out / "results.json").read_text())["metrics"]
    assert results["rewards/margins"] > 0

    # A run that is killed after the first step and resumed ends with the same weights, and so does its recipe.
    first = AutoModelForCausalLM.from_pretrained(out).state_dict()
    (out / "checkpoint-2" / "manifest.json").unlink()
    recipe = load_recipe(out / "recipe.yaml", set(yaml.safe_load((out / "recipe.yaml").read_text())))
    again = script("run_dpo", "dpo", "dpo_rlm_mhc", **{**recipe, "resume_from_checkpoint": "last-complete"})
    resumed = AutoModelForCausalLM.from_pretrained(again).state_dict()
    assert all(torch.equal(first[name], value) for name, value in resumed.items())


def test_rewards_through_the_script_are_those_of_the_recipe(script, tmp_path):
    pytest.importorskip("tree_sitter_go")
    base = every.save("hrm_go_coder", tmp_path / "base")
    rows = write(tmp_path / "rows.jsonl", prompts("hrm_go_coder"))
    options = {"model_name_or_path": str(base), "train_data": rows, "eval_data": rows, "max_completion_length": 16}
    out = script("run_grpo", "grpo", "grpo_go_coder", **options)
    results = json.loads((out / "results.json").read_text())
    assert results["last_steps"]["rewards/go-syntax/mean"] == results["metrics"]["reward"] == 0
    card = (out / "README.md").read_text()
    assert "generated_from_trainer" not in card and "rewards/go-syntax/mean" in card
    classes = (ModelArguments, AnswerDataArguments, GRPOConfig, TuningArguments)
    values = yaml.safe_load((out / "recipe.yaml").read_text())
    assert values.pop("reward") == ["go-syntax"]
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(values))
    *_, args, _ = parse_recipe(classes, ["--recipe", str(tmp_path / "again.yaml")])
    assert (args.steps_per_generation, args.generation_batch_size) == (2, 16)
    with pytest.raises(ValueError, match=r"max_completion_length=512.*512 positions"):
        script("run_grpo", "long", "grpo_go_coder", **{**options, "max_completion_length": 512})


def test_messages_without_a_plan_are_rejected_for_the_go_coder(script, tmp_path):
    base = every.save("hrm_go_coder", tmp_path / "base")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "func A() {}"}]
    rows = write(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(ValueError, match=r"messages.*<PLAN>"):
        script("run_sft", "sft", "sft_hrm_lm", model_name_or_path=str(base), train_data=rows)


def test_preferences_need_trained_weights(script, tmp_path):
    rows = write(tmp_path / "rows.jsonl", preferences("rlm_mhc"))
    with pytest.raises(ValueError, match=r"dpo .*--model_name_or_path"):
        script("run_dpo", "dpo", "dpo_rlm_mhc", model_type="rlm_mhc", tokenizer_name="byte", train_data=rows)


@pytest.mark.parametrize(
    ("name", "recipe", "options", "message"),
    [
        ("run_sft", "sft_hrm_lm", {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: .*label_smoothing="),
        ("run_dpo", "dpo_rlm_mhc", {"model_init_kwargs": {"dtype": "bfloat16"}}, "model_init_kwargs=.*bfloat16"),
        (
            "run_grpo",
            "grpo_go_coder",
            {"beta": 0.1, "config_overrides": {"plan_budget": 9}},
            "beta=0.1: .*config_overrides",
        ),
    ],
)
def test_option_without_effect_is_rejected(script, name, recipe, options, message):
    with pytest.raises(ValueError, match=message):
        script(name, "refused", recipe, model_name_or_path="none", train_data="none.jsonl", **options)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(("name", "recipe"), [("run_sft", "sft_hrm_lm"), ("run_dpo", "dpo_rlm_mhc")])
def test_rows_without_room_for_an_answer_are_rejected(script, name, recipe, held_out, tmp_path):
    base = every.save("rlm_mhc", tmp_path / "base")
    row = {"chosen": "ab", "rejected": "cd"} if name == "run_dpo" else {"completion": "ab"}
    files = [write(tmp_path / f"{n}.jsonl", [{"prompt": "x" * n, **row}] * 3) for n in (2, 30)]
    data = dict(zip(("train_data", "eval_data") if held_out else ("eval_data", "train_data"), files))
    with pytest.raises(ValueError, match=rf"max_length=12: .* 3 rows of {'eval' if held_out else 'train'}_data"):
        script(name, "short", recipe, model_name_or_path=str(base), max_length=12, **data)


@pytest.mark.parametrize("option", ["ema_rate", "adam_atan2", "lr_multipliers"])
def test_option_of_our_own_trainer_is_unknown(script, option):
    with pytest.raises(UsageError, match=f"unknown key '{option}'"):
        script("run_sft", "refused", "sft_hrm_lm", **{option: 0.9})
