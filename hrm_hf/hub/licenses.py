"""License detection from the license file of a folder, or from the name of a well-known data set.

Model cards state these licenses. They are not legal advice. Each Go record states its own license.
"""

import re
from contextlib import suppress
from pathlib import Path


UNKNOWN_LICENSE = "unknown"  # the Hub's name for an unstated license
NOT_STATED = "not stated"
MAX_CHARACTERS = 1_000_000  # maximum number of characters to read from a license file
SPDX = re.compile(r"SPDX-License-Identifier:\s*([\w.+-]+)")
LICENSE_FILES = (
    "LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING", "COPYING.txt", "UNLICENSE",
)  # fmt: skip
# Sentences that identify a license; the first match wins.
LICENSE_SENTENCES = (
    ("Apache-2.0", r"Apache License\s+Version 2\.0"),
    ("MPL-2.0", r"Mozilla Public License,?\s+[Vv]ersion 2\.0"),
    ("AGPL-3.0", r"GNU AFFERO GENERAL PUBLIC LICENSE"),
    ("LGPL", r"GNU LESSER GENERAL PUBLIC LICENSE"),
    ("GPL-3.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 3"),
    ("GPL-2.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 2"),
    ("MIT", r"Permission is hereby granted, free of charge, to any person obtaining a copy"),
    ("ISC", r"Permission to use, copy, modify, and(/or)? distribute this software for any purpose"),
    ("BSD-3-Clause", r"Redistribution and use in source and binary forms[\s\S]*(Neither|may not be used to endorse)"),
    ("BSD-2-Clause", r"Redistribution and use in source and binary forms"),
    ("Unlicense", r"This is free and unencumbered software released into the public domain"),
    ("CC0-1.0", r"CC0 1\.0 Universal"),
)
# Pattern for the path or name of a data set, then its name and license; the first match wins.
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


def license_of(folder: str | Path, levels: int = 2) -> str:
    """Return the SPDX name of the license in a folder or in up to `levels` parent folders, or "unknown"."""
    folder = Path(folder).resolve()
    for place in (folder, *folder.parents[:levels]):
        for name in LICENSE_FILES:
            file = place / name
            with suppress(OSError):  # skip unreadable files
                if file.is_file():
                    with open(file, encoding="utf-8", errors="replace") as stream:
                        return license_of_text(stream.read(MAX_CHARACTERS))
    return UNKNOWN_LICENSE


def license_of_text(text: str) -> str:
    """Return the SPDX name of a license text, identified by LICENSE_SENTENCES, or "unknown"."""
    if named := SPDX.search(text):
        return named[1]
    return next((name for name, sentence in LICENSE_SENTENCES if re.search(sentence, text)), UNKNOWN_LICENSE)


def known_source(source: str) -> tuple[str, str] | None:
    """Look up the name and license of a well-known data set by its path or name. Return None for other data sets."""
    return next(((name, license) for words, name, license in KNOWN if re.search(words, source, re.IGNORECASE)), None)
