"""ONNX of every architecture in ONNX Runtime. Referee: the model itself, in eager mode, and onnx's checker."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import every
import numpy as np
import onnx
import onnxruntime
import pytest
import tiny
import torch
from short_exports import SHORTER, save_with_another_head
from transformers import AutoConfig, AutoFeatureExtractor
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.export.graphs import graphs
from hrm_hf.export.onnx import compare_with_onnxruntime, export_onnx, write_graph
from hrm_hf.export.onnx_runtime import OnnxCosmoRegressor, OnnxPuzzleSolver
from hrm_hf.export.torch_export import export_torch


ONNX_TOLERANCE = 1e-4  # float32 sums in a different order
FAST = ("hrm_puzzle", "cosmo_cnn")
SLOW = ("trm_puzzle", "se_rrm_puzzle", "hrm_cosmo", *every.CAUSAL_LMS)
# A random reasoner is chaotic: a rounding difference of 1e-6 changes its answer after ten steps. Scaling down the
# updates prevents this, and rows still halt at many steps. Values: factor of the updates, and bias of q_halt.
CALM = {"hrm_puzzle": (0.25, 0.0), "trm_puzzle": (0.5, -2.0)}


def build(architecture: str):
    model = every.model(architecture, **SHORTER.get(architecture, {}))
    if architecture in CALM:
        factor, bias = CALM[architecture]
        with torch.no_grad():
            model.q_head.bias.copy_(torch.tensor([bias, 0.0]))
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_(factor)
    if architecture == "hrm_cosmo":
        torch.manual_seed(3)
        with torch.no_grad():  # maps halt after one segment or two
            model.halt_head.weight.normal_(std=3.0)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function from an architecture to its model and the folder of its export, which is cached."""
    made = {}

    def make(architecture: str):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            every.save(architecture, folder / "model")
            model = build(architecture)
            model.save_pretrained(folder / "model")
            export_onnx(folder / "model", folder / "onnx")
            made[architecture] = model, folder / "onnx"
        return made[architecture]

    return make


ALL = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
PUZZLES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in every.PUZZLES]


@pytest.mark.parametrize("architecture", ALL)
def test_onnx_runtime_equals_the_model_at_another_batch_size(exported, architecture):
    model, folder = exported(architecture)

    found = compare_with_onnxruntime(folder, model)  # four rows; exported with three

    assert max(found["max_difference"].values()) <= ONNX_TOLERANCE
    assert found.get("argmax_agreement", 1) == 1
    assert found.get("same_steps", 1) == 1


@pytest.mark.parametrize("architecture", ALL)
def test_files_are_complete_and_describe_inputs_and_outputs(exported, architecture):
    _, folder = exported(architecture)
    meta = json.loads((folder / "onnx.json").read_text())
    for name, said in meta["graphs"].items():
        proto = onnx.load(folder / name)
        onnx.checker.check_model(proto, full_check=True)
        assert proto.opset_import[0].version == meta["opset"] == 18
        session = onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
        assert [(given.name, given.shape) for given in session.get_inputs()] == [
            (given["name"], given["shape"]) for given in said["inputs"]
        ]
        assert [given.name for given in session.get_outputs()] == said["outputs"]

    assert AutoConfig.from_pretrained(folder).model_type == meta["architecture"] == architecture
    beside = {"identifiers.json"} if architecture in every.PUZZLES else {"tokenizer.json"}
    if architecture in every.REGRESSORS:
        assert AutoFeatureExtractor.from_pretrained(folder).image_size == 16
        beside = {"preprocessor_config.json"}
    loop = {"onnx_runtime.py"} if architecture in (*every.PUZZLES, "hrm_cosmo") else set()
    graph_files = {"stem.onnx", "segment.onnx"} if architecture == "hrm_cosmo" else set()
    files = {path.name for path in folder.iterdir()} - {"tokenizer_config.json", "chat_template.jinja"}
    assert files == {"model.onnx", "config.json", "onnx.json"} | beside | loop | graph_files


