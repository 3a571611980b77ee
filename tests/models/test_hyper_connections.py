"""Hyper-connections: referees are transformers' deepseek_v4 module (golden files and live) and algebra."""

import mhc_golden
import pytest
import torch
from tolerances import assert_equal_but_for_rounding
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from hrm_hf import mHCLayer
from hrm_hf.models.hyper_connections import (
    HyperConnection,
    HyperHead,
    backward_gain,
    composite_maps,
    forward_gain,
    min_column_sum,
    sinkhorn,
)


FILE = "mhc_deepseek_v4_tiny"
CASES = list(mhc_golden.read(FILE)[1]["cases"])
DTYPE = {"f64": torch.float64, "f32": torch.float32}


def random_site(n=4, width=16, std=0.3, dtype=torch.float32, **arguments) -> HyperConnection:
    torch.manual_seed(0)
    site = HyperConnection(width, n, **arguments).to(dtype)
    with torch.no_grad():
        site.fn.normal_(std=std)
        site.base.normal_(std=0.5)
        site.scale.copy_(torch.tensor([0.7, -0.4, 1.3])[: len(site.scale)])
    return site


# Golden files


@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_golden_tensors(case, precision):
    sizes, dtype = mhc_golden.read(FILE)[1]["cases"][case], DTYPE[precision]
    given = {name: t.to(dtype, copy=True) for name, t in mhc_golden.tensors(FILE, f"{case}.in.").items()}
    expected = mhc_golden.tensors(FILE, f"{case}.{precision}.")
    if not expected:
        pytest.skip("not in the committed subset")
    site = HyperConnection(
        sizes["C"], sizes["n"], sizes["sinkhorn_iters"], eps=sizes["hc_eps"], norm_eps=sizes["rms_norm_eps"]
    ).to(dtype)
    site.load_state_dict({name: given[name] for name in ("fn", "base", "scale")})
    head = HyperHead(sizes["C"], sizes["n"], eps=sizes["hc_eps"], norm_eps=sizes["rms_norm_eps"]).to(dtype)
    head.load_state_dict({f"hc_{name}": given[f"head_{name}"] for name in ("fn", "base", "scale")})

    streams = given["streams"].requires_grad_()
    collapsed, post, h_res = site(streams)
    branch = torch.tanh(collapsed @ given["branch_weight"].T)
    following = site.merge(streams, branch, post, h_res)
    reduced = head(following)
    loss = (following * given["cot_next"]).sum() + (reduced * given["cot_head"]).sum()
    loss.backward()
    found = {
        "collapsed": collapsed, "post": post, "comb": h_res.transpose(-1, -2), "branch_out": branch,
        "next_streams": following, "head_out": reduced, "grad_streams": streams.grad,
    }  # fmt: skip
    found |= {f"grad_{name}": getattr(site, name).grad for name in ("fn", "base", "scale")}
    found |= {f"grad_head_{name}": getattr(head, f"hc_{name}").grad for name in ("fn", "base", "scale")}
    # One product over all streams, then two sums per iteration, over rows and over columns.
    summands = sizes["n"] * sizes["C"] + 2 * sizes["n"] * sizes["sinkhorn_iters"]
    for name, value in found.items():
        assert_equal_but_for_rounding(value, expected[name], summands, msg=name)


def test_a_stack_of_sites_has_the_golden_maps_and_composite_gains():
    given = {name: t.double() for name, t in mhc_golden.tensors(FILE, "stack.in.").items()}
    expected = mhc_golden.tensors(FILE, "stack.f64.")
    sites = len(given["fn"])
    streams = given["embeds"].unsqueeze(-2).repeat(1, 1, 4, 1)
    maps = []
    for index in range(sites):
        site = HyperConnection(16, 4).double()
        site.load_state_dict({name: given[name][index] for name in ("fn", "base", "scale")})
        collapsed, post, h_res = site(streams)
        branch = torch.tanh(collapsed @ given["branch_weight"][index].T)
        streams = site.merge(streams, branch, post, h_res)
        maps.append(h_res)
    torch.testing.assert_close(torch.stack(maps), expected["H_res_each_site"], atol=1e-10, rtol=0)
    products = composite_maps(maps)
    torch.testing.assert_close(products[-1], expected["composite_H"], atol=1e-10, rtol=0)
    for kind, matrices in (("single", maps), ("composite", products)):
        means = torch.stack(matrices).mean(dim=(1, 2))
        for side, gain in (("forward", forward_gain), ("backward", backward_gain)):
            torch.testing.assert_close(gain(means), expected[f"amax_{kind}_{side}"], atol=1e-10, rtol=0)


