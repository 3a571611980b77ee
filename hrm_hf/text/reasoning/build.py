"""Build the reasoning suite's data sets, as folders for `datasets.load_dataset(folder)`.

    README.md                        data card; its YAML header lists the files of each split
    data/SPLIT-00000.parquet         train, validation, test, beyond
    reasoning.json                   `ReasoningInfo` (the task and its options), and checksums of the parquet files
    tokenizer.json, ...              tokenizer of the suite, for `AutoTokenizer.from_pretrained(folder)`

`train` and `validation` mix the training difficulties. `test` has the same number of rows for each of these, `beyond`
for each higher one. Rows in a split have equal length. Columns: `input_ids` (BOS, question, EOS, padding), `labels`
(answer to predict at the previous position, or -100), `steps` (to each label), `difficulty`, and `text` (for humans).
Rows are drawn in blocks with separate seeds, so a larger split begins with the rows of a smaller one.
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
from .tasks import ID, NO_LABEL, TASKS, WORDS, Questions, Task, reasoning_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Rows = dict[str, np.ndarray]
PAD_ID = ID[PAD]
REDRAWS = 20  # maximum number of attempts to replace a training question that also occurs in another split
FILLING = {"input_ids": PAD_ID, "labels": NO_LABEL, "steps": 0}
INFO_FILE = "reasoning.json"
SPLITS = ("train", "validation", "test", "beyond")
BLOCK = 1024  # number of rows drawn with one seed


@dataclass
class ReasoningInfo:
    """Content of `reasoning.json`, which determines every row.

    Attributes:
        task: key of `TASKS`; size, answers: options of the task.
        trained: smallest and largest difficulty in training. beyond: the same for the split `beyond`, or None.
        rows: number of rows in train, in validation, and for each difficulty in test and beyond.
    """

    task: str
    size: int
    answers: str
    trained: tuple[int, int]
    beyond: tuple[int, int] | None
    rows: dict[str, int]
    seed: int

    def make_task(self) -> Task:
        """Create the task with the stored options `size` and `answers`."""
        return TASKS[self.task](size=self.size, answers=self.answers)

    def difficulties(self, split: str) -> range:
        """Return the difficulties of a split in ascending order."""
        low, high = self.trained if split != "beyond" else self.beyond or (1, 0)
        return range(low, high + 1)


@one_at_a_time
def build_reasoning(options: BuildReasoning) -> dict[str, Any]:
    """Build a data set for one task, and return its folder and the number of rows in each split.

    Raises:
        UsageError: an option does not fit the task, no questions can be drawn, or the folder has a different data set.
    """
    info, out = describe_task(options), Path(options.out)
    if (out / INFO_FILE).exists() and load_reasoning_info(out) != info:
        raise UsageError(f"out={out}: contains a data set built with other options; choose another folder", "--out")
    splits = as_usage_errors(draw_splits, info)
    from datasets import Dataset

    for name, rows in splits.items():
        columns = {key: rows[key].astype(np.int32) for key in (*FILLING, "difficulty")} | {"text": readable(rows)}
        with complete_file(out / "data" / f"{name}-00000.parquet") as stream:
            Dataset.from_dict(columns).to_parquet(stream)
    reasoning_tokenizer().save_pretrained(out)
    write_text(out / "README.md", data_card(info, list(splits)))
    content = asdict(info) | checksums_in(out, (f"data/{name}-00000.parquet" for name in splits))
    write_text(out / INFO_FILE, json.dumps(content, indent=1) + "\n")  # written last, to mark the data set as complete
    return {"out": str(out), **{f"{name}_rows": len(rows["difficulty"]) for name, rows in splits.items()}}


def describe_task(options: BuildReasoning) -> ReasoningInfo:
    """Return the task and difficulties for these options. Raise UsageError for invalid options."""
    kind = TASKS[options.task]
    size = kind.size if options.size is None else options.size
    answers = options.answers or kind.answer_kinds[0]
    if not kind.sizes[0] <= size <= kind.sizes[1]:
        low, high = kind.sizes
        raise UsageError(f"size={size}: {options.task} must have {low} to {high} {kind.size_unit}", "--size")
    if answers not in kind.answer_kinds:
        expected = " or ".join(kind.answer_kinds)
        raise UsageError(f"answers={answers!r}: must be {expected} for {options.task}", "--answers")
    most = kind(size=size, answers=answers).max_difficulty
    limit = f"{size} {kind.size_unit} allow at most {most} {kind.difficulty_unit}"
    low, high = min(kind.trained[0], most), min(kind.trained[1], most)  # the default may be too large for a small size
    if options.difficulty:
        low, high = _span(options.difficulty, "--difficulty", most, limit)
    beyond = (high + 1, min(2 * high, most)) if high < most else None
    if options.beyond == "none":
        beyond = None
    elif options.beyond is not None:
        beyond = _span(options.beyond, "--beyond", most, limit)
        if beyond[0] <= high:
            raise UsageError(f"beyond={options.beyond}: must begin above {high}, the training maximum", "--beyond")
    rows = {"train": options.num_train, "validation": options.num_validation, "test": options.num_test}
    return ReasoningInfo(options.task, size, answers, (low, high), beyond, rows, options.seed)


def _span(text: str, option: str, most: int, limit: str) -> tuple[int, int]:
    """Parse a difficulty such as "8" or "1-8". For values above `most`, raise UsageError with the text `limit`."""
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[-1]):
        raise UsageError(f"{option[2:]}={text!r}: must be a positive integer or a range, such as 8 or 1-8", option)
    if int(parts[-1]) > most:
        raise UsageError(f"{option[2:]}={text!r}: {limit}", option)
    return int(parts[0]), int(parts[-1])


# ---- rows ----


def draw_splits(info: ReasoningInfo) -> dict[str, Rows]:
    """Draw the rows of every split that is not empty.

    Training questions that occur in another split are drawn again, unless too few others have the same difficulty.
    """
    drawn = {name: draw_split(info, name) for name in SPLITS[1:]}
    splits = {name: rows for name, rows in drawn.items() if rows is not None}
    taken = {key for rows in splits.values() for key in row_keys(rows["input_ids"])}
    return {"train": draw_split(info, "train", taken), **splits}


def draw_split(info: ReasoningInfo, split: str, taken: set[bytes] = frozenset()) -> Rows | None:
    """Draw a split's rows with `draw_rows`, as int16. Return None if the split has no rows."""
    from tqdm.auto import tqdm

    task, every = info.make_task(), list(info.difficulties(split))
    mixed = split in ("train", "validation")
    parts = [(0, every)] if mixed else [(one, [one]) for one in every]  # (key for the seed, difficulties to draw)
    count = info.rows[split if mixed else "test"]
    numbers = [(*part, number) for part in parts for number in range(-(-count // BLOCK))]
    blocks = []
    for only, choice, number in tqdm(numbers, desc=f"Drawing {split}", leave=False, disable=None):
        # Draw a complete block and then cut it, so a larger split begins with the rows of a smaller one.
        rng = np.random.default_rng([info.seed, SPLITS.index(split), only, number])
        block = draw_rows(task, np.array(choice)[rng.integers(0, len(choice), BLOCK)], rng, taken)
        kept = count - number * BLOCK
        blocks.append({name: column[:kept].astype(np.int16) for name, column in block.items()})  # values fit in int16
    return stack_rows(blocks) if blocks else None


def readable(rows: Rows) -> list[str]:
    """Convert rows to text: each word, followed by `=` and its answer if it has one."""
    input_ids, answers = rows["input_ids"][:, 1:], rows["labels"][:, 1:]
    answers = np.concatenate([answers[:, 1:], np.full_like(answers[:, :1], NO_LABEL)], axis=1)
    lengths = (input_ids != PAD_ID).sum(axis=1) - 1
    return [
        " ".join(
            WORDS[word] if answer == NO_LABEL else f"{WORDS[word]}={WORDS[answer]}"
            for word, answer in zip(line[:length].tolist(), expected[:length].tolist())
        )
        for line, expected, length in zip(input_ids, answers, lengths)
    ]


def draw_rows(task: Task, difficulties: np.ndarray, rng: np.random.Generator, taken: set[bytes] = frozenset()) -> Rows:
    """Draw rows of the given difficulties, padded to the longest one.

    Args:
        difficulties: int64 [N].
        taken: `row_keys` of questions to avoid; they are drawn again, up to `REDRAWS` times.

    Returns:
        input_ids [N, T]: BOS, the words, EOS, padding. labels [N, T]: the answer that is predicted at the previous
        position (models shift labels); -100 elsewhere. steps [N, T]: steps to each label. difficulty [N]. All int64.
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
    return {name: column[order] for name, column in stack_rows(parts).items()}


def _rows_of(questions: Questions) -> Rows:
    count, length = questions.words.shape
    input_ids = np.full((count, length + 2), ID[EOS])
    input_ids[:, 0], input_ids[:, 1:-1] = ID[BOS], questions.words
    labels, steps = np.full_like(input_ids, NO_LABEL), np.zeros_like(input_ids)
    labels[:, 2:], steps[:, 2:] = questions.answers, questions.steps
    return {"input_ids": input_ids, "labels": labels, "steps": steps}


def stack_rows(parts: Sequence[Rows]) -> Rows:
    """Stack rows, padding shorter ones on the right, where a causal model does not see the padding."""
    longest = max(part["input_ids"].shape[1] for part in parts)

    def padded(column: np.ndarray, name: str) -> np.ndarray:
        if name not in FILLING:
            return column
        return np.pad(column, ((0, 0), (0, longest - column.shape[1])), constant_values=FILLING[name])

    return {name: np.concatenate([padded(part[name], name) for part in parts]) for name in parts[0]}


def row_keys(input_ids: np.ndarray) -> list[bytes]:
    """Return a hashable key for each row of ids [N, T]: its bytes without padding."""
    return [row[row != PAD_ID].astype(np.int16).tobytes() for row in input_ids]


# ---- the folder ----


def load_reasoning_info(source: str | Path) -> ReasoningInfo:
    """Load `reasoning.json` from a folder or Hub data set. Raise FileNotFoundError if it does not exist."""
    file = Path(source) / INFO_FILE
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(str(source), INFO_FILE, repo_type="dataset"))
    if not file.is_file():
        raise FileNotFoundError(
            f"{source} is not a reasoning data set, because {INFO_FILE} is missing; build one with `hrm-hf data "
            "reasoning TASK --out DIR`"
        )
    content = load_info(file)
    pairs = {name: content[name] and tuple(content[name]) for name in ("trained", "beyond")}
    return ReasoningInfo(**content | pairs)


def data_card(info: ReasoningInfo, splits: list[str]) -> str:
    """Return the text of README.md for a data set with these splits."""
    from huggingface_hub import DatasetCardData

    task = info.make_task()
    title = f"{task.title}: {info.size} {task.size_unit}"
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
        f"---\n{data}\n---\n\n# {title}\n\n{explained}\n\nBuilt by `hrm-hf data reasoning` with the options in "
        f"{INFO_FILE}. A model gives all answers in one forward pass; none is fed back. `labels` has each answer one "
        f"position after its word, `text` shows both as `word=answer`. Difficulty: {task.difficulty_unit}.\n"
    )


def validate_vocabulary(tokenizer: "PreTrainedTokenizerBase", source: str) -> None:
    """Raise ValueError unless a tokenizer has the suite's vocabulary."""
    if tokenizer.get_vocab() != ID:
        raise ValueError(
            f"{tokenizer.name_or_path or 'the tokenizer'} does not have the vocabulary of {source}; use the tokenizer "
            f"in that folder: --tokenizer_name {source}"
        )
