"""SE-RRM. Referees: tensors of the original code (tests/fixtures/README.md), and the symmetry in the paper."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from golden import group, variants
from huggingface_hub.errors import StrictDataclassError
from tolerances import assert_copied
from torch import nn

from benchmarks.puzzles.hard_sudoku import Net, package_model
from hrm_hf import AutoModelForPuzzleSolving, SeRrmPuzzleConfig, SeRrmPuzzleForSolving
from hrm_hf.models.modeling_se_rrm_puzzle import canonical_symbols
from hrm_hf.models.puzzle_layers import LineSwiGLUs, Neighbours, PoolingScores, UnitMeans
from hrm_hf.puzzles.convert import se_rrm_tensors
from hrm_hf.puzzles.sudoku_rules import SudokuShape


VARIANTS = variants("se_rrm_tiny")
ROWS = 3
# Tolerances that the golden file suggests.
FIRST_STEP, LATER_STEPS, GRADIENTS = 1e-4, 2e-3, 5e-4


def tensors(variant: str, start: str) -> dict[str, torch.Tensor]:
    return group("se_rrm_tiny", f"{variant}/{start}")


def ours(variant: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert weights of the original, or their gradients, to our names and layout."""
    return se_rrm_tensors(values, VARIANTS[variant]["num_heads"], VARIANTS[variant]["pos_encodings"])


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
    model.load_state_dict(ours(variant, tensors(variant, "state_dict/")))
    return model.eval()


def batch(variant: str) -> dict[str, torch.Tensor]:
    names = {"input_ids": "inputs", "labels": "labels", "puzzle_identifiers": "puzzle_identifiers"}
    return {ours: tensors(variant, "batch/")[name].long() for ours, name in names.items()}


def printed_loss(output) -> torch.Tensor:
    """Return the original's loss: a sum over rows, plus half a cross entropy with the probability q as a logit."""
    exact = torch.zeros_like(output.q_halt_logits)  # no row of these random models is right
    q_loss = F.binary_cross_entropy_with_logits(output.q_halt_logits.sigmoid(), exact, reduction="sum")
    return output.loss * ROWS + 0.5 * q_loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_matches_the_original(variant):
    model, carry = golden_model(variant), None
    for step in range(1, 5):
        with torch.no_grad():
            output = model(**batch(variant), carry=carry)
        carry = output.carry
        found = {
            "logits": output.logits, "q_halt_logits": output.q_halt_logits.sigmoid(), "halted": carry.halted,
            "loss": printed_loss(output), "z": carry.z_H,
        }  # fmt: skip
        for name, expected in tensors(variant, f"eval/step{step}/").items():
            bound = FIRST_STEP if step == 1 else LATER_STEPS
            found_here = found[name].to(expected.dtype)
            torch.testing.assert_close(found_here, expected, rtol=0, atol=bound, msg=f"{step} {name}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_match_the_original(variant):
    model = golden_model(variant).train()
    output = model(**batch(variant))
    (output.loss * ROWS).backward()
    expected = tensors(variant, "train/step1/")["loss"].item()
    assert printed_loss(output).item() == pytest.approx(expected, abs=FIRST_STEP)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = tensors(variant, "train/step1/grad/")
    rows, ids = expected.pop("puzzle_emb_rows", None), tensors(variant, "train/step1/grad_ids/").get("puzzle_emb_rows")
    for name, value in ours(variant, expected).items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=GRADIENTS, msg=name)
    if rows is not None:
        table = model.model.puzzle_emb.weight.grad
        assert torch.equal(table._indices()[0], ids)
        torch.testing.assert_close(table._values(), rows, rtol=0, atol=GRADIENTS)


def board(rows: int = 4, vocab_size: int = 6, cells: int = 16) -> torch.Tensor:
    return torch.randint(1, vocab_size, (rows, cells), generator=torch.Generator().manual_seed(5))


def test_padding_and_empty_are_not_permuted():
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
def test_rows_halt_at_random_in_training_only(probability, share):
    model = tiny.se_rrm(halt_exploration_prob=probability)
    inputs = tiny.batch(64, settings=model.config)
    torch.manual_seed(0)
    assert not model(**inputs).carry.halted.any()
    assert model.train()(**inputs).carry.halted.float().mean().item() == pytest.approx(share, abs=0.2)  # 3 deviations


