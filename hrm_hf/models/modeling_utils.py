"""Presets, checkpoints that carry their code, checks of calls, modules that stay in float32, 4-bit weights on the CPU.

bitsandbytes 0.50 has three faults on the CPU; its GPU code has none of them.

- If the inputs of a linear layer are not a multiple of the block (64), weights come back with a relative error of 0.2
  to 0.6 instead of 0.09: the kernel begins a new block in each row. Read as one long row the values are right.
- With AVX512-BF16, the first call in eval mode repacks weights for a bfloat16 product, which fails for inputs that are
  not a multiple of 64 and outputs that are not a multiple of 32. A repacked layer passes no gradient on.
"""

import difflib
import inspect
import math
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .bounds import MISSPELLED


# What transformers hands to a forward that takes **kwargs, whether that forward reads it or not.
LIBRARY_ARGUMENTS = frozenset(
    (
        *TransformersKwargs.__annotations__, "cache_position", "debug_io", "debug_io_dir", "ignore_index",
        "prune_layers", "return_dict", "shift_labels", "token_type_ids", "use_cache",
    )
)  # fmt: skip


def validate_call(model: nn.Module, kwargs: dict[str, Any], input_ids: torch.Tensor | None = None) -> None:
    """Check the tokens of a causal language model's forward, and what it hands on to its layers.

    Names unlike any argument pass, as in transformers: serving engines and generation loops hand on their own.

    Raises:
        TypeError: a misspelled keyword argument, which nothing reads.
        ValueError: attention weights are asked for, and the attention function computes none; or `validate_ids`.
    """
    if input_ids is not None:
        validate_ids(input_ids, model.config.vocab_size)
    recorded = [f"output_{name}" for name in type(model)._can_record_outputs or ()]
    for name in [name for name in kwargs if name not in LIBRARY_ARGUMENTS and name not in recorded]:
        if near := _closest_argument(name, type(model)):
            raise TypeError(f"{type(model).__name__} has no argument {name}; did you mean {near}?")
    requested, attention = kwargs.get("output_attentions"), model.config._attn_implementation
    if (model.config.output_attentions if requested is None else requested) and attention != "eager":
        raise ValueError(
            f"output_attentions=True: attn_implementation={attention!r} computes no attention weights; load the model "
            'with attn_implementation="eager", or call model.set_attn_implementation("eager")'
        )


def validate_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary, on an eager CPU; a GPU would have to wait."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    low, high = (value.item() for value in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids={low if low < 0 else high}: tokens are 0 to {vocab_size - 1} (vocab_size)")


def validate_labels(labels: torch.Tensor | None, tokens: torch.Tensor | None) -> None:
    """Raise ValueError for labels of another shape than the tokens [B, S], or than embeddings [B, S, D]."""
    if labels is not None and tokens is not None and labels.shape != tokens.shape[:2]:
        shapes = f"{list(labels.shape)}; expected {list(tokens.shape[:2])}"
        raise ValueError(f"labels has shape {shapes}, a label for each token, -100 where there is none")


class PromptsMixin:
    """For causal language models: `generate` rejects prompts longer than the window."""

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any):
        """As in transformers. Raises ValueError for a prompt [B, S] longer than the window, padding aside."""
        ids, mask = kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("attention_mask")
        window = self.config.max_position_embeddings
        if ids is not None and ids.shape[-1] > window:
            length = ids.shape[-1] if mask is None or mask.ndim != 2 else int(mask.sum(-1).max())
            if length > window:
                text = f"has {length} tokens; the window has {window} (max_position_embeddings)"
                raise ValueError(f"input_ids {text}; shorten the prompt")
        return super().generate(inputs, *args, **kwargs)


@lru_cache  # a serving engine hands on the same names at every token
def _closest_argument(name: str, model_class: type) -> str | None:
    """Return the argument of a forward that a name is most like, None if it is unlike all of them."""
    recorded = [f"output_{one}" for one in model_class._can_record_outputs or ()]
    known = [*inspect.signature(model_class.forward).parameters, "labels", *LIBRARY_ARGUMENTS, *recorded]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=MISSPELLED)), None)


