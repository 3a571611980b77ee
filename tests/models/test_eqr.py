"""EqR as fields of TRM. Referees: tensors of the original code (tests/fixtures/README.md), and the paper."""

import pytest
import torch
from golden import group, variants
from huggingface_hub.errors import StrictDataclassError

from hrm_hf import TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.export.torch_export import export_torch
from hrm_hf.models.act import ActCarry
from hrm_hf.models.puzzle_layers import truncated_normal_like
from hrm_hf.puzzles.convert import our_name


VARIANTS = variants("eqr_tiny")
ROWS = 3
# Tolerances that the golden file suggests.
FIRST_STEP, LATER_STEPS, GRADIENTS = 1e-4, 2e-3, 5e-4


def tensors(variant: str, start: str) -> dict[str, torch.Tensor]:
    return group("eqr_tiny", f"{variant}/{start}")


def golden_model(variant: str) -> TrmPuzzleForSolving:
    fields = VARIANTS[variant]
    config = TrmPuzzleConfig(
        hidden_size=fields["hidden_size"], num_attention_heads=fields["num_heads"], H_cycles=fields["H_cycles"],
        L_cycles=fields["L_cycles"], L_layers=fields["L_layers"], halt_max_steps=fields["halt_max_steps"],
        halt_exploration_prob=0.0, puzzle_emb_ndim=0, pos_encodings=fields["pos_encodings"],
        mlp_t=fields.get("mlp_t", False), update_rate=fields["lambda_"], random_initial_states=True,
        grid_shape=[fields["board_height"], fields["board_width"]],
    )  # fmt: skip
    model = TrmPuzzleForSolving(config)
    model.load_state_dict({our_name(name): value for name, value in tensors(variant, "state_dict/").items()})
    return model.eval()


def start(variant: str, model: TrmPuzzleForSolving) -> tuple[ActCarry, dict[str, torch.Tensor]]:
    """Return a carry with the golden initial states, in which no row is reset, and the batch."""
    batch = {
        "input_ids": tensors(variant, "batch/")["inputs"].long(),
        "labels": tensors(variant, "batch/")["labels"].long(),
    }
    fresh = model.initial_carry(**batch)
    states = (tensors(variant, "start/")[name] for name in ("z_H", "z_L"))
    data = fresh.current_data | batch
    return ActCarry(*states, fresh.steps, torch.zeros_like(fresh.halted), data), batch


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_matches_the_original(variant):
    model = golden_model(variant)
    carry, batch = start(variant, model)
    for step in range(1, 5):
        with torch.no_grad():
            output = model(**batch, carry=carry)
        carry = output.carry
        found = {
            "logits": output.logits, "q_halt_logits": output.q_halt_logits, "halted": carry.halted,
            "loss": output.loss * ROWS, "z_H": carry.z_H, "z_L": carry.z_L,
        }  # fmt: skip
        for name, expected in tensors(variant, f"eval/step{step}/").items():
            bound = FIRST_STEP if step == 1 else LATER_STEPS
            torch.testing.assert_close(
                found[name].to(expected.dtype), expected, rtol=0, atol=bound, msg=f"{step} {name}"
            )


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_match_the_original(variant):
    model = golden_model(variant).train()
    carry, batch = start(variant, model)
    loss = model(**batch, carry=carry).loss * ROWS
    loss.backward()
    assert loss.item() == pytest.approx(tensors(variant, "train/step1/")["loss"].item(), abs=FIRST_STEP)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in tensors(variant, "train/step1/grad/").items():
        torch.testing.assert_close(gradients[our_name(name)], expected, rtol=0, atol=GRADIENTS, msg=name)


def eqr(**fields) -> TrmPuzzleForSolving:
    torch.manual_seed(0)
    defaults = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "H_cycles": 2,
        "L_cycles": 1,
        "seq_len": 16,
        "vocab_size": 6,
    }
    config = TrmPuzzleConfig.from_preset("eqr-sudoku", **{**defaults, **fields})
    return TrmPuzzleForSolving(config).eval()


