"""The trainer for a model with named parameter groups and a loss of parts averaged over their targets.

Referees: sums over single rows, torch's AdamW fed by hand, and one process with twice the batch.
"""

from types import SimpleNamespace

import pytest
import started
import tiny_go
import torch
from datasets import Dataset
from scripted_go import generated
from torch import nn
from transformers import Trainer, TrainerCallback

from hrm_hf.golang.data.streams import IGNORED, GoCoderCollator
from hrm_hf.golang.data.trajectories import failed_record
from hrm_hf.golang.trainer import (
    GoCoderTrainer,
    GoTrainingArguments,
    GoValidationCallback,
    refinement_scale,
    validity,
    write_code,
)
from hrm_hf.models.processing_hrm_go_coder import SPECIAL_TOKENS, TOKEN_IDS, Feedback
from hrm_hf.text.causal_lm import load_causal_lm
from hrm_hf.text.trainer import LengthGroupedBatches
from hrm_hf.trainer.recipes import ModelArguments


ROWS = 12
FAILED = Feedback(syntax_ok=False, category="other")


def rows(count: int = ROWS, evaluation: bool = False) -> Dataset:
    built = [tiny_go.builder().build(record) for record in tiny_go.records(count)]
    if not evaluation:
        built = [{name: value for name, value in row.items() if not name.startswith("code_")} for row in built]
    return Dataset.from_list(built)


def trainer(folder, model=None, data=None, **arguments):
    """Return a CPU trainer that logs every step, without warmups by default."""
    options = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3,
        "logging_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 5, "learning_rate": 1e-3,
        "warmup_steps": 0, "lr_scheduler_type": "constant", "save_strategy": "no", "refinement_ramp": 0,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    args = GoTrainingArguments(**{**options, **arguments})
    return GoCoderTrainer(
        tiny_go.model() if model is None else model,
        args,
        train_dataset=rows() if data is None else data,
        eval_dataset=rows(evaluation=True),
        data_collator=GoCoderCollator(3, plain_steps=args.refinement_warmup),
    )


def part_means(model, dataset) -> dict[str, float]:
    """Return each loss part as a mean over all its targets, computed row by row."""
    counts = {"plan_loss": "plan_tokens", "code_loss": "code_tokens", "refinement_loss": "decisions"}
    sums, totals = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0)
    for row in dataset:
        batch = GoCoderCollator(3)([row])
        batch = {name: value for name, value in batch.items() if not name.startswith("scored")}
        with torch.no_grad():
            output = model(**batch)
        for name, count in counts.items():
            sums[name] += output[name].item() * output.metrics[count].item()
            totals[name] += output.metrics[count].item()
    return {name: sums[name] / totals[name] for name in counts}


# ---- parts of the loss ----


def test_evaluation_reports_each_loss_part_as_a_mean_over_its_targets(tmp_path):
    model = tiny_go.model()
    found = trainer(tmp_path, model).evaluate()
    for name, value in part_means(model, rows()).items():
        assert found[f"eval_{name}"] == pytest.approx(value, rel=1e-5)
    assert found["eval_decisions"] == sum(len(row["decision_labels"]) for row in rows())
    tokens = found["eval_plan_tokens"], found["eval_code_tokens"]
    mean = (found["eval_plan_loss"] * tokens[0] + found["eval_code_loss"] * tokens[1]) / sum(tokens)
    assert found["eval_lm_loss"] == pytest.approx(mean, rel=1e-6)


def test_training_logs_each_loss_part_as_a_mean_over_its_targets(tmp_path):
    model = tiny_go.model()
    expected = part_means(model, rows())
    made = trainer(tmp_path, model, learning_rate=0.0, logging_steps=3)
    made.train()
    logged = next(entry for entry in made.state.log_history if "loss" in entry)
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_decision_accuracy_matches_the_head(tmp_path):
    model = tiny_go.model()
    right = total = 0
    for row in rows():
        if row["decision_labels"]:
            batch = GoCoderCollator(3)([row])
            with torch.no_grad():
                chosen = model(**batch).refinement_logits.argmax(dim=-1)
            right += (chosen == batch["decision_labels"]).sum().item()
            total += len(row["decision_labels"])
    assert trainer(tmp_path, model).evaluate()["eval_refinement_accuracy"] == pytest.approx(right / total)


def test_a_loss_part_without_targets_is_not_logged(tmp_path):
    data = rows().filter(lambda row: not row["decision_labels"])
    made = trainer(tmp_path, data=data, max_steps=1, per_device_train_batch_size=3)
    made.train()
    entry = next(entry for entry in made.state.log_history if "loss" in entry)
    assert {"plan_loss", "code_loss"} <= entry.keys() and "refinement_loss" not in entry