def validate_no_attentions(model: nn.Module, requested: bool | None) -> None:
    """Raise ValueError if attention weights are asked for, of a model that keeps none."""
    if model.config.output_attentions if requested is None else requested:
        raise ValueError(
            f"output_attentions=True: {type(model).__name__} keeps no attention weights, since its layers run many "
            "times a forward or it has none; leave it out"
        )


class _Uncompiled(ContextDecorator):
    """Nothing is compiled while any thread is inside.

    The compiler's stance belongs to the process, so the last thread out restores what the first thread in found.
    """

    def __init__(self):
        self._lock, self._threads, self._stance = threading.Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._stance = torch.compiler.set_stance("force_eager")
            self._threads += 1

    def __exit__(self, *exception) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._stance.__exit__(*exception)


uncompiled = _Uncompiled()


class PresetsMixin:
    """`presets()` and `from_preset(name)` for a config class with a `_presets` table: name -> fields."""

    _presets: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def presets(cls) -> list[str]:
        """Names that `from_preset` accepts."""
        return sorted(cls._presets)

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """The config of a named architecture, with `overrides` applied. Raises ValueError for an unknown name."""
        if name not in cls._presets:
            raise ValueError(f"unknown preset {name!r} for {cls.model_type}; choose one of {cls.presets()}")
        return cls(**{**cls._presets[name], **overrides})


class LlamaModulesMixin:
    """For configs of models whose linear layers have Llama's names: PEFT then adapts what it adapts of a Llama.

    PEFT looks a model type up in its tables after it has read the config by `to_dict`. The types are entered there,
    and not before, because importing PEFT takes seconds.
    """

    def to_dict(self) -> dict[str, Any]:
        constants = sys.modules.get("peft.utils.constants")
        for name, table in vars(constants).items() if constants else ():
            if name.endswith("_MODULES_MAPPING") and "LNTUNING" not in name and "llama" in table:
                table.setdefault(self.model_type, table["llama"])
        return super().to_dict()


class CheckpointCodeMixin:
    """For pretrained-model classes; `hrm_hf.registry` fills `_auto_map` with Auto class -> "module.Class".

    `_custom_pipelines` is config.json's entry for the pipeline that travels with a head: task -> "impl" (module and
    class), "pt" (Auto classes of transformers), "type" of its inputs. The head's module imports the pipeline's, if
    only for type checkers, so that it travels. `_complete_push` adds a model card and the code's license to a folder
    (argument 1) before it is pushed to a repository (2); code without the package pushes the library's card.
    """

    _auto_map: dict[str, str] | None = None
    _custom_pipelines: dict[str, dict[str, Any]] | None = None
    _complete_push: Callable[[str, str], None] | None = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__name__.endswith("ForCausalLM"):
            # Trainer shifts labels for label smoothing only for the classes in this table.
            known, model_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, cls.config_class.model_type
            if cls.__name__ not in known.values():
                known[cls.__name__ if model_type in known else model_type] = cls.__name__

    @property
    def device(self) -> torch.device:
        """Where inputs go: as in transformers, and for weights that accelerate keeps elsewhere where it computes.

        Between two calls offloaded weights are on the meta device, and inputs sent there would lose their values.
        """
        device = super().device
        if device.type == "meta":
            for module in self.modules():
                hook = getattr(module, "_hf_hook", None)
                for one in getattr(hook, "hooks", (hook,)):  # accelerate may have put several on a module
                    if getattr(one, "execution_device", None) is not None:
                        return torch.device(one.execution_device)
        return device

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers."""
        if self._auto_map:
            self.config.auto_map = dict(self._auto_map)
        if self._custom_pipelines:
            self.config.custom_pipelines = deepcopy(self._custom_pipelines)
        super().save_pretrained(save_directory, **kwargs)
        if self._custom_pipelines and self._auto_map:  # in the package its own pipelines serve, see BoundedFields
            del self.config.custom_pipelines

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """The last step of `push_to_hub` in transformers, with a card that says what the model is."""
        if self._complete_push:
            self._complete_push(working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers; 4-bit weights of bitsandbytes are then right on the CPU, too."""
        loaded = super().from_pretrained(*args, **kwargs)
        repair_4bit_layers(loaded[0] if isinstance(loaded, tuple) else loaded)  # a tuple if loading info is asked for
        return loaded

    def load_adapter(self, peft_model_id: str | None = None, *args, **kwargs):
        """As in transformers. Raises ValueError where it would leave out a part of a DoRA adapter (5.23 does)."""
        info = super().load_adapter(peft_model_id, *args, **kwargs)
        lost = [name for name in info.missing_keys if "lora_magnitude_vector" in name]
        if lost:
            raise ValueError(
                f"{peft_model_id} is a DoRA adapter, and its lengths of rows are lost when transformers loads it "
                f"({lost[0]}, ...): use peft's PeftModel.from_pretrained(base, {str(peft_model_id)!r}), or merge it"
            )
        return info


