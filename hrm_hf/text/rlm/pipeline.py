"""Recursive language models (arXiv 2512.24601) over any causal LM: the prompt is a variable in a REPL.

    ask = RlmPipeline(model, tokenizer)
    ask("Which of these letters mention a debt?", context=letters).answer

The root model sees type and size of the context and what its code prints; its code may call language models on parts
of the context (`prompts.py`: what the model is told, `executors.py`: where its code runs).
A small fresh model cannot drive this; take an instruct model that writes code.
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


SALVAGE_SHARE = 0.1  # of max_wall_seconds, kept for the answer that is asked for when time is up

Message = dict[str, str]
REPLY = 1024  # tokens of a reply of a model whose window does not ask for less
PLAIN_ROLES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
SHORTEST_OUTPUT = 200  # characters; nothing is cut further than that
PLAIN_STOP = "\nUser:"


@dataclass
class RlmResult:
    """The result of a run.

    Attributes:
        answer: the answer; "" if there is none.
        finished: whether the model gave it as its answer, rather than being stopped by a cap.
        stop_reason: "answer", or the cap that was hit ("max_turns", "max_sub_calls", "max_wall_seconds") and where
            the answer then comes from, as in "max_turns: answer asked for".
        turns: replies of the root model. sub_calls: prompts of sub-calls at all depths.
        tokens: generated tokens of all calls. prompt_tokens: tokens of all prompts.
        trajectory: the events of the run, as they are written to the trajectory file.
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
    """Answers a question about a context of any length; also `pipeline("recursive-text-generation", model=...)`.

    Args:
        model: a causal LM, or a text-generation pipeline whose model and tokenizer are taken.
        tokenizer: of the model. Without a chat template a plain one is used, see `ChatModel`.
        executor: where code runs; `MontyExecutor()` if None.
        generation_kwargs: more arguments of `generate`, for example `{"do_sample": True, "temperature": 0.7}`.

    Raises:
        ImportError: no executor is given, and pydantic-monty is not installed.
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
            raise ValueError("tokenizer=None: a recursive language model needs the tokenizer of its model")
        self.executor = MontyExecutor() if executor is None else executor
        super().__init__(model, tokenizer, *args, **kwargs)
        self.generation_kwargs = generation_kwargs or {}
        self.model.eval()

    def __call__(
        self, question: str, context: str | list | dict, *, trajectory: str | Path | None = None, **caps: Any
    ) -> RlmResult:
        """Answer one question.

        Args:
            question: what is asked.
            context: what it is asked about, of plain values. A string is never opened as a path.
            trajectory: a JSONL file to write, a line for each event as it happens.
            caps: fields of `hrm_hf.text.options.RlmCaps`, such as max_turns, max_sub_calls, max_depth and seed.

        Raises:
            ValueError: a cap is not above 0, the executor rejects the context, or the question does not fit the model.
            RuntimeError: `generate` failed.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"question={question!r:.80}: must be a string that is not empty")
        text.validate_context(context)
        chat = ChatModel(self.model, self.tokenizer, self.generation_kwargs)
        caps = RlmCaps.of(caps, "a recursive language model")
        caps.max_new_tokens = caps.max_new_tokens or chat.usual_reply()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(caps.seed)
            return _Run(chat, self.executor, caps, question, context, trajectory).result()

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        if kwargs:
            raise TypeError(f"RlmPipeline takes no {sorted(kwargs)} here; caps belong to a call, see its docstring")
        return {}, {}, {}

    preprocess = _forward = postprocess = None  # the base class asks for them; a run is one call of `__call__`


class _Run:
    """The state that the root and its children share: model, caps, counts, deadlines, events."""

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
        """Run the root."""
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
        """Record an event; depth 0 is the root, `seconds` counts from the start of the run."""
        seconds = round(time.monotonic() - self.start, 3)
        self.events.append({"event": event, "depth": depth, "seconds": seconds, **fields})
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.events[-1]) + "\n")

    def spend(self, prompts: int) -> None:
        """Count sub-calls before they are made. Raise ValueError for too many, CapReachedError if none is left."""
        left = self.caps.max_sub_calls - self.sub_calls
        if left == 0:
            raise CapReachedError("max_sub_calls")
        if prompts > left:
            raise ValueError(f"{prompts} prompts, but only {left} calls of language models are left")
        self.sub_calls += prompts


