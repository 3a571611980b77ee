"""Recursive language models (arXiv 2512.24601) over any causal LM: the prompt is a variable in a REPL.

    ask = RlmPipeline(model, tokenizer)
    ask("Which of these letters mention a debt?", context=letters).answer

The root model sees type and size of the context and what its code prints; its code may call language models on parts
of the context. What the model is told is in `prompts.py`, how it is asked in `chat.py`, where
its code runs in `executors.py`. Differences from the authors' `rlms`: local models asked in batches, an isolated
interpreter by default, an answer also when a cap is hit.

A small fresh model cannot drive this; take an instruct model that writes code.
"""

import json
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Pipeline, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from . import prompts as text
from .chat import ChatModel, Message
from .executors import CallError, Executor, MontyExecutor, RunStopped, Session
from .plain_values import UnfitValueError, cut_middle, short, whole_text


SALVAGE_SHARE = 0.1  # of max_wall_seconds, kept for the answer that is asked for when time is up


@dataclass
class RlmResult:
    """The result of a run.

    Attributes:
        answer: the answer; "" if there is none.
        finished: whether the model gave it as its answer, rather than being stopped by a cap.
        stop_reason: "answer" (the dict), "final", "final_var", or the cap that was hit ("max_turns", "max_sub_calls",
            "max_wall_seconds") and where the answer then comes from: "max_turns: answer['content'] taken",
            "max_turns: answer asked for", "max_wall_seconds: no answer".
        turns: replies of the root model. sub_calls: calls of llm_query, prompts of llm_query_batched, and rlm_query,
            at all depths.
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


@dataclass(frozen=True)
class RlmCaps:
    """Bounds of one run; see `RlmPipeline`. What is None depends on the model.

    Raises:
        ValueError: one is not above 0.
    """

    max_turns: int = 30
    max_sub_calls: int = 100
    max_depth: int = 1
    max_new_tokens: int | None = None
    max_wall_seconds: float = 600.0
    max_output_chars: int = 20_000
    max_answer_chars: int = 1_000_000
    max_prompt_chars: int = 20_000_000
    batch_size: int = 16

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is None and name == "max_new_tokens":
                continue
            kinds, what = ((int, float), "number") if name == "max_wall_seconds" else (int, "whole number")
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                raise ValueError(f"{name}={value!r}; expected a {what} above 0")


class RlmPipeline(Pipeline):
    """Answers a question about a context of any length; also `pipeline("recursive-text-generation", model=...)`.

    Args:
        model: a causal LM, or a text-generation pipeline whose model and tokenizer are taken.
        tokenizer: of the model. Without a chat template a plain one is used, see `ChatModel`.
        executor: where code runs; `MontyExecutor()` if None.
        window: most tokens of prompt and reply together, by default what the config says. When the conversation grows
            beyond it, the oldest turns are left out.
        generation_kwargs: more arguments of `generate`, for example `{"do_sample": True, "temperature": 0.7}`.

    Parameters of a call:
        question (`str`): what is asked.
        context (`str`, `list` or `dict` of plain values): what it is asked about. A string is never opened as a path.
        max_turns (`int`, 30): replies of the model; of each child too.
        max_sub_calls (`int`, 100): prompts of sub-calls, over all depths.
        max_depth (`int`, 1): 1: sub-calls are plain. 2: `rlm_query` opens a child with a REPL of its own; and so on.
        max_new_tokens (`int` or None): of each reply; by default 1024, or a quarter of a window below 4096 tokens.
        max_wall_seconds (`float`, 600): of the whole run; its last tenth is kept for the answer asked for at the end.
            It can be passed by one forward step of the model and a second of the executor.
        max_output_chars (`int`, 20000): printed characters that the model is shown after each turn.
        max_answer_chars (`int`, 1000000): of the answer; a longer one is refused, and the model told.
        max_prompt_chars (`int`, 20000000): of the prompts of one sub-call together, before they are tokenized.
        batch_size (`int`, 16): prompts of `llm_query_batched` in one call of `generate`.
        seed (`int`, 0): of sampling and of `random` in the REPL. The global state of torch is left as it was.
        trajectory (path or None): a JSONL file to write, a line for each event, flushed at once.

    Returns:
        RlmResult

    Raises:
        ImportError: no executor is given, and pydantic-monty is not installed.
        TypeError: question or context is of another type.
        ValueError: a cap is not above 0, or the question does not fit into the model.
        RuntimeError: `generate` failed.
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
        executor: Executor | None = None,
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
        self,
        question: str,
        context: str | list | dict,
        *,
        seed: int = 0,
        trajectory: str | Path | None = None,
        **caps: Any,
    ) -> RlmResult:
        """Answers one question; see the class for the parameters."""
        if not isinstance(question, str) or not question.strip():
            raise TypeError(f"question={question!r:.80}; expected a string that is not empty")
        text.validate_context(context)
        return super().__call__(_Request(question, context, RlmCaps(**caps), seed, trajectory))

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        if kwargs:
            raise TypeError(f"RlmPipeline takes no {sorted(kwargs)} here; caps belong to a call, see its docstring")
        return {}, {}, {}

    def preprocess(self, request: "_Request") -> "_Request":
        return request

    def _forward(self, request: "_Request") -> RlmResult:
        chat = ChatModel(self.model, self.tokenizer, self.window, self.generation_kwargs)
        if request.caps.max_new_tokens is None:
            request = replace(request, caps=replace(request.caps, max_new_tokens=chat.usual_reply()))
        devices = [self.device] if self.device.type == "cuda" else []
        with _Trajectory(request.trajectory) as trajectory, torch.random.fork_rng(devices):
            torch.manual_seed(request.seed)
            return _Run(chat, self.executor, request, trajectory).result()

    def postprocess(self, result: RlmResult) -> RlmResult:
        return result