def test_dropout_acts_in_training_only():
    model = tiny.se_rrm(attention_dropout=0.5, halt_exploration_prob=0.0)
    inputs = tiny.batch(2, settings=model.config)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_an_unsuitable_puzzle_emb_ndim_is_rejected():
    with pytest.raises(StrictDataclassError, match=r"puzzle_emb_ndim=64.* = 267"):
        SeRrmPuzzleConfig(puzzle_emb_ndim=64)


def test_presets_have_their_number_of_parameters():
    counted = {}
    for name in SeRrmPuzzleConfig.presets():
        with torch.device("meta"):
            counted[name] = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset(name)).num_parameters()
    assert counted == {
        "se-rrm-2m": 1_970_176,  # 2M as published
        "se-rrm-small": 148_480,
        "symbol-units-small": 20_608,
        "symbol-units": 82_176,
        "symbol-pooling": 84_256,
        "symbol-mlp": 62_952,
        "symbol-maze": 90_880,
    }


PRESETS = {name: SeRrmPuzzleConfig.from_preset(name) for name in SeRrmPuzzleConfig.presets()}
EQUIVARIANT = [name for name, config in PRESETS.items() if config.equivariant_symbols]
CHEAP = ("units", "softmax", "mlp_t", "neighbours", "lines")


def cheap(mixing: str, **overrides) -> SeRrmPuzzleForSolving:
    """Return a seeded model; "softmax" is softmax pooling over units, with random scores."""
    fields = {"mixing": "units", "pooling": "softmax"} if mixing == "softmax" else {"mixing": mixing}
    model = tiny.se_rrm(**{**tiny.MEANS, **fields, "puzzle_emb_ndim": 0, **overrides})
    for layer in model.modules():
        if isinstance(layer, PoolingScores):
            nn.init.normal_(layer.weight)
    return model


@pytest.mark.parametrize("preset", EQUIVARIANT)
def test_permuted_symbols_permute_logits_answers_and_steps_exactly(preset):
    torch.manual_seed(0)
    model = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset(preset, H_cycles=1, L_cycles=1)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    boards = torch.randint(2, 11, (3, 81)) * (torch.rand(3, 81) < 0.4)
    boards[boards == 0] = 1
    new = torch.cat((torch.arange(2), 2 + torch.randperm(9)))
    plain = model.solve(boards, max_steps=3, return_trajectory=True)
    renamed = model.solve(new[boards], max_steps=3, return_trajectory=True)
    assert torch.equal(renamed.logits[..., new], plain.logits)
    assert torch.equal(renamed.predictions, new[plain.predictions])
    assert torch.equal(renamed.trajectory, new[plain.trajectory])
    assert torch.equal(renamed.steps, plain.steps)


@pytest.mark.parametrize("special_symbols", [True, False])
@pytest.mark.parametrize("mixing", CHEAP)
def test_no_mixer_depends_on_the_order_of_symbols(mixing, special_symbols):
    """The forward is tested in float64, because `solve` renumbers symbols before the network sees them."""
    model = cheap(mixing, special_symbols=special_symbols).double()
    boards = tiny.batch(4, settings=model.config)["input_ids"]
    new = torch.cat((torch.arange(2), 2 + torch.arange(model.config.vocab_size - 2).roll(1)))
    plain, renamed = model(boards).logits, model(new[boards]).logits
    assert (renamed[..., new] - plain).abs().max() < 1e-11 * plain.abs().max()
    assert (renamed - plain).abs().max() > 1e-3


