"""The data card of a reasoning data set: README.md with the header that the Hub reads."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .build import ReasoningInfo

COLUMNS = {
    "input_ids": "words as ids of the tokenizer beside this file: BOS, the question, EOS, padding on the right",
    "labels": "the answer that is read one place before, as causal models of transformers shift labels; -100 where "
    "nothing is asked",
    "steps": "steps that the label at the same place takes; 0 where nothing is asked",
    "difficulty": "of the whole row",
    "text": "the row for people: each word, with `=` and the answer where one is asked for",
}


def data_card(info: "ReasoningInfo", sizes: dict[str, int]) -> str:
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
    rows = "".join(f"| {name} | {count:,} | {_span(info, name)} |\n" for name, count in sizes.items())
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


def _span(info: "ReasoningInfo", split: str) -> str:
    low, high = info.difficulties(split)[0], info.difficulties(split)[-1]
    return str(low) if low == high else f"{low} to {high}"


def build_command(info: "ReasoningInfo") -> str:
    """The command that makes the set again, but for --out."""
    spans = {name: "none" if span is None else "-".join(map(str, span)) for name, span in
             {"difficulty": info.trained, "beyond": info.beyond}.items()}  # fmt: skip
    options = {"size": info.size, **spans, "answers": info.answers, "queries": info.queries}
    options |= {f"num-{name}": count for name, count in info.rows.items()} | {"seed": info.seed}
    written = (f"--{name} {value}" for name, value in options.items() if value is not None)
    return f"hrm-hf data reasoning {info.task} {' '.join(written)}"
