"""The fields of a request to the server: types, ranges and limits, checked before a model is asked.

A wrong type or an impossible value is 422, a value above a limit 400; both name field, value, limit and mend. Fields
that are not listed here are refused by transformers' own check, and values for which it has no use are left to it.
"""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


MAX_DEPTH = 64  # of lists and objects in each other; templates and json.loads recurse
# transformers' `SequenceBiasLogitsProcessor` and OpenAI take these.
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_TOOLS = 128


class RequestRefused(Exception):  # noqa: N818 - an answer to a request, not a failure of the server
    """A request that gets an error instead of an answer; `status` and `code` are those of the answer."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of requests at the same time; each has a flag of its name.

    Attributes:
        max_body_bytes: of a request. body_seconds: until its last byte. max_new_tokens: most tokens of an answer; None
            leaves it to the model's window. max_messages: of a chat. max_stop_strings, max_stop_length: their number
            and characters. request_seconds: most time of an answer, from its turn on.
        running: answers of one model at once. waiting: requests that wait for their turn, of all models.
    """

    max_body_bytes: int = 2**21
    body_seconds: float = 30.0
    max_new_tokens: int | None = None
    max_messages: int = 256
    max_stop_strings: int = 16
    max_stop_length: int = 256
    request_seconds: float = 300.0
    running: int = 1
    waiting: int = 16


# ---- types and ranges ----

Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
# Between 0 (the likeliest token) and the least value logits become infinite.
Temperature = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=100)]
Penalty = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-1, le=2)]  # 1 + it must be positive


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Sampling(_Fields):
    """Fields of all routes."""

    model: Text | None = None
    stream: Flag | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    n: Count | None = None
    best_of: Count | None = None
    generation_config: Text | None = None


class Completion(Sampling):
    """`/v1/completions`"""

    prompt: Text
    suffix: Text | None = None
    max_tokens: Count | None = None
    stop: Text | list[Text] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Number | None = None