class OwnModelMixin:
    """Stands before a generic head of transformers, which builds its model, `_model_class`, by AutoModel.

    AutoModel would ask again whether to trust the code of a checkpoint. The config's class is a new one each time that
    code is loaded, so each head registers it.
    """

    _model_class: type

    def __init__(self, config):
        AutoModel.register(type(config), self._model_class, exist_ok=True)
        self._model_class.register_for_auto_class()  # and the model, saved apart, takes its code with it
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ):
        """As in transformers, which forgets `num_items_in_batch`: a Trainer's divisor of the loss."""
        num_items = kwargs.pop("num_items_in_batch", None)
        given = {"use_cache": use_cache, "return_dict": True, **kwargs}
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **given)
        if labels is not None:
            given = {"logits": output.logits, "pooled_logits": output.logits, "num_items_in_batch": num_items}
            output.loss = self.loss_function(labels=labels, config=self.config, **given)
            of_texts = self.loss_type == "ForSequenceClassification"
            if num_items is not None and of_texts and self.config.problem_type != "single_label_classification":
                output.loss = output.loss * (labels.numel() / num_items)  # these losses are means in transformers
        return output


class ConvolutionsMixin:
    """For pretrained-model classes of convolutions, whose few linear layers are heads."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers. Raises ValueError for a quantization_config, which would change nothing."""
        if kwargs.get("quantization_config") is not None:
            raise ValueError(
                f"{cls.__name__} is made of convolutions, and bitsandbytes and torchao quantize linear layers alone: "
                "load it without quantization_config, with dtype=torch.bfloat16 for half the size"
            )
        return super().from_pretrained(*args, **kwargs)


class Float32Buffers(nn.Module):
    """Its buffers follow `.to(device)` but not `.half()`, `.bfloat16()` or `.double()`; its parameters follow both.

    For constants whose differences half precision loses. (`_keep_in_fp32_modules_strict` does the same for what
    `from_pretrained(dtype=...)` reads from a file, and only for that.)
    """

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class Float32Linear(nn.Linear):
    """A linear layer in float32, whatever the dtypes of weights and input. (Autocast is the caller's to stop.)"""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(features.float(), self.weight.float(), bias)


def repair_4bit_layers(model: nn.Module) -> None:
    """Keep the 4-bit layers of a model that was just loaded off the kernels that fail."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    for module in model.modules():
        if type(module).__name__ != "Linear4bit":  # by name: bitsandbytes is not needed where it is not used
            continue
        module.support_avx512bf16_for_cpu = False
        on_cpu = module.weight.device.type == "cpu"
        if on_cpu and module.in_features % module.weight.quant_state.blocksize:
            module.forward = partial(_multiply, module)


def _multiply(module: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    """The layer's product in its compute dtype; the result has the dtype of `hidden_states`."""
    dtype = module.compute_dtype or hidden_states.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    return F.linear(hidden_states.to(dtype), dequantize_weight(module.weight).to(dtype), bias).to(hidden_states.dtype)


def dequantize_weight(weight: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] of bitsandbytes' 4-bit `weight`, on any device and for any width."""
    state, operators = weight.quant_state, torch.ops.bitsandbytes
    scales = state.absmax
    if state.nested:  # scales that are themselves in 8 bits
        inner = state.state2
        scales = operators.dequantize_blockwise(scales, inner.absmax, inner.code, inner.blocksize, torch.float32)
        scales = scales + state.offset
    row = [1, math.prod(state.shape)]
    flat = operators.dequantize_4bit(weight.data, scales, state.blocksize, state.quant_type, row, torch.float32)
    return flat.view(tuple(state.shape))
