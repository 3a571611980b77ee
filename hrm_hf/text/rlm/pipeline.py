"""Recursive language models (arXiv 2512.24601) with any causal LM: the prompt is a variable in a REPL.

    ask = RlmPipeline(model, tokenizer)
    ask("Which of these letters mention a debt?", context=letters).answer

The root model sees the type and size of the context, and what its code prints. Its code may call language models on
parts of the context. `prompts.py` contains the prompts; `executors.py` runs the code.
Use an instruct model that can write code; a small model trained from scratch cannot do this.
"""

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, Pipeline, StoppingCriteria, StoppingCriteriaList, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from ...registry import NoDefaultModel
from ..options import RlmCaps
from . import prompts as text
from .executors import CapReachedError, MontyExecutor


SALVAGE_SHARE = 0.1  # fraction of max_wall_seconds reserved for a final answer when time is up

Message = dict[str, str]
REPLY = 1024  # default maximum number of tokens per reply; lower for small context windows
PLAIN_ROLES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
SHORTEST_OUTPUT = 200  # outputs of at most this many characters are never shortened
PLAIN_STOP = "\nUser:"


@dataclass
class RlmResult:
    """Result of running a recursive language model.

    Attributes:
        answer: the answer; "" if there is none.
        finished: whether the model finished with this answer, rather than being stopped by a cap.
        stop_reason: "answer", or the cap that was reached ("max_turns", "max_sub_calls", "max_wall_seconds") and the
            origin of the answer, for example "max_turns: answer asked for".
        turns: number of replies of the root model. sub_calls: number of prompts of sub-calls, at all depths.
        tokens: number of generated tokens in all calls. prompt_tokens: number of tokens in all prompts.
        trajectory: events of the run, as written to the trajectory file.
    """

    answer: str
    finished: bool
    stop_reason: str
    turns: int
    sub_calls: int
    tokens: int
    prompt_tokens: int
    trajectory: list[dict[str, Any]] = field(repr=False)


class RlmPipeline(Pipeline):
    """Pipeline "recursive-text-generation", which answers questions about a context of any length.

    Args:
        model: causal LM, or a text-generation pipeline to take the model and tokenizer from.
        tokenizer: tokenizer of the model. If it has no chat template, `ChatModel` uses a plain one.
        executor: executor that runs the code; `MontyExecutor()` if None.
        generation_kwargs: additional arguments of `generate`, for example `{"do_sample": True, "temperature": 0.7}`.

    Raises:
        ImportError: no executor is passed, and pydantic-monty is not installed.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(
        self,
        model,
        tokenizer=None,
        *args: Any,
        executor=None,
        generation_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if isinstance(model, TextGenerationPipeline):
            kwargs = {"device": model.device, **kwargs}
            model, tokenizer = model.model, tokenizer or model.tokenizer
        if tokenizer is None:
            raise ValueError("tokenizer=None: must be the model's tokenizer")
        self.executor = MontyExecutor() if executor is None else executor
        super().__init__(model, tokenizer, *args, **kwargs)
        self.generation_kwargs = generation_kwargs or {}
        self.model.eval()

    def __call__(
        self, question: str, context: str | list | dict, *, trajectory: str | Path | None = None, **caps: Any
    ) -> RlmResult:
        """Answer one question.

        Args:
            question: question about the context.
            context: text, or a list or dict of plain values. A string is never opened as a path.
            trajectory: JSONL file to which each event is written as it happens.
            caps: fields of `hrm_hf.text.options.RlmCaps`, such as max_turns, max_sub_calls, max_depth and seed.

        Raises:
            ValueError: a cap is out of range, the executor rejects the context, or the question is too long.
            RuntimeError: `generate` failed.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"question={question!r:.80}: must be a non-empty string")
        text.validate_context(context)
        chat = ChatModel(self.model, self.tokenizer, self.generation_kwargs)
        caps = RlmCaps.of(caps, "a recursive language model")
        caps.max_new_tokens = caps.max_new_tokens or chat.default_reply_tokens()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(caps.seed)
            return _Run(chat, self.executor, caps, question, context, trajectory).result()

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        if kwargs:
            raise TypeError(f"RlmPipeline does not accept {sorted(kwargs)} here; pass RlmCaps fields when calling it")
        return {}, {}, {}

    preprocess = _forward = postprocess = None  # required by the base class; `__call__` does everything


