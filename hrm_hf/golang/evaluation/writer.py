"""Writes plans and codes with any causal language model that was trained on the Go coder's token stream.

Plain autoregression in two steps, so that the given beginning of the code can be forced: from ...<PLAN> to </PLAN>,
and from <CODE>prefix to </CODE>. The Go coder, its unified preset, GPT-2 and Llama all go through here, in batches of
like length, and may write only the tags that belong there. The Go coder's own loop of attempts is not this but
`generate_with_refinement`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ...models.generation_hrm_go_coder import IN_PLANS, GoCoderGenerationMixin
from ...models.logits_process_hrm_go_coder import repetition_guards
from ...models.processing_hrm_go_coder import EDIT_MARKS, EOS, PAD, TOKEN_IDS, encode_text
from ...models.quotations_hrm_go_coder import QuotedLines
from ...models.row_limits import generate_rows


END_OF_PLAN = (TOKEN_IDS["</PLAN>"], TOKEN_IDS[EOS])
END_OF_CODE = (TOKEN_IDS["</CODE>"], TOKEN_IDS[EOS])
EDITS = tuple(TOKEN_IDS[mark] for mark in EDIT_MARKS)


@dataclass
class Writer:
    """A model, its tokenizer and the budgets of what it writes.

    Attributes:
        batch_size: sequences at a time.
        max_length: tokens of a whole sequence; what does not fit is cut off.
        max_plan_tokens, max_code_tokens: most new tokens of a plan and of a code.
        progress: a progress bar; None shows it on a terminal only.
        repetition_guard: plans and codes may not go round in circles (`repetition_guards`).
        code_processors: more logits processors, of codes alone, such as `GoLexicalLogitsProcessor`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int = 8
    max_length: int = 1024
    max_plan_tokens: int = 128
    max_code_tokens: int = 512
    progress: bool | None = None
    repetition_guard: bool = True
    code_processors: Sequence[LogitsProcessor] = ()

    def bar(self, total: int, what: str):
        """A progress bar over `total` items."""
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=what, disable=None if self.progress is None else not self.progress)

    def plans(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> list[list[int]]:
        """Ids between <PLAN> and </PLAN> for prompts that end in <PLAN>."""
        written = self.continuations(
            prompts, END_OF_PLAN, self.max_plan_tokens, temperature, IN_PLANS, "plans", planner_only=True
        )
        return [_until(ids, END_OF_PLAN) for ids in written]

    def codes(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0) -> list[str]:
        """Codes, beginning with their prefixes, for prompts after which <CODE> comes."""
        written = self.code_ids(prompts, prefixes, temperature)
        return [self.code_of(prefix, ids) for prefix, ids in zip(prefixes, written)]

    def code_ids(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0
    ) -> list[list[int]]:
        """Ids behind <CODE> and each prefix, </CODE> included, for prompts after which <CODE> comes."""
        code = TOKEN_IDS["<CODE>"]
        starts = [
            [*ids, code, *encode_text(self.tokenizer, text)] for ids, text in zip(prompts, prefixes, strict=True)
        ]
        return self.continuations(
            starts, END_OF_CODE, self.max_code_tokens, temperature, what="codes", processors=self.code_processors
        )

    def edit_ids(self, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> list[list[int]]:
        """Ids of edits behind <CODE>, </CODE> included, for prompts after which <CODE> comes.

        Without the processors of codes: lines that edits quote are fragments. They are lines of the attempt
        (`QuotedLines`).
        """
        starts = [[*ids, TOKEN_IDS["<CODE>"]] for ids in prompts]
        quoted = [QuotedLines(self.tokenizer)]
        return self.continuations(starts, END_OF_CODE, self.max_code_tokens, temperature, EDITS, "edits", quoted)

    def code_of(self, prefix: str, ids: Sequence[int]) -> str:
        """The code that `code_ids` stand for."""
        return prefix + self.tokenizer.decode(_until(ids, END_OF_CODE), skip_special_tokens=True)

    def planned_codes(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[str], temperature: float = 0.0
    ) -> tuple[list[list[int]], list[str]]:
        """Plans (ids) and codes for prompts that end in <PLAN>."""
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
        processors: Sequence[LogitsProcessor] = (),
        planner_only: bool = False,
    ) -> list[list[int]]:
        """Returns the model's tokens after each prompt, the stop token included; empty where there is no room.

        Args:
            temperature: 0 is greedy; otherwise samples of the whole distribution at that temperature.
            tags: special tokens that may be written beside the stop tokens.
            processors: logits processors beside the writer's guard.
            planner_only: what is written is a plan, for which a Go coder need not run its generator.
        """
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        how |= {"max_new_tokens": max_new_tokens, "eos_token_id": list(stop_ids), "processors": processors}
        if isinstance(self.model, GoCoderGenerationMixin):
            how["planner_only"] = planner_only
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

    def _batch(
        self, prompts: list[list[int]], max_new_tokens: int, eos_token_id: list[int], processors, **how
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        guards = repetition_guards(width) if self.repetition_guard else []
        pad, device = TOKEN_IDS[PAD], self.model.device
        if isinstance(self.model, GoCoderGenerationMixin):
            how["plan_first"] = False  # it would take a prompt that ends in <PLAN> for a task, and hide the plan
        output = generate_rows(
            self.model.generate,
            torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device),
            self._mask([range(width - len(ids), width) for ids in prompts], width),
            [min(max_new_tokens, self.max_length - len(ids)) for ids in prompts],
            eos_token_id,
            pad,
            interrupts=all(isinstance(each, QuotedLines) for each in processors),  # others may remember their rows
            eos_token_id=eos_token_id,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([*guards, *processors]),
            **how,
        )
        return [_until(ids, eos_token_id, 1) for ids in output[:, width:].tolist()]

    @torch.no_grad()
    def nats(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], what: str = "losses") -> list[float]:
        """Negative log-likelihood of ids[start:] given what is before it, in nats, for each sequence.

        Raises:
            ValueError: a start of 0, for which nothing is before.
        """
        if any(start < 1 for start in starts):
            raise ValueError("a first token has nothing before it that could predict it; starts begin at 1")
        results = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        with self.bar(len(order), what) as bar:
            for begin in range(0, len(order), self.batch_size):
                rows = order[begin : begin + self.batch_size]
                logits = self.logits([sequences[i] for i in rows])
                for row, index in enumerate(rows):
                    ids, start = sequences[index], starts[index]
                    scores = logits[row, start - 1 : len(ids) - 1].float()
                    targets = torch.tensor(ids[start:], device=scores.device)
                    results[index] = torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
                bar.update(len(rows))
        return results

    def logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [B, longest, V] of right-padded sequences."""
        return self.forward(sequences).logits

    @torch.no_grad()
    def forward(self, sequences: Sequence[Sequence[int]], **more: Any):
        """The model's output for right-padded sequences."""
        width, device = max(map(len, sequences)), self.model.device
        pad = TOKEN_IDS[PAD]
        return self.model(
            input_ids=torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in sequences], device=device),
            attention_mask=torch.tensor(
                [[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences], device=device
            ),
            use_cache=False,
            **more,
        )

    def _mask(self, kept: Sequence[range], width: int) -> torch.Tensor:
        return torch.tensor([[int(i in row) for i in range(width)] for row in kept], device=self.model.device)


def _until(ids: Sequence[int], stop_ids: Sequence[int], kept: int = 0) -> list[int]:
    """The ids before the first stop token, and `kept` more."""
    return next((list(ids[: i + kept]) for i, token in enumerate(ids) if token in stop_ids), list(ids))
