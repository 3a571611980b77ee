"""Options of the commands about text: `hrm-hf serve`, `rlm`, `data reasoning`, `eval lm` and `eval reasoning`."""

from dataclasses import dataclass
from typing import Literal

from ..io.options import Options, option


@dataclass(kw_only=True)
class ServeOptions(Options):
    """Options of `hrm-hf serve`. Those from `host` on are passed to `transformers serve`."""

    model: str = option("Checkpoint folder, or a model on the Hub.", argument=True)
    max_new_tokens: int | None = option(
        "Most tokens of an answer; by default what the model's window leaves.", None, min=1
    )
    max_requests: int = option("Requests at once; further ones get 429.", 16, min=1)
    max_body_bytes: int = option("Bytes of a request's body.", 2**20, min=1)
    allow_host: list[str] | None = option("Another name of this server, or *.NAME; repeat.", None)  # noqa: RUF009
    host: str = option("Address to listen on; 0.0.0.0 is every one.", "localhost")
    port: int = option("Port to listen on.", 8000, min=1, max=65535)
    enable_cors: bool = option("Let pages of all hosts send requests.", False)
    device: str = option("auto, cpu, cuda:0, ...", "auto")
    dtype: str = option("Of the weights, such as bfloat16; auto: as they were saved.", "auto")
    attn_implementation: str | None = option("Such as sdpa or flash_attention_2.", None)
    compile: bool = option("Decode with a static cache and torch.compile.", False)
    continuous_batching: bool = option("Batch requests over a paged cache (models without recurrence).", False)
    quantization: Literal["bnb-4bit", "bnb-8bit"] | None = option("Quantize the weights with bitsandbytes.", None)
    reasoning: Literal["auto", "on", "off"] = option("Thinking, where the chat template has a switch.", "auto")
    chat_template_kwargs: str | None = option("JSON object of arguments for the chat template.", None)
    default_seed: int | None = option("Seed of sampling.", None)
    trust_remote_code: bool = option("Run model code from the Hub.", False)
    log_level: str = option("Such as info or warning.", "warning")