@pytest.mark.parametrize("plain", [False, True])
def test_accumulated_batches_are_averaged(plain, tmp_path):
    """Each batch averages a part over its own targets, so one large batch has a slightly different loss."""
    model, by_hand = tiny_go.model(), tiny_go.model()
    made = trainer(tmp_path, model, gradient_accumulation_steps=3, max_steps=1, max_grad_norm=0.0)
    if plain:
        made = Trainer(model, made.args, made.data_collator, made.train_dataset)
    assert made.model_accepts_loss_kwargs is False
    seen = {}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.update({name: p.grad.clone() for name, p in model.named_parameters()})

    made.add_callback(Watch())
    made.train()
    by_hand.train()
    data = list(rows())
    parts = [by_hand(**GoCoderCollator(3)(data[start : start + 4])).loss for start in (0, 4, 8)]
    torch.stack(parts).mean().backward()
    assert made.state.log_history[0]["loss"] == pytest.approx(sum(parts).item() / 3, rel=1e-4)
    for name, p in by_hand.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-4, atol=1e-7)


def test_loss_weights_can_be_set_for_a_run(tmp_path):
    made = trainer(tmp_path, plan_loss_weight=0.0, refinement_loss_weight=0.7)
    config = made.model.config
    assert (config.plan_loss_weight, config.code_loss_weight, config.refinement_loss_weight) == (0.0, 0.4, 0.7)


def one_has_no_attempts(folder: str, accumulation: int) -> None:
    """Train two steps on pairs of rows, the second without a decision, and evaluate five rows."""
    torch.set_num_threads(1)
    builder = tiny_go.builder()
    records = [tiny_go.record(number, kind) for number, kind in enumerate(["cd", "", "d", "", "rcd", ""])]
    built = [builder.build(record) for record in records]
    made = trainer(
        folder, data=Dataset.from_list(built).remove_columns(["code_start", "code_end", "code_bytes"]), max_steps=3,
        per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, per_device_eval_batch_size=2,
        max_grad_norm=0.0,
    )  # fmt: skip
    made.train()
    metrics = {
        name: value
        for name, value in made.evaluate(rows(5, evaluation=True)).items()
        if not name.endswith(("runtime", "second", "preparation_time", "epoch"))
    }
    name = f"{made.accelerator.num_processes}-{made.accelerator.process_index}"
    torch.save((tiny_weights(made.model), metrics), f"{folder}/{name}.pt")


def tiny_weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_process_without_decisions_trains_and_counts_nothing_twice(tmp_path):
    one_has_no_attempts(str(tmp_path), accumulation=2)
    result = started.run(one_has_no_attempts, str(tmp_path), 1, processes=2)
    assert result.returncode == 0, result.stderr
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert second[1] == first[1] == pytest.approx(alone[1], rel=1e-3)
    assert first[1]["eval_decisions"] == alone[1]["eval_decisions"] > 0
    for name, p in alone[0].items():
        torch.testing.assert_close(first[0][name], second[0][name], rtol=0, atol=0)
        torch.testing.assert_close(first[0][name], p, rtol=1e-3, atol=5e-5)


# ---- groups of parameters ----


def rates(made) -> dict[str, tuple[float, float]]:
    """Return learning rate and weight decay by parameter name."""
    names = {p: name for name, p in made.model.named_parameters()}
    return {
        names[p]: (group["lr"], group["weight_decay"])
        for group in made.create_optimizer().param_groups
        for p in group["params"]
    }


def test_each_group_has_its_learning_rate_and_vectors_have_no_weight_decay(tmp_path):
    made = trainer(tmp_path)
    found = rates(made)
    assert found.keys() == dict(made.model.named_parameters()).keys()
    factors = {"planner": 1.2, "generator": 0.8, "refinement": 1.0, "shared": 1.0}
    for name, p in made.model.named_parameters():
        factor = factors[made.model.parameter_group(name)]
        assert found[name] == (pytest.approx(1e-3 * factor), 0.1 if p.ndim >= 2 else 0.0), name


def test_groups_without_a_multiplier_use_the_base_learning_rate(tmp_path):
    made = trainer(tmp_path, lr_multipliers="generator=0.5")
    for name, (rate, _) in rates(made).items():
        assert rate == pytest.approx(5e-4 if made.model.parameter_group(name) == "generator" else 1e-3)


def test_the_logged_learning_rate_is_the_base_rate(tmp_path):
    made = trainer(tmp_path)
    made.train()
    assert all(entry["learning_rate"] == 1e-3 for entry in made.state.log_history if "loss" in entry)


