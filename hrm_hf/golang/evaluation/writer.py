"""Load a Go coder, or a baseline trained on the same stream, and write plans and code with it.

Generation is plain autoregression in two steps, so that a given beginning of the code can be forced: from ...<PLAN> to
</PLAN>, then from <CODE>prefix to </CODE>. Prompts are batched by length, and only the tags that belong in a segment
may be written. The Go coder's own loop of attempts is `generate_with_refinement`, which does not go through here.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from ...models.generation_hrm_go_coder import IN_PLANS, GoCoderGenerationMixin, RowLimits
from ...models.logits_process_hrm_go_coder import repetition_guards
from ...models.processing_hrm_go_coder import EOS, PAD, TOKEN_IDS, encode_text
from ...registry import architecture_of
from ...text.evaluation import model_positions
from ..data.streams import GoStreamBuilder


END_OF_PLAN = (TOKEN_IDS["</PLAN>"], TOKEN_IDS[EOS])
END_OF_CODE = (TOKEN_IDS["</CODE>"], TOKEN_IDS[EOS])


def is_go_coder(model) -> bool:
    """Whether a model has `generate_with_refinement` and decides; baselines only continue text."""
    row = architecture_of(model)
    return row is not None and issubclass(row.head, GoCoderGenerationMixin)


def load_writer(
    model: str,
    device: str,
    *,
    max_length: int | None = None,
    problem_budget: int | None = None,
    context_budget: int | None = None,
    **options: Any,
) -> tuple["Writer", GoStreamBuilder]:
    """Load a model and its tokenizer.

    Args:
        max_length: tokens of a sequence, at most the model's positions; 2048 by default.
        problem_budget, context_budget: tokens of problems and contexts; by default those of the model's config, or 256
            and 512.
        options: fields of `Writer`.
    """
    network = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    length = min(max_length or 2048, model_positions(network, tokenizer))
    known = {"problem_budget": 256, "context_budget": 512} | network.config.to_dict()
    budgets = {
        "problem_budget": problem_budget or known["problem_budget"],
        "context_budget": context_budget or known["context_budget"],
    }
    if is_go_coder(network):
        network.config.update(budgets)  # its own loop truncates as the builder does
    builder = GoStreamBuilder(tokenizer, length, **budgets)
    return Writer(network, tokenizer, max_length=length, **options), builder


@dataclass
class Writer:
    """A model, its tokenizer and the budgets of what it writes.

    Attributes:
        batch_size: sequences at a time.
        max_length: tokens of a complete sequence; what does not fit is truncated.
        max_plan_tokens, max_code_tokens: most new tokens of a plan and of a code sample.
        progress: whether to show a progress bar; None shows it on a terminal only.
        repetition_guard: whether plans and code are kept from repeating themselves (`repetition_guards`).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int = 8
    max_length: int = 1024
    max_plan_tokens: int = 128
    max_code_tokens: int = 512
    progress: bool | None = None
    repetition_guard: bool = True

    def bar(self, total: int, what: str):
        """Return a progress bar over `total` items."""
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=what, disable=None if self.progress is None else not self.progress)

    def plans(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> list[list[int]]:
        """Return the ids between <PLAN> and </PLAN> for prompts that end in <PLAN>."""
        written = self.continuations(prompts, END_OF_PLAN, self.max_plan_tokens, temperature, IN_PLANS, "plans")
        return [_until(ids, END_OF_PLAN) for ids in written]

    def codes(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0) -> list[str]:
        """Return code, each sample beginning with its prefix, for prompts after which <CODE> comes."""
        written = self.code_ids(prompts, prefixes, temperature)
        return [self.code_of(prefix, ids) for prefix, ids in zip(prefixes, written)]

    def code_ids(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0
    ) -> list[list[int]]:
        """Return the ids after <CODE> and each prefix, </CODE> included, for prompts after which <CODE> comes."""
        code = TOKEN_IDS["<CODE>"]
        starts = [
            [*ids, code, *encode_text(self.tokenizer, text)] for ids, text in zip(prompts, prefixes, strict=True)
        ]
        return self.continuations(starts, END_OF_CODE, self.max_code_tokens, temperature, what="code")

    def code_of(self, prefix: str, ids: Sequence[int]) -> str:
        """Decode ids of `code_ids` into code."""
        return prefix + self.tokenizer.decode(_until(ids, END_OF_CODE), skip_special_tokens=True)

    def planned_codes(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0
    ) -> tuple[list[list[int]], list[str]]:
        """Return plans (ids) and code for prompts that end in <PLAN>."""
        plans = self.plans(prompts, temperature)
        close = TOKEN_IDS["</PLAN>"]
        return plans, self.codes([[*a, *b, close] for a, b in zip(prompts, plans)], prefixes, temperature)

    @torch.no_grad()
    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        tags: Collection[int] = (),
        what: str = "generating",
    ) -> list[list[int]]:
        """Return the model's tokens after each prompt, the stop token included; empty where there is no room.

        Args:
            temperature: 0 is greedy; otherwise the complete distribution is sampled at that temperature.
            tags: special tokens that may be written besides the stop tokens.
        """
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        how |= {"max_new_tokens": max_new_tokens, "eos_token_id": list(stop_ids)}
        how["suppress_tokens"] = [token for token in TOKEN_IDS.values() if token not in {*stop_ids, *tags}]
        results: list[list[int]] = [[] for _ in prompts]
        fitting = [i for i in range(len(prompts)) if len(prompts[i]) < self.max_length]
        order = sorted(fitting, key=lambda i: len(prompts[i]), reverse=True)
        with self.bar(len(prompts), what) as bar:
            bar.update(len(prompts) - len(order))
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                written = self._batch([list(prompts[i]) for i in rows], **how)
                for row, ids in zip(rows, written):
                    results[row] = ids
                bar.update(len(rows))
        return results

    def _batch(self, prompts: list[list[int]], max_new_tokens: int, eos_token_id: list[int], **how) -> list[list[int]]:
        width = max(map(len, prompts))
        guards = repetition_guards(width) if self.repetition_guard else None
        pad, device = TOKEN_IDS[PAD], self.model.device
        if isinstance(self.model, GoCoderGenerationMixin):
            how["plan_first"] = False  # a prompt that ends in <PLAN> would be read as a task, and its plan hidden
        limits = [min(max_new_tokens, self.max_length - len(ids)) for ids in prompts]
        output = self.model.generate(
            torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device),
            attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device),
            max_new_tokens=max(limits),
            stopping_criteria=StoppingCriteriaList([RowLimits([width + limit for limit in limits])]),
            eos_token_id=eos_token_id,
            pad_token_id=pad,
            logits_processor=guards,
            return_dict_in_generate=True,
            **how,
        ).sequences
        return [_until(ids, eos_token_id, 1) for ids in output[:, width:].tolist()]

    @torch.no_grad()
    def nats(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], what: str = "losses") -> list[float]:
        """Return the negative log-likelihood of ids[start:] of each sequence, in nats. Starts are at least 1."""
        results = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        with self.bar(len(order), what) as bar:
            for begin in range(0, len(order), self.batch_size):
                rows = order[begin : begin + self.batch_size]
                logits = self.forward([sequences[i] for i in rows]).logits
                for row, index in enumerate(rows):
                    ids, start = sequences[index], starts[index]
                    scores = logits[row, start - 1 : len(ids) - 1].float()
                    targets = torch.tensor(ids[start:], device=scores.device)
                    results[index] = torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
                bar.update(len(rows))
        return results

    @torch.no_grad()
    def forward(self, sequences: Sequence[Sequence[int]], **more: Any):
        """Return the model's output for right-padded sequences."""
        width, device, pad = max(map(len, sequences)), self.model.device, TOKEN_IDS[PAD]
        ids = [[*each, *[pad] * (width - len(each))] for each in sequences]
        mask = [[1] * len(each) + [0] * (width - len(each)) for each in sequences]
        return self.model(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            use_cache=False,
            **more,
        )


def _until(ids: Sequence[int], stop_ids: Sequence[int], kept: int = 0) -> list[int]:
    """Return the ids before the first stop token, and `kept` more."""
    return next((list(ids[: i + kept]) for i, token in enumerate(ids) if token in stop_ids), list(ids))
