"""Options of `hrm-hf data go`, `go-tokenizer` and `go-prompts`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...io.evaluation import validate_files
from ...io.options import Options, option
from ...io.usage import UsageError
from ..options import GoValidator


SOURCES = (
    "DIR with Go files; std for this machine's Go installation; git:REPOSITORY for its commits; hub:NAME[:CONFIG]; "
    "prs:FILE.jsonl for pull requests."
)


@dataclass(kw_only=True)
class BuildGo(Options):
    """Options of `hrm-hf data go` and `build_records`."""

    sources: list[str] = option(SOURCES, argument=True, metavar="SOURCE")
    out: Path = option("Folder to write: train, validation and test .jsonl, report.json.")
    license: str | None = option("SPDX name, where the source does not state it.", None)
    split_by: Literal["package", "repository"] = option("What is never divided among splits.", "package")
    validation_share: float = option("Share of the groups in the validation split.", 0.05, min=0, max=1)
    test_share: float = option("Share of the groups in the test split.", 0.05, min=0, max=1)
    seed: int = option("Seed of the split and of trajectories.", 0, min=0)
    deduplicate: Literal["none", "exact", "near"] = option("Duplicates to remove; near needs datasketch.", "exact")
    near_threshold: float = option("Similarity of near duplicates.", 0.85, min=0.1, max=1)
    exclude_eval: list[Path] | None = option(
        "Evaluation file (JSON Lines); records that share 20 tokens in a row with it are dropped.", None
    )
    trajectories: int = option(
        "Also write trajectories/: so many refinement records for each record, labeled by a validator.", 0, min=0
    )
    validator: GoValidator = option("Validator of trajectories; auto: parser where Go is installed.", "auto")
    oracle: Literal["none", "types"] = option(
        "types hides the types from half of the verdicts, so that there is code to plan again; needs validator types.",
        "none",
    )
    on_bad_line: Literal["stop", "skip"] = option("What to do at a corrupt line of JSON sources.", "stop")
    text: Path | None = option("Folder for the plain files as well, {text} a line, for run_clm.py.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_share + self.test_share >= 1:
            raise UsageError(
                f"validation_share={self.validation_share}, test_share={self.test_share}: they leave nothing to train "
                "on; use shares with a sum below 1"
            )
        if self.oracle == "types" and self.validator != "types":
            raise UsageError(f"validator={self.validator!r}: --oracle types needs --validator types", "--validator")
        if self.text is not None and not any(map(is_folder, self.sources)):
            raise UsageError("text: writes the files of folders; no source is a folder with Go files", "--text")


@dataclass(kw_only=True)
class BuildGoTokenizer(Options):
    """Options of `hrm-hf data go-tokenizer` and `build_tokenizer`."""

    source: list[str] = option("DIR with Go files, std, or a .jsonl file with {text} a line; repeat for more.")
    out: Path = option("Folder to write, for AutoTokenizer.from_pretrained.")
    vocab_size: int = option("Number of ids, 43 tags and 256 bytes among them.", 16384, min=299)
    pre_tokenizer: Literal["gpt-2", "qwen2"] = option(
        "How text is split before merging, by llama.cpp's name.", "gpt-2"
    )


@dataclass(kw_only=True)
class BuildGoPrompts(Options):
    """Options of `hrm-hf data go-prompts` and `build_prompts`."""

    model: str = option("Go coder to be trained: checkpoint folder, or a model on the Hub.", argument=True)
    records: list[Path] = option("Records of hrm-hf data go; repeat for more.")
    out: Path = option("File to write, JSON Lines.")
    limit: int | None = option("Most records, taken from all over the files.", None, min=1)
    max_length: int = option("Most tokens of a prompt; records with longer ones are dropped.", 1024, min=64)
    max_reference: int | None = option(
        "Most tokens of a solution; a small model completes no longer ones, and earns no reward for them.", None, min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_files(self.records, "--records")


def is_folder(source: str) -> bool:
    """Whether a source is a folder of Go files, not commits, a data set or pull requests."""
    return source.partition(":")[0] not in ("git", "hub", "prs")
