"""Every tensor of the original HRM and TRM is reproduced. Referee: the original code (tests/fixtures)."""

import golden
import pytest
import torch
from golden import BATCH_SIZE, CASES, HRM

from hrm_hf.puzzles.convert import original_name
from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD


# Maximum absolute differences recommended by the golden files. Recursion amplifies rounding errors, so the bound is
# wider after the first step.
FIRST_STEP, LATER_STEPS, GRADIENTS = 1e-4, 2e-3, 5e-4
# One position of this case is so sensitive that relative changes of 6e-8 in the weights move our result 2e-4 to 6e-3
# from the original (12 draws). 99.9 % of the elements still have to be within LATER_STEPS.
SENSITIVE = {"trm-attn/eval/step4/z_L", "trm-attn/eval/step4/z_H", "trm-attn/eval/step4/logits"}
SENSITIVE_BOUND = 1e-2
# In bfloat16, the original's logits differ by up to 1.0 from its own float32 logits, so the mean is compared.
BFLOAT16_MEAN = 0.05


def eval_steps(case, attention, num_steps=4, carry=None, **overrides):
    """Run ACT steps on batch A in eval mode, by default four from an initial carry."""
    model = golden.model(case, attention, **overrides)
    ours = {}
    for step in range(1, num_steps + 1):
        with torch.no_grad():
            output = model(**golden.batch(case, "A"), carry=carry)
        carry = output.carry
        ours |= {f"step{step}/{name}": value for name, value in outputs(output).items()}
    return ours


def eval_group(case, attention):
    model, batch = golden.model(case, attention), golden.batch(case, "A")
    rows = model.model.puzzle_rows(batch["puzzle_identifiers"], BATCH_SIZE)
    embeddings, _ = model.model.embed(batch["input_ids"], rows, torch.float32)
    return {"input_embeddings": embeddings, **eval_steps(case, attention)}


def eval_softmax_group(case, attention):
    ours = eval_steps(case, attention, num_steps=1, loss_type="softmax")
    return {"step1/loss": ours["step1/loss"], "step1/lm_loss": ours["step1/metrics/lm_loss"]}


def train_group(case, attention):
    """Run five calls in train mode on batches A, B, C, B, C with one carry, without weight updates."""
    model = golden.model(case, attention).train()
    ours, carry = {}, None
    for step, letter in enumerate("ABCBC", start=1):
        output = model(**golden.batch(case, letter), carry=carry)
        carry = output.carry
        found = outputs(output)
        found |= {f"current_data/{name}": value for name, value in carry.current_data.items()}
        found["current_data/inputs"] = found.pop("current_data/input_ids")
        (output.loss * BATCH_SIZE).backward()
        found |= {f"grad/{original_name(name)}": p.grad for name, p in model.named_parameters()}
        rows = model.model.puzzle_emb.weight.grad
        found |= {"grad/puzzle_emb_rows": rows._values(), "grad_ids/puzzle_emb_rows": rows._indices()[0]}
        ours |= {f"step{step}/{name}": value for name, value in found.items()}
        model.zero_grad()
        model.model.puzzle_emb.weight.grad = None
    return ours