@pytest.mark.parametrize("architecture", PUZZLES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_steps": 12},
        {"max_steps": 4, "min_steps": 3},
        {"min_confidence": 0.6},
        {"max_steps": 3, "halt": "fixed"},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_the_adaptive_loop_equals_solve(exported, architecture, options):
    model, folder = exported(architecture)
    given = every.inputs(architecture, rows=24)

    expected = model.solve(**given, **options)
    found = OnnxPuzzleSolver(folder).solve(**{name: value.numpy() for name, value in given.items()}, **options)

    if not options:
        assert len(expected.steps.unique()) > 2  # otherwise, no row would leave before others
    assert np.array_equal(found.steps, expected.steps)
    assert np.array_equal(found.predictions, expected.predictions)
    np.testing.assert_allclose(found.q_halt, expected.q_halt, atol=ONNX_TOLERANCE)
    np.testing.assert_allclose(found.logits, expected.logits, atol=ONNX_TOLERANCE)


def test_identifiers_are_optional_and_rows_are_independent(exported):
    model, folder = exported("hrm_puzzle")
    solver = OnnxPuzzleSolver(folder / "model.onnx")
    boards = every.inputs("hrm_puzzle", rows=5)["input_ids"]

    together = solver.solve(boards.numpy())
    alone = [solver.solve(board[None].numpy()) for board in boards]

    assert np.array_equal(together.predictions, model.solve(boards).predictions)
    assert np.array_equal(together.predictions, np.concatenate([one.predictions for one in alone]))
    assert np.array_equal(together.steps, np.concatenate([one.steps for one in alone]))
    assert solver.solve(boards.numpy()[:0]).predictions.shape == (0, 16)


def test_model_without_a_puzzle_table_accepts_identifiers(tmp_path):
    fields = {"puzzle_emb_ndim": 0, "puzzle_emb_len": 0, "H_cycles": 1, "L_cycles": 1}
    model = every.model("trm_puzzle", **fields)
    model.save_pretrained(tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "onnx")
    boards = every.inputs("trm_puzzle", rows=4)["input_ids"]

    solver = OnnxPuzzleSolver(tmp_path / "onnx")

    assert "puzzle_identifiers" in {given.name for given in solver.session.get_inputs()}
    assert np.array_equal(solver.solve(boards.numpy(), max_steps=2).steps, model.solve(boards, max_steps=2).steps)


def test_the_loop_runs_without_torch_and_without_the_package(exported, tmp_path):
    model, folder = exported("hrm_puzzle")
    given = every.inputs("hrm_puzzle", rows=6)
    np.savez(tmp_path / "case.npz", **given, expected=model.solve(**given).predictions)
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from onnx_runtime import OnnxPuzzleSolver\n"
        f"case = np.load({str(tmp_path / 'case.npz')!r})\n"
        "found = OnnxPuzzleSolver('.').solve(case['input_ids'], case['puzzle_identifiers'])\n"
        "assert np.array_equal(found.predictions, case['expected'])\n"
        "assert not {'torch', 'transformers', 'hrm_hf'} & set(sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_steps": 3}, {"halt": "fixed", "max_steps": 1}])
def test_maps_halt_in_onnx_as_in_the_model(exported, options):
    model, folder = exported("hrm_cosmo")
    maps = every.inputs("hrm_cosmo", rows=16)["pixel_values"]
    with torch.no_grad():
        expected = model(pixel_values=maps, **{"halt": "adaptive", **options})

    found = OnnxCosmoRegressor(folder).predict(maps.numpy(), **options)

    if not options:
        assert len(expected.steps.unique()) == 2
    assert np.array_equal(found.steps, expected.steps)
    np.testing.assert_allclose(found.posterior_mean, expected.reported_means, atol=1e-5)
    np.testing.assert_allclose(found.posterior_std, expected.reported_stds, atol=1e-5)
    np.testing.assert_allclose(found.scale_tril, expected.scale_tril, atol=1e-5)
    np.testing.assert_allclose(found.halt_logits, expected.halt_logits[:, -1], atol=ONNX_TOLERANCE)


def test_the_power_spectrum_of_the_stem_equals_torchs(tmp_path):
    model = every.model("hrm_cosmo", use_histogram=False)
    graph = graphs(model)["stem"]
    write_graph(graph, tmp_path / "stem.onnx", 18, {})
    maps = every.inputs("hrm_cosmo", rows=5)["pixel_values"]

    session = onnxruntime.InferenceSession(tmp_path / "stem.onnx", providers=["CPUExecutionProvider"])
    (tokens,) = session.run(None, {"pixel_values": maps.numpy()})

    assert "DFT" in {node.op_type for node in _all_nodes(onnx.load(tmp_path / "stem.onnx"))}
    with torch.no_grad():
        np.testing.assert_allclose(tokens, model.model.embed(maps), atol=1e-5)


def _all_nodes(proto):
    return [*proto.graph.node, *(node for function in proto.functions for node in function.node)]


@pytest.mark.parametrize("opset", [pytest.param(20, marks=pytest.mark.slow), 23])
def test_later_opsets_give_the_same(tmp_path, opset):
    every.save("cosmo_cnn", tmp_path / "model")

    result = export_onnx(tmp_path / "model", tmp_path / "onnx", opset=opset, check=True)

    assert onnx.load(tmp_path / "onnx" / "model.onnx").opset_import[0].version == opset
    assert max(result["max_difference"].values()) <= ONNX_TOLERANCE


@pytest.fixture
def written_before(exported, monkeypatch):
    """Replace every export by the graph of cosmo_cnn, because exports are slow and not tested here."""
    _, folder = exported("cosmo_cnn")
    monkeypatch.setattr(
        "hrm_hf.export.onnx.write_graph", lambda graph, file, *_: shutil.copy(folder / "model.onnx", file)
    )


