"""The address of the repository in the notebooks: `python notebooks/badges.py` writes it into all of them.

It stands in their Colab badges and in the line that installs the package there, and it is said here alone.
"""

import re
from pathlib import Path


REPOSITORY = "OWNER/hrm_hf"
FOLDER = Path(__file__).parent
PLACES = re.compile(r"(colab\.research\.google\.com/github/|git\+https://github\.com/)[\w.-]+/[\w.-]+")


def with_address(text: str, repository: str = REPOSITORY) -> str:
    """A notebook's text with that address wherever one stands."""
    return PLACES.sub(rf"\g<1>{repository}", text)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        path.write_text(with_address(path.read_text(encoding="utf-8")), encoding="utf-8")
