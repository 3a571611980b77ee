"""Conversations with a causal LM, several at a time: chat template, left padding, prompts that fit the model.

Left out: caches that live from turn to turn, and streaming.
"""

import time
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from transformers import StoppingCriteria, StoppingCriteriaList

from .executors import RunStopped
from .prompts import OLD_TURNS, cut_middle, drop_thinking, parse_reply, whole_text


Message = dict[str, str]
REPLY = 1024  # tokens of a reply of a model whose window does not ask for less
OWN_ARGUMENTS = ("input_ids", "attention_mask", "max_new_tokens", "max_length", "max_time", "num_return_sequences")
PLAIN_ROLES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
SHORTEST_OUTPUT = 200  # characters; nothing is cut further than that
PLAIN_STOP = "\nUser:"


class ChatModel:
    """A model and its tokenizer, asked in messages.

    Without a chat template the messages are written as text ("User: ...", "Assistant: ..."), and a reply ends where
    the model begins the next message of the user. Special tokens in a message (`<|im_end|>` in a document, say) get a
    space after their first character, so that they cannot end the message.

    Args:
        window: most tokens of prompt and reply together; by default `max_position_embeddings` of the config, if any.
        generation_kwargs: more arguments of `generate`, such as `do_sample` and `temperature`.
    """

    def __init__(self, model, tokenizer, window: int | None = None, generation_kwargs: dict[str, Any] | None = None):
        if tokenizer is None:
            raise ValueError("tokenizer=None; a recursive language model needs the tokenizer of its model")
        self.generation_kwargs = generation_kwargs or {}
        if taken := sorted(set(OWN_ARGUMENTS) & self.generation_kwargs.keys()):
            raise ValueError(f"generation_kwargs holds {taken}, which the pipeline sets itself")
        self.model, self.tokenizer = model, tokenizer
        config = model.config.get_text_config()
        self.window = getattr(config, "max_position_embeddings", None) if window is None else window
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.special = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id = next(token for token in ids if token is not None)
        self.prompt_tokens = self.new_tokens = 0

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, up to where the reply of the assistant begins."""
        messages = [{**message, "content": self._harmless(message["content"])} for message in messages]
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(PLAIN_ROLES[message["role"]] + message["content"] for message in messages)
            return self.tokenizer(f"{text}\n\nAssistant:")["input_ids"]
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError:  # some templates raise for the system role
            first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            messages = [first, *messages[2:]]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

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
            note = OLD_TURNS.format(count=dropped) if dropped else ""
            ids = self.encode([rules, {**question, "content": question["content"] + note}, *rest])
            if room is None or len(ids) <= room:
                return ids
            if len(rest) > 2:
                dropped, rest = dropped + 1, rest[2:]
            elif rest and len(rest[-1]["content"]) > SHORTEST_OUTPUT:
                text = rest[-1]["content"]
                rest = [*rest[:-1], {**rest[-1], "content": cut_middle(text, len(text) // 2)}]
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
        RunStopped where the deadline has passed or `generate` failed.
        """
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise RunStopped("max_wall_seconds")
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
            failure = RuntimeError(f"generate failed on {len(prompts)} prompts: {type(error).__name__}: {error}")
            raise RunStopped("generate failed", failure) from error
        replies = output[:, width:]
        self.prompt_tokens += sum(map(len, prompts))
        self.new_tokens += int((replies != self.pad_id).sum())
        texts = self.tokenizer.batch_decode(replies, skip_special_tokens=True)
        if self.tokenizer.chat_template is None:
            texts = [text.partition(PLAIN_STOP)[0] for text in texts]
        return [drop_thinking(text) for text in texts]

    def _harmless(self, text: str) -> str:
        text = whole_text(text)  # no tokenizer takes half a surrogate pair, which code can print
        for token in self.special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


class _AfterBlock(StoppingCriteria):
    """Ends a single reply after its first code block: what would follow is guessed output."""

    def __init__(self, tokenizer, start: int):
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        tail = self.tokenizer.decode(input_ids[0, -4:], skip_special_tokens=True)
        text = self.tokenizer.decode(input_ids[0, self.start :], skip_special_tokens=True) if "`" in tail else ""
        done = parse_reply(text).kind == "code"
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)
