"""GGUF files. Referees: gguf's own reader and dequantization, torch's casts, and llama.cpp where it is installed."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hrm_hf import HrmGoCoderConfig, HrmGoCoderForCausalLM
from hrm_hf.export.gguf import export_gguf, gguf_vocabulary, interleave_rotary
from hrm_hf.export.gguf_check import CHECK_TEXTS
from hrm_hf.golang.data.build import train_on_texts, wrap_backend


VOCAB_SIZE, KNOWN = 352, 330  # rows of the embedding, tokens of the tokenizer
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip

needs_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
needs_runtime = pytest.mark.skipif(
    find_spec("xllamacpp") is None and find_spec("llama_cpp") is None, reason="no package with llama.cpp is installed"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_on_texts(iter(CHECK_TEXTS * 3), KNOWN)


def build(architecture: str, **overrides):
    """A random model whose logits are far from flat and whose vectors are neither 0 nor 1."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    if architecture == "unified":
        stacks = {"planner_layers": 2, "generator_layers": 0, "unified": True}
        model = HrmGoCoderForCausalLM(HrmGoCoderConfig(**{**SHAPE, **stacks, **overrides}))
    elif architecture == "llama":
        shape = {**SHAPE, **ids, "num_hidden_layers": 2, "num_key_value_heads": 2, "rope_theta": 5000.0}
        model = LlamaForCausalLM(LlamaConfig(**{**shape, **overrides}))
    else:
        shape = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
        model = GPT2LMHeadModel(GPT2Config(**{**shape, **ids, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 10)
            else:
                parameter.mul_(6)
    return model.eval()


def save(folder, tokenizer, architecture="llama", **overrides):
    model = build(architecture, **overrides)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def read(file):
    """Metadata and tensors (f32) of a GGUF file."""
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: (t.tensor_type.name, dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    return fields, tensors


def half_split(weight, heads):
    """Undo interleaved rotary order row by row: row i of a head was 2i, row i + head_dim/2 was 2i + 1."""
    order = [
        head * (size := len(weight) // heads) + 2 * (row % (size // 2)) + row // (size // 2)
        for head in range(heads)
        for row in range(len(weight) // heads)
    ]
    return weight[order]


def test_rows_of_a_head_go_from_half_split_to_interleaved_order():
    rows = np.arange(8.0)[:, None]
    assert interleave_rotary(rows, 1).ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleave_rotary(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("architecture, kv_heads", [("llama", 2), ("unified", 4)])
def test_a_llama_shaped_model_reads_back_bit_for_bit(tmp_path, tokenizer, architecture, kv_heads):
    state = save(tmp_path / "model", tokenizer, architecture).state_dict()
    result = export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="f32")
    fields, tensors = read(tmp_path / "out.gguf")
    assert fields["general.architecture"] == "llama"
    assert {kind for kind, _ in tensors.values()} == {"F32"}
    prefix = "model.planner." if architecture == "unified" else "model."
    ours = {"output_norm.weight": f"{prefix}norm.weight", "token_embd.weight": "model.embed_tokens.weight"}
    ours |= {"output.weight": "lm_head.weight"} if architecture == "llama" else {}
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    ours |= {
        f"blk.{layer}.{theirs}.weight": f"{prefix}layers.{layer}.{name}.weight"
        for layer in range(2)
        for theirs, name in names.items()
    }
    assert sorted(tensors) == sorted(ours)
    for theirs, name in ours.items():
        found = tensors[theirs][1]
        if ".attn_q." in theirs or ".attn_k." in theirs:
            found = half_split(found, 4 if ".attn_q." in theirs else kv_heads)
        assert np.array_equal(found, state[name].numpy()), theirs
    assert result["parameters"] == sum(tensor.size for _, tensor in tensors.values())


def test_gpt2_reads_back_bit_for_bit_with_matrices_transposed(tmp_path, tokenizer):
    state = save(tmp_path / "model", tokenizer, "gpt2").state_dict()
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="f32")
    fields, tensors = read(tmp_path / "out.gguf")
    assert fields["general.architecture"] == "gpt2" and len(tensors) == len(state) - 1  # the head is tied
    for theirs, name in {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}.items():
        assert np.array_equal(tensors[f"{theirs}.weight"][1], state[f"transformer.{name}.weight"].numpy())
    for theirs, name in {
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
    }.items():  # fmt: skip
        weight = state[f"transformer.h.1.{name}.weight"]
        assert np.array_equal(tensors[f"blk.1.{theirs}.weight"][1], (weight.T if weight.ndim == 2 else weight).numpy())
        assert np.array_equal(tensors[f"blk.1.{theirs}.bias"][1], state[f"transformer.h.1.{name}.bias"].numpy())


def test_shape_license_and_tokenizer_are_in_the_metadata(tmp_path, tokenizer):
    save(tmp_path / "model", tokenizer)
    (tmp_path / "model" / "README.md").write_text("---\nlicense: bsd-3-clause\n---\n# A model\n")
    export_gguf(tmp_path / "model", tmp_path / "out.gguf")
    fields, _ = read(tmp_path / "out.gguf")
    expected = {
        "block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "rope.dimension_count": 16, "rope.freq_base": 5000.0, "vocab_size": VOCAB_SIZE,
    }  # fmt: skip
    assert {name: fields[f"llama.{name}"] for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert (fields["general.name"], fields["general.license"]) == ("model", "bsd-3-clause")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[:KNOWN] == tokenizer.convert_ids_to_tokens(range(KNOWN))
    assert len(tokens) == VOCAB_SIZE and tokens[KNOWN] == f"[UNUSED{KNOWN}]"
    special = set(tokenizer.all_special_ids)
    assert len(special) == 43
    kinds = {1: "normal", 3: "control", 5: "unused"}
    assert [kinds[kind] for kind in types] == [
        "control" if index in special else "normal" if index < KNOWN else "unused" for index in range(VOCAB_SIZE)
    ]
    saved = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]] == saved["model"]["merges"]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos", "padding")] == [0, 1, 2, 3]
    assert fields["tokenizer.ggml.eot_token_id"] == tokenizer.convert_tokens_to_ids("</CODE>")
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template


def test_bos_is_added_if_the_tokenizer_adds_it(tokenizer):
    assert gguf_vocabulary(tokenizer, VOCAB_SIZE)["add_bos"] is True
    bare = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bare.post_processor = processors.ByteLevel(trim_offsets=False)
    vocabulary = gguf_vocabulary(wrap_backend(bare), VOCAB_SIZE)
    assert (vocabulary["add_bos"], vocabulary["add_eos"]) == (False, False)


@pytest.mark.parametrize("dtype, kind", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_is_torchs_cast_of_the_matrices(tmp_path, tokenizer, dtype, kind):
    state = save(tmp_path / "model", tokenizer).state_dict()
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype=dtype)
    _, tensors = read(tmp_path / "out.gguf")
    stored, values = tensors["blk.0.ffn_up.weight"]
    assert stored == dtype.upper()
    assert np.array_equal(values, state["model.layers.0.mlp.up_proj.weight"].to(kind).float().numpy())
    assert tensors["blk.0.attn_norm.weight"][0] == "F32"


def test_q8_0_is_within_half_a_step_of_each_block_of_32(tmp_path, tokenizer):
    state = save(tmp_path / "model", tokenizer).state_dict()
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="q8_0")
    stored, values = read(tmp_path / "out.gguf")[1]["blk.1.ffn_down.weight"]
    weight = state["model.layers.1.mlp.down_proj.weight"].numpy().reshape(-1, 32)
    step = np.abs(weight).max(1, keepdims=True) / 127
    assert stored == "Q8_0"
    assert (np.abs(values.reshape(-1, 32) - weight) <= step * (0.5 + 127 * 2**-11)).all()  # the step is stored as f16


def test_matrices_that_q8_0_cannot_hold_are_f16(tmp_path, tokenizer):
    save(tmp_path / "model", tokenizer, intermediate_size=80)
    result = export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="q8_0")
    _, tensors = read(tmp_path / "out.gguf")
    assert tensors["blk.0.ffn_down.weight"][0] == "F16" and tensors["blk.0.ffn_up.weight"][0] == "Q8_0"
    assert result["f16_matrices"] == 2


def test_two_stack_model_is_rejected_with_the_preset_to_use(tmp_path, tokenizer):
    HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset("test")).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"two-stack.*from_preset\(\"unified\"\)"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name, message", [("nowhere", "nowhere"), (".", "config.json"), ("lm", "hrm_lm")])
