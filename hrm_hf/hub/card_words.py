"""What a model card says in words that depend on the config: what a model is for, and an example it can be given."""

import html
import json
import shlex
from pathlib import Path
from typing import Any

from ..puzzles.dataset import IDENTIFIERS_FILE


# Published as an example by many; the same puzzle is in the pipeline's documentation.
SUDOKU_9 = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
# How cells become token ids in a process without the package, and what the ids stand for.
TOKENS = {
    "sudoku": ('[1 if cell == "." else int(cell) + 1 for cell in puzzle]', "1 is a blank, d + 1 the digit d"),
    "maze": ('["?# SGo".index(cell) for cell in "".join(puzzle)]', "1 wall, 2 open, 3 start, 4 goal, 5 path"),
    "arc": (
        "[6, 7, 1] + [0] * 27 + [1, 1, 1] + [0] * 27 + [0] * 840",
        "frames of 30 x 30: 0 outside, 1 the border of the grid, c + 2 the colour c",
    ),
}
PLANNING = """It plans, writes, has the attempt checked, decides, and repairs:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

import hrm_hf
from hrm_hf.golang import best_validator

model = AutoModelForCausalLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
with best_validator() as validator:  # reads code and never runs it
    result = model.generate_with_refinement(
        ["Reverse returns s backwards."], tokenizer=tokenizer, validator=validator, max_new_tokens=100
    )
print(result.plans[0], result.codes[0], result.stopped[0])
```"""


def in_markdown(value: Any) -> str:
    """A name of somebody's as words of a line or of a cell: without HTML, links, code, cells or lines of its own."""
    text = html.escape("".join(c for c in " ".join(str(value).split()) if c.isprintable()), quote=False)
    return text.replace("|", "\\|").replace("`", "\\`").replace("](", "]\\(")


def in_code(value: Any) -> str:
    """The same between backticks, where nothing can be escaped."""
    return "".join(c for c in " ".join(str(value).split()) if c.isprintable() and c not in "`|")


def in_python(value: Any) -> str:
    """A text as a Python expression, in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)


def in_shell(value: Any) -> str:
    """A name as one word of a command that stands between backticks."""
    return in_code(shlex.quote(in_code(value)))


def words_of(config: Any, folder: Path) -> dict[str, str]:
    """Values of the placeholders that only the templates of this architecture have."""
    if config.model_type.endswith("_puzzle"):
        return _puzzle_words(config, folder)
    if config.problem_type == "regression":
        return _map_words(config)
    if config.model_type == "hrm_go_coder":
        planning = PLANNING.format(name=in_python(folder.resolve().name)) if config.tagged else ""
        return {"planning": planning or "It has no tags of a stream: it was made for raw text and cannot plan."}
    return {}


def _puzzle_words(config: Any, folder: Path) -> dict[str, str]:
    rows, ndim = config.num_puzzle_identifiers, config.puzzle_emb_ndim
    table = f"Its puzzle table of {rows:,} x {ndim} values comes on top." if ndim else "It has no puzzle table."
    tokens, meaning = TOKENS.get(config.task, ("puzzle", f"0 to {config.vocab_size - 1}, as in training"))
    return {
        "task": _task_words(config),
        "puzzle_table": table,
        "puzzle": _example_puzzle(config, folder),
        "tokens": tokens,
        "token_meaning": meaning,
    }


def _task_words(config: Any) -> str:
    if not config.grid_shape:
        return f"puzzles of {config.seq_len} tokens"
    names = {"sudoku": "Sudoku", "maze": "mazes", "arc": "ARC-AGI tasks", "generic": "puzzles"}
    return f"{names[config.task]} on boards of {config.grid_shape[0]} x {config.grid_shape[1]}"


def _example_puzzle(config: Any, folder: Path) -> str:
    """A Python expression of a puzzle that the pipeline takes."""
    if config.task == "sudoku":
        return f'"{SUDOKU_9}"' if config.seq_len == len(SUDOKU_9) else f'"1" + "." * {config.seq_len - 1}'
    if config.task == "maze":
        side = round(config.seq_len**0.5)
        rows, columns = config.grid_shape or (side, side)
        inner, edge = f'[" " * {columns}] * {rows - 2}', f'" " * {columns - 1}'
        return f'["S" + {edge}] + {inner} + [{edge} + "G"]'
    if config.task == "arc":
        pairs = '"train": [{"input": [[1, 2]], "output": [[2, 1]]}], "test": [{"input": [[4, 5]]}]'
        return f'{{{pairs}, "name": {in_python(_known_task(folder))}}}'
    return f"[1] * {config.seq_len}"


def _known_task(folder: Path) -> str:
    """Name of a task that has rows in the puzzle table."""
    from ..puzzles.arc import parse_identifier

    file = folder / IDENTIFIERS_FILE
    names = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return parse_identifier(names[1])[0] if len(names) > 1 else "task"


def _map_words(config: Any) -> dict[str, str]:
    """What a regressor was made for."""
    channels, size = config.num_map_channels, config.image_size
    bounds = config.prior_bounds or []
    ranges = [
        f"{in_markdown(name)} from {low:g} to {high:g}" for name, (low, high) in zip(config.target_names, bounds)
    ]
    return {
        "names": ", ".join(map(in_markdown, config.reported_names)),
        "python_first": in_python(config.target_names[0])[1:-1],
        "maps": f"{size} x {size} pixels" + (f" in {channels} channels" if channels > 1 else ""),
        "map_shape": f"({channels}, {size}, {size})" if channels > 1 else f"({size}, {size})",
        "mask": " and a mask of observed pixels" if config.mask_channel else "",
        "prior": " and ".join(ranges) or "no bounds",
    }
