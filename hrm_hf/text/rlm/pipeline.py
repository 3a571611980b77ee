"""Recursive language models (arXiv 2512.24601) over any causal LM: the prompt is a variable in a REPL.

    ask = RlmPipeline(model, tokenizer)
    ask("Which of these letters mention a debt?", context=letters).answer

The root model sees type and size of the context and what its code prints; its code may call language models on parts
of the context (`prompts.py`: what the model is told, `chat.py`: how it is asked, `executors.py`: where its code runs).
A small fresh model cannot drive this; take an instruct model that writes code.
"""

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Pipeline, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from ..options import RlmCaps
from . import prompts as text
from .chat import ChatModel, Message
from .executors import CallError, MontyExecutor, RunStopped


SALVAGE_SHARE = 0.1  # of max_wall_seconds, kept for the answer that is asked for when time is up


@dataclass
class RlmResult:
    """The result of a run.

    Attributes:
        answer: the answer; "" if there is none.
        finished: whether the model gave it as its answer, rather than being stopped by a cap.
        stop_reason: "answer" (the dict), "final", "final_var", or the cap that was hit ("max_turns", "max_sub_calls",
            "max_wall_seconds") and where the answer then comes from, as in "max_turns: answer asked for".
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
        window: most tokens of prompt and reply together, by default what the config says. When the conversation grows
            beyond it, the oldest turns are left out.
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
        window: int | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if isinstance(model, TextGenerationPipeline):
            kwargs = {"device": model.device, **kwargs}
            model, tokenizer = model.model, tokenizer or model.tokenizer
        self.executor = MontyExecutor() if executor is None else executor
        ChatModel(model, tokenizer, window, generation_kwargs)  # so that mistakes show before the first question
        super().__init__(model, tokenizer, *args, **kwargs)
        self.window, self.generation_kwargs = window, generation_kwargs
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
            ValueError: a cap is not above 0, the context holds other values, or the question does not fit the model.
            RuntimeError: `generate` failed.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"question={question!r:.80}: must be a string that is not empty")
        text.validate_context(context)
        chat = ChatModel(self.model, self.tokenizer, self.window, self.generation_kwargs)
        caps = RlmCaps(**caps)
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

    def __init__(self, chat: ChatModel, executor, caps: RlmCaps, question: str, context: Any, path):
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
        except RunStopped as stop:
            if stop.error is not None:
                self.log("error", 0, message=str(stop.error))
                raise stop.error from stop.__cause__
            root.salvage(stop.reason, self.last_deadline)
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
        """Count sub-calls before they are made. Raise CallError for too many, RunStopped if none is left."""
        left = self.caps.max_sub_calls - self.sub_calls
        if left == 0:
            raise RunStopped("max_sub_calls")
        if prompts > left:
            raise CallError(f"{prompts} prompts, but only {left} calls of language models are left")
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
        """Take turns until the model answers or has had all its turns; other caps raise RunStopped."""
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
            reply = text.parse_reply(self._ask(deadline))
        except RunStopped as stop:
            if stop.error is not None:
                raise
            self._end("", f"{reason}: no answer")
            return
        answer = reply.value if reply.kind == "final" else reply.text
        self._end(answer, f"{reason}: answer asked for" if answer else f"{reason}: no answer")

    def _turn(self, session) -> None:
        reply = text.parse_reply(self._ask(self.shared.deadline, until_block=True))
        self.turns += 1
        self.messages.append({"role": "assistant", "content": reply.text or "(nothing)"})
        self._log("reply", turn=self.turns, kind=reply.kind, text=reply.text)
        if reply.kind == "code":
            self._run_block(session, reply.value)
            self._read_answer(session)
        elif reply.kind == "final":
            self._end(reply.value, "final", finished=True)
        elif reply.kind == "nothing":
            self._tell(text.NO_BLOCK)
        else:
            try:
                answer = text.answer_text(session.variable(reply.value), self.caps.max_answer_chars)
                self._end(answer, "final_var", finished=True)
            except KeyError:
                self._tell(text.NO_VARIABLE.format(name=text.short(reply.value)))
            except text.UnfitValueError as error:
                self._tell(text.UNFIT_ANSWER.format(reason=error))

    def _run_block(self, session, code: str) -> None:
        self.printed, self.room = [], self.caps.max_output_chars
        error = session.run(code, self._write, max(self.shared.deadline - time.monotonic(), 0.01))
        shown, self.printed = self._shown(error and text.cut_middle(error)), None
        self._log("block", turn=self.turns, output=shown, error=error)
        self._tell(text.OUTPUT.format(output=shown, left=self.caps.max_turns - self.turns))

    def _write(self, printed: str) -> None:
        if self.room > 0:
            self.printed.append(text.whole_text(printed[: self.room]))
        self.room -= len(printed)

    def _shown(self, error: str | None) -> str:
        """Return the output that the model is shown; an error has room of its own, so that the model sees it."""
        cut = text.CUT.format(count=-self.room) if self.room < 0 else ""
        return "".join(self.printed) + cut + (f"\n{error}" if error else "") or "(nothing)"

    def _read_answer(self, session) -> None:
        """Take the dict `answer`: the end if it is ready, else a draft to fall back on."""
        try:
            answer = session.variable("answer")
        except KeyError:
            answer = None
        if not isinstance(answer, dict):
            self._append(text.BAD_ANSWER)
            return
        ready, content = dict.get(answer, "ready"), dict.get(answer, "content", "")  # not by a class of the model's
        ready = isinstance(ready, (int, float)) and ready == 1
        try:
            self.draft = text.answer_text(content, self.caps.max_answer_chars)
        except text.UnfitValueError as error:
            if ready:
                self._append(text.UNFIT_ANSWER.format(reason=error))
            return
        if ready and self.draft:
            self._end(self.draft, "answer", finished=True)
        elif ready:
            self._append(text.BAD_ANSWER)

    def _llm_query_batched(self, prompts: list[str]) -> list[str]:
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
            raise CallError(
                f"expected a string, or a list of strings for llm_query_batched, not {text.short(prompts)}"
            )
        if not prompts:
            return []
        self._validate_size(sum(map(len, prompts)))
        encoded = [self.chat.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
        longest, room = max(map(len, encoded)), self.chat.room(self.caps.max_new_tokens)
        if room is not None and longest > room:
            raise CallError(f"a prompt has {longest} tokens, and the model takes {room}: split it")
        self.shared.spend(len(prompts))
        answers = []
        for start in range(0, len(encoded), self.caps.batch_size):
            batch = encoded[start : start + self.caps.batch_size]
            answers += self.chat.generate(batch, self.caps.max_new_tokens, self.shared.deadline)
        self._log("llm_query", turn=self.turns + 1, prompts=list(prompts), answers=answers)
        return answers

    def _rlm_query(self, question: str, context: Any) -> str:
        if not isinstance(question, str):
            raise CallError(f"rlm_query(question, context): the question is no string: {text.short(question)}")
        self._validate_size(len(question))
        try:
            text.validate_context(context)
            self.shared.spend(1)
            return _Level(self.shared, question, context, self.depth + 1).run()
        except ValueError as error:  # question or context does not fit
            raise CallError(str(error)) from error

    def _validate_size(self, chars: int) -> None:
        """Reject long prompts before they are tokenized, which takes a hundred times the memory of the text."""
        if chars > self.caps.max_prompt_chars:
            raise CallError(f"the prompts have {chars} characters; at most {self.caps.max_prompt_chars}: split them")

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


PIPELINE_REGISTRY.register_pipeline(
    "recursive-text-generation", RlmPipeline, pt_model=(AutoModelForCausalLM,), type="text"
)
