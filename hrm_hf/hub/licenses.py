"""Licences of the data sets that this package is used with, as their repositories state them.

A set is known by its name or by words in its path. This is what a model card says about data; it is no legal advice,
and what is not in the table is "not stated". Licences of Go records are in the records themselves.
"""

import re


NOT_STATED = "not stated"
# Words in the path or name of a set, its name, its licence; the first that fits wins.
KNOWN = (
    (r"concept.?arc", "ConceptARC", "MIT"),
    (r"arc.?agi.?2|arc.?2\b", "ARC-AGI-2", "Apache-2.0"),
    (r"arc.?agi|arc.?1\b", "ARC-AGI-1", "Apache-2.0"),
    (r"shakespeare", "Tiny Shakespeare", "public-domain text, from a repository under MIT (karpathy/char-rnn)"),
    (r"classic.?books", "classic books in English", "public domain, as stated by mlschmitt/classic-books-markdown"),
    (r"sudoku.?hard", "Sudoku Exchange puzzle bank, diabolical", "dedicated to the public domain"),
    (r"allenai/c4\b", "C4 (allenai/c4)", "ODC-BY-1.0"),
    (r"humaneval-go-mxeval", "HumanEval Go of mxeval", "MIT"),
    (r"humaneval-go", "HumanEval Go of MultiPL-E", "BSD-3-Clause with Machine Learning Restriction: not for training"),
    (r"mbxp-go", "MBXP Go", "CC-BY-4.0, Amazon.com, Inc. or its affiliates (Athiwaratkun et al. 2023)"),
    (r"humaneval(pack|fix)-go", "HumanEvalPack Go", "MIT, built on HumanEval-X (Apache-2.0)"),
)


def known_source(source: str) -> tuple[str, str] | None:
    """Name and licence of a data set by its path or name; None for one that is not known."""
    return next(((name, licence) for words, name, licence in KNOWN if re.search(words, source, re.IGNORECASE)), None)