@pytest.mark.parametrize("heads", [0, 4])
def test_units_are_the_rows_columns_and_boxes_of_the_rules(heads):
    """Referee: a loop over the units of Sudoku's rules. With heads, the means are weighted."""
    torch.manual_seed(0)
    config = SeRrmPuzzleConfig.from_preset("symbol-units-small", seq_len=36, grid_shape=[6, 6], box_shape=[2, 3])
    model = SeRrmPuzzleForSolving(config).double()
    mixer, states = model.model.L_level.layers[0].positions, torch.randn(2, 36, 32, dtype=torch.float64)
    assert isinstance(mixer, UnitMeans)
    weights = torch.rand(2, 36, 3, heads, dtype=torch.float64) if heads else None
    expected = torch.zeros_like(states)
    for name, cells in SudokuShape(6).units:
        kind = name.split()[0]
        share = torch.ones(2, 6, 32, dtype=torch.float64)
        if heads:
            share = weights[:, cells, ("row", "column", "box").index(kind)].repeat_interleave(32 // heads, dim=-1)
        mean = (share * states[:, cells]).sum(1) / share.sum(1)
        expected[:, cells] += (mean @ getattr(mixer, kind).weight.T).unsqueeze(1)
    torch.testing.assert_close(mixer(states, weights), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [4, 9])
def test_softmax_pooling_equals_the_plain_network(size):
    """Referee: `Net`, which computes sums in float32; one step multiplies their rounding by less than 100."""
    torch.manual_seed(0)
    net = Net(16)
    for block in net.blocks:
        nn.init.normal_(block.scores.weight)
    model, boards = package_model(net, size).double(), torch.randint(0, size + 1, (3, size**2))
    net.double()
    x = net.embed(boards)
    with torch.no_grad():
        logits = net(x, *net.fresh(x))[2].transpose(1, 2)
        torch.testing.assert_close(model(boards + 1).logits[..., 2:].float(), logits, rtol=0, atol=1e-5)


def test_a_model_for_another_board_shares_its_weights(tmp_path):
    model = cheap("softmax", pooling_size=4)
    model.save_pretrained(tmp_path)
    board = {"grid_shape": [6, 6], "box_shape": [2, 3], "vocab_size": 8}
    larger, loaded = model.for_board(**board), type(model).from_pretrained(tmp_path, seq_len=36, **board).eval()
    boards = torch.randint(1, 8, (2, 36))
    assert torch.equal(larger(boards).logits, loaded(boards).logits)
    assert larger.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    with pytest.raises(ValueError, match=r"grid_shape=\[6, 6\].* \[4, 4\]"):
        cheap("mlp_t").for_board(**board)


def test_scores_grow_with_the_logarithm_of_the_size_beyond_training():
    """Referee: weights whose scores are multiplied in advance."""
    plain, sharper = (cheap("softmax", pooling_size=size).double() for size in (None, 2))
    boards = tiny.batch(3, settings=plain.config)["input_ids"]
    assert not torch.allclose(plain(boards).logits, sharper(boards).logits)
    for block in plain.model.L_level.layers:
        for values in block.scores.parameters():
            values.data *= math.log(plain.config.state_symbols) / math.log(2)
    torch.testing.assert_close(plain(boards).logits, sharper(boards).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heads", [None, 4])
def test_units_of_the_config_replace_rows_columns_and_boxes(heads):
    """Referee: the default units of another model with the same weights. Cells without a unit stay finite."""
    config = SeRrmPuzzleConfig.from_preset("symbol-units-small", seq_len=36, grid_shape=[6, 6], box_shape=[2, 3])
    default, states = UnitMeans(config), torch.randn(2, 36, 32)
    default.members.copy_(default.member_table())
    given = UnitMeans(SeRrmPuzzleConfig.from_dict({**config.to_dict(), "units": default.units, "box_shape": None}))
    given.members.copy_(given.member_table())
    given.load_state_dict(default.state_dict())
    weights = None if heads is None else torch.rand(2, 36, 3, heads) + 0.1
    assert torch.equal(given(states, weights), default(states, weights))
    partly = UnitMeans(
        SeRrmPuzzleConfig.from_dict({**config.to_dict(), "units": {"row": [[0, 1]], "a": [[2, 3]], "b": [[4, 5]]}})
    )
    partly.members.copy_(partly.member_table())
    mixed = partly(states, weights)
    assert mixed.isfinite().all() and mixed[:, :6].all() and not mixed[:, 6:].any()


def test_softmax_pooling_starts_as_the_mean():
    torch.manual_seed(0)
    pooled = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset("symbol-pooling")).eval()
    means = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset("symbol-units")).eval()
    assert set(means.load_state_dict(pooled.state_dict(), strict=False).unexpected_keys) == {
        f"model.L_level.layers.{layer}.scores.{name}" for layer in range(2) for name in ("weight", "bias")
    }
    boards = torch.randint(1, 11, (2, 81))
    torch.testing.assert_close(pooled(boards).logits, means(boards).logits, rtol=0, atol=1e-5)


