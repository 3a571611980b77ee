"""Options of `hrm-hf data sudoku`, `maze`, `arc`, `import`, `export` and of `hrm-hf convert`. Imports no torch."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..io.options import Options, option
from ..io.usage import UsageError


GENERATE = "generate"  # the source that is none
DEFAULT_CLUES = {4: 8, 6: 14, 9: 30}


@dataclass(kw_only=True)
class BuildPuzzles(Options):
    """What the builders of Sudoku and mazes share; each either generates or reads a source."""

    source: str = option("generate, a file or folder (CSV, JSONL, parquet), or hub:OWNER/NAME.", GENERATE)
    out: Path = option("Folder to write.")
    num_train: int | None = option("generate: training puzzles. [default: 1000]", None, min=0)
    num_test: int | None = option("generate: test puzzles. [default: 1000]", None, min=0)
    test_size: int | None = option("Source without a test split: last rows that become one.", None, min=1)
    test_share: float | None = option(
        "Source (or --mix) without a test split: share that becomes one, by a hash of canonical forms.", None
    )
    seed: int = option("Seed of generation, sampling and augmentation.", 0, min=0)

    generate_only: ClassVar[tuple[str, ...]] = ("num_train", "num_test")
    source_only: ClassVar[tuple[str, ...]] = ("test_size", "test_share")

    @property
    def generates(self) -> bool:
        return self.source == GENERATE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.source_only if self.generates else self.generate_only:
            if getattr(self, name) is not None:
                kind = "generated sets" if self.generates else "sets read from a source"
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} has no effect on {kind} (--source {self.source}); remove it", flag)
        if self.generates:
            self.num_train = 1000 if self.num_train is None else self.num_train
            self.num_test = 1000 if self.num_test is None else self.num_test

    def recorded(self) -> dict[str, Any]:
        """The options that decide the rows, for `puzzle.json` and the data card."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value is not None and name not in ("out", "workers")}


@dataclass(kw_only=True)
class BuildSudoku(BuildPuzzles):
    """Options of `hrm-hf data sudoku`."""

    size: int | None = option("4, 6 or 9. [default: 9 for generate, else found in the source]", None)
    clues: str | None = option("generate: given cells, as 8 or 7-10. [default: 8, 14, 30 by size]", None)
    num_aug: int = option("Symmetries added to each training puzzle.", 0, min=0)
    subsample_size: int | None = option("Source: training puzzles to draw from it.", None, min=1)
    min_difficulty: float | None = option("Source: lowest rating to keep.", None)
    mix: str | None = option("generate: a source to add; its test puzzles become the split test_mixed.", None)
    workers: int | None = option("generate: processes. [default: one for each processor]", None, min=1)

    generate_only = ("clues", "num_train", "num_test", "mix", "workers")
    source_only = ("subsample_size", "min_difficulty", "test_size", "test_share")

    def __post_init__(self) -> None:
        if self.mix is not None:
            self.source_only = tuple(name for name in self.source_only if name != "test_share")
        super().__post_init__()
        if self.generates and self.size is None:
            self.size = 9
        if self.size not in (None, *DEFAULT_CLUES):
            raise UsageError(f"size={self.size}: must be one of {list(DEFAULT_CLUES)}", "--size")
        if self.generates and self.clues is None:
            self.clues = str(DEFAULT_CLUES[self.size])
        parts = (self.clues or "0").split("-")
        if len(parts) > 2 or not all(part.isdigit() for part in parts):
            raise UsageError(f"clues={self.clues!r}: must be a number like 8 or a range like 7-10", "--clues")

    def clue_range(self) -> tuple[int, int]:
        """The lowest and the highest number of clues."""
        low, _, high = self.clues.partition("-")
        return int(low), int(high or low)