class _Level:
    """One REPL and the conversation around it: the root, or a child that `rlm_query` opened."""

    def __init__(self, run: _Run, question: str, context: Any, depth: int):
        self.shared, self.caps, self.chat = run, run.caps, run.chat
        self.question, self.context, self.depth = question, context, depth
        self.has_children = depth + 1 < run.caps.max_depth
        self.answer, self.finished, self.stop_reason, self.turns = "", False, "", 0
        self.draft = ""  # answer["content"] after the last block
        self.printed: list[str] | None = None  # by the block that is running
        self.room = 0  # characters that it may still print; below 0 those that were dropped
        description, room = text.describe_context(context), self.chat.room(self.caps.max_new_tokens)
        rules = text.SYSTEM.format(
            **asdict(self.caps),
            prompt_size=f" (at most about {3 * room} characters)" if room else "",
            rlm_query=text.RLM_QUERY if self.has_children else "",
        )
        self.messages: list[Message] = [
            {"role": "system", "content": rules},
            {"role": "user", "content": text.QUESTION.format(question=question, description=description)},
        ]
        self._log("start", question=question, context=description)

    def run(self) -> str:
        """Take turns until the model answers or has had all its turns; other caps raise CapReachedError."""
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
        """Find an answer for a run that a cap has stopped: its draft, or what the model says when asked once."""
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
        self.printed, self.room = [], self.caps.max_output_chars
        error = session.run(code, self._write, max(self.shared.deadline - time.monotonic(), 0.01))
        shown, self.printed = self._shown(error and text.cut_middle(error)), None
        self._log("block", turn=self.turns, output=shown, error=error)
        self._tell(text.OUTPUT.format(output=shown, left=self.caps.max_turns - self.turns))

    def _write(self, printed: str) -> None:
        if self.room > 0:
            self.printed.append(printed[: self.room])
        self.room -= len(printed)

    def _shown(self, error: str | None) -> str:
        """Return the output that the model is shown; an error has room of its own, so that the model sees it."""
        cut = text.CUT.format(count=-self.room) if self.room < 0 else ""
        return "".join(self.printed) + cut + (f"\n{error}" if error else "") or "(nothing)"

    def _read_answer(self, answer: Any) -> None:
        """Take the dict `answer`: the end if it is ready, else a draft to fall back on."""
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
        longest, room = max(map(len, encoded)), self.chat.room(self.caps.max_new_tokens)
        if room is not None and longest > room:
            raise ValueError(f"a prompt has {longest} tokens, and the model takes {room}: split it")
        self.shared.spend(len(prompts))
        answers = []
        for start in range(0, len(encoded), self.caps.batch_size):
            batch = encoded[start : start + self.caps.batch_size]
            answers += self.chat.generate(batch, self.caps.max_new_tokens, self.shared.deadline)
        self._log("llm_query", turn=self.turns + 1, prompts=list(prompts), answers=answers)
        return answers

    def _rlm_query(self, question: str, context: Any) -> str:
        if not isinstance(question, str):
            raise ValueError(f"rlm_query(question, context): the question is no string: {text.short(question)}")
        self._validate_size(len(question))
        text.validate_context(context)
        self.shared.spend(1)
        return _Level(self.shared, question, context, self.depth + 1).run()

    @staticmethod
    def _validate_size(chars: int) -> None:
        if chars > text.MAX_PROMPT_CHARS:
            raise ValueError(f"the prompts have {chars} characters; at most {text.MAX_PROMPT_CHARS}: split them")

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
    """A model and its tokenizer, asked in messages.

    Without a chat template the messages are written as text ("User: ...", "Assistant: ..."), and a reply ends where
    the model begins the next message of the user. Special tokens in a message (`<|im_end|>` in a document, say) get a
    space after their first character, so that they cannot end the message.

    Args:
        generation_kwargs: more arguments of `generate`, such as `do_sample` and `temperature`.
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
        """Return the token ids of a conversation, up to where the reply of the assistant begins."""
        messages = [{**message, "content": self._harmless(message["content"])} for message in messages]
        if self.tokenizer.chat_template is None:
            prompt = "\n\n".join(PLAIN_ROLES[message["role"]] + message["content"] for message in messages)
            return self.tokenizer(f"{prompt}\n\nAssistant:")["input_ids"]
        try:
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError:  # some templates raise for the system role
            first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            messages = [first, *messages[2:]]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def usual_reply(self) -> int:
        """Return the default of `max_new_tokens`: a small window has to keep room for rules and conversation."""
        return REPLY if self.window is None else max(1, min(REPLY, self.window // 4))

    def room(self, max_new_tokens: int) -> int | None:
        """Return the tokens that a prompt may have, None for no bound. Raise ValueError if there are none."""
        if self.window is not None and max_new_tokens >= self.window:
            raise ValueError(f"max_new_tokens={max_new_tokens}: leaves no room for a prompt in {self.window} tokens")
        return None if self.window is None else self.window - max_new_tokens

    def fit(self, messages: list[Message], max_new_tokens: int) -> list[int]:
        """Encode [system, question, then pairs of reply and answer], without the oldest pairs if they do not fit.

        Raises ValueError if not even rules and question fit.
        """
        room = self.room(max_new_tokens)
        rules, question, *rest = messages
        dropped = 0
        while True:
            note = text.OLD_TURNS.format(count=dropped) if dropped else ""
            ids = self.encode([rules, {**question, "content": question["content"] + note}, *rest])
            if room is None or len(ids) <= room:
                return ids
            if len(rest) > 2:
                dropped, rest = dropped + 1, rest[2:]
            elif rest and len(rest[-1]["content"]) > SHORTEST_OUTPUT:
                output = rest[-1]["content"]
                rest = [*rest[:-1], {**rest[-1], "content": text.cut_middle(output, len(output) // 2)}]
            else:
                raise ValueError(
                    f"rules, question and the last turn take {len(ids)} tokens, and the model has room for {room} "
                    f"beside max_new_tokens={max_new_tokens}; shorten the question (long text belongs in the context)"
                )

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, deadline: float, until_block: bool = False
    ) -> list[str]:
        """Ask all prompts in one call of `model.generate`, padded on the left; return the replies without thoughts.

        `deadline` is of `time.monotonic`; with `until_block` a single reply ends with its first code block. Raises
        CapReachedError if the deadline has passed, and RuntimeError if `generate` fails.
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
    """End a single reply after its first code block, because the model would only guess what the block prints."""

    def __init__(self, tokenizer, start: int):
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        tail = self.tokenizer.decode(input_ids[0, -4:], skip_special_tokens=True)
        reply = self.tokenizer.decode(input_ids[0, self.start :], skip_special_tokens=True) if "`" in tail else ""
        done = text.parse_reply(reply)[0] is not None
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


TASK = "recursive-text-generation"
PIPELINE_REGISTRY.register_pipeline(TASK, RlmPipeline, AutoModelForCausalLM, {"model": NoDefaultModel(TASK)}, "text")
