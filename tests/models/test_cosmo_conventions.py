"""Conventions of transformers, for the models of maps: tuples, half precision, loading, compilation."""

import copy
import json

import pytest
import tiny_cosmo
import torch
from tolerances import assert_equal_but_for_rounding
from transformers import AutoModelForImageClassification, AutoModelForImageToImage

from hrm_hf import (
    CosmoCnnConfig,
    CosmoCnnForRegression,
    CosmoCnnModel,
    CosmoUnetConfig,
    CosmoUnetForMassMapping,
    CosmoUnetModel,
    HrmCosmoConfig,
    HrmCosmoForMassMapping,
    HrmCosmoForRegression,
    HrmCosmoModel,
    HrmMassMappingConfig,
    HrmMassMappingModel,
)


KINDS = {
    "hrm": (HrmCosmoConfig, HrmCosmoModel, HrmCosmoForRegression),
    "cnn": (CosmoCnnConfig, CosmoCnnModel, CosmoCnnForRegression),
    "mass": (HrmMassMappingConfig, HrmMassMappingModel, HrmCosmoForMassMapping),
    "unet": (CosmoUnetConfig, CosmoUnetModel, CosmoUnetForMassMapping),
}
AUTO_CLASSES = dict.fromkeys(KINDS, AutoModelForImageClassification) | dict.fromkeys(
    ("mass", "unet"), AutoModelForImageToImage
)
RECURRENT = ("hrm", "mass")
HALVES = [torch.bfloat16, torch.float16]


def config_of(kind: str, **fields):
    options = {"prior_bounds": tiny_cosmo.PRIOR, "num_components": 2}
    options |= tiny_cosmo.SHEAR if kind in ("mass", "unet") else {}
    return KINDS[kind][0].from_preset("test", **options | fields)


def maps_of(kind: str, rows: int = 4) -> torch.Tensor:
    channels, generator = config_of(kind).num_channels, torch.Generator().manual_seed(1)
    maps = torch.randn(rows, channels, 16, 16, generator=generator)
    return tiny_cosmo.masked(maps) if channels > 1 else maps


def truth_of(kind: str, rows: int = 4) -> dict[str, torch.Tensor]:
    truth = {"labels": torch.tensor([0.3, 0.8]).expand(rows, 2)}
    if kind in ("mass", "unet"):
        truth["kappa"] = torch.randn(rows, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    return truth


def model_of(kind: str, **fields):
    """Return a model in eval mode, with statistics as if fitted to maps of another amplitude."""
    torch.manual_seed(0)
    model = KINDS[kind][2](config_of(kind, **fields)).eval()
    if kind in RECURRENT:
        amplitudes = 3 * (0.3 + torch.rand(100, 1, 1, 1))
        maps = maps_of(kind, 100)
        observed = maps[:, model.config.num_map_channels :]
        model.fit_statistics([torch.cat((amplitudes * maps[:, : model.config.num_map_channels], observed), dim=1)])
    return model


def buffers_of(model) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def test_tuples_hold_the_outputs_that_are_not_none_in_order(kind):
    model = model_of(kind)
    expected = model(maps_of(kind), **truth_of(kind)).to_tuple()
    found = model(maps_of(kind), **truth_of(kind), return_dict=False)
    assert isinstance(found, tuple) and len(found) == len(expected)
    assert torch.equal(found[0], expected[0])


def test_arguments_override_the_config_for_tuples_and_hidden_states(kind):
    model = model_of(kind, return_dict=False, output_hidden_states=True)
    assert isinstance(model(maps_of(kind)), tuple) and isinstance(model.model(maps_of(kind)), tuple)
    assert model(maps_of(kind), return_dict=True).hidden_states is not None
    assert model(maps_of(kind), return_dict=True, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_weights_give_a_float32_posterior(kind, dtype):
    model = model_of(kind)
    half = copy.deepcopy(model).to(dtype)
    for maps in (maps_of(kind), maps_of(kind).to(dtype)):
        output, expected = half(maps, **truth_of(kind)), model(maps.float(), **truth_of(kind))
        for name in ("loss", "logits", "std", "loc", "scale_tril"):
            assert output[name].dtype == torch.float32 and output[name].isfinite().all()
        assert (output.logits - expected.logits).abs().max() < 0.02
        assert model.sample_posterior(output, 5).isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_weights_get_finite_gradients(kind, dtype):
    model = model_of(kind).to(dtype).train()
    model(maps_of(kind), **truth_of(kind)).loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "double"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_buffers_of_constants_and_statistics_stay_in_float32(kind, cast):
    model = model_of(kind)
    before = {name: buffer.clone() for name, buffer in buffers_of(model).items()}
    model = model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
    assert "model.stem.statistics.whitening" in before and "posterior_head.points" in before
    for name, buffer in buffers_of(model).items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, before[name]), name
    assert torch.equal(model.state_dict()["model.stem.statistics.mean"], before["model.stem.statistics.mean"])


@pytest.mark.parametrize(
    "options", [{}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"dtype": torch.bfloat16}], ids=str
)
def test_loading_restores_every_buffer_saved_or_not(kind, options, tmp_path):
    """Models are built on the meta device, so buffers that are not in the file must be computed again."""
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    loaded = KINDS[kind][2].from_pretrained(tmp_path, **options)
    assert buffers_of(loaded).keys() == buffers_of(model).keys()
    for name, buffer in buffers_of(model).items():
        assert torch.equal(buffers_of(loaded)[name], buffer), name