# Direct comparison with transformers


@pytest.mark.parametrize("n", [2, 4, 8])
def test_site_and_head_equal_the_library_module_with_its_weights(n):
    config = DeepseekV4Config(hidden_size=32, hc_mult=n)
    theirs, their_head = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in [*theirs.parameters(), *their_head.parameters()]:
            parameter.normal_(std=0.4)
    ours = HyperConnection(32, n, config.hc_sinkhorn_iters, eps=config.hc_eps, norm_eps=config.rms_norm_eps)
    ours.load_state_dict(theirs.state_dict())
    head = HyperHead(32, n, eps=config.hc_eps, norm_eps=config.rms_norm_eps)
    head.load_state_dict(their_head.state_dict())
    streams = torch.randn(2, 7, n, 32)
    post, comb, collapsed = theirs(streams)
    found = ours(streams)
    for value, expected in zip(found, (collapsed, post, comb.transpose(-1, -2))):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(head(streams), their_head(streams), atol=1e-5, rtol=0)


# Sinkhorn


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_sinkhorn_is_doubly_stochastic_for_mild_logits(n):
    torch.manual_seed(0)
    logits = 0.3 * torch.randn(n, n, 200)
    comb = sinkhorn(logits, 20, 1e-6)
    assert (comb >= 0).all()
    assert (comb.sum(0) - 1).abs().max() <= 5e-6  # the axis that is normalized last
    assert (comb.sum(1) - 1).abs().max() <= 1e-5
    exact = sinkhorn(logits.double(), 20, 0.0)
    assert (exact.sum(0) - 1).abs().max() <= 1e-12


def test_sinkhorn_of_sharp_logits_leaves_the_documented_error_in_one_axis_only():
    torch.manual_seed(0)
    comb = sinkhorn(4 * torch.randn(4, 4, 2000), 20, 1e-6)
    assert (comb.sum(0) - 1).abs().max() <= 5e-6
    error = (comb.sum(1) - 1).abs().amax(0)
    assert 1e-3 < error.median() < 1e-2 < error.quantile(0.99) < 0.2


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinkhorn_of_extreme_logits_is_finite_with_finite_gradients(dtype, eps):
    torch.manual_seed(0)
    logits = (60 * torch.randn(4, 4, 500, dtype=dtype).sign()).requires_grad_()
    comb = sinkhorn(logits, 20, eps)
    comb.square().sum().backward()
    assert comb.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.parametrize(("n", "eps"), [(1, 1e-6), (2, 1e-6), (4, 1e-6), (4, 0.0)])
def test_sinkhorn_has_the_numerical_gradient(n, eps):
    torch.manual_seed(0)
    logits = torch.randn(n, n, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 20, eps), logits)


def test_a_site_has_the_numerical_gradient():
    site = random_site(n=3, width=4, dtype=torch.float64)
    streams = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: site(x), streams)


# Residual maps


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_birkhoff_maps_are_doubly_stochastic_for_any_logits(n):
    site = random_site(n=n, std=5.0, res_mode="birkhoff")
    h_res = site.get_connection_matrix(10 * torch.randn(2, 50, n, 16))
    assert (h_res.sum(-1) - 1).abs().max() <= 1e-6 and (h_res.sum(-2) - 1).abs().max() <= 1e-6
    assert (h_res >= 0).all()