@dataclass(kw_only=True)
class BuildMaze(BuildPuzzles):
    """Options of `hrm-hf data maze`."""

    height: int | None = option("Rows. [default: 30 for generate, square mazes for a source]", None, min=3)
    width: int | None = option("Columns, as --height.", None, min=3)
    openings: float | None = option("generate: share of spare walls opened. [default: 0.05]", None, min=0, max=1)
    min_path_length: int = option("Fewest steps from S to G; 110 makes 30x30 mazes hard.", 1, min=1)
    aug: bool = option("Add the 7 other symmetries of each training maze.", False)

    generate_only = ("num_train", "num_test", "openings")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generates:
            self.height, self.width = self.height or 30, self.width or 30
            self.openings = 0.05 if self.openings is None else self.openings
        if (self.height is None) != (self.width is None):
            raise UsageError("--height and --width belong together; give both, or none for square mazes")


@dataclass(kw_only=True)
class BuildArc(Options):
    """Options of `hrm-hf data arc`."""

    sources: list[str] = option(
        "Bundles, folders or Kaggle files; PATH:SUBSET,SUBSET takes part of one.", argument=True
    )
    out: Path = option("Folder to write.")
    num_aug: int = option("Augmentations per task besides the original.", 1000, min=0)
    seed: int = option("Seed of augmentations and offsets.", 42, min=0)
    evaluate: str = option("Subsets whose test pairs form the test split, comma-separated.", "evaluation")
    train_only: bool = option("Evaluate nothing: train on all pairs.", False)


@dataclass(kw_only=True)
class ImportPuzzles(Options):
    """Options of `hrm-hf data import`."""

    source: Path = option("Folder of the original layout: identifiers.json, train/, test/.", argument=True)
    out: Path = option("Folder to write.")


@dataclass(kw_only=True)
class ExportPuzzles(Options):
    """Options of `hrm-hf data export`."""

    source: str = option("Puzzle data set: a folder of ours, or a data set on the Hub.", argument=True)
    out: Path = option("Folder to write.")


Architecture = Literal["hrm", "trm", "eqr", "se_rrm", "rlm_mhc", "hrm_lm"]  # originals that can be converted
TEXT = {  # language models, and what their conversion is
    "rlm_mhc": "it converts to ours, from one folder of weights",
    "hrm_lm": "it reads HRMText1 weights as a start for training",
}
WITH_WAY_BACK = ("hrm", "trm")


@dataclass(kw_only=True)
class ConvertCheckpoint(Options):
    """Options of `hrm-hf convert`."""

    architecture: Architecture = option("Whose checkpoint.", argument=True)
    src: str = option(
        "Folder with step_N and all_config.yaml (rlm_mhc: model.safetensors and config.yaml; hrm_lm: "
        "pytorch_model.bin and config.json), or the weights file; or the same on the Hub: OWNER/NAME, "
        "OWNER/NAME/FILE, or its address. With --to-original, ours.",
        argument=True,
    )
    out: Path = option("Folder to write.")
    to_original: bool = option("Write the original's layout from ours.", False)
    config: str | None = option(
        "The run's configuration where none lies beside the weights; or a preset of ours.", None, metavar="FILE"
    )
    revision: str | None = option("Branch, tag or sha on the Hub. [default: main]", None)
    seq_len: int | None = option("Cells of a puzzle, where neither weights nor data folder tell.", None, min=1)
    vocab_size: int | None = option("Tokens, padding and empty included, where nothing tells (se_rrm).", None, min=1)
    step: int | None = option("N of step_N: to read (largest), or to write with --to-original (0).", None, min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("seq_len", "vocab_size", "config") if getattr(self, name) is not None]
        if self.to_original and given:
            flag = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{flag} has no effect with --to-original, since our checkpoints know it; remove it")
        if self.architecture in TEXT and (self.to_original or given or self.step is not None):
            raise UsageError(f"{self.architecture} takes SRC and --out only; {TEXT[self.architecture]}")
        if self.to_original and self.architecture not in WITH_WAY_BACK:
            raise UsageError(
                f"there is no way back to {self.architecture}, only to {' and '.join(WITH_WAY_BACK)}", "--to-original"
            )