def test_neighbours_are_the_cells_above_below_left_and_right():
    torch.manual_seed(0)
    config = SeRrmPuzzleConfig.from_preset("symbol-maze", seq_len=12, grid_shape=[3, 4])
    mixer, states = Neighbours(config).double(), torch.randn(2, 12, 64, dtype=torch.float64)
    weights = mixer.linear.weight.split(64, dim=1)
    for cell in range(12):
        row, column = divmod(cell, 4)
        places = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        near = [(4 * i + j, weight) for (i, j), weight in zip(places, weights) if 0 <= i < 3 and 0 <= j < 4]
        expected = sum(states[:, place] @ weight.T for place, weight in near)
        torch.testing.assert_close(mixer(states)[:, cell], expected, rtol=0, atol=1e-12)


def test_lines_are_the_rows_and_columns_in_order():
    torch.manual_seed(0)
    fields = {"mixing": "lines", "seq_len": 12, "grid_shape": [3, 4], "position_intermediate_size": 8}
    mixer = LineSwiGLUs(SeRrmPuzzleConfig.from_preset("symbol-maze", hidden_size=8, **fields)).double()
    states, cells = torch.randn(2, 12, 8, dtype=torch.float64), torch.arange(12).view(3, 4)
    expected = torch.zeros_like(states)
    for network, lines in ((mixer.row, cells), (mixer.column, cells.T)):
        for line in lines:
            joined = torch.cat([states[:, cell] for cell in line], dim=1)
            expected[:, line] += network(joined / len(line)).view(2, -1, 8)
    torch.testing.assert_close(mixer(states), expected, rtol=0, atol=1e-12)


def test_distinct_symbols_need_no_symbol_axis():
    model = cheap("neighbours", equivariant_symbols=False)
    out = model(**tiny.batch(3, settings=model.config))
    assert out.carry.z_H.shape == (3, 1, 16, 32) and out.logits.shape == (3, 16, model.config.vocab_size)


EQR = {"update_rate": 0.9, "noise_scale": 0.05, "random_initial_states": True}


@pytest.mark.parametrize("mixing", CHEAP)
def test_update_rate_moves_a_state_part_of_the_way(mixing):
    """Referee: EqR's passes without random numbers, as a plain loop."""
    model = cheap(mixing, H_cycles=2, L_cycles=1, update_rate=0.75).double()
    boards = tiny.batch(2, settings=model.config)["input_ids"]
    x, rotary = model.model.embed(boards, None, torch.float64)
    (z_H, z_L), level = model.model.fresh_states(x), model.model.L_level
    for _ in range(2):
        z_L = 0.25 * z_L + 0.75 * level(z_L, z_H + x, rotary)
        z_H = 0.25 * z_H + 0.75 * level(z_H, z_L, rotary)
    out = model.model(boards)
    torch.testing.assert_close((out.z_H, out.z_L), (z_H, z_L), rtol=0, atol=1e-12)


def test_noisy_answers_repeat_only_with_the_same_seed(tmp_path):
    cheap("units", **EQR).save_pretrained(tmp_path)
    model = AutoModelForPuzzleSolving.from_pretrained(tmp_path).eval()
    boards = tiny.batch(4, settings=model.config)["input_ids"]
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(model.solve(boards, max_steps=3, halt="fixed").logits)
    assert torch.equal(*found)
    assert not torch.equal(found[0], model.solve(boards, max_steps=3, halt="fixed").logits)
    model.solve(boards, restarts=3, max_steps=1)  # random initial states suffice, so this needs no noise


@pytest.mark.parametrize("field, value", [*EQR.items(), ("H_init_std", 0.5), ("L_init_std", 0.5)])
def test_fields_of_eqr_need_two_states(field, value):
    with pytest.raises(StrictDataclassError, match=f"{field}={value}.*two_states=True"):
        SeRrmPuzzleConfig(**{field: value})
    SeRrmPuzzleConfig(**{field: value}, two_states=True)