def test_birkhoff_with_one_dominant_logit_is_that_permutation():
    site = HyperConnection(8, 3, res_mode="birkhoff")
    with torch.no_grad():
        site.base[6 + 3] = 50.0  # (1, 2, 0): stream 0 goes to 1, 1 to 2, 2 to 0
    assert site.get_connection_matrix().round().tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_identity_maps_are_exactly_the_identity_and_have_no_parameters():
    site = random_site(res_mode="identity")
    streams = torch.randn(2, 3, 4, 16)
    assert torch.equal(site.get_connection_matrix(streams), torch.eye(4).expand(2, 3, 4, 4))
    assert site.fn.shape == (8, 64) and site.scale.shape == (2,)
    collapsed, post, h_res = site(streams)
    expected = streams + post.unsqueeze(-1) * collapsed.unsqueeze(-2)
    torch.testing.assert_close(site.merge(streams, collapsed, post, h_res), expected)


def test_unconstrained_maps_are_the_raw_ones_and_start_at_the_identity():
    site = HyperConnection(16, 4, res_mode="unconstrained")
    assert torch.equal(site.get_connection_matrix(), torch.eye(4))
    with torch.no_grad():
        site.base[8:] = torch.arange(16.0)
    assert torch.equal(site.get_connection_matrix(), torch.arange(16.0).view(4, 4).T)


@pytest.mark.parametrize("mode", ["sinkhorn", "birkhoff", "identity", "unconstrained"])
def test_one_stream_is_a_plain_residual_connection_at_scale_zero(mode):
    site = HyperConnection(8, 1, eps=0.0, res_mode=mode, alpha_init=0.0)
    streams, branch = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 8)
    collapsed, post, h_res = site(streams)
    assert torch.equal(collapsed, streams.squeeze(-2))
    torch.testing.assert_close(site.merge(streams, branch, post, h_res).squeeze(-2), streams.squeeze(-2) + branch)


# Layout


def test_an_asymmetric_map_moves_stream_zero_to_stream_one():
    site = HyperConnection(2, 2, alpha_init=0.0)
    with torch.no_grad():
        site.base[4:] = torch.tensor([-20.0, 20.0, 20.0, -20.0])
        site.base[2:4] = -50.0  # write nothing
    streams = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    _, post, h_res = site(streams)
    mixed = site.merge(streams, torch.zeros(1, 1, 2), post, h_res)
    torch.testing.assert_close(mixed, streams.flip(2), atol=1e-5, rtol=0)
    with torch.no_grad():  # rows of comb are sources: stream 0 goes to stream 1, but unconstrained not vice versa
        raw = HyperConnection(2, 2, res_mode="unconstrained", alpha_init=0.0)
        raw.base[4:] = torch.tensor([0.0, 1.0, 0.0, 0.0])
        raw.base[2:4] = -50.0
    _, post, h_res = raw(streams)
    mixed = raw.merge(streams, torch.zeros(1, 1, 2), post, h_res)
    torch.testing.assert_close(mixed[0, 0], torch.tensor([[0.0, 0.0], [1.0, 2.0]]))


def test_a_site_is_equivariant_to_rows_and_positions():
    site = random_site()
    streams = torch.randn(3, 5, 4, 16)
    rows, positions = torch.randperm(3), torch.randperm(5)
    for moved, value in zip(site(streams[rows][:, positions]), site(streams)):
        torch.testing.assert_close(moved, value[rows][:, positions])