class Part(_Fields):
    """A part of a message; this server's models read text."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class Call(_Fields):
    """A call of a tool in an earlier answer."""

    class Function(_Fields):
        """The function that was called."""

        name: Text
        arguments: Text | dict[str, Any]

    function: Function


class Message(_Fields):
    """One turn of a chat."""

    role: Annotated[str, Field(strict=True, max_length=64)]
    content: Text | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: Text | None = None


class Chat(Sampling):
    """`/v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Text | list[Text] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Flag | Number | Text | None] | None = None


class Item(_Fields):
    """A turn, a part of one, a call or its result, as the Responses API lists them."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "text", "input_text", "output_text", None
    ] = None
    role: Annotated[str, Field(strict=True, max_length=64)] | None = None
    content: Text | list[Part | dict[Literal["type", "text"], Text]] | None = None
    text: Text | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Text | None = None


class Response(Sampling):
    """`/v1/responses`"""

    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: Flag | None = None


class Decision(_Fields):
    """`/v1/systemone`"""

    model: Text | None = None
    state: Text | dict[str, Any] | list[Any]
    questions: Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=64)]


class Generation(BaseModel):
    """The JSON text in `generation_config`, as `transformers chat` sends it: what chooses tokens and costs nothing."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    do_sample: Flag | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Natural | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=100)] | None = None
    no_repeat_ngram_size: Natural | None = None
    max_new_tokens: Count | None = None
    max_length: Count | None = None
    min_new_tokens: Natural | None = None
    min_length: Natural | None = None
    stop_strings: Text | list[Text] | None = None
    num_beams: Count | None = None
    num_return_sequences: Count | None = None
    transformers_version: Text | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    top_h: Share | None = None
    length_penalty: Number | None = None
    early_stopping: Flag | None = None
    renormalize_logits: Flag | None = None
    remove_invalid_values: Flag | None = None
    use_cache: Flag | None = None
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    suppress_tokens: Annotated[list[TokenId], Field(max_length=MAX_BIASES)] | None = None
    begin_suppress_tokens: Annotated[list[TokenId], Field(max_length=MAX_BIASES)] | None = None


ROUTES: dict[str, type[_Fields]] = {
    "/v1/completions": Completion, "/v1/chat/completions": Chat, "/v1/responses": Response, "/v1/systemone": Decision,
}  # fmt: skip
LENGTH_FIELDS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
}


# ---- checks ----


def read_body(raw: bytes) -> dict[str, Any]:
    """The object of a body. Raises RequestRefused (422) for anything else."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestRefused(422, f"the body is no UTF-8: byte {error.start} is {raw[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise RequestRefused(422, f"the body is no JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise RequestRefused(422, _too_deep()) from error
    except ValueError as error:  # NaN, or an integer of thousands of digits
        raise RequestRefused(422, f"the body is no JSON that can be read: {str(error)[:200]}") from error
    if not isinstance(body, dict):
        raise RequestRefused(422, f"the body is a JSON {type(body).__name__}; expected an object with fields")
    _validate_values(body)
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _too_deep() -> str:
    return f"lists and objects in the body are more than {MAX_DEPTH} deep; send it flatter"


def _validate_values(body: dict[str, Any]) -> None:
    """Refuses depth, numbers beyond floats, and text that is none (half a surrogate pair)."""
    layer: list[tuple[str, Any]] = [("the body", body)]
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for name, value in layer:
            if isinstance(value, dict):
                for key in value:
                    _validate_text(name, key)
                below += value.items()
            elif isinstance(value, list):
                below += [(name, one) for one in value]
            elif isinstance(value, float) and not math.isfinite(value):
                raise RequestRefused(422, f"{name}={value}: the number is too large for a float")
            elif isinstance(value, str):
                _validate_text(name, value)
        layer = below
    if layer:
        raise RequestRefused(422, _too_deep())


def _validate_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start + 1}"
        raise RequestRefused(422, f"{name!r:.60}: {place} is half a surrogate pair, which is no text") from error


def validate_types(route: str, body: dict[str, Any]) -> None:
    """Raises RequestRefused (422) where a field has another type or an impossible value."""
    _validate(ROUTES[route], body)
    for message in body.get("messages", []) if route == "/v1/chat/completions" else []:
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                _parsed("messages.tool_calls.function.arguments", arguments)
    for item in body["input"] if route == "/v1/responses" and isinstance(body["input"], list) else []:
        _validate_item(item, "role" not in body["input"][0])


def _validate_item(item: dict[str, Any], flat: bool) -> None:
    """The fields that an item of `input` of its type cannot be without."""
    kind = item.get("type")
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
    names = needed.get(kind, () if kind == "reasoning" else ("type", "text") if flat else ("role", "content"))
    for name in names:
        if item.get(name) is None:
            raise RequestRefused(422, f"input: an item of type {kind!r} has no {name}; give one")
    if kind == "function_call":
        _parsed("input.arguments", item["arguments"])


def _validate(model: type[_Fields], body: dict[str, Any], prefix: str = "") -> None:
    try:
        model.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        place = prefix + ".".join(str(part) for part in found["loc"][:6])
        value = "" if found["type"] == "missing" else f"={_short(found['input'])}"
        raise RequestRefused(422, f"{place}{value}: {found['msg'][0].lower()}{found['msg'][1:]}") from error


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parsed(name: str, text: str) -> Any:
    """JSON in a string. Raises RequestRefused (422) for none, one too deep, or one with NaN."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(422, f"{name} is no JSON that can be read: {str(error)[:100]}") from error
    _validate_values({name: value})
    return value


def validate_limits(route: str, body: dict[str, Any], limits: Limits) -> None:
    """Raises RequestRefused (400) where a request asks for more than it may; needs `validate_types`."""
    _limit("messages", len(body.get("messages") or []), limits.max_messages, "messages", "--max-messages")
    if isinstance(body.get("input"), list):
        _limit("input", len(body["input"]), limits.max_messages, "items", "--max-messages")
    _limit("tools", len(body.get("tools") or []), MAX_TOOLS, "tools")
    for name in ("n", "best_of"):
        if (body.get(name) or 1) > 1:
            raise RequestRefused(400, f"{name}={body[name]}: this server gives one choice; ask again for another")
    _validate_stop("stop", body.get("stop"), limits)
    if (temperature := body.get("temperature")) and temperature < 1e-4:
        raise RequestRefused(400, f"temperature={temperature:g} is below 0.0001; give 0 for the likeliest token")
    _limit("logit_bias", len(body.get("logit_bias") or {}), MAX_BIASES, "tokens")
    if body.get("assets"):
        raise RequestRefused(400, "assets: this server's models read text alone; leave them out")
    for name in body.get("chat_template_kwargs") or {}:
        if name in TEMPLATE_ARGUMENTS:
            raise RequestRefused(400, f"chat_template_kwargs: {name!r} is not a request's to choose; leave it out")


def _validate_stop(name: str, stop: str | list[str] | None, limits: Limits) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    _limit(name, len(stops), limits.max_stop_strings, "strings", "--max-stop-strings")
    for text in stops:
        _limit(name, len(text), limits.max_stop_length, "characters", "--max-stop-length")
        if not text:
            raise RequestRefused(422, f'{name}="": an empty stop string; leave it out')


def _limit(name: str, found: int, limit: int, what: str, option: str = "") -> None:
    if found > limit:
        mend = f", set by {option}" if option else ""
        raise RequestRefused(400, f"{name}: {found:,} {what}; the limit is {limit:,}{mend}. Send fewer")


def _template_arguments() -> frozenset[str]:
    """Returns the arguments of `apply_chat_template`, which include a template of the request's own."""
    from inspect import signature

    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    takers = (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
    found = {name for taker in takers for name in signature(taker).parameters}
    return frozenset(found | {"messages", "add_vision_id", "tokenizer_kwargs", "processor_kwargs", "num_frames"})


TEMPLATE_ARGUMENTS = _template_arguments()


def validate_generation(body: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The fields of `generation_config`, without those that are None; {} without one. Same errors as above."""
    if body.get("generation_config") is None:
        return {}
    fields = _parsed("generation_config", body["generation_config"])
    if not isinstance(fields, dict):
        raise RequestRefused(422, f"generation_config={_short(fields)}: expected the text of a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    fields.pop("_from_model_config", None)
    if unknown := sorted(set(fields) - set(Generation.model_fields)):
        raise RequestRefused(400, f"generation_config: {unknown[0]!r:.60} is not a request's to choose; leave it out")
    _validate(Generation, fields, "generation_config.")
    for name in ("num_beams", "num_return_sequences"):
        if fields.get(name, 1) != 1:
            raise RequestRefused(400, f"generation_config: {name}={_short(fields[name])}; this server takes 1 alone")
    _validate_stop("generation_config.stop_strings", fields.get("stop_strings"), limits)
    return fields


def validate_biases(body: dict[str, Any], vocabulary: int) -> None:
    """Raises RequestRefused where `logit_bias` names no token; makes its values what transformers takes."""
    biases = body.get("logit_bias") or {}
    for token, value in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise RequestRefused(422, f"logit_bias: {token!r:.40} is no token id; expected 0 to {vocabulary - 1}")
        if abs(value) > MAX_BIAS:
            allowed = f"-{MAX_BIAS:g} to {MAX_BIAS:g}"
            raise RequestRefused(422, f"logit_bias: {value:g} for token {token}; expected {allowed}")
    if biases:
        body["logit_bias"] = {token: float(value) for token, value in biases.items()}


def wanted_tokens(route: str, body: dict[str, Any], generation: dict[str, Any], prompt: int, default: int) -> int:
    """Most new tokens that a request asks for; `default` without a word of it."""
    for name in LENGTH_FIELDS[route]:
        if body.get(name) is not None:
            return body[name]
    if "max_new_tokens" in generation:
        return generation["max_new_tokens"]
    if "max_length" in generation:
        return max(1, generation["max_length"] - prompt)
    return default
