"""Old import paths: what was in `hrm_hf.data` is in the room of its task, and forwarded from here for one release."""

import sys
import warnings
from importlib import import_module
from importlib.util import spec_from_loader


MOVED = {
    "answers": "text.answers",
    "arc": "puzzles.arc",
    "arc_grids": "puzzles.arc_grids",
    "arc_tasks": "puzzles.arc_tasks",
    "augment": "puzzles.augment",
    "bounded_files": "io.bounded_files",
    "byte_tokenizer": "text.byte_tokenizer",
    "cosmology": "cosmology.simulation.background",
    "cosmology_build": "cosmology.dataset.build",
    "cosmology_collator": "cosmology.dataset.collator",
    "cosmology_dataset": "cosmology.dataset.rows",
    "cosmology_fields": "cosmology.simulation.fields",
    "cosmology_files": "cosmology.dataset.files",
    "cosmology_files_dataset": "cosmology.dataset.from_files",
    "cosmology_info": "cosmology.dataset.info",
    "cosmology_legacy": "cosmology.simulation.legacy",
    "cosmology_lpt": "cosmology.simulation.lpt",
    "cosmology_maps": "cosmology.simulation.maps",
    "cosmology_shards": "cosmology.dataset.shards",
    "cosmology_survey": "cosmology.simulation.survey",
    "go_collator": "golang.data.collator",
    "go_commits": "golang.data.commits",
    "go_corruption": "golang.data.mutations",
    "go_edits": "golang.data.edits",
    "go_functions": "golang.data.functions",
    "go_hub": "golang.data.hub_sets",
    "go_plans": "golang.data.plans",
    "go_pull_requests": "golang.data.pull_requests",
    "go_records": "golang.data.records",
    "go_selection": "golang.data.selection",
    "go_sources": "golang.data.sources",
    "go_tokenizer": "golang.data.tokenizer",
    "go_trajectories": "golang.data.trajectories",
    "licences": "hub.licenses",
    "maze": "puzzles.maze",
    "original_layout": "puzzles.npy_layout",
    "puzzle_sources": "puzzles.sources",
    "puzzles": "puzzles.dataset",
    "readers": "puzzles.readers",
    "row_stream": "puzzles.dataloader",
    "sudoku": "puzzles.sudoku",
    "sudoku_rules": "puzzles.sudoku_rules",
    "text_corpus": "text.corpus",
    "text_filters": "text.filters",
    "text_packing": "text.packing",
    "text_sources": "text.sources",
}


class _Forwarding:
    """Finds and loads `hrm_hf.data.NAME` as the module that NAME is now, with a DeprecationWarning."""

    def find_spec(self, name: str, path=None, target=None):
        old = name.removeprefix(f"{__name__}.")
        return spec_from_loader(name, self) if name != old and old in MOVED else None

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        new = f"hrm_hf.{MOVED[module.__name__.removeprefix(f'{__name__}.')]}"
        warnings.warn(f"{module.__name__} is {new} now; import that", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


def __getattr__(name: str):
    if name in MOVED:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.meta_path.append(_Forwarding())