@dataclass(frozen=True)
class _Request:
    """One call of the pipeline."""

    question: str
    context: Any
    caps: RlmCaps
    seed: int
    trajectory: str | Path | None


class _Trajectory:
    """Events of a run, in memory and, if a path is given, in a file."""

    def __init__(self, path: str | Path | None):
        self.events: list[dict[str, Any]] = []
        self._file = open(path, "w", encoding="utf-8") if path is not None else None
        self._start = time.monotonic()

    def add(self, event: str, depth: int, **fields: Any) -> None:
        """Appends an event; depth 0 is the root, `seconds` counts from the start of the run."""
        seconds = round(time.monotonic() - self._start, 3)
        self.events.append({"event": event, "depth": depth, "seconds": seconds, **fields})
        if self._file:
            self._file.write(json.dumps(self.events[-1]) + "\n")
            self._file.flush()

    def __enter__(self) -> "_Trajectory":
        return self

    def __exit__(self, *_) -> None:
        if self._file:
            self._file.close()


class _Output:
    """The output of a block: its first characters, and how many more there were."""

    def __init__(self, limit: int):
        self._parts, self._room, self._cut = [], limit, 0

    def write(self, printed: str) -> None:
        printed = whole_text(printed)
        kept = printed[: self._room]
        self._room -= len(kept)
        self._cut += len(printed) - len(kept)
        if kept:
            self._parts.append(kept)

    def text(self, error: str | None = None) -> str:
        """Returns the text to show; an error has room of its own: a model that is not told of it cannot mend it."""
        cut = text.CUT.format(count=self._cut) if self._cut else ""
        ending = f"\n{cut_middle(error)}" if error else ""
        return ("".join(self._parts) + cut + ending) or "(nothing)"