class _Run:
    """State shared by the root and its children: model, caps, counts, deadlines and events."""

    def __init__(self, chat: "ChatModel", executor, caps: RlmCaps, question: str, context: Any, path):
        self.chat, self.executor, self.caps = chat, executor, caps
        self.events, self.path, self.sub_calls = [], path and Path(path), 0
        self.start = time.monotonic()
        self.last_deadline = self.start + caps.max_wall_seconds
        self.deadline = self.start + caps.max_wall_seconds * (1 - SALVAGE_SHARE)
        if self.path:
            self.path.write_text("")
        self.log("caps", 0, **asdict(caps), model=type(chat.model).__name__)
        self.root = _Level(self, question, context, depth=0)

    def result(self) -> RlmResult:
        """Run the root model and return the result."""
        root = self.root
        try:
            root.run()
        except CapReachedError as stop:
            root.salvage(str(stop), self.last_deadline)
        except RuntimeError as error:
            self.log("error", 0, message=str(error))
            raise
        tokens = {"tokens": self.chat.new_tokens, "prompt_tokens": self.chat.prompt_tokens}
        ended = {name: getattr(root, name) for name in ("answer", "finished", "stop_reason", "turns")}
        return RlmResult(**ended, sub_calls=self.sub_calls, **tokens, trajectory=self.events)

    def log(self, event: str, depth: int, **fields: Any) -> None:
        """Record an event with its depth (0: root) and the seconds since the start of the run."""
        seconds = round(time.monotonic() - self.start, 3)
        self.events.append({"event": event, "depth": depth, "seconds": seconds, **fields})
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.events[-1]) + "\n")

    def spend(self, prompts: int) -> None:
        """Count sub-calls before they run. Raise ValueError if too few are left, CapReachedError if none are."""
        left = self.caps.max_sub_calls - self.sub_calls
        if left == 0:
            raise CapReachedError("max_sub_calls")
        if prompts > left:
            raise ValueError(f"{prompts} prompts, but only {left} calls to language models are left")
        self.sub_calls += prompts


