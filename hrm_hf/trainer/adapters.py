"""PEFT adapters for any architecture in the package: LoRA, DoRA and QLoRA (quantized base weights).

    model = with_adapters(AutoModelForPuzzleSolving.from_pretrained(base), TuningArguments(lora_rank=8))
    PuzzleTrainer(model, ...)

Every linear layer and convolution in the body is adapted. Weights that a recurrent model reuses have one adapter for
all uses. Small modules that must adjust to the adapted body are trained in full; the registry lists them
(`modules_to_save`). Embeddings, norms, hyper-connection routing and the vocabulary head stay frozen unless
`lora_modules_to_save` names them.

Sources: Hu et al. 2021, arXiv 2106.09685 (LoRA); Liu et al. 2024, arXiv 2402.09353 (DoRA); Dettmers et al. 2023, arXiv
2305.14314 (QLoRA).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import CONFIG_NAME, ModulesToSaveWrapper
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel

from ..io.messages import PEFT_MESSAGE, hide_messages
from ..io.model_names import find_model
from ..io.usage import validate_extra
from ..registry import architecture_of
from .recipes import ALL_LINEAR, ModelArguments, TuningArguments, split_names


if TYPE_CHECKING:
    from . import HrmTrainer

MAGNITUDE = "lora_magnitude_vector"
hide_messages((PEFT_MESSAGE,))


def resolve_base_model(model_args: ModelArguments, arguments: TuningArguments) -> None:
    """Set `model_args.model_name_or_path` to a saved adapter's base model, unless it is already set.

    Raises:
        ModelError: the saved adapter does not exist.
        ValueError: `model_name_or_path` is an adapter, or a new adapter has no base weights.
    """
    given = model_args.model_name_or_path
    if given is not None and Path(given, CONFIG_NAME).is_file():
        base = json.loads(Path(given, CONFIG_NAME).read_text()).get("base_model_name_or_path")
        raise ValueError(f"model_name_or_path={given!r}: is an adapter of {base}; pass it with --adapter {given}")
    if arguments.adapter:
        find_model(arguments.adapter)
        model_args.model_name_or_path = given or LoraConfig.from_pretrained(arguments.adapter).base_model_name_or_path
    elif arguments.adapts and given is None:
        raise ValueError("model_name_or_path=None: an adapter needs base weights; pass --model_name_or_path")


def quantization_config(
    arguments: TuningArguments, model_name_or_path: str, bf16: bool = False
) -> BitsAndBytesConfig | None:
    """Return the config for loading base weights in 8 or 4 bits (nf4, double quantization), or None.

    Output heads and fully trained modules are not quantized. With `bf16`, matrix products with 4-bit weights use
    bfloat16 instead of float32.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: the model consists of convolutions, which bitsandbytes does not quantize.
    """
    if arguments.load_in == "none":
        return None
    validate_extra("bitsandbytes", f"load_in={arguments.load_in} requires bitsandbytes", "bitsandbytes")
    row = architecture_of(AutoConfig.from_pretrained(model_name_or_path))
    if row and not row.quantizable:
        raise ValueError(
            f"load_in={arguments.load_in!r}: {row.model_type} consists of convolutions, but bitsandbytes quantizes "
            "only linear layers; remove the option"
        )
    # For architectures that are not ours, transformers finds the output head on its own.
    kept = [f".*{name}" for name in ("lm_head", *row.modules_to_save)] if row else None
    return BitsAndBytesConfig(
        load_in_8bit=arguments.load_in == "8bit",
        load_in_4bit=arguments.load_in == "4bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
        llm_int8_skip_modules=kept,
    )


def lora_config(model: PreTrainedModel, arguments: TuningArguments) -> LoraConfig:
    """Return the PEFT config for a model's adapter.

    Raises:
        ValueError: the targets include tied embeddings, or a module to save does not exist.
    """
    row = architecture_of(model)
    targets: str | list[str] = split_names(arguments.lora_targets)
    if targets == [ALL_LINEAR]:
        targets = adaptable_modules(model) if row else ALL_LINEAR
    names = {part for name, _ in model.named_modules() for part in name.split(".")}
    saved = [name for name in modules_to_save(model) if name in names]
    saved += split_names(arguments.lora_modules_to_save or [])
    unknown = [name for name in saved if name.split(".")[-1] not in names]
    if unknown:
        raise ValueError(f"lora_modules_to_save: {type(model).__name__} has no module {unknown[0]!r}")
    config = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha or 2 * arguments.lora_rank,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets,
        modules_to_save=saved or None,
        use_dora=arguments.use_dora,
        task_type=TaskType.CAUSAL_LM if model.can_generate() else None,
    )
    reject_tied_targets(model, config, f"lora_targets={arguments.lora_targets!r}")
    return config


def reject_tied_targets(model: PreTrainedModel, config: LoraConfig, option: str) -> None:
    """Raise ValueError if an adapter targets tied embeddings: PEFT cannot merge it into their shared weight."""
    if (head := model.get_output_embeddings()) is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    tied = [name for name, module in model.named_modules() if module in (head, model.get_input_embeddings())]
    if unfit := [name for name in tied if check_target_module_exists(config, name)]:
        raise ValueError(
            f"{option}: {unfit[0]} is one of {', '.join(tied)}, which share one weight, so merging the adapter would "
            f"change the model; train this module with --lora_modules_to_save {unfit[0].split('.')[-1]}"
        )


def modules_to_save(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of modules that an adapter for this architecture trains and saves in full."""
    row = architecture_of(model)
    return row.modules_to_save if row else ()


def adaptable_modules(model: PreTrainedModel) -> list[str]:
    """Return the full names of the linear layers and convolutions that get adapters."""
    whole = set(modules_to_save(model))
    return [
        f"{model.base_model_prefix}.{name}"
        for name, module in model.base_model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and whole.isdisjoint(name.split("."))
    ]


def with_adapters(model: PreTrainedModel, arguments: TuningArguments) -> PreTrainedModel | PeftModel:
    """Add a new adapter, load a saved one to continue training it, or return the model unchanged.

    Only the adapter and its copies of modules are trained; the model's own weights are frozen.
    """
    if not arguments.adapts:
        return model
    if arguments.load_in != "none":
        # No gradient checkpointing here, because the trainer enables it.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if arguments.adapter:
        if arguments.merge_adapter:
            reject_tied_targets(model, LoraConfig.from_pretrained(arguments.adapter), "merge_adapter=True")
        adapted = PeftModel.from_pretrained(model, arguments.adapter, is_trainable=True)
    else:
        adapted = get_peft_model(model, lora_config(model, arguments))
    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for copied in wrapper.modules_to_save.values():
                if "config" in vars(copied):  # otherwise, the copy would miss later changes to the config
                    copied.config = model.config
    return adapted


def save_trained(trainer: HrmTrainer, arguments: TuningArguments) -> bool:
    """At the end of a run, save the model, only its adapter, or (with `merge_adapter`) the merged model.

    Returns:
        Whether the folder is a complete checkpoint.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if arguments.merge_adapter and sharded:
        print("adapter not merged (sharded weights); merge later: PeftModel.from_pretrained(...).merge_and_unload()")
    elif arguments.merge_adapter:
        merge(trainer)
    trainer.save_model()
    return not arguments.saves_adapter and not (arguments.merge_adapter and sharded)


def merge(trainer: HrmTrainer) -> None:
    """Merge the adapter, or its weight average if there is one, into the trainer's model."""
    if trainer.average is not None:
        trainer.average.swap()
        trainer.average = None
    trainer.model = trainer.model.merge_and_unload()
