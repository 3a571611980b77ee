"""Data sets of the reasoning suite: rows, splits, and a folder that `datasets.load_dataset(folder)` reads.

    README.md                        a data card; its YAML header names the files, columns and sizes of each split
    data/SPLIT-00000.parquet         train, validation, test, beyond
    reasoning.json                   `ReasoningInfo`: task, options, a table of difficulties
    tokenizer.json, ...              the tokenizer of the suite, for `AutoTokenizer.from_pretrained(folder)`

`train` and `validation` mix the difficulties of training, `test` has as many rows of each, and `beyond` as many of
each greater one. The rows of a split are equally long. They are drawn in blocks with a seed each, so that a larger
split begins with a smaller one.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...io.complete_files import complete_file, write_text
from ...io.usage import UsageError, as_usage_errors
from ..options import BuildReasoning
from .rows import FILLING, PAD_ID, Rows, below, draw_rows, fingerprints, readable, wider
from .tasks import NOT_ASKED, TASKS, Task, reasoning_tokenizer


INFO_FILE = "reasoning.json"
GENERATOR_VERSION = 1  # raise it when the same seed gives other rows
SPLITS = ("train", "validation", "test", "beyond")
BLOCK = 1024  # rows that are drawn with one seed
COLUMNS = {
    "input_ids": "words as ids of the tokenizer beside this file: BOS, the question, EOS, padding on the right",
    "labels": "the answer that is read one place before, as causal models of transformers shift labels; -100 where "
    "nothing is asked",
    "steps": "steps that the label at the same place takes; 0 where nothing is asked",
    "difficulty": "of the whole row",
    "text": "the row for people: each word, with `=` and the answer where one is asked for",
}


@dataclass
class ReasoningInfo:
    """The content of `reasoning.json`.

    Attributes:
        task: a key of `TASKS`; size, answers, queries: its options.
        trained, beyond: smallest and largest difficulty of the training data, and of the split `beyond`, None without.
        rows: of train, of validation, and of each difficulty in test and beyond.
        seed, generator_version: with the above they determine every row.
        table: for each difficulty of test and beyond the words of a row, the share of the cells that the most frequent
            answer has (chance), and the share of the rows whose question is in the training data too (seen).
    """

    task: str
    size: int
    answers: str
    queries: int | None
    trained: tuple[int, int]
    beyond: tuple[int, int] | None
    rows: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    generator_version: int = GENERATOR_VERSION
    table: list[dict[str, Any]] = field(default_factory=list)

    def make_task(self) -> Task:
        """The task with its options."""
        options = {"size": self.size, "answers": self.answers}
        return TASKS[self.task](**options, **({} if self.queries is None else {"queries": self.queries}))

    def difficulties(self, split: str) -> range:
        """Those of a split, ascending."""
        low, high = self.trained if split != "beyond" else self.beyond or (1, 0)
        return range(low, high + 1)


# ---- options ----


def build_reasoning(options: BuildReasoning) -> dict[str, Any]:
    """Build a data set of one task.

    Raises:
        UsageError: options that the task does not have, that leave nothing to draw, or a folder with another data set.
    """
    info, out = describe_task(options), Path(options.out)
    if (out / INFO_FILE).exists() and replace(load_reasoning_info(out), table=[]) != info:
        raise UsageError(f"{out} already holds a data set with other options; choose another folder", "--out")
    splits = as_usage_errors(draw_splits, info)
    save_reasoning_dataset(splits, info, out)
    return {"out": str(out), **{f"{name}_rows": len(rows["difficulty"]) for name, rows in splits.items()}}


def describe_task(options: BuildReasoning) -> ReasoningInfo:
    """Return the task of these options and its difficulties, still without rows. Raises UsageError as above."""
    kind = _validated_kind(options)
    info = ReasoningInfo(
        task=options.task,
        size=options.size or kind.size,
        answers=options.answers or kind.asks[0],
        queries=options.queries,
        trained=_span(options.difficulty, "--difficulty") if options.difficulty else kind.trained,
        beyond=None,
        rows={"train": options.num_train, "validation": options.num_validation, "test": options.num_test},
        seed=options.seed,
    )
    if options.difficulty is None:  # a small size may not have all that are usual
        info.trained = tuple(min(one, info.make_task().most) for one in kind.trained)
    info.beyond = _beyond(options.beyond, info)
    return info


def _validated_kind(options: BuildReasoning) -> type[Task]:
    kind, queries = TASKS[options.task], options.queries
    low, high = kind.sizes
    size = kind.size if options.size is None else options.size
    if not low <= size <= high:
        raise UsageError(f"size={size}: {options.task} takes {low} to {high} {kind.size_is}", "--size")
    if options.answers is not None and options.answers not in kind.asks:
        expected = " or ".join(kind.asks)
        raise UsageError(f"answers={options.answers!r}: must be {expected} for {options.task}", "--answers")
    if queries is not None and not hasattr(kind, "queries"):
        raise UsageError(f"queries={queries}: has no effect on {options.task}; leave it out", "--queries")
    if queries is not None and not 1 <= queries <= size:
        raise UsageError(f"queries={queries}: must be in [1, {size}], the number of nodes", "--queries")
    return kind


def _span(text: str, option: str) -> tuple[int, int]:
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UsageError(f"{text!r}: must be a number from 1, as 8, or a range, as 1-8", option)
    low, high = int(parts[0]), int(parts[-1])
    if low > high:
        raise UsageError(f"{text!r}: must begin with the smaller number", option)
    return low, high


def _beyond(text: str | None, info: ReasoningInfo) -> tuple[int, int] | None:
    """The difficulties beyond those of training, all of them possible."""
    task, trained = info.make_task(), info.trained[1]
    possible = f"{info.size} {task.size_is} allow up to {task.most} {task.difficulty_is}"
    if trained > task.most:
        raise UsageError(f"{trained}; {possible}", "--difficulty")
    if text == "none" or (text is None and trained == task.most):
        return None
    if text is None:
        return trained + 1, min(2 * trained, task.most)
    low, high = _span(text, "--beyond")
    if low <= trained:
        raise UsageError(f"{text} begins within the training difficulties, which end at {trained}", "--beyond")
    if high > task.most:
        raise UsageError(f"{text}; {possible}", "--beyond")
    return low, high


# ---- rows ----


def draw_splits(info: ReasoningInfo) -> dict[str, Rows]:
    """The rows of every split, and `info.table`.

    Training rows whose question is in another split are drawn anew, unless the difficulty has hardly any others.

    Returns:
        by split that has rows: columns as of `draw_rows`, in int16.

    Raises:
        ValueError: there are no questions of a difficulty.
    """
    splits = {
        "validation": _draw(info, "validation", None, info.rows["validation"]),
        **{name: draw_each(info, name) for name in ("test", "beyond")},
    }
    splits = {name: rows for name, rows in splits.items() if rows is not None}
    evaluated = [fingerprints(rows["input_ids"]) for rows in splits.values()]
    evaluated = np.unique(np.concatenate([np.zeros(0, np.uint64), *evaluated]))
    train = _draw(info, "train", None, info.rows["train"], evaluated)
    info.table = _table(info, splits, np.unique(fingerprints(train["input_ids"])))
    return {"train": train, **splits}


def draw_each(info: ReasoningInfo, split: str) -> Rows | None:
    """`info.rows["test"]` rows of each difficulty of a split, as of `draw_rows`; None for none."""
    parts = [_draw(info, split, one, info.rows["test"]) for one in info.difficulties(split)]
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    widest = max(part["input_ids"].shape[1] for part in parts)
    return below(wider(part, widest) for part in parts)


def _draw(
    info: ReasoningInfo, split: str, only: int | None, count: int, taken: np.ndarray | None = None
) -> Rows | None:
    """`count` rows of `only` one difficulty, or of all difficulties of the split mixed."""
    from tqdm.auto import tqdm

    task, choice = info.make_task(), np.array(list(info.difficulties(split)) if only is None else [only])
    blocks = []
    for number in tqdm(range(-(-count // BLOCK)), desc=f"Drawing {split}", leave=False, disable=None):
        # A block is drawn whole and cut, so that a larger split begins with a smaller one.
        rng = np.random.default_rng([info.seed, SPLITS.index(split), only or 0, number])
        block = draw_rows(task, choice[rng.integers(0, len(choice), BLOCK)], rng, taken)
        kept = count - number * BLOCK
        blocks.append({name: column[:kept].astype(np.int16) for name, column in block.items()})  # words are hundreds
    if not blocks:
        return None
    widest = max(block["input_ids"].shape[1] for block in blocks)
    return below(wider(block, widest) for block in blocks)


def _table(info: ReasoningInfo, splits: dict[str, Rows], trained: np.ndarray) -> list[dict[str, Any]]:
    table = []
    for name in ("test", "beyond"):
        for one in info.difficulties(name) if name in splits else ():
            rows = splits[name]
            chosen = {column: rows[column][rows["difficulty"] == one] for column in rows}
            answers = chosen["labels"][chosen["labels"] != NOT_ASKED]
            table.append(
                {
                    "split": name,
                    "difficulty": one,
                    "rows": len(chosen["labels"]),
                    "words": int((chosen["input_ids"][0] != PAD_ID).sum()) - 2,
                    "cells": len(answers) // len(chosen["labels"]),
                    "chance": round(float(np.bincount(answers).max() / len(answers)), 4),
                    "seen": round(float(np.isin(fingerprints(chosen["input_ids"]), trained).mean()), 4),
                }
            )
    return table


# ---- the folder ----


def save_reasoning_dataset(splits: dict[str, Rows], info: ReasoningInfo, out: Path) -> None:
    """Writes the folder that the header of this module describes; `reasoning.json` last, when the rest is complete."""
    for name, rows in splits.items():
        _write_split(rows, out / "data" / f"{name}-00000.parquet")
    reasoning_tokenizer().save_pretrained(out)
    write_text(out / "README.md", data_card(info, {name: len(rows["difficulty"]) for name, rows in splits.items()}))
    write_text(out / INFO_FILE, json.dumps(asdict(info), indent=1) + "\n")


def _write_split(rows: Rows, file: Path) -> None:
    from datasets import Dataset, Features, List, Value

    lists = {name: List(Value("int32")) for name in FILLING}
    features = Features({**lists, "difficulty": Value("int32"), "text": Value("string")})
    columns = {name: rows[name].astype(np.int32) for name in (*FILLING, "difficulty")} | {"text": readable(rows)}
    with complete_file(file) as stream:
        Dataset.from_dict(columns, features=features).to_parquet(stream)


def load_reasoning_info(source: str | Path) -> ReasoningInfo:
    """Reads `reasoning.json` of a folder or of a data set on the Hub.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not what `build_reasoning` writes.
    """
    file = Path(source) / INFO_FILE
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(str(source), INFO_FILE, repo_type="dataset"))
    if not file.is_file():
        raise FileNotFoundError(
            f"{source} is no reasoning data set: {INFO_FILE} is missing. Build one with `hrm-hf data reasoning TASK "
            "--out DIR`."
        )
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or content.keys() != {one.name for one in fields(ReasoningInfo)}:
        raise ValueError(f"{file} was not written by this version; build the data set again")
    pairs = {name: tuple(content[name]) for name in ("trained", "beyond") if content[name] is not None}
    return ReasoningInfo(**content | pairs)


def data_card(info: ReasoningInfo, sizes: dict[str, int]) -> str:
    """README.md of a set.

    Args:
        sizes: rows of each split.
    """
    from huggingface_hub import DatasetCardData

    task = info.make_task()
    files = [{"split": name, "path": f"data/{name}-*.parquet"} for name in sizes]
    data = DatasetCardData(
        pretty_name=f"{task.title}: {info.size} {task.size_is}",
        license="cc0-1.0",
        task_categories=["text-generation"],
        tags=["reasoning", "synthetic", info.task],
        configs=[{"config_name": "default", "data_files": files}],
    )
    explained = "\n".join(line.strip() for line in type(task).__doc__.strip().splitlines())
    columns = "".join(f"| {name} | {what} |\n" for name, what in COLUMNS.items())
    rows = "".join(f"| {name} | {count:,} | {_shown(info, name)} |\n" for name, count in sizes.items())
    table = "".join(
        f"| {row['difficulty']} | {row['split']} | {row['rows']:,} | {row['words']} | {row['cells']} | "
        f"{row['chance']:.1%} | {row['seen']:.1%} |\n"
        for row in info.table
    )
    return (
        f"---\n{data}\n---\n\n# {task.title}: {info.size} {task.size_is}\n\n{explained}\n\n"
        "Made by a program, without text of people. An answer is read in one forward pass, and none is fed back.\n\n"
        f"| split | rows | {task.difficulty_is} |\n|---|---|---|\n{rows}\n"
        f"| column | what it is |\n|---|---|\n{columns}\n"
        f"## Difficulty\n\nThe difficulty is the number of {task.difficulty_is}. Cells are the answers of a row; "
        "chance is the share of them that the most frequent answer has; seen is the share of rows whose question is "
        "in the training data too, which happens where there are few questions.\n\n"
        f"| {task.difficulty_is} | split | rows | words | cells | chance | seen |\n{'|---' * 7}|\n{table}\n"
        f"## How it was made\n\n```bash\n{build_command(info)} --out DIR\n```\n\nThe same options give the same rows "
        f"on every machine (version {info.generator_version} of the generator).\n"
    )


def _shown(info: ReasoningInfo, split: str) -> str:
    low, high = info.difficulties(split)[0], info.difficulties(split)[-1]
    return str(low) if low == high else f"{low} to {high}"


def build_command(info: ReasoningInfo) -> str:
    """The command that makes the set again, but for --out."""
    spans = {name: "none" if span is None else "-".join(map(str, span)) for name, span in
             {"difficulty": info.trained, "beyond": info.beyond}.items()}  # fmt: skip
    options = {"size": info.size, **spans, "answers": info.answers, "queries": info.queries}
    options |= {f"num-{name}": count for name, count in info.rows.items()} | {"seed": info.seed}
    written = (f"--{name} {value}" for name, value in options.items() if value is not None)
    return f"hrm-hf data reasoning {info.task} {' '.join(written)}"
