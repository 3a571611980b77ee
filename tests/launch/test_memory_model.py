"""The memory model of the launcher. Referee: the tensors that autograd saves in real models."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, HrmTextConfig, LlamaConfig

from hrm_hf import HrmLmConfig, RlmMhcConfig
from hrm_hf.launch.memory import GIB, LOGIT_BYTES, activation_bytes, largest_batch, model_shape, training_memory


WIDTHS = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
HALTING = {"halt_max_steps": 3, "bp_steps": 5}
FLAT = {
    "num_h_layers": 0, "H_cycles": 1, "L_cycles": 2, "bp_steps": None, "halt_max_steps": 3, "bp_segments": 2,
    "detach_between_segments": False, "deep_supervision": "last", "q_loss_weight": 0, "ponder_loss_weight": 0,
}  # fmt: skip
CONFIGS = {
    "llama": lambda n: LlamaConfig(**WIDTHS, num_hidden_layers=n, num_key_value_heads=2),
    "gpt2": lambda n: GPT2Config(vocab_size=8, n_embd=64, n_head=4, n_layer=n, attn_pdrop=0.0),
    "hrm_lm": lambda n: HrmLmConfig(**WIDTHS, **HALTING, num_h_layers=n, num_l_layers=n, num_key_value_heads=2),
    "hrm_lm, flat": lambda n: HrmLmConfig(**WIDTHS, **FLAT, num_l_layers=n, prelude_layers=n, coda_layers=n),
    "rlm_mhc": lambda n: RlmMhcConfig(**WIDTHS, num_hidden_layers=n),
    "hrm_text": lambda n: HrmTextConfig(**WIDTHS, head_dim=16, num_hidden_layers=n, max_position_embeddings=64),
}
ROWS, LENGTH = 4, 64


def saved_bytes(config, bf16: bool) -> int:
    """Return the bytes of all storages that autograd saves for the backward pass, without parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is reused
        return tensor

    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext(),
    ):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(storages.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_match_what_autograd_saves(name, bf16):
    small, large = CONFIGS[name](1), CONFIGS[name](3)
    counted = saved_bytes(large, bf16) - saved_bytes(small, bf16)
    shapes = model_shape(large), model_shape(small)
    if bf16:  # copies of the weights are counted separately
        counted -= 2 * (shapes[0].parameters - shapes[1].parameters)
    predicted = ROWS * LENGTH * (activation_bytes(shapes[0], bf16) - activation_bytes(shapes[1], bf16))
    assert predicted == pytest.approx(counted, rel=0.03)


def test_parameters_are_counted_without_allocating_them():
    assert model_shape(HrmLmConfig.from_preset("hrm-lm-1b")).parameters == 1_058_737_154


def test_float32_adamw_takes_sixteen_bytes_a_parameter_and_ddp_four_more():
    shape = model_shape(CONFIGS["llama"](2))
    names = ("weights", "gradients", "optimizer", "gradient_buckets")
    for processes, expected in ((1, 16), (2, 20)):
        terms = training_memory(shape, 1, 8, processes=processes)
        assert sum(terms[name] for name in names) == expected * shape.parameters


def test_sharding_divides_what_it_shards():
    shape = model_shape(CONFIGS["llama"](2))
    terms = {s: training_memory(shape, 1, 8, processes=4, strategy=s) for s in ("ddp", "deepspeed_zero2", "fsdp2")}
    P = shape.parameters
    assert [terms[s]["weights"] for s in terms] == [4 * P, 4 * P, P]
    assert [terms[s]["optimizer"] for s in terms] == [8 * P, 2 * P, 2 * P]


def test_later_segments_need_the_keys_and_values_of_earlier_ones():
    one, three = (model_shape(HrmLmConfig(**WIDTHS, bp_steps=2, halt_max_steps=m)) for m in (1, 3))
    assert training_memory(one, 2, 8)["keys_values"] == 0
    untrained = 24 - 6  # layer visits per segment whose keys autograd does not save anyway
    assert training_memory(three, 2, 8)["keys_values"] == 2 * 8 * 2 * untrained * 2 * 64 * 4


def test_logits_count_in_float32():
    shape = model_shape(CONFIGS["llama"](1))
    assert training_memory(shape, 3, 5, bf16=True)["logits"] == 15 * 8 * LOGIT_BYTES


def test_the_largest_batch_fits_and_one_more_does_not():
    shape = model_shape(HrmLmConfig.from_preset("hrm-lm-50m"))
    batch = largest_batch(shape, 512, 8 * GIB, bf16=True)
    used = [sum(training_memory(shape, size, 512, bf16=True).values()) for size in (batch, batch + 1)]
    assert used[0] <= 8 * GIB < used[1]
    assert largest_batch(shape, 512, GIB // 2) == 0
    assert largest_batch(shape, 512, 8 * GIB, bf16=True, checkpointing=True) > batch


def test_model_type_without_a_memory_model_is_rejected():
    from transformers import OPTConfig

    with pytest.raises(ValueError, match=r"'opt'.*per_device_train_batch_size"):
        model_shape(OPTConfig())