@pytest.mark.parametrize("kind", RECURRENT)
def test_building_in_half_precision_computes_the_same_buffers(kind):
    built = AUTO_CLASSES[kind].from_config(config_of(kind), dtype=torch.bfloat16)
    torch.manual_seed(0)
    expected = KINDS[kind][2](config_of(kind))
    for name, buffer in buffers_of(expected).items():
        tolerance = 0.02 if name == "posterior_head.points" else 0  # torch draws the first point in the default dtype
        torch.testing.assert_close(buffers_of(built)[name], buffer, atol=tolerance, rtol=0)


def test_modules_offloaded_to_disk_keep_the_predictions(tmp_path):
    model = model_of("hrm", pos_encodings="learned")
    model.save_pretrained(tmp_path)
    places = dict.fromkeys(("model.stem", "model.L_level", "halt_head"), "disk")
    places |= dict.fromkeys(("model.H_level", "posterior_head"), "cpu")
    loaded = HrmCosmoForRegression.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    assert loaded.model.stem.project.weight.is_meta
    with torch.no_grad():
        assert_equal_but_for_rounding(loaded.eval()(maps_of("hrm")).logits, model(maps_of("hrm")).logits)


def test_single_and_noncontiguous_maps_get_the_batch_predictions(kind):
    model, maps = model_of(kind), maps_of(kind)
    expected = model(maps).logits
    assert torch.allclose(model(maps[2:3]).logits, expected[2:3], atol=1e-6)
    scattered = torch.stack((maps, maps), dim=-1)[..., 0]
    assert not scattered.is_contiguous() and torch.allclose(model(scattered).logits, expected, atol=1e-6)
    turned = maps.mT.contiguous().mT
    assert not turned.is_contiguous() and torch.allclose(model(turned).logits, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_maps_are_rejected(kind, dtype):
    with pytest.raises(ValueError, match=f"pixel_values.*{dtype}"):
        model_of(kind)(maps_of(kind).to(dtype))


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (2, 2), (4,)])
def test_wrong_label_shapes_are_rejected(kind, shape):
    with pytest.raises(ValueError, match=r"labels.*\[4, 2\].*\['omega_m', 'sigma_8'\]"):
        model_of(kind)(maps_of(kind), labels=torch.full(shape, 0.7))


def test_only_target_names_define_the_labels(kind):
    named = config_of(kind)
    assert type(named).from_dict(json.loads(named.to_json_string())).id2label == {0: "omega_m", 1: "sigma_8"}
    with pytest.raises(ValueError, match=r"id2label=.*target_names="):
        config_of(kind, id2label={0: "a", 1: "b"})


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", RECURRENT)
def test_checkpointing_of_either_kind_changes_no_gradient(kind, reentrant):
    model = model_of(kind, statistics_dropout=0.0).train()
    model(maps_of(kind), **truth_of(kind)).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model(maps_of(kind), **truth_of(kind)).loss.backward()
    assert all(torch.allclose(plain[name], p.grad, atol=1e-6) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_the_model_compiles_as_one_graph(kind):
    model = model_of(kind)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(maps_of(kind))
        expected = model(maps_of(kind))
    torch.testing.assert_close((found.logits, found.std), (expected.logits, expected.std), atol=1e-5, rtol=1e-5)
