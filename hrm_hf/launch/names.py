"""Names for `--model` of `hrm-hf launch`, looked up without the libraries that build models, which take seconds.

A name is that of a recipe (hrm-lm-50m is training/recipes/hrm_lm_50m.yaml), of a preset of ours, or a model type of
transformers.
"""

from importlib.util import find_spec
from pathlib import Path

from ..resources import ROOT


RECIPES = ROOT / "training" / "recipes"
# Those of `planner.known_models`, which loads every architecture to find them.
MODELS = (
    "gpt2", "gpt2-125m", "hrm-lm-100m", "hrm-lm-10m-byte", "hrm-lm-1b", "hrm-lm-25m", "hrm-lm-350m", "hrm-lm-50m",
    "hrm-lm-books-cpu", "hrm-lm-loop-100m", "hrm-lm-loop-10m-byte", "hrm-lm-loop-25m", "hrm-lm-loop-50m",
    "hrm-lm-loop-books-cpu", "hrm-lm-loop-shakespeare-cpu", "hrm-lm-reasoning-cpu", "hrm-lm-shakespeare-cpu",
    "hrm-text-50m", "llama", "llama-50m", "rlm-mhc-base", "rlm-mhc-base-aligned", "rlm-mhc-large",
    "rlm-mhc-large-aligned", "rlm-mhc-small",
)  # fmt: skip


def recipe_of(model: str) -> Path | None:
    """The recipe of that name, if there is one."""
    path = RECIPES / f"{model.replace('-', '_')}.yaml"
    return path if path.exists() else None


def is_unknown(model: str) -> bool:
    """Whether nothing has that name.

    A word that stands in transformers' table of model types, here read as text, need not be one: that is for
    `planner.run_values` to say.
    """
    if model in MODELS or recipe_of(model):
        return False
    package = find_spec("transformers")
    table = Path(package.origin).parent / "models" / "auto" / "auto_mappings.py" if package else None
    return table is not None and table.is_file() and f'"{model}"' not in table.read_text(encoding="utf-8")
