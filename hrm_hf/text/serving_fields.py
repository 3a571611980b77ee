"""Fields of a request to `hrm-hf serve`. All other fields are rejected, and the error names them."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model


def _not_tiny(value: float) -> float:
    if 0 < value < 1e-3:  # dividing logits by such a low temperature would overflow
        raise ValueError("must be 0 (greedy) or at least 0.001")
    return value


class Part(BaseModel):
    """A text part of a message (images and audio are rejected)."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] = []


def _schema(required: str, fields: dict[str, Any]) -> type[BaseModel]:
    kinds = {name: (kind, ...) if name == required else (kind | None, None) for name, kind in fields.items()}
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    return create_model("Body", __config__=config, **kinds)


Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Turns = Annotated[list[Message], Field(min_length=1, max_length=256)]
SAMPLING = {"temperature": Annotated[float, Field(ge=0, le=100), AfterValidator(_not_tiny)], "top_p": Share}
SHARED = SAMPLING | {
    "model": str, "stream": bool, "seed": Natural, "generation_config": str, "user": str, "metadata": dict[str, str],
}  # fmt: skip
TEXT = SHARED | {
    "max_tokens": Count, "stop": Stop | Annotated[list[Stop], Field(max_length=16)], "stream_options": dict[str, bool],
    "frequency_penalty": Annotated[float, Field(ge=-0.9, le=2)], "n": Literal[1],
}  # fmt: skip
CHAT = TEXT | {"messages": Turns, "max_completion_tokens": Count, "tools": list[dict[str, Any]]}
# Schema of each route, and fields that cap the answer length. The gate writes the effective limit to the first one.
ROUTES = {
    "/v1/completions": (_schema("prompt", TEXT | {"prompt": Text, "suffix": str}), ("max_tokens",)),
    "/v1/chat/completions": (_schema("messages", CHAT), ("max_completion_tokens", "max_tokens")),
    "/v1/responses": (
        _schema("input", SHARED | {"input": Text | Turns, "instructions": str, "max_output_tokens": Count}),
        ("max_output_tokens",),
    ),
    "/load_model": (_schema("model", {"model": str}), ()),  # the first request from `transformers chat`
}
# Fields of the JSON in `generation_config`, which `transformers chat` sends.
GENERATION = _schema("", SAMPLING | {
    "do_sample": bool, "min_p": Share, "typical_p": Share, "top_k": Natural, "no_repeat_ngram_size": Natural,
    "repetition_penalty": Annotated[float, Field(ge=0.1, le=10)], "max_new_tokens": Count, "min_new_tokens": Natural,
    "bos_token_id": Natural, "eos_token_id": Natural | list[Natural], "pad_token_id": Natural,
    "transformers_version": str, "num_segments": Count,
})  # fmt: skip


class Rejection(Exception):  # noqa: N818 - a response to a request, not a failure of the server
    """Error response to a rejected request: HTTP status, message, and the field that caused it."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers


def parse(schema: type[BaseModel], raw: bytes | str, name: str = "") -> dict[str, Any]:
    """Parse and check a JSON object (the body, or its field `name`), and return it without nulls."""
    try:
        body = json.loads(raw)
        body = {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body
        schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, [name, *first["loc"][:4]] if name else first["loc"][:4])) or "the body"
        unknown = first["type"] == "extra_forbidden"
        problem = "is not supported; remove it" if unknown else first["msg"][0].lower() + first["msg"][1:]
        raise Rejection(400, f"{place}={first['input']!r:.60}: {problem}", place) from error
    except (ValueError, RecursionError) as error:
        raise Rejection(400, f"{name or 'the body'}: must be JSON ({str(error)[:100]})", name or None) from error
    return body
