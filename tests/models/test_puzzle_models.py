"""Puzzle models: sizes, initial values, solving, saving, table. Referees: the originals' sizes, other runs."""

import threading

import pytest
import tiny
import torch
from huggingface_hub.errors import StrictDataclassError

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.models import modeling_puzzle


def inputs(rows: int = 8, **keywords):
    batch = tiny.batch(rows, **keywords)
    return {name: batch[name] for name in ("input_ids", "puzzle_identifiers")}


architectures = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)

# Presets and initial values

# The counts of hrm-27m and trm-7m are those of the original models; the others were counted here.
PARAMETERS = {
    (HrmPuzzleConfig, "hrm-27m"): 27_275_266,
    (HrmPuzzleConfig, "hrm-27m-sudoku-full"): 27_317_250,
    (HrmPuzzleConfig, "hrm-small"): 58_114,
    (HrmPuzzleConfig, "hrm-ultra-small"): 27_010,
    (TrmPuzzleConfig, "trm-7m"): 6_828_034,
    (TrmPuzzleConfig, "trm-5m-mlp"): 5_028_866,
    (TrmPuzzleConfig, "trm-7m-arc"): 6_829_058,
    (TrmPuzzleConfig, "trm-7m-maze"): 6_822_914,
    (TrmPuzzleConfig, "eqr-sudoku"): 4_855_298,
    (TrmPuzzleConfig, "eqr-maze"): 263_938,
}
HEADS = {HrmPuzzleConfig: HrmPuzzleForSolving, TrmPuzzleConfig: TrmPuzzleForSolving}


def test_every_preset_has_a_counted_size():
    assert set(PARAMETERS) == {(config, name) for config in HEADS for name in config.presets()}


@pytest.mark.parametrize(("config_class", "name"), PARAMETERS, ids=lambda value: str(value).split(".")[-1])
def test_presets_have_their_number_of_parameters(config_class, name):
    with torch.device("meta"):
        model = HEADS[config_class](config_class.from_preset(name))
    assert model.num_parameters() == PARAMETERS[config_class, name]
    table = model.config.num_puzzle_identifiers * model.config.puzzle_emb_ndim
    assert model.num_parameters(include_puzzle_table=True) == PARAMETERS[config_class, name] + table


def test_overrides_change_a_preset_and_unknown_presets_are_rejected():
    assert HrmPuzzleConfig.from_preset("hrm-small", seq_len=16).seq_len == 16
    with pytest.raises(ValueError, match=r"hrm-1b.*hrm-27m"):
        HrmPuzzleConfig.from_preset("hrm-1b")


def test_initial_values_have_the_stated_distribution():
    torch.manual_seed(0)
    config = HrmPuzzleConfig(
        hidden_size=256, num_attention_heads=4, H_layers=1, L_layers=1, vocab_size=500, seq_len=100
    )
    config.pos_encodings = "learned"
    model = HrmPuzzleForSolving(config)
    for name, parameter in model.named_parameters():
        if name.startswith("q_head"):
            continue
        # fan-in of a matrix and width of an embedding are both the last axis
        std = parameter.shape[-1] ** -0.5
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(parameter.mean()) < 0.03 * std, name
        assert parameter.abs().max() <= 2 * std / 0.8796256610342398 * (1 + 1e-6), name  # truncated at two scales
    assert model.q_head.weight.abs().max() == 0 and model.q_head.bias.tolist() == [-5.0, -5.0]
    assert model.model.puzzle_emb.weight.abs().max() == 0
    for state in (model.model.H_init, model.model.L_init):
        assert state.std().item() == pytest.approx(1, abs=0.15)  # 256 values
        assert not isinstance(state, torch.nn.Parameter)
    assert not torch.equal(model.model.H_init, model.model.L_init)


# One step


@architectures
def test_a_step_without_labels_or_puzzles_is_a_step_on_puzzle_0(architecture):
    model, data = tiny.model(architecture), inputs()
    with torch.no_grad():
        output = model(data["input_ids"])
        named = model(data["input_ids"], puzzle_identifiers=torch.zeros(8, dtype=torch.int32))
    assert output.loss is None and output.metrics is None
    assert torch.equal(output.logits, named.logits) and output.logits.shape == (8, tiny.SEQ_LEN, tiny.VOCAB_SIZE)


def test_hidden_states_and_tuples_are_returned_on_request():
    model, data = tiny.model("hrm"), inputs()
    output = model(**data, output_hidden_states=True)
    z_L, z_H = output.hidden_states
    assert torch.equal(z_H, output.carry.z_H) and torch.equal(z_L, output.carry.z_L)
    assert isinstance(model(**data, return_dict=False), tuple)


