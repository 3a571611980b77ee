"""Helpers shared by all models, and workarounds for 4-bit weights on the CPU.

bitsandbytes 0.50 has these bugs on the CPU, but not on the GPU:

- If the input size of a linear layer is not a multiple of the block size (64), dequantized weights have a relative
  error of 0.2 to 0.6 instead of 0.09, because the kernel starts a new block in each row. Dequantizing the weight as
  one long row gives the correct values.
- With AVX512-BF16, the first call in eval mode repacks weights for a bfloat16 product. The product fails if the input
  size is not a multiple of 64 or the output size not a multiple of 32, and a repacked layer passes no gradient on.
"""

import difflib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
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
from transformers.utils import TransformersKwargs, can_return_tuple, logging

from .bounds import MISSPELLED


# Arguments that transformers may pass to any forward with **kwargs, even if the forward does not use them.
LIBRARY_ARGUMENTS = frozenset(
    (
        *TransformersKwargs.__annotations__, "cache_position", "debug_io", "debug_io_dir", "ignore_index",
        "prune_layers", "return_dict", "shift_labels", "token_type_ids", "use_cache",
    )
)  # fmt: skip


LARGEST_WEIGHT = 1e18  # the square of larger weights can overflow in float32


def validate_call(model: nn.Module, kwargs: dict[str, Any], input_ids: torch.Tensor | None = None) -> None:
    """Validate the tokens and keyword arguments of a causal language model's forward.

    As in transformers, unknown names are accepted if they resemble no argument, because serving engines and generation
    loops pass on their own arguments.

    Raises:
        TypeError: a keyword argument is misspelled.
        ValueError: attention weights are requested but the attention function computes none, or `input_ids` contains a
            token outside the vocabulary.
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


def validate_ids(ids: torch.Tensor, size: int, name: str = "input_ids", limit: str = "vocab_size") -> None:
    """Raise ValueError for a token or label out of range. Ids on a GPU are not checked, to avoid a sync."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ids = ids.masked_fill(ids == -100, 0) if name == "labels" else ids
    low, high = (value.item() for value in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if low < 0 or high >= size:
        raise ValueError(f"{name}={low if low < 0 else high}: must be in [0, {size - 1}] ({limit}={size})")


def validate_labels(labels: torch.Tensor | None, tokens: torch.Tensor | None, vocab_size: int) -> None:
    """Raise ValueError for labels outside the vocabulary, or with a shape other than the tokens' [B, S]."""
    if labels is not None:
        validate_ids(labels, vocab_size, "labels")
    if labels is not None and tokens is not None and labels.shape != tokens.shape[:2]:
        shapes = f"{list(labels.shape)}; expected {list(tokens.shape[:2])}"
        raise ValueError(f"labels has shape {shapes}: needs one label per token; use -100 for tokens without one")


def broken_weights(named: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that have non-finite values or values large enough to overflow."""
    local = {n: t.to_local() if hasattr(t, "to_local") else t for n, t in named.items()}
    plain = {n: t.detach() for n, t in local.items() if type(t) in (torch.Tensor, nn.Parameter)}  # not torchao
    local = {n: t for n, t in plain.items() if t.numel() and t.is_floating_point() and t.element_size() > 1}
    largest = [torch.linalg.vector_norm(tensor, torch.inf).float() for tensor in local.values()]
    values = torch.stack([value.to(largest[0].device) for value in largest]).tolist() if largest else []
    return [name for name, value in zip(local, values) if not value < LARGEST_WEIGHT]


@contextmanager
def only_errors_logged() -> Iterator[None]:
    """Set transformers' log level to ERROR, and restore it afterwards."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


class PromptsMixin:
    """Mixin for causal language models that makes `generate` reject prompts beyond the context window."""

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any):
        """Generate as transformers does, but raise ValueError if a prompt without its padding exceeds the window."""
        ids, mask = kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("attention_mask")
        window = self.config.max_position_embeddings
        if ids is not None and ids.shape[-1] > window:
            length = ids.shape[-1] if mask is None or mask.ndim != 2 else int(mask.sum(-1).max())
            if length > window:
                text = f"has {length} tokens: the context window is {window} (max_position_embeddings)"
                raise ValueError(f"input_ids {text}; shorten the prompt")
        return super().generate(inputs, *args, **kwargs)


@lru_cache  # cached, because serving engines pass the same names for every token
def _closest_argument(name: str, model_class: type) -> str | None:
    """Return the forward argument with the most similar name. If none is similar, return None."""
    recorded = [f"output_{one}" for one in model_class._can_record_outputs or ()]
    known = [*inspect.signature(model_class.forward).parameters, "labels", *LIBRARY_ARGUMENTS, *recorded]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=MISSPELLED)), None)


