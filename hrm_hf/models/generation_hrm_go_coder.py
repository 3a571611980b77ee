"""Text generation for the Go coder, which writes a hidden plan before the code.

`generate` runs transformers' `generate` on a tagged stream. The prompt's tags decide how it is interpreted:

    no tag                              code to continue: <PROBLEM>prompt</PROBLEM>, plan, <CODE>prompt...
    ends in </PROBLEM>, </CONTEXT> or   a task: plan, <CODE>...; the chat template ends in <PLAN>
      in the <PLAN> after one of them
    <PR_TITLE>..., <PR_BODY>...         a task, like the prompts of the original code
    anything else                       a stream in the training format: plain autoregression, nothing inserted

In the first three cases the plan and the tags stay hidden: the result is the prompt followed by code, and the caller's
criteria and processors see the same text. `generate_with_refinement` is in `refinement_hrm_go_coder.py`.
"""

import copy
import inspect
import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateBeamDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .processing_hrm_go_coder import BOS, EOS, INTENTS, PAD, SPECIAL_TOKENS, TARGET_KINDS, TOKEN_IDS


PLAN, END_PLAN, CODE, END_CODE = (TOKEN_IDS[tag] for tag in ("<PLAN>", "</PLAN>", "<CODE>", "</CODE>"))
PROBLEM, END_PROBLEM, END_CONTEXT = (TOKEN_IDS[tag] for tag in ("<PROBLEM>", "</PROBLEM>", "</CONTEXT>"))
PR_TITLE, PR_BODY = TOKEN_IDS["<PR_TITLE>"], TOKEN_IDS["<PR_BODY>"]
NO_TAGS = {TOKEN_IDS[token] for token in (BOS, EOS, PAD, "<unk>")}
IN_PLANS = {
    TOKEN_IDS[token]
    for token in ("<STEP>", *(f"<INTENT:{intent}>" for intent in INTENTS), *(f"<TARGET:{k}>" for k in TARGET_KINDS))
}
CODE_ONLY = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
POSITIONAL = tuple(inspect.signature(GenerationMixin.generate).parameters)[3:]  # generate's third and later arguments
LEAST_CODE = 16  # another attempt starts only if at least this many tokens are left for code
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary types whose frequencies depend on the batch's longest row
SHORTEST_STATIC = 128  # minimum length of a static cache; longer caches use the next power of two
STEP = TOKEN_IDS["<STEP>"]
LONGEST_CYCLE = 64  # longest cycle to look for, in tokens; about six lines of code
# Limits for text that repeats a cycle of tokens. Real code (1,748 programs, functions and table-driven tests, with
# three vocabularies of 1,024 to 10,374 tokens) repeats one token at most 20 times in a row (the digits of a number), a
# cycle of 2 to 19 tokens for at most 114 tokens, and a longer cycle at most 5.9 times (rows of a table).
SAME_TOKEN = 24
SHORT_CYCLES = 128
COPIES = 6

logger = logging.getLogger(__name__)


@dataclass
class GoCoderGenerateOutput(GenerateBeamDecoderOnlyOutput):
    """Output of `generate`: the code, the plan, and the hidden stream that contains both.

    `sequences` [B, S] contain prompt and code, with </s> instead of </CODE>. `scores` and `logits` have one entry per
    code token, with the value of </CODE> stored at </s>. Attentions and hidden states are those of the hidden stream.

    Attributes:
        plan_ids: the plan of each row, a list of ids without the enclosing tags.
        streams: [B, T], the hidden streams with plan and code, padded on the left.
    """

    plan_ids: list[list[int]] | None = None
    streams: torch.LongTensor | None = None


@dataclass
class Task:
    """A prompt and the segments generated for it.

    Attributes:
        head: ids up to and including </PROBLEM> or </CONTEXT>.
        prefix: ids of the beginning of the code, if the prompt gives one.
        plan: ids of the current plan, including its tags.
        history: segments after the head, i.e. earlier plans, attempts and verdicts, and the current plan.
    """

    head: list[int]
    prefix: list[int]
    plan: list[int] = field(default_factory=list)
    history: list[list[int]] = field(default_factory=list)

    def stream(self) -> list[int]:
        return [*self.head, *(token for part in self.history for token in part)]


