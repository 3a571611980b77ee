"""The optimizers of the original recipes. Referee: their formulas, written out for one parameter."""

import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD, WeightAverage, cosine_with_min_ratio


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), ())]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def sparse(rows, ids, values):
    return torch.sparse_coo_tensor(
        torch.tensor([ids]), torch.tensor(values), (rows, len(values[0])), check_invariants=True
    )


# AdamATan2


def transcription(p, gradients, lr, beta1, beta2, weight_decay):
    """Compute AdamATan2 as in the specification, in float64."""
    p, m, v = p.double(), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        p = p * (1 - lr * weight_decay)
        m = m + (1 - beta1) * (g - m)
        v = v + (1 - beta2) * (g * g - v)
        p = p - lr / (1 - beta1**t) * torch.atan2(m, torch.sqrt(v) / math.sqrt(1 - beta2**t))
    return p


@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.95), 0.1), ((0.9, 0.999), 0.0), ((0.0, 0.5), 1.0)])
def test_adam_atan2_matches_its_formula(betas, weight_decay):
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = AdamATan2(params, lr=0.05, betas=betas, weight_decay=weight_decay)
    gradients = [[] for _ in params]
    for step in range(6):
        set_gradients(params, step)
        for seen, p in zip(gradients, params):
            seen.append(p.grad.clone())
        optimizer.step()
    for p, before, seen in zip(params, start, gradients):
        expected = transcription(before, seen, 0.05, *betas, weight_decay)
        torch.testing.assert_close(p.detach().double(), expected, atol=2e-6, rtol=1e-5)


def test_adam_atan2_does_not_depend_on_the_scale_of_the_loss():
    results = []
    for scale in (1.0, 2.0**-10):  # a power of two, so that rounding is the same
        params = parameters()
        optimizer = AdamATan2(params, lr=0.05)
        for step in range(3):
            set_gradients(params, step)
            for p in params:
                p.grad *= scale
            optimizer.step()
        results.append(params)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_step_is_bounded_and_a_zero_gradient_moves_nothing():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1e30, 0.0, -1e-30])
    AdamATan2([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0).step()
    bound = math.pi / 2 * 0.1 / (1 - 0.9)
    assert p.isfinite().all() and p.abs().max() <= bound and p[1] == 0


def test_a_learning_rate_of_0_is_legal_and_moves_nothing():
    params = parameters()
    optimizer = AdamATan2(params, lr=0.0, weight_decay=1.0)
    set_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(p, before) for p, before in zip(params, parameters()))
    assert optimizer.state[params[0]]["exp_avg"].abs().sum() > 0  # the moments are updated


def test_parameters_without_gradient_neither_move_nor_decay():
    params = parameters()
    set_gradients(params, 0)
    params[1].grad = None
    AdamATan2(params, lr=0.1, weight_decay=1.0).step()
    assert torch.equal(params[1], parameters()[1]) and not torch.equal(params[0], parameters()[0])


def test_restored_adam_atan2_continues_exactly(tmp_path):
    params = parameters()
    optimizer = AdamATan2(params, lr=0.05)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    torch.save([optimizer.state_dict(), [p.detach() for p in params]], tmp_path / "state.pt")
    state, values = torch.load(tmp_path / "state.pt", weights_only=True)
    restored = [torch.nn.Parameter(value) for value in values]
    resumed = AdamATan2(restored, lr=1.0)
    resumed.load_state_dict(state)
    for step in range(3, 6):
        for both, instance in ((params, optimizer), (restored, resumed)):
            set_gradients(both, step)
            instance.step()
    assert all(torch.equal(a, b) for a, b in zip(params, restored))


# SignSGD


def test_rows_of_the_batch_move_by_the_sign_and_absent_rows_stay():
    table = torch.arange(12.0).view(4, 3) + 1
    before = table.clone()
    table.grad = sparse(4, [2, 0], [[1e-9, -5.0, 0.0], [2.0, 2.0, 2.0]])
    SignSGD([table], lr=0.1, weight_decay=0.5).step()
    signs = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]])
    torch.testing.assert_close(table[[0, 2]], before[[0, 2]] * (1 - 0.1 * 0.5) - 0.1 * signs)
    assert torch.equal(table[[1, 3]], before[[1, 3]])  # rows without a gradient do not decay
    assert table.grad is None  # used up


