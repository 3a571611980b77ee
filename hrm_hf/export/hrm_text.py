"""Export of `hrm_lm` to transformers' `hrm_text`, for configurations that compute the same function.

    export_hrm_text("runs/loop", "loop-hrm-text", check=True)
    AutoModelForCausalLM.from_pretrained("loop-hrm-text")  # needs transformers, not this package

`hrm_text` is HRM-Text: two stacks of equal depth, z_L = L(z_L + z_H) and z_H = H(z_H + z_L), without halting. The
exported model is causal (`prefix_lm=False`). Two stacks of `hrm_lm` that do not read x in the low-level stack are such
a model, and so is a flat loop whose coda reads z + x: the coda is then the high-level stack.
"""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, HrmTextConfig, HrmTextForCausalLM, PreTrainedModel

from ..hub.kinds import load_config
from ..models.configuration_hrm_lm import HrmLmConfig
from .checkpoint import complete_folder_or_nothing, find_file, load_model
from .gguf import Layout, unsupported
from .gguf_loops import hrm_lm_layouts
from .torch_export import compare


SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "embedding_scale", "tie_word_embeddings",
    "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def export_hrm_text(
    model: str | Path, out: str | Path, passes: int | None = None, force: bool = False, check: bool = False
) -> dict[str, Any]:
    """Write a model and its tokenizer as transformers' `hrm_text`, or write nothing if the export fails.

    See `ExportHrmText` for the arguments. With `check`, the folder is loaded and its logits are compared before `out`
    appears.

    Raises:
        FileExistsError: `out` is a file or a folder that is not empty.
        ValueError: a field that `hrm_text` does not support, a corrupted checkpoint, or different logits (with
            `check`). The message names every such field.
    """
    with complete_folder_or_nothing(Path(out), force) as unfinished:
        layout = hrm_text_layout(load_config(str(model)), str(model), passes)
        network = load_model(str(model))
        exported = to_hrm_text(network, layout)
        exported.save_pretrained(unfinished)
        if find_file(str(model), "tokenizer_config.json") is not None:
            AutoTokenizer.from_pretrained(str(model)).save_pretrained(unfinished)
        result = {
            "out": str(out),
            "architecture": exported.config.model_type,
            "parameters": exported.num_parameters(),
            "passes": layout.segments,
            "files": sorted(file.name for file in unfinished.iterdir()),
        }
        if check:
            loaded = AutoModelForCausalLM.from_pretrained(unfinished, trust_remote_code=False).float().eval()
            run = lambda inputs: [loaded(**inputs, use_cache=False).logits]  # noqa: E731
            result |= compare(network.float(), run, passes=layout.segments)
    return result


def hrm_text_layout(config: Any, model: str, passes: int | None) -> Layout:
    """Return the layout of an `hrm_lm` as `hrm_text`. Raise a ValueError that names every unsupported field."""
    if not isinstance(config, HrmLmConfig):
        raise ValueError(f"{model} is a {config.model_type}; expected hrm_lm")
    layout = next(each for each in hrm_lm_layouts(config, model, passes) if each.architecture == "hrm_text")
    supported = layout.expected | {"num_key_value_heads": (config.num_attention_heads,)}
    if wrong := unsupported(config, supported):
        raise ValueError(f"{model}: transformers' hrm_text needs {', '.join(wrong)}")
    return layout


def to_hrm_text(network: PreTrainedModel, layout: Layout) -> HrmTextForCausalLM:
    """Convert an `hrm_lm` with the given layout to transformers' `hrm_text`."""
    config = HrmTextConfig(
        **{name: getattr(network.config, name) for name in SHARED},
        num_hidden_layers=layout.keys["hrm.layers_per_stack"],
        H_cycles=layout.keys["hrm.h_cycles"],
        L_cycles=layout.keys["hrm.l_cycles"],
        prefix_lm=False,
    )
    exported = HrmTextForCausalLM(config).to(network.dtype).eval()
    state = {name.replace("model.coda.", "model.H_module."): tensor for name, tensor in network.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if not name.startswith("model.q_head.")}
    state.setdefault("model.z_L_init", exported.model.z_L_init)  # zeros
    exported.load_state_dict(state)
    exported.generation_config = network.generation_config
    return exported