IDS = torch.randint(1, 6, (2, 16), generator=torch.Generator().manual_seed(1))


def test_every_row_and_reset_starts_from_its_own_states():
    model = eqr(noise_scale=0.0)
    assert model.model.H_init is None and not [name for name in model.state_dict() if "init" in name]
    same = IDS[:1].expand(3, -1)
    with torch.no_grad():
        first, second = (model(same).carry.z_H for _ in range(2))
    assert len({tuple(row.flatten().tolist()) for row in (*first, *second)}) == 6


def test_a_seed_repeats_random_states_and_noise():
    model = eqr()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(model.solve(IDS, max_steps=3).logits)
    assert torch.equal(*found)
    assert not torch.equal(found[0], model.solve(IDS, max_steps=3).logits)


def test_initial_states_have_the_requested_std_and_are_truncated():
    torch.manual_seed(0)
    drawn = truncated_normal_like(torch.empty(200_000), 0.5)
    assert drawn.std().item() == pytest.approx(0.5, rel=0.01)  # its standard error is 0.0008
    assert drawn.abs().max() <= 2 * 0.5 / 0.8796 + 1e-4


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_update_rate_moves_a_state_part_of_the_way(rate):
    model = eqr(update_rate=rate, noise_scale=0.0).model
    z, injection = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    with torch.no_grad():
        moved, whole_way = model._pass(z, injection, None), model.L_level(z, injection, None)
    torch.testing.assert_close(moved, z + rate * (whole_way - z), rtol=1e-5, atol=1e-5)


def test_every_pass_has_noise_in_evaluation_too():
    model = eqr(noise_scale=0.5).model
    z = torch.zeros(64, 16, 32)
    with torch.no_grad():
        noise = model._pass(z, z, None) - model._pass(z, z, None)
    assert noise.std().item() == pytest.approx(0.5 * 2**0.5, rel=0.02)  # 32,768 draws


def test_rope2d_rotates_by_row_and_column_and_skips_the_prefix():
    model = eqr(mlp_t=False, pos_encodings="rope2d", grid_shape=[4, 4], puzzle_emb_ndim=32, puzzle_emb_len=3)
    cos = model.model.embed.cos[0, :, 0]  # [T, head_dim]
    assert (cos[:3] == 1).all()
    rows, columns = cos[3:].chunk(2, dim=-1)
    rows, columns = rows.unflatten(0, (4, 4)), columns.unflatten(0, (4, 4))
    assert (rows == rows[:, :1]).all() and (columns == columns[:1]).all()
    assert torch.equal(rows[:, 0], columns[0]) and rows[0, 0].ne(rows[1, 0]).any()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"pos_encodings": "rope2d", "grid_shape": None}, "'rope2d'.*grid_shape"),
        ({"pos_encodings": "rope2d", "hidden_size": 12, "num_attention_heads": 2}, "pos_encodings='rope2d'"),
        ({"update_rate": 0.0}, "update_rate"),
        ({"noise_scale": -1.0}, "noise_scale"),
    ],
)
def test_impossible_fields_are_rejected_by_name(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        TrmPuzzleConfig(**{"seq_len": 16, "vocab_size": 6, "puzzle_emb_ndim": 0, **fields})


@pytest.mark.parametrize("fields", [{"random_initial_states": False}, {"noise_scale": 0.0}])
def test_a_model_that_draws_random_numbers_is_not_exported(fields, tmp_path):
    eqr(**fields).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"noise_scale=|random_initial_states=True"):
        export_torch(tmp_path / "model", tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()


def test_a_compiled_step_trains_and_a_checkpoint_reloads(tmp_path):
    model = eqr().train()
    model.compile_act_step(backend="aot_eager")
    torch.manual_seed(0)
    output = model(IDS, labels=IDS)
    output.loss.backward()
    assert output.loss.isfinite() and all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = TrmPuzzleForSolving.from_pretrained(tmp_path)
    found = []
    for one in (eqr(), loaded):
        torch.manual_seed(3)
        found.append(one.solve(IDS, max_steps=2).logits)
    assert torch.equal(*found)