def test_wrong_output_is_detected_and_nothing_is_written(tmp_path, written_before):
    save_with_another_head(tmp_path / "model")

    with pytest.raises(ValueError, match="a different posterior_mean"):
        export_onnx(tmp_path / "model", tmp_path / "onnx", check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nonempty_folder_needs_force_and_keeps_other_files(tmp_path, written_before):
    every.save("cosmo_cnn", tmp_path / "model")
    out = tmp_path / "onnx"
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    refused = CliRunner().invoke(app, ["export", "onnx", str(tmp_path / "model"), "--out", str(out)])
    assert refused.exit_code == 1 and "--force" in str(refused.exception)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    done = CliRunner().invoke(app, ["export", "onnx", str(tmp_path / "model"), "--out", str(out), "--force", "--json"])

    assert json.loads(done.stdout)["architecture"] == "cosmo_cnn"
    assert (out / "notes.txt").read_text() == "mine" and (out / "model.onnx").exists()


@pytest.mark.parametrize("opset", [17, 24])
def test_unsupported_opsets_are_rejected(tmp_path, opset):
    done = CliRunner().invoke(app, ["export", "onnx", "model", "--out", str(tmp_path / "o"), "--opset", str(opset)])
    assert done.exit_code == 2 and "--opset" in done.output


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"\.\[onnx\]"):
        export_onnx(tmp_path, tmp_path / "onnx")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input_ids": np.zeros((2, 9), int)}, r"input_ids has shape \[2, 9\]"),
        ({"input_ids": np.full((2, 16), tiny.VOCAB_SIZE)}, "input_ids .* 0 to 5"),
        ({"input_ids": np.zeros((2, 16))}, "input_ids .*float64.* 0 to 5"),
        ({"puzzle_identifiers": np.array([0, -1])}, "puzzle_identifiers .* 0 to 4"),
        ({"puzzle_identifiers": np.zeros(3, int)}, r"puzzle_identifiers has shape \[3\]"),
        ({"halt": "never"}, "halt='never'"),
        ({"min_steps": 17}, "min_steps=17"),
        ({"min_confidence": 2}, "min_confidence=2: "),
    ],
)
def test_solver_names_the_invalid_input(exported, change, message):
    _, folder = exported("hrm_puzzle")
    with pytest.raises(ValueError, match=message):
        OnnxPuzzleSolver(folder).solve(**{"input_ids": np.zeros((2, 16), int), **change})


def test_solver_rejects_files_of_other_exporters(exported, tmp_path):
    with pytest.raises(FileNotFoundError, match="hrm-hf export onnx"):
        OnnxPuzzleSolver(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ValueError, match="not an ONNX file"):
        OnnxPuzzleSolver(tmp_path)
    _, cnn = exported("cosmo_cnn")
    with pytest.raises(ValueError, match="is a cosmo_cnn"):
        OnnxPuzzleSolver(cnn)
    foreign = onnx.load(cnn / "model.onnx")
    del foreign.metadata_props[:]
    onnx.save(foreign, tmp_path / "foreign.onnx")
    with pytest.raises(ValueError, match=r"foreign\.onnx"):
        OnnxPuzzleSolver(Path(tmp_path / "foreign.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 3])
def test_loop_runs_a_fixed_number_of_passes_and_is_stored_once(tmp_path, passes):
    model = every.model("hrm_lm", num_h_layers=0, num_l_layers=1, H_cycles=1, L_cycles=1, bp_steps=1, halt_max_steps=2)
    every.wake(model).save_pretrained(tmp_path / "model")

    found = export_onnx(tmp_path / "model", tmp_path / "onnx", passes=passes, check=True)
    export_torch(tmp_path / "model", tmp_path / "model.pt2", passes=passes)

    assert list(found["max_difference"]) == ["logits"]
    inputs = every.inputs("hrm_lm", rows=2)
    given = {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["input_ids"])}
    with torch.no_grad():
        expected = model(**given, num_segments=passes, exit_criterion="fixed", use_cache=False).logits
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    logits = session.run(None, {name: value.numpy() for name, value in given.items()})[0]
    np.testing.assert_allclose(logits, expected, atol=ONNX_TOLERANCE)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(*given.values())[0], expected, atol=1e-6, rtol=0)
    initializers = onnx.load(tmp_path / "onnx" / "model.onnx").graph.initializer
    stored = sum(np.prod(each.dims) for each in initializers if len(each.dims) == 2)
    head = model.lm_head.weight.numel()  # a tied embedding is also stored transposed, as the head
    assert stored <= sum(p.numel() for name, p in model.named_parameters() if "q_head" not in name) + head


def test_passes_are_rejected_for_a_model_with_a_fixed_depth(tmp_path):
    every.save("cosmo_cnn", tmp_path / "model")
    with pytest.raises(ValueError, match=r"passes=2: .*cosmo_cnn"):
        export_onnx(tmp_path / "model", tmp_path / "onnx", passes=2)
