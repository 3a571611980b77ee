"""`hrm-hf serve` against generate, over HTTP; and the paged cache, which only one architecture can use."""

import json
import urllib.request

import every
import pytest
import torch
from serving_process import post, served_here
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModel, ContinuousBatchingConfig, GenerationConfig
from typer.testing import CliRunner

from hrm_hf import HrmGoCoderForCausalLM, HrmLmForCausalLM, RlmMhcForCausalLM
from hrm_hf.cli import app as cli


NEW_TOKENS = 8


@pytest.fixture(scope="module", params=every.CAUSAL_LMS)
def served(request, tmp_path_factory):
    """Yield the name of an architecture and the address of a server with a tiny checkpoint of it."""
    folder = str(every.save(request.param, tmp_path_factory.mktemp("served")))
    with served_here(folder) as address:
        yield request.param, f"{address}/v1"


def test_server_completes_a_prompt_as_generate_does(served):
    architecture, url = served
    tokenizer = every.processor(architecture)
    ids = tokenizer("func main", return_tensors="pt").input_ids
    generated = every.model(architecture).generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
    answer = post(f"{url}/completions", prompt="func main", max_tokens=NEW_TOKENS, temperature=0)
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] <= NEW_TOKENS


def test_server_gives_the_openai_client_the_same_text_at_once_and_as_a_stream(served):
    from openai import BadRequestError, NotFoundError, OpenAI

    client = OpenAI(base_url=served[1], api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    asked |= {"max_tokens": NEW_TOKENS, "stop": ["never said"]}
    answer = client.chat.completions.create(**asked)
    choice, parts = answer.choices[0], list(client.chat.completions.create(**asked, stream=True))
    assert choice.message.role == "assistant" and answer.usage.completion_tokens > 0
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    assert parts[-1].choices[0].finish_reason == choice.finish_reason
    asked = {"model": model, "input": "Hello", "max_output_tokens": NEW_TOKENS, "temperature": 0}
    response = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert response.output_text == events[-1].response.output_text
    with pytest.raises(BadRequestError, match="logprobs=True"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], logprobs=True)
    with pytest.raises(NotFoundError, match="openai-community/gpt2"):
        client.completions.create(model="openai-community/gpt2", prompt="a")


def test_server_answers_requests_of_transformers_chat(served):
    """The client loads the model first, and sends its sampling options as `generation_config`."""
    from openai import OpenAI

    _, url = served
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    asked = json.dumps({"model": model}).encode()
    request = urllib.request.Request(f"{url[:-3]}/load_model", asked, {"Content-Type": "application/json"})
    assert b'"ready"' in urllib.request.urlopen(request).read()
    config = GenerationConfig(do_sample=True, max_new_tokens=NEW_TOKENS).to_json_string()
    messages = [{"role": "user", "content": "Hello"}]
    parts = list(
        client.chat.completions.create(
            model=model, messages=messages, stream=True, extra_body={"generation_config": config}
        )
    )
    assert 0 < parts[-1].usage.completion_tokens <= NEW_TOKENS


def test_continuous_batching_gives_rlm_mhc_the_tokens_of_generate():
    model = every.model("rlm_mhc")
    prompts = [row[:length].tolist() for row, length in zip(every.inputs("rlm_mhc", 3)["input_ids"], (5, 9, 24))]
    options = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [
        model.generate(torch.tensor([ids]), generation_config=options)[0, len(ids) :].tolist() for ids in prompts
    ]
    pages = ContinuousBatchingConfig(num_blocks=16, page_size=32, max_batch_tokens=64)  # do not reserve all memory
    answers = model.generate_batch(
        inputs=prompts, generation_config=options, continuous_batching_config=pages, progress_bar=False
    )
    assert [answer.generated_tokens for answer in answers.values()] == expected


LOOPS = {"num_loops": 2, "loop_start": 0, "loop_end": 1}


@pytest.mark.parametrize(
    "architecture, fields, match", [("hrm_go_coder", {}, "unified=False"), ("rlm_mhc", LOOPS, "num_loops=2")]
)
def test_recurrent_models_reject_caches_with_one_slot_per_layer(architecture, fields, match):
    model = every.model(architecture, **fields)
    with pytest.raises(ValueError, match=match):
        model.generate_batch(inputs=[[1, 2, 3]])
    for server in ("vllm", "sglang"):  # as their transformers backends create a model
        with pytest.raises(ValueError, match=match):
            AutoModel.from_config(model.config, attn_implementation=server)


class LayerPages:
    """Keys and values of one layer, stored by the server instead of the model."""

    def __init__(self):
        self.keys = self.values = None

    def attend(self, query, key, value, scaling):
        """Compute attention [batch, length, heads, width] of new positions to all earlier ones."""
        self.keys = key if self.keys is None else torch.cat((self.keys, key), 2)
        self.values = value if self.values is None else torch.cat((self.values, value), 2)
        new, known = query.shape[2], self.keys.shape[2]
        mask = torch.ones(new, known, dtype=torch.bool).tril(known - new)
        answer = scaled_dot_product_attention(query, self.keys, self.values, mask, scale=scaling, enable_gqa=True)
        return answer.transpose(1, 2)


def server_attention(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    """Attention function that vLLM's and SGLang's transformers backends substitute in a model."""
    return attention_instances[module.layer_idx].attend(query, key, value, scaling), None


def test_server_with_its_own_cache_gets_the_tokens_of_generate(monkeypatch):
    """As vLLM 0.33 and SGLang call a model: the base model by AutoModel, flat positions, their objects as keywords."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "server", server_attention)
    model = every.model("rlm_mhc")
    prompt = every.inputs("rlm_mhc", 1)["input_ids"]
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    served = AutoModel.from_config(model.config, attn_implementation="server").eval()
    served.load_state_dict(model.model.state_dict())
    pages = {layer: LayerPages() for layer in range(served.config.num_hidden_layers)}
    ids, seen = prompt, 0
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            positions = torch.arange(seen, ids.shape[1])[None]
            states = served(
                input_ids=ids[:, seen:], position_ids=positions, use_cache=False, return_dict=False,
                attention_instances=pages,
            )[0]  # fmt: skip
            seen = ids.shape[1]
            ids = torch.cat((ids, model.lm_head(states[:, -1:]).argmax(-1)), 1)
    assert torch.equal(ids, expected)


def test_classes_report_compatibility_with_other_servers():
    """vLLM and SGLang call this method before they replace the attention of a class."""
    assert RlmMhcForCausalLM.is_backend_compatible() and HrmLmForCausalLM.is_backend_compatible()
    assert not HrmGoCoderForCausalLM.is_backend_compatible()


def test_other_models_are_rejected_before_a_server_starts(tmp_path):
    runner = CliRunner()
    found = runner.invoke(cli, ["serve", "./nowhere"])
    assert found.exit_code == 2 and "error: ./nowhere" in found.output
    found = runner.invoke(cli, ["serve", str(every.save("cosmo_cnn", tmp_path / "maps")), "--port", "1"])
    assert found.exit_code == 2 and "of type cosmo_cnn; expected a language model" in found.output