def update_group(case, attention):
    """Run two optimizer steps, on batches A and B, with both optimizers of the original recipe."""
    model = golden.model(case, attention).train()
    table = model.model.puzzle_emb.weight
    optimizer = CompositeOptimizer(
        [
            SignSGD([table], lr=1e-2, weight_decay=0.1),
            AdamATan2(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        ]
    )
    ours, carry = {}, None
    for step, letter in enumerate("AB", start=1):
        output = model(**golden.batch(case, letter), carry=carry)
        carry = output.carry
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = {f"state_dict/{original_name(name)}": value.clone() for name, value in model.state_dict().items()}
        found |= {"puzzle_emb_weights": table.clone(), "loss": output.loss * BATCH_SIZE}
        ours |= {f"step{step}/{name}": value for name, value in found.items()}
    return ours


def learned_group(case, attention):
    positions = golden.tensors(case, "learned/embed_pos")
    positions = {"embed_pos" + name: value for name, value in positions.items()}
    return positions | variant(case, attention, num_steps=1, extra_weights=positions, pos_encodings="learned")


def two_slots_group(case, attention):
    table = {"puzzle_emb.weights": golden.tensors(case, "two_slots/")["puzzle_emb.weights"]}
    return table | variant(case, attention, num_steps=1, extra_weights=table, puzzle_emb_ndim=96)


def no_puzzle_emb_group(case, attention):
    return variant(case, attention, num_steps=1, puzzle_emb_ndim=0)


def bf16_group(case, attention):
    return variant(case, attention, forward_dtype="bfloat16")


def variant(case, attention, **overrides):
    return {f"eval/{name}": value for name, value in eval_steps(case, attention, **overrides).items()}


def state_dict_group(case, attention):
    return {original_name(name): value for name, value in golden.model(case, attention).state_dict().items()}


def outputs(output) -> dict[str, torch.Tensor]:
    """Return the results of one call under the original's names; losses are sums over rows."""
    found = {name: output[name] for name in ("logits", "q_halt_logits", "q_continue_logits")}
    found |= {name: getattr(output.carry, name) for name in ("z_H", "z_L", "halted", "steps")}
    found["loss"] = output.loss * BATCH_SIZE
    for name in ("lm_loss", "q_halt_loss", "q_continue_loss"):
        if getattr(output, name) is not None:
            found[f"metrics/{name}"] = getattr(output, name) * BATCH_SIZE
    if output.target_q_continue is not None:
        found["target_q_continue"] = output.target_q_continue
    return found | {f"metrics/{name}": value for name, value in output.metrics.items()}


GROUPS = {
    "state_dict": state_dict_group,
    "eval": eval_group,
    "eval_softmax": eval_softmax_group,
    "train": train_group,
    "update": update_group,
    "learned": learned_group,
    "two_slots": two_slots_group,
    "no_puzzle_emb": no_puzzle_emb_group,
    "bf16": bf16_group,
}
INPUTS = {"batch_A", "batch_B", "batch_C"}  # inputs, which are compared as `current_data`


def tolerance(name: str) -> float:
    """Return the allowed absolute difference for a floating-point tensor, named case/group/name."""
    _, group, rest = name.split("/", 2)
    if name in SENSITIVE:
        return SENSITIVE_BOUND
    if group == "state_dict":
        return 0.0
    if "/grad/" in name:
        return GRADIENTS
    return FIRST_STEP if "step1/" in rest or group == "update" else LATER_STEPS


def complaint(name: str, mine: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return what is wrong with our tensor, or None; the name is case/group/name."""
    if mine.shape != expected.shape:
        return f"{name}: shape {tuple(mine.shape)}, expected {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return None if torch.equal(mine.to(expected.dtype), expected) else f"{name}: differs, has to be equal"
    difference = (mine.double() - expected.double()).abs()
    if "/bf16/" in name:
        bound = BFLOAT16_MEAN * max(1.0, expected.double().abs().mean().item())
        if mine.dtype != expected.dtype or difference.mean() > bound:
            return f"{name}: {mine.dtype}, mean difference {difference.mean():.2e} > {bound:.2e}"
        return None
    if name in SENSITIVE and difference.flatten().quantile(0.999) > LATER_STEPS:
        return f"{name}: more than 0.1 % of the elements differ by over {LATER_STEPS}"
    if not difference.max() <= tolerance(name):  # a NaN has to fail
        return f"{name}: {difference.max():.2e} > {tolerance(name):.0e}"
    return None


def relative_difference(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the maximum difference relative to the largest element."""
    return ((mine.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)).item()


def groups(case) -> set[str]:
    return {name.split("/")[0] for name in golden.tensors(case)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_group_of_the_golden_file_has_a_test(case):
    assert groups(case) - GROUPS.keys() - INPUTS == set()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("case", "group"), [(case, group) for case in CASES for group in GROUPS if group in groups(case)], ids=str
)
def test_every_tensor_of_the_original_is_reproduced(case, group, attention, record_property):
    expected = golden.tensors(case, f"{group}/")
    ours = GROUPS[group](case, attention)
    assert expected.keys() <= ours.keys(), f"never compared: {sorted(expected.keys() - ours.keys())}"
    complaints = [complaint(f"{case}/{group}/{name}", ours[name].detach(), expected[name]) for name in expected]
    assert not any(complaints), [text for text in complaints if text]
    floats = [name for name in expected if expected[name].is_floating_point()]
    worst, name = max((relative_difference(ours[name].detach(), expected[name]), name) for name in floats)
    record_property("tensors_compared", len(expected))
    record_property("worst_relative_difference", worst)
    print(
        f"\n{case} {group} {attention}: {len(expected)} tensors, worst {worst:.1e} of the largest element, in {name}"
    )


def test_gradients_of_a_puzzle_that_is_in_the_batch_twice_are_summed():
    # Batch A has puzzle 3 in rows 0 and 2; the table's gradient is their sum.
    model = golden.model(HRM).train()
    (model(**golden.batch(HRM, "A")).loss * BATCH_SIZE).backward()
    rows = golden.tensors(HRM, "train/step1/grad/")["puzzle_emb_rows"]
    dense = model.model.puzzle_emb.weight.grad.to_dense()
    torch.testing.assert_close(dense[3], rows[0] + rows[2], atol=GRADIENTS, rtol=0)
    assert dense[[1, 2, 4, 6, 7]].abs().max() == 0
