"""A saved Go coder, or a baseline of its stream, as writer and builder with the budgets that it was trained with."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ...text.evaluation import model_positions
from ..data.collator import GoStreamBuilder
from .held_out import is_go_coder
from .writer import Writer


def load_writer(
    model: str,
    device: str,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    problem_budget: int | None = None,
    context_budget: int | None = None,
    repair_mode: str | None = None,
    **options: Any,
) -> tuple[Writer, GoStreamBuilder]:
    """Loads a model and its tokenizer.

    Args:
        max_length: tokens of a sequence, at most those that the model has positions for; 2048 by default.
        problem_budget, context_budget: tokens of problems and contexts; as the model's config says it has seen, or 256
            and 512.
        repair_mode: "rewrite" or "edits"; as the model's config says, or "rewrite".
        options: of `Writer`.
    """
    network = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    length = min(max_length or 2048, model_positions(network, tokenizer))
    known = {"problem_budget": 256, "context_budget": 512, "repair_mode": "rewrite"} | network.config.to_dict()
    budgets = {
        "problem_budget": problem_budget or known["problem_budget"],
        "context_budget": context_budget or known["context_budget"],
    }
    if is_go_coder(network):
        network.config.update(budgets)  # its own loop cuts as the builder does
    builder = GoStreamBuilder(tokenizer, length, **budgets, repairs=repair_mode or known["repair_mode"])
    return Writer(network, tokenizer, batch_size, length, **options), builder