def validate_no_attentions(model: nn.Module, requested: bool | None) -> None:
    """Raise ValueError if attention weights are requested, because the model cannot return them."""
    if model.config.output_attentions if requested is None else requested:
        raise ValueError(
            f"output_attentions=True: {type(model).__name__} does not return attention weights, because it has no "
            "attention layers or runs them many times per forward pass; remove this argument"
        )


class _Uncompiled(ContextDecorator):
    """Context manager and decorator that disables torch.compile while any thread runs its block or function.

    The compiler's stance is global to the process, so the last thread to leave restores the original stance.
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
    """Mixin that adds `presets()` and `from_preset(name)` to config classes with a `_presets` table."""

    _presets: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def presets(cls) -> list[str]:
        """Return the names that `from_preset` accepts."""
        return sorted(cls._presets)

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """Build a preset's config and apply `overrides`. Raise ValueError for an unknown name."""
        if name not in cls._presets:
            raise ValueError(f"name={name!r}: unknown preset of {cls.model_type}; use one of {cls.presets()}")
        return cls(**{**cls._presets[name], **overrides})


class LlamaModulesMixin:
    """Config mixin that gives PEFT default target modules for models with Llama's layer names.

    PEFT calls the config's `to_dict` before it looks up the model type in its tables, so `to_dict` adds the entries.
    Adding them earlier would require importing PEFT, which takes seconds.
    """

    def to_dict(self) -> dict[str, Any]:
        constants = sys.modules.get("peft.utils.constants")
        for name, table in vars(constants).items() if constants else ():
            if name.endswith("_MODULES_MAPPING") and "LNTUNING" not in name and "llama" in table:
                table.setdefault(self.model_type, table["llama"])
        return super().to_dict()


class CheckpointCodeMixin:
    """Mixin for pretrained models that save their code, and optionally a pipeline, with each checkpoint.

    Attributes:
        _auto_map: Auto class -> "module.Class"; set by `hrm_hf.registry`.
        _custom_pipelines: config.json's entry for the pipeline that is saved with a head: task -> "impl" (module and
            class), "pt" (transformers' Auto classes), "type" (of its inputs). transformers saves the modules that
            the head's module imports, so that module must import the pipeline, at least under TYPE_CHECKING.
        _complete_push: function that adds a model card and the code's license to a folder (first argument) before it
            is pushed to a repository (second argument). Without the package, transformers' own card is pushed.
    """

    _auto_map: dict[str, str] | None = None
    _custom_pipelines: dict[str, dict[str, Any]] | None = None
    _complete_push: Callable[[str, str], None] | None = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__name__.endswith("ForCausalLM"):
            # With label smoothing, Trainer shifts labels only for classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.
            known, model_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, cls.config_class.model_type
            if cls.__name__ not in known.values():
                known[cls.__name__ if model_type in known else model_type] = cls.__name__

    @property
    def device(self) -> torch.device:
        """Device for inputs. With offloaded weights, this is the device on which accelerate computes.

        Between calls, offloaded weights are on the meta device; inputs moved there would lose their values.
        """
        device = super().device
        if device.type == "meta":
            for module in self.modules():
                hook = getattr(module, "_hf_hook", None)
                for one in getattr(hook, "hooks", (hook,)):  # accelerate can attach several hooks to a module
                    if getattr(one, "execution_device", None) is not None:
                        return torch.device(one.execution_device)
        return device

    def save_pretrained(self, save_directory, **kwargs):
        """Save as transformers does, and add `auto_map` and the custom pipelines to config.json."""
        if self._auto_map:
            self.config.auto_map = dict(self._auto_map)
        if self._custom_pipelines:
            self.config.custom_pipelines = deepcopy(self._custom_pipelines)
        super().save_pretrained(save_directory, **kwargs)
        if self._custom_pipelines and self._auto_map:  # only config.json needs custom_pipelines
            del self.config.custom_pipelines

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """Add our model card before `push_to_hub` uploads the files."""
        if self._complete_push:
            self._complete_push(working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a model as transformers does, and make bitsandbytes' 4-bit weights work on the CPU."""
        loaded = super().from_pretrained(*args, **kwargs)
        repair_4bit_layers(loaded[0] if isinstance(loaded, tuple) else loaded)  # a tuple if loading info is requested
        return loaded

    def load_adapter(self, peft_model_id: str | None = None, *args, **kwargs):
        """Load an adapter as transformers does, but reject DoRA, which transformers 5.23 loads only partly."""
        info = super().load_adapter(peft_model_id, *args, **kwargs)
        lost = [name for name in info.missing_keys if "lora_magnitude_vector" in name]
        if lost:
            raise ValueError(
                f"peft_model_id={peft_model_id}: transformers does not load the magnitudes of a DoRA adapter "
                f"({lost[0]}, ...); use peft's PeftModel.from_pretrained(base, {str(peft_model_id)!r}), or merge it"
            )
        return info


class OwnModelMixin:
    """Mixin that makes AutoModel build our base models in transformers' generic heads. List it before the head.

    Registering `_model_class` keeps AutoModel from asking again whether to trust the checkpoint's code. Each head
    registers its config class, because loading that code creates a new class every time.
    """

    _model_class: type

    def __init__(self, config):
        AutoModel.register(type(config), self._model_class, exist_ok=True)
        self._model_class.register_for_auto_class()  # makes the base model include its code when saved separately
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
        """Run transformers' forward pass, but divide the loss by the Trainer's `num_items_in_batch`, if given."""
        num_items = kwargs.pop("num_items_in_batch", None)
        if labels is not None and self.num_labels > 1 and not labels.is_floating_point():
            validate_ids(labels, self.num_labels, "labels", "num_labels")
        given = {"use_cache": use_cache, "return_dict": True, **kwargs}
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **given)
        if labels is not None:
            given = {"logits": output.logits, "pooled_logits": output.logits, "num_items_in_batch": num_items}
            output.loss = self.loss_function(labels=labels, config=self.config, **given)
            of_texts = self.loss_type == "ForSequenceClassification"
            if num_items is not None and of_texts and self.config.problem_type != "single_label_classification":
                output.loss = output.loss * (labels.numel() / num_items)  # turns the mean into sum / num_items
        return output