@pytest.mark.parametrize("mixing", ["units", "neighbours"])
def test_a_position_free_mixer_loads_for_another_size(mixing, tmp_path):
    cheap(mixing, special_symbols=False).save_pretrained(tmp_path)
    larger = {"vocab_size": 11, "seq_len": 81, "grid_shape": [9, 9], "box_shape": [3, 3]}
    model = AutoModelForPuzzleSolving.from_pretrained(tmp_path, **larger).eval()
    assert model.solve(torch.randint(1, 11, (2, 81)), max_steps=2).predictions.ge(2).all()  # digits only


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mixing": "rows"}, "mixing='rows'"),
        ({"pooling": "max"}, "pooling='max'"),
        ({"pooling": "softmax", "mixing": "mlp_t"}, "pooling='softmax', mixing='mlp_t'"),
        ({"mixing": "units", "add_tokens": 4}, "mixing='units', add_tokens=4, "),
        ({"mixing": "units", "box_shape": None}, "mixing='units'.* box_shape.*grid_shape="),
        ({"units": {"row": [[0, 81]]}}, "units: 'row' has cell 81.* 80"),
        ({"units": {"forward": [[0]]}}, "units: kind 'forward'"),
        ({"mixing": "neighbours", "grid_shape": None}, "mixing='neighbours'.* grid_shape"),
        ({"mixing": "lines", "grid_shape": None}, "mixing='lines'.* grid_shape"),
        ({"special_symbols": False, "equivariant_symbols": False}, "special_symbols=False, equivariant_symbols=False"),
    ],
)
def test_fields_that_a_mixer_cannot_use_are_rejected(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        SeRrmPuzzleConfig.from_preset("symbol-units", **fields)


def test_symbols_are_renumbered_by_first_occurrence():
    to_new, to_old = canonical_symbols(torch.tensor([[1, 4, 1, 2, 4], [1, 1, 1, 1, 1]]), 6)
    assert to_new.tolist() == [[0, 1, 3, 4, 2, 5], [0, 1, 2, 3, 4, 5]]
    assert to_old.tolist() == [[0, 1, 4, 2, 3, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("puzzle_emb_ndim", [0, 32 + tiny.VOCAB_SIZE])
def test_solving_equals_the_forward_with_and_without_puzzle_rows(puzzle_emb_ndim):
    """With puzzle rows, symbols keep their ids, because a row has a number for each symbol."""
    model = tiny.se_rrm(puzzle_emb_ndim=puzzle_emb_ndim).double()
    inputs = tiny.batch(8, settings=model.config)
    del inputs["labels"]
    with torch.no_grad():
        forward = model(**inputs).logits
    # Without rows, symbols are renumbered, so sums over symbols have another order: only float64 rounding differs.
    solved = model.solve(**inputs, max_steps=1).logits
    torch.testing.assert_close(solved, forward, rtol=0, atol=1e-11)


@pytest.mark.parametrize("confidence", [0.5, 0.7])
def test_a_row_stops_at_the_first_step_at_which_every_cell_is_confident(confidence):
    model = tiny.se_rrm(halt_confidence=confidence, puzzle_emb_ndim=0)
    boards = tiny.batch(16, settings=model.config)["input_ids"]
    sure = model.solve(boards, max_steps=8, halt="fixed", return_trajectory=True).q_trajectory.sigmoid() >= confidence
    sure[-1] = True
    expected = 1 + sure.to(torch.uint8).argmax(0)
    assert len(expected.unique()) > 1
    assert model.solve(boards, max_steps=8).steps.tolist() == expected.tolist()


def test_sure_answers_are_confident_and_no_longer_change():
    model = cheap("units", update_rate=0.2, sure_confidence=0.0)  # with this rate, some states converge
    boards = tiny.batch(32, settings=model.config)["input_ids"]
    model.config.sure_confidence = model.solve(boards, max_steps=6, halt="fixed").q_halt.sigmoid().median().item()
    found = model.solve(boards, max_steps=6, halt="fixed", return_trajectory=True)
    confident = found.q_halt.sigmoid() >= model.config.sure_confidence
    settled = (found.trajectory[-1] == found.trajectory[-2]).all(dim=1)
    assert found.sure.tolist() == (confident & settled).tolist()
    assert found.sure.any() and (confident & ~settled).any() and (settled & ~confident).any()
    assert tiny.se_rrm(puzzle_emb_ndim=0).solve(boards, max_steps=1).sure is None
