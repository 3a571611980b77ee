"""Load a Go coder, or a baseline trained on the same token streams, and write plans and code with it.

Generation is plain autoregression in two steps, from ...<PLAN> to </PLAN> and then from <CODE>prefix to </CODE>, so
callers can force the beginning of the code. Prompts are batched by length, and the model can generate only the tags
that belong in a segment. The Go coder's refinement loop is `generate_with_refinement`, which does not use this module.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from ...hub.kinds import load_network
from ...models.generation_hrm_go_coder import IN_PLANS, GoCoderGenerationMixin, RowLimits, repetition_guards, until
from ...models.processing_hrm_go_coder import EOS, PAD, TOKEN_IDS, encode_text
from ...registry import architecture_of
from ...text.evaluation import model_positions
from ..data.streams import GoStreamBuilder
from ..options import EvaluateGo


END_OF_PLAN = (TOKEN_IDS["</PLAN>"], TOKEN_IDS[EOS])
END_OF_CODE = (TOKEN_IDS["</CODE>"], TOKEN_IDS[EOS])


def is_go_coder(model) -> bool:
    """Check whether a model has `generate_with_refinement`, which baselines lack."""
    row = architecture_of(model)
    return row is not None and issubclass(row.head, GoCoderGenerationMixin)


def load_writer(options: EvaluateGo, device: str) -> tuple["Writer", GoStreamBuilder]:
    """Return a `Writer` for a model, and a stream builder with budgets from `options` or the config."""
    network = load_network(options.model, AutoModelForCausalLM).to(device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    length = min(options.max_length or 2048, model_positions(network, tokenizer))
    known = {"problem_budget": 256, "context_budget": 512} | network.config.to_dict()
    budgets = {name: getattr(options, name) or known[name] for name in ("problem_budget", "context_budget")}
    if is_go_coder(network):
        network.config.update(budgets)  # the refinement loop must truncate its inputs as `GoStreamBuilder` does
    writer = Writer(
        network, tokenizer, options.batch_size, length, max_code_tokens=options.max_code_tokens,
        repetition_guard=options.repetition_guard,
    )  # fmt: skip
    return writer, GoStreamBuilder(tokenizer, length, **budgets)


@dataclass
class Writer:
    """A model with its tokenizer and generation budgets.

    Attributes:
        batch_size: sequences per batch.
        max_length: maximum tokens in a prompt plus its completion.
        max_plan_tokens, max_code_tokens: maximum new tokens in a plan and in a code sample.
        progress: whether to show a progress bar; None shows it on a terminal only.
        repetition_guard: whether to prevent plans and code from repeating themselves (`repetition_guards`).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int = 8
    max_length: int = 1024
    max_plan_tokens: int = 128
    max_code_tokens: int = 512
    progress: bool | None = None
    repetition_guard: bool = True

    def batches(self, items: Sequence, what: str) -> Iterator[Sequence]:
        """Yield `batch_size` items at a time, with a progress bar."""
        hidden = None if self.progress is None else not self.progress
        with tqdm(total=len(items), desc=what, disable=hidden) as bar:
            for start in range(0, len(items), self.batch_size):
                batch = items[start : start + self.batch_size]
                yield batch
                bar.update(len(batch))

    def plans(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> list[list[int]]:
        """Generate plans for prompts that end in <PLAN>, and return the ids before </PLAN>."""
        written = self.continuations(prompts, END_OF_PLAN, self.max_plan_tokens, temperature, IN_PLANS, "plans")
        return [until(ids, END_OF_PLAN) for ids in written]

    def code(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0) -> list[str]:
        """Generate code after <CODE> and each prefix, and return the samples, including their prefixes."""
        written = self.code_ids(prompts, prefixes, temperature)
        return [self.code_of(prefix, ids) for prefix, ids in zip(prefixes, written)]

    def code_ids(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0
    ) -> list[list[int]]:
        """Generate code after <CODE> and each prefix, and return the new ids, including </CODE>."""
        code = TOKEN_IDS["<CODE>"]
        starts = [
            [*ids, code, *encode_text(self.tokenizer, text)] for ids, text in zip(prompts, prefixes, strict=True)
        ]
        return self.continuations(starts, END_OF_CODE, self.max_code_tokens, temperature, what="code")

    def code_of(self, prefix: str, ids: Sequence[int]) -> str:
        """Decode the ids that `code_ids` returns, and prepend the prefix."""
        return prefix + self.tokenizer.decode(until(ids, END_OF_CODE), skip_special_tokens=True)

    def planned_code(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0
    ) -> tuple[list[list[int]], list[str]]:
        """Generate plans, then code, for prompts that end in <PLAN>. Return plan ids and code."""
        plans = self.plans(prompts, temperature)
        close = TOKEN_IDS["</PLAN>"]
        return plans, self.code([[*a, *b, close] for a, b in zip(prompts, plans)], prefixes, temperature)

    def replanned(self, streams: Sequence[list[int]], temperature: float = 0.0) -> list[list[int]]:
        """Append a new plan to each stream that ends in <REFINE>, and return all streams."""
        streams = list(streams)
        refined = [index for index, ids in enumerate(streams) if ids[-1] == TOKEN_IDS["<REFINE>"]]
        opened = [[*streams[index], TOKEN_IDS["<PLAN>"]] for index in refined]
        for index, ids, plan in zip(refined, opened, self.plans(opened, temperature)):
            streams[index] = [*ids, *plan, TOKEN_IDS["</PLAN>"]]
        return streams

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
        """Return the new ids for each prompt, including the stop token, or [] if the prompt is too long.

        Args:
            temperature: 0 is greedy; otherwise samples from the full distribution at that temperature.
            tags: special tokens that the model may generate in addition to the stop tokens.
        """
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        how |= {"max_new_tokens": max_new_tokens, "eos_token_id": list(stop_ids)}
        how["suppress_tokens"] = [token for token in TOKEN_IDS.values() if token not in {*stop_ids, *tags}]
        results: list[list[int]] = [[] for _ in prompts]
        fitting = [i for i in range(len(prompts)) if len(prompts[i]) < self.max_length]
        for rows in self.batches(sorted(fitting, key=lambda i: len(prompts[i]), reverse=True), what):
            for row, ids in zip(rows, self._batch([list(prompts[i]) for i in rows], **how)):
                results[row] = ids
        return results

    def _batch(self, prompts: list[list[int]], max_new_tokens: int, eos_token_id: list[int], **how) -> list[list[int]]:
        width = max(map(len, prompts))
        if isinstance(self.model, GoCoderGenerationMixin):
            # By default, generate() would treat a prompt that ends in <PLAN> as a task and hide the plan.
            how["plan_first"] = False
        limits = [min(max_new_tokens, self.max_length - len(ids)) for ids in prompts]
        output = self.model.generate(
            **self._padded(prompts, left=True),
            max_new_tokens=max(limits),
            stopping_criteria=StoppingCriteriaList([RowLimits([width + limit for limit in limits])]),
            eos_token_id=eos_token_id,
            pad_token_id=TOKEN_IDS[PAD],
            logits_processor=repetition_guards(width) if self.repetition_guard else None,
            return_dict_in_generate=True,
            **how,
        ).sequences
        return [until(ids, eos_token_id, 1) for ids in output[:, width:].tolist()]

    @torch.no_grad()
    def nats(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], what: str = "losses") -> list[float]:
        """Return the negative log-likelihood in nats of ids[start:] for each sequence. Starts must be >= 1."""
        results = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        for rows in self.batches(order, what):
            logits = self.forward([sequences[i] for i in rows]).logits
            for row, index in enumerate(rows):
                ids, start = sequences[index], starts[index]
                scores = logits[row, start - 1 : len(ids) - 1].float()
                targets = torch.tensor(ids[start:], device=scores.device)
                results[index] = torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
        return results

    @torch.no_grad()
    def forward(self, sequences: Sequence[Sequence[int]], **more: Any):
        """Pad sequences on the right, and return the model's output for them."""
        return self.model(**self._padded(sequences), use_cache=False, **more)

    def _padded(self, sequences: Sequence[Sequence[int]], left: bool = False) -> dict[str, torch.Tensor]:
        ids = torch.full((len(sequences), max(map(len, sequences))), TOKEN_IDS[PAD])
        mask = torch.zeros_like(ids)
        for row, each in enumerate(sequences):
            place = slice(ids.shape[1] - len(each), None) if left else slice(len(each))
            ids[row, place], mask[row, place] = torch.tensor(each), 1
        return {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}
