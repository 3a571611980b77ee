"""Data sets of the reasoning suite: rows, splits, and a folder that `datasets.load_dataset(folder)` reads.

    README.md                        a data card; its YAML header names the files of each split
    data/SPLIT-00000.parquet         train, validation, test, beyond
    reasoning.json                   `ReasoningInfo`: the task and its options; and checksums of the parquet files
    tokenizer.json, ...              the tokenizer of the suite, for `AutoTokenizer.from_pretrained(folder)`

`train` and `validation` mix the difficulties of training, `test` has as many rows of each, and `beyond` as many of
each greater one. The rows of a split are equally long: `input_ids` (BOS, the question, EOS, padding), `labels` (the
answer that is read one place before; -100 where nothing is asked), `steps` that a label takes, `difficulty`, and
`text` for people. Rows are drawn in blocks with a seed each, so that a larger split begins with a smaller one.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io.files import checksums_in, complete_file, load_info, one_at_a_time, write_text
from ...io.usage import UsageError, as_usage_errors
from ..byte_tokenizer import BOS, EOS, PAD
from ..options import BuildReasoning
from .tasks import ID, NOT_ASKED, TASKS, WORDS, Questions, Task, reasoning_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Rows = dict[str, np.ndarray]
PAD_ID = ID[PAD]
REDRAWS = 20  # of rows that are taken
FILLING = {"input_ids": PAD_ID, "labels": NOT_ASKED, "steps": 0}
INFO_FILE = "reasoning.json"
SPLITS = ("train", "validation", "test", "beyond")
BLOCK = 1024  # rows that are drawn with one seed


@dataclass
class ReasoningInfo:
    """The content of `reasoning.json`, which determines every row.

    Attributes:
        task: a key of `TASKS`; size, answers: its options.
        trained, beyond: smallest and largest difficulty of the training data, and of the split `beyond`, None without.
        rows: of train, of validation, and of each difficulty in test and beyond.
    """

    task: str
    size: int
    answers: str
    trained: tuple[int, int]
    beyond: tuple[int, int] | None
    rows: dict[str, int]
    seed: int

    def make_task(self) -> Task:
        """The task with its options."""
        return TASKS[self.task](size=self.size, answers=self.answers)

    def difficulties(self, split: str) -> range:
        """Those of a split, ascending."""
        low, high = self.trained if split != "beyond" else self.beyond or (1, 0)
        return range(low, high + 1)


@one_at_a_time
def build_reasoning(options: BuildReasoning) -> dict[str, Any]:
    """Build a data set of one task.

    Raises:
        UsageError: options that the task does not have, that leave nothing to draw, or a folder with another data set.
    """
    info, out = describe_task(options), Path(options.out)
    if (out / INFO_FILE).exists() and load_reasoning_info(out) != info:
        raise UsageError(f"{out} already holds a data set with other options; choose another folder", "--out")
    splits = as_usage_errors(draw_splits, info)
    from datasets import Dataset

    for name, rows in splits.items():
        columns = {key: rows[key].astype(np.int32) for key in (*FILLING, "difficulty")} | {"text": readable(rows)}
        with complete_file(out / "data" / f"{name}-00000.parquet") as stream:
            Dataset.from_dict(columns).to_parquet(stream)
    reasoning_tokenizer().save_pretrained(out)
    write_text(out / "README.md", data_card(info, list(splits)))
    content = asdict(info) | checksums_in(out, (f"data/{name}-00000.parquet" for name in splits))
    write_text(out / INFO_FILE, json.dumps(content, indent=1) + "\n")  # last, when the rest is complete
    return {"out": str(out), **{f"{name}_rows": len(rows["difficulty"]) for name, rows in splits.items()}}


def describe_task(options: BuildReasoning) -> ReasoningInfo:
    """Return the task of these options and its difficulties. Raises UsageError as above."""
    kind = TASKS[options.task]
    size = kind.size if options.size is None else options.size
    answers = options.answers or kind.asks[0]
    if not kind.sizes[0] <= size <= kind.sizes[1]:
        low, high = kind.sizes
        raise UsageError(f"size={size}: {options.task} takes {low} to {high} {kind.size_is}", "--size")
    if answers not in kind.asks:
        expected = " or ".join(kind.asks)
        raise UsageError(f"answers={answers!r}: must be {expected} for {options.task}", "--answers")
    most = kind(size=size, answers=answers).most
    possible = f"{size} {kind.size_is} allow up to {most} {kind.difficulty_is}"
    low, high = min(kind.trained[0], most), min(kind.trained[1], most)  # a small size may not have all that are usual
    if options.difficulty:
        low, high = _span(options.difficulty, "--difficulty", most, possible)
    beyond = (high + 1, min(2 * high, most)) if high < most else None
    if options.beyond == "none":
        beyond = None
    elif options.beyond is not None:
        beyond = _span(options.beyond, "--beyond", most, possible)
        if beyond[0] <= high:
            raise UsageError(f"beyond={options.beyond}: must begin above {high}, the last in training", "--beyond")
    rows = {"train": options.num_train, "validation": options.num_validation, "test": options.num_test}
    return ReasoningInfo(options.task, size, answers, (low, high), beyond, rows, options.seed)


def _span(text: str, option: str, most: int, possible: str) -> tuple[int, int]:
    """Smallest and largest difficulty, from "8" or "1-8"; `possible` says why none is above `most`."""
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[-1]):
        raise UsageError(f"{option[2:]}={text!r}: must be a number from 1, as 8, or a range, as 1-8", option)
    if int(parts[-1]) > most:
        raise UsageError(f"{option[2:]}={text!r}: {possible}", option)
    return int(parts[0]), int(parts[-1])


# ---- rows ----


def draw_splits(info: ReasoningInfo) -> dict[str, Rows]:
    """Draw every split that has rows, as of `draw_split`.

    Training rows whose question is in another split are drawn again, unless the difficulty has hardly any others.
    """
    drawn = {name: draw_split(info, name) for name in SPLITS[1:]}
    splits = {name: rows for name, rows in drawn.items() if rows is not None}
    taken = {key for rows in splits.values() for key in row_keys(rows["input_ids"])}
    return {"train": draw_split(info, "train", taken), **splits}


def draw_split(info: ReasoningInfo, split: str, taken: set[bytes] = frozenset()) -> Rows | None:
    """Draw a split, as of `draw_rows` but in int16; None for one without rows."""
    from tqdm.auto import tqdm

    task, every = info.make_task(), list(info.difficulties(split))
    mixed = split in ("train", "validation")
    parts = [(0, every)] if mixed else [(one, [one]) for one in every]  # what the seed is made of, and difficulties
    count = info.rows[split if mixed else "test"]
    numbers = [(*part, number) for part in parts for number in range(-(-count // BLOCK))]
    blocks = []
    for only, choice, number in tqdm(numbers, desc=f"Drawing {split}", leave=False, disable=None):
        # A block is drawn whole and cut, so that a larger split begins with a smaller one.
        rng = np.random.default_rng([info.seed, SPLITS.index(split), only, number])
        block = draw_rows(task, np.array(choice)[rng.integers(0, len(choice), BLOCK)], rng, taken)
        kept = count - number * BLOCK
        blocks.append({name: column[:kept].astype(np.int16) for name, column in block.items()})  # words are hundreds
    return below(blocks) if blocks else None


def readable(rows: Rows) -> list[str]:
    """Rows as text: the words, each followed by `=` and the answer where one is asked for."""
    input_ids, answers = rows["input_ids"][:, 1:], rows["labels"][:, 1:]
    answers = np.concatenate([answers[:, 1:], np.full_like(answers[:, :1], NOT_ASKED)], axis=1)
    lengths = (input_ids != PAD_ID).sum(axis=1) - 1
    return [
        " ".join(
            WORDS[word] if answer == NOT_ASKED else f"{WORDS[word]}={WORDS[answer]}"
            for word, answer in zip(line[:length].tolist(), asked[:length].tolist())
        )
        for line, asked, length in zip(input_ids, answers, lengths)
    ]


def draw_rows(task: Task, difficulties: np.ndarray, rng: np.random.Generator, taken: set[bytes] = frozenset()) -> Rows:
    """Rows of given difficulties, as long as the longest of them.

    Args:
        difficulties: int64 [N].
        taken: `row_keys` of questions that are drawn again, up to `REDRAWS` times.

    Returns:
        input_ids [N, T]: BOS, the words, EOS, padding. labels [N, T]: at each place the answer that is read one place
        before, as models shift them; -100 elsewhere. steps [N, T]: of the labels. difficulty [N]. All int64.
    """
    parts, order = [], []
    for one in np.unique(difficulties):
        places = np.flatnonzero(difficulties == one)
        part = _rows_of(task.draw(int(one), len(places), rng))
        for _ in range(REDRAWS if taken else 0):
            again = [place for place, key in enumerate(row_keys(part["input_ids"])) if key in taken]
            if not again:
                break
            for name, column in _rows_of(task.draw(int(one), len(again), rng)).items():
                part[name][again] = column
        parts.append(part | {"difficulty": difficulties[places]})
        order.append(places)
    order = np.argsort(np.concatenate(order), kind="stable")
    return {name: column[order] for name, column in below(parts).items()}


def _rows_of(questions: Questions) -> Rows:
    count, length = questions.words.shape
    input_ids = np.full((count, length + 2), ID[EOS])
    input_ids[:, 0], input_ids[:, 1:-1] = ID[BOS], questions.words
    labels, steps = np.full_like(input_ids, NOT_ASKED), np.zeros_like(input_ids)
    labels[:, 2:], steps[:, 2:] = questions.answers, questions.steps
    return {"input_ids": input_ids, "labels": labels, "steps": steps}


def below(parts: Sequence[Rows]) -> Rows:
    """Stack rows, padded on the right to the longest, where a causal model cannot see it."""
    longest = max(part["input_ids"].shape[1] for part in parts)

    def padded(column: np.ndarray, name: str) -> np.ndarray:
        if name not in FILLING:
            return column
        return np.pad(column, ((0, 0), (0, longest - column.shape[1])), constant_values=FILLING[name])

    return {name: np.concatenate([padded(part[name], name) for part in parts]) for name in parts[0]}


def row_keys(input_ids: np.ndarray) -> list[bytes]:
    """For each row of ids [N, T] its words without the padding."""
    return [row[row != PAD_ID].astype(np.int16).tobytes() for row in input_ids]


# ---- the folder ----


def load_reasoning_info(source: str | Path) -> ReasoningInfo:
    """Read `reasoning.json` of a folder or of a data set on the Hub. Raises FileNotFoundError where there is none."""
    file = Path(source) / INFO_FILE
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(str(source), INFO_FILE, repo_type="dataset"))
    if not file.is_file():
        raise FileNotFoundError(
            f"{source} is no reasoning data set: {INFO_FILE} is missing. Build one with `hrm-hf data reasoning TASK "
            "--out DIR`."
        )
    content = load_info(file)
    pairs = {name: content[name] and tuple(content[name]) for name in ("trained", "beyond")}
    return ReasoningInfo(**content | pairs)


def data_card(info: ReasoningInfo, splits: list[str]) -> str:
    """README.md of a set with these splits."""
    from huggingface_hub import DatasetCardData

    task = info.make_task()
    title = f"{task.title}: {info.size} {task.size_is}"
    files = [{"split": name, "path": f"data/{name}-*.parquet"} for name in splits]
    data = DatasetCardData(
        pretty_name=title,
        license="cc0-1.0",
        task_categories=["text-generation"],
        tags=["reasoning", "synthetic", info.task],
        configs=[{"config_name": "default", "data_files": files}],
    )
    explained = "\n".join(line.strip() for line in type(task).__doc__.strip().splitlines())
    return (
        f"---\n{data}\n---\n\n# {title}\n\n{explained}\n\nMade by `hrm-hf data reasoning` with the options in "
        f"{INFO_FILE}. An answer is read in one forward pass, and none is fed back: `labels` has it one place after "
        f"its word, `text` shows both as `word=answer`. The difficulty is the number of {task.difficulty_is}.\n"
    )


def validate_vocabulary(tokenizer: "PreTrainedTokenizerBase", source: str) -> None:
    """Raise ValueError for a tokenizer that has other words than the suite."""
    if tokenizer.get_vocab() != ID:
        raise ValueError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has other words than {source}; give the tokenizer that lies "
            f"there, with --tokenizer_name {source}"
        )