class RowLimits(StoppingCriteria):
    """Stops each row at its maximum length, prompt and padding included. A row's beams must be adjacent."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        lengths = self.lengths.to(input_ids.device).repeat_interleave(len(input_ids) // len(self.lengths))
        return input_ids.shape[1] >= lengths


class CodeStreamer(BaseStreamer):
    """Streamer that forwards the visible prompt and the code to a user's streamer, without tags."""

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor | None):
        self.streamer, self.prompt = streamer, prompt
        self.started = False

    def put(self, value: torch.Tensor) -> None:
        if not self.started:
            self.started = True
            if self.prompt is not None:
                self.streamer.put(self.prompt.cpu())
        elif int(value.flatten()[0]) >= len(SPECIAL_TOKENS):
            self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()


class GoCoderGenerationMixin(GenerationMixin):
    """Mixin that implements `generate` for `HrmGoCoderForCausalLM`. The refinement loop also calls it."""

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config=None,
        *args: Any,
        plan_first: bool = True,
        return_plan: bool = False,
        repetition_guard: bool | None = None,
        **kwargs: Any,
    ):
        """Generate as transformers does, but write a hidden plan first (see the module docstring).

        Args:
            inputs: prompt ids [B, S]; also accepted as `input_ids`.
            generation_config: as in transformers. If it sets no length, code is limited to `code_budget` new tokens,
                and the plan to another `plan_budget` tokens.
            plan_first: whether to write a plan; False continues every prompt unchanged.
            return_plan: whether to return a `GoCoderGenerateOutput`, like `return_dict_in_generate`.
            repetition_guard: whether to keep plan and code from repeating themselves (`repetition_guards`); the
                config's by default. If prompts are continued unchanged, pass the guards as `logits_processor`.

        Raises:
            ValueError: the batch mixes streams and prompts, a prompt is too long for the model, or
                `repetition_guard=True` with prompts that are continued unchanged.
        """
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        rows = None
        # In speculative decoding, the assistant model continues the main model's stream and must not plan.
        drafts = generation_config is not None and generation_config.is_assistant
        begins = kwargs.get("past_key_values") is None
        if plan_first and self.config.tagged and begins and not drafts:
            if kwargs.get("inputs_embeds") is not None:
                logger.warning(
                    "inputs_embeds are continued as code without a plan, because their tags are unknown. The output "
                    "can contain tags. To write a plan, pass input_ids; to hide this warning, pass plan_first=False"
                )
            elif torch.is_tensor(ids):
                rows = self._tasks(ids, kwargs.get("attention_mask"))
        if rows is None:
            if repetition_guard:
                raise ValueError(
                    "repetition_guard=True: only works if `generate` writes a plan before the code; pass "
                    "logits_processor=repetition_guards(number of prompt tokens) instead"
                )
            return super().generate(inputs, generation_config, *args, **kwargs)
        kwargs.pop("input_ids", None)
        kwargs.pop("attention_mask", None)
        kwargs |= zip(POSITIONAL, args)
        kwargs["repetition_guard"] = repetition_guard
        return self._generate_planned(ids, rows, generation_config, return_plan, **kwargs)

    def _tasks(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Task] | None:
        """Parse the rows of a batch as tasks. Return None if the rows are tagged streams."""
        if ids.dim() != 2 or ids.dtype.is_floating_point:
            return None
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        kept = [row[keep.bool()].tolist() for row, keep in zip(ids, mask)]
        rows = [_read_prompt(prompt) for prompt in kept]
        streams = [row is None for row in rows]
        if all(streams):
            return None
        if any(streams):
            raise ValueError(
                f"prompt {streams.index(True)} of the batch is a tagged stream, but not all are; use separate batches"
            )
        return rows

    def _generate_planned(self, ids, rows, generation_config, return_plan, **kwargs):
        settings = copy.deepcopy(generation_config if generation_config is not None else self.generation_config)
        kwargs = settings.update(**kwargs)
        width = ids.shape[1]
        requested = settings.max_new_tokens
        if requested is None and settings.max_length is not None:
            requested = max(1, settings.max_length - width)
        settings.max_new_tokens = self.config.code_budget if requested is None else requested
        settings.max_length = None
        wants_dict = settings.return_dict_in_generate or return_plan
        copies = settings.num_return_sequences or 1
        if (settings.num_beams or 1) == 1 and copies > 1:  # each sample gets its own plan
            rows = [copy.deepcopy(row) for row in rows for _ in range(copies)]
            settings.num_return_sequences = 1
        streamer = kwargs.pop("streamer", None)
        own_ends = settings.eos_token_id or []  # ids that end a sequence: </s> by default
        own_ends = [own_ends] if isinstance(own_ends, int) else own_ends
        self._write_plans(rows, settings, kwargs)
        prompts = [[*row.stream(), *row.plan, CODE, *row.prefix] for row in rows]
        start = max(map(len, prompts))
        room = self.config.max_position_embeddings - start
        if requested is not None and requested > room > 0:
            logger.warning(
                "max_new_tokens=%d: at most %d new tokens fit, because prompt and plan take %d of the model's %d "
                "positions (max_position_embeddings)",
                requested, room, start, self.config.max_position_embeddings,
            )  # fmt: skip
        if streamer is not None:
            streamer = CodeStreamer(streamer, ids)
        kwargs |= _for_visible(kwargs, ids.repeat_interleave(len(rows) // len(ids), dim=0), start)
        output = self._continue(
            prompts, settings, [settings.max_new_tokens] * len(prompts), {END_CODE, *own_ends}, {END_CODE},
            streamer=streamer, **kwargs,
        )  # fmt: skip
        streams = output.sequences if isinstance(output, ModelOutput) else output
        written = streams[:, start:]
        sequences = torch.cat([ids.repeat_interleave(copies, dim=0), _with_visible_end(written)], dim=1)
        if not wants_dict:
            return sequences
        parts = dict(output) if isinstance(output, ModelOutput) else {}
        for name in {"scores", "logits"} & parts.keys():
            _show_end(parts[name], written, parts.get("beam_indices"))
        parts |= {"sequences": sequences, "plan_ids": [row.plan[1:-1] for row in rows], "streams": streams}
        return GoCoderGenerateOutput(**parts)

    def _write_plans(self, rows: list[Task], settings, kwargs) -> None:
        """Generate a plan for each row."""
        settings = for_ids_alone(settings)
        settings.min_new_tokens, settings.stop_strings, settings.min_length = None, None, 0
        kwargs = {name: value for name, value in kwargs.items() if name not in CODE_ONLY} | {"planner_only": True}
        prompts = [[*row.stream(), PLAN] for row in rows]
        # The plan is followed by its end tag, <CODE>, the prompt's code prefix, and the new code.
        room = self.config.max_position_embeddings - 2 - LEAST_CODE
        rooms = [room - len(prompt) - len(row.prefix) for prompt, row in zip(prompts, rows)]
        budgets = [max(1, min(self.config.plan_budget, room)) for room in rooms]
        written = self._continue(prompts, settings, budgets, {END_PLAN}, {END_PLAN, *IN_PLANS}, **kwargs)
        start = max(map(len, prompts))
        for row, new in zip(rows, written[:, start:].tolist()):
            row.plan = [PLAN, *until(new, {END_PLAN, TOKEN_IDS[EOS], TOKEN_IDS[PAD]}), END_PLAN]

    def _continue(
        self, prompts, settings, budgets: list[int], ends: set[int], tags: set[int], repetition_guard=None, **kwargs
    ):
        """Run transformers' `generate` on prompts of different lengths.

        Only the tags in `tags` and EOS can be generated. New tokens per row are limited by `budgets`, and by the
        number of positions of the model.
        """
        longest, limit = max(map(len, prompts)), self.config.max_position_embeddings
        if longest >= limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens with its plan, but the model only has {limit} positions "
                "(max_position_embeddings); shorten the prompt"
            )
        settings = copy.deepcopy(settings)
        together = self.config.rope_parameters["rope_type"] in LENGTH_DEPENDENT
        lengths = [longest if together else len(prompt) for prompt in prompts]
        limits = [min(budget, limit - length) for budget, length in zip(budgets, lengths)]
        settings.max_new_tokens = max(limits)
        settings.eos_token_id = sorted({*ends, TOKEN_IDS[EOS]})
        settings.pad_token_id = TOKEN_IDS[PAD]
        hidden = [token for token in range(len(SPECIAL_TOKENS)) if token not in tags and token != TOKEN_IDS[EOS]]
        settings.suppress_tokens = [*(settings.suppress_tokens or []), *hidden]
        ids = torch.full((len(prompts), longest), TOKEN_IDS[PAD], dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, prompt in enumerate(prompts):
            ids[index, longest - len(prompt) :] = torch.tensor(prompt)
            mask[index, longest - len(prompt) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        if self.config.repetition_guard if repetition_guard is None else repetition_guard:
            kwargs["logits_processor"] = [*repetition_guards(longest), *(kwargs.get("logits_processor") or [])]
        if min(limits) < max(limits):
            given = kwargs.get("stopping_criteria") or []
            kwargs["stopping_criteria"] = StoppingCriteriaList(
                [RowLimits([longest + limit for limit in limits]), *given]
            )
        return GenerationMixin.generate(self, ids, settings, attention_mask=mask, **kwargs)

    def _prepare_static_cache(self, *args, max_cache_len: int, **kwargs):
        """Prepare a static cache, rounding its length up to a power of two to avoid recompilation.

        transformers would keep the longest cache so far, so plans would be recompiled after the first code.
        """
        self._previous_max_cache_length = -1
        length = max(SHORTEST_STATIC, 1 << (max_cache_len - 1).bit_length())
        return super()._prepare_static_cache(*args, max_cache_len=length, **kwargs)


def _read_prompt(prompt: list[int]) -> Task | None:
    """Parse a prompt as a task. Return None if the prompt is a tagged stream."""
    text = [token for token in prompt if token not in NO_TAGS]
    tags = {token for token in text if token < len(SPECIAL_TOKENS)}
    bos = TOKEN_IDS[BOS]
    if not tags:
        return Task([bos, PROBLEM, *text, END_PROBLEM], text)
    if tags <= {PR_TITLE, PR_BODY}:
        return Task([bos, PROBLEM, *(token for token in text if token not in tags), END_PROBLEM], [])
    task = text[:-1] if text[-1] == PLAN else text
    if task and task[-1] in (END_PROBLEM, END_CONTEXT) and not {PLAN, CODE} & set(task):
        return Task([bos, *task], [])
    return None


def for_ids_alone(settings):
    """Return a copy of the settings with which `generate` returns only ids, one sequence per prompt."""
    settings = copy.deepcopy(settings)
    settings.num_return_sequences = 1
    for name in ("return_dict_in_generate", *(name for name in vars(settings) if name.startswith("output_"))):
        setattr(settings, name, False)
    return settings


def _for_visible(kwargs: dict[str, Any], prompts: torch.Tensor, start: int) -> dict[str, Any]:
    """Make stopping criteria, processors and the prefix function see `prompts` [B, W], not the hidden tokens."""

    def visible(streams: torch.Tensor) -> torch.Tensor:  # [B * beams, T]
        shown = prompts.to(streams.device).repeat_interleave(len(streams) // len(prompts), dim=0)
        return torch.cat([shown, _with_visible_end(streams[:, start:])], dim=1)

    def criterion(inner):
        return lambda streams, scores, **more: inner(visible(streams), scores, **more)

    def processor(inner):
        return lambda streams, scores: inner(visible(streams), scores)

    found = {}
    for name, wrap in (("stopping_criteria", criterion), ("logits_processor", processor)):
        if kwargs.get(name):
            found[name] = type(kwargs[name])(map(wrap, kwargs[name]))
    if allowed := kwargs.get("prefix_allowed_tokens_fn"):
        found["prefix_allowed_tokens_fn"] = lambda row, stream: allowed(
            row, torch.cat([prompts[row].to(stream.device), stream[start:]])
        )
    return found


def _with_visible_end(written: torch.Tensor) -> torch.Tensor:
    """Replace </CODE> with </s>, the usual end of a sequence."""
    return torch.where(written == END_CODE, TOKEN_IDS[EOS], written)


def _show_end(scores: tuple[torch.Tensor, ...], written: torch.Tensor, beam_indices: torch.Tensor | None) -> None:
    """Swap the scores of </CODE> and </s> in place where a generated </CODE> is returned as </s>."""
    ends = [TOKEN_IDS[EOS], END_CODE]
    places = (written == END_CODE).nonzero().tolist()
    rows = {(step, row if beam_indices is None else int(beam_indices[row, step])) for row, step in places}
    for step, row in rows:
        scores[step][row, ends] = scores[step][row, ends[::-1]]


def until(tokens: Sequence[int], ends: Container[int], kept: int = 0) -> list[int]:
    """Return the tokens before the first token in `ends`, plus the next `kept` tokens."""
    return next((list(tokens[: i + kept]) for i, token in enumerate(tokens) if token in ends), list(tokens))


# ---- guards against repetitive text, for any causal language model ----

# transformers can penalize tokens that already occurred (`repetition_penalty`) and ban n-grams that already occurred
# (`no_repeat_ngram_size`). Both rule out good code: 60 of 164 functions written by people repeat some sequence of ten
# tokens. These guards only forbid back-to-back repetition, and only if it is longer than in real code.


def longest_stretch(period: int) -> int:
    """Return the maximum length of a repetition with this period, including the first copy."""
    return SAME_TOKEN if period == 1 else max(SHORT_CYCLES, COPIES * period)


class _WrittenText(LogitsProcessor):
    """Base class for logits processors that forbid tokens based on the text after the prompt.

    Args:
        prompt_length: number of prompt tokens of each row, including padding.
    """

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = enumerate(map(self.forbidden, input_ids[:, self.prompt_length :].tolist()))
        found = [(row, token) for row, tokens in rows for token in tokens]
        if not found:
            return scores
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        forbidden[tuple(zip(*found))] = True
        left = scores.masked_fill(forbidden, -torch.inf)
        # Leave a row unchanged if every token would be forbidden, because sampling would then raise an error.
        return torch.where(left.amax(dim=-1, keepdim=True) == -torch.inf, scores, left)


class RepetitionGuard(_WrittenText):
    """Forbids tokens that would extend a cycle of up to `LONGEST_CYCLE` tokens past `longest_stretch`."""

    def forbidden(self, ids: list[int]) -> set[int]:
        return repeated_too_often(ids[-longest_stretch(LONGEST_CYCLE) :])


def repeated_too_often(ids: list[int]) -> set[int]:
    """Return next tokens that would extend a repetition at the end of `ids` past `longest_stretch`."""
    found = set()
    for period in range(1, LONGEST_CYCLE + 1):
        stretch = longest_stretch(period)
        if len(ids) >= stretch and ids[-1] == ids[-1 - period] and ids[-stretch:-period] == ids[period - stretch :]:
            found.add(ids[-period])
    return found


class DistinctSteps(_WrittenText):
    """Prevents repeated steps in a plan: a step cannot end while it is identical to an earlier one.

    The prompt ends with <PLAN>. In code, nothing is forbidden, because code has no steps.
    """

    def forbidden(self, ids: list[int]) -> Iterable[int]:
        tags = [index for index, token in enumerate(ids) if token < len(SPECIAL_TOKENS)]
        segments = [tuple(ids[start:end]) for start, end in zip(tags, [*tags[1:], len(ids)])]
        repeats = STEP in ids and segments[-1][0] == STEP and segments[-1] in segments[:-1]
        return range(len(SPECIAL_TOKENS)) if repeats else ()


def repetition_guards(prompt_length: int) -> LogitsProcessorList:
    """Return logits processors that prevent repetition after the first `prompt_length` tokens."""
    return LogitsProcessorList([RepetitionGuard(prompt_length), DistinctSteps(prompt_length)])