def test_the_base_model_is_the_same_step():
    model, data = tiny.model("trm"), inputs()
    with torch.no_grad():
        assert torch.equal(model.model(**data).z_H, model(**data).carry.z_H)
        again = model.model(**data, **{name: model.model(**data)[name] for name in ("z_H", "z_L")})
        assert torch.equal(again.z_L, model(**data, carry=model(**data).carry).carry.z_L)


@pytest.mark.parametrize("architecture", ["hrm", "trm"])
def test_gradient_checkpointing_gives_the_same_gradients(architecture):
    model = tiny.model(architecture).train()

    def gradients():
        model.zero_grad()
        model.model.puzzle_emb.weight.grad = None
        torch.manual_seed(0)
        model(**tiny.batch()).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()} | {"table": model.model.puzzle_emb.weight.grad}

    plain = gradients()
    model.activation_checkpointing_enable()
    calls = []
    for layer in model.model.L_level.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    checkpointed = gradients()
    assert plain["table"].to_dense().abs().max() > 0
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name].to_dense(), gradient.to_dense(), atol=1e-6, rtol=1e-5)
    # The passes with gradients ran twice: 1 in HRM, L_cycles + 1 in TRM.
    forward_passes = {"hrm": 8, "trm": 6}[architecture]
    assert len(calls) == forward_passes + {"hrm": 1, "trm": 3}[architecture]


def test_wrong_shapes_are_rejected_by_name():
    model = tiny.model("hrm")
    with pytest.raises(ValueError, match=r"input_ids.*\[2, 9\].*\[batch, 16\]"):
        model(torch.ones(2, 9, dtype=torch.long))
    carry = model(**inputs(3)).carry
    with pytest.raises(ValueError, match=r"input_ids: .*\[3.*\[4"):
        model(**inputs(4), carry=carry)
    with pytest.raises(ValueError, match=r"labels: .*\[3.*nothing"):
        model(inputs(3)["input_ids"], carry=model(**tiny.batch(3)).carry)


def test_min_confidence_stops_a_row_only_when_it_is_met():
    model = tiny.model("trm")
    boards = tiny.batch(12)["input_ids"]
    easy, strict = (model.solve(boards, min_confidence=bar) for bar in (0.0, 0.7))
    assert (strict.steps >= easy.steps).all() and (strict.steps > easy.steps).any()
    stopped_early = strict.steps < model.config.halt_max_steps
    assert (torch.sigmoid(strict.q_halt[stopped_early]) >= 0.7).all()


# Solving


@architectures
def test_solving_with_fixed_steps_equals_a_chain_of_evaluation_steps(architecture):
    model, data = tiny.model(architecture), inputs()
    solution = model.solve(**data, halt="fixed", return_trajectory=True)
    carry = None
    with torch.no_grad():
        for step in range(16):
            output = model(**data, carry=carry)
            carry = output.carry
            assert torch.equal(solution.trajectory[step], output.logits.argmax(-1))
            assert torch.equal(solution.q_trajectory[step], output.q_halt_logits)
    assert carry.halted.all() and solution.steps.tolist() == [16] * 8
    assert torch.equal(solution.logits, output.logits) and torch.equal(solution.q_halt, output.q_halt_logits)


@architectures
def test_an_adaptive_answer_equals_the_fixed_run_at_its_last_step(architecture):
    # In float64, because sixteen steps with random weights amplify differences a million times, and products of
    # smaller batches may sum in another order.
    model, data = tiny.model(architecture).double(), inputs(16)
    solution = model.solve(**data)
    assert len(solution.steps.unique()) > 2, "the rows of this test have to stop at different steps"
    carry = None
    for step in range(1, 17):
        with torch.no_grad():
            output = model(**data, carry=carry)
        carry, stopped = output.carry, solution.steps == step
        torch.testing.assert_close(solution.logits[stopped], output.logits[stopped], atol=1e-6, rtol=0)
        torch.testing.assert_close(solution.q_halt[stopped], output.q_halt_logits[stopped], atol=1e-6, rtol=0)
        wants = output.q_halt_logits > (output.q_continue_logits if architecture == "hrm" else 0)
        assert torch.equal(wants & (solution.steps >= step), stopped) or step == 16
    assert torch.equal(solution.predictions, solution.logits.argmax(-1))


def test_finished_rows_leave_the_batch():
    model, data = tiny.model("hrm"), inputs(16)
    sizes = []
    model.model.H_level.register_forward_hook(lambda _, args, output: sizes.append(len(output)))
    steps = model.solve(**data).steps
    passes = 2  # H_cycles
    assert sizes == [int((steps >= step).sum()) for step in range(1, steps.max() + 1) for _ in range(passes)]


