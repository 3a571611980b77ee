"""Stand-ins for vLLM's and SGLang's transformers backends, which cache keys and values by `layer_idx`.

Neither server was run. Both replace the attention function of the base model and call it with flat tokens.
"""

import ast
import fnmatch
import inspect
import json
import textwrap

import every
import pytest
import tiny_go
import tiny_hrm_lm
import tiny_mhc
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModel

from hrm_hf import HrmGoCoderForCausalLM, HrmLmForCausalLM, RlmMhcForCausalLM


HRM_LM = {"exit_criterion": "fixed", "initializer_range": 0.3}
FLAT = {**HRM_LM, **tiny_hrm_lm.LOOP, "L_cycles": 2}
HALTING = {"exit_criterion": "latent_diff"}
CYCLES = tiny_go.VARIANTS["unified cycles"]
MODELS = {
    "hrm_lm, flat": lambda: tiny_hrm_lm.model(**FLAT),
    "hrm_lm, two stacks": lambda: tiny_hrm_lm.model(**HRM_LM),
    "rlm_mhc": lambda: tiny_mhc.model(),
    "rlm_mhc, loops": lambda: tiny_mhc.model(**tiny_mhc.LOOPS),
    "hrm_go_coder, unified": lambda: tiny_go.model(awake=True, **CYCLES),
}
models = pytest.mark.parametrize("name", MODELS)


class Server:
    """Keys and values of several requests whose tokens of a step are concatenated, with one store per `layer_idx`."""

    def __init__(self, slots: int):
        self.instances = {slot: Store(self) for slot in range(slots)}

    def run(self, model, tokens: list[torch.Tensor], start: int) -> list[torch.Tensor]:
        """Run a step with each request's new tokens, and return their states [T, D]."""
        self.lengths = [len(new) for new in tokens]
        positions = torch.cat([torch.arange(start, start + length) for length in self.lengths])
        outputs = model(
            input_ids=torch.cat(tokens)[None], position_ids=positions[None], use_cache=False, return_dict=False,
            attention_instances=self.instances,
        )  # fmt: skip
        return outputs[0][0].split(self.lengths)


class Store:
    """Keys and values of one slot, per request."""

    def __init__(self, server: Server):
        self.server, self.past = server, {}

    def attend(self, query, key, value, scaling):
        """Compute attention [1, T, heads, width] of each request's new tokens to its own earlier tokens."""
        mixed = []
        for request, new in enumerate(zip(*(part.split(self.server.lengths, 2) for part in (query, key, value)))):
            old = self.past.get(request, (new[1][:, :, :0], new[2][:, :, :0]))
            keys, values = self.past[request] = [torch.cat(pair, 2) for pair in zip(old, new[1:])]
            length, known = new[0].shape[2], keys.shape[2]
            mask = torch.ones(length, known, dtype=torch.bool).tril(known - length)
            mixed.append(scaled_dot_product_attention(new[0], keys, values, mask, scale=scaling, enable_gqa=True))
        return torch.cat(mixed, 2).transpose(1, 2)


def server_attention(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    """Attention function that the servers substitute in a model."""
    assert attention_mask is None
    return attention_instances[module.layer_idx].attend(query, key, value, scaling), None


def served(model, monkeypatch, engine: str = "vllm"):
    """Return the base model as a server creates it."""
    monkeypatch.setitem(AttentionInterface._global_mapping, engine, server_attention)
    base = AutoModel.from_config(model.config, attn_implementation=engine).to(model.dtype).eval()
    base.load_state_dict(model.model.state_dict())
    return base


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@models
@torch.no_grad()
def test_server_with_its_own_cache_computes_the_states_of_forward(name, engine, monkeypatch):
    model = MODELS[name]().double()
    rows = torch.randint(70 if "go" in name else 3, model.config.vocab_size, (2, 9))
    expected = model.model(rows).last_hidden_state
    base = served(model, monkeypatch, engine)
    server = Server(base.config.num_hidden_layers)
    read = server.run(base, [rows[0, :6], rows[1, :6]], 0)
    then = server.run(base, [rows[0, 6:], rows[1, 6:]], 6)
    found = torch.stack([torch.cat(pair) for pair in zip(read, then)])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def attention_call(module: torch.nn.Module) -> ast.Call | None:
    """Return the call of the attention function in a module's forward, found in its source as vLLM does."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    names = [
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith(".get_interface")
    ]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    assert len(names) == len(calls) <= 1, type(module)
    return calls[0] if calls else None


@models
def test_each_cache_slot_has_one_module_whose_source_calls_the_attention_function_once(name, monkeypatch):
    """vLLM attaches its own attention to these modules (pull request 54941)."""
    base = served(MODELS[name](), monkeypatch)
    found = [(module, call) for module in base.modules() if (call := attention_call(module)) is not None]
    assert sorted(module.layer_idx for module, _ in found) == list(range(base.config.num_hidden_layers))
    for module, call in found:
        scaling = next(word.value for word in call.keywords if word.arg == "scaling")
        assert module.config._attn_implementation == "vllm"
        assert ast.unparse(call.args[0]) == "self" and ast.unparse(scaling) == "self.scaling"
        assert isinstance(module.scaling, float) and next(module.parameters(), None) is None


@models
def test_tensor_parallel_plans_name_every_linear_layer_of_the_blocks(name):
    model = MODELS[name]()
    base = model.model
    linear = [n for n, module in base.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in f".{n}"]
    plan = base.config.base_model_tp_plan
    assert linear and [n for n in linear if not any(fnmatch.fnmatch(n, pattern) for pattern in plan)] == []
    assert "lm_head" in model._tp_plan  # a tied head is sharded like the embeddings


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_checkpoints_name_the_classes_that_servers_look_up(architecture, tmp_path):
    config = json.loads((every.save(architecture, tmp_path) / "config.json").read_text())
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= set(config["auto_map"])


def test_classes_report_compatibility_with_servers():
    """vLLM and SGLang call this method before they replace the attention of a class."""
    for head in (HrmLmForCausalLM, RlmMhcForCausalLM, HrmGoCoderForCausalLM):
        assert head.is_backend_compatible()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: tiny_hrm_lm.model(kv_layout="last_visit"), "kv_layout='last_visit'"),
        (lambda: tiny_hrm_lm.model(**HALTING), "exit_criterion='latent_diff'"),
        (lambda: tiny_go.model(), "unified=False"),
    ],
)
def test_servers_cannot_load_configs_they_would_compute_wrongly(engine, build, match):
    with pytest.raises(ValueError, match=match):
        AutoModel.from_config(build().config, attn_implementation=engine)
