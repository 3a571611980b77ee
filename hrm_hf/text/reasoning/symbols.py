"""The words of the reasoning suite, and a word-level tokenizer of them: one vocabulary for all tasks.

Ids 0..7 are the special tokens of the byte tokenizer. What `save_pretrained` writes is an ordinary fast tokenizer that
`AutoTokenizer` loads without this package; it adds nothing to a text by itself.
"""

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ..byte_tokenizer import SPECIAL_TOKENS, UNK, fast_tokenizer


MAX_NODES, MAX_ITEMS = 16, 10

BLANK = "_"  # where an answer is read
STEP = "|"  # written once for each step that is asked for
DIGITS = tuple("0123456789")
# An arrow is one word, and a node has a word as a start and another one as an answer: with two words an arrow, or one
# for both ends, small models take many times the steps to find that the answer stands beside the question.
ARROWS = tuple(f"{node}>{to}" for node in range(MAX_NODES) for to in range(MAX_NODES))
STARTS = tuple(f"from{node}" for node in range(MAX_NODES))
NODES = tuple(f"at{node}" for node in range(MAX_NODES))
SWAPS = tuple(f"x{place}" for place in range(MAX_ITEMS - 1))  # exchanges the items at two neighbouring places
TURN = "turn"  # moves every item one place on
OPENING, CLOSING = tuple("([{"), tuple(")]}")
PLUS, NOTHING, WALL, START, GOAL, PATH = "+", ".", "#", "S", "G", "o"

WORDS = (
    *SPECIAL_TOKENS, BLANK, STEP, *DIGITS, PLUS, NOTHING, *OPENING, *CLOSING, WALL, START, GOAL, PATH, TURN, *SWAPS,
    *STARTS, *NODES, *ARROWS,
)  # fmt: skip
ID = {word: number for number, word in enumerate(WORDS)}


def ids(words: tuple[str, ...]) -> np.ndarray:
    """Ids (int64) of words, to be indexed by number."""
    return np.array([ID[word] for word in words])


def reasoning_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the suite: one token for each word between spaces, `UNK` for what is no word of it."""
    backend = Tokenizer(WordLevel(ID, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast_tokenizer(backend)