@pytest.mark.parametrize("choose", ["q", "rules"])
def test_solving_in_parts_gives_the_results_of_the_batch(choose, monkeypatch):
    model, data = tiny.model("hrm"), inputs(10)
    solutions, calls, step = [], [], model.solve_step
    monkeypatch.setattr(model, "solve_step", lambda x, *rest: calls.append(len(x)) or step(x, *rest))

    def accepts(boards, answers):  # depends on the board, so each answer must come with its own
        return (boards + answers).sum(1) % 3 == 0

    for boards in (10, 5, 3):  # in one part, in two, and in five
        monkeypatch.setattr(type(model), "boards_per_call", boards)
        solutions.append(model.solve(**data, choose=choose, accepts=accepts, return_trajectory=True))
    assert len(solutions[0].steps.unique()) > 1, "the rows of this test have to stop at different steps"
    assert calls[0] == 10 and calls.count(5) >= 2 and calls.count(2) >= 5
    for in_parts in solutions[1:]:
        for name in ("predictions", "steps", "trajectory"):
            assert torch.equal(getattr(in_parts, name), getattr(solutions[0], name)), name
        torch.testing.assert_close(in_parts.logits, solutions[0].logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hrm", "se_rrm"])
def test_compiled_solving_gives_the_eager_answers_with_two_graphs(name):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny.se_rrm() if name == "se_rrm" else tiny.model(name)
    data = inputs(16)
    expected = model.solve(**data)
    assert len(expected.steps.unique()) > 2, "the rows of this test have to stop at different steps"
    torch._dynamo.reset()
    model.compile_solve(backend=backend)
    found = model.solve(**data)
    torch._dynamo.reset()
    assert len(graphs) == 2  # of the first batch size, and of all others
    assert torch.equal(found.steps, expected.steps) and torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("part", ["cycle", "level"])
def test_steps_compiled_in_parts_give_the_eager_gradients(part, monkeypatch):
    blocks_of_a_cycle = 3
    monkeypatch.setattr(modeling_puzzle, "MAX_BLOCKS_IN_ONE_GRAPH", blocks_of_a_cycle - (part == "level"))
    seen, results = [], []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    for compiled in (False, True):
        model = tiny.model("trm").train()
        torch._dynamo.reset()
        if compiled:
            model.compile_act_step(backend=backend)
        torch.manual_seed(0)
        loss = model(**tiny.batch()).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch._dynamo.reset()
    torch.testing.assert_close(results[1], results[0])
    assert len(seen) == 2 or (seen and part == "level")  # with and without gradients


@pytest.mark.parametrize("name", ["hrm", "trm", "se_rrm"])
def test_training_in_parts_gives_the_results_of_the_batch(name, monkeypatch):
    results, calls = [], []
    for boards in (8, 5):  # 5 does not divide the batch, so the parts have 4 boards
        model = (tiny.se_rrm() if name == "se_rrm" else tiny.model(name)).train()
        monkeypatch.setattr(type(model), "boards_per_call", boards)
        model.act_step = lambda carry, *rest, run=model.act_step: calls.append(len(carry.steps)) or run(carry, *rest)
        torch.manual_seed(0)
        carry = None
        for _ in range(3):
            outputs = model(**tiny.batch(8, settings=model.config), carry=carry)
            carry = outputs.carry
            outputs.loss.backward()
        gradients = [p.grad for p in model.parameters()]
        if model.model.puzzle_emb is not None:
            gradients.append(model.model.puzzle_emb.weight.grad.to_dense())
        results.append([*dict(outputs, carry=carry.to_tensors()).values(), *gradients])
    assert calls == [8] * 3 + [4] * 6
    torch.testing.assert_close(results[1], results[0])


def test_overlapping_runs_in_threads_keep_the_compiler_enabled():
    seen = []

    def count(graph, inputs):
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin(), backend=count)
    model, data = tiny.model("trm"), {"input_ids": tiny.batch()["input_ids"], "max_steps": 2, "choose": "rules"}
    inside, leave = threading.Event(), threading.Event()

    def first_in_first_out(rows, answers):
        inside.set()
        assert leave.wait(120)
        return torch.ones(len(rows), dtype=torch.bool)

    def second_in_last_out(rows, answers):
        leave.set()
        first.join()
        compiled(torch.ones(3))
        assert not seen  # nothing is compiled while one of them runs
        return torch.ones(len(rows), dtype=torch.bool)

    first = threading.Thread(target=model.solve, kwargs={**data, "accepts": first_in_first_out})
    first.start()
    assert inside.wait(120)
    model.solve(**data, accepts=second_in_last_out)
    compiled(torch.ones(3))
    torch._dynamo.reset()
    assert len(seen) == 1


