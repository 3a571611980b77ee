"""Turn a saved decoder into a saved looped `hrm_lm` (`hrm-hf retrofit`).

`HrmLmForCausalLM.from_llama` converts the model. This module checks the result, and copies the tokenizer.
"""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..export.checkpoint import complete_folder_or_nothing, find_file, load_model
from ..io.usage import as_usage_errors
from ..models.modeling_hrm_lm import HrmLmForCausalLM
from ..models.retrofit_hrm_lm import NEW_WEIGHTS, split_layers, validate_decoder
from .causal_lm import load_tokenizer
from .convert import TOKENIZER_FILES
from .options import RetrofitOptions


CHECKED = 16  # number of tokens on which one pass is compared with the decoder


def retrofit_decoder(options: RetrofitOptions) -> dict[str, Any]:
    """Save a decoder as a looped model, with its generation config and tokenizer, and return a summary.

    The model keeps the dtype of the weights. `one_pass_difference` in the summary is computed in float32, where it
    should be 0; in bfloat16, the two models round differently.

    Raises:
        UsageError: the layers do not add up.
        ValueError: the decoder is not supported, or corrupted.
        FileExistsError: `out` contains files, and `force` is not set.
    """
    config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
    validate_decoder(config)
    given = (options.prelude, options.loop, options.coda)
    prelude, loop, coda = as_usage_errors(split_layers, config.num_hidden_layers, *given)
    with complete_folder_or_nothing(options.out, options.force) as folder:
        source = load_model(options.model)
        dtype = source.dtype
        source.float()
        model = HrmLmForCausalLM.from_llama(
            source,
            prelude_layers=prelude,
            loop_layers=loop,
            coda_layers=coda,
            passes=options.passes,
            input_injection=options.input_injection,
            loop_step=options.loop_step,
        )
        difference = one_pass_difference(source, model)
        model.to(dtype).save_pretrained(folder)
        has_tokenizer = any(find_file(options.model, name) for name in TOKENIZER_FILES)
        if has_tokenizer:
            load_tokenizer(None, options.model).save_pretrained(folder)
    new = {name: weight.numel() for name, weight in model.named_parameters() if NEW_WEIGHTS.fullmatch(name)}
    return {
        "out": str(options.out),
        "source": options.model,
        "source_type": config.model_type,
        "layers": f"{prelude} before the loop, {loop} in it, {coda} after it",
        "passes": options.passes,
        "parameters": model.num_parameters(),
        "new_parameters": sum(new.values()),
        "new": list(new),
        "tokenizer": has_tokenizer,
        "one_pass_difference": difference,
    }


@torch.no_grad()
def one_pass_difference(source: PreTrainedModel, model: HrmLmForCausalLM) -> float:
    """Compute the largest difference between a decoder's logits and those of its looped model with one pass."""
    length = min(CHECKED, source.config.max_position_embeddings)
    ids = torch.linspace(0, source.config.vocab_size - 1, length).long()[None]
    return (model(ids, num_segments=1).logits - source(ids).logits).abs().max().item()
