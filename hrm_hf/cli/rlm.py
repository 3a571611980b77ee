"""`hrm-hf rlm`: a question about a long file, answered by a recursive language model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..io.words import counted
from .report import Device, usage_errors, validate_model


def rlm(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub; an instruct model.")],
    question: Annotated[str, typer.Option(help="What is asked about the context.")],
    context_file: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Text, or .json (a list or dict), or .jsonl (a list).")
    ],
    max_turns: Annotated[int, typer.Option(min=1, help="Replies of the model.")] = 30,
    max_sub_calls: Annotated[int, typer.Option(min=1, help="Calls of llm_query and rlm_query.")] = 100,
    max_depth: Annotated[int, typer.Option(min=1, help="2 or more: sub-calls may have REPLs of their own.")] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each reply. [default: 1024, or a quarter of a smaller window]")
    ] = None,
    max_wall_seconds: Annotated[float, typer.Option(min=0.001, help="Of the whole run.")] = 600.0,
    max_output_chars: Annotated[int, typer.Option(min=1, help="Printed characters shown after a turn.")] = 20_000,
    max_answer_chars: Annotated[int, typer.Option(min=1, help="Characters of the answer.")] = 1_000_000,
    max_prompt_chars: Annotated[int, typer.Option(min=1, help="Of the prompts of one sub-call.")] = 20_000_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Sub-calls at a time.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write every turn to this .jsonl file.")] = None,
    device: Device = None,
    unsafe_in_process: Annotated[
        bool, typer.Option("--unsafe-in-process", help="Run the model's code in this process, without isolation.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
):
    """Answer a question about a file that is too long to read: the model writes code that looks into it.

    Example: hrm-hf rlm Qwen/Qwen3-8B --question "Who owes money to whom?" --context-file letters.txt
    """
    from ..text.rlm.executors import InProcessExecutor, MontyExecutor

    executor = InProcessExecutor(unsafe=True) if unsafe_in_process else MontyExecutor()
    validate_model(model, "LANGUAGE_MODEL")
    context = read_context(context_file)
    from transformers import pipeline

    from ..hub.kinds import LANGUAGE_MODEL, load_config
    from ..io.evaluation import chosen_device

    with usage_errors():
        load_config(model, LANGUAGE_MODEL, adapters=True)
        device = chosen_device(device)
    result = pipeline("recursive-text-generation", model=model, executor=executor, device=device)(
        question,
        context,
        max_turns=max_turns,
        max_sub_calls=max_sub_calls,
        max_depth=max_depth,
        max_new_tokens=max_new_tokens,
        max_wall_seconds=max_wall_seconds,
        max_output_chars=max_output_chars,
        max_answer_chars=max_answer_chars,
        max_prompt_chars=max_prompt_chars,
        batch_size=batch_size,
        seed=seed,
        trajectory=out,
    )
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    typer.echo(result.answer)
    counts = {"turn": result.turns, "sub-call": result.sub_calls, "token": result.tokens}
    said = ", ".join(counted(number, noun) for noun, number in counts.items())
    typer.echo(f"({result.stop_reason}; {said})", err=True)


def read_context(path: Path) -> str | list[Any] | dict[str, Any]:
    """The content of a file: text, JSON by its suffix .json, or a list of JSON lines by .jsonl.

    Raises:
        ValueError: the file is not what its suffix says; names the file and the line.
    """
    from ..io.bounded_files import load_json
    from ..io.sources import parse_json

    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start})") from error
    if path.suffix not in (".json", ".jsonl"):
        return content
    if path.suffix == ".json":
        if not content.strip():
            raise ValueError(f"{path} is empty; expected JSON")
        return load_json(path)
    lines = enumerate(content.splitlines(), start=1)
    return [parse_json(line.encode(), f"{path}, line {number}") for number, line in lines if line.strip()]