class _Run:
    """The state that the root and its children share: counts, deadline, model, trajectory."""

    def __init__(self, chat: ChatModel, executor: Executor, request: _Request, trajectory: _Trajectory):
        self.chat, self.executor, self.request, self.trajectory = chat, executor, request, trajectory
        self.caps = request.caps
        start = time.monotonic()
        self.last_deadline = start + self.caps.max_wall_seconds
        self.deadline = start + self.caps.max_wall_seconds * (1 - SALVAGE_SHARE)
        self.sub_calls = 0

    def result(self) -> RlmResult:
        """Runs the root."""
        request = self.request
        self.trajectory.add("caps", 0, **vars(self.caps), seed=request.seed, model=type(self.chat.model).__name__)
        root = _Level(self, request.question, request.context, depth=0)
        try:
            root.run()
        except RunStopped as stop:
            if stop.error is not None:
                self.trajectory.add("error", 0, message=str(stop.error))
                raise stop.error from stop.error.__cause__
            root.salvage(stop.reason, self.last_deadline)
        return RlmResult(
            answer=root.answer,
            finished=root.finished,
            stop_reason=root.stop_reason,
            turns=root.turns,
            sub_calls=self.sub_calls,
            tokens=self.chat.new_tokens,
            prompt_tokens=self.chat.prompt_tokens,
            trajectory=self.trajectory.events,
        )

    def spend(self, prompts: int) -> None:
        """Counts sub-calls before they are made.

        Raises:
            CallError: some are left, but not so many.
            RunStopped: none is left.
        """
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
        self.output: _Output | None = None  # of the block that is running
        description = text.describe_context(context)
        rules = text.system_prompt(
            self.caps.max_output_chars,
            self.caps.max_turns,
            self.caps.max_sub_calls,
            self.has_children,
            self.chat.room(self.caps.max_new_tokens),
        )
        self.messages: list[Message] = [
            {"role": "system", "content": rules},
            {"role": "user", "content": text.QUESTION.format(question=question, description=description)},
        ]
        self._log("start", question=question, context=description)

    def run(self) -> None:
        """Turns until the model finishes or has had all its turns; other caps raise RunStopped."""
        with closing(self._open()) as session:
            while not self.finished and self.turns < self.caps.max_turns:
                self._turn(session)
        if not self.finished:
            self.salvage("max_turns", self.shared.deadline if self.depth else self.shared.last_deadline)

    def salvage(self, reason: str, deadline: float) -> None:
        """An answer for a run that a cap has stopped: its draft, or else what the model says when asked once."""
        if self.output is not None:
            self._tell(text.OUTPUT.format(output=self.output.text(), left=0))
        if self.draft:
            self._end(self.draft, f"{reason}: answer['content'] taken")
            return
        request = text.SALVAGE.format(reason=reason, question=self.question)
        self.messages[-1] = {"role": "user", "content": f"{self.messages[-1]['content']}\n\n{request}"}
        try:
            reply = text.parse_reply(self._ask(deadline))
        except RunStopped as stop:
            if stop.error is not None:
                raise
            self._end("", f"{reason}: no answer")
            return
        answer = reply.value if reply.kind == "final" else reply.text
        self._end(answer, f"{reason}: answer asked for" if answer else f"{reason}: no answer")

    def _turn(self, session: Session) -> None:
        reply = text.parse_reply(self._ask(self.shared.deadline, until_block=True))
        self.turns += 1
        self.messages.append({"role": "assistant", "content": reply.text or "(nothing)"})
        self._log("reply", turn=self.turns, kind=reply.kind, text=reply.text)
        if reply.kind == "code":
            self._run_block(session, reply.value)
        elif reply.kind == "final":
            self._end(reply.value, "final", finished=True)
        elif reply.kind == "final_var":
            self._final_var(session, reply.value)
        else:
            self._tell(text.OPEN_BLOCK if reply.kind == "open_block" else text.NO_BLOCK)

    def _run_block(self, session: Session, code: str) -> None:
        self.output = output = _Output(self.caps.max_output_chars)
        error = session.run(code, output.write, max(self.shared.deadline - time.monotonic(), 0.01))
        self.output = None
        shown, error = output.text(error), error and cut_middle(error)
        self._log("block", turn=self.turns, output=shown, error=error)
        self._tell(text.OUTPUT.format(output=shown, left=self.caps.max_turns - self.turns))
        self._read_answer(session)

    def _read_answer(self, session: Session) -> None:
        """Takes the dict `answer`: the end if it is ready, else a draft to fall back on."""
        try:
            answer = session.variable("answer")
        except KeyError:
            answer = None
        if not isinstance(answer, dict):
            self._append(text.BAD_ANSWER)
            return
        # By the methods of dict and not of a class that the model wrote.
        ready, content = dict.get(answer, "ready"), dict.get(answer, "content", "")
        ready = isinstance(ready, (int, float)) and ready == 1
        try:
            self.draft = text.answer_text(content, self.caps.max_answer_chars)
        except UnfitValueError as error:
            if ready:
                self._append(text.UNFIT_ANSWER.format(reason=error))
            return
        if ready and self.draft:
            self._end(self.draft, "answer", finished=True)
        elif ready:
            self._append(text.BAD_ANSWER)

    def _final_var(self, session: Session, name: str) -> None:
        try:
            answer = text.answer_text(session.variable(name), self.caps.max_answer_chars)
        except KeyError:
            self._tell(text.NO_VARIABLE.format(name=short(name)))
        except UnfitValueError as error:
            self._tell(text.BAD_VARIABLE.format(name=name, reason=error))
        else:
            self._end(answer, "final_var", finished=True)

    def _llm_query(self, prompt: str) -> str:
        return self._llm_query_batched([prompt])[0]

    def _llm_query_batched(self, prompts: list[str]) -> list[str]:
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
            raise CallError(f"expected a string, or a list of strings for llm_query_batched, got {short(prompts)}")
        if not prompts:
            return []
        self._validate_size(sum(map(len, prompts)))
        room = self.chat.room(self.caps.max_new_tokens)
        encoded = [self.chat.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
        longest = max(map(len, encoded))
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
            raise CallError(f"rlm_query(question, context): the question is no string: {short(question)}")
        self._validate_size(len(question))
        try:
            text.validate_context(context)
        except TypeError as error:
            raise CallError(str(error)) from error
        self.shared.spend(1)
        child = _Level(self.shared, question, context, self.depth + 1)
        try:
            child.run()
        except ValueError as error:  # the question does not fit into the model, or the context into a REPL
            raise CallError(str(error)) from error
        return child.answer

    def _validate_size(self, chars: int) -> None:
        """Before anything is tokenized, which takes a hundred times the memory of the text."""
        if chars > self.caps.max_prompt_chars:
            raise CallError(f"the prompts have {chars} characters; at most {self.caps.max_prompt_chars}: split them")

    def _open(self) -> Session:
        functions = {"llm_query": self._llm_query, "llm_query_batched": self._llm_query_batched}
        if self.has_children:
            functions["rlm_query"] = self._rlm_query
        return self.shared.executor.open(self.context, functions, self.shared.request.seed)

    def _ask(self, deadline: float, until_block: bool = False) -> str:
        ids = self.chat.fit(self.messages, self.caps.max_new_tokens)
        return self.chat.generate([ids], self.caps.max_new_tokens, deadline, until_block)[0]

    def _tell(self, message: str) -> None:
        self.messages.append({"role": "user", "content": message})

    def _append(self, message: str) -> None:
        self.messages[-1]["content"] += f"\n\n{message}"

    def _end(self, answer: str, stop_reason: str, finished: bool = False) -> None:
        self.answer, self.stop_reason, self.finished = answer, stop_reason, finished
        self._log("end", answer=answer, finished=finished, stop_reason=stop_reason, turns=self.turns)

    def _log(self, event: str, **fields: Any) -> None:
        self.shared.trajectory.add(event, self.depth, **fields)


PIPELINE_REGISTRY.register_pipeline(
    "recursive-text-generation", RlmPipeline, pt_model=(AutoModelForCausalLM,), type="text"
)
