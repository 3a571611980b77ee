"""How long a request's prompt is, in tokens of its model, and how long its answer may be.

The prompt is made as transformers' handlers make it (chat template, tools) and counted before they do it again, in a
thread of its own. What cannot fit by its number of characters is never given to a tokenizer.
"""

import json
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import split_model_id

from .requests import LENGTH_FIELDS, Limits, RequestRefused, validate_biases, validate_generation, wanted_tokens


NEW_TOKENS = 1024  # transformers' default where a model's own is less
NO_WINDOW = 32768  # of a model whose config and tokenizer name none


class Prompts:
    """Prompts of the models that a server has.

    Args:
        manager: transformers' loader of models. template: arguments of chat templates, from the command line.
    """

    def __init__(self, manager: ModelManager, limits: Limits, template: dict[str, Any]):
        self.manager, self.limits, self.template = manager, limits, template
        self._longest: dict[int, int] = {}

    def load(self, name: str) -> tuple[Any, Any]:
        """Model and tokenizer of a name. Raises RequestRefused (404) where there is no such model."""
        model_id, file = split_model_id(name)
        try:
            return self.manager.load_model_and_processor(self.manager.process_model_name(model_id), gguf_file=file)
        except (OSError, ValueError, AttributeError, ImportError) as error:
            raise RequestRefused(404, f"model={name!r} cannot be loaded: {error}", "model_not_found") from error

    def prepare(self, route: str, body: dict[str, Any], name: str) -> None:
        """Loads the model, counts the prompt and writes into `body` how many tokens may follow.

        Raises:
            RequestRefused: a prompt that does not fit (400), or what the template or the model refuses.
        """
        generation = validate_generation(body, self.limits)
        model, processor = self.load(name)
        tokenizer = getattr(processor, "tokenizer", processor)
        config = model.config.get_text_config()
        window = getattr(config, "max_position_embeddings", None) or min(tokenizer.model_max_length, NO_WINDOW)
        tokens = self._count(route, body, processor, tokenizer, window)
        if route not in LENGTH_FIELDS:
            return
        room = window - tokens
        if room < 1:
            raise RequestRefused(
                400, f"the prompt has {tokens:,} tokens, and the window of {name} is {window:,} with the answer; "
                f"send at most {window - 1:,}", "context_length_exceeded",
            )  # fmt: skip
        validate_biases(body, config.vocab_size)
        default = max(model.generation_config.max_new_tokens or 0, NEW_TOKENS)
        wanted = wanted_tokens(route, body, generation, tokens, default)
        body[LENGTH_FIELDS[route][0]] = min(wanted, room, self.limits.max_new_tokens or room)
        if generation:
            body["generation_config"] = json.dumps(generation)

    def _count(self, route: str, body: dict[str, Any], processor, tokenizer, window: int) -> int:
        """Tokens of the prompt."""
        if route == "/v1/completions":
            if not body["prompt"]:
                raise RequestRefused(400, 'prompt="": it is empty; write how the text begins')
            return self._tokens(body["prompt"], tokenizer, window, special=True)
        if route == "/v1/systemone":
            questions = max(len(json.dumps(one)) for one in body["questions"].values())
            return self._tokens(json.dumps(body["state"]) + " " * questions, tokenizer, window, special=True)
        is_chat = route == "/v1/chat/completions"
        messages = body["messages"] if is_chat else ResponseHandler._normalize_input(dict(body))
        self._validate_characters(sum(map(_characters, messages)), tokenizer, window)
        turns = ResponseHandler.get_processor_inputs_from_messages(
            messages, self.manager.get_model_modality(None, processor=tokenizer)
        )
        tools = body.get("tools")
        if route == "/v1/responses":
            tools = ResponseHandler._normalize_tools(tools)
        arguments = {**self.template, **(body.get("chat_template_kwargs") or {})}
        try:
            text = processor.apply_chat_template(
                turns, add_generation_prompt=True, tools=tools, tokenize=False, **arguments
            )
        except Exception as error:  # a template is a program: jinja's errors, and whatever its filters raise
            raise RequestRefused(400, f"the model's chat template refused the messages: {error}") from error
        return self._tokens(text, tokenizer, window, special=False)

    def _tokens(self, text: str, tokenizer, window: int, special: bool) -> int:
        self._validate_characters(len(text), tokenizer, window)
        return len(tokenizer(text, add_special_tokens=special).input_ids)

    def _validate_characters(self, characters: int, tokenizer, window: int) -> None:
        """Refuses what has more characters than a window of the longest tokens."""
        longest = self._longest.get(id(tokenizer))
        if longest is None:
            longest = self._longest[id(tokenizer)] = max(map(len, tokenizer.get_vocab()))
        if characters > window * longest:
            raise RequestRefused(
                400, f"the prompt has {characters:,} characters, more than {window * longest:,}: the window is "
                f"{window:,} tokens of at most {longest} characters; send a shorter one", "context_length_exceeded",
            )  # fmt: skip


def _characters(message: dict[str, Any]) -> int:
    content = message.get("content") or ""
    return len(content) if isinstance(content, str) else sum(len(part.get("text") or "") for part in content)