def test_a_step_matches_adamw_with_these_groups(tmp_path):
    model, by_hand = tiny_go.model(), tiny_go.model()
    made = trainer(tmp_path, model, max_steps=2, per_device_train_batch_size=ROWS, max_grad_norm=0.0)
    made.train()
    factors = {"planner": 1.2, "generator": 0.8, "refinement": 1.0, "shared": 1.0}
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p],
                "lr": 1e-3 * factors[by_hand.parameter_group(name)],
                "weight_decay": 0.1 if p.ndim >= 2 else 0.0,
            }
            for name, p in by_hand.named_parameters()
        ],
        betas=(0.9, 0.95),
    )
    by_hand.train()
    for _ in range(2):
        by_hand(**GoCoderCollator(3)(list(rows()))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(by_hand.named_parameters())
    for name, p in model.named_parameters():
        # If a gradient is nearly zero, Adam turns rounding errors into a share of the full step, which is 1e-3.
        torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=2e-5)


class Grouped(nn.Module):
    """Two linear layers with parameter groups."""

    def __init__(self, group_of, tied: bool = False):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            self.two.weight = self.one.weight
        self.parameter_group = group_of


@pytest.mark.parametrize(
    ("group_of", "tied", "message"),
    [
        (lambda name: "planers", False, "one.weight.*'planers'.*planner, generator"),
        (lambda name: None, False, "one.weight.*None.*planner, generator"),
        (
            {"one.weight": "planner", "two.weight": "generator"}.get,
            True,
            "one.weight.*'planner'.*two.weight.*'generator'",
        ),
    ],
)
def test_a_tensor_in_two_groups_or_in_none_is_an_error(tmp_path, group_of, tied, message):
    made = trainer(tmp_path)
    grouped = Grouped(group_of, tied)
    grouped.config = made.model.config  # the trainer reads the model's abilities from it
    made.model = grouped
    with pytest.raises(ValueError, match=message):
        made.create_optimizer()


# ---- the refinement warm-up ----