def test_invalid_models_are_named(tmp_path, name, message):
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "config.json").write_text('{"model_type": "hrm_lm"}')
    with pytest.raises(ValueError, match=message):
        export_gguf(tmp_path / name, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    "architecture, overrides, named",
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='silu', not 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "'linear'"),
        ("llama", {"attention_bias": True}, "attention_bias=False, not True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=False, not True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='gelu_new', not 'relu'"),
        ("unified", {"planner_cycles": 2}, "planner_cycles=1, not 2"),
    ],
)
def test_settings_unsupported_by_llama_cpp_are_rejected(tmp_path, tokenizer, architecture, overrides, named):
    save(tmp_path / "model", tokenizer, architecture, **overrides)
    with pytest.raises(ValueError, match=named):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf")


def word_level(backend):
    other = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}, unk_token="<unk>"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    return other


def lower_case(backend):
    backend.normalizer = normalizers.Lowercase()
    return backend


def digits_apart(backend, single=False):
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(single), pre_tokenizers.ByteLevel(False)])
    return backend


def blank_in_front(backend):
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def sentence_piece_like(backend):
    other = Tokenizer(BPE({"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}, [], byte_fallback=True))
    other.pre_tokenizer, other.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return other


@pytest.mark.parametrize(
    "change, named",
    [
        (word_level, "model=WordLevel"),
        (lower_case, "normalizer=Lowercase"),
        (digits_apart, "pre_tokenizer=Sequence"),
        (blank_in_front, "add_prefix_space=True"),
        (sentence_piece_like, "byte_fallback.*Metaspace"),
    ],
)
def test_tokenizers_other_than_byte_level_bpe_are_rejected(tokenizer, change, named):
    changed = change(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    with pytest.raises(ValueError, match=named):
        gguf_vocabulary(wrap_backend(changed), VOCAB_SIZE)


def test_tokenizer_with_more_ids_than_embeddings_is_rejected(tokenizer):
    with pytest.raises(ValueError, match=r"329.* 300"):
        gguf_vocabulary(tokenizer, 300)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_a_tensor(folder):
    state = load_file(folder / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def add_a_tensor(folder):
    state = load_file(folder / "model.safetensors")
    save_file(state | {"model.layers.0.gate": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})


def diverge(folder):
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def widen(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


def break_the_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"model": ')


def remove_the_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage, named",
    [
        (truncate, "is corrupted"),
        (drop_a_tensor, r"1 missing keys \(model.layers.1.mlp.up_proj.weight\)"),
        (add_a_tensor, r"1 unexpected keys \(model.layers.0.gate\)"),
        (diverge, r"model\.norm\.weight .*NaN"),
        (widen, r"config\.json|is corrupted"),
        (break_the_tokenizer, "tokenizer of .*read"),
        (remove_the_tokenizer, "has no tokenizer.json"),
    ],
)
def test_corrupted_checkpoint_is_rejected_and_nothing_is_written(tmp_path, tokenizer, damage, named):
    save(tmp_path / "model", tokenizer)
    damage(tmp_path / "model")
    (tmp_path / "out.gguf").write_text("an older file")
    with pytest.raises(ValueError, match=named):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.gguf"]
    assert (tmp_path / "out.gguf").read_text() == "an older file"


def test_pickled_weights_are_not_read(tmp_path, tokenizer):
    model = save(tmp_path / "model", tokenizer)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf")


def test_values_beyond_f16_are_rejected_only_for_f16(tmp_path, tokenizer):
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"output\.weight .*f16.* 65504"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="f16")
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="bf16")


@needs_runtime
@pytest.mark.external
@pytest.mark.parametrize(
    "architecture, dtype, tolerance",
    [
        ("unified", "f32", 1e-4),
        ("unified", "f16", 1e-1),
        ("llama", "f32", 1e-4),
        ("gpt2", "f32", 5e-2),  # llama.cpp computes GELU from an f16 table
    ],
)
def test_llama_cpp_gives_the_same_ids_and_probabilities(tmp_path, tokenizer, architecture, dtype, tolerance):
    save(tmp_path / "model", tokenizer, architecture)
    result = export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype=dtype, check=True)
    print(architecture, dtype, result)
    assert result["max_logit"] > 3  # far from flat
    assert result["compared_tokens"] > 60
    if dtype == "f32":
        assert result["argmax_agreement"] == 1.0
    assert result["max_logprob_difference"] < tolerance


@needs_runtime
@pytest.mark.external
def test_llama_cpp_splits_digits_as_smollm(tmp_path, tokenizer):
    pytest.importorskip("astropy.io.fits")  # cannot share a process with xllamacpp (different Cython)
    split = wrap_backend(digits_apart(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), single=True))
    assert gguf_vocabulary(split, VOCAB_SIZE)["pre_tokenizer"] == "smollm"
    save(tmp_path / "model", split)
    export_gguf(tmp_path / "model", tmp_path / "out.gguf", check=True)


@needs_runtime
@pytest.mark.external
def test_check_rejects_a_file_whose_tokenizer_gives_other_ids(tmp_path, tokenizer, monkeypatch):
    save(tmp_path / "model", tokenizer)
    vocabulary = gguf_vocabulary(tokenizer, VOCAB_SIZE)
    monkeypatch.setattr("hrm_hf.export.gguf.gguf_vocabulary", lambda *_: vocabulary | {"add_bos": False})
    with pytest.raises(ValueError, match=r"llama\.cpp produces different ids"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf", check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_runtime
@pytest.mark.external
def test_check_rejects_a_file_in_half_split_rotary_order(tmp_path, tokenizer, monkeypatch):
    save(tmp_path / "model", tokenizer)
    monkeypatch.setattr("hrm_hf.export.gguf.interleave_rotary", lambda weight, heads: weight)
    with pytest.raises(ValueError, match="produces different outputs"):
        export_gguf(tmp_path / "model", tmp_path / "out.gguf", check=True)


def vocabulary_in_llama_cpp(folder, tokenizer):
    """The tokenizer of an exported model in llama.cpp, loaded without the weights."""
    import llama_cpp

    save(folder / "model", tokenizer)
    export_gguf(folder / "model", folder / "out.gguf")
    return llama_cpp.Llama(str(folder / "out.gguf"), vocab_only=True, verbose=False)


@needs_llama_cpp
@pytest.mark.external
def test_llama_cpp_gives_text_back_unchanged_token_by_token(tmp_path, tokenizer):

    llama = vocabulary_in_llama_cpp(tmp_path, tokenizer)
    for text in CHECK_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        pieces = b"".join(llama.detokenize([index], prev_tokens=[1]) for index in ids)
        assert pieces.decode() == text


@needs_llama_cpp
@pytest.mark.external
def test_llama_cpp_stops_at_the_end_of_an_attempt(tmp_path, tokenizer):
    import llama_cpp

    llama = vocabulary_in_llama_cpp(tmp_path, tokenizer)
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    ending = {index for index in range(VOCAB_SIZE) if llama_cpp.llama_vocab_is_eog(vocab, index)}
    assert ending == set(tokenizer.convert_tokens_to_ids(["</CODE>", "</s>", "<REPO>"]))  # llama.cpp knows <REPO>


@needs_llama_cpp
@pytest.mark.external
def test_llama_cpp_renders_the_same_chat_prompt(tmp_path, tokenizer):
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    llama = vocabulary_in_llama_cpp(tmp_path, tokenizer)
    messages = [{"role": "user", "content": "Sum a slice.</PROBLEM><DONE>"}]
    formatter = Jinja2ChatFormatter(llama.metadata["tokenizer.chat_template"], eos_token="</s>", bos_token="<s>")
    prompt = formatter(messages=messages).prompt
    assert prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert llama.tokenize(prompt.encode(), add_bos=False, special=True) == ids
