"""`torch.export` of every architecture that has an exporter. Referee: the model itself, in eager mode."""

import json
from pathlib import Path

import clean_process
import every
import pytest
import torch
from short_exports import SHORTER, save_with_another_head
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.export.graphs import graphs
from hrm_hf.export.torch_export import META_FILE, compare, export_graph, export_torch


SLOW = ("hrm_lm", "hrm_go_coder", "hrm_cosmo")
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in every.EXPORTED]
TEXT = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in every.CAUSAL_LMS]


def save(architecture: str, folder: Path, **overrides) -> str:
    every.model(architecture, **{**SHORTER.get(architecture, {}), **overrides}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function from an architecture to its model, file and loaded program, which are cached."""
    made = {}

    def make(architecture: str):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            model = every.model(architecture, **SHORTER.get(architecture, {}))
            model.save_pretrained(folder / "model")
            result = export_torch(folder / "model", folder / "model.pt2")
            made[architecture] = model, result, torch.export.load(folder / "model.pt2")
        return made[architecture]

    return make


@pytest.mark.parametrize("architecture", EVERY)
@pytest.mark.parametrize("rows", [5, 1])  # exported with three
def test_the_program_read_back_equals_the_model(exported, architecture, rows):
    model, _, program = exported(architecture)
    module = program.module()

    found = compare(model, lambda inputs: module(*inputs.values()), rows=rows)

    assert max(found["max_difference"].values()) <= 1e-6
    assert found.get("argmax_agreement", 1) == 1


@pytest.mark.parametrize("architecture", every.EXPORTED)
def test_graphs_run_eagerly_and_return_the_outputs_they_name(architecture):
    """A graph's module calls methods of its model, so this test is fast even for `SLOW`, unlike an export."""
    model = every.model(architecture, **SHORTER.get(architecture, {})).eval()
    for graph in graphs(model).values():
        with torch.no_grad():
            found = graph.module(*graph.inputs.values())
        found = [found] if isinstance(found, torch.Tensor) else found
        assert len(found) == len(graph.outputs)
        assert all(value.isfinite().all() for value in found)


@pytest.mark.parametrize("architecture", [name for name in every.ARCHITECTURES if name not in every.EXPORTED])
def test_architecture_without_an_exporter_is_rejected_by_name(architecture, tmp_path):
    with pytest.raises(ValueError, match=f"{architecture};.* cosmo_cnn, hrm_cosmo, "):
        export_torch(save(architecture, tmp_path / "model"), tmp_path / "model.pt2")


@pytest.mark.parametrize("architecture", TEXT)
@pytest.mark.parametrize("length", [1, 40])
def test_exported_program_runs_any_text_length(exported, architecture, length):
    model, _, program = exported(architecture)
    ids = torch.randint(97, 123, (2, length))

    with torch.no_grad():
        logits = program.module()(ids, torch.ones_like(ids))[0]
        expected = model(input_ids=ids).logits

    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_tokens_of_hrm_lm_halt_in_the_graph_as_in_the_model(exported):
    model, _, program = exported("hrm_lm")
    ids = torch.randint(97, 123, (4, 24))

    with torch.no_grad():
        _, steps = program.module()(ids, torch.ones_like(ids))
        expected = model(input_ids=ids).halt_steps

    assert len(expected.unique()) > 1
    assert torch.equal(steps, expected)


@pytest.mark.parametrize("architecture", every.PUZZLES)
def test_repeated_steps_equal_solve(exported, architecture):
    model, _, program = exported(architecture)
    given = every.inputs(architecture, rows=6)
    step, ids = program.module(), given["puzzle_identifiers"].long()
    # NaN states must have no effect, because the first step resets every row.
    z_H, z_L = (torch.full(shape, torch.nan) for shape in model.config.state_shapes(6))

    with torch.no_grad():
        for number in range(3):
            reset = torch.full((6,), number == 0)
            logits, q_halt, _, z_H, z_L = step(given["input_ids"], ids, z_H, z_L, reset)
    solution = model.solve(**given, max_steps=3, halt="fixed")

    assert torch.equal(logits.argmax(-1), solution.predictions)
    torch.testing.assert_close(q_halt, solution.q_halt, atol=1e-5, rtol=0)


def test_file_describes_inputs_and_outputs(exported):
    model, result, _ = exported("trm_puzzle")
    extra = {META_FILE: ""}
    torch.export.load(result["out"], extra_files=extra)
    said = json.loads(extra[META_FILE])

    assert said["architecture"] == "trm_puzzle"
    assert said["inputs"][0] == {"name": "input_ids", "dtype": "int64", "shape": ["batch", model.config.seq_len]}
    assert said["outputs"] == result["outputs"]


def test_a_process_without_the_package_runs_the_mhc_file(exported, tmp_path):
    """Sinkhorn normalization is an operator that this package defines."""
    model, result, _ = exported("rlm_mhc")
    ids = torch.randint(97, 123, (2, 10))
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(input_ids=ids).logits}, tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        "case = torch.load('expected.pt', weights_only=True)\n"
        "run = torch.export.load(sys.argv[1]).module()\n"
        "logits = run(case['ids'], torch.ones_like(case['ids']))[0]\n"
        "assert sys.modules['hrm_hf'] is None\n"  # and cannot be imported
        "torch.testing.assert_close(logits, case['logits'], atol=1e-5, rtol=0)\n"
    )

    done = clean_process.run(code, result["out"], cwd=tmp_path, home=tmp_path / "home")

    assert done.returncode == 0, done.stderr