class _Level:
    """REPL and conversation of the root model, or of a child opened by `rlm_query`."""

    def __init__(self, run: _Run, question: str, context: Any, depth: int):
        self.shared, self.caps, self.chat = run, run.caps, run.chat
        self.question, self.context, self.depth = question, context, depth
        self.has_children = depth + 1 < run.caps.max_depth
        self.answer, self.finished, self.stop_reason, self.turns = "", False, "", 0
        self.draft = ""  # answer["content"] after the last block
        self.printed: list[str] | None = None  # output of the running block
        self.chars_left = 0  # characters that the block may still print; if negative, the number dropped
        description, budget = text.describe_context(context), self.chat.prompt_budget(self.caps.max_new_tokens)
        rules = text.SYSTEM.format(
            **asdict(self.caps),
            prompt_size=f" (at most about {3 * budget} characters)" if budget else "",
            rlm_query=text.RLM_QUERY if self.has_children else "",
        )
        self.messages: list[Message] = [
            {"role": "system", "content": rules},
            {"role": "user", "content": text.QUESTION.format(question=question, description=description)},
        ]
        self._log("start", question=question, context=description)

    def run(self) -> str:
        """Run turns until the model answers or reaches max_turns (other caps raise CapReachedError)."""
        functions = {"llm_query": lambda prompt: self._llm_query_batched([prompt])[0]}
        functions |= {"llm_query_batched": self._llm_query_batched}
        functions |= {"rlm_query": self._rlm_query} if self.has_children else {}
        with closing(self.shared.executor.open(self.context, functions, self.caps.seed)) as session:
            while not self.finished and self.turns < self.caps.max_turns:
                self._turn(session)
        if not self.finished:
            self.salvage("max_turns", self.shared.deadline if self.depth else self.shared.last_deadline)
        return self.answer

    def salvage(self, reason: str, deadline: float) -> None:
        """Find an answer after a cap has stopped the run: the draft, or the model's reply to a final request."""
        if self.printed is not None:
            self._tell(text.OUTPUT.format(output=self._shown(None), left=0))
        if self.draft:
            self._end(self.draft, f"{reason}: answer['content'] taken")
            return
        self._append(text.SALVAGE.format(reason=reason, question=self.question))
        try:
            answer = self._ask(deadline)
        except CapReachedError:
            answer = ""
        self._end(answer, f"{reason}: answer asked for" if answer else f"{reason}: no answer")

    def _turn(self, session) -> None:
        code, reply = text.parse_reply(self._ask(self.shared.deadline, until_block=True))
        self.turns += 1
        self.messages.append({"role": "assistant", "content": reply or "(nothing)"})
        self._log("reply", turn=self.turns, text=reply)
        if code is None:
            self._tell(text.NO_BLOCK)
        else:
            self._run_block(session, code)
            self._read_answer(session.answer())

    def _run_block(self, session, code: str) -> None:
        self.printed, self.chars_left = [], self.caps.max_output_chars
        error = session.run(code, self._write, max(self.shared.deadline - time.monotonic(), 0.01))
        shown, self.printed = self._shown(error and text.cut_middle(error)), None
        self._log("block", turn=self.turns, output=shown, error=error)
        self._tell(text.OUTPUT.format(output=shown, left=self.caps.max_turns - self.turns))

    def _write(self, printed: str) -> None:
        if self.chars_left > 0:
            self.printed.append(printed[: self.chars_left])
        self.chars_left -= len(printed)

    def _shown(self, error: str | None) -> str:
        """Return the output to show to the model. It ends with the error, even if the output was cut."""
        cut = text.CUT.format(count=-self.chars_left) if self.chars_left < 0 else ""
        return "".join(self.printed) + cut + (f"\n{error}" if error else "") or "(nothing)"

    def _read_answer(self, answer: Any) -> None:
        """Read the dict `answer`: end the run if it is ready, else keep its content as a draft."""
        if not isinstance(answer, dict):
            self._append(text.BAD_ANSWER)
            return
        ready = answer.get("ready") == 1
        try:
            self.draft = text.answer_text(answer.get("content", ""))
        except ValueError as error:
            if ready:
                self._append(text.UNFIT_ANSWER.format(reason=error))
            return
        if ready and self.draft:
            self._end(self.draft, "answer", finished=True)
        elif ready:
            self._append(text.BAD_ANSWER)

    def _llm_query_batched(self, prompts: list[str]) -> list[str]:
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"expected a string (llm_query_batched: a list of strings), not {text.short(prompts)}")
        if not prompts:
            return []
        self._validate_size(sum(map(len, prompts)))
        encoded = [self.chat.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
        longest, budget = max(map(len, encoded)), self.chat.prompt_budget(self.caps.max_new_tokens)
        if budget is not None and longest > budget:
            raise ValueError(f"a prompt has {longest} tokens, but the model accepts only {budget}; split it")
        self.shared.spend(len(prompts))
        answers = []
        for start in range(0, len(encoded), self.caps.batch_size):
            batch = encoded[start : start + self.caps.batch_size]
            answers += self.chat.generate(batch, self.caps.max_new_tokens, self.shared.deadline)
        self._log("llm_query", turn=self.turns + 1, prompts=list(prompts), answers=answers)
        return answers

    def _rlm_query(self, question: str, context: Any) -> str:
        if not isinstance(question, str):
            raise ValueError(f"rlm_query: question={text.short(question)}: must be a string")
        self._validate_size(len(question))
        text.validate_context(context)
        self.shared.spend(1)
        return _Level(self.shared, question, context, self.depth + 1).run()

    @staticmethod
    def _validate_size(chars: int) -> None:
        if chars > text.MAX_PROMPT_CHARS:
            raise ValueError(f"the prompts have {chars} characters (limit: {text.MAX_PROMPT_CHARS}); split them")

    def _ask(self, deadline: float, until_block: bool = False) -> str:
        ids = self.chat.fit(self.messages, self.caps.max_new_tokens)
        return self.chat.generate([ids], self.caps.max_new_tokens, deadline, until_block)[0]

    def _tell(self, message: str) -> None:
        self.messages.append({"role": "user", "content": message})

    def _append(self, message: str) -> None:
        last = self.messages[-1]
        self.messages[-1] = {**last, "content": f"{last['content']}\n\n{message}"}

    def _end(self, answer: str, stop_reason: str, finished: bool = False) -> None:
        self.answer, self.stop_reason, self.finished = answer, stop_reason, finished
        self._log("end", answer=answer, finished=finished, stop_reason=stop_reason, turns=self.turns)

    def _log(self, event: str, **fields: Any) -> None:
        self.shared.log(event, self.depth, **fields)


class ChatModel:
    """Chat interface to a model and its tokenizer.

    If there is no chat template, messages are written as text ("User: ...", "Assistant: ..."), and a reply ends where
    the model begins the user's next message. Special tokens in a message (such as `<|im_end|>` in a document) get a
    space after their first character and cannot end the message.

    Args:
        generation_kwargs: additional arguments of `generate`, such as `do_sample` and `temperature`.
    """

    def __init__(self, model, tokenizer, generation_kwargs: dict[str, Any]):
        self.model, self.tokenizer, self.generation_kwargs = model, tokenizer, generation_kwargs
        self.window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.special = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id = next(token for token in ids if token is not None)
        self.prompt_tokens = self.new_tokens = 0

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's reply."""
        messages = [{**message, "content": self._harmless(message["content"])} for message in messages]
        if self.tokenizer.chat_template is None:
            prompt = "\n\n".join(PLAIN_ROLES[message["role"]] + message["content"] for message in messages)
            return self.tokenizer(f"{prompt}\n\nAssistant:")["input_ids"]
        try:
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError:  # some chat templates reject the system role
            first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            messages = [first, *messages[2:]]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def default_reply_tokens(self) -> int:
        """Return the default for `max_new_tokens`, at most a quarter of the context window."""
        return REPLY if self.window is None else max(1, min(REPLY, self.window // 4))

    def prompt_budget(self, max_new_tokens: int) -> int | None:
        """Return the token limit of a prompt, or None for no limit. Raise ValueError if the reply fills the window."""
        if self.window is not None and max_new_tokens >= self.window:
            raise ValueError(f"max_new_tokens={max_new_tokens}: must be below the context window of {self.window}")
        return None if self.window is None else self.window - max_new_tokens

    def fit(self, messages: list[Message], max_new_tokens: int) -> list[int]:
        """Encode [rules, question, pairs of reply and output], dropping the oldest pairs to fit the window.

        Raises ValueError if rules, question and the last turn do not fit.
        """
        budget = self.prompt_budget(max_new_tokens)
        rules, question, *rest = messages
        dropped = 0
        while True:
            note = text.OLD_TURNS.format(count=dropped) if dropped else ""
            ids = self.encode([rules, {**question, "content": question["content"] + note}, *rest])
            if budget is None or len(ids) <= budget:
                return ids
            if len(rest) > 2:
                dropped, rest = dropped + 1, rest[2:]
            elif rest and len(rest[-1]["content"]) > SHORTEST_OUTPUT:
                output = rest[-1]["content"]
                rest = [*rest[:-1], {**rest[-1], "content": text.cut_middle(output, len(output) // 2)}]
            else:
                raise ValueError(
                    f"rules, question and the last turn take {len(ids)} tokens, but only {budget} fit with "
                    f"max_new_tokens={max_new_tokens}; shorten the question (put long text into the context)"
                )

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, deadline: float, until_block: bool = False
    ) -> list[str]:
        """Generate replies to all prompts in one left-padded batch, and strip their reasoning.

        `deadline` is a time of `time.monotonic`. With `until_block`, a single reply ends after its first code block.
        Raises CapReachedError if the deadline has passed, and RuntimeError if `generate` fails.
        """
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise CapReachedError("max_wall_seconds")
        width = max(map(len, prompts))
        device = self.model.device
        ids = [[self.pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        criteria = [_AfterBlock(self.tokenizer, width)] if until_block else []
        try:
            output = self.model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                **{"pad_token_id": self.pad_id, **self.generation_kwargs},
                max_new_tokens=max_new_tokens,
                max_time=seconds,
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        except Exception as error:
            message = f"generate failed on {len(prompts)} prompts: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error
        replies = output[:, width:]
        self.prompt_tokens += sum(map(len, prompts))
        self.new_tokens += int((replies != self.pad_id).sum())
        answers = self.tokenizer.batch_decode(replies, skip_special_tokens=True)
        if self.tokenizer.chat_template is None:
            answers = [answer.partition(PLAIN_STOP)[0] for answer in answers]
        return [text.drop_thinking(answer) for answer in answers]

    def _harmless(self, content: str) -> str:
        for token in self.special:
            content = content.replace(token, f"{token[0]} {token[1:]}")
        return content


class _AfterBlock(StoppingCriteria):
    """Stop a reply after its first code block. Otherwise the model would invent the block's output."""

    def __init__(self, tokenizer, start: int):
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        tail = self.tokenizer.decode(input_ids[0, -4:], skip_special_tokens=True)
        reply = self.tokenizer.decode(input_ids[0, self.start :], skip_special_tokens=True) if "`" in tail else ""
        done = text.parse_reply(reply)[0] is not None
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


TASK = "recursive-text-generation"
PIPELINE_REGISTRY.register_pipeline(TASK, RlmPipeline, AutoModelForCausalLM, {"model": NoDefaultModel(TASK)}, "text")