class ConvolutionsMixin:
    """Mixin for pretrained convolutional models, which have linear layers only in their heads."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, but reject a quantization_config, because it would have no effect."""
        if kwargs.get("quantization_config") is not None:
            raise ValueError(
                f"quantization_config: {cls.__name__} consists of convolutions, and bitsandbytes and torchao quantize "
                "only linear layers; remove it, or use dtype=torch.bfloat16 to halve the size"
            )
        return super().from_pretrained(*args, **kwargs)


class Float32Buffers(nn.Module):
    """Module with buffers that keep their dtype in `.half()` etc. Parameters are still converted.

    Use it for constants with small differences that half precision would lose. (`_keep_in_fp32_modules_strict` does
    the same, but only for tensors that `from_pretrained(dtype=...)` reads from a file.)
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
    """Linear layer that computes in float32 for any input dtype. The caller must disable autocast."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(features.float(), self.weight.float(), bias)


def repair_4bit_layers(model: nn.Module) -> None:
    """Make 4-bit layers in a newly loaded model avoid bitsandbytes' broken CPU kernels."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    for module in model.modules():
        if type(module).__name__ != "Linear4bit":  # compares names to avoid importing bitsandbytes
            continue
        module.support_avx512bf16_for_cpu = False
        on_cpu = module.weight.device.type == "cpu"
        if on_cpu and module.in_features % module.weight.quant_state.blocksize:
            module.forward = partial(_multiply, module)


def _multiply(module: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    """Apply a 4-bit layer in its compute dtype and return the result in the dtype of `hidden_states`."""
    dtype = module.compute_dtype or hidden_states.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    return F.linear(hidden_states.to(dtype), dequantize_weight(module.weight).to(dtype), bias).to(hidden_states.dtype)


def dequantize_weight(weight: torch.Tensor) -> torch.Tensor:
    """Dequantize a bitsandbytes 4-bit `weight` to float32 [out, in], on any device and for any input size."""
    state, operators = weight.quant_state, torch.ops.bitsandbytes
    scales = state.absmax
    if state.nested:  # double quantization: the scales have 8 bits
        inner = state.state2
        scales = operators.dequantize_blockwise(scales, inner.absmax, inner.code, inner.blocksize, torch.float32)
        scales = scales + state.offset
    row = [1, math.prod(state.shape)]
    flat = operators.dequantize_4bit(weight.data, scales, state.blocksize, state.quant_type, row, torch.float32)
    return flat.view(tuple(state.shape))
