"""SE-RRM. Referee: tensors of the original (tests/fixtures/README.md), and the symmetry that the paper states."""

import json

import pytest
import tiny
import torch
import torch.nn.functional as F
from golden import FOLDER
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from tolerances import assert_copied

from hrm_hf import AutoModelForPuzzleSolving, SeRrmPuzzleConfig, SeRrmPuzzleForSolving
from hrm_hf.puzzles.original_tensors import se_rrm_tensors


TENSORS = load_file(FOLDER / "se_rrm_tiny.safetensors")
VARIANTS = {
    name: fields
    for name, fields in json.loads((FOLDER / "se_rrm_tiny.json").read_text())["variants"].items()
    if f"{name}/batch/inputs" in TENSORS
}
ROWS = 3
# As the golden file suggests.
FIRST_STEP, LATER_STEPS, GRADIENTS = 1e-4, 2e-3, 5e-4


def group(variant: str, start: str) -> dict[str, torch.Tensor]:
    start = f"{variant}/{start}"
    return {name[len(start) :]: value for name, value in TENSORS.items() if name.startswith(start)}


def ours(variant: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights, or their gradients, of the original under our names and in our layout."""
    return se_rrm_tensors(tensors, VARIANTS[variant]["num_heads"], VARIANTS[variant]["pos_encodings"])


def golden_model(variant: str) -> SeRrmPuzzleForSolving:
    fields = VARIANTS[variant]
    side = int(fields["seq_len"] ** 0.5)
    same = ("hidden_size", "H_cycles", "L_cycles", "L_layers", "halt_max_steps", "halt_exploration_prob", "vocab_size")
    config = SeRrmPuzzleConfig(
        **{name: fields[name] for name in (*same, "seq_len", "pos_encodings", "num_puzzle_identifiers")},
        num_attention_heads=fields["num_heads"], symbol_num_heads=fields["num_heads_t"],
        symbol_head_dim=fields["head_dim_t"], grid_shape=[side, side], add_tokens=fields.get("add_tokens", 0),
        equivariant_symbols=fields.get("equivariant_symbols", True),
        puzzle_emb_ndim=fields["hidden_size"] + fields["vocab_size"] if fields["puzzle_emb_ndim"] else 0,
    )  # fmt: skip
    model = SeRrmPuzzleForSolving(config)
    model.load_state_dict(ours(variant, group(variant, "state_dict/")))
    return model.eval()


def batch(variant: str) -> dict[str, torch.Tensor]:
    names = {"input_ids": "inputs", "labels": "labels", "puzzle_identifiers": "puzzle_identifiers"}
    return {ours: TENSORS[f"{variant}/batch/{name}"].long() for ours, name in names.items()}


def printed_loss(output) -> torch.Tensor:
    """The original's sum over rows: it adds half of a cross entropy of the probability q taken for a logit."""
    exact = torch.zeros_like(output.q_halt_logits)  # no row of these random models is right
    q_loss = F.binary_cross_entropy_with_logits(output.q_halt_logits.sigmoid(), exact, reduction="sum")
    return output.loss * ROWS + 0.5 * q_loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_equals_the_originals(variant):
    model, carry = golden_model(variant), None
    for step in range(1, 5):
        with torch.no_grad():
            output = model(**batch(variant), carry=carry)
        carry = output.carry
        found = {
            "logits": output.logits, "q_halt_logits": output.q_halt_logits.sigmoid(), "halted": carry.halted,
            "loss": printed_loss(output), "z": carry.z_H,
        }  # fmt: skip
        for name, expected in group(variant, f"eval/step{step}/").items():
            bound = FIRST_STEP if step == 1 else LATER_STEPS
            found_here = found[name].to(expected.dtype)
            torch.testing.assert_close(found_here, expected, rtol=0, atol=bound, msg=f"{step} {name}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_the_originals(variant):
    model = golden_model(variant).train()
    output = model(**batch(variant))
    (output.loss * ROWS).backward()
    assert printed_loss(output).item() == pytest.approx(TENSORS[f"{variant}/train/step1/loss"].item(), abs=FIRST_STEP)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = group(variant, "train/step1/grad/")
    rows, ids = expected.pop("puzzle_emb_rows", None), TENSORS.get(f"{variant}/train/step1/grad_ids/puzzle_emb_rows")
    for name, value in ours(variant, expected).items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=GRADIENTS, msg=name)
    if rows is not None:
        table = model.model.puzzle_emb.weight.grad
        assert torch.equal(table._indices()[0], ids)
        torch.testing.assert_close(table._values(), rows, rtol=0, atol=GRADIENTS)


def board(rows: int = 4, vocab_size: int = 6, cells: int = 16) -> torch.Tensor:
    return torch.randint(1, vocab_size, (rows, cells), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("fields", [{}, {"pos_encodings": "learned"}, {"add_tokens": 0, "pos_encodings": "rope"}])
def test_permuting_symbols_permutes_the_answer(fields):
    model = tiny.se_rrm(puzzle_emb_ndim=0, **fields).double()
    symbols = torch.tensor([0, 1, 4, 2, 5, 3])  # padding and empty stay
    with torch.no_grad():
        plain, permuted = model.solve(board(), max_steps=3), model.solve(symbols[board()], max_steps=3)
    # Sums over symbols are taken in another order: float64 leaves its own rounding.
    torch.testing.assert_close(permuted.logits[..., symbols], plain.logits, rtol=0, atol=1e-11)
    assert torch.equal(symbols[plain.predictions], permuted.predictions) and torch.equal(plain.steps, permuted.steps)


def test_padding_and_empty_are_not_exchanged():
    model = tiny.se_rrm(puzzle_emb_ndim=0).double()
    symbols = torch.tensor([1, 0, 2, 3, 4, 5])
    with torch.no_grad():
        plain, permuted = model.solve(board(), max_steps=1), model.solve(symbols[board()], max_steps=1)
    assert (permuted.logits[..., symbols] - plain.logits).abs().max() > 1e-3


@pytest.mark.parametrize("side", [2, 3, 4])
def test_a_model_loads_for_boards_of_another_size(tmp_path, side):
    made = tiny.se_rrm(puzzle_emb_ndim=0, seq_len=81, vocab_size=11, grid_shape=[9, 9])
    made.save_pretrained(tmp_path)
    cells, symbols = side**4, side**2 + 2
    size = {"seq_len": cells, "vocab_size": symbols, "grid_shape": [side**2, side**2]}
    loaded = AutoModelForPuzzleSolving.from_pretrained(tmp_path, **size)
    assert_copied(dict(loaded.named_parameters()), dict(made.named_parameters()))
    assert loaded.solve(board(2, symbols, cells), max_steps=2).logits.shape == (2, cells, symbols)


def test_a_row_is_as_confident_as_its_least_certain_cell_and_stops_above_one_half():
    model = tiny.se_rrm(puzzle_emb_ndim=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # certain answers
    solution = model.solve(board(), max_steps=8)
    least = solution.logits.softmax(-1).amax(-1).amin(-1)
    torch.testing.assert_close(solution.q_halt.sigmoid(), least, rtol=1e-4, atol=1e-6)
    assert ((least > 0.5) | (solution.steps == 8)).all()


@pytest.mark.parametrize("probability, share", [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_rows_halt_at_random_in_training_and_only_there(probability, share):
    model = tiny.se_rrm(halt_exploration_prob=probability)
    inputs = tiny.batch(64, settings=model.config)
    torch.manual_seed(0)
    assert not model(**inputs).carry.halted.any()
    assert model.train()(**inputs).carry.halted.float().mean().item() == pytest.approx(share, abs=0.2)  # 3 deviations


def test_dropout_is_of_training_only():
    model = tiny.se_rrm(attention_dropout=0.5, halt_exploration_prob=0.0)
    inputs = tiny.batch(2, settings=model.config)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_a_row_of_the_table_that_does_not_fit_is_refused():
    with pytest.raises(
        StrictDataclassError, match=r"puzzle_emb_ndim=64 is neither 0 nor hidden_size \+ vocab_size = 267"
    ):
        SeRrmPuzzleConfig(puzzle_emb_ndim=64)


def test_presets_have_their_number_of_parameters():
    counted = {}
    for name in SeRrmPuzzleConfig.presets():
        with torch.device("meta"):
            counted[name] = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset(name)).num_parameters()
    assert counted == {"se-rrm-2m": 1_970_176, "se-rrm-small": 148_480}  # 2M as published
