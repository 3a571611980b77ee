"""`hrm-hf serve` against generate, over HTTP."""

import json
import threading
import urllib.error
import urllib.request

import every
import pytest
import torch
from serving_process import post, served_here
from transformers import GenerationConfig
from typer.testing import CliRunner

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
    half = "\ufffd"  # a stream omits half a character at its end
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == choice.message.content.removesuffix(half)
    assert parts[-1].choices[0].finish_reason == choice.finish_reason
    asked = {"model": model, "input": "Hello", "max_output_tokens": NEW_TOKENS, "temperature": 0}
    response = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert response.output_text.removesuffix(half) == events[-1].response.output_text
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


def test_requests_choose_the_number_of_segments(tmp_path):
    """As in `transformers chat MODEL URL num_segments=1`, which sends its options as `generation_config`."""
    model, tokenizer = every.model("hrm_lm", exit_criterion="fixed", initializer_range=0.3), every.processor("hrm_lm")
    ids = tokenizer("func main", return_tensors="pt").input_ids
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    one, default = (model.generate(ids, **options, **given)[0] for given in ({"num_segments": 1}, {}))
    assert not torch.equal(one, default)
    asked = {"prompt": "func main", "max_tokens": NEW_TOKENS, "temperature": 0}
    asked["generation_config"] = json.dumps({"num_segments": 1})
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with served_here(str(folder)) as url:
        answer = post(f"{url}/v1/completions", **asked)
    assert answer["choices"][0]["text"] == tokenizer.decode(one[ids.shape[1] :], skip_special_tokens=True)
    threads = set(threading.enumerate())
    with served_here(str(folder), continuous_batching=True) as url:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(f"{url}/v1/completions", **asked)
        answer = post(f"{url}/v1/completions", **{**asked, "generation_config": None})
    assert answer["choices"][0]["text"] == tokenizer.decode(default[ids.shape[1] :], skip_special_tokens=True)
    assert [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon] == []


def test_other_models_are_rejected_before_a_server_starts(tmp_path):
    runner = CliRunner()
    found = runner.invoke(cli, ["serve", "./nowhere"])
    assert found.exit_code == 2 and "error: ./nowhere" in found.output
    found = runner.invoke(cli, ["serve", str(every.save("cosmo_cnn", tmp_path / "maps")), "--port", "1"])
    assert found.exit_code == 2 and "of type cosmo_cnn; expected a language model" in found.output