def test_the_refinement_loss_starts_after_the_warmup_and_grows_linearly():
    assert [refinement_scale(step, 5, 4) for step in range(11)] == [0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert refinement_scale(0, 0, 0) == 1.0


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_contain_no_attempts_until_the_warmup_ends(tmp_path, workers):
    builder = tiny_go.builder()
    data = []
    for record in tiny_go.records(ROWS):
        plain = builder.build(record, refinement=False)
        data.append(builder.build(record) | {f"plain_{name}": plain[name] for name in ("input_ids", "labels")})
    made = trainer(
        tmp_path, data=Dataset.from_list(data).remove_columns(["code_start", "code_end", "code_bytes"]), max_steps=5,
        refinement_warmup=2, refinement_ramp=2, dataloader_num_workers=workers,
    )  # fmt: skip
    seen, scales, forward = [], [], made.model.forward

    def watched(**inputs):
        scales.append(inputs["refinement_scale"])
        seen.append(int((inputs["decision_labels"] != IGNORED).sum()))
        return forward(**inputs)

    made.model.forward = watched
    made.train()
    per_batch = 0 + 1 + 2 + 3
    assert seen == [0, 0, per_batch, per_batch, per_batch] and scales == [0, 0, 0.5, 1, 1]


# ---- order of rows ----


def test_batches_group_rows_by_length_in_an_order_set_by_epoch_and_seed():
    lengths = torch.randint(10, 500, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGroupedBatches(lengths, 16, seed=3)
    order = list(sampler)
    assert sorted(order) == list(range(1000)) and order == list(LengthGroupedBatches(lengths, 16, seed=3))

    def padding(order):
        batches = [[lengths[index] for index in order[start : start + 16]] for start in range(0, len(order), 16)]
        return sum(max(batch) * len(batch) for batch in batches) / sum(lengths)

    assert padding(order) < 1.05 < 1.5 < padding(range(1000))
    firsts = [lengths[order[start]] for start in range(0, 800, 16)]
    assert firsts != sorted(firsts) and firsts != sorted(firsts, reverse=True)
    sampler.epoch = 1
    assert list(sampler) != order and sorted(sampler) == list(range(1000))


@pytest.mark.parametrize("count", [0, 3, 16])
def test_few_rows_are_each_drawn_once(count):
    assert sorted(LengthGroupedBatches(list(range(count)), 8, seed=0)) == list(range(count))


# ---- code that is written and checked ----


class Scripted(nn.Module):
    """Generates scripted token ids, one list per row and call, starting with the longest prompt."""

    def __init__(self, *calls):
        super().__init__()
        self.calls, self.inputs, self.device = list(calls), [], torch.device("cpu")

    def generate(self, input_ids, attention_mask, **options):
        self.inputs.append([row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)])
        return generated(input_ids, self.calls.pop(0), options["pad_token_id"], options["stopping_criteria"])


def ids(text: str) -> list[int]:
    return tiny_go.tokenizer().encode(text, add_special_tokens=False)


def test_code_is_generated_after_the_plan_and_its_prefix():
    builder, records = tiny_go.builder(), [tiny_go.record(1), tiny_go.record(25)]
    plans = ["<INTENT:ADD><STEP>add</PLAN>", "</PLAN>"]
    bodies = ["\n\treturn 1\n}\n</CODE>", " }</CODE>"]
    model = Scripted([ids(plan) for plan in plans], [ids(body) for body in bodies])
    assert write_code(model, builder, records, 20, 8) == [
        "func Add1(a, b int) int {\n\treturn 1\n}\n", "func Add25(a, b int) int { }"
    ]  # fmt: skip
    assert model.inputs[0] == [builder.prompt_ids(record) for record in records]
    decoded = [tiny_go.tokenizer().decode(row) for row in model.inputs[1]]
    assert decoded[0].endswith("<PLAN><INTENT:ADD><STEP>add</PLAN><CODE>func Add1(a, b int) int {")
    assert decoded[1].endswith("<PLAN></PLAN><CODE>func Add25(a, b int) int {")


def test_greedy_generation_matches_full_forward_passes():
    model, builder, record = tiny_go.model(), tiny_go.builder(plan_budget=6), tiny_go.record(1)
    stream = builder.prompt_ids(record)
    text_only = torch.zeros(model.config.vocab_size)
    text_only[: len(SPECIAL_TOKENS)] = -torch.inf
    in_plans = text_only.clone()
    in_plans[[TOKEN_IDS[tag] for tag in TOKEN_IDS if tag.startswith(("<STEP", "<INTENT", "<TARGET"))]] = 0
    for _ in range(6):
        with torch.no_grad():
            stream.append((model(torch.tensor([stream])).logits[0, -1] + in_plans).argmax().item())
    assert not {tiny_go.tokenizer().convert_tokens_to_ids(end) for end in ("</PLAN>", "</s>")} & set(stream[-6:])
    stream += ids("</PLAN><CODE>") + ids(record["code_prefix"])
    body = []
    for _ in range(5):
        with torch.no_grad():
            body.append((model(torch.tensor([stream + body])).logits[0, -1] + text_only).argmax().item())
    other = tiny_go.record(22)  # a longer row, so that there is padding
    other["problem"]["body"] = "and more " * 5
    written = write_code(model, builder, [record, other], 5, 8)
    assert written[0] == record["code_prefix"] + tiny_go.tokenizer().decode(body, skip_special_tokens=True)


def test_rates_count_only_validated_samples():
    good, bad = Feedback(syntax_ok=True), Feedback(syntax_ok=False, category="other")
    assert validity([good, bad, Feedback()]) == {"go/syntax_rate": 0.5}
    typed = [Feedback(syntax_ok=True, types_ok=True), Feedback(syntax_ok=True, types_ok=False, category="other"), bad]
    assert validity(typed) == {"go/syntax_rate": 2 / 3, "go/type_rate": 1 / 3}


def test_a_failed_sample_becomes_a_record_followed_by_its_solution():
    from hrm_hf.golang.data.records import validate_record

    feedback = Feedback(syntax_ok=False, category="unexpected token", line=2, message="expected '}'")
    record = tiny_go.record(1)
    made = failed_record(record, record["code_prefix"] + " )", feedback, "@7")
    validate_record(made)
    assert made["id"] == "sum.go:1@7" and record["attempts"] == []
    assert [attempt["decision"] for attempt in made["attempts"]] == ["CONTINUE", "DONE"]
    assert made["attempts"][0]["feedback"]["message"] == "expected '}'"
    assert tiny_go.builder().build(made)["decision_labels"] == [0, 2]


def test_held_out_prompts_never_enter_the_replay_file(tmp_path):
    made = trainer(tmp_path, validation_frequency=1, validation_prompts=2, replay_file=str(tmp_path / "replay.jsonl"))
    held_out = [tiny_go.record(number) for number in (90, 91, 92)]
    training = [tiny_go.record(number) for number in (1, 2, 3)]
    callback = GoValidationCallback(
        made, tiny_go.builder(plan_budget=4), held_out, lambda codes: [FAILED] * len(codes), training
    )
    state = SimpleNamespace(global_step=2, is_world_process_zero=True)
    control = SimpleNamespace(should_log=True)
    made.args.validation_max_new_tokens = 3
    callback.on_step_end(made.args, state, control, model=made.model)
    from hrm_hf.golang.data.records import read_records

    assert [one["id"] for one in read_records(tmp_path / "replay.jsonl")] == ["sum.go:3@2", "sum.go:1@2"]
    assert control.should_log and made.state.log_history[-1]["go/syntax_rate"] == 0.0


def test_weights_without_tags_are_rejected_for_a_tokenizer_with_tags(tmp_path):
    tiny_go.model(tagged=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tagged=False"):
        load_causal_lm(ModelArguments(model_name_or_path=str(tmp_path)), tiny_go.tokenizer(), block_size=64)