def test_min_steps_and_max_steps_bound_every_row():
    model, data = tiny.model("hrm"), inputs(16)
    free = model.solve(**data).steps
    bounded = model.solve(**data, min_steps=3, max_steps=5).steps
    assert free.min() < 3 and free.max() > 5  # otherwise the bounds would have no effect
    assert bounded.min() >= 3 and bounded.max() == 5
    assert model.solve(**data, max_steps=40, halt="fixed").steps.tolist() == [40] * 16


def test_a_trajectory_repeats_the_answer_of_a_finished_row():
    model, data = tiny.model("hrm"), inputs(16)
    solution = model.solve(**data, return_trajectory=True)
    plain = model.solve(**data)
    assert solution.trajectory.shape == (solution.steps.max(), 16, tiny.SEQ_LEN)
    assert torch.equal(solution.trajectory[-1], plain.predictions) and torch.equal(solution.steps, plain.steps)
    first = solution.steps.argmin()
    assert (solution.trajectory[solution.steps[first] - 1 :, first] == plain.predictions[first]).all()


# Configs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3}, "hidden_size=512.*num_attention_heads=3"),
        ({"hidden_size": 6, "num_attention_heads": 2}, "pos_encodings='rope'"),
        ({"pos_encodings": "alibi"}, r"pos_encodings='alibi'.*\('rope', 'rope2d', 'learned', 'none'\)"),
        ({"loss_type": "mse"}, r"loss_type='mse'.*\('stablemax', 'softmax'\)"),
        ({"forward_dtype": "int8"}, "forward_dtype='int8'"),
        ({"halt_max_steps": 0}, r"halt_max_steps=0.* 1\b"),
        ({"halt_exploration_prob": 1.5}, r"halt_exploration_prob=1\.5"),
        ({"puzzle_emb_ndim": 1025, "puzzle_emb_len": 2}, "puzzle_emb_ndim=1025.* 2 .* hidden_size=512"),
        ({"grid_shape": [9, 8]}, r"grid_shape=\[9, 8\].*seq_len=81"),
        ({"seq_len": "81"}, "'seq_len'.*int.*str"),
        ({"rope_theta": 0}, r"rope_theta'\]=0"),
    ],
)
def test_impossible_configs_are_rejected(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        HrmPuzzleConfig(**fields)


def test_a_config_survives_saving(tmp_path):
    config = tiny.config("trm-mlp", forward_dtype="bfloat16", task="sudoku", box_shape=[2, 2])
    config.save_pretrained(tmp_path)
    loaded = TrmPuzzleConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == {**config.to_dict(), "transformers_version": loaded.to_dict()["transformers_version"]}


# The puzzle table


def test_the_table_is_not_a_parameter_but_is_saved_and_counted_on_request(tmp_path):
    model = tiny.model("hrm")
    table = model.model.puzzle_emb.weight
    assert not any(parameter is table for parameter in model.parameters())
    assert model.num_parameters(include_puzzle_table=True) == model.num_parameters() + table.numel()
    model.save_pretrained(tmp_path)
    assert torch.equal(HrmPuzzleForSolving.from_pretrained(tmp_path).model.puzzle_emb.weight, table)
    groups = {group["name"]: group for group in model.optimizer_groups()}
    assert groups["puzzle_emb"]["params"][0] is table and groups["puzzle_emb"]["sparse_rows"]
    assert sum(parameter.numel() for parameter in groups["dense"]["params"]) == model.num_parameters()


@pytest.mark.parametrize("size", [7, 3])
def test_a_resized_table_keeps_its_rows_and_is_saved(size, tmp_path):
    model = tiny.model("trm")
    old = model.model.puzzle_emb.weight.clone()
    model.resize_puzzle_embeddings(size)
    model.save_pretrained(tmp_path)
    loaded = TrmPuzzleForSolving.from_pretrained(tmp_path)
    table, kept = loaded.model.puzzle_emb.weight, min(size, len(old))
    assert loaded.config.num_puzzle_identifiers == len(table) == size
    assert torch.equal(table[:kept], old[:kept])
    torch.testing.assert_close(table[kept:], old.mean(0).expand(size - kept, -1))


def test_a_reset_table_has_its_mean_everywhere():
    model = tiny.model("hrm")
    mean = model.model.puzzle_emb.weight.mean(0)
    model.reset_puzzle_embeddings()
    torch.testing.assert_close(model.model.puzzle_emb.weight, mean.expand(tiny.PUZZLES, -1))


def test_a_model_without_a_table_rejects_resizing():
    model = tiny.model("hrm", puzzle_emb_ndim=0)
    assert model.num_parameters(include_puzzle_table=True) == model.num_parameters()
    assert [group["name"] for group in model.optimizer_groups()] == ["dense"]
    with pytest.raises(ValueError, match="puzzle_emb_ndim=0"):
        model.resize_puzzle_embeddings(3)
