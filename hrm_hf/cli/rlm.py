"""`hrm-hf rlm`: a question about a long file, answered by a recursive language model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ..io.usage import UsageError, counted
from ..text.options import RlmOptions
from .command import takes, validate_model


@takes(RlmOptions)
def rlm(options: RlmOptions, as_json: bool):
    """Answer a question about a file that is too long to read: the model writes code that looks into it.

    Example: hrm-hf rlm Qwen/Qwen3-8B --question "Who owes money to whom?" --context-file letters.txt
    """
    from ..text.rlm.executors import InProcessExecutor, MontyExecutor

    executor = InProcessExecutor(unsafe=True) if options.unsafe_in_process else MontyExecutor()
    validate_model(options.model, "LANGUAGE_MODEL")
    context = read_context(options.context_file)
    from transformers import pipeline

    from ..hub.kinds import LANGUAGE_MODEL, load_config
    from ..io.evaluation import chosen_device

    load_config(options.model, LANGUAGE_MODEL, adapters=True)
    device = chosen_device(options.device)
    ask = pipeline("recursive-text-generation", model=options.model, executor=executor, device=device)
    result = ask(options.question, context, trajectory=options.out, **options.caps)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    typer.echo(result.answer)
    counts = {"turn": result.turns, "sub-call": result.sub_calls, "token": result.tokens}
    said = ", ".join(counted(number, noun) for noun, number in counts.items())
    typer.echo(f"({result.stop_reason}; {said})", err=True)


def read_context(path: Path) -> str | list[Any] | dict[str, Any]:
    """Return the content of a file: text, JSON by its suffix .json, or a list of JSON lines by .jsonl.

    Raises:
        ValueError: the file is not what its suffix says; names the file and the line.
    """
    from ..io.files import load_json, numbered_lines, parse_json

    if not path.is_file():
        raise UsageError(f"{path}: does not exist", "--context-file")
    if path.suffix == ".json":
        return load_json(path)
    if path.suffix == ".jsonl":
        return [parse_json(line, place) for place, line in numbered_lines(path)]
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start})") from error