def test_gradients_of_one_row_are_summed_before_the_sign_and_the_row_decays_once():
    table = torch.ones(3, 2)
    table.grad = sparse(3, [1, 1, 1], [[3.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    SignSGD([table], lr=0.1, weight_decay=1.0).step()
    torch.testing.assert_close(table[1], torch.tensor([0.9 - 0.1, 0.9 + 0.1]))


def test_table_without_gradient_is_unchanged_and_dense_gradient_is_rejected():
    table = torch.ones(3, 2)
    SignSGD([table]).step()
    assert torch.equal(table, torch.ones(3, 2))
    table.grad = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"sparse gradient.*\(3, 2\)"):
        SignSGD([table]).step()


# Both combined


def composite(lr_table=0.1, lr_dense=0.01):
    table, params = torch.ones(4, 3), parameters()
    optimizer = CompositeOptimizer([SignSGD([table], lr=lr_table, weight_decay=0.0), AdamATan2(params, lr=lr_dense)])
    return optimizer, table, params


def train_step(optimizer, table, params, step):
    table.grad = sparse(4, [step % 4], [[1.0, -1.0, 1.0]])
    set_gradients(params, step)
    optimizer.step()
    optimizer.zero_grad()


def test_a_schedule_reaches_every_optimizer_with_its_own_base_rate():
    optimizer, table, params = composite()
    schedule = LambdaLR(optimizer, cosine_with_min_ratio(warmup_steps=4, total_steps=100, min_ratio=1.0))
    for step in range(3):
        factor = (step + 1) / 4
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.01 * factor])
        assert [o.param_groups[0]["lr"] for o in optimizer.optimizers] == pytest.approx([0.1 * factor, 0.01 * factor])
        train_step(optimizer, table, params, step)
        schedule.step()
    # rows 0, 1, 2 moved once each, by the rate of their step
    torch.testing.assert_close(table[:, 0], torch.tensor([1 - 0.025, 1 - 0.05, 1 - 0.075, 1.0]))
    assert all(p.grad is None for p in params)


def test_restored_composite_continues_exactly():
    optimizer, table, params = composite()
    schedule = LambdaLR(optimizer, cosine_with_min_ratio(4, 100, 0.1))
    for step in range(3):
        train_step(optimizer, table, params, step)
        schedule.step()
    resumed, table2, params2 = composite(lr_table=7.0, lr_dense=7.0)
    schedule2 = LambdaLR(resumed, cosine_with_min_ratio(4, 100, 0.1))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as if loaded from a file
    schedule2.load_state_dict(schedule.state_dict())
    with torch.no_grad():
        for new, old in zip([table2, *params2], [table, *params]):
            new.copy_(old)
    for step in range(3, 6):
        train_step(optimizer, table, params, step)
        train_step(resumed, table2, params2, step)
        schedule.step()
        schedule2.step()
    assert torch.equal(table, table2) and all(torch.equal(a, b) for a, b in zip(params, params2))
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_state_of_another_number_of_optimizers_is_rejected():
    optimizer, _, params = composite()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(CompositeOptimizer([AdamATan2(params)]).state_dict())


# Schedule and average


def test_the_schedule_counts_the_first_update_as_step_1():
    factor = cosine_with_min_ratio(warmup_steps=10, total_steps=110, min_ratio=0.2)
    assert factor(0) == pytest.approx(0.1) and factor(8) == pytest.approx(0.9)
    assert factor(9) == pytest.approx(1.0)  # step 10: the cosine decay begins
    assert factor(59) == pytest.approx(0.6)  # step 60: half-way between 1 and 0.2
    assert factor(109) == pytest.approx(0.2)
    assert factor(500) == pytest.approx(0.2)  # beyond the end it stays
    assert cosine_with_min_ratio(2000, 26_041, 1.0)(20_000) == 1.0  # the published Sudoku recipe: constant
    assert cosine_with_min_ratio(0, 10, 0.0)(0) == pytest.approx(0.5 * (1 + math.cos(math.pi / 10)))


def test_weight_average_skips_buffers_except_batch_norm_statistics():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("table", torch.ones(3))
    average = WeightAverage(model, rate=0.5)
    statistics = {"1.running_mean", "1.running_var"}
    assert average.shadow.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"} | statistics
    model[1].running_mean.fill_(4.0)
    average.update()
    average.swap()
    assert model[1].running_mean.tolist() == [2.0, 2.0]


def test_weight_average_follows_the_recursion():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    average = WeightAverage(model, rate=0.9)
    expected = torch.ones(1, 2, dtype=torch.float64)
    for value in (2.0, 3.0, 5.0):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update()
        expected = 0.9 * expected + 0.1 * value
    torch.testing.assert_close(average.shadow["weight"], expected.float())
    average.swap()
    torch.testing.assert_close(model.weight.detach(), expected.float())
    average.swap()
    assert model.weight.tolist() == [[5.0, 5.0]]


def test_saved_average_is_restored_or_rejected():
    model = torch.nn.Linear(2, 2)
    average, other = WeightAverage(model, 0.5), WeightAverage(model, 0.5)
    average.shadow["weight"].fill_(7)
    other.load(average.shadow)
    assert other.shadow["weight"].unique().tolist() == [7.0]
    with pytest.raises(ValueError, match=r"saved average.*\['bias'\]"):
        other.load({"weight": torch.zeros(2, 2)})
