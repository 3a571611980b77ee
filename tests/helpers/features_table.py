"""`python tests/helpers/features_table.py` writes docs/features.md, architecture by feature, from features.yaml."""

from pathlib import Path

import every
import yaml


DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "features.md"
HEAD = """# Features

Architecture by feature: each cell names the test below `tests/` that shows it, or says why there is none. Nothing here
needs a GPU, and nothing was tried on one. Made from `docs/features.yaml`; a test checks that every named test exists.

"""


def rows() -> list[tuple[str, str, dict[str, str]]]:
    """Group, feature and the cell of each architecture.

    Raises:
        ValueError: a cell is missing, or stands for no architecture.
    """
    found = []
    for part in yaml.safe_load((DOCS / "features.yaml").read_text()):
        for group, features in part.items():
            for entry in features:
                if unknown := set(entry) - {"feature", "all", *every.ARCHITECTURES}:
                    raise ValueError(f"{entry['feature']}: {', '.join(sorted(unknown))} is no architecture")
                cells = {a: entry.get(a, entry.get("all", "")).format(a=a) for a in every.ARCHITECTURES}
                if empty := [a for a, cell in cells.items() if not cell]:
                    raise ValueError(f"{entry['feature']}: no cell for {', '.join(empty)}")
                found.append((group, entry["feature"], cells))
    return found


def page() -> str:
    """The whole page."""
    lines = [
        f"| | feature | {' | '.join(f'`{a}`' for a in every.ARCHITECTURES)} |",
        "|---" * (2 + len(every.ARCHITECTURES)) + "|",
    ]
    before = ""
    for group, feature, cells in rows():
        shown = [f"`{cell}`" if "::" in cell else cell for cell in cells.values()]
        lines.append(f"| {group if group != before else ''} | {feature} | {' | '.join(shown)} |")
        before = group
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