def test_activations_in_bfloat16_are_exported_in_float32(tmp_path):
    model = every.model("trm_puzzle", forward_dtype="bfloat16", H_cycles=1, L_cycles=1)
    model.save_pretrained(tmp_path / "model")

    found = export_torch(tmp_path / "model", tmp_path / "model.pt2", check=True)

    assert found["max_difference"]["next_z_H"] <= 1e-6


@pytest.mark.parametrize("overrides", [{"mlp_t": True, "pos_encodings": "none"}, {"pos_encodings": "learned"}])
def test_other_puzzle_layouts_are_exported(overrides):
    model = every.model("trm_puzzle", H_cycles=1, L_cycles=1, **overrides)
    module = export_graph(graphs(model)["model"]).module()

    found = compare(model, lambda inputs: module(*inputs.values()))

    assert max(found["max_difference"].values()) <= 1e-6


@pytest.fixture
def exported_before(exported, monkeypatch):
    """Replace every export by the program of cosmo_cnn, because exports are slow and not tested here."""
    _, _, program = exported("cosmo_cnn")
    monkeypatch.setattr("hrm_hf.export.torch_export.export_graph", lambda graph: program)


def test_wrong_output_is_detected_and_nothing_is_written(tmp_path, exported_before):
    save_with_another_head(tmp_path / "model")

    with pytest.raises(ValueError, match="a different posterior_mean"):
        export_torch(tmp_path / "model", tmp_path / "model.pt2", check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_existing_file_is_overwritten_only_with_force(tmp_path, exported_before):
    out = tmp_path / "model.pt2"
    out.write_text("mine")

    with pytest.raises(FileExistsError, match="--force"):
        export_torch(save("cosmo_cnn", tmp_path / "model"), out)
    assert out.read_text() == "mine"
    export_torch(tmp_path / "model", out, force=True)
    assert torch.export.load(out).module() is not None


@pytest.mark.parametrize(
    "name, out, message",
    [
        ("llama", "model.pt2", "is a llama; "),
        ("cosmo_cnn", "model.onnx", "must end in .pt2"),
        ("nothing", "model.pt2", "/nothing "),
        ("truncated", "model.pt2", "is corrupted"),
    ],
)
def test_bad_input_is_reported_before_writing(tmp_path, name, out, message):
    folder = tmp_path / name
    if name == "llama":
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif name in ("cosmo_cnn", "truncated"):
        save("cosmo_cnn", folder)
    if name == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])

    done = CliRunner().invoke(app, ["export", "torch", str(folder), "--out", str(tmp_path / out)])

    assert done.exit_code != 0
    assert message in (done.output if done.exit_code == 2 else str(done.exception))
    assert not (tmp_path / out).exists()


def test_training_mode_and_half_precision_are_rejected():
    with pytest.raises(ValueError, match=r"float32.*eval mode"):
        graphs(every.model("cosmo_cnn").train())
    with pytest.raises(ValueError, match=r"float32.*eval mode"):
        graphs(every.model("cosmo_cnn").to(torch.bfloat16))
