"""Model cards of language models; those of puzzle models are in test_cli_solve.py. Referee: huggingface_hub."""

import pytest
from huggingface_hub import ModelCard

from hrm_hf import HrmLmConfig, HrmLmForCausalLM, RlmMhcConfig, RlmMhcForCausalLM
from hrm_hf.cards import new_card_text, record_evaluation
from hrm_hf.models.configuration_hrm_go_coder import HrmGoCoderConfig
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM


WIDTHS = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
MODELS = {
    "hrm_go_coder": lambda: HrmGoCoderForCausalLM(HrmGoCoderConfig(**WIDTHS | {"vocab_size": 64}, planner_layers=3)),
    "hrm_lm": lambda: HrmLmForCausalLM(HrmLmConfig(**WIDTHS, num_h_layers=1, num_l_layers=1, halt_max_steps=3)),
    "rlm_mhc": lambda: RlmMhcForCausalLM(RlmMhcConfig(**WIDTHS, num_hidden_layers=2, mhc_flows=3)),
}
METRICS = {"eval_loss": 2.5, "eval_perplexity": 12.18, "eval_bits_per_byte": 1.9, "eval_runtime": 7.0, "epoch": 3.0}


@pytest.fixture(params=MODELS)
def checkpoint(request, tmp_path):
    """A saved model: its architecture, parameters and folder."""
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path / "my-model")
    return request.param, model.num_parameters(), tmp_path / "my-model"


def test_a_card_counts_the_parameters_and_names_the_architecture(checkpoint):
    name, parameters, folder = checkpoint
    text = new_card_text(folder)
    assert f"{parameters:,} parameters" in text and f"`{name}`" in text
    said = {"hrm_go_coder": "| planner_layers | 3 |", "hrm_lm": "up to 3 segments", "rlm_mhc": "stream it has 3"}
    assert said[name] in " ".join(text.split())
    assert "| hidden_size | 16 |" in text and "$" not in text
    # Of the others that name counts slots of the cache.
    assert ("| num_hidden_layers | 2 |" in text) == (name == "rlm_mhc")


def test_results_of_the_trainer_are_recorded_without_its_speed(checkpoint):
    _, parameters, folder = checkpoint
    card = ModelCard.load(record_evaluation(folder, METRICS, "books", "validation", parameters))
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results == {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.9}
    assert {result.task_type for result in card.data.eval_results} == {"text-generation"}
    assert "| books | validation | perplexity | 12.18 |" in card.text
    assert card.data.pipeline_tag == "text-generation"


def test_a_second_evaluation_replaces_the_first_and_keeps_what_people_wrote(checkpoint):
    _, parameters, folder = checkpoint
    path = record_evaluation(folder, METRICS, "books", "validation", parameters)
    path.write_text(path.read_text().replace("Not stated yet", "Forty-nine old books. Not stated yet"))
    record_evaluation(folder, {**METRICS, "eval_perplexity": 9.0}, "books", "validation", parameters)
    text = path.read_text()
    assert "Forty-nine old books" in text and "| perplexity | 9 |" in text and "12.18" not in text
