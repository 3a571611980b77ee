"""Options of the commands about text: `hrm-hf serve`, `rlm`, `data reasoning`, `eval lm` and `eval reasoning`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

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
    allow_host: list[str] | None = option("Another name of this server, or *.NAME; repeat.", None)
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


@dataclass(kw_only=True)
class RlmCaps(Options):
    """Bounds of one run of a recursive language model."""

    max_turns: int = option("Replies of the root model, and of each child.", 30, min=1)
    max_sub_calls: int = option("Prompts of llm_query and rlm_query, at all depths.", 100, min=1)
    max_depth: int = option("Levels of REPLs; from 2 on, rlm_query opens a child with a REPL of its own.", 1, min=1)
    max_new_tokens: int | None = option(
        "Of each reply; 1024, or a quarter of a window below 4096, by default.", None, min=1
    )
    max_wall_seconds: float = option(
        "Of the run; the last tenth is kept for an answer asked for at the end.", 600.0, min=0.001
    )
    max_output_chars: int = option("Printed characters that the model is shown after each turn.", 20_000, min=1)
    max_answer_chars: int = option(
        "Characters of the answer; a longer one is rejected, and the model told.", 1_000_000, min=1
    )
    max_prompt_chars: int = option(
        "Characters of the prompts of one sub-call, before they are tokenized.", 20_000_000, min=1
    )
    batch_size: int = option("Prompts of llm_query_batched in one call of generate.", 16, min=1)
    seed: int = option("Seed of sampling, and of `random` in the REPL.", 0, min=0)


@dataclass(kw_only=True)
class RlmOptions(RlmCaps):
    """Options of `hrm-hf rlm`."""

    model: str = option("Checkpoint folder, or a model on the Hub; an instruct model.", argument=True)
    question: str = option("What is asked about the context.")
    context_file: Path = option("Text, or .json (a list or dict), or .jsonl (a list).")
    out: Path | None = option("Write every turn to this .jsonl file.", None)
    device: str | None = option("cpu, cuda, mps, ...; the best there is by default.", None)
    unsafe_in_process: bool = option("Run the model's code in this process, without isolation.", False)

    @property
    def caps(self) -> dict[str, Any]:
        """The fields of `RlmCaps`."""
        return {each.name: getattr(self, each.name) for each in fields(RlmCaps)}