def test_the_guides_layer_name_gives_a_connection_matrix_with_sums_one():
    matrix = mHCLayer(hidden_dim=2048, num_flows=4).get_connection_matrix()
    assert matrix.shape == (4, 4) and not matrix.isnan().any()
    torch.testing.assert_close(matrix.sum(dim=1), torch.ones(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.sum(dim=0), torch.ones(4), atol=1e-5, rtol=0)
    assert max(forward_gain(matrix), backward_gain(matrix)) < 2.0


# Depth and gains


@pytest.mark.parametrize(
    ("mode", "scale", "std"), [("sinkhorn", 1.0, 0.3), ("sinkhorn", 1.0, 1.0), ("birkhoff", 1.0, 1.0)]
)
def test_composite_gain_of_128_constrained_sites_stays_one(mode, scale, std):
    torch.manual_seed(0)
    product = composite_maps(deep_maps(mode, scale, std))[-1]
    assert (forward_gain(product) - 1).abs().max() < 1e-3
    assert (backward_gain(product) - 1).abs().max() < 1e-3
    assert min_column_sum(product).min() > 1 - 1e-3


def test_composite_gain_of_128_unconstrained_sites_explodes():
    torch.manual_seed(0)
    product = composite_maps(deep_maps("unconstrained", 0.5, 1.0))[-1]
    assert forward_gain(product).min() > 1e3 and backward_gain(product).min() > 1e3


@torch.no_grad()
def deep_maps(mode, scale, std, sites=128, width=64):
    streams = torch.randn(1, 8, 4, width, dtype=torch.float64)
    maps = []
    for _ in range(sites):
        site = HyperConnection(width, 4, res_mode=mode, alpha_init=scale)
        site.fn.normal_(std=std / (4 * width) ** 0.5)
        maps.append(site.get_connection_matrix(streams))
    return maps


def test_gains_of_a_known_matrix_are_its_sums():
    matrix = torch.tensor([[1.0, 0.5], [-3.0, 1.0]])
    assert forward_gain(matrix) == 2.0 and backward_gain(matrix) == 2.0 and min_column_sum(matrix) == -2.0


# dtypes and compilation


def test_bfloat16_streams_have_the_float32_coefficients_of_the_same_values():
    site = random_site()
    streams = torch.randn(2, 5, 4, 16).bfloat16()
    for low, full in zip(site.coefficients(streams), site.coefficients(streams.float())):
        assert low.dtype == torch.float32 and torch.equal(low, full)
    collapsed, post, h_res = site(streams)
    assert collapsed.dtype == site.merge(streams, collapsed, post, h_res).dtype == torch.bfloat16


def test_autocast_changes_neither_coefficients_nor_the_dtype_of_streams():
    site, streams = random_site(), torch.randn(2, 5, 4, 16)
    expected = site(streams)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = site(streams)
        merged = site.merge(streams, found[0].bfloat16(), *found[1:])
    for value, reference in zip(found, expected):
        assert torch.equal(value, reference)
    assert merged.dtype == torch.float32


def test_the_sinkhorn_operator_passes_opcheck():
    logits = torch.randn(4, 4, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.hrm_hf.sinkhorn.default, (logits, 3, 1e-6))


@pytest.mark.slow
def test_a_site_compiles_as_one_graph_with_equal_values_and_gradients():
    site, streams, branch = random_site(), torch.randn(2, 5, 4, 16), torch.randn(2, 5, 16)

    def step(x):
        collapsed, post, h_res = site(x)
        return site.merge(x, branch + collapsed, post, h_res)

    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        site.zero_grad()
        x = streams.clone().requires_grad_()
        value = function(x)
        value.square().sum().backward()
        results.append([value.detach(), x.grad, *(p.grad.clone() for p in site.parameters())])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


# Without gradients, as in decoding


@pytest.mark.parametrize("mode", ["sinkhorn", "birkhoff", "identity", "unconstrained"])
@pytest.mark.parametrize("tokens", [1, 65])
def test_coefficients_without_gradients_equal_those_of_training(mode, tokens):
    site, streams = random_site(res_mode=mode).eval(), torch.randn(1, tokens, 4, 16)
    expected = site(streams)
    with torch.no_grad():
        for value, reference in zip(site(streams), expected):
            assert torch.equal(value, reference)


@pytest.mark.parametrize("value", [0.0, 1e18, float("inf"), float("nan")])
def test_streams_of_any_magnitude_have_the_coefficients_of_training(value):
    site, streams = random_site().eval(), torch.full((1, 2, 4, 16), value)
    with torch.no_grad():
        few = site.coefficients(streams)
    for one, reference in zip(few, site.coefficients(streams)):
        torch.testing.assert_close(one, reference, equal_nan=True)
